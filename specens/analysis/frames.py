"""Columns and rows of a table, and totals, means and ratios in which nothing measured is None."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd


def rows_where(frame: pd.DataFrame, mask: np.ndarray) -> pd.DataFrame:
    """The rows that a mask, bool `[num_rows]`, marks."""
    return frame.take(np.flatnonzero(mask))


def floats(frame: pd.DataFrame, column: str) -> np.ndarray:
    """A column of numbers as floats; NaN where it is empty."""
    return np.asarray(frame[column], dtype=float)


def list_lengths(frame: pd.DataFrame, column: str) -> np.ndarray:
    """Lengths of a column of token lists; NaN where there is no list."""
    return np.array(
        [len(ids) if hasattr(ids, "__len__") else math.nan for ids in frame[column]], dtype=float
    )


def of_prompts(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The rows of some prompts."""
    return rows_where(frame, np.asarray(frame["prompt_id"].isin(names)))


def is_of(frame: pd.DataFrame, prompts: pd.DataFrame, key: list[str]) -> np.ndarray:
    """Which rows of `frame` belong to one of `prompts`, bool `[num_rows]`."""
    return frame.set_index(key).index.isin(prompts.set_index(key).index)


def complete(columns: np.ndarray) -> np.ndarray:
    """The rows without NaN."""
    return columns[~np.isnan(columns).any(axis=1)]


def num_true(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask))


def total(frame: pd.DataFrame, column: str) -> float:
    return float(np.nansum(floats(frame, column)))


def mean(frame: pd.DataFrame, column: str) -> float | None:
    return ratio(total(frame, column), num_true(~np.isnan(floats(frame, column))))


def ratio(numerator: float, denominator: float) -> float | None:
    return finite(numerator / denominator) if denominator else None


def finite(value: float | np.ndarray) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
