"""A run with a dense trace, read back whole, and its study: `replay.md`, `replay.csv` and `replay.json` in the run's folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from specens.analysis.policies import budget_named
from specens.analysis.study import Live, study
from specens.analysis.study_page import page_of
from specens.analysis.trace import Trace
from specens.decoding.budget import Budget
from specens.decoding.costs import read_versions
from specens.errors import UserError
from specens.files import COSTS_NAME, REPLAY_NAME, REPLAY_PAGE_NAME, SUMMARY_NAME, plain, write_whole
from specens.loading import Run, load, load_dense, missing_tables


def read_trace(folder: Path | str) -> tuple[Trace, Live]:
    """The dense trace of one run, and what the run itself did. Raises UserError for a folder that is none, has no trace, is
    broken, or holds more than one run.
    """
    run = load_one(Path(folder))
    dense, facts = load_dense(folder)
    trace = Trace.of(dense, run.prompts, facts)
    budget = budget_named(facts["budget"]["name"], facts["budget"]["options"])
    return trace, live_of(Path(folder), run, budget, tuple(member.name for member in trace.members))


def live_of(folder: Path, run: Run, budget: Budget, members: tuple[str, ...]) -> Live:
    """What a run did, with the cost tables of its folder."""
    path = folder / COSTS_NAME
    tables = read_versions(str(path)) if path.exists() else ()
    return Live(str(folder), run.prompts, run.steps, run.drafts, budget, members, tables)


def load_one(folder: Path) -> Run:
    """A run whose files are whole. What merging runs may skip is an error here: part of a run would pass for all of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            run = load(folder)
        except UserWarning as broken:
            raise UserError(f"run={folder}: {str(broken).removeprefix('skipped ')}; make the run again") from broken
    home, *others = run.folders
    if others:
        inner = next(path for path in run.folders if path != folder)
        hint = (
            f"{inner} lies in it: move it elsewhere"
            if folder in run.folders
            else f"name one of them, such as run={inner}"
        )
        raise UserError(f"run={folder}: holds {len(run.folders)} runs; {hint}")
    for name in missing_tables(home):
        raise UserError(f"run={folder}: has no {name}; make the run again")
    return run


def write_study(folder: Path, **options: Any) -> dict[str, Any]:
    """Study the run in `folder`, leave the files there, and return the content of replay.json. `options` are those of `study`."""
    trace, live = read_trace(folder)
    content = plain({**study(trace, live, **options), "status": _status_of(folder)})
    _write(folder, content)
    return content


def _status_of(folder: Path) -> str:
    """How the run ended; a process that was killed left no summary."""
    path = folder / SUMMARY_NAME
    return json.loads(path.read_text(encoding="utf-8")).get("status", "unknown") if path.exists() else "killed"


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    files = {
        REPLAY_NAME: json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        "replay.csv": pd.DataFrame(content["teams"]).to_csv(index=False, lineterminator="\n"),
        REPLAY_PAGE_NAME: page_of(content),
    }
    try:
        write_whole(folder, files)
    except OSError as error:
        raise UserError(f"cannot write the replay into {folder}: {error.strerror}") from error
