"""What a sweep shows: one row per job, named by the overrides in which the jobs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specens.analysis.metrics import further_metrics, metrics_of
from specens.analysis.summary import is_list
from specens.errors import UserError


def swept_overrides(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The overrides in which the jobs of a sweep differ, in the order in which they were given.

    `summaries` are those of `reader.load`. Raises UserError with fewer than two jobs, or when none
    differs.
    """
    homes = ", ".join(str(summary["run"]) for summary in summaries) or "no job"
    if len(summaries) < 2:
        raise UserError(f"{homes}: a sweep has at least two jobs; name the folder of a --multirun")
    given = [summary["overrides"] for summary in summaries]
    keys = dict.fromkeys(key for overrides in given for key in overrides)
    swept = [key for key in keys if len({overrides.get(key) for overrides in given}) > 1]
    if not swept:
        raise UserError(
            f"{homes}: the jobs do not differ in an override (.hydra/overrides.yaml of each job)"
        )
    return swept


def sweep_table(summaries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per job, sorted by the swept overrides: a column for each, then `run`, `status` and
    the numbers of `summary.json` that a sweep shows, those of further metrics that a job recorded
    after our own.

    An override's column holds numbers if all jobs gave it numbers, else text; a job that did not
    give it has None there. A job that failed before it measured anything has its `status` and no
    numbers.
    """
    swept = swept_overrides(summaries)
    metrics = metrics_of("run", "sweep", further_metrics(summaries))
    keys = ("status", *(metric.key for metric in metrics))
    rows = [_row(summary, swept) | {key: summary.get(key) for key in keys} for summary in summaries]
    return _sorted(pd.DataFrame(rows), swept)


def sweep_drafters(summaries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per job and drafter: the swept overrides, `run`, `drafter` and its scalar numbers in
    `summary.json`.
    """
    swept = swept_overrides(summaries)
    rows = [
        _row(summary, swept)
        | {"drafter": name}
        | {key: value for key, value in numbers.items() if not is_list(value)}
        for summary in summaries
        for name, numbers in (summary.get("drafters") or {}).items()
    ]
    columns = [*swept, "run", "drafter"]
    return _sorted(pd.DataFrame(rows, columns=None if rows else columns), swept)


def _row(summary: Mapping[str, Any], swept: Sequence[str]) -> dict[str, Any]:
    return {key: summary["overrides"].get(key) for key in swept} | {"run": summary["run"]}


def _sorted(table: pd.DataFrame, swept: Sequence[str]) -> pd.DataFrame:
    for key in swept:
        numbers = pd.Series(pd.to_numeric(table[key], errors="coerce"))
        if numbers.notna().to_numpy().all():
            table[key] = numbers
    return table.sort_values(list(swept), kind="stable", ignore_index=True)
