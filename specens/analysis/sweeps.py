"""What a sweep says: one row per job, named by the words in which the jobs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specens.errors import UserError

JOB_NUMBERS = (
    "status",
    "num_prompts",
    "num_failed",
    "num_identical",
    "acceptance_length",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "speedup",
    "draft_ms_per_step",
    "verify_ms_per_step",
    "host_ms_per_step",
    "wasted_nodes_per_token",
)
"""Columns of `sweep_table` after those of the words: keys of `summary.json`, defined in `metrics.summarise`."""


def swept_words(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The words in which the jobs of a sweep differ, in the order in which they were given.

    `summaries` are those of `loading.load`. Raises UserError with fewer than two jobs, or when no word differs.
    """
    if len(summaries) < 2:
        raise UserError(f"{_homes(summaries)}: a sweep has at least two jobs; name the folder of a --multirun")
    words = list(dict.fromkeys(word for summary in summaries for word in summary["words"]))
    swept = [word for word in words if len({summary["words"].get(word) for summary in summaries}) > 1]
    if not swept:
        raise UserError(f"{_homes(summaries)}: the jobs do not differ in a word (.hydra/overrides.yaml of each job)")
    return swept


def sweep_table(summaries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per job, sorted by the swept words: a column for each of them, then `run` and `JOB_NUMBERS`.

    A word's column holds numbers if all jobs gave it numbers, else text; a job that did not give the word has None there.
    A job that failed before it measured anything has its `status` and no numbers.
    """
    swept = swept_words(summaries)
    rows = [_row(summary, swept) | {name: summary.get(name) for name in JOB_NUMBERS} for summary in summaries]
    return _sorted(pd.DataFrame(rows), swept)


def sweep_drafters(summaries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per job and drafter: the swept words, `run`, `drafter` and its scalar numbers in `summary.json`."""
    swept = swept_words(summaries)
    rows = [
        _row(summary, swept) | {"drafter": name} | {key: value for key, value in numbers.items() if not _is_list(value)}
        for summary in summaries
        for name, numbers in (summary.get("drafters") or {}).items()
    ]
    columns = [*swept, "run", "drafter"]
    return _sorted(pd.DataFrame(rows, columns=None if rows else columns), swept)


def _row(summary: Mapping[str, Any], swept: Sequence[str]) -> dict[str, Any]:
    return {word: summary["words"].get(word) for word in swept} | {"run": summary["run"]}


def _sorted(table: pd.DataFrame, swept: Sequence[str]) -> pd.DataFrame:
    for word in swept:
        numbers = pd.Series(pd.to_numeric(table[word], errors="coerce"))
        if numbers.notna().to_numpy().all():
            table[word] = numbers
    return table.sort_values(list(swept), kind="stable", ignore_index=True)


def _homes(summaries: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(summary["run"]) for summary in summaries) or "no job"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
