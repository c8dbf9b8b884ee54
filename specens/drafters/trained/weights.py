"""Trained weights of drafters: one safetensors file each, which names its target.

The file's metadata holds the drafter's kind, the fingerprint of the target it was trained for, the
sizes, and how it was made. Those for the default target come with the package, under
`specens/weights/`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specens.errors import UserError, one_line
from specens.records.files import write_whole

SHIPPED = Path(__file__).parents[2] / "weights"
FORMAT = "1"


@dataclass(frozen=True)
class Trained:
    """The contents of a weights file. `config` are the sizes, `training` is how it was made (data,
    tokens, seed, results).
    """

    kind: str
    target: str
    config: dict[str, Any]
    training: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    path: Path | None = None

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises UserError when the numbers are not finite: a training that
        diverged replaces nothing.
        """
        if not all(bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            problem = "the training diverged (weights are not finite); lower its learning rate"
            raise UserError(f"{path}: not written, {problem}")
        metadata = {"specens": FORMAT, "kind": self.kind, "target": self.target}
        metadata |= {"checksum": checksum(self.tensors)}
        metadata |= {"config": json.dumps(self.config), "training": json.dumps(self.training)}
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        write_whole(path.parent, {path.name: lambda partial: save_file(tensors, partial, metadata)})


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of all numbers, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        numbers = tensors[name].detach().contiguous().cpu().reshape(-1)
        digest.update(name.encode() + numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: Any) -> str:
    """A hash by which weights find the model they were trained for: of the signs of its input
    embeddings (64 rows of them).

    Signs survive a change of dtype and quantisation, which leaves embeddings as they are; another
    model, or one whose embeddings were trained further, has others.
    """
    weight = model.get_input_embeddings().weight
    rows = torch.linspace(0, len(weight) - 1, min(64, len(weight))).long()
    signs = (weight.detach()[rows.to(weight.device)].float() > 0).cpu().numpy()
    return hashlib.sha256(repr(tuple(weight.shape)).encode() + signs.tobytes()).hexdigest()[:16]


def load_trained(kind: str, weights: str | None, model: Any) -> Trained:
    """The weights of a drafter `kind` for `model`: from the file `weights`, None for those that
    come with the package.

    Raises UserError when there are none, or when the file is damaged, of another kind, or made for
    another target.
    """
    fingerprint = model_fingerprint(model)
    if weights is None:
        for path in sorted(SHIPPED.glob("*/*.safetensors")):
            if _describes(path, kind, fingerprint):
                return _read(path)
        raise UserError(
            f"drafter {kind}: no weights for this target come with specens; train some (python -m "
            f"specens.train stage={kind}) and give their file as weights=..., or use "
            "drafter=untrained"
        )
    path = Path(weights).expanduser()
    found = _read(path)
    if found.kind != kind:
        problem = f"holds weights for drafter={found.kind}; give others, or use them with that"
        raise UserError(f"drafter {kind}: {path} {problem}")
    if found.target != fingerprint:
        raise UserError(
            f"drafter {kind}: {path} was trained for another target (fingerprint {found.target}, "
            f"this target has {fingerprint}); train one for it with python -m specens.train "
            f"stage={kind}"
        )
    return found


def check_weights_path(kind: str, weights: str | None) -> None:
    """Before any model is loaded: the file must at least exist."""
    if weights is not None and not Path(str(weights)).expanduser().is_file():
        problem = f"the weights file {weights} does not exist; give one made by stage={kind}"
        raise UserError(f"drafter {kind}: {problem}")


def _describes(path: Path, kind: str, fingerprint: str) -> bool:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return metadata.get("kind") == kind and metadata.get("target") == fingerprint


def _read(path: Path) -> Trained:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        problem = f"not a readable safetensors file ({one_line(error)}); give another file"
        raise UserError(f"weights {path}: {problem}") from error
    if metadata.get("specens") != FORMAT:
        problem = "not a drafter's weights of this version of specens; give another file"
        raise UserError(f"weights {path}: {problem}")
    if metadata.get("checksum") != checksum(tensors):
        problem = "damaged (their hash is not the one in the file); give another file"
        raise UserError(f"weights {path}: {problem}")
    config, training = (json.loads(metadata.get(name, "{}")) for name in ("config", "training"))
    return Trained(metadata["kind"], metadata["target"], config, training, tensors, path)
