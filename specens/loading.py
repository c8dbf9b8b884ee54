"""Runs read back from disk: one, or several merged, and a dense trace."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specens.errors import UserError, one_line
from specens.files import DENSE_NAME, SUMMARY_NAME
from specens.tables import DENSE_SCHEMA, SCHEMA_VERSION, SCHEMAS, VERSION_KEY, facts_of

BENCH_PAGE = "bench.md"
"""In the folder of a bench, which is no run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run or several merged ones. The tables have the columns of `SCHEMAS` and `run`. Every summary has `run` too, and
    `words`: what the command line gave this job, `{"layout": "tree"}` (a sweep's jobs differ in them), empty if unknown.
    """

    folders: tuple[Path, ...]
    prompts: pd.DataFrame
    steps: pd.DataFrame
    drafts: pd.DataFrame
    summaries: list[dict[str, Any]]


def load_dense(folder: Path | str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The dense trace of one run, with the facts that were given to `begin_dense`. Raises UserError when there is none, or when
    it cannot be read.
    """
    path = Path(folder) / DENSE_NAME
    if not path.is_file():
        raise UserError(f"{folder} has no dense trace ({DENSE_NAME}): make one with python -m specens.run trace=dense")
    try:
        table = _read_table(path)
        return table.to_pandas(), facts_of(table)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); run it again with trace=dense") from error


def load(*folders: Path | str) -> Run:
    """Read runs: each folder is a run, or holds runs at any depth (a sweep).

    `run` is the run's folder relative to the argument that holds it, or the argument itself when that is the run. Files
    that are broken, foreign or of another schema version are named in a warning and skipped. Raises UserError when a
    folder does not exist or when there is nothing to read in all of them.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: name a run folder, or a folder that holds runs")
        tables_and_summaries = [*folder.rglob("*.parquet"), *folder.rglob(SUMMARY_NAME)]
        for path in sorted(path for path in tables_and_summaries if path.name != DENSE_NAME):
            inside = path.parent.relative_to(folder)
            found.setdefault(path.resolve(), (path, str(folder if inside == Path() else inside)))
    tables: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
    summaries: list[dict[str, Any]] = []
    read: dict[Path, None] = {}
    for path, run in _with_unique_runs(found):
        try:
            if path.name == SUMMARY_NAME:
                summaries.append({"run": run, "words": words_of(path.parent), **_read_summary(path)})
            else:
                table = _read_table(path)
                tables[path.stem].append(table.append_column("run", pa.array([run] * len(table), pa.string())))
        except (OSError, ValueError, pa.ArrowException) as error:
            warnings.warn(f"skipped {path}: {error}", stacklevel=2)
        else:
            read[path.parent] = None
    if not read:
        pages = [folder / BENCH_PAGE for folder in map(Path, folders) if (folder / BENCH_PAGE).is_file()]
        hint = f"; a bench's page is {pages[0]}" if pages else ""
        raise UserError(f"no run to read in {', '.join(map(str, folders)) or 'an empty list of folders'}{hint}")
    frames = {name: _merge(name, parts) for name, parts in tables.items()}
    return Run(tuple(read), frames["prompts"], frames["steps"], frames["drafts"], summaries)


def missing_tables(folder: Path) -> list[str]:
    """The tables that a run's folder lacks; `load` takes them for empty."""
    return [name for name in (f"{table}.parquet" for table in SCHEMAS) if not (folder / name).is_file()]


def _with_unique_runs(found: Mapping[Path, tuple[Path, str]]) -> Iterator[tuple[Path, str]]:
    """Files with their run's name; the whole path where two folders would have the same name."""
    homes: dict[str, set[Path]] = {}
    for resolved, (_, run) in found.items():
        homes.setdefault(run, set()).add(resolved.parent)
    for path, run in found.values():
        yield path, run if len(homes[run]) == 1 else str(path.parent)


def _read_table(path: Path) -> pa.Table:
    """One parquet file as its schema says. Raises ValueError with the reason when it is not one of ours."""
    schema = DENSE_SCHEMA if path.name == DENSE_NAME else SCHEMAS.get(path.stem)
    # not read_table: that takes a sweep's folder names such as drafter=ngram for partition columns
    with pq.ParquetFile(path) as file:
        version = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
        if schema is None or version is None:
            raise ValueError("not a table of a specens run")
        _check_version(version.decode(errors="replace"))
        missing = [name for name in schema.names if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"it lacks the columns {', '.join(missing)}")
        table = file.read(columns=schema.names).select(schema.names)
        return table.cast(schema.with_metadata(table.schema.metadata))


def _read_summary(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "schema_version" not in content:
        raise ValueError("not the summary of a specens run")
    _check_version(content["schema_version"])
    return content


def words_of(folder: Path) -> dict[str, str]:
    """The words of the job, as Hydra wrote them into its folder. Raises ValueError when its file cannot be read."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        return {}
    import yaml  # comes with Hydra; a run that was made otherwise is read without it

    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {key: value for key, _, value in (word.partition("=") for word in words or [])}
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.relative_to(folder)} is not a list of words: {one_line(error)}") from error


def _check_version(version: Any) -> None:
    if str(version) != str(SCHEMA_VERSION):
        raise ValueError(f"it has schema version {version}, this specens reads {SCHEMA_VERSION}")


def _merge(name: str, parts: Sequence[pa.Table]) -> pd.DataFrame:
    empty = SCHEMAS[name].empty_table().append_column("run", pa.array([], pa.string()))
    return pa.concat_tables([empty, *parts]).to_pandas()
