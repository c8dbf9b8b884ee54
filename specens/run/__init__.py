"""python -m specens.run: decode prompts with drafters, record every step, write a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specens.config.compose import resolved
from specens.config.folder import write_overrides
from specens.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(config: DictConfig, folder: Path, hydra: DictConfig | None = None) -> dict[str, Any]:
    """Run one job into `folder` and return its summary. With `hydra`, Hydra's own node of the
    configuration, the folder gets a `.hydra` too, as a Hydra job's.
    """
    from specens.records.writer import RunWriter
    from specens.run.job import job_of
    from specens.run.run_job import run_job
    from specens.run.terminal import Terminal

    writer, terminal = RunWriter(folder), Terminal()
    if hydra is not None:
        write_overrides(config, folder, hydra)
    try:
        job = job_of(config)
    except UserError as error:
        writer.write_summary({"status": "failed", "error": str(error)})
        raise
    summary = run_job(job, writer, resolved(config), terminal)
    terminal.summary(summary, folder, job.metrics)
    return summary
