"""What comes with the package: small, described, and whole. (That it works on its target:
models/test_default_target.py.)
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from specens.drafters.retrieval.datastore import Header, check_hash, map_tokens
from specens.drafters.trained.networks import NetworkConfig
from specens.drafters.trained.weights import SHIPPED

MOST_BYTES = 25 * 2**20
FILES = sorted(SHIPPED.glob("*/*.safetensors"))
STORES = sorted(SHIPPED.glob("*/datastore"))


def test_all_of_it_is_small():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= MOST_BYTES


def test_one_of_each_trained_kind_is_there_and_nothing_in_it_is_a_pickle():
    assert {path.stem.split("-")[0] for path in FILES} == {"distilled", "non_autoregressive"}
    assert len(STORES) == 1
    kinds = {path.suffix for path in SHIPPED.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".md", ".json", ".bin"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights_name_their_target_and_how_they_were_made_and_have_a_card(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        kept = file.get_tensor("kept_ids")
        names = [name for name in file.keys() if name != "kept_ids"]  # noqa: SIM118
        tensors = [file.get_tensor(name) for name in names]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert torch.equal(kept, kept.unique()), "ascending, each once"
    training, config = json.loads(metadata["training"]), json.loads(metadata["config"])
    assert training["corpus_tokens"] > 100_000
    assert training["command"].startswith("python -m specens.train")
    if metadata["kind"] == "non_autoregressive":
        config["hidden_layers"] = tuple(config["hidden_layers"])
        assert NetworkConfig(**config).num_positions >= 4
    card = path.with_suffix(".md").read_text(encoding="utf-8").replace(" \\\n  ", " ")
    assert metadata["target"] in card and training["command"] in card and "Apache-2.0" in card


@pytest.mark.parametrize("folder", STORES, ids=lambda path: path.parent.name)
def test_the_datastore_is_whole_and_has_a_card(folder):
    header = Header.read(folder)
    check_hash(folder, header)
    assert len(map_tokens(folder, header)) == header.num_ids > 100_000
    assert header.checksum[:16] in (folder / "README.md").read_text(encoding="utf-8")
