"""Run folders: what is written can be read, whole or not at all, alone or merged."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import REPOSITORY

from specens.analysis.summary import summarise
from specens.decoding.types import MemberRecord, StepRecord
from specens.errors import UserError
from specens.records.reader import load, load_dense
from specens.records.schema import DENSE_SCHEMA, OLD_NAMES, SCHEMAS, PromptRecord
from specens.records.writer import RunWriter


def prompt(prompt_id: str = "p", **changes: object) -> PromptRecord:
    record = PromptRecord(
        prompt_id=prompt_id,
        category="chat",
        prompt_text="Héllo, <world> 🙂",
        prompt_ids=(1, 2, 3),
        output_ids=(4, 5, 6),
        text="one two\nthree",
        finish_reason="length",
        num_steps=2,
        decode_s=0.5,
        prefill_s=0.1,
    )
    return dataclasses.replace(record, **changes)  # pyright: ignore[reportArgumentType]


def step(
    number: int = 0, token_ids: tuple[int, ...] = (4, 5), matched: tuple[int, ...] = (1, 0)
) -> StepRecord:
    members = tuple(
        MemberRecord(
            name,
            num_drafted=2,
            num_verified=2,
            num_matched=m,
            num_tested=min(m + 1, 2),
            draft_ms=1.5,
        )
        for name, m in zip("ab", matched, strict=False)
    )
    return StepRecord(
        step=number,
        context_tokens=3,
        num_nodes=2 * len(members),
        num_accepted=max(matched, default=0),
        token_ids=token_ids,
        token_owners=(*(1 for _ in token_ids[1:]), 0),
        draft_ms=3.0,
        verify_ms=20.0,
        host_ms=1.0,
        layout="tree",
        members=members,
    )


def ar_step(number: int = 0) -> StepRecord:
    return step(number, token_ids=(9,), matched=())


def write_run(
    folder: Path, *prompt_ids: str, steps: tuple[StepRecord, ...] = (step(),)
) -> RunWriter:
    writer = RunWriter(folder)
    for prompt_id in prompt_ids:
        writer.add(prompt(prompt_id), steps)
    return writer


def test_every_row_comes_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    first = prompt(
        "q",
        baseline_decode_s=1.0,
        baseline_ids=(4, 5, 7),
        is_identical=False,
        divergence=2,
        logit_gap=0.01,
    )
    writer.add(first, [step(0), step(1, token_ids=(6,), matched=(0, 0))])
    writer.add(prompt("r", error="boom", decode_s=None, finish_reason=None), [])
    run = load(tmp_path / "run")
    row = run.prompts.iloc[0]
    for field in dataclasses.fields(PromptRecord):
        expected = getattr(first, field.name)
        if expected is None:
            assert pd.isna(row[field.name])
        else:
            assert (
                tuple(row[field.name]) if isinstance(expected, tuple) else row[field.name]
            ) == expected
    assert run.prompts["error"].tolist()[1] == "boom"
    assert np.isnan(run.prompts["decode_s"][1])
    assert run.steps["token_ids"].map(list).tolist() == [[4, 5], [6]]
    assert run.steps["token_owners"].map(list).tolist() == [[1, 0], [0]]
    assert run.steps["num_emitted"].tolist() == [2, 1]
    assert run.drafts[["step", "drafter", "win"]].to_numpy().tolist() == [
        [0, "a", 1.0],
        [0, "b", 0.0],
        [1, "a", 0.0],
        [1, "b", 0.0],
    ]
    assert set(run.prompts["run"]) == {str(tmp_path / "run")}


def test_the_writers_frames_are_what_a_reader_finds(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "p", "q")
    run = load(tmp_path)
    for mine, read in zip(writer.frames(), (run.prompts, run.steps, run.drafts), strict=True):
        pd.testing.assert_frame_equal(mine, read.drop(columns="run"))
    assert summarise(*writer.frames())["acceptance_length"] == 2.0


def test_files_carry_their_schema_and_version(tmp_path: Path) -> None:
    write_run(tmp_path, "p")
    for name, schema in SCHEMAS.items():
        stored = pq.read_schema(tmp_path / f"{name}.parquet")
        assert stored.equals(schema)
        assert (stored.metadata or {})[b"specens_schema_version"] == b"4"
        assert list(pd.read_parquet(tmp_path / f"{name}.parquet").columns) == schema.names


def test_a_run_without_prompts_is_readable(tmp_path: Path) -> None:
    RunWriter(tmp_path)
    run = load(tmp_path)
    assert len(run.prompts) == len(run.steps) == len(run.drafts) == 0
    assert summarise(run.prompts, run.steps, run.drafts)["acceptance_length"] is None


@pytest.mark.parametrize(
    "occupant", ["prompts.parquet", "steps.parquet", "drafts.parquet", "summary.json"]
)
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, occupant: str) -> None:
    (tmp_path / occupant).write_bytes(b"old")
    with pytest.raises(UserError, match="already holds a run") as refusal:
        RunWriter(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == [occupant]
    assert (tmp_path / occupant).read_bytes() == b"old"


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create the run folder"):
        RunWriter(tmp_path / "file" / "run")


def test_b58_of_two_that_start_at_once_in_one_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_run(tmp_path, "p")
    # the second looked before the first had written
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(UserError, match="already holds a run"):
        RunWriter(tmp_path)
    monkeypatch.undo()
    assert (
        load(tmp_path).prompts["prompt_id"].tolist()
        == first.frames()[0]["prompt_id"].tolist()
        == ["p"]
    )


def test_b57_a_file_is_replaced_and_never_rewritten_in_place(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "p")
    writer.write_summary({"status": "running"})
    names = [*(f"{name}.parquet" for name in SCHEMAS), "summary.json"]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    with contextlib.ExitStack() as stack:
        readers = {name: stack.enter_context((tmp_path / name).open("rb")) for name in names}
        writer.add(prompt("q"), [step()])
        writer.write_summary({"status": "finished"})
        assert {name: reader.read() for name, reader in readers.items()} == before
    assert all((tmp_path / name).read_bytes() != before[name] for name in names)


def test_a_repeated_prompt_id_is_refused(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "p")
    with pytest.raises(UserError, match="'p' is already"):
        writer.add(prompt("p"), [step()])


def test_an_add_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write_run(tmp_path, "p")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="matched"):
        writer.add(prompt("q"), [step(), dataclasses.replace(step(1), num_accepted=2)])
    write_table, calls = pq.write_table, []

    def disk_full(table: pa.Table, where: Path, **options: str) -> None:
        calls.append(where)
        if len(calls) == 3:
            Path(where).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write_table(table, where)

    monkeypatch.setattr(pq, "write_table", disk_full)
    with pytest.raises(OSError, match="No space"):
        writer.add(prompt("q"), [step()])
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(writer.frames()[0]) == 1
    writer.add(prompt("q"), [step()])
    assert load(tmp_path).prompts["prompt_id"].tolist() == ["p", "q"]


def test_a_killed_run_keeps_every_finished_prompt(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from records.test_records import RunWriter, prompt, step\n"
        "writer = RunWriter(Path(sys.argv[1]))\n"
        "for number in range(10**6):\n"
        "    writer.add(prompt(f'p{number}'), [step(i) for i in range(50)])\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(REPOSITORY / "tests")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        last = int(([str(last), *process.stdout.read().split()])[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = load(tmp_path / "run")
    listed = run.prompts["prompt_id"].tolist()
    assert listed == [f"p{number}" for number in range(len(listed))]
    assert len(listed) > last
    assert (run.steps.groupby("prompt_id").size().reindex(listed) == 50).all()


def test_b58_a_sweep_is_merged_with_the_runs_named(tmp_path: Path) -> None:
    write_run(tmp_path / "drafter=ngram" / "0", "p")
    write_run(tmp_path / "drafter=lm" / "1", "p", "q")
    run = load(tmp_path)
    assert run.prompts.groupby("run").size().to_dict() == {"drafter=ngram/0": 1, "drafter=lm/1": 2}
    assert run.drafts["drafter"].unique().tolist() == ["a", "b"]
    assert set(run.folders) == {tmp_path / "drafter=ngram" / "0", tmp_path / "drafter=lm" / "1"}


def test_a_folder_named_twice_is_read_once_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "x" / "0", "p")
    write_run(tmp_path / "y" / "0", "p")
    run = load(tmp_path / "x", tmp_path / "y", tmp_path / "x")
    assert run.prompts["run"].tolist() == [str(tmp_path / "x" / "0"), str(tmp_path / "y" / "0")]


def test_b56_runs_with_and_without_drafters_mix_in_any_order(tmp_path: Path) -> None:
    without, drafted = RunWriter(tmp_path / "without"), RunWriter(tmp_path / "drafted")
    without.add(prompt("p", baseline_ids=None), [ar_step()])
    drafted.add(
        prompt("q", baseline_ids=(4, 5, 6), baseline_decode_s=2.0, is_identical=True), [step()]
    )
    for order in (("without", "drafted"), ("drafted", "without")):
        run = load(*(tmp_path / name for name in order))
        assert run.drafts["draft_ms"].dtype == run.prompts["baseline_decode_s"].dtype == np.float64
        lists = dict(zip(run.prompts["prompt_id"], run.prompts["baseline_ids"], strict=True))
        assert lists["p"] is None
        assert list(lists["q"]) == [4, 5, 6]
        paths = [tmp_path / name / "prompts.parquet" for name in order]
        assert pd.read_parquet(paths)["baseline_decode_s"].dtype == np.float64
        assert len(pd.read_parquet([path.with_name("drafts.parquet") for path in paths])) == 2


def test_b57_broken_and_foreign_files_are_named_and_the_others_load(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "p")
    write_run(tmp_path / "bad", "q")
    (tmp_path / "x.parquet").write_bytes(os.urandom(100))
    pd.DataFrame({"n": [1]}).to_parquet(tmp_path / "other.parquet")
    whole = (tmp_path / "bad" / "steps.parquet").read_bytes()
    (tmp_path / "bad" / "steps.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad" / "summary.json").write_text('{"schema_ver')
    with pytest.warns(UserWarning, match="skipped") as caught:
        run = load(tmp_path)
    skipped = sorted(
        str(warning.message).split(":")[0].removeprefix("skipped ") for warning in caught
    )
    bad = ("bad/steps.parquet", "bad/summary.json", "other.parquet", "x.parquet")
    assert skipped == sorted(str(tmp_path / name) for name in bad)
    assert run.prompts["prompt_id"].tolist() == ["q", "p"]
    assert run.steps["run"].unique().tolist() == ["good"]


def test_another_schema_version_is_named_and_skipped(tmp_path: Path) -> None:
    write_run(tmp_path / "now", "p").write_summary({})
    for name in SCHEMAS:
        table = pq.read_table(tmp_path / "now" / f"{name}.parquet")
        (tmp_path / "later").mkdir(exist_ok=True)
        later = table.replace_schema_metadata({b"specens_schema_version": b"5"})
        pq.write_table(later, tmp_path / "later" / f"{name}.parquet")
    (tmp_path / "later" / "summary.json").write_text('{"schema_version": 5}')
    with pytest.warns(UserWarning, match="schema version 5") as caught:
        run = load(tmp_path)
    assert len(caught) == 4
    assert run.folders == (tmp_path / "now",)
    assert len(run.summaries) == 1


def test_files_have_the_new_names_of_columns_and_the_old_ones(tmp_path: Path) -> None:
    """For a reader of version 3; both hold the same."""
    writer = RunWriter(tmp_path)
    first = prompt("p", divergence=2, logit_gap=0.25, is_identical=False)
    gaps = dataclasses.replace(step(), logit_gaps=(0.5, 1.5))
    writer.add(first, [gaps, step(1)])
    prompts, steps = (
        pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("prompts", "steps")
    )
    assert prompts[["divergence", "fork_at"]].to_numpy().tolist() == [[2, 2]]
    assert prompts[["logit_gap", "fork_margin"]].to_numpy().tolist() == [[0.25, 0.25]]
    for name in ("logit_gaps", "margins"):
        assert list(steps[name][0]) == [0.5, 1.5] and steps[name][1] is None
    assert {new for names in OLD_NAMES.values() for new in names} == {
        "divergence",
        "logit_gap",
        "logit_gaps",
    }


IDS = pa.list_(pa.int64())
VERSION_3 = {
    "prompts": {
        **dict.fromkeys(("prompt_id", "category", "prompt_text"), pa.string()),
        **dict.fromkeys(("prompt_ids", "output_ids"), IDS),
        "output_pieces": pa.list_(pa.string()),
        **dict.fromkeys(("text", "finish_reason"), pa.string()),
        "num_steps": pa.int64(),
        **dict.fromkeys(("decode_s", "prefill_s", "baseline_decode_s"), pa.float64()),
        "baseline_ids": IDS,
        "is_identical": pa.bool_(),
        "fork_at": pa.int64(),
        "fork_margin": pa.float64(),
        "cost_version": pa.int64(),
        "error": pa.string(),
    },
    "steps": {
        "prompt_id": pa.string(),
        **dict.fromkeys(("step", "context_tokens", "num_nodes", "num_accepted"), pa.int64()),
        "num_emitted": pa.int64(),
        **dict.fromkeys(("token_ids", "token_owners"), IDS),
        **dict.fromkeys(("draft_ms", "verify_ms", "host_ms"), pa.float64()),
        **dict.fromkeys(("layout", "finish_reason", "mode"), pa.string()),
        "rate": pa.float64(),
        "margins": pa.list_(pa.float32()),
    },
    "drafts": {
        "prompt_id": pa.string(),
        "step": pa.int64(),
        "drafter": pa.string(),
        **dict.fromkeys(("num_drafted", "num_verified", "num_matched", "num_tested"), pa.int64()),
        "is_win": pa.bool_(),
        "win": pa.float64(),
        "is_sole_win": pa.bool_(),
        "token_share": pa.float64(),
        "marginal": pa.int64(),
        "draft_ms": pa.float64(),
        "num_planned": pa.int64(),
    },
    "dense": {
        "prompt_id": pa.string(),
        **dict.fromkeys(("position", "tokens_wanted"), pa.int32()),
        "drafter": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "parents": pa.list_(pa.int16()),
        "claims": pa.list_(pa.uint16()),
    },
}
"""The columns of version 3, written out: a reader of today must not follow the schema of today."""


def write_version_3(folder: Path, name: str, rows: list[dict], **metadata: str) -> None:
    """A table of version 3; columns that a row lacks are null."""
    keys = {"specens_schema_version": "3", **metadata}
    schema = pa.schema(VERSION_3[name].items(), metadata=keys)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"{name}.parquet")


def run_of_version_3(folder: Path) -> None:
    """Two steps of three members: (planned, drafted) for each."""
    write_version_3(
        folder,
        "prompts",
        [
            {"prompt_id": "p", "is_identical": False, "fork_at": 7, "fork_margin": 0.125},
            {"prompt_id": "q", "is_identical": True},
        ],
    )
    steps = [
        {"prompt_id": "p", "step": n, "margins": gaps} for n, gaps in ((0, [0.5, 2.0]), (1, None))
    ]
    write_version_3(folder, "steps", steps)
    members = {0: ((4, 0), (4, 3), (2, 0)), 1: ((0, 0), (4, 0), (2, 1))}
    rows = [
        {
            "prompt_id": "p",
            "step": n,
            "drafter": name,
            "num_planned": planned,
            "num_drafted": drafted,
        }
        for n, own in members.items()
        for name, (planned, drafted) in zip("abc", own, strict=True)
    ]
    write_version_3(folder, "drafts", rows)
    (folder / "summary.json").write_text('{"schema_version": 3, "status": "finished"}')


def dense_of_version_3(folder: Path, budget: str) -> None:
    facts = {"members": [{"name": "a"}], "budget": {"name": budget, "options": {}}}
    row = {"prompt_id": "p", "position": 0, "tokens_wanted": 9, "drafter": "a", "claims": [5000]}
    write_version_3(folder, "dense", [row], specens_trace=json.dumps(facts))


def was_scheduled(folder: Path) -> list[bool]:
    return load(folder).drafts["was_scheduled"].tolist()


def test_a_run_of_version_3_is_read_with_the_columns_of_today(tmp_path: Path) -> None:
    run_of_version_3(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = load(tmp_path)
    assert run.prompts["divergence"][0] == 7 and np.isnan(run.prompts["divergence"][1])
    assert run.prompts["logit_gap"][0] == 0.125 and np.isnan(run.prompts["logit_gap"][1])
    assert list(run.steps["logit_gaps"][0]) == [0.5, 2.0] and run.steps["logit_gaps"][1] is None
    for name, frame in (("prompts", run.prompts), ("steps", run.steps), ("drafts", run.drafts)):
        assert list(frame.columns) == [*SCHEMAS[name].names, "run"]
    assert run.drafts["was_scheduled"].tolist() == [True, True, True, False, True, True]
    assert run.summaries[0]["schema_version"] == 3
    write_run(tmp_path / "now", "r")
    assert load(tmp_path).prompts["prompt_id"].tolist() == ["r", "p", "q"], "side by side"


def test_a_table_of_version_3_without_rows_is_read(tmp_path: Path) -> None:
    for name in ("prompts", "steps", "drafts"):
        write_version_3(tmp_path, name, [])
    run = load(tmp_path)
    assert len(run.prompts) == len(run.steps) == len(run.drafts) == 0
    assert run.drafts["was_scheduled"].dtype == bool or not len(run.drafts)


CALLED = [True, True, False, False, True, True]
"""Under priority, the members after the first that proposed something were not called."""


@pytest.mark.parametrize("source", ["configuration", "dense trace"])
def test_in_a_priority_run_of_version_3_later_members_were_not_called(
    tmp_path: Path, source: str
) -> None:
    run_of_version_3(tmp_path)
    home = tmp_path / ".hydra"
    home.mkdir()
    if source == "configuration":
        (home / "config.yaml").write_text("budget:\n  max_nodes: 64\n  first_only: true\n")
    else:
        dense_of_version_3(tmp_path, "priority")
    assert was_scheduled(tmp_path) == CALLED
    (home / "config.yaml").write_text("budget:\n  max_nodes: 64\n  first_only: false\n")
    if source == "configuration":
        assert was_scheduled(tmp_path) == [True, True, True, False, True, True]
    else:
        assert was_scheduled(tmp_path) == CALLED, "what was traced counts"


@pytest.mark.parametrize("text", ["", "budget: [", "budget: null", "other: 1", "- 1"])
def test_a_broken_configuration_is_that_of_no_priority_run(tmp_path: Path, text: str) -> None:
    run_of_version_3(tmp_path)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(text)
    assert was_scheduled(tmp_path) == [True, True, True, False, True, True]


def test_a_dense_trace_of_version_3_has_confidences(tmp_path: Path) -> None:
    dense_of_version_3(tmp_path, "fixed")
    table, facts = load_dense(tmp_path)
    assert list(table.columns) == DENSE_SCHEMA.names
    assert [list(row) for row in table["confidences"]] == [[5000]]
    assert facts["budget"]["name"] == "fixed"


@pytest.mark.parametrize("column", ["num_planned", "num_drafted", "fork_at", "margins"])
def test_a_table_of_version_3_that_lacks_a_column_is_named_and_skipped(
    tmp_path: Path, column: str
) -> None:
    run_of_version_3(tmp_path)
    for name in ("prompts", "steps", "drafts"):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        if column in table.column_names:
            pq.write_table(table.drop_columns([column]), tmp_path / f"{name}.parquet")
    with pytest.warns(UserWarning, match=rf"skipped .*lacks the columns .*{column}") as caught:
        load(tmp_path)
    assert len(caught) == 1


def test_nothing_to_read_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to read"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no run to read"):
        load()


def test_the_summary_is_strict_json_with_a_version(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "p")
    numbers = {
        "rate": np.float64("nan"),
        "list": (1.5, float("inf")),
        "count": np.int64(3),
        "folder": Path("x"),
    }
    writer.write_summary({"drafters": {"a": numbers}, "status": "done"})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads(
        (tmp_path / "summary.json").read_text(encoding="utf-8"), parse_constant=refuse
    )
    assert content == {
        "schema_version": 4,
        "drafters": {"a": {"rate": None, "list": [1.5, None], "count": 3, "folder": "x"}},
        "status": "done",
    }
    (loaded,) = load(tmp_path).summaries
    assert loaded == {"run": str(tmp_path), "overrides": {}, **content}
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{name}.parquet" for name in SCHEMAS),
        "summary.json",
    }


def test_records_need_no_torch() -> None:
    code = (
        "import sys, specens.records.reader, specens.records.writer; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
