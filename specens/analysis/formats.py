"""How numbers and tables are written, in the terminal and on every page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MISSING = "-"
"""Shown for a number that was never measured."""


def number(value: float | None, form: str) -> str:
    """A value by a format specification such as ".1%"; a dash without one. Never -0."""
    if value is None or math.isnan(value):
        return MISSING
    sign = "+" * form.startswith("+")
    return format(value, f"{sign}z{form.removeprefix('+')}")


def interval(bounds: Sequence[float | None] | None, form: str = ".2f") -> str:
    """A 95% interval in brackets, with a space before it; nothing when there is none."""
    if bounds is None or None in bounds:
        return ""
    low, high = (number(bound, form) for bound in bounds)
    return "" if low == MISSING else f" (95%: {low} to {high})"


Columns = tuple[tuple[str, str, str], ...]
"""Of a table: heading, key in a row, form."""


def headings(columns: Columns) -> list[str]:
    return [title for title, _, _ in columns]


def cells(row: Mapping[str, Any], columns: Columns) -> list[str]:
    return [number(row.get(key), form) for _, key, form in columns]


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1
) -> Iterator[str]:
    """A table in columns that a terminal shows as such: the first `num_left` to the left, the
    others to the right.
    """
    widths = [max(4, *map(len, column)) for column in zip(heads, *rows, strict=True)]
    rules = [
        "-" * width if place < num_left else "-" * (width - 1) + ":"
        for place, width in enumerate(widths)
    ]
    for row in (heads, rules, *rows):
        padded = [
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(padded)} |"
