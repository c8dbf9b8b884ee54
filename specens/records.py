"""A run on disk: step records to parquet, per prompt and atomically, and a loader that merges runs.

A run folder has `prompts.parquet` (a row per prompt), `steps.parquet` (per step), `drafts.parquet` (per step and member)
and `summary.json`; `costs.json` if the budget decided by what steps cost; with trace=dense also `dense.parquet`. The arrow
schemas are explicit, so files of any runs can be read together whatever they hold.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specens.analysis.metrics import credit
from specens.analysis.trace import NO_CLAIM
from specens.decoding.costs import CostTable
from specens.decoding.merge import part_of
from specens.decoding.types import CLAIM_DIGITS, Draft, StepRecord
from specens.errors import UserError, one_line
from specens.files import plain, write_whole

SCHEMA_VERSION = 3
"""Of the parquet files and of `summary.json`; files of another version are not read."""

SUMMARY_NAME = "summary.json"

COSTS_NAME = "costs.json"

_VERSION_KEY = b"specens_schema_version"
_IDS = pa.list_(pa.int64())


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(columns, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


SCHEMAS: dict[str, pa.Schema] = {
    "drafts": _schema(
        prompt_id=pa.string(),
        step=pa.int64(),
        drafter=pa.string(),
        num_drafted=pa.int64(),
        num_verified=pa.int64(),
        num_matched=pa.int64(),
        num_tested=pa.int64(),
        is_win=pa.bool_(),
        win=pa.float64(),
        is_sole_win=pa.bool_(),
        token_share=pa.float64(),
        marginal=pa.int64(),
        draft_ms=pa.float64(),
        num_planned=pa.int64(),
    ),
    "steps": _schema(
        prompt_id=pa.string(),
        step=pa.int64(),
        context_tokens=pa.int64(),
        num_nodes=pa.int64(),
        num_accepted=pa.int64(),
        num_emitted=pa.int64(),
        token_ids=_IDS,
        token_owners=_IDS,
        draft_ms=pa.float64(),
        verify_ms=pa.float64(),
        host_ms=pa.float64(),
        layout=pa.string(),
        finish_reason=pa.string(),
        mode=pa.string(),
        rate=pa.float64(),
        margins=pa.list_(pa.float32()),
    ),
    "prompts": _schema(
        prompt_id=pa.string(),
        category=pa.string(),
        prompt_text=pa.string(),
        prompt_ids=_IDS,
        output_ids=_IDS,
        output_pieces=pa.list_(pa.string()),
        text=pa.string(),
        finish_reason=pa.string(),
        num_steps=pa.int64(),
        decode_s=pa.float64(),
        prefill_s=pa.float64(),
        baseline_decode_s=pa.float64(),
        baseline_ids=_IDS,
        is_identical=pa.bool_(),
        fork_at=pa.int64(),
        fork_margin=pa.float64(),
        cost_version=pa.int64(),
        error=pa.string(),
    ),
}
"""Table name (the file's stem) -> columns. In the order of writing: a prompt that is listed has its steps on disk."""


DENSE_NAME = "dense.parquet"

DENSE_SCHEMA = _schema(
    prompt_id=pa.string(),
    position=pa.int32(),
    tokens_wanted=pa.int32(),
    drafter=pa.string(),
    token_ids=pa.list_(pa.int32()),
    parents=pa.list_(pa.int16()),
    claims=pa.list_(pa.uint16()),
)
"""The dense trace: a row per prompt, position of the output and member. Claims are counted in units of their last digit."""

_TRACE_KEY = b"specens_trace"


@dataclass(frozen=True, slots=True)
class DenseDraft:
    """All members' proposals behind the first `position` tokens of an output, where a step may emit `tokens_wanted` at most."""

    position: int
    tokens_wanted: int
    draft: Draft


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt's row. Times are seconds of decoding and of prefill, apart; `baseline_*` is plain decoding, same run.

    `fork_at` is the first position at which output and baseline differ and `fork_margin` the target's gap between its
    two best logits there. `cost_version` is the cost table that the budget decided by (costs.json). `output_pieces` is the
    text cut into one piece per output id. `error` says why a prompt failed. What was not measured, or did not happen, is None.
    """

    prompt_id: str
    category: str = ""
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    output_pieces: Sequence[str] = ()
    text: str = ""
    finish_reason: str | None = None
    num_steps: int = 0
    decode_s: float | None = None
    prefill_s: float | None = None
    baseline_decode_s: float | None = None
    baseline_ids: Sequence[int] | None = None
    is_identical: bool | None = None
    fork_at: int | None = None
    fork_margin: float | None = None
    cost_version: int | None = None
    error: str | None = None


class RunWriter:
    """Writes one run folder, which belongs to one process. After every `add` the files on disk are complete."""

    def __init__(self, folder: Path) -> None:
        """Create `folder` with empty tables. Raises UserError when it already holds a run."""
        self.folder = Path(folder)
        self._tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()}
        self._prompt_ids: set[str] = set()
        self._dense: pa.Table | None = None
        taken = UserError(f"{self.folder} already holds a run: give this run a folder of its own (hydra.run.dir=...)")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the run folder {self.folder}: {error.strerror}") from error
        if any((self.folder / name).exists() for name in (*(f"{table}.parquet" for table in SCHEMAS), SUMMARY_NAME)):
            raise taken
        for name, table in self._tables.items():
            try:  # exclusive creation: of two processes that start in one folder at once, one is refused here
                with (self.folder / f"{name}.parquet").open("xb") as file:
                    pq.write_table(table, file)
            except FileExistsError as error:
                raise taken from error

    def begin_dense(self, facts: Mapping[str, Any]) -> None:
        """Keep a dense trace too. `facts` is what replay must know besides: members, end ids, budget, layout."""
        text = json.dumps(plain(facts), allow_nan=False).encode()
        self._dense = DENSE_SCHEMA.with_metadata({**(DENSE_SCHEMA.metadata or {}), _TRACE_KEY: text}).empty_table()

    def add(self, prompt: PromptRecord, steps: Sequence[StepRecord], dense: Sequence[DenseDraft] = ()) -> None:
        """Append one prompt with its steps, and with its dense trace if the run keeps one, and replace the files; when that
        fails, tables and files stay as they were.

        Raises UserError for a prompt id that the run already has.
        """
        if prompt.prompt_id in self._prompt_ids:
            raise UserError(
                f"prompt id {prompt.prompt_id!r} is already in {self.folder}: prompt ids must differ in a run"
            )
        tables = {
            name: pa.concat_tables([self._tables[name], table]) for name, table in _tables_of(prompt, steps).items()
        }
        files = {f"{name}.parquet": table for name, table in tables.items()}
        trace = self._dense
        if trace is not None:
            rows = [row for one in dense for row in _dense_rows(prompt.prompt_id, one, _member_names(trace))]
            trace = pa.concat_tables([trace, pa.Table.from_pylist(rows, schema=trace.schema)])
            files = {DENSE_NAME: trace, **files}  # a prompt that is listed has its trace on disk
        write_whole(self.folder, files)
        self._tables, self._dense = tables, trace
        self._prompt_ids.add(prompt.prompt_id)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` with its `schema_version`; NaN and infinity become null."""
        content = {"schema_version": SCHEMA_VERSION, **plain(summary)}
        text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
        write_whole(self.folder, {SUMMARY_NAME: text + "\n"})

    def add_error(self, prompt_id: str, trace: str) -> None:
        """Append a failed prompt's traceback to `errors.log`."""
        with (self.folder / "errors.log").open("a", encoding="utf-8") as file:
            file.write(f"prompt {prompt_id}\n{trace}\n")

    def write_costs(self, tables: Sequence[CostTable]) -> None:
        """Write `costs.json`: the cost tables of the run, in the order in which they were in force."""
        versions = [{"version": version, "table": table.content()} for version, table in enumerate(tables)]
        content = {"schema_version": SCHEMA_VERSION, "versions": versions}
        write_whole(self.folder, {COSTS_NAME: json.dumps(plain(content), indent=1, allow_nan=False) + "\n"})

    def write_page(self, html: str) -> None:
        """Write `report.html`."""
        write_whole(self.folder, {"report.html": html})

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Prompts, steps and drafts added so far."""
        return _frames(self._tables)


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
        facts = json.loads((table.schema.metadata or {})[_TRACE_KEY])
        return table.to_pandas(), facts
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
        raise UserError(f"no run to read in {', '.join(map(str, folders)) or 'an empty list of folders'}")
    frames = {name: _merge(name, parts) for name, parts in tables.items()}
    return Run(tuple(read), frames["prompts"], frames["steps"], frames["drafts"], summaries)


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
        version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY)
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


def frames_of(
    prompts: Sequence[tuple[PromptRecord, Sequence[StepRecord]]],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Prompts, steps and drafts of results that are not on disk, as the same tables."""
    parts = [_tables_of(prompt, steps) for prompt, steps in prompts]
    return _frames(
        {
            name: pa.concat_tables([schema.empty_table(), *(part[name] for part in parts)])
            for name, schema in SCHEMAS.items()
        }
    )


def _frames(tables: Mapping[str, pa.Table]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    return tables["prompts"].to_pandas(), tables["steps"].to_pandas(), tables["drafts"].to_pandas()


def _tables_of(prompt: PromptRecord, steps: Sequence[StepRecord]) -> dict[str, pa.Table]:
    rows = {
        "drafts": [row for step in steps for row in _draft_rows(prompt.prompt_id, step)],
        "steps": [_step_row(prompt.prompt_id, step) for step in steps],
        "prompts": [asdict(prompt)],
    }
    return {name: pa.Table.from_pylist(rows[name], schema=schema) for name, schema in SCHEMAS.items()}


def _step_row(prompt_id: str, step: StepRecord) -> dict[str, Any]:
    row = {name: getattr(step, name) for name in SCHEMAS["steps"].names if name != "prompt_id"}
    return {"prompt_id": prompt_id, **row, "margins": step.margins or None}


def _member_names(trace: pa.Table) -> list[str]:
    return [member["name"] for member in json.loads(trace.schema.metadata[_TRACE_KEY])["members"]]


def _dense_rows(prompt_id: str, one: DenseDraft, members: Sequence[str]) -> Iterator[dict[str, Any]]:
    for index, name in enumerate(members):
        part = part_of(one.draft, index)
        yield {
            "prompt_id": prompt_id,
            "position": one.position,
            "tokens_wanted": one.tokens_wanted,
            "drafter": name,
            "token_ids": part.token_ids,
            "parents": part.parents,
            "claims": [NO_CLAIM if claim is None else round(claim * 10**CLAIM_DIGITS) for claim in part.claims],
        }


def _draft_rows(prompt_id: str, step: StepRecord) -> list[dict[str, Any]]:
    credits = credit([member.num_matched for member in step.members], step.num_accepted)
    return [
        {"prompt_id": prompt_id, "step": step.step, **asdict(member), **asdict(share)}
        for member, share in zip(step.members, credits, strict=True)
    ]
