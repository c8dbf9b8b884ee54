"""What replayed steps would take: a cost table, corrected by what a run's own steps took.

A step takes the target's forward over its nodes, the draft of every member that was scheduled, and
the CPU overhead. Members draft one after another, as in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from specens.analysis.frames import floats, list_lengths, of_prompts, rows_where
from specens.decoding.budgets.costs import CostTable, Points
from specens.replay.trace import NOT_SCHEDULED, depth_column

LEAST_STEPS = 20
"""A width has a factor of its own if so many steps were nearest to it."""

LEAST_DRAFTS = 5
"""A member's time comes from its drafts in consecutive steps, if there are so many of them."""

BLOCK_STEPS = 32
"""Steps of one text that are one observation of how time grows with context: what disturbs the
clock disturbs neighbours alike.
"""

CLEARLY = 3.0
"""Standard errors that the slope must be above zero to be believed."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds of a step. `table` holds at `context_tokens`; a forward takes
    `ms_per_1000_tokens` more for every 1000 tokens of context beyond.
    """

    table: CostTable
    ms_per_1000_tokens: float = 0.0
    context_tokens: float = 0.0

    @classmethod
    def fitted(
        cls, table: CostTable, prompts: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame
    ) -> CostModel:
        """The table, corrected by a run's own tables (`reader.load`), by totals over totals:
        forwards by their width, AR ones by the run's baseline if it has one, each member's drafts,
        and the CPU overhead.
        """
        is_wide = floats(steps, "num_nodes") > 0
        wide = rows_where(steps, is_wide) if is_wide.any() else steps
        factors = _width_factors(table, wide)
        # What drafting took beyond the members' own time is the ensemble's: CPU overhead.
        overhead = floats(steps, "host_ms").sum() + floats(steps, "draft_ms").sum()
        host_ms = max(float(overhead - floats(drafts, "draft_ms").sum()) / len(steps), 0.0)
        slope, context = _context_slope(_scaled(table, factors), wide)
        step_ms = _ar_step_ms(prompts, slope, context)
        if step_ms is None:
            alone = floats(rows_where(steps, ~is_wide), "verify_ms")
            step_ms = float(alone.mean()) + host_ms if len(alone) >= LEAST_STEPS else None
        if step_ms is not None:
            # The baseline's overhead is less; the table knows one overhead, so that the forward
            # takes the difference.
            factors[0] = max(step_ms - host_ms, 1e-6) / table.verify(0)
        corrected = replace(
            _scaled(table, factors),
            draft_ms={**table.draft_ms, **_scaled_drafts(table, drafts)},
            host_ms=host_ms,
            origin=f"{table.origin}, corrected by the run's own steps",
        )
        return cls(corrected, slope, context)

    def priced(self, steps: pd.DataFrame) -> pd.DataFrame:
        """draft_s, verify_s and host_s of replayed steps, one row each."""
        verify = _looked_up(self.table.verify, floats(steps, "num_nodes"))
        beyond = floats(steps, "context_tokens") - self.context_tokens
        verify += self.ms_per_1000_tokens * beyond / 1e3
        draft = np.zeros(len(steps))
        for column in steps.columns[steps.columns.str.startswith(depth_column(""))]:
            depths = floats(steps, column)
            cost = partial(self.table.draft, column.removeprefix(depth_column("")))
            drafted = _looked_up(cost, np.maximum(depths, 1))
            draft += np.where(depths == NOT_SCHEDULED, 0.0, drafted)
        verify_s, host_s = np.maximum(verify, 0.0) / 1e3, self.table.host_ms / 1e3
        columns = {"draft_s": draft / 1e3, "verify_s": verify_s, "host_s": host_s}
        return pd.DataFrame(columns, index=steps.index)

    def seconds(self, steps: pd.DataFrame) -> float:
        return float(self.priced(steps).to_numpy().sum())


def prediction_error(model: CostModel, live: pd.DataFrame, replayed: pd.DataFrame) -> float:
    """Predicted over measured seconds of decoding, less 1. `live` are a run's steps, `replayed` the
    same ones by replay.
    """
    return model.seconds(replayed) / measured_seconds(live) - 1


def held_out_error(
    table: CostTable,
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    replayed: pd.DataFrame,
) -> float | None:
    """`prediction_error` of models that have not seen what they predict: each half of the prompts
    by the other half's. None with fewer than two prompts.
    """
    names = list(dict.fromkeys(replayed["prompt_id"]))
    halves = [names[::2], names[1::2]]
    if not halves[1]:
        return None
    predicted = 0.0
    for half, other in (halves, halves[::-1]):
        seen = [of_prompts(frame, other) for frame in (prompts, steps, drafts)]
        predicted += CostModel.fitted(table, *seen).seconds(of_prompts(replayed, half))
    return predicted / measured_seconds(of_prompts(steps, names)) - 1


