"""stage=all: every stage in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specens.cli import show
from specens.decoding.target.target import Target
from specens.errors import UserError


@dataclass(frozen=True)
class All:
    """Stages by name, in order. What a killed run has finished is not done again."""

    stages: dict[str, Any]

    def run(self, target: Target) -> None:
        for name, stage in self.stages.items():  # what cannot work is refused before the corpus
            with naming(name):
                getattr(stage, "check_target", lambda target: None)(target)
        for name, stage in self.stages.items():
            show(f"stage {name}")
            with naming(name):
                stage.run(target)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors name the stage, and so whose option it is: stage.stages.<name>."""
    try:
        yield
    except UserError as error:
        raise UserError(f"stage.stages.{name}: {error}") from error
