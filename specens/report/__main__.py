"""python -m specens.report run=<folder>: report.html once more, from the files of a run, or of all
runs in a folder.

A run whose process was killed gets its page too; what is missing or cannot be read is named on the
page.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from specens.analysis.frames import rows_where
from specens.analysis.metrics import Metric, recorded_metrics
from specens.analysis.summary import summarise
from specens.cli import Call, command, show
from specens.config.build import refuse_unknown
from specens.config.compose import resolved
from specens.errors import UserError, one_line
from specens.records.files import PAGE_NAME, REPLAY_NAME, SUMMARY_NAME, write_result
from specens.records.reader import Run, load, missing_tables, overrides_of, status_of
from specens.report.page import report

NO_SUMMARY = "it has no summary.json, so its process was killed, or is still at work"
"""What stands for the error of a run that has no summary."""

MAX_NOTICES = 10
"""Skipped files that are named one by one."""


def rebuild(folder: Path) -> tuple[Path, list[str]]:
    """Write `report.html` into `folder`, which is a run or holds some; its path, and what was left
    out of it and why.

    Raises UserError when there is no run to read.
    """
    run, notices = _read(folder)
    is_one = len(run.folders) == 1
    page = _page_of_one(run, notices) if is_one else _page_of_many(run, folder, notices)
    write_result(folder, {PAGE_NAME: page}, "the page")
    return folder / PAGE_NAME, notices


def _read(folder: Path) -> tuple[Run, list[str]]:
    """The runs in a folder, and a line for every file that was skipped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = load(folder)
        except UserError as error:
            skipped = [one_line(entry.message) for entry in caught[:1]]
            raise UserError("; ".join([str(error), *skipped])) from error
    notices = [one_line(entry.message) for entry in caught]
    notices += [f"{path} has no {name}" for path in run.folders for name in missing_tables(path)]
    if len(notices) > MAX_NOTICES:
        notices[MAX_NOTICES:] = [f"skipped {len(notices) - MAX_NOTICES} more files"]
    return run, notices


def _page_of_one(run: Run, notices: list[str]) -> str:
    folder, recorded = run.folders[0].resolve(), _recorded(run, run.folders[0])
    tables = (run.prompts, run.steps, run.drafts)
    prompts, steps, drafts = (frame.drop(columns="run") for frame in tables)
    summary = {**recorded, **summarise(prompts, steps, drafts)}
    metrics = _add_further(summary, recorded)
    options: dict[str, Any] = {"title": f"specens run {folder.name}", "metrics": metrics}
    path = folder / REPLAY_NAME
    try:
        replay = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return report(prompts, steps, drafts, summary, replay=replay, notices=notices, **options)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Whatever it is that another program wrote. If it was not the replay, the page fails once
        # more.
        notices.append(f"skipped {path}: {one_line(error)}")
        return report(prompts, steps, drafts, summary, notices=notices, **options)


def _add_further(summary: dict[str, Any], recorded: Mapping[str, Any]) -> list[Metric]:
    """The run's metrics of packages of the user's own, by the definitions that it recorded; their
    values are taken from there too, as the packages may not be at hand.
    """
    found, drafters = recorded_metrics(recorded), recorded.get("drafters")
    keys = {metric.key for metric in found if metric.scope == "drafter"}
    for name, numbers in (drafters if isinstance(drafters, dict) else {}).items():
        if name in summary["drafters"] and isinstance(numbers, dict):
            own = {key: numbers[key] for key in keys & set(numbers)}
            summary["drafters"][name] = own | summary["drafters"][name]
    return found


def _page_of_many(run: Run, folder: Path, notices: list[str]) -> str:
    """All runs together, and a row for each."""
    tables = (run.prompts, run.steps, run.drafts)
    runs: list[dict[str, Any]] = []
    for path in run.folders:
        name = str(folder if path == folder else path.relative_to(folder))
        own = (rows_where(frame, np.asarray(frame["run"] == name)) for frame in tables)
        prompts, steps, drafts = own
        numbers = summarise(prompts, steps, drafts)
        runs.append({"run": name, **_recorded(run, path, name), **numbers})
    common = set.intersection(*(set(entry.get("overrides", {}).items()) for entry in runs))
    for entry in runs:
        given = entry.get("overrides", {}).items()
        entry["overrides"] = " ".join("=".join(pair) for pair in given if pair not in common)
    verifiers = sorted({str(entry["verifier"]) for entry in runs if entry.get("verifier")})
    known = [entry for entry in runs if entry.get("environment")]
    summary = {
        **summarise(*tables),
        "lossy": any(entry.get("lossy") for entry in runs),
        "verifier": ", ".join(verifiers),
        "environment": {entry["run"]: entry["environment"] for entry in known},
    }
    title = f"specens runs in {folder.resolve().name}"
    return report(*tables, summary, title=title, runs=runs, notices=notices)


def _recorded(run: Run, folder: Path, name: str | None = None) -> dict[str, Any]:
    """What a run's summary has that its tables do not; of a run without a summary, that it has
    none.
    """
    for summary in run.summaries:
        if name in (None, summary["run"]):
            return summary
    if (folder / SUMMARY_NAME).exists():  # it was skipped
        return {}
    overrides: dict[str, str] = {}
    with suppress(ValueError):
        overrides = overrides_of(folder)
    return {"status": status_of(folder), "error": NO_SUMMARY, "overrides": overrides}


@command("report", interrupted="interrupted; nothing was written", uses_models=False)
def main(call: Call) -> None:
    options = resolved(call.config)
    refuse_unknown(options, ("run",))
    if not str(options["run"] or ""):
        raise UserError("run is not set: give run=<the folder of a run, or one that holds runs>")
    path, notices = rebuild(Path(str(options["run"])).expanduser())
    for notice in notices:
        print(notice, file=sys.stderr)
    show(f"report: {path}")


if __name__ == "__main__":
    main()