def measured_seconds(steps: pd.DataFrame) -> float:
    """Seconds of decoding of a run's own steps."""
    columns = ("draft_ms", "verify_ms", "host_ms")
    return float(sum(floats(steps, name).sum() for name in columns)) / 1e3


def _looked_up(cost: Callable[[int], float], counts: np.ndarray) -> np.ndarray:
    """`cost` of every count; each different one is looked up once."""
    different, place = np.unique(counts, return_inverse=True)
    return np.array([cost(int(count)) for count in different])[place]


def _width_factors(table: CostTable, steps: pd.DataFrame) -> dict[float, float]:
    """What the steps took over what the table predicts: of each width that occurred often, by the
    steps nearest to it; if none did, of the mean width, by all of them.
    """
    num_nodes = floats(steps, "num_nodes")
    measured, expected = floats(steps, "verify_ms"), _looked_up(table.verify, num_nodes)
    widths = np.array([count for count, _ in table.verify_ms])
    nearest = widths[np.abs(num_nodes[:, None] - widths).argmin(axis=1)]
    factors = {
        float(width): _ratio(measured[nearest == width], expected[nearest == width])
        for width in widths
        if np.count_nonzero(nearest == width) >= LEAST_STEPS
    }
    return factors or {float(num_nodes.mean()): _ratio(measured, expected)}


def _scaled(table: CostTable, factors: Mapping[float, float]) -> CostTable:
    """Every width's time, times its factor; between two widths with factors by the line between
    them.
    """
    widths = sorted(factors)
    known = [factors[width] for width in widths]
    verify = ((count, ms * float(np.interp(count, widths, known))) for count, ms in table.verify_ms)
    return replace(table, verify_ms=tuple(verify))


def _ratio(measured: np.ndarray, expected: np.ndarray) -> float:
    """Totals over totals; 1 where nothing was measured."""
    took, predicted = float(measured.sum()), float(expected.sum())
    return took / predicted if took > 0 and predicted > 0 else 1.0


def _context_slope(table: CostTable, steps: pd.DataFrame) -> tuple[float, float]:
    """How a forward's milliseconds grow with 1000 tokens of context, and the mean context of the
    steps. By least squares over blocks of steps, of what the table does not explain; 0 unless it is
    clearly positive.
    """
    context = floats(steps, "context_tokens")
    middle = float(context.mean())
    rest = floats(steps, "verify_ms") - _looked_up(table.verify, floats(steps, "num_nodes"))
    blocks = [steps["prompt_id"], floats(steps, "step") // BLOCK_STEPS]
    block = pd.MultiIndex.from_arrays(blocks).factorize()[0]
    weights = np.bincount(block)
    x = np.bincount(block, context) / weights - middle
    y = np.bincount(block, rest) / weights - rest.mean()
    spread = float((weights * x**2).sum())
    if len(x) < 3 or spread == 0:
        return 0.0, middle
    slope = float((weights * x * y).sum()) / spread
    error = float(np.sqrt((weights * (y - slope * x) ** 2).sum() / (len(x) - 2) / spread))
    return (1e3 * slope if slope > CLEARLY * error else 0.0), middle


def _ar_step_ms(prompts: pd.DataFrame, slope: float, context: float) -> float | None:
    """Milliseconds of a whole AR step at that context, by the run's baseline; None without one."""
    seconds = floats(prompts, "baseline_decode_s")
    num_tokens = list_lengths(prompts, "baseline_ids")
    before = list_lengths(prompts, "prompt_ids") + (num_tokens - 1) / 2
    done = ~np.isnan(seconds + num_tokens)
    if not num_tokens[done].sum():
        return None
    ms = 1e3 * float(seconds[done].sum() / num_tokens[done].sum())
    return ms - slope * (float(np.average(before[done], weights=num_tokens[done])) - context) / 1e3


def _scaled_drafts(table: CostTable, drafts: pd.DataFrame) -> dict[str, Points]:
    """Each scheduled member's times by depth, times one factor, if possible from consecutive steps:
    one that was idle first reads what it missed. The mean time of a member that the table lacks.
    """
    scheduled = rows_where(drafts, np.asarray(drafts["was_scheduled"], bool))
    scaled: dict[str, Points] = {}
    for name, rows in scheduled.groupby("drafter", sort=False):
        known = table.draft_ms.get(str(name))
        if known is None:
            scaled[str(name)] = ((1, float(floats(rows, "draft_ms").mean())),)
            continue
        is_steady = np.asarray(rows.groupby("prompt_id", sort=False)["step"].diff() == 1)
        if np.count_nonzero(is_steady) >= LEAST_DRAFTS:
            rows = rows_where(rows, is_steady)
        depths = np.maximum(np.minimum(floats(rows, "num_planned"), floats(rows, "num_drafted")), 1)
        expected = _looked_up(partial(table.draft, str(name)), depths)
        factor = _ratio(floats(rows, "draft_ms"), expected)
        scaled[str(name)] = tuple((count, ms * factor) for count, ms in known)
    return scaled
