"""python -m specens.train stage=corpus|distilled|non_autoregressive|datastore|all: make prophets for a target."""

from __future__ import annotations

import os
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specens.config import CONF_DIR, VERSION_BASE, build, resolved
from specens.errors import UserError, one_line
from specens.run import failing_in_one_line, quiet_libraries

ENTRIES = ("target", "stage", "folder")


def train(config: DictConfig) -> Any:
    """Build everything, which checks it, then load the target and run the stage."""
    from specens.decoding.target import Target

    unknown = sorted(set(resolved(config)) - set(ENTRIES))
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; there are {', '.join(ENTRIES)}")
    spec, stage = build(config.target), build(config.stage)
    loaded = spec.load()
    try:
        return stage.run(Target(loaded.model, loaded.tokenizer, origin=spec))
    except OSError as error:  # a folder that cannot be written, a disk that is full
        raise UserError(
            f"{error.filename or config.folder}: {error.strerror or one_line(error)}; give another folder"
        ) from error


@hydra.main(config_path=CONF_DIR, config_name="train", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(HydraConfig.get().mode, "interrupted; the same command goes on from what is finished"):
        quiet_libraries()
        train(config)


if __name__ == "__main__":
    main()
