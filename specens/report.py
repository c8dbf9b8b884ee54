"""python -m specens.report run=<folder>: report.html once more, from the files of a run, or of all runs in a folder.

A run whose process was killed gets its page too; what is missing or cannot be read is said on the page.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specens.analysis.frames import rows_where
from specens.analysis.html import report
from specens.analysis.metrics import summarise
from specens.config import CONF_DIR, VERSION_BASE, refuse_unknown, resolved
from specens.errors import UserError, one_line
from specens.files import PAGE_NAME, REPLAY_NAME, SUMMARY_NAME, write_whole
from specens.loading import Run, load, missing_tables, words_of
from specens.run import failing_in_one_line, refuse_sweep

UNFINISHED = {"status": "unfinished", "error": "it has no summary.json, so its process was killed, or is still at work"}
"""What stands for the summary of a run that has none."""
MAX_NOTICES = 10
"""Skipped files that are named one by one."""


def rebuild(folder: Path) -> tuple[Path, list[str]]:
    """Write `report.html` into `folder`, which is a run or holds some; its path, and what was left out of it and why.

    Raises UserError when there is no run to read.
    """
    run, notices = _read(folder)
    page = _page_of_one(run, notices) if len(run.folders) == 1 else _page_of_many(run, folder, notices)
    try:
        write_whole(folder, {PAGE_NAME: page})
    except OSError as error:
        raise UserError(f"cannot write {folder / PAGE_NAME}: {error.strerror}") from error
    return folder / PAGE_NAME, notices


def _read(folder: Path) -> tuple[Run, list[str]]:
    """The runs in a folder, and a line for every file that was skipped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = load(folder)
        except UserError as error:
            raise UserError("; ".join([str(error), *(one_line(entry.message) for entry in caught[:1])])) from error
    notices = [one_line(entry.message) for entry in caught]
    notices += [f"{path} has no {name}" for path in run.folders for name in missing_tables(path)]
    if len(notices) > MAX_NOTICES:
        notices[MAX_NOTICES:] = [f"skipped {len(notices) - MAX_NOTICES} more files"]
    return run, notices


def _page_of_one(run: Run, notices: list[str]) -> str:
    folder = run.folders[0].resolve()
    prompts, steps, drafts = (frame.drop(columns="run") for frame in (run.prompts, run.steps, run.drafts))
    summary = {**_known(run, folder), **summarise(prompts, steps, drafts)}
    title, path = f"specens run {folder.name}", folder / REPLAY_NAME
    try:
        replay = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return report(prompts, steps, drafts, summary, title=title, replay=replay, notices=notices)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Whatever it is that another program wrote. If it was not the replay, the page fails once more.
        notices.append(f"skipped {path}: {one_line(error)}")
        return report(prompts, steps, drafts, summary, title=title, notices=notices)


def _page_of_many(run: Run, folder: Path, notices: list[str]) -> str:
    """All runs together, and a row for each."""
    runs: list[dict[str, Any]] = []
    for path in run.folders:
        name = str(folder if path == folder else path.relative_to(folder))
        tables = (run.prompts, run.steps, run.drafts)
        prompts, steps, drafts = (rows_where(frame, np.asarray(frame["run"] == name)) for frame in tables)
        runs.append({"run": name, **_known(run, path, name), **summarise(prompts, steps, drafts)})
    common = set.intersection(*(set(entry.get("words", {}).items()) for entry in runs))
    for entry in runs:
        own = [word for word in entry.get("words", {}).items() if word not in common]
        entry["words"] = " ".join("=".join(word) for word in own)
    summary = {
        **summarise(run.prompts, run.steps, run.drafts),
        "lossy": any(entry.get("lossy") for entry in runs),
        "verifier": ", ".join(sorted({str(entry["verifier"]) for entry in runs if entry.get("verifier")})),
        "environment": {entry["run"]: entry["environment"] for entry in runs if entry.get("environment")},
    }
    title = f"specens runs in {folder.resolve().name}"
    return report(run.prompts, run.steps, run.drafts, summary, title=title, runs=runs, notices=notices)


def _known(run: Run, folder: Path, name: str | None = None) -> dict[str, Any]:
    """What a run's summary says that its tables do not; of a run without a summary, that it has none."""
    for summary in run.summaries:
        if name in (None, summary["run"]):
            return summary
    if (folder / SUMMARY_NAME).exists():  # it was skipped
        return {}
    words: dict[str, str] = {}
    with suppress(ValueError):
        words = words_of(folder)
    return {**UNFINISHED, "words": words}


@hydra.main(config_path=CONF_DIR, config_name="report", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(HydraConfig.get().mode, "interrupted; nothing was written"):
        refuse_sweep(HydraConfig.get().mode)
        refuse_unknown(resolved(config), ("run",))
        if not str(config.run or ""):
            raise UserError("run is not set: give run=<the folder of a run, or one that holds runs>")
        path, notices = rebuild(Path(str(config.run)).expanduser())
        for notice in notices:
            print(notice, file=sys.stderr)
        print(f"report: {path}")


if __name__ == "__main__":
    main()
