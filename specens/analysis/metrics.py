"""The numbers of a run, from its three tables. Each number has one definition, in the docstring of what computes it (credit: in
`credit`). What was never measured is None: neither 0 nor NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.bootstrap import bootstrap, pooled_ratio
from specens.analysis.frames import floats, list_lengths, rows_where

DRAFTER_COLUMNS = (
    "drafter",
    "win_rate",
    "sole_win_rate",
    "token_share",
    "marginal",
    "acceptance_rate",
    "solo_acceptance_length",
    "draft_ms_per_step",
    "tokens_per_draft_s",
    "silent_rate",
    "num_drafted",
    "num_verified",
    "num_accepted",
    "wasted_nodes",
)
"""Columns of `drafter_table`, whatever the drafters."""

_PROMPT_COLUMNS = ("category", "output_ids", "decode_s", "baseline_decode_s", "baseline_ids", "is_identical", "error")
_STEP_COLUMNS = ("step", "num_nodes", "num_accepted", "num_emitted", "draft_ms", "verify_ms", "host_ms")
_DRAFT_COLUMNS = (
    *("step", "drafter", "num_drafted", "num_verified", "num_matched", "num_tested", "draft_ms"),
    *("win", "is_sole_win", "token_share", "marginal"),
)


def summarise(prompts: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame) -> dict[str, Any]:
    """The numbers of `summary.json` that come from the tables. Takes one run's tables or merged ones (column `run`).

    `num_prompts` counts all prompts, `num_failed` those with an error; every other number leaves failed prompts out.
    `num_compared` counts outputs that have a baseline's text to be compared with, `num_identical` those that are equal to it,
    None when none was compared. The other keys are defined in
    `_speed`, `_acceptance`, `_costs` and `_drafter`; `by_category` repeats some of them on the prompts of one category.
    """
    key = ["run", "prompt_id"] if "run" in prompts.columns else ["prompt_id"]
    prompts = prompts.reindex(columns=[*key, *_PROMPT_COLUMNS])
    is_failed = prompts["error"].notna().to_numpy(bool)
    failed, done = rows_where(prompts, is_failed), rows_where(prompts, ~is_failed)
    steps = steps.reindex(columns=[*key, *_STEP_COLUMNS])
    steps = rows_where(steps, ~_is_of(steps, failed, key))
    drafts = drafts.reindex(columns=[*key, *_DRAFT_COLUMNS])
    num_compared = _num_true(done["is_identical"].notna().to_numpy(bool))
    return {
        **_speed(done),
        **_acceptance(steps, key),
        "num_prompts": len(prompts),
        "num_failed": len(failed),
        "num_compared": num_compared,
        "num_identical": _count(done, "is_identical") if num_compared else None,
        **_costs(steps),
        "by_category": _by_category(done, steps, drafts, key),
        "drafters": _drafters(steps, drafts, key),
    }


def drafter_table(summary: dict[str, Any]) -> pd.DataFrame:
    """One row per drafter with `DRAFTER_COLUMNS`, for printing and logging; a number that is missing is None."""
    rows = [
        [name if column == "drafter" else numbers.get(column) for column in DRAFTER_COLUMNS]
        for name, numbers in summary.get("drafters", {}).items()
    ]
    return pd.DataFrame(rows, columns=list(DRAFTER_COLUMNS), dtype=object)


def _speed(done: pd.DataFrame) -> dict[str, Any]:
    """`tokens_per_s`: emitted tokens / seconds of decoding, totals over totals, prefill apart; `baseline_tokens_per_s`:
    the same of plain decoding in the same run. `speedup`: the ratio of the two over the prompts that have both, and
    `speedup_interval` its bootstrap interval.
    """
    own = np.stack([list_lengths(done, "output_ids"), floats(done, "decode_s")], axis=1)
    baseline = np.stack([list_lengths(done, "baseline_ids"), floats(done, "baseline_decode_s")], axis=1)
    both = _complete(np.concatenate([own, baseline], axis=1))
    return {
        "speedup": _finite(_speed_ratio(both.sum(axis=0))),
        "speedup_interval": bootstrap(both, _speed_ratio),
        "tokens_per_s": _finite(pooled_ratio(_complete(own).sum(axis=0))),
        "baseline_tokens_per_s": _finite(pooled_ratio(_complete(baseline).sum(axis=0))),
    }


def _acceptance(steps: pd.DataFrame, key: list[str]) -> dict[str, Any]:
    """`acceptance_length`: emitted tokens / steps, pooled, with `acceptance_length_interval` by bootstrap.
    `acceptance_rate`: accepted / verified draft tokens. `no_win_rate`: share of steps with A = 0; with all `win_rate`s
    it sums to 1. `num_trimmed` = accepted + steps - emitted: what the stop rules took of the target's own tokens.
    """
    num_steps, emitted, accepted = len(steps), _count(steps, "num_emitted"), _count(steps, "num_accepted")
    verified = _count(steps, "num_nodes")
    per_prompt = steps.groupby(key)["num_emitted"].agg(["sum", "size"]).to_numpy(float)
    return {
        "acceptance_length": _ratio(emitted, num_steps),
        "acceptance_length_interval": bootstrap(per_prompt, pooled_ratio),
        "acceptance_rate": _ratio(accepted, verified),
        "no_win_rate": _ratio(_num_true(floats(steps, "num_accepted") == 0), num_steps),
        "num_steps": num_steps,
        "num_emitted": emitted,
        "num_verified": verified,
        "num_accepted": accepted,
        "num_trimmed": accepted + num_steps - emitted,
    }


def _costs(steps: pd.DataFrame) -> dict[str, Any]:
    """`draft_ms_per_step`, `verify_ms_per_step`, `host_ms_per_step`: means over steps. `host_fraction`: host time /
    (draft + verify + host time). `wasted_nodes_per_token`: verified nodes that were not accepted / emitted tokens.
    """
    times = np.stack([floats(steps, name) for name in ("draft_ms", "verify_ms", "host_ms")], axis=1)
    measured = _complete(times)
    wasted = _sum(steps, "num_nodes") - _sum(steps, "num_accepted")
    return {
        "draft_ms_per_step": _mean(steps, "draft_ms"),
        "verify_ms_per_step": _mean(steps, "verify_ms"),
        "host_ms_per_step": _mean(steps, "host_ms"),
        "host_fraction": _ratio(measured[:, 2].sum(), measured.sum()),
        "wasted_nodes_per_token": _ratio(wasted, _sum(steps, "num_emitted")),
    }


def _by_category(
    done: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame, key: list[str]
) -> dict[str, dict[str, Any]]:
    """Per category, of the prompts that did not fail: their number, acceptance length, speedup, tokens per second, and
    `tokens_per_step` of every drafter (see `_drafter`).
    """
    table: dict[str, dict[str, Any]] = {}
    for name, group in done.groupby("category", sort=False):
        own = rows_where(steps, _is_of(steps, group, key))
        members = rows_where(drafts, _is_of(drafts, group, key)).groupby("drafter", sort=False)
        speed = _speed(group)
        table[str(name)] = {
            "num_prompts": len(group),
            "acceptance_length": _ratio(_sum(own, "num_emitted"), len(own)),
            "speedup": speed["speedup"],
            "tokens_per_s": speed["tokens_per_s"],
            "tokens_per_step": {str(drafter): _ratio(_sum(rows, "token_share"), len(own)) for drafter, rows in members},
        }
    return table


def _drafters(steps: pd.DataFrame, drafts: pd.DataFrame, key: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> numbers of that member in `steps`, in the members' own order."""
    if steps.empty or drafts.empty:
        return {}
    joined = drafts.merge(steps[[*key, "step", "num_accepted"]], on=[*key, "step"], how="inner")
    total = _sum(steps, "num_accepted")
    return {str(name): _drafter(rows, len(steps), total) for name, rows in joined.groupby("drafter", sort=False)}


