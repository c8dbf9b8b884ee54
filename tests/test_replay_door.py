"""python -m specens.replay: the page and the files, and what bad folders get."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import door
from omegaconf import OmegaConf
from traces import COSTS, decode_live, drafts_everywhere, facts, guessers, scripts

from specens.config import compose
from specens.decoding.budget import Budget, FixedBudget
from specens.decoding.cost_aware import CostAwareBudget
from specens.records import RunWriter
from specens.replay import main, read_live
from specens.tables import DenseDraft
from specens.traced import read_trace

TEXTS = scripts()
MEMBERS = guessers(TEXTS)


def write_run(
    folder: Path, budget: Budget | None = None, members=MEMBERS, *, dense: bool = True, name: str = "fixed"
) -> Path:
    """A run folder as a finished run leaves it, with the real loop's steps."""
    budget = budget or FixedBudget()
    writer = RunWriter(folder)
    if dense:
        writer.begin_dense(facts(members, {"name": name, "options": asdict(budget)}))
    for text, (record, steps) in zip(TEXTS, decode_live(TEXTS, members, budget), strict=True):
        everywhere = enumerate(drafts_everywhere(text, members)) if dense else ()
        writer.add(replace(record, cost_version=0), steps, [DenseDraft(at, *known) for at, known in everywhere])
    writer.write_costs([COSTS])
    writer.write_summary({"status": "finished"})
    (folder / ".hydra").mkdir()
    OmegaConf.save(compose([f"budget={name}"]), folder / ".hydra" / "config.yaml")
    return folder


