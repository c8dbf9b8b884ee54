"""What subsets, members and policies gain, by replay; and what a step costs, by the model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from traces import COSTS, Guesser, decode_live, guessers, live_frames, node_of, scripts, trace_of

from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.types import Member
from specens.errors import UserError
from specens.replay.all_subsets import MergedDrafts
from specens.replay.cost_model import CostModel, held_out_error, measured_seconds, prediction_error
from specens.replay.files import budget_node, budget_of
from specens.replay.oracles import ORACLES, ChooseOne, choose_one, compare, union
from specens.replay.simulate import replay
from specens.replay.subsets import AR, MAX_MEMBERS, TOTALS, Subsets, overlap, prompt_totals, rescue
from specens.replay.trace import NOT_SCHEDULED

TEXTS = scripts()
MEMBERS = guessers(TEXTS)
TRACE = trace_of(TEXTS, MEMBERS)
MODEL = CostModel(COSTS)
SUBSETS = Subsets.of(TRACE, MODEL, FixedBudget())
BUDGETS = {
    "fixed": FixedBudget(),
    "priority": FixedBudget(first_only=True),
    "bandit": BanditBudget(),
    "cost_aware": CostAwareBudget(),
}


def twins() -> tuple[Subsets, dict[str, Guesser]]:
    """Two drafters that propose the same, and a third."""
    chain, tree = MEMBERS["chain"], MEMBERS["tree"]
    members = {"one": chain, "other": replace(tree), "copy": replace(chain)}
    own = COSTS.draft_ms["chain"]
    costs = replace(COSTS, draft_ms={"one": own, "copy": own, "other": ((1, 0.5),)})
    return Subsets.of(trace_of(TEXTS, members), CostModel(costs)), members


def test_the_table_has_every_subset_once_and_ar_decoding_first():
    table = SUBSETS.table()
    assert len(table) == 2 ** len(MEMBERS) and table["subset"].is_unique
    first = table.iloc[0]
    assert first["subset"] == AR and first["num_members"] == 0
    assert first["calls"] == TRACE.num_positions
    assert first["speedup"] == 1 and first["acceptance_length"] == 1
    assert first["seconds"] == pytest.approx(TRACE.num_positions * COSTS.plain() / 1e3)
    assert "chain+model" in set(table["subset"])
    assert table["num_members"].max() == len(MEMBERS)
    assert np.allclose(table["seconds"], table["draft_s"] + table["verify_s"] + table["host_s"])
    assert np.allclose(table["acceptance_length"] * table["calls"], TRACE.num_positions)


@pytest.mark.parametrize("max_nodes", [64, 5])
def test_every_row_is_what_that_subset_really_did(max_nodes):
    budget = FixedBudget(max_nodes=max_nodes)
    table = Subsets.of(TRACE, MODEL, budget).table().set_index("subset")
    for count in range(len(MEMBERS) + 1):
        for names in itertools.combinations(MEMBERS, count):
            decoded = decode_live(TEXTS, {name: MEMBERS[name] for name in names}, budget)
            done = [step for _, steps in decoded for step in steps]
            row = table.loc["+".join(names) or AR]
            assert row["calls"] == len(done)
            assert row["num_accepted"] == sum(step.num_accepted for step in done)
            assert row["num_nodes"] == sum(step.num_nodes for step in done)


@pytest.mark.parametrize(
    "budget", [CostAwareBudget(), BanditBudget(), FixedBudget(first_only=True)], ids=str
)
def test_subsets_can_be_compared_under_any_budget(budget):
    table = Subsets.of(TRACE, MODEL, budget).table().set_index("subset")
    steps = replay(TRACE, budget, COSTS, ["tree", "poor"])
    assert table.loc["tree+poor", "calls"] == len(steps)
    assert table.loc["tree+poor", "seconds"] == pytest.approx(MODEL.seconds(steps))


def test_contributions_add_up_to_what_all_save():
    values = SUBSETS.contributions()
    for unit, taken in (("calls", SUBSETS.calls), ("s", SUBSETS.seconds)):
        assert values[f"shapley_{unit}"].sum() == pytest.approx(taken[0].sum() - taken[-1].sum())
        places = [list(MEMBERS).index(name) for name in values["member"]]
        without = [taken[len(taken) - 1 - (1 << place)].sum() for place in places]
        expected = [total - taken[-1].sum() for total in without]
        assert values[f"leave_one_out_{unit}"].tolist() == pytest.approx(expected)
        for kind in ("leave_one_out", "shapley"):
            key = f"{kind}_{unit}"
            assert (values[f"{key}_low"] <= values[key] + 1e-9).all()
            assert (values[key] <= values[f"{key}_high"] + 1e-9).all()
    assert values.set_index("member").loc["poor", "shapley_s"] < 0, "it costs more than it gains"


def test_shapley_is_the_mean_over_all_orders():
    calls = SUBSETS.calls.sum(axis=1)
    orders = list(itertools.permutations(range(len(MEMBERS))))
    added = np.zeros(len(MEMBERS))
    for order in orders:
        subset = 0
        for place in order:
            added[place] += calls[subset] - calls[subset | 1 << place]
            subset |= 1 << place
    values = SUBSETS.contributions()["shapley_calls"].tolist()
    assert values == pytest.approx((added / len(orders)).tolist())


def test_twins_contribute_the_same_and_nothing_beside_each_other():
    values = twins()[0].contributions().set_index("member")
    for column in values.columns:
        assert values.loc["one", column] == pytest.approx(values.loc["copy", column])
    assert values.loc["one", "leave_one_out_calls"] == 0
    assert values.loc["one", "leave_one_out_s"] < 0
    assert values.loc["one", "shapley_calls"] > 0


def test_there_is_no_interval_of_one_prompt():
    members = {"chain": MEMBERS["chain"]}
    values = Subsets.of(trace_of(TEXTS[:1], members), MODEL).contributions()
    assert values["shapley_calls_low"].isna().all() and values["shapley_calls"].notna().all()


def test_more_members_than_can_be_compared_are_refused():
    many = {f"m{number}": MEMBERS["poor"] for number in range(MAX_MEMBERS + 1)}
    with pytest.raises(UserError, match="2048 subsets"):
        Subsets.of(trace_of(TEXTS[3:], many), CostModel(CostTable()))


def test_overlap_and_rescue_count_positions():
    together, saved = overlap(TRACE), rescue(TRACE)
    right = {
        name: [TRACE.text[at] in firsts(draft[place]) for at, draft in drafting()]
        for place, name in enumerate(MEMBERS)
    }
    for a, b in itertools.product(MEMBERS, MEMBERS):
        both = np.mean([x and y for x, y in zip(right[a], right[b], strict=True)])
        wrong = [x for x, y in zip(right[a], right[b], strict=True) if not y]
        assert together.loc[a, b] == pytest.approx(both)
        assert saved.loc[a, b] == pytest.approx(np.mean(wrong))
    assert all(saved.loc[name, name] == 0 for name in MEMBERS)


def drafting():
    return [(at, drafts) for at, drafts in enumerate(TRACE.drafts) if TRACE.tokens_wanted[at] > 1]


def firsts(draft) -> set[int]:
    nodes = zip(draft.token_ids, draft.parents, strict=True)
    return {token for token, parent in nodes if parent < 0}


def test_a_member_that_is_never_wrong_is_never_rescued():
    sure = {"sure": Guesser(TEXTS, 4, 4, 1.0, seed=0, abstains=0.0), "poor": MEMBERS["poor"]}
    shares = rescue(trace_of(TEXTS, sure))
    assert shares["sure"].isna().all() and shares.loc["sure", "poor"] == 1


def test_regret_is_against_the_best_subset():
    best = SUBSETS.seconds.sum(axis=1).argmin()
    assert SUBSETS.regret(SUBSETS.seconds[best])["regret"] == pytest.approx(0)
    each = SUBSETS.seconds.min(axis=0)
    assert SUBSETS.regret(each)["regret_by_prompt"] == pytest.approx(0)
    assert SUBSETS.regret(each)["regret"] <= 0
    assert SUBSETS.regret(2 * each)["regret_by_prompt"] == pytest.approx(1)


def test_policies_are_what_they_are_called():
    table = compare(TRACE, MODEL, SUBSETS, BUDGETS, 64, {"bandit": "an arm"}).set_index("policy")
    assert list(table.index) == [*BUDGETS, *ORACLES]
    for name, budget in BUDGETS.items():
        steps = replay(TRACE, budget, COSTS)
        assert table.loc[name, "calls"] == len(steps)
        assert table.loc[name, "seconds"] == pytest.approx(MODEL.seconds(steps))
    singles = [SUBSETS.seconds[1 << place].sum() for place in range(len(MEMBERS))]
    assert table.loc["best_alone", "seconds"] <= min(singles)
    assert table.loc["union", "calls"] == SUBSETS.calls[-1].sum()
    union_s = table.loc["union", "calls"] * COSTS.plain() / 1e3
    assert table.loc["union", "seconds"] == pytest.approx(union_s)
    assert table.loc["union", "tokens_per_s"] == table["tokens_per_s"].max()
    assert "Ceiling" in table.loc["union", "note"] and table.loc["bandit", "note"] == "an arm"
    assert "Hindsight" in table.loc["best_alone", "note"]


def test_the_ceiling_pays_the_cheapest_forward_there_is():
    """Some kernels take less time for four rows than for one."""
    cheap = replace(MODEL, table=replace(COSTS, verify_ms=((0, 10.0), (3, 8.0), (8, 17.0))))
    table = compare(TRACE, cheap, Subsets.of(TRACE, cheap), {}, 64).set_index("policy")
    union_s = table.loc["union", "calls"] * (8.0 + COSTS.host_ms) / 1e3
    assert table.loc["union", "seconds"] == pytest.approx(union_s)


def test_the_union_is_what_a_budget_without_limits_does():
    steps = replay(TRACE, FixedBudget(max_nodes=10**6))
    assert union(TRACE)["num_emitted"].tolist() == steps["num_emitted"].tolist()


def test_choose_one_lets_one_draft_and_settles_on_the_best():
    steps = choose_one(TRACE, MODEL, 64)
    depths = steps.filter(like="depth_")
    scheduled = depths != NOT_SCHEDULED
    assert scheduled.sum(axis=1).max() == 1 and scheduled["depth_chain"].mean() > 0.5
    assert (steps["num_nodes"] <= depths.max(axis=1).clip(lower=0) * 10).all()
    assert choose_one(TRACE, MODEL, 2)["num_nodes"].max() == 2


def test_choose_one_knows_nothing_before_the_text_is_there():
    members = (Member("a", 4, 4), Member("b", 4, 4))
    tokens = np.ones((9, 3), int)
    tokens[0, 1] = 5  # known when five tokens have come
    policy = ChooseOne(10, tokens, np.ones((9, 3)), 64)
    contexts = {at: PlanContext(members, 10 + at, 20) for at in (0, 1, 4, 5, 6)}
    depths = {at: policy.plan(one).shares[1].num_tokens for at, one in contexts.items()}
    assert depths == {0: 0, 1: 0, 4: 0, 5: 4, 6: 4}


def test_a_budgets_configuration_is_in_the_record_and_its_file_of_costs_is_not_read():
    """Schema version 3 recorded a name of conf/budget, and the options."""
    options = {"max_nodes": 7, "costs": "gone.json"}
    old = budget_node({"budget": {"name": "cost_aware", "options": options}})
    new = budget_node(
        {"budget": {"name": "mine", "node": {**node_of(CostAwareBudget()), **options}}}
    )
    assert budget_of(old) == budget_of(new) == CostAwareBudget(max_nodes=7)
    assert budget_of(new, max_nodes=3) == CostAwareBudget(max_nodes=3)


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"budget": {"name": "greedy", "options": {}}}, "choose one of bandit, cost_aware, fixed"),
        ({"budget": {"name": "fixed", "options": {"guard": True}}}, "no option 'guard'"),
        ({"budget": {"name": "X", "node": {"_target_": "mine.X"}}}, r"plugins=\[mine\]"),
        ({}, "name the budget"),
        ({"budget": {"name": "X", "node": None}}, "name the budget"),
    ],
)
def test_budgets_that_cannot_be_built_again_are_refused_in_one_line(facts, fault):
    with pytest.raises(UserError, match=fault) as refused:
        budget_of(budget_node(facts))
    assert "\n" not in str(refused.value)


def test_totals_are_sums_of_steps():
    steps = replay(TRACE, FixedBudget())
    totals = prompt_totals(steps, MODEL)
    assert totals.shape == (len(TEXTS), len(TOTALS))
    assert totals[:, 0].tolist() == steps.groupby("prompt_id", sort=False).size().tolist()
    assert totals[:, 4:].sum() == pytest.approx(MODEL.seconds(steps))


# The cost model


def test_a_step_costs_its_nodes_its_drafts_and_its_overhead():
    steps = pd.DataFrame(
        {
            "num_nodes": [0, 8, 5],
            "context_tokens": [100, 1100, 100],
            "depth_chain": [NOT_SCHEDULED, 6, 0],
            "depth_poor": [-1, 1, -1],
        }
    )
    priced = CostModel(COSTS, ms_per_1000_tokens=2.0, context_tokens=100).priced(steps)
    assert priced["verify_s"].tolist() == pytest.approx([0.010, 0.017, 0.013])
    drafted = priced["draft_s"].tolist()
    assert drafted == pytest.approx([0.0, 0.0043, 0.0002]), "to abstain takes time, too"
    assert priced["host_s"].tolist() == pytest.approx([0.0005] * 3)


def timed(noise: float = 0.0, slope: float = 0.0, seed: int = 0):
    """A run whose steps take what a model predicts, twice what the table has, and some noise; and
    that model.
    """
    rng = np.random.default_rng(seed)
    rows = COSTS.draft_ms.items()
    truth = replace(
        COSTS,
        verify_ms=tuple((count, 2 * ms) for count, ms in COSTS.verify_ms),
        draft_ms={name: tuple((count, 3 * ms) for count, ms in row) for name, row in rows},
        host_ms=0.7,
    )
    prompts, steps, drafts = live_frames(TEXTS, MEMBERS, FixedBudget())
    steps["context_tokens"] = 100 * steps["context_tokens"]
    context = steps["context_tokens"]
    replayed = replay(TRACE, FixedBudget()).assign(context_tokens=context.to_numpy())
    model = CostModel(truth, slope, float(context[steps["num_nodes"] > 0].mean()))
    verify_ms = 1e3 * model.priced(replayed)["verify_s"].to_numpy()
    steps["verify_ms"] = verify_ms + noise * rng.standard_normal(len(steps))
    steps["host_ms"] = 0.7
    depths = np.maximum(np.minimum(drafts["num_planned"], drafts["num_drafted"]), 1)
    named = zip(drafts["drafter"], depths, strict=True)
    drafts["draft_ms"] = [truth.draft(name, at) for name, at in named] * drafts["was_scheduled"]
    totals = drafts.groupby(["prompt_id", "step"], sort=False)["draft_ms"].sum().to_numpy()
    steps["draft_ms"] = totals
    return prompts, steps, drafts, replayed, model


def test_the_fit_finds_what_a_run_took():
    prompts, steps, drafts, replayed, truth = timed()
    model = CostModel.fitted(COSTS, prompts, steps, drafts)
    for nodes in (2, 5, 8, 20):
        assert model.table.verify(nodes) == pytest.approx(truth.table.verify(nodes))
    assert {name: model.table.draft(name, 3) for name in MEMBERS} == pytest.approx(
        {name: truth.table.draft(name, 3) for name in MEMBERS}
    )
    assert model.table.host_ms == pytest.approx(0.7) and model.ms_per_1000_tokens == 0
    assert prediction_error(model, steps, replayed) == pytest.approx(0, abs=0.02)
    assert held_out_error(COSTS, prompts, steps, drafts, replayed) == pytest.approx(0, abs=0.05)


def test_the_baseline_tells_what_ar_decoding_takes():
    prompts, steps, drafts, _, _ = timed()
    prompts["baseline_ids"] = prompts["output_ids"]
    prompts["baseline_decode_s"] = 0.018 * prompts["output_ids"].map(len)
    model = CostModel.fitted(COSTS, prompts, steps, drafts)
    assert model.table.plain() == pytest.approx(18.0)
    assert model.table.verify(8) == pytest.approx(2 * COSTS.verify(8)), (
        "wider forwards are the run's own"
    )
    assert 17.5 / 10 < model.table.verify(2) / COSTS.verify(2) < 2, "a rare width lies between"


@pytest.mark.parametrize(
    ("slope", "noise", "is_believed"), [(3.0, 0.1, True), (0.0, 3.0, False), (-3.0, 0.1, False)]
)
def test_context_costs_what_it_clearly_costs(slope, noise, is_believed):
    prompts, steps, drafts, replayed, _ = timed(noise, slope)
    model = CostModel.fitted(COSTS, prompts, steps, drafts)
    if is_believed:
        assert model.ms_per_1000_tokens == pytest.approx(slope, rel=0.3)
        assert prediction_error(model, steps, replayed) == pytest.approx(0, abs=0.05)
    else:
        assert model.ms_per_1000_tokens == 0


def test_a_members_price_comes_from_drafts_in_a_row():
    """One that was idle for a step reads more before it drafts, which is no part of the price of
    drafting.
    """
    prompts, steps, drafts, _, truth = timed()
    own = drafts["drafter"] == "tree"
    columns = ["num_planned", "num_drafted", "draft_ms"]
    drafts.loc[own & (drafts["step"] % 4 == 2), columns] = 0
    drafts["was_scheduled"] = drafts["num_planned"] > 0
    drafts.loc[own & (drafts["step"] % 4 == 3), "draft_ms"] *= 5
    model = CostModel.fitted(COSTS, prompts, steps, drafts)
    assert model.table.draft("tree", 3) == pytest.approx(truth.table.draft("tree", 3))


def test_members_that_priority_passes_over_do_not_make_drafting_cheap():
    prompts, steps, drafts, _, truth = timed()
    drafted = drafts.groupby(["prompt_id", "step"], sort=False)["num_drafted"].cumsum()
    left_out = drafted > drafts["num_drafted"]
    drafts.loc[left_out, ["num_drafted", "draft_ms"]] = 0
    cheap = CostModel.fitted(COSTS, prompts, steps, drafts)
    assert cheap.table.draft("tree", 3) < truth.table.draft("tree", 3)
    drafts.loc[left_out, "was_scheduled"] = False
    model = CostModel.fitted(COSTS, prompts, steps, drafts)
    assert model.table.draft("tree", 3) == pytest.approx(truth.table.draft("tree", 3))


def test_a_member_that_the_table_lacks_is_measured_or_refused():
    prompts, steps, drafts, _, truth = timed()
    others = {name: row for name, row in COSTS.draft_ms.items() if name != "poor"}
    lacking = replace(COSTS, draft_ms=others, origin="gpu.json")
    model = CostModel.fitted(lacking, prompts, steps, drafts)
    assert model.table.draft("poor", 1) == pytest.approx(truth.table.draft("poor", 1))
    with pytest.raises(UserError, match=r"gpu\.json.*poor"):
        lacking.check(TRACE.members)
    MODEL.table.check(TRACE.members)


def test_one_half_cannot_be_held_out_of_one_prompt():
    prompts, steps, drafts, replayed, _ = timed()
    first = TEXTS[0].name
    alone = [frame[frame["prompt_id"] == first] for frame in (prompts, steps, drafts, replayed)]
    assert held_out_error(COSTS, *alone) is None
    total_ms = steps[["draft_ms", "verify_ms", "host_ms"]].sum().sum()
    assert measured_seconds(steps) == pytest.approx(total_ms / 1e3)


def test_merged_trees_have_the_nodes_of_their_owners():
    merged = MergedDrafts.of(TRACE)
    assert merged.owners.min() > 0 and merged.owners.max() < 1 << len(MEMBERS)
    assert len(merged.position) < len(TRACE.token_ids), "equal nodes became one"
