"""A run on disk: its tables to parquet, per prompt and atomically.

A run folder has `prompts.parquet` (a row per prompt), `steps.parquet` (per step), `drafts.parquet`
(per step and member) and `summary.json`; `costs.json` if the budget decided by what steps cost;
with trace=dense also `dense.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specens.decoding.budgets.costs import CostTable
from specens.decoding.types import StepRecord
from specens.errors import UserError
from specens.records.files import (
    COSTS_NAME,
    DENSE_NAME,
    PAGE_NAME,
    SUMMARY_NAME,
    plain,
    write_whole,
)
from specens.records.schema import (
    SCHEMA_VERSION,
    SCHEMAS,
    DenseDraft,
    PromptRecord,
    add_dense,
    as_frames,
    begin_dense,
    tables_of,
)


class RunWriter:
    """Writes one run folder, which belongs to one process. After every `add` the files on disk are
    complete.
    """

    def __init__(self, folder: Path) -> None:
        """Create `folder` with empty tables. Raises UserError when it already holds a run."""
        self.folder = Path(folder)
        self._tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()}
        self._prompt_ids: set[str] = set()
        self._dense: pa.Table | None = None
        taken = UserError(
            f"{self.folder} already holds a run: give this run a folder of its own "
            "(hydra.run.dir=...)"
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot create the run folder {self.folder}: {error.strerror}"
            ) from error
        _remove_refused(self.folder)
        if any(
            (self.folder / name).exists()
            for name in (*(f"{table}.parquet" for table in SCHEMAS), SUMMARY_NAME)
        ):
            raise taken
        for name, table in self._tables.items():
            # exclusive creation: of two processes that start in one folder at once, one is refused
            # here
            try:
                with (self.folder / f"{name}.parquet").open("xb") as file:
                    pq.write_table(table, file)
            except FileExistsError as error:
                raise taken from error

    def begin_dense(self, facts: Mapping[str, Any]) -> None:
        """Keep a dense trace too. `facts` is what replay must know besides: members, end ids,
        budget, layout.
        """
        self._dense = begin_dense(facts)

    def add(
        self, prompt: PromptRecord, steps: Sequence[StepRecord], dense: Sequence[DenseDraft] = ()
    ) -> None:
        """Append one prompt with its steps, and with its dense trace if the run keeps one, and
        replace the files; when that fails, tables and files stay as they were.

        Raises UserError for a prompt id that the run already has.
        """
        if prompt.prompt_id in self._prompt_ids:
            raise UserError(
                f"prompt id {prompt.prompt_id!r} is already in {self.folder}: prompt ids must "
                "differ in a run"
            )
        tables = {
            name: pa.concat_tables([self._tables[name], table])
            for name, table in tables_of(prompt, steps).items()
        }
        files = {f"{name}.parquet": table for name, table in tables.items()}
        trace = self._dense
        if trace is not None:
            trace = add_dense(trace, prompt.prompt_id, dense)
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
        """Write `costs.json`: the cost tables of the run, in the order in which they were used."""
        versions = [
            {"version": version, "table": table.content()} for version, table in enumerate(tables)
        ]
        content = {"schema_version": SCHEMA_VERSION, "versions": versions}
        write_whole(
            self.folder, {COSTS_NAME: json.dumps(plain(content), indent=1, allow_nan=False) + "\n"}
        )

    def write_page(self, html: str) -> None:
        """Write the page."""
        write_whole(self.folder, {PAGE_NAME: html})

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Prompts, steps and drafts added so far."""
        return as_frames(self._tables)


def _remove_refused(folder: Path) -> None:
    """Make room where a run was refused before its first prompt: it left empty tables, and why."""
    summary = folder / SUMMARY_NAME
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
        is_refused = content["status"] == "failed" and not content.get("num_prompts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if is_refused:
        summary.unlink()  # of two processes that start here at once, one fails at this
        for name in SCHEMAS:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
