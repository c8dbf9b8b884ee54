"""Tokenised texts on disk: what stage=corpus writes and every other stage reads.

A folder holds `corpus.json` (whose tokenizer, which target, how it was made) and numbered shards: `00000.safetensors` with
`token_ids` `[tokens]`, `length`, `prompt_length` and `is_greedy` `[texts]`, and, if hidden states were kept,
`00000.hidden.safetensors` with one tensor `layer.<index>` `[tokens, hidden_size]` each (zero at a text's last token, which the
target never read).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from specens.errors import UserError, one_line

RUN_TOKENS = 32
"""A run of this many tokens in common is a leak of measuring text into training text."""

MANIFEST = "corpus.json"


def narrow(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that holds every id. Two bytes end at 65535, and many vocabularies do not."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class Shard:
    """Texts of one file, one after another. Arrays as in the module's docstring."""

    path: Path
    token_ids: np.ndarray
    length: np.ndarray
    prompt_length: np.ndarray
    is_greedy: np.ndarray

    @property
    def begins(self) -> np.ndarray:
        """Index of each text's first token."""
        return np.cumsum(self.length, dtype=np.int64) - self.length

    @property
    def hidden_path(self) -> Path:
        return self.path.with_suffix(".hidden.safetensors")

    def hidden(self, layers: Sequence[int]) -> Any:
        """torch tensor `[tokens, layers, hidden_size]`, memory mapped until it is stacked."""
        import torch

        with safe_open(self.hidden_path, framework="pt") as file:
            return torch.stack([file.get_tensor(f"layer.{layer}") for layer in layers], dim=1)


@dataclass(frozen=True)
class Texts:
    """A folder of texts."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, fingerprint: str | None = None, model: str | None = None) -> Texts:
        """Raises UserError when the folder is none of ours, or written with another tokenizer than `fingerprint` says, or by
        another target than `model` says (both are fingerprints).
        """
        path = Path(folder).expanduser()
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            theirs = manifest["tokenizer"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"corpus {path}: no readable {MANIFEST} ({one_line(error)}); make one with stage=corpus"
            ) from error
        if fingerprint is not None and theirs != fingerprint:
            raise UserError(
                f"corpus {path}: written with another tokenizer ({theirs}) than the target's ({fingerprint})"
            )
        author = manifest.get("model")
        if model is not None and author not in (None, model):
            raise UserError(f"corpus {path}: written by another target ({author}) than this one ({model})")
        return cls(path, manifest)

    def shard_paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.safetensors") if path.stem.isdigit())

    def shards(self) -> Iterator[Shard]:
        for path in self.shard_paths():
            yield read_shard(path)

    def num_tokens(self) -> int:
        return sum(len(shard.token_ids) for shard in self.shards())


def read_shard(path: Path) -> Shard:
    try:
        arrays = load_file(path)
        shard = Shard(path, arrays["token_ids"], arrays["length"], arrays["prompt_length"], arrays["is_greedy"])
    except Exception as error:
        raise UserError(
            f"corpus shard {path} is damaged ({one_line(error)}); delete it and run stage=corpus again"
        ) from error
    if int(shard.length.sum()) != len(shard.token_ids):
        raise UserError(f"corpus shard {path} is damaged (lengths do not add up); delete it and run stage=corpus again")
    return shard


_COEFFICIENTS = np.random.Generator(np.random.PCG64(1)).integers(0, 2**64, RUN_TOKENS, dtype=np.uint64) | np.uint64(1)


def runs_of(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """64-bit hashes of every run of RUN_TOKENS tokens."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    if len(ids) < RUN_TOKENS:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids + np.uint64(1), RUN_TOKENS)
    return (windows * _COEFFICIENTS).sum(axis=1, dtype=np.uint64)


def overlaps(token_ids: Sequence[int] | np.ndarray, runs: np.ndarray) -> bool:
    """Does a text share a run with those hashed in `runs` (ascending)?"""
    if not len(runs):
        return False
    own = runs_of(token_ids)
    places = np.searchsorted(runs, own).clip(max=len(runs) - 1)
    return bool((runs[places] == own).any())
