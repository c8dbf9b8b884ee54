"""Runs read back from disk: one, or several merged, and a dense trace."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specens.errors import UserError, one_line
from specens.records.files import DENSE_NAME, SUMMARY_NAME
from specens.records.schema import (
    DENSE_SCHEMA,
    OLD_NAMES,
    SCHEMA_VERSION,
    SCHEMAS,
    VERSION_KEY,
    facts_of_dense,
)

READ_VERSIONS = (3, SCHEMA_VERSION)

BENCH_PAGE = "bench.md"
"""In the folder of a bench, which is no run."""

KILLED = "killed"
"""The status of a run that has no summary: its process was killed, or is still at work."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run or several merged ones. The tables have the columns of `SCHEMAS` and `run`. Every
    summary has `run` too, and `overrides`: what the command line gave this job, such as
    `{"layout": "tree"}` (a sweep's jobs differ in them), empty if unknown.
    """

    folders: tuple[Path, ...]
    prompts: pd.DataFrame
    steps: pd.DataFrame
    drafts: pd.DataFrame
    summaries: list[dict[str, Any]]


def load_dense(folder: Path | str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The dense trace of one run, with the facts that were given to `begin_dense`. Raises UserError
    when there is none, or when it cannot be read.
    """
    path = Path(folder) / DENSE_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} has no dense trace ({DENSE_NAME}): make one with python -m specens.run "
            "trace=dense"
        )
    try:
        table = _read_table(path)
        return table.to_pandas(), facts_of_dense(table.schema)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(
            f"{path}: cannot be read ({one_line(error)}); run it again with trace=dense"
        ) from error


def load(*folders: Path | str) -> Run:
    """Read runs: each folder is a run, or holds runs at any depth (a sweep).

    `run` is the run's folder relative to the argument that holds it, or the argument itself when
    that is the run. Files that are broken, foreign or of another schema version are named in a
    warning and skipped. Raises UserError when a folder does not exist or when there is nothing to
    read in all of them.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: name a run folder, or a folder that holds runs"
            )
        paths = [*folder.rglob("*.parquet"), *folder.rglob(SUMMARY_NAME)]
        for path in sorted(path for path in paths if path.name != DENSE_NAME):
            inside = path.parent.relative_to(folder)
            name = str(folder if inside == Path() else inside)
            found.setdefault(path.resolve(), (path, name))
    tables: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
    summaries: list[dict[str, Any]] = []
    read: dict[Path, None] = {}
    for path, run in _with_unique_runs(found):
        try:
            if path.name == SUMMARY_NAME:
                summary = _read_summary(path)
                summaries.append({"run": run, "overrides": overrides_of(path.parent), **summary})
            else:
                table = _read_table(path)
                names = pa.array([run] * len(table), pa.string())
                tables[path.stem].append(table.append_column("run", names))
        except (OSError, ValueError, pa.ArrowException) as error:
            warnings.warn(f"skipped {path}: {error}", stacklevel=2)
        else:
            read[path.parent] = None
    if not read:
        raise UserError(_nothing_to_read([Path(folder) for folder in folders]))
    frames = {name: _merge(name, parts) for name, parts in tables.items()}
    return Run(tuple(read), frames["prompts"], frames["steps"], frames["drafts"], summaries)


def _nothing_to_read(folders: Sequence[Path]) -> str:
    pages = [folder / BENCH_PAGE for folder in folders if (folder / BENCH_PAGE).is_file()]
    hint = f"; a bench's page is {pages[0]}" if pages else ""
    return f"no run to read in {', '.join(map(str, folders)) or 'an empty list of folders'}{hint}"


def missing_tables(folder: Path) -> list[str]:
    """The tables that a run's folder lacks; `load` takes them for empty."""
    return [
        name for name in (f"{table}.parquet" for table in SCHEMAS) if not (folder / name).is_file()
    ]


def status_of(folder: Path) -> str:
    """How a run ended, by its summary: finished, interrupted, failed, or killed (it has none)."""
    try:
        summary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
        return str(summary.get("status", "unknown"))
    except FileNotFoundError:
        return KILLED
    except (OSError, ValueError, AttributeError):
        return "unknown (its summary.json cannot be read)"


