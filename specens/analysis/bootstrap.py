"""How sure a number is: percentile intervals over resampled prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def bootstrap(
    columns: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
) -> tuple[float, float] | None:
    """Percentile interval of `statistic`, which takes the column totals `[num_resamples, k]` of
    resampled rows. `columns` is `[num_prompts, k]`: prompts are the unit, because steps of one
    prompt depend on each other. None with fewer than two rows, or when no resample has a finite
    value.
    """
    num_prompts = len(columns)
    if num_prompts < 2:
        return None
    # A fixed order: the interval must not depend on the order of the prompts.
    ordered = columns[np.lexsort(columns.T)]
    shares = np.full(num_prompts, 1 / num_prompts)
    counts = np.random.default_rng(0).multinomial(num_prompts, shares, num_resamples)
    values = statistic(counts @ ordered)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pooled_ratio(totals: np.ndarray) -> np.ndarray:
    """Totals `[..., (numerator, denominator)]` -> their ratio; not finite where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return totals[..., 0] / totals[..., 1]
