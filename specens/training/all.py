"""stage=all: every stage in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specens.decoding.target import Target


@dataclass(frozen=True)
class All:
    """Stages by name, in order. What a killed run has finished is not done again."""

    stages: dict[str, Any]

    def run(self, target: Target) -> None:
        for name, stage in self.stages.items():
            print(f"stage {name}", flush=True)
            stage.run(target)