def _drafter(rows: pd.DataFrame, num_steps: int, num_accepted: float) -> dict[str, Any]:
    """One member's numbers. `rows` are its steps; `num_steps` and `num_accepted` are those of all steps.

    - `win_rate`, `sole_win_rate`: sum of `win`, `is_sole_win` / all steps. `token_share`: its share of all accepted
      tokens. `tokens_per_step`: sum of its token shares / all steps, its part of the acceptance length. `marginal`: mean per
      step. See `credit`.
    - `num_accepted`: sum of min(m_d, A). `acceptance_rate`: that / its verified nodes. `wasted_nodes`: the difference.
    - `acceptance_by_depth`: see `_acceptance_by_depth`. `solo_acceptance_length`: 1 + mean m_d, what it would give
      alone from the starts of these steps.
    - `draft_ms_per_step`: mean drafting time. `tokens_per_draft_s`: sum of its token shares / its drafting seconds.
      `silent_rate`: share of its steps in which it proposed nothing.
    """
    matched = floats(rows, "num_matched")
    accepted = int(np.minimum(matched, floats(rows, "num_accepted")).sum())
    verified = _count(rows, "num_verified")
    share_and_ms = _complete(np.stack([floats(rows, "token_share"), floats(rows, "draft_ms")], axis=1))
    tokens, draft_ms = share_and_ms.sum(axis=0)
    return {
        "win_rate": _ratio(_sum(rows, "win"), num_steps),
        "sole_win_rate": _ratio(_sum(rows, "is_sole_win"), num_steps),
        "token_share": _ratio(_sum(rows, "token_share"), num_accepted),
        "tokens_per_step": _ratio(_sum(rows, "token_share"), num_steps),
        "marginal": _mean(rows, "marginal"),
        "acceptance_rate": _ratio(accepted, verified),
        "acceptance_by_depth": _acceptance_by_depth(matched, floats(rows, "num_tested")),
        "solo_acceptance_length": _ratio(len(rows) + matched.sum(), len(rows)),
        "draft_ms_per_step": _mean(rows, "draft_ms"),
        "tokens_per_draft_s": _ratio(1000 * tokens, draft_ms),
        "silent_rate": _ratio(_num_true(floats(rows, "num_drafted") == 0), len(rows)),
        "num_drafted": _count(rows, "num_drafted"),
        "num_verified": verified,
        "num_accepted": accepted,
        "wasted_nodes": verified - accepted,
    }


