"""Replay is the live run, step for step: whoever drafts, under every budget; and what a broken
trace gets.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import (
    COSTS,
    END,
    Guesser,
    decode_live,
    dense_frame,
    drafts_everywhere,
    facts,
    guessers,
    live_frames,
    prompts_frame,
    scripts,
    trace_of,
)

from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.errors import UserError
from specens.replay.all_subsets import MergedDrafts
from specens.replay.simulate import play, replay
from specens.replay.study import same_steps
from specens.replay.trace import NOT_SCHEDULED, Subset, Trace

TEXTS = scripts()
MEMBERS = guessers(TEXTS)
TRACE = trace_of(TEXTS, MEMBERS)

BUDGETS = {
    "fixed": FixedBudget(),
    "fixed, 5 nodes": FixedBudget(max_nodes=5),
    "fixed, 1 node": FixedBudget(max_nodes=1),
    "fixed, nothing": FixedBudget(max_nodes=0),
    "priority": FixedBudget(first_only=True),
    "priority, 3 nodes": FixedBudget(max_nodes=3, first_only=True),
    "ucb1": BanditBudget(),
    "thompson, 3 nodes": BanditBudget(max_nodes=3, strategy="thompson", reset="run"),
    "cost_aware": CostAwareBudget(),
    "cost_aware, 4 nodes": CostAwareBudget(max_nodes=4),
    "cost_aware, no guard": CostAwareBudget(guard=False),
    "cost_aware, remembers": CostAwareBudget(reset="run"),
}


def assert_same(steps: pd.DataFrame, drafts: pd.DataFrame, replayed: pd.DataFrame) -> None:
    """Every count of a step, and which members were scheduled and proposed something."""
    found = same_steps(steps, replayed)
    assert found["num_steps"] == len(replayed) and found["num_different"] == 0, found
    for name, rows in drafts.groupby("drafter", sort=False):
        depths = replayed[f"depth_{name}"].to_numpy()
        assert ((depths > 0) == (rows["num_drafted"] > 0).to_numpy()).all(), name
        assert (depths <= rows["num_planned"].to_numpy()).all(), name
        assert ((depths != NOT_SCHEDULED) == rows["was_scheduled"].to_numpy(bool)).all(), name
        assert (depths[rows["num_planned"].to_numpy() == 0] == NOT_SCHEDULED).all(), name


def positions_of(replayed: pd.DataFrame) -> np.ndarray:
    """Where its steps begin, among all positions of the trace."""
    prompts = [TRACE.prompt_ids.index(name) for name in replayed["prompt_id"]]
    return TRACE.starts[prompts] + replayed["position"].to_numpy()


@pytest.mark.laws
@pytest.mark.parametrize("name", BUDGETS)
def test_replay_is_the_live_run_under_every_budget(name):
    _, steps, drafts = live_frames(TEXTS, MEMBERS, BUDGETS[name])
    assert_same(steps, drafts, replay(TRACE, BUDGETS[name], COSTS))


@pytest.mark.laws
@pytest.mark.parametrize("name", ["fixed", "fixed, 5 nodes", "priority", "ucb1", "cost_aware"])
@pytest.mark.parametrize(
    "subset", [("poor",), ("tree", "chain"), ("model", "poor", "chain"), ()], ids="+".join
)
def test_replay_is_the_live_run_of_another_subset_in_another_order(name, subset):
    members = {member: MEMBERS[member] for member in subset}
    _, steps, drafts = live_frames(TEXTS, members, BUDGETS[name])
    assert_same(steps, drafts, replay(TRACE, BUDGETS[name], COSTS, members=subset))


def test_the_budgets_above_really_differ():
    steps = {name: replay(TRACE, budget, COSTS) for name, budget in BUDGETS.items()}
    assert {mode for frame in steps.values() for mode in frame["mode"]} == {
        "draft",
        "probe",
        "plain",
    }
    counts = {name: (len(frame), frame["num_nodes"].sum()) for name, frame in steps.items()}
    assert len(set(counts.values())) >= len(BUDGETS) - 1, (
        counts
    )  # to remember need not change anything
    assert counts["fixed, nothing"] == (TRACE.num_positions, 0)
    priority = steps["priority"]
    is_over = (priority[["depth_chain", "depth_tree"]] > 0).any(axis=1)
    assert (priority.loc[is_over, "depth_poor"] == NOT_SCHEDULED).all()
    assert is_over.any() and not is_over.all()


def test_a_model_is_cut_where_its_confidence_is_too_low():
    replayed = replay(TRACE, BUDGETS["cost_aware"], COSTS)
    depths = replayed["depth_model"].to_numpy()
    assert (depths < TRACE.deepest[positions_of(replayed), 2])[depths > 0].any()


def test_costs_may_differ_from_prompt_to_prompt():
    rows = COSTS.draft_ms.items()
    dear = {name: tuple((count, 20 * ms) for count, ms in row) for name, row in rows}
    slow = replace(COSTS, draft_ms=dear)
    tables = {text.name: (COSTS, slow)[number % 2] for number, text in enumerate(TEXTS)}
    budget = CostAwareBudget()
    _, steps, drafts = live_frames(TEXTS, MEMBERS, budget, tables)
    assert_same(steps, drafts, replay(TRACE, budget, tables))
    assert same_steps(steps, replay(TRACE, budget, COSTS))["num_different"]


@pytest.mark.parametrize(
    "budget", [FixedBudget(), FixedBudget(max_nodes=4), CostAwareBudget()], ids=str
)
def test_shorter_chains_are_those_that_were_drafted_shorter(budget):
    short = replace(MEMBERS["chain"], depth=6)
    short.members = (replace(short.members[0], num_draft_tokens=2, num_draft_nodes=2),)
    _, steps, drafts = live_frames(TEXTS, {"chain": short, "model": MEMBERS["model"]}, budget)
    replayed = replay(TRACE, budget, COSTS, members=("chain", "model"), lengths={"chain": 2})
    assert_same(steps, drafts, replayed)


def test_a_tree_is_cut_at_the_given_depth():
    replayed = replay(TRACE, FixedBudget(), None, ["tree"], {"tree": 1})
    assert (
        set(replayed["depth_tree"]) <= {NOT_SCHEDULED, 0, 1} and replayed["num_accepted"].max() == 1
    )
    trees = [TRACE.drafts[position][1] for position in positions_of(replayed)]
    nodes = [zip(tree.token_ids, tree.parents, strict=True) for tree in trees]
    firsts = [{token for token, parent in tree if parent < 0} for tree in nodes]
    assert replayed["num_nodes"].tolist() == list(map(len, firsts))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_the_fast_path_is_the_general_one(seed, num_members, num_texts, with_lengths):
    """All subsets at once from one merge, against the loop's own code."""
    rng = random.Random(seed)
    texts = scripts(seed, num_texts)
    members = {}
    for number in range(num_members):
        depth = rng.randrange(1, 6)
        nodes = depth if rng.random() < 0.5 else rng.randrange(depth, 12)
        limit = rng.choice([None, 20, 40])
        skill = rng.random()
        own = Guesser(texts, depth, nodes, skill, seed + number, context_limit=limit)
        members[f"m{number}"] = own
    trace = trace_of(texts, members)
    shorter = {name: rng.randrange(1, member.depth + 1) for name, member in members.items()}
    lengths = shorter if with_lengths else None
    merged, budget = MergedDrafts.of(trace, lengths), FixedBudget(max_nodes=10**6)
    for count in range(num_members + 1):
        for names in itertools.combinations(members, count):
            subset = Subset.of(trace, names, lengths)
            policy = budget.begin(subset.members, COSTS)
            fast = merged.steps(subset, budget.max_nodes)
            general = play(trace, subset, lambda _, policy=policy: policy)
            pd.testing.assert_frame_equal(fast, general)


