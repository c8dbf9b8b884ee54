"""The summary of a run, or of merged ones: every metric's value, from the three tables."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from specens.analysis.frames import finite, is_of, ratio, rows_where, total
from specens.analysis.metrics import METRICS, OLD_KEYS, MemberTable, Metric, RunTables, metrics_of
from specens.errors import one_line

log = logging.getLogger("specens")


def summarise(
    prompts: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame, metrics: Sequence[Any] = ()
) -> dict[str, Any]:
    """The numbers of `summary.json` that come from the tables: METRICS and further `metrics` of the
    run, `drafters` with those of each member, and `by_category`. Takes one run's tables or merged
    ones (column `run`).
    """
    tables = _tables_of(prompts, steps, drafts)
    known = (*METRICS, *metrics)
    return {
        **{m.key: _value(m, tables) for m in known if m.scope == "run"},
        "by_category": _by_category(tables),
        "drafters": _drafters(tables, [m for m in known if m.scope == "drafter"]),
    }


DRAFTER_COLUMNS = ("drafter", *(metric.key for metric in metrics_of("drafter")), *OLD_KEYS.values())
"""Columns of `drafter_table`, whatever the drafters; those of further metrics follow."""


def drafter_table(summary: Mapping[str, Any]) -> pd.DataFrame:
    """One row per drafter, for printing and logging; a number that is missing is None."""
    members = summary.get("drafters", {})
    extra = (key for numbers in members.values() for key, v in numbers.items() if not is_list(v))
    columns = list(dict.fromkeys([*DRAFTER_COLUMNS, *extra]))
    rows = [
        [name if column == "drafter" else numbers.get(column) for column in columns]
        for name, numbers in members.items()
    ]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _tables_of(prompts: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame) -> RunTables:
    key = ["run", "prompt_id"] if "run" in prompts.columns else ["prompt_id"]
    prompts = prompts.reindex(columns=[*key, *_PROMPT_COLUMNS])
    is_failed = prompts["error"].notna().to_numpy(bool)
    failed, done = rows_where(prompts, is_failed), rows_where(prompts, ~is_failed)
    steps = steps.reindex(columns=[*key, *_STEP_COLUMNS])
    steps = rows_where(steps, ~is_of(steps, failed, key))
    drafts = drafts.reindex(columns=list(dict.fromkeys([*key, *_DRAFT_COLUMNS, *drafts.columns])))
    accepted = steps[[*key, "step", "num_accepted"]]
    joined = drafts.merge(accepted, on=[*key, "step"], how="inner")
    return RunTables(prompts, done, steps, joined, key)


_PROMPT_COLUMNS = (
    *("category", "output_ids", "decode_s", "prefill_s", "baseline_decode_s", "baseline_ids"),
    *("is_identical", "error"),
)
_STEP_COLUMNS = (
    *("step", "context_tokens", "num_nodes", "num_accepted", "num_emitted"),
    *("draft_ms", "verify_ms", "host_ms", "mode"),
)
_DRAFT_COLUMNS = (
    *("step", "drafter", "num_drafted", "num_verified", "num_matched", "num_tested", "draft_ms"),
    *("win", "is_sole_win", "token_share", "marginal"),
)


def _value(metric: Any, tables: Any) -> Any:
    """What a metric says; None, and a line, if one of the user's own fails."""
    if isinstance(metric, Metric):
        return metric(tables)
    try:
        value = metric(tables)
        return None if value is None else finite(float(value))
    except Exception as error:
        _warn_once(f"metric {metric.key} failed ({type(error).__name__}: {one_line(error)})")
        return None


@functools.cache
def _warn_once(line: str) -> None:
    """A summary is computed after every prompt; a line says the same each time."""
    log.warning("%s", line)


def _drafters(tables: RunTables, metrics: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Name -> numbers of that member, in the members' own order."""
    if tables.steps.empty or tables.drafts.empty:
        return {}
    num_steps, num_accepted = len(tables.steps), tables.total("num_accepted")
    metrics, found = list(metrics), {}
    for name, rows in tables.drafts.groupby("drafter", sort=False):
        member = MemberTable(rows, num_steps, num_accepted)
        numbers = {metric.key: _value(metric, member) for metric in metrics}
        found[str(name)] = numbers | {old: numbers[new] for new, old in OLD_KEYS.items()}
    return found


def _by_category(tables: RunTables) -> dict[str, dict[str, Any]]:
    """Per category, of the prompts that did not fail: their number, acceptance length, speedup,
    tokens per second, and `tokens_per_step` of every drafter.
    """
    known = {metric.key: metric for metric in METRICS if metric.scope == "run"}
    table: dict[str, dict[str, Any]] = {}
    for name, group in tables.done.groupby("category", sort=False):
        key = tables.key
        own = rows_where(tables.steps, is_of(tables.steps, group, key))
        drafts = rows_where(tables.drafts, is_of(tables.drafts, group, key))
        part = RunTables(group, group, own, drafts, key)
        shares = drafts.groupby("drafter", sort=False)
        table[str(name)] = {
            "num_prompts": len(group),
            **{k: known[k](part) for k in ("acceptance_length", "speedup", "tokens_per_s")},
            "tokens_per_step": {
                str(drafter): ratio(total(rows, "token_share"), len(own))
                for drafter, rows in shares
            },
        }
    return table
