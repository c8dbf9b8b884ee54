"""What a run keeps, as tables: a row per prompt, per step, per step and member, and per position of
a dense trace. The arrow schemas are explicit, so files of any runs can be read together whatever
they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from specens.decoding.merge import part_of
from specens.decoding.types import CONFIDENCE_DIGITS, Draft, StepRecord
from specens.records.credit import credit
from specens.records.files import plain

SCHEMA_VERSION = 4
"""Of the parquet files and of `summary.json`. Version 3 is read too (see `reader.upgraded`)."""

VERSION_KEY = b"specens_schema_version"
"""Where a parquet file's metadata has its version."""

NO_CONFIDENCE = 65535
"""In a dense trace's `confidences`: the drafter has none for this node."""

OLD_NAMES = {
    "prompts": {"divergence": "fork_at", "logit_gap": "fork_margin"},
    "steps": {"logit_gaps": "margins"},
    "drafts": {},
}
"""Columns that had another name in version 3; version 4 writes both."""

_IDS = pa.list_(pa.int64())


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(columns, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


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
        was_scheduled=pa.bool_(),
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
        logit_gaps=pa.list_(pa.float32()),
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
        divergence=pa.int64(),
        logit_gap=pa.float64(),
        fork_at=pa.int64(),
        fork_margin=pa.float64(),
        cost_version=pa.int64(),
        error=pa.string(),
    ),
}
"""Table name (the file's stem) -> columns. In the order of writing: a prompt that is listed has its
steps on disk.
"""

DENSE_SCHEMA = _schema(
    prompt_id=pa.string(),
    position=pa.int32(),
    tokens_wanted=pa.int32(),
    drafter=pa.string(),
    token_ids=pa.list_(pa.int32()),
    parents=pa.list_(pa.int16()),
    confidences=pa.list_(pa.uint16()),
)
"""The dense trace: a row per prompt, position of the output and member. Confidences are counted in
units of their last digit.
"""

_TRACE_KEY = b"specens_trace"


@dataclass(frozen=True, slots=True)
class DenseDraft:
    """All members' proposals behind the first `position` tokens of an output, where a step may emit
    `tokens_wanted` at most.
    """

    position: int
    tokens_wanted: int
    draft: Draft


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt's row. Times are seconds of decoding and of prefill, apart; `baseline_*` is AR
    decoding in the same run.

    `divergence` is the first position at which output and baseline differ, and `logit_gap` the
    target's gap between its two best logits there. `cost_version` is the cost table that the budget
    decided by (costs.json). `output_pieces` is the text cut into one piece per output id. `error`
    says why a prompt failed. What was not measured, or did not happen, is None.
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
    divergence: int | None = None
    logit_gap: float | None = None
    cost_version: int | None = None
    error: str | None = None


def frames_of(
    prompts: Sequence[tuple[PromptRecord, Sequence[StepRecord]]],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Prompts, steps and drafts of results that are not on disk, as the same tables."""
    parts = [tables_of(prompt, steps) for prompt, steps in prompts]
    return as_frames(
        {
            name: pa.concat_tables([schema.empty_table(), *(part[name] for part in parts)])
            for name, schema in SCHEMAS.items()
        }
    )


def as_frames(tables: Mapping[str, pa.Table]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Prompts, steps and drafts, of tables by their names."""
    return tables["prompts"].to_pandas(), tables["steps"].to_pandas(), tables["drafts"].to_pandas()


def tables_of(prompt: PromptRecord, steps: Sequence[StepRecord]) -> dict[str, pa.Table]:
    """The rows of one prompt, by the name of their table."""
    rows = {
        "drafts": [row for step in steps for row in _draft_rows(prompt.prompt_id, step)],
        "steps": [_step_row(prompt.prompt_id, step) for step in steps],
        "prompts": [_with_old_names("prompts", asdict(prompt))],
    }
    return {name: pa.Table.from_pylist(rows[name], schema=s) for name, s in SCHEMAS.items()}


def begin_dense(facts: Mapping[str, Any]) -> pa.Table:
    """An empty dense trace. `facts` is what replay must know besides: members, end ids, budget,
    layout.
    """
    text = json.dumps(plain(facts), allow_nan=False).encode()
    metadata = {**(DENSE_SCHEMA.metadata or {}), _TRACE_KEY: text}
    return DENSE_SCHEMA.with_metadata(metadata).empty_table()


def facts_of_dense(schema: pa.Schema) -> dict[str, Any]:
    """What was given to `begin_dense`, from a trace's schema. Raises KeyError or ValueError when it
    is not there.
    """
    return json.loads((schema.metadata or {})[_TRACE_KEY])


def add_dense(trace: pa.Table, prompt_id: str, dense: Sequence[DenseDraft]) -> pa.Table:
    """A dense trace with one more prompt."""
    members = [member["name"] for member in facts_of_dense(trace.schema)["members"]]
    rows = [row for one in dense for row in _dense_rows(prompt_id, one, members)]
    return pa.concat_tables([trace, pa.Table.from_pylist(rows, schema=trace.schema)])


def _with_old_names(table: str, row: dict[str, Any]) -> dict[str, Any]:
    return row | {old: row[new] for new, old in OLD_NAMES[table].items()}


def _step_row(prompt_id: str, step: StepRecord) -> dict[str, Any]:
    derived = ("prompt_id", *OLD_NAMES["steps"].values())
    names = [name for name in SCHEMAS["steps"].names if name not in derived]
    row = {"prompt_id": prompt_id} | {name: getattr(step, name) for name in names}
    return _with_old_names("steps", row | {"logit_gaps": step.logit_gaps or None})


def _dense_rows(
    prompt_id: str, one: DenseDraft, members: Sequence[str]
) -> Iterator[dict[str, Any]]:
    unit = 10**CONFIDENCE_DIGITS
    for index, name in enumerate(members):
        part = part_of(one.draft, index)
        yield {
            "prompt_id": prompt_id,
            "position": one.position,
            "tokens_wanted": one.tokens_wanted,
            "drafter": name,
            "token_ids": part.token_ids,
            "parents": part.parents,
            "confidences": [
                NO_CONFIDENCE if c is None else round(c * unit) for c in part.confidences
            ],
        }


def _draft_rows(prompt_id: str, step: StepRecord) -> list[dict[str, Any]]:
    credits = credit([member.num_matched for member in step.members], step.num_accepted)
    return [
        {"prompt_id": prompt_id, "step": step.step, **asdict(member), **asdict(share)}
        for member, share in zip(step.members, credits, strict=True)
    ]
