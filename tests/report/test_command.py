"""The command that makes a run's page: from the files alone, of one run or of many, finished or
not.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import run_command
from pages import Page, subset

from specens.config.compose import compose
from specens.decoding.types import MemberRecord, StepRecord
from specens.errors import UserError
from specens.records.schema import PromptRecord
from specens.records.writer import RunWriter
from specens.report.__main__ import MAX_NOTICES, main, rebuild
from specens.run import run

STEP = StepRecord(
    step=0,
    context_tokens=3,
    num_nodes=2,
    num_accepted=1,
    token_ids=(4, 5),
    token_owners=(1, 0),
    draft_ms=3.0,
    verify_ms=20.0,
    host_ms=1.0,
    layout="tree",
    members=tuple(
        MemberRecord(name, num_drafted=1, num_verified=1, num_matched=m, num_tested=1, draft_ms=1.5)
        for name, m in (("ngram", 1), ("retrieval", 0))
    ),
)
PROMPT = PromptRecord(
    prompt_id="p",
    category="chat",
    prompt_text="Go on",
    prompt_ids=(1, 2, 3),
    output_ids=(4, 5),
    output_pieces=("one", " two"),
    text="one two",
    finish_reason="length",
    num_steps=1,
    decode_s=0.5,
    prefill_s=0.1,
)


def write(folder: Path, *prompt_ids: str, **summary: object) -> Path:
    """A run's files, by its own writer; without a summary, as after a kill, if none is given."""
    writer = RunWriter(folder)
    for prompt_id in prompt_ids:
        writer.add(dataclasses.replace(PROMPT, prompt_id=prompt_id), [STEP])
    if summary:
        writer.write_summary(summary)
    return folder


def page_of(folder: Path) -> Page:
    path, _ = rebuild(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def overrides(folder: Path, *given: str) -> None:
    """As Hydra leaves them in a run's folder."""
    (folder / ".hydra").mkdir()
    lines = "".join(f"- {override}\n" for override in given)
    (folder / ".hydra" / "overrides.yaml").write_text(lines, encoding="utf-8")


def test_the_page_is_the_one_that_the_run_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    folder, small = tmp_path / "run", ["prompts.limit=2", "sampling.max_new_tokens=8"]
    run(compose(["experiment=smoke", "drafter=ngram", *small]), folder)
    written = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    rebuild(folder)
    assert (folder / "report.html").read_bytes() == written


def test_a_run_that_was_killed_has_a_page_that_tells_so(tmp_path: Path) -> None:
    shown = page_of(write(tmp_path / "run", "first", "second"))
    assert "This run did not finish (killed): it has no summary.json" in shown.text
    assert [step["text"] for step in shown.steps] == ["one two"] * 2
    assert "first" in shown.text and "second" in shown.text
    finished = page_of(write(tmp_path / "whole", "first", status="finished"))
    assert "This run" not in finished.text


def test_a_sweep_has_one_page_that_names_its_runs(tmp_path: Path) -> None:
    for number, layout in enumerate(("tree", "rows")):
        known: dict[str, Any] = {"verifier": "typical", "lossy": bool(number)}
        folder = write(tmp_path / str(number), "p", status="finished", **known)
        overrides(folder, "drafter=ensemble", f"layout={layout}")
    write(tmp_path / "deeper" / "2", "p")
    shown = page_of(tmp_path)
    assert f"specens runs in {tmp_path.name}" in shown.text and "all 3 runs together" in shown.text
    states = ("finished", "killed", "deeper/2 · p", "lossy verifier (typical)")
    for text in ("layout=tree", "layout=rows", *states):
        assert text in shown.text
    assert len(shown.steps) == 3
    (tmp_path / "deeper" / "2" / "steps.parquet").unlink()
    assert len(page_of(tmp_path).steps) == 2, "a run without steps has its text alone"


def test_a_metric_of_ones_own_is_a_column_of_a_sweeps_page(tmp_path: Path) -> None:
    texts = {"title": "long steps", "form": ".1%", "unit": "%", "meaning": "long ones"}
    own = {"metrics": [{"key": "long_step_rate", "scope": "run", **texts}], "long_step_rate": 0.25}
    write(tmp_path / "0", "p", status="finished", **own)
    write(tmp_path / "1", "p", status="finished")
    text = page_of(tmp_path).text
    assert "long steps" in text and "25.0%" in text


def test_overrides_that_all_runs_have_are_not_repeated(tmp_path: Path) -> None:
    for number in range(2):
        folder = write(tmp_path / str(number), "p", status="finished")
        overrides(folder, "drafter=ensemble", f"sampling.seed={number}")
    text = page_of(tmp_path).text
    assert "sampling.seed=1" in text and "drafter=ensemble" not in text


def test_files_that_cannot_be_read_are_named_on_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    (folder / "drafts.parquet").write_bytes(b"PAR1 and then nothing")
    (folder / "replay.json").write_text("[1, 2", encoding="utf-8")
    path, notices = rebuild(folder)
    text = Page(path.read_text(encoding="utf-8")).text
    first, second = notices
    assert "drafts.parquet" in first and "replay.json" in second
    assert all(notice in text for notice in notices)


def test_many_skipped_files_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "run", "p", status="finished")
    for number in range(MAX_NOTICES + 5):
        (tmp_path / f"{number}.parquet").write_bytes(b"")
    notices = rebuild(tmp_path)[1]
    assert len(notices) == MAX_NOTICES + 1
    assert notices[-1] == "skipped 5 more files"