def test_the_fast_path_steps_back_where_the_budget_would_cut():
    merged, subset = MergedDrafts.of(TRACE), Subset.of(TRACE)
    widest = replay(TRACE, FixedBudget(max_nodes=10**6))["num_nodes"].max()
    assert merged.steps(subset, int(widest)) is not None
    assert merged.steps(subset, int(widest) - 1) is None
    assert merged.steps(subset, 0) is None


def test_nothing_is_proposed_behind_an_end_of_text():
    texts = scripts()
    wrong = Guesser(texts, 3, 3, 0.0, seed=0, abstains=0.0)
    wrong._full = lambda context_ids: replace(  # pyright: ignore[reportAttributeAccessIssue]
        MEMBERS["poor"]._full(context_ids), token_ids=(END, 5, 5)
    )
    replayed = replay(trace_of(texts, {"wrong": wrong}), FixedBudget())
    drafted = replayed[replayed["depth_wrong"] > 0]
    assert set(drafted["num_nodes"]) == {1} and set(drafted["depth_wrong"]) <= {1, 2, 3}


def test_drafts_are_what_the_loop_saw():
    everywhere = drafts_everywhere(TEXTS[1], MEMBERS)
    for position, (_, draft) in enumerate(everywhere, start=int(TRACE.starts[1])):
        parts = TRACE.drafts[position]
        assert [token for part in parts for token in part.token_ids] == list(draft.token_ids)
        confidences = [one for part in parts for one in part.confidences]
        assert confidences == list(draft.confidences or [None] * len(draft))