def refusal(text: str) -> str:
    """Our one line, between Hydra's two."""
    (line,) = (line for line in text.splitlines() if line.startswith("specens: "))
    assert "Traceback" not in text
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def said(capsys, *given: str, folder: Path, monkeypatch) -> tuple[int, str]:
    capsys.readouterr()
    code = door(main, monkeypatch, folder.parent, *given)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_page_says_it_all_and_the_files_hold_it(folder, capsys, monkeypatch):
    before = {path.name for path in folder.parent.iterdir()}
    code, page = said(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 0, page
    assert "The replay of what ran is the run itself" in page and "Best in hindsight" in page
    assert page == (folder / "replay.md").read_text(encoding="utf-8")
    content = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    assert content["schema_version"] == 1 and content["live"]["num_different"] == 0
    speeds = [row["tokens_per_s"] for row in content["teams"]]
    assert len(speeds) == 16 and speeds == sorted(speeds, reverse=True)
    assert [row["member"] for row in content["members"]] == list(MEMBERS) == list(content["overlap"])
    assert content["cost"]["verify_ms"] and content["modelled"] is None
    table = pd.read_csv(folder / "replay.csv")
    assert table["team"].tolist() == [row["team"] for row in content["teams"]]
    for name in (*MEMBERS, "choose_one", "best_alone", "union", "fitted on half of the prompts"):
        assert name in page
    assert "What each member is worth" in (folder / "report.html").read_text(encoding="utf-8")
    assert {path.name for path in folder.parent.iterdir()} == before, "nothing is left elsewhere"


def test_teams_under_another_policy_with_fewer_nodes(folder, capsys, monkeypatch):
    code, page = said(capsys, "run=run", "policy=cost_aware", "max_nodes=3", folder=folder, monkeypatch=monkeypatch)
    assert code == 0 and "Teams under budget=cost_aware (the run's own was fixed), at most 3 nodes" in page
    assert pd.read_csv(folder / "replay.csv").eval("num_nodes <= 3 * calls").all()


def test_another_machines_costs_are_called_modelled(folder, capsys, monkeypatch):
    free = replace(COSTS, verify_ms=((0, 10.0),), host_ms=0.0, draft_ms=dict.fromkeys(MEMBERS, ((1, 0.0),)))
    (folder / "gpu.json").write_text(json.dumps(free.content()), encoding="utf-8")
    code, page = said(capsys, "run=run", "costs=run/gpu.json", folder=folder, monkeypatch=monkeypatch)
    assert code == 0 and "MODELLED, not measured" in page and "gpu.json" in page
    rows = json.loads((folder / "replay.json").read_text(encoding="utf-8"))["modelled"]["teams"]
    assert rows[0]["speedup"] == pytest.approx(max(row["acceptance_length"] for row in rows)), (
        "only calls cost time there"
    )
    few = {**free.content(), "draft_ms": {"chain": [[1, 0.0]]}}
    (folder / "gpu.json").write_text(json.dumps(few), encoding="utf-8")
    code, page = said(capsys, "run=run", "costs=run/gpu.json", folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and "tree" in refusal(page)


def test_other_runs_stand_beside_their_replay(folder, capsys, monkeypatch):
    write_run(
        folder.parent / "pair",
        CostAwareBudget(),
        {n: MEMBERS[n] for n in ("tree", "chain")},
        dense=False,
        name="cost_aware",
    )
    code, page = said(capsys, "run=run", "others=[pair]", folder=folder, monkeypatch=monkeypatch)
    assert code == 0
    (other,) = json.loads((folder / "replay.json").read_text(encoding="utf-8"))["others"]
    assert other["team"] == "tree+chain" and other["num_different"] == 0 and other["num_prompts"] == len(TEXTS)
    assert other["error"] == pytest.approx(other["predicted_s"] / other["measured_s"] - 1) and "| pair |" in page
    assert "pair" in (folder / "report.html").read_text(encoding="utf-8").partition("Other runs")[2]
    assert read_live(folder.parent / "pair").members == ("tree", "chain")


@pytest.mark.parametrize("budget", [FixedBudget(first_only=True), CostAwareBudget()], ids=["priority", "cost_aware"])
def test_what_ran_is_known_from_the_trace(budget, tmp_path):
    name = "priority" if isinstance(budget, FixedBudget) else "cost_aware"
    trace, live = read_trace(write_run(tmp_path / "run", budget, name=name))
    assert live.budget == budget and live.members == tuple(MEMBERS)
    assert live.costs()[trace.prompt_ids[0]].verify_ms == COSTS.verify_ms


def test_a_replay_that_is_not_the_run_exits_with_2(folder, capsys, monkeypatch):
    table = pq.read_table(folder / "steps.parquet")
    steps = table.to_pandas()
    steps.loc[4, "num_nodes"] += 1
    changed = table.set_column(
        table.schema.get_field_index("num_nodes"), table.schema.field("num_nodes"), [steps["num_nodes"].to_numpy()]
    )
    pq.write_table(changed, folder / "steps.parquet")
    code, page = said(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 2 and "REPLAY IS NOT THE RUN" in page and "1 of" in page


def test_a_run_that_was_killed_is_replayed_as_far_as_it_came(folder, capsys, monkeypatch):
    (folder / "summary.json").unlink()
    for name in ("prompts", "steps", "drafts"):  # dense.parquet is written before them
        table = pq.read_table(folder / f"{name}.parquet")
        kept = [value != TEXTS[-1].name for value in table["prompt_id"].to_pylist()]
        pq.write_table(table.filter(kept), folder / f"{name}.parquet")
    code, page = said(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 0 and "did not finish (killed)" in page and f"{len(TEXTS) - 1} prompts" in page


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _age(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"specens_schema_version": b"1"}), path)


FAULTS = {
    "no dense trace": lambda folder: (folder / "dense.parquet").unlink(),
    "schema version 1": lambda folder: _age(folder / "steps.parquet"),
    "dense.parquet: cannot be read": lambda folder: _age(folder / "dense.parquet"),
    "steps.parquet": lambda folder: _truncate(folder / "steps.parquet"),
    "prompts.parquet": lambda folder: _truncate(folder / "prompts.parquet"),
    "dense.parquet": lambda folder: _truncate(folder / "dense.parquet"),
    "costs.json": lambda folder: (folder / "costs.json").unlink(),
    "cannot be read": lambda folder: (folder / "costs.json").write_text("{", encoding="utf-8"),
    "summary.json": lambda folder: (folder / "summary.json").write_text("{", encoding="utf-8"),
    "inner lies in it: move it elsewhere": lambda folder: shutil.copytree(folder, folder / "inner"),
    "has no drafts.parquet": lambda folder: (folder / "drafts.parquet").unlink(),
    "has no steps.parquet": lambda folder: (folder / "steps.parquet").unlink(),
    "has no prompts.parquet": lambda folder: (folder / "prompts.parquet").unlink(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_refused_in_one_line(fault, folder, capsys, monkeypatch):
    FAULTS[fault](folder)
    code, text = said(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and fault in refusal(text)
    assert not (folder / "replay.md").exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "run is not set"),
        (("run=nowhere",), "nowhere is not a folder"),
        (("run=.",), "holds"),
        (("run=run", "policy=greedy"), "choose one of fixed"),
        (("run=run", "max_nodes=0"), "1 or more"),
        (("run=run", "costs=gone.json"), "gone.json"),
        (("run=run", "others=[nowhere]"), "others=[nowhere]"),
        (("run=run", "others=pair"), "others=[pair]"),
        (("run=run", "+members=[chain]"), "unknown option members"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, fault, folder, capsys, monkeypatch):
    shutil.copytree(folder, folder.parent / "second")
    code, text = said(capsys, *words, folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and fault in refusal(text)
