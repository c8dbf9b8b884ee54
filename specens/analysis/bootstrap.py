"""How sure a number is: percentile intervals over resampled prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def bootstrap_interval(
    per_prompt_numerator: Sequence[float],
    per_prompt_denominator: Sequence[float],
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of sum(numerator) / sum(denominator), drawing whole prompts with replacement.

    Prompts are the unit because steps of one prompt depend on each other. The order of the prompts does not matter.
    None with fewer than two prompts, or when every resampled denominator is 0.
    """
    if len(per_prompt_numerator) != len(per_prompt_denominator):
        raise ValueError("numerator and denominator must have one value per prompt each")
    columns = np.column_stack([np.asarray(per_prompt_numerator, float), np.asarray(per_prompt_denominator, float)])
    return bootstrap(columns, pooled_ratio, level=level, num_resamples=num_resamples, seed=seed)


def bootstrap(
    columns: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of `statistic`, which takes the column totals `[num_resamples, k]` of resampled rows.

    `columns` is `[num_prompts, k]`. None with fewer than two rows, or when no resample has a finite value.
    """
    num_prompts = len(columns)
    if num_prompts < 2:
        return None
    ordered = columns[np.lexsort(columns.T)]  # a fixed order: the interval must not depend on the order of the prompts
    draws = np.random.default_rng(seed).multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), num_resamples)
    values = statistic(draws @ ordered)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pooled_ratio(totals: np.ndarray) -> np.ndarray:
    """Totals `[..., (numerator, denominator)]` -> their ratio; not finite where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return totals[..., 0] / totals[..., 1]
