"""What a tracker shows of a run: flat numbers, and tables in which every column is of one type.
Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specens.records.files import plain

Cell = str | float | int | bool | None

PROMPT_COLUMNS = (
    *("prompt_id", "category", "prompt_text", "text", "finish_reason", "num_steps"),
    *("decode_s", "prefill_s", "baseline_decode_s", "is_identical", "divergence", "logit_gap"),
    "error",
)
"""Columns of every run's table of prompts, in this order; further ones follow."""


def progress_scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a running summary, flat: its own, and `win_rate/<name>`, `token_share/<name>`
    of every drafter.

    Missing values (None, NaN) are left out, so a chart has a gap there and not a zero.
    """
    summary = plain(row)
    scalars = {key: value for key, value in summary.items() if is_number(value)}
    for name, numbers in summary.get("drafters", {}).items():
        for key in ("win_rate", "token_share"):
            if is_number(numbers.get(key)):
                scalars[f"{key}/{name}"] = numbers[key]
    return scalars


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level, keys joined by "/" ("drafters/ngram/win_rate"). Lists stay, NaN
    becomes None.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = plain(value)
    return flat


def table_rows(
    rows: Sequence[Mapping[str, Any]], fixed_columns: Sequence[str]
) -> tuple[list[str], list[list[Cell]]]:
    """Column names and cells of a table: the fixed columns, then the rows' further ones in order of
    appearance.

    W&B refuses a column that mixes types and rows of unequal length. So every column is all bool,
    all int, all float or all str, with None for what a row lacks; token lists become JSON text.
    """
    columns = list(dict.fromkeys([*fixed_columns, *(key for row in rows for key in row)]))
    by_column = [_one_type([plain(row.get(column)) for row in rows]) for column in columns]
    return columns, [list(cells) for cells in zip(*by_column, strict=True)]


def _one_type(cells: Sequence[Any]) -> list[Cell]:
    """A column's plain values as one type; None stays None."""
    types = {type(cell) for cell in cells if cell is not None}
    if types == {int, float}:
        return [None if cell is None else float(cell) for cell in cells]
    if len(types) <= 1 and types <= {bool, int, float, str}:
        return list(cells)
    return [cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]


def depth_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`acceptance_by_depth` of every drafter as rows (drafter, depth, acceptance_rate): depths from
    1, where one was measured.
    """
    return [
        {"drafter": name, "depth": depth, "acceptance_rate": rate}
        for name, numbers in plain(summary).get("drafters", {}).items()
        for depth, rate in enumerate(numbers.get("acceptance_by_depth") or [], start=1)
        if is_number(rate)
    ]


def is_number(value: Any) -> bool:
    # a bool is a number here: it charts as 0 or 1
    return isinstance(value, int | float) and math.isfinite(value)
