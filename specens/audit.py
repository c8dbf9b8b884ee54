"""python -m specens.audit <the words of specens.run>, or run=<folder>: is what was decoded the target's own text?

Exit code 0: identical, or explained by rounding, and the law is not rejected; 2: it is not lossless; 1: bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specens.config import CONF_DIR, VERSION_BASE, build, resolved
from specens.errors import DrafterError, UserError, one_line
from specens.run import BUILT, PLAIN, failing_in_one_line, quiet_libraries, run
from specens.screen import Screen

OWN = ("run", "audit")
"""The configuration's entries that are the audit's alone."""
NOT_LOSSLESS = 2


def _job_folder(finished: str | None, fresh: str) -> str:
    """Hydra's folder: an audit of a finished run leaves no run folder of its own."""
    inside = None if finished is None else Path(str(finished)).expanduser()
    return str(inside / "audit") if inside is not None and (inside / ".hydra").is_dir() else fresh


OmegaConf.register_new_resolver("specens_audit_dir", _job_folder, replace=True)


def without_own(config: DictConfig) -> DictConfig:
    """The run's part of an audit's configuration."""
    run_part = OmegaConf.masked_copy(config, [str(key) for key in config if key not in OWN])
    if isinstance(config.get("prompts"), DictConfig) and OmegaConf.is_interpolation(config.prompts, "limit"):
        run_part.prompts.limit = config.prompts.limit  # of conf/audit.yaml: it points to what is left out
    return run_part


def run_config(folder: Path) -> DictConfig:
    """The configuration of a finished run, from its folder."""
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"run={folder}: has no .hydra/config.yaml; give the folder of one run, as `run folder:` shows it"
        )
    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise UserError(f"run={folder}: {path} is not the configuration of a run")
        config = without_own(config)
        found = set(resolved(config))
    except UserError:
        raise
    except Exception as error:  # whatever YAML makes of a broken file
        raise UserError(f"run={folder}: cannot read {path}: {one_line(error)}") from error
    odd = sorted((found - {*BUILT, *PLAIN}) | ({*BUILT, "layout"} - found))
    if odd:
        raise UserError(f"run={folder}: {odd[0]} is missing or unknown in {path}; it was written by another specens")
    return config


def refuse_ignored(words: Sequence[str]) -> None:
    """With run=, the run's own configuration is taken: any other word would be ignored."""
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name != "run" and not name.startswith("audit."):
            raise UserError(f"{word}: run= takes the configuration of that run; leave it out, or leave out run=")


def audit_folder(config: DictConfig, folder: Path, options: Any, screen: Screen) -> Any:
    """Examine the texts in a run folder, which were written with `config`."""
    from specens.evidence.folder import examine_folder

    plain = resolved(config)
    parts = {name: build(config[name]) for name in ("target", "drafter", "budget", "verifier", "sampling")}
    return examine_folder(
        folder, options, screen, **parts, layout=plain["layout"], exact_width=plain.get("exact_width")
    )


def audit(config: DictConfig, folder: Path, words: Sequence[str] = ()) -> Any:
    """Audit the run that `run` names, or one that is made first, into `folder`."""
    screen, options = Screen(), build(config.audit)
    if config.run is None:
        own = without_own(config)
        run(own, folder)
    else:
        refuse_ignored(words)
        folder = Path(str(config.run)).expanduser().absolute()
        own = run_config(folder)
        go_to_origin(folder)
    try:
        done = audit_folder(own, folder, options, screen)
    except DrafterError as error:
        raise UserError(str(error)) from error
    for line in done.page().splitlines():
        screen.say(line)
    return done


def go_to_origin(folder: Path) -> None:
    """Relative paths in a run's configuration are relative to where its command was given."""
    try:
        origin = Path(str(OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.cwd))
    except Exception:  # a folder without that file, or one that was moved here: the paths may still be right
        return
    if origin.is_dir():
        os.chdir(origin)


@hydra.main(config_path=CONF_DIR, config_name="audit", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    facts = HydraConfig.get()
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(facts.mode, "interrupted; nothing was concluded"):
        quiet_libraries()
        done = audit(config, Path(facts.runtime.output_dir), list(facts.overrides.task))
        if done.is_lossless:
            return
        if facts.mode == RunMode.MULTIRUN:  # a failed job of the sweep; the others go on
            raise UserError(f"{done.verdict}: {done.folder}/audit.txt")
    sys.exit(NOT_LOSSLESS)


if __name__ == "__main__":
    main()