def _acceptance_by_depth(matched: np.ndarray, tested: np.ndarray) -> list[float | None]:
    """Entry i - 1 is #{m >= i} / #{m >= i - 1 and depth i was tested}: the chance to match at depth i once there.

    Steps whose proposal ended before depth i are censored, not failures. As long as the deepest test.
    """
    depths = range(1, int(tested.max(initial=0)) + 1)
    return [_ratio(_num_true(matched >= i), _num_true((matched >= i - 1) & (tested >= i))) for i in depths]


def _speed_ratio(totals: np.ndarray) -> np.ndarray:
    """Totals `[..., (tokens, seconds, baseline tokens, baseline seconds)]` -> speedup; not finite where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return pooled_ratio(totals[..., :2]) / pooled_ratio(totals[..., 2:])


def _is_of(frame: pd.DataFrame, prompts: pd.DataFrame, key: list[str]) -> np.ndarray:
    """Which rows of `frame` belong to one of `prompts`, bool `[num_rows]`."""
    return frame.set_index(key).index.isin(prompts.set_index(key).index)


def _complete(columns: np.ndarray) -> np.ndarray:
    """The rows without NaN."""
    return columns[~np.isnan(columns).any(axis=1)]


def _num_true(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask))


def _sum(frame: pd.DataFrame, column: str) -> float:
    return float(np.nansum(floats(frame, column)))


def _count(frame: pd.DataFrame, column: str) -> int:
    return int(_sum(frame, column))


def _mean(frame: pd.DataFrame, column: str) -> float | None:
    return _ratio(_sum(frame, column), _num_true(~np.isnan(floats(frame, column))))


def _ratio(numerator: float, denominator: float) -> float | None:
    return _finite(numerator / denominator) if denominator else None


def _finite(value: float | np.ndarray) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