def test_a_replay_is_shown_where_there_is_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    assert "Subsets" not in page_of(folder).text
    subsets = [subset("ngram", 1, 2, 12.5)]
    (folder / "replay.json").write_text(json.dumps({"subsets": subsets}), encoding="utf-8")
    assert "12.5" in page_of(folder).text.partition("Subsets")[2]


def test_a_runs_own_metrics_are_shown_by_the_definitions_that_it_recorded(tmp_path: Path) -> None:
    drafters = {
        "ngram": {"longest_draft": 67.89, "win_rate": 0.123},
        "gone": {"longest_draft": 1.0},
    }
    spread = {"key": "spread", "title": "wide spread", "form": ".1f", "unit": "", "meaning": "wide"}
    longest = {**spread, "key": "longest_draft", "title": "longest", "scope": "drafter"}
    metrics = [{**spread, "scope": "run"}, longest, {"key": "broken"}, 3]
    known = {"status": "finished", "exact_width": 8, "error": None, "spread": 12.34}
    folder = write(tmp_path / "run", "p", **known, drafters=drafters, metrics=metrics)
    shown = page_of(folder).text
    assert "12.3wide spread" in shown and "exact_width" not in shown
    table = shown.partition("Drafters")[2]
    assert "longest" in table and "67.9" in table, "of the retrieval drafter there is none"
    assert "12.3%" not in shown, "what the tables tell is not taken from the summary"


@pytest.mark.parametrize(
    "content",
    [
        *("3", '{"teams": 3}', '{"teams": [3]}', '{"subsets": 3}', '{"subsets": [3]}'),
        *('{"members": [3]}', '{"overlap": [1]}'),
    ],
)
def test_a_replay_of_another_form_is_skipped_by_name(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    (folder / "replay.json").write_text(content, encoding="utf-8")
    _, (notice,) = rebuild(folder)
    assert "replay.json" in notice


def test_a_folder_without_runs_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        rebuild(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no run to read"):
        rebuild(tmp_path)
    (tmp_path / "summary.json").write_text('{"schema_version": 1}', encoding="utf-8")
    with pytest.raises(UserError, match=r"no run to read.*schema version 1") as caught:
        rebuild(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_command_writes_the_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write(tmp_path / "run", "p", status="finished")
    before = set(tmp_path.rglob("*"))
    assert run_command(main, monkeypatch, tmp_path, "run=run") == 0
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "run" / "report.html"}
    assert capsys.readouterr().out.strip() == "report: run/report.html"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ([], "run is not set"),
        (["run="], "run is not set"),
        (["run=nowhere"], "nowhere is not a folder"),
        (["run=."], "no run"),
    ],
)
def test_the_command_refuses_bad_folders_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, given: list[str], fault: str
) -> None:
    assert run_command(main, monkeypatch, tmp_path, *given) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specens:")]
    assert len(lines) == 1 and fault in lines[0]
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_bench_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "bench.md").write_text("a table", encoding="utf-8")
    page = tmp_path / "bench.md"
    with pytest.raises(UserError, match=rf"no run to read.*a bench's page is {page}"):
        rebuild(tmp_path)


def test_a_table_that_is_gone_is_named_on_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    (folder / "drafts.parquet").unlink()
    path, (notice,) = rebuild(folder)
    assert "has no drafts.parquet" in notice
    assert notice in Page(path.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("override", ["+members=[ngram]", "+nonsense=1"])
def test_an_override_that_is_not_read_is_refused(
    tmp_path: Path, override: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write(tmp_path / "run", "p", status="finished")
    assert run_command(main, monkeypatch, tmp_path, "run=run", override) == 1
    assert "unknown option" in capsys.readouterr().err