def test_prompts_that_failed_or_were_not_finished_are_left_out():
    dense, prompts = dense_frame(TEXTS, MEMBERS), prompts_frame(TEXTS)
    prompts.loc[1, "error"] = "out of memory"
    trace = Trace.of(dense, prompts[prompts["prompt_id"] != TEXTS[2].name], facts(MEMBERS))
    assert trace.prompt_ids == (TEXTS[0].name, TEXTS[3].name)
    part = replay(TRACE, FixedBudget())
    part = part[part["prompt_id"].isin(trace.prompt_ids)].reset_index(drop=True)
    pd.testing.assert_frame_equal(replay(trace, FixedBudget()), part)


def _drop(dense: pd.DataFrame, row: int) -> pd.DataFrame:
    return dense.drop(index=dense.index[row])


def _set(dense: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    """With another value in the first row that has a proposal."""
    changed = dense.copy()
    changed.at[int(np.argmax(dense["token_ids"].map(len) > 1)), column] = value
    return changed


def _set_nodes(dense: pd.DataFrame, token_ids: list[int], parents: list[int]) -> pd.DataFrame:
    changed = _set(_set(dense, "token_ids", token_ids), "parents", parents)
    return _set(changed, "confidences", [5] * len(parents))


BROKEN = {
    "there more than once": lambda dense: pd.concat([dense, dense.iloc[[7]]]),
    "is missing": lambda dense: _drop(dense, 7),
    "which is no member": lambda dense: _set(dense, "drafter", "stranger"),
    "has no position": lambda dense: _set(dense, "position", 10**4),
    "is larger than it can be": lambda dense: _set_nodes(dense, [3] * 11, [-1] * 11),
    "before its parent": lambda dense: _set_nodes(dense, [3, 3], [1, -1]),
    "parents or confidences": lambda dense: _set(dense, "parents", [-1]),
    "tokens_wanted": lambda dense: _set(dense, "tokens_wanted", 1),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_trace_is_refused_by_its_fault(fault):
    broken = BROKEN[fault](dense_frame(TEXTS, MEMBERS))
    with pytest.raises(UserError, match=fault) as refusal:
        Trace.of(broken, prompts_frame(TEXTS), facts(MEMBERS))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("members", "lengths", "fault"),
    [
        (["absent"], None, "no member 'absent'"),
        (["tree", "tree"], None, "twice"),
        (None, {"absent": 1}, "no member 'absent'"),
        (None, {"chain": 7}, "from 1 to 6"),
        (None, {"chain": 0}, "from 1 to 6"),
        (None, {"chain": 2.5}, "from 1 to 6"),
    ],
)
def test_what_was_not_traced_cannot_be_replayed(members, lengths, fault):
    with pytest.raises(UserError, match=fault):
        replay(TRACE, FixedBudget(), COSTS, members, lengths)


def test_other_faults_of_a_run_are_named():
    dense, prompts = dense_frame(TEXTS, MEMBERS), prompts_frame(TEXTS)
    with pytest.raises(UserError, match="more than one"):
        Trace.of(dense, pd.concat([prompts, prompts]), facts(MEMBERS))
    with pytest.raises(UserError, match="no prompt was finished"):
        Trace.of(dense, prompts.assign(error="failed"), facts(MEMBERS))
    with pytest.raises(UserError, match="name the drafters"):
        Trace.of(dense, prompts, {**facts(MEMBERS), "members": [{"name": "chain"}]})
    with pytest.raises(UserError, match="no drafter"):
        Trace.of(dense, prompts, {**facts(MEMBERS), "members": []})


def test_same_steps_names_the_first_difference():
    _, steps, _ = live_frames(TEXTS, MEMBERS, FixedBudget())
    replayed = replay(TRACE, FixedBudget())
    changed = replayed.copy()
    changed.loc[5, "num_nodes"] += 1
    found = same_steps(steps, changed)
    assert (
        found["num_different"] == 1
        and f"step {changed.loc[5, 'step']}" in found["first_difference"]
    )
    assert same_steps(steps, replayed.iloc[:-1])["num_different"] == 1
    assert same_steps(steps.iloc[:-2], replayed)["num_different"] == 2


def test_without_costs_every_step_is_taken_to_cost_the_same():
    budget = CostAwareBudget()
    members = {"chain": MEMBERS["chain"]}
    done = decode_live(TEXTS, members, budget, {text.name: CostTable() for text in TEXTS})
    replayed = replay(TRACE, budget, None, ["chain"])
    assert len(replayed) == sum(len(steps) for _, steps in done)
