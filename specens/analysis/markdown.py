"""Numbers as Markdown, which reads well in a terminal too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

NOT_MEASURED = "-"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table: the first column to the left, the others to the right."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(heads) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def number(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None or math.isnan(value) else format(value, form)
