"""Files: written whole or not at all, with plain values in them; and the cache folder."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specens.errors import UserError

SUMMARY_NAME = "summary.json"
COSTS_NAME = "costs.json"
DENSE_NAME = "dense.parquet"
REPLAY_NAME = "replay.json"
REPLAY_PAGE_NAME = "replay.md"
PAGE_NAME = "report.html"
"""Of a run folder, beside its tables."""


Content = str | pa.Table | Callable[[Path], None]
"""Of a file: text, a table that is written as parquet, or a function that writes it to a path."""


def write_whole(folder: Path, contents: Mapping[str, Content]) -> None:
    """Write every file under a temporary name in the same folder; only when all are written, rename
    them. So a killed process leaves no half file under a real name.
    """
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            if isinstance(content, str):
                temporary[name].write_text(content, encoding="utf-8")
            elif isinstance(content, pa.Table):
                pq.write_table(content, temporary[name], compression="zstd")
            else:
                content(temporary[name])
        for name, path in temporary.items():
            os.replace(path, folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def write_result(folder: Path, contents: Mapping[str, Content], what: str) -> None:
    """`write_whole` for what a command was asked for: UserError in one line when it fails."""
    try:
        write_whole(folder, contents)
    except OSError as error:
        raise UserError(f"cannot write {what} into {folder}: {error.strerror}") from error


def plain(value: Any) -> Any:
    """`value` as plain dicts, lists and scalars: numpy unwrapped, NaN and infinity as None, other
    objects as text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def cache_dir() -> Path:
    """Where converted models are kept: SPECENS_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SPECENS_CACHE") or Path(base) / "specens")


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there, under a lock: one process makes it while others wait."""
    if folder.is_dir():
        return folder
    from filelock import FileLock  # analysis reads runs where only pandas and pyarrow are installed

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            make_whole(folder, make)
    return folder


def make_whole(folder: Path, make: Callable[[Path], bool | None]) -> None:
    """Make a folder under a temporary name beside it and rename it, unless `make` returns False."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        if make(made) is not False:
            os.replace(made, folder)