def _with_unique_runs(found: Mapping[Path, tuple[Path, str]]) -> Iterator[tuple[Path, str]]:
    """Files with their run's name; the whole path where two folders would have the same name."""
    homes: dict[str, set[Path]] = {}
    for resolved, (_, run) in found.items():
        homes.setdefault(run, set()).add(resolved.parent)
    for path, run in found.values():
        yield path, run if len(homes[run]) == 1 else str(path.parent)


def _read_table(path: Path) -> pa.Table:
    """One parquet file as its schema says. Raises ValueError with the reason when it is not one of
    ours.
    """
    schema = DENSE_SCHEMA if path.name == DENSE_NAME else SCHEMAS.get(path.stem)
    # Not read_table: that takes a sweep's folder names such as drafter=ngram for partition columns.
    with pq.ParquetFile(path) as file:
        version = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
        if schema is None or version is None:
            raise ValueError("not a table of a specens run")
        number = _version(version.decode(errors="replace"))
        table = file.read()
    table = upgraded(path, table, number)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise ValueError(f"it lacks the columns {', '.join(missing)}")
    table = table.select(schema.names)
    return table.cast(schema.with_metadata(table.schema.metadata))


def upgraded(path: Path, table: pa.Table, version: int) -> pa.Table:
    """A table of schema version 3 with the columns of version 4: new names beside the old ones, and
    whether each member was scheduled, which follows from the other columns and the budget.
    """
    name = path.stem
    if version == SCHEMA_VERSION:
        return table
    if path.name == DENSE_NAME:
        return table.append_column("confidences", table["claims"])  # (renaming drops the facts)
    for new, old in OLD_NAMES.get(name, {}).items():
        if old in table.column_names:
            table = table.append_column(new, table[old])
    if name == "drafts" and {*SCHEMAS[name].names} - {*table.column_names} == {"was_scheduled"}:
        table = table.append_column("was_scheduled", pa.array(_was_scheduled(path.parent, table)))
    return table


def _was_scheduled(folder: Path, table: pa.Table) -> np.ndarray:
    """Under budget=priority the members after the first that proposed something were not called."""
    frame = table.to_pandas()
    planned = (frame["num_planned"] > 0).to_numpy()
    if not _was_priority(folder):
        return planned
    has_drafted = frame["num_drafted"] > 0
    before = has_drafted.groupby([frame["prompt_id"], frame["step"]]).cumsum() - has_drafted
    return planned & (before == 0).to_numpy()


def _was_priority(folder: Path) -> bool:
    """Of a run of version 3: by its dense trace, or by its configuration."""
    try:
        if (folder / DENSE_NAME).is_file():
            schema = pq.read_schema(folder / DENSE_NAME)
            return facts_of_dense(schema)["budget"]["name"] == "priority"
        text = (folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")
        # As Hydra writes it; only a budget has this option. YAML may not be installed.
        return re.search(r"^ +first_only: true$", text, flags=re.MULTILINE) is not None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_summary(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "schema_version" not in content:
        raise ValueError("not the summary of a specens run")
    _version(content["schema_version"])
    return content


def overrides_of(folder: Path) -> dict[str, str]:
    """The overrides of the job, as Hydra wrote them into its folder. Raises ValueError when its
    file cannot be read.
    """
    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        return {}
    import yaml  # comes with Hydra; a run that was made otherwise is read without it

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {key: value for key, _, value in (entry.partition("=") for entry in given or [])}
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        name = path.relative_to(folder)
        raise ValueError(f"{name} is not a list of overrides: {one_line(error)}") from error


def _version(version: Any) -> int:
    known = {str(number): number for number in READ_VERSIONS}
    if str(version) not in known:
        raise ValueError(
            f"it has schema version {version}, this specens reads {' and '.join(known)}"
        )
    return known[str(version)]


def _merge(name: str, parts: Sequence[pa.Table]) -> pd.DataFrame:
    empty = SCHEMAS[name].empty_table().append_column("run", pa.array([], pa.string()))
    return pa.concat_tables([empty, *parts]).to_pandas()
