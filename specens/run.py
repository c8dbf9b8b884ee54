"""The main door: python -m specens.run drafter=ensemble prompts=demo ...

Everything on the command line is Hydra's: `--multirun` sweeps, `--cfg job` shows the configuration, `--help` the options.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from specens.config import CONF_DIR, VERSION_BASE, build, refuse_unknown, resolved, write_words
from specens.errors import UserError
from specens.records import RunWriter

if TYPE_CHECKING:
    from specens.job import Job

BUILT = ("target", "drafter", "budget", "verifier", "sampling", "prompts", "tracker")
PLAIN = ("layout", "baseline", "trace", "exact_width", "compiled")
"""The configuration's entries: objects to build, and plain words."""


def run(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Run one job into `folder` and return its summary."""
    from specens.experiment import run_job
    from specens.screen import Screen

    writer, screen = RunWriter(folder), Screen()
    write_words(config, folder)
    try:
        job = job_of(config)
    except UserError as error:
        writer.write_summary({"status": "failed", "error": str(error)})
        raise
    summary = run_job(job, writer, resolved(config), screen)
    screen.summary(summary, folder)
    return summary


def job_of(config: DictConfig) -> Job:
    """What `config` describes, built and checked, with no model loaded."""
    from specens.job import Job

    plain = resolved(config)
    refuse_unknown(plain, (*BUILT, *PLAIN))
    parts: dict[str, Any] = {name: build(config.get(name)) for name in BUILT}
    parts |= {name: plain.get(name) for name in PLAIN}
    return Job(**parts)


def quiet_libraries() -> None:
    """A run's own lines are what the terminal is for: no loading bars, and warnings go to the job's log."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    logging.captureWarnings(True)


def refuse_sweep(mode: RunMode | None) -> None:
    """For doors whose jobs would write the same files."""
    if mode == RunMode.MULTIRUN:
        raise UserError(
            "no --multirun here: the jobs would overwrite each other's files; give the command once for each"
        )


@contextmanager
def failing_in_one_line(mode: RunMode | None, interrupted: str) -> Iterator[None]:
    """What every door does with errors: the user's own in one line and exit code 1, Ctrl-C with 130."""
    try:
        yield
    except UserError as error:
        if mode == RunMode.MULTIRUN:  # Hydra shows one failed job, at the end: say each now
            logging.getLogger("specens").error("%s", error)
        # Hydra prints exceptions of this class as their one line, goes on with a sweep's other jobs and exits with 1.
        raise CompactHydraException(f"specens: {error}") from None
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)


@hydra.main(config_path=CONF_DIR, config_name="config", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given, also with chdir=true
    with failing_in_one_line(HydraConfig.get().mode, f"interrupted; prompts that were finished are in {folder}"):
        quiet_libraries()
        summary = run(config, folder)
        if summary["num_failed"]:
            raise UserError(
                f"{summary['num_failed']} of {summary['num_prompts']} prompts failed, the others are in {folder}"
            )


if __name__ == "__main__":
    main()
