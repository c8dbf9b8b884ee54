"""python -m specens.replay: the page and the files, and what bad folders get."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import run_command
from omegaconf import OmegaConf
from traces import COSTS, decode_live, drafts_everywhere, facts, guessers, node_of, scripts

from specens.config.compose import compose
from specens.decoding.budgets.base import Budget, budget_name
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.fixed import FixedBudget
from specens.records.schema import DenseDraft
from specens.records.writer import RunWriter
from specens.replay.__main__ import main
from specens.replay.files import read_live, read_trace

TEXTS = scripts()
MEMBERS = guessers(TEXTS)


def write_run(
    folder: Path, budget: Budget | None = None, members=MEMBERS, *, dense: bool = True
) -> Path:
    """A run folder as a finished run leaves it, with the real loop's steps."""
    budget = budget or FixedBudget()
    writer = RunWriter(folder)
    if dense:
        ran = {"name": budget_name(budget), "node": node_of(budget)}
        writer.begin_dense(facts(members, ran))
    for text, (record, steps) in zip(TEXTS, decode_live(TEXTS, members, budget), strict=True):
        everywhere = enumerate(drafts_everywhere(text, members)) if dense else ()
        traced = [DenseDraft(at, *known) for at, known in everywhere]
        writer.add(replace(record, cost_version=0), steps, traced)
    writer.write_costs([COSTS])
    writer.write_summary({"status": "finished"})
    (folder / ".hydra").mkdir()
    config = compose()
    config.budget = node_of(budget)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    return folder


