"""python -m specens.train stage=corpus|distilled|non_autoregressive|datastore|all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specens.cli import Call, command
from specens.config.build import build, refuse_unknown
from specens.config.compose import resolved
from specens.errors import UserError, one_line

if TYPE_CHECKING:
    from omegaconf import DictConfig


def train(config: DictConfig) -> Any:
    """Build everything, which checks it, then load the target and run the stage."""
    from specens.decoding.target.target import Target

    refuse_unknown(resolved(config), ("target", "stage", "folder"))
    spec, stage = build(config.target), build(config.stage)
    loaded = spec.load()
    try:
        return stage.run(Target(loaded.model, loaded.tokenizer, origin=spec))
    except OSError as error:  # a folder that cannot be written, a disk that is full
        where, why = error.filename or config.folder, error.strerror or one_line(error)
        raise UserError(f"{where}: {why}; give another folder") from error


@command("train", interrupted="interrupted; the same command resumes from what is finished")
def main(call: Call) -> None:
    train(call.config)


if __name__ == "__main__":
    main()
