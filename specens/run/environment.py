"""What a run's numbers depend on besides its configuration: machine, packages, models."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specens.decoding.drafter import Drafter, facts_of
from specens.decoding.generation import eos_ids
from specens.decoding.target.target import Target


def environment(
    target: Target, facts: Mapping[str, Any], drafter: Drafter, config: GenerationConfig
) -> dict[str, Any]:
    """As plain data; `facts` are those of the loaded target (`LoadedModel.facts`)."""
    device = target.device
    packages = ("specens", "torch", "transformers", "bitsandbytes", "hydra-core", "numpy", "wandb")
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "compiled": target.compiled is not None,
        "num_threads": torch.get_num_threads(),
        "git": _git_revision(),
        "target": dict(facts),
        "drafters": facts_of(drafter),
        "eos_token_ids": list(eos_ids(config)),
        "generation_config": config.to_diff_dict(),
    }


def _git_revision() -> str | None:
    """The checkout's commit, None for an installed package."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() or None
