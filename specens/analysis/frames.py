"""Columns and rows of a table, with types that checkers understand."""

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
