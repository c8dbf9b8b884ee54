"""A run folder of version 0.1 (schema version 3, on the tiny model) can still be used by every
command.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import REPOSITORY, run_command

import specens
from specens.audit.__main__ import main as audit
from specens.config import build as config_build
from specens.config.build import RENAMED
from specens.config.folder import run_config
from specens.records.reader import load_dense
from specens.replay.__main__ import main as replay
from specens.replay.files import read_trace
from specens.report.__main__ import main as report
from specens.run.job import job_of

OLD = REPOSITORY / "tests" / "data" / "run_v3"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of the run; nothing else is there."""
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    config_build._current.cache_clear()
    return shutil.copytree(OLD, tmp_path / "run")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_run_is_of_an_old_version_and_small():
    summary = json.loads((OLD / "summary.json").read_text(encoding="utf-8"))
    assert (summary["schema_version"], summary["status"]) == (3, "finished")
    assert size_of(OLD) < 120_000


def test_it_is_read_with_the_names_of_today():
    run = specens.load(OLD)
    assert len(run.prompts) == run.prompts.is_identical.sum() == 3
    assert {"divergence", "logit_gap", "fork_at", "fork_margin"} <= set(run.prompts)
    assert run.prompts.divergence.isna().all()
    assert {"logit_gaps", "margins"} <= set(run.steps)
    assert (run.drafts.was_scheduled == (run.drafts.num_planned > 0)).all()
    assert run.drafts.groupby("drafter").size().to_dict() == {"ngram": 40, "quantized": 40}
    assert run.summaries[0]["overrides"]["trace"] == "dense"
    dense, facts = load_dense(OLD)
    assert "confidences" in dense and facts["budget"]["name"] == "fixed"
    assert len(dense) == sum(map(len, run.prompts.output_ids)) * 2


def test_its_configuration_builds_with_a_line_for_every_old_name(folder, caplog):
    job = job_of(run_config(folder))
    assert [member.name for member in job.drafter.members] == ["ngram", "quantized"]
    assert (job.trace, job.layout, job.metrics, job.plugins) == ("dense", "tree", (), ())
    text = (folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")
    old = sorted(name for name in RENAMED if f"{name}\n" in text)
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(old) == len(lines) == 6
    for name, line in zip(old, lines, strict=True):
        assert line.startswith(f"_target_: {name} is now {RENAMED[name]};")
    caplog.clear()
    job_of(run_config(folder))
    assert caplog.records == [], "once in a process"


def test_its_page_can_be_written_again(folder, monkeypatch, capsys):
    (folder / "report.html").unlink()
    assert run_command(report, monkeypatch, folder, f"run={folder}") == 0
    assert capsys.readouterr().err == ""
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "quantized" in page and "skipped" not in page


def test_its_replay_is_the_run_itself(folder, monkeypatch, capsys):
    before = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    assert run_command(replay, monkeypatch, folder, f"run={folder}") == 0
    assert capsys.readouterr().err == ""
    after = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    assert (after["live"]["num_steps"], after["live"]["num_different"]) == (40, 0)
    calls = [{row["team"]: row["calls"] for row in found["teams"]} for found in (before, after)]
    assert calls[0] == calls[1]
    trace, live = read_trace(folder)
    assert [member.name for member in trace.members] == list(live.members)


def test_it_can_be_audited(folder, monkeypatch, capsys):
    assert run_command(audit, monkeypatch, folder, f"run={folder}") == 0
    assert "Traceback" not in capsys.readouterr().err
    texts = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["texts"]
    assert texts["num_texts"] == texts["num_baseline_identical"] == 3
    for path in (path for path in OLD.rglob("*") if path.is_file()):
        assert (folder / path.relative_to(OLD)).read_bytes() == path.read_bytes()
