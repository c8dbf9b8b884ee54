"""The door to a run's page: from the files alone, of one run or of many, finished or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from helpers import door
from test_html import Page

from specens.config import compose
from specens.decoding.types import MemberRecord, StepRecord
from specens.errors import UserError
from specens.records import RunWriter
from specens.report import MAX_NOTICES, main, rebuild
from specens.run import run
from specens.tables import PromptRecord

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
PROMPT = PromptRecord("p", "chat", "Go on", (1, 2, 3), (4, 5), ("one", " two"), "one two", "length", 1, 0.5, 0.1)


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


def test_the_page_is_the_one_that_the_run_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    run(compose(["experiment=smoke", "drafter=ngram", "prompts.limit=2", "sampling.max_new_tokens=8"]), folder)
    written = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    rebuild(folder)
    assert (folder / "report.html").read_bytes() == written


def test_a_run_that_was_killed_has_a_page_that_says_so(tmp_path: Path) -> None:
    shown = page_of(write(tmp_path / "run", "first", "second"))
    assert "This run is unfinished: it has no summary.json" in shown.text
    assert [step["text"] for step in shown.steps] == ["one two"] * 2
    assert "first" in shown.text and "second" in shown.text
    finished = page_of(write(tmp_path / "whole", "first", status="finished"))
    assert "This run is" not in finished.text


def test_a_sweep_has_one_page_that_says_which_runs(tmp_path: Path) -> None:
    for number, layout in enumerate(("tree", "rows")):
        folder = write(tmp_path / str(number), "p", status="finished", verifier="typical", lossy=bool(number))
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(f"- drafter=ensemble\n- layout={layout}\n", encoding="utf-8")
    write(tmp_path / "deeper" / "2", "p")
    shown = page_of(tmp_path)
    assert f"specens runs in {tmp_path.name}" in shown.text and "all 3 runs together" in shown.text
    for said in ("layout=tree", "layout=rows", "finished", "unfinished", "deeper/2 · p", "lossy verifier (typical)"):
        assert said in shown.text
    assert len(shown.steps) == 3
    (tmp_path / "deeper" / "2" / "steps.parquet").unlink()
    assert len(page_of(tmp_path).steps) == 2, "its page is written over, and a run without steps has its text alone"


def test_words_that_all_runs_have_are_not_repeated(tmp_path: Path) -> None:
    for number in range(2):
        folder = write(tmp_path / str(number), "p", status="finished")
        (folder / ".hydra").mkdir()
        words = f"- drafter=ensemble\n- sampling.seed={number}\n"
        (folder / ".hydra" / "overrides.yaml").write_text(words, encoding="utf-8")
    text = page_of(tmp_path).text
    assert "sampling.seed=1" in text and "drafter=ensemble" not in text


def test_files_that_cannot_be_read_are_named_on_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    (folder / "drafts.parquet").write_bytes(b"PAR1 and then nothing")
    (folder / "replay.json").write_text("[1, 2", encoding="utf-8")
    path, notices = rebuild(folder)
    text = Page(path.read_text(encoding="utf-8")).text
    assert [("drafts.parquet" in notice, "replay.json" in notice) for notice in notices] == [
        (True, False),
        (False, True),
    ]
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
    assert "Teams" not in page_of(folder).text
    teams = [{"team": "ngram", "num_members": 1, "tokens_per_s": 12.5}]
    (folder / "replay.json").write_text(json.dumps({"teams": teams}), encoding="utf-8")
    assert "12.5" in page_of(folder).text.partition("Teams")[2]


@pytest.mark.parametrize("content", ["3", '{"teams": 3}', '{"teams": [3]}', '{"members": [3]}', '{"overlap": [1]}'])
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


def test_the_door_writes_the_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    write(tmp_path / "run", "p", status="finished")
    before = set(tmp_path.rglob("*"))
    assert door(main, monkeypatch, tmp_path, "run=run") == 0
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "run" / "report.html"}
    assert capsys.readouterr().out.strip() == "report: run/report.html"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "run is not set"),
        (["run="], "run is not set"),
        (["run=nowhere"], "nowhere is not a folder"),
        (["run=."], "no run"),
    ],
)
def test_the_door_refuses_bad_folders_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: list[str], said: str
) -> None:
    assert door(main, monkeypatch, tmp_path, *words) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specens:")]
    assert len(lines) == 1 and said in lines[0]
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_bench_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "bench.md").write_text("a table", encoding="utf-8")
    with pytest.raises(UserError, match=rf"no run to read.*a bench's page is {tmp_path / 'bench.md'}"):
        rebuild(tmp_path)


def test_a_table_that_is_gone_is_named_on_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "p", status="finished")
    (folder / "drafts.parquet").unlink()
    path, (notice,) = rebuild(folder)
    assert "has no drafts.parquet" in notice and notice in Page(path.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("word", ["+members=[ngram]", "+nonsense=1"])
def test_a_word_that_nobody_reads_is_refused(
    tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", "p", status="finished")
    assert door(main, monkeypatch, tmp_path, "run=run", word) == 1
    assert "unknown option" in capsys.readouterr().err
