"""Files of a run folder: written whole or not at all, with plain values in them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUMMARY_NAME = "summary.json"
COSTS_NAME = "costs.json"
DENSE_NAME = "dense.parquet"
REPLAY_NAME = "replay.json"
REPLAY_PAGE_NAME = "replay.md"
PAGE_NAME = "report.html"
"""Of a run folder, beside its tables."""


def write_whole(folder: Path, contents: Mapping[str, pa.Table | str]) -> None:
    """Write every file (a table as parquet) under a temporary name in the same folder; only when all are written, rename them."""
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            if isinstance(content, str):
                temporary[name].write_text(content, encoding="utf-8")
            else:
                pq.write_table(content, temporary[name], compression="zstd")
        for name, path in temporary.items():
            os.replace(path, folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """`value` as plain dicts, lists and scalars: numpy unwrapped, NaN and infinity as None, other objects as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
