"""One row of `bench.csv`: one system's decoding of one prompt. No torch here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Row:
    """`order` is the system's place among those that decoded the prompt in this repeat.

    The clock runs from the first emission to the last, for every system alike: transformers'
    generate has no seam between prefill and decoding, and its first forward emits a token. So
    `prefill_s` is the time to the first emission (set-up, the prompt, the first step), `decode_s`
    what follows, and `num_timed_tokens`, `num_timed_steps`, `num_nodes` (verified draft nodes) and
    the seconds of drafting, verifying and CPU overhead (`host_s`: all the rest) count only what
    came after the first emission.

    `divergence`: first position at which the output differs from AR decoding's. What was not
    measured is None; `error` says why a decoding failed.
    """

    prompt_id: str
    category: str
    repeat: int
    order: int
    system: str
    num_tokens: int = 0
    num_steps: int = 0
    num_timed_tokens: int = 0
    num_timed_steps: int = 0
    num_nodes: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    host_s: float | None = None
    is_identical: bool | None = None
    divergence: int | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None


COLUMNS = tuple(field.name for field in fields(Row))


def csv_of(rows: Iterable[Row]) -> str:
    """Comma-separated values; None is an empty cell, booleans are true and false."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        cells = asdict(row).values()
        writer.writerow(str(cell).lower() if isinstance(cell, bool) else cell for cell in cells)
    return text.getvalue()