def refusal(text: str) -> str:
    """Our one line."""
    (line,) = (line for line in text.splitlines() if line.startswith("specens: "))
    assert "Traceback" not in text
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def output(capsys, *given: str, folder: Path, monkeypatch) -> tuple[int, str]:
    capsys.readouterr()
    code = run_command(main, monkeypatch, folder.parent, *given)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_page_shows_it_all_and_the_files_hold_it(folder, capsys, monkeypatch):
    before = {path.name for path in folder.parent.iterdir()}
    code, page = output(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 0, page
    assert "The replay of what ran is the run itself" in page and "Best in hindsight" in page
    assert page == (folder / "replay.md").read_text(encoding="utf-8")
    content = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    assert content["schema_version"] == 2 and content["live"]["num_different"] == 0
    speeds = [row["tokens_per_s"] for row in content["subsets"]]
    assert len(speeds) == 16 and speeds == sorted(speeds, reverse=True)
    assert (
        [row["member"] for row in content["members"]] == list(MEMBERS) == list(content["overlap"])
    )
    assert content["cost"]["verify_ms"] and content["modelled"] is None
    table = pd.read_csv(folder / "replay.csv")
    names = [row["subset"] for row in content["subsets"]]
    assert table["subset"].tolist() == names and "AR" in names
    old = ["plain" if name == "AR" else name for name in names]
    assert table["team"].tolist() == old == [row["team"] for row in content["teams"]]
    notes = (
        "merged tree keeps",
        "proposes something drafts alone",
        "fitted on half of the prompts",
    )
    for name in (*MEMBERS, "choose_one", "best_alone", "union", *notes):
        assert name in page
    assert "What each member contributes" in (folder / "report.html").read_text(encoding="utf-8")
    assert {path.name for path in folder.parent.iterdir()} == before, "nothing is left elsewhere"


def test_subsets_under_another_policy_with_fewer_nodes(folder, capsys, monkeypatch):
    given = ("run=run", "policy=cost_aware", "max_nodes=3")
    code, page = output(capsys, *given, folder=folder, monkeypatch=monkeypatch)
    assert code == 0
    assert "Subsets under budget=cost_aware (the run's own was fixed), at most 3 nodes" in page
    assert pd.read_csv(folder / "replay.csv").eval("num_nodes <= 3 * calls").all()


def test_another_machines_costs_are_called_modelled(folder, capsys, monkeypatch):
    drafts = dict.fromkeys(MEMBERS, ((1, 0.0),))
    free = replace(COSTS, verify_ms=((0, 10.0),), host_ms=0.0, draft_ms=drafts)
    (folder / "gpu.json").write_text(json.dumps(free.content()), encoding="utf-8")
    given = ("run=run", "costs=run/gpu.json")
    code, page = output(capsys, *given, folder=folder, monkeypatch=monkeypatch)
    assert code == 0 and "MODELLED, not measured" in page and "gpu.json" in page
    content = json.loads((folder / "replay.json").read_text(encoding="utf-8"))
    rows = content["modelled"]["subsets"]
    longest = max(row["acceptance_length"] for row in rows)
    assert rows[0]["speedup"] == pytest.approx(longest), "only calls cost time there"
    few = {**free.content(), "draft_ms": {"chain": [[1, 0.0]]}}
    (folder / "gpu.json").write_text(json.dumps(few), encoding="utf-8")
    code, page = output(capsys, *given, folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and "tree" in refusal(page)


def test_other_runs_stand_beside_their_replay(folder, capsys, monkeypatch):
    members = {name: MEMBERS[name] for name in ("tree", "chain")}
    write_run(folder.parent / "pair", CostAwareBudget(), members, dense=False)
    code, page = output(capsys, "run=run", "others=[pair]", folder=folder, monkeypatch=monkeypatch)
    assert code == 0
    (other,) = json.loads((folder / "replay.json").read_text(encoding="utf-8"))["others"]
    assert other["subset"] == other["team"] == "tree+chain"
    assert other["num_different"] == 0 and other["num_prompts"] == len(TEXTS)
    assert other["error"] == pytest.approx(other["predicted_s"] / other["measured_s"] - 1)
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "| pair |" in page and "pair" in report.partition("Other runs")[2]
    assert read_live(folder.parent / "pair").members == ("tree", "chain")


@pytest.mark.parametrize(
    "budget", [FixedBudget(first_only=True), CostAwareBudget()], ids=["priority", "cost_aware"]
)
def test_what_ran_is_known_from_the_trace(budget, tmp_path):
    trace, live = read_trace(write_run(tmp_path / "run", budget))
    assert live.budget == budget and live.members == tuple(MEMBERS)
    assert live.costs()[trace.prompt_ids[0]].verify_ms == COSTS.verify_ms


PACKAGE = """
from dataclasses import dataclass

from specens.decoding.budgets.fixed import FixedBudget


@dataclass(frozen=True)
class Narrow(FixedBudget):
    \"\"\"A narrow tree.\"\"\"

    name = "narrow"
    max_nodes: int = 7
"""


def test_a_budget_of_a_package_of_ones_own_is_compared_if_the_package_is_listed(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "own_package.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_run(tmp_path / "run", import_module("own_package").Narrow())
    where = {"folder": folder, "monkeypatch": monkeypatch}
    code, page = output(capsys, "run=run", **where)
    assert code == 1 and "plugins=[own_package]" in refusal(page)
    code, page = output(capsys, "run=run", "plugins=[own_package]", **where)
    assert code == 0 and "A narrow tree." in page and "at most 7 nodes" in page
    code, page = output(
        capsys, "run=run", "plugins=[own_package]", "policy=narrow", "max_nodes=3", **where
    )
    assert code == 0 and "Subsets under budget=narrow, at most 3 nodes" in page
    assert pd.read_csv(folder / "replay.csv").eval("num_nodes <= 3 * calls").all()


BARE = PACKAGE.replace('    """A narrow tree."""\n', "").replace("    name = ", "    label = ")


def test_any_budget_can_be_asked_of_any_run(folder, capsys, monkeypatch):
    (folder.parent / "further_package.py").write_text(BARE, encoding="utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    where = {"folder": folder, "monkeypatch": monkeypatch}
    given = ("run=run", "plugins=[further_package]")
    policy = "policy={_target_: further_package.Narrow}"
    code, page = output(capsys, *given, policy, **where)
    assert code == 0
    assert "Subsets under budget=Narrow (the run's own was fixed), at most 64 nodes" in page
    assert re.search(r"^\| Narrow +\|  +\|", page, re.M), (
        "what a dataclass writes as its docstring is no sentence"
    )
    few = "policy={_target_: further_package.Narrow, max_nodes: 3}"
    code, page = output(capsys, *given, few, **where)
    assert code == 0 and "Subsets under budget=Narrow (the run's own was fixed), at most 3" in page
    code, page = output(capsys, *given, few, "max_nodes=2", **where)
    assert code == 0 and "at most 2 nodes" in page
    code, page = output(capsys, "run=run", policy, **where)
    assert code == 1 and "plugins=[further_package]" in refusal(page)


def test_a_replay_that_is_not_the_run_exits_with_2(folder, capsys, monkeypatch):
    table = pq.read_table(folder / "steps.parquet")
    steps = table.to_pandas()
    steps.loc[4, "num_nodes"] += 1
    changed = pa.Table.from_pandas(steps, schema=table.schema, preserve_index=False)
    changed = changed.replace_schema_metadata(table.schema.metadata)
    pq.write_table(changed, folder / "steps.parquet")
    code, page = output(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 2 and "REPLAY IS NOT THE RUN" in page and "1 of" in page


def test_a_run_that_was_killed_is_replayed_as_far_as_it_came(folder, capsys, monkeypatch):
    (folder / "summary.json").unlink()
    for name in ("prompts", "steps", "drafts"):  # dense.parquet is written before them
        table = pq.read_table(folder / f"{name}.parquet")
        kept = [value != TEXTS[-1].name for value in table["prompt_id"].to_pylist()]
        pq.write_table(table.filter(kept), folder / f"{name}.parquet")
    code, page = output(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 0 and "did not finish (killed)" in page and f"{len(TEXTS) - 1} prompts" in page


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _age(path: Path) -> None:
    table = pq.read_table(path)
    metadata = {**table.schema.metadata, b"specens_schema_version": b"1"}
    pq.write_table(table.replace_schema_metadata(metadata), path)


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
    code, text = output(capsys, "run=run", folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and fault in refusal(text)
    assert not (folder / "replay.md").exists()


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ((), "run is not set"),
        (("run=nowhere",), "nowhere is not a folder"),
        (("run=.",), "holds"),
        (("run=run", "policy=greedy"), "choose one of fixed"),
        (("run=run", "policy={max_nodes: 3}"), "_target_"),
        (("run=run", "plugins=[nowhere_package]"), "plugins=[nowhere_package]: cannot be imported"),
        (("run=run", "max_nodes=0"), "1 or more"),
        (("run=run", "costs=gone.json"), "gone.json"),
        (("run=run", "others=[nowhere]"), "others=[nowhere]"),
        (("run=run", "others=pair"), "others=[pair]"),
        (("run=run", "+members=[chain]"), "unknown option members"),
    ],
)
def test_bad_overrides_are_refused_in_one_line(overrides, fault, folder, capsys, monkeypatch):
    shutil.copytree(folder, folder.parent / "second")
    code, text = output(capsys, *overrides, folder=folder, monkeypatch=monkeypatch)
    assert code == 1 and fault in refusal(text)
