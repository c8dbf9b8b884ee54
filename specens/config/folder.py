"""The configuration of a run in its folder (`.hydra`), written and read back."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from specens.config.compose import resolved
from specens.errors import UserError, one_line

OBJECTS = ("target", "drafter", "budget", "verifier", "sampling", "prompts", "tracker")
VALUES = ("layout", "baseline", "trace", "exact_width", "compiled", "metrics", "plugins")
"""The entries of a run's configuration: nodes with a `_target_`, and plain values."""


def write_overrides(config: DictConfig, folder: Path, job: DictConfig) -> None:
    """The three files that Hydra would write into `.hydra` of a job's folder, now that the folder
    is this job's own: Hydra would write them before it is known whether the folder holds a finished
    run. `job` is Hydra's own node of the configuration.
    """
    own = OmegaConf.create({"hydra": OmegaConf.to_container(job, resolve=False)})
    home = folder / ".hydra"
    home.mkdir(exist_ok=True)
    contents = (("config", config), ("hydra", own), ("overrides", job.overrides.task))
    for name, content in contents:
        (home / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def run_config(folder: Path) -> DictConfig:
    """The configuration of a finished run, from its folder. Raises UserError when it has none."""
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"run={folder}: has no .hydra/config.yaml; give the folder of one run, as `run "
            "folder:` shows it"
        )
    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise UserError(f"run={folder}: {path} is not the configuration of a run")
        config = run_part(config)
        found = set(resolved(config))
    except UserError:
        raise
    except Exception as error:  # whatever YAML makes of a broken file
        raise UserError(f"run={folder}: cannot read {path}: {one_line(error)}") from error
    odd = sorted((found - {*OBJECTS, *VALUES}) | ({*OBJECTS, "layout"} - found))
    if odd:
        raise UserError(
            f"run={folder}: {odd[0]} is missing or unknown in {path}; it was written by another "
            "specens"
        )
    return config


def run_part(config: DictConfig, own: Collection[str] = ("run", "audit")) -> DictConfig:
    """What of a command's configuration describes a run: all but the command's `own` entries."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in own])


def launch_folder(folder: Path) -> Path | None:
    """Where the command of a finished run was given, which its relative paths are relative to;
    None for a folder that does not say, or one that was moved to another machine.
    """
    try:
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
        origin = Path(str(hydra.runtime.cwd))
    except Exception:  # the file is missing or broken: the paths may still be right
        return None
    return origin if origin.is_dir() else None
