"""Law 6: replay of a dense trace is the live run, step for step: of the run itself, and of other
subsets that really ran.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run_drafter, texts_file
from traces import node_of

from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.base import Budget
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.scripted import Oracle
from specens.models.load import TargetCopy
from specens.models.tiny import random_model
from specens.replay.files import read_trace
from specens.replay.study import replay_of, same_steps

pytestmark = pytest.mark.laws

COUNT = 24
ALL = ("ngram", "lm", "quantized", "int8", "oracle")
SUBSETS = (
    ("lm",),
    ("ngram", "oracle"),
    ("quantized", "ngram"),
    ("int8",),
    ("oracle", "lm", "int8", "ngram"),
)
SAMPLING = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 3}}


def member(name: str):
    return {
        "ngram": lambda: NGram(5, num_continuations=3),
        "lm": lambda: LanguageModel(random_model(seed=9), 4, num_branches=2),
        "quantized": lambda: LanguageModel(TargetCopy("nf4"), 3, name="quantized"),
        "int8": lambda: LanguageModel(TargetCopy("dynamic_int8"), 3, name="int8"),
        "oracle": lambda: Oracle(4),
    }[name]()


@pytest.fixture(scope="module")
def budgets(tmp_path_factory) -> dict[str, Budget]:
    """Nodes cost, and so do models: some members are scheduled now and then, some trees are cut,
    some steps are AR decoding.
    """
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    table = {
        "verify_ms": [[0, 10.0], [1, 10.5], [4, 13.0], [8, 18.0], [64, 90.0]],
        "draft_ms": {
            "ngram": [[1, 0.1]],
            "lm": [[1, 1.0], [4, 3.0]],
            "quantized": [[1, 2.0], [3, 6.0]],
            "int8": [[1, 1.5], [3, 4.0]],
            "oracle": [[1, 4.0], [4, 9.0]],
        },
        "host_ms": 0.5,
    }
    path.write_text(json.dumps(table), encoding="utf-8")
    return {
        "fixed": FixedBudget(),
        "fixed5": FixedBudget(max_nodes=5),
        "priority": FixedBudget(first_only=True),
        "cost_aware": CostAwareBudget(costs=str(path)),
        "cost_aware_run": CostAwareBudget(costs=str(path), reset="run", max_nodes=6),
        "ucb1": BanditBudget(costs=str(path)),
        "thompson": BanditBudget(costs=str(path), strategy="thompson"),
    }


def live(folder: Path, names, budget: Budget, sampling: str):
    """A run with a dense trace, as replay reads it."""
    texts = [
        "one two one two one",
        "The cat sat on the mat. The cat sat",
        "x = 1; y = 2; x = 1; y =",
    ]
    path = texts_file(folder.parent / "texts", texts)
    drafter = Ensemble({name: member(name) for name in names})
    sampling_options = SamplingOptions(max_new_tokens=COUNT, **SAMPLING[sampling])
    options = {"sampling": sampling_options, "budget": budget, "budget_node": node_of(budget)}
    run_drafter(folder, drafter, path, trace="dense", baseline=False, **options)
    return read_trace(folder)


BUDGETS = ["fixed", "fixed5", "priority", "cost_aware", "cost_aware_run", "ucb1", "thompson"]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", BUDGETS)
def test_law_6_replay_is_the_live_run_and_so_it_is_for_other_subsets(
    tmp_path, monkeypatch, budgets, name, sampling
):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    trace, whole = live(tmp_path / "all", ALL, budgets[name], sampling)
    assert whole.steps["num_accepted"].sum() > 0, "otherwise nothing is tested"
    found = same_steps(whole.steps, replay_of(trace, whole))
    assert found["num_different"] == 0 and found["num_steps"] > 0, found["first_difference"]
    for names in SUBSETS if sampling == "greedy" else SUBSETS[-1:]:
        _, part = live(tmp_path / "+".join(names), names, budgets[name], sampling)
        found = same_steps(part.steps, replay_of(trace, part))
        assert found["num_different"] == 0, f"{names}: {found['first_difference']}"


def test_law_6_would_notice_a_proposal_that_no_member_made(tmp_path, monkeypatch, budgets):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    trace, whole = live(tmp_path / "all", ALL, budgets["fixed"], "greedy")
    trace.token_ids[trace.depths == 1] += 1
    assert same_steps(whole.steps, replay_of(trace, whole))["num_different"] > 0
