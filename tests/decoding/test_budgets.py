"""Budgets and the cost tables they decide by: which members draft, what is verified, what is
learned, and that it can be replayed.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Fake, decode, decode_steps, plain_greedy, text_drafter
from hypothesis import example, given, settings
from hypothesis import strategies as st

import specens
from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.base import PlanContext, Policy, draft_limit
from specens.decoding.budgets.calibration import Calibration
from specens.decoding.budgets.cost_aware import CostAware, CostAwareBudget
from specens.decoding.budgets.costs import (
    LEAST_SAMPLES,
    MOST_CHANGE,
    CostTable,
    read_costs,
    refreshed,
)
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.budgets.tuning import TUNING
from specens.decoding.calibrate import WIDTHS, calibrate, comb
from specens.decoding.generation import merge_options
from specens.decoding.loop import Decoder
from specens.decoding.merge import merge
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.speculator import Completion, Speculator
from specens.decoding.stopping import StopRules
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import (
    ROOT,
    Commit,
    Draft,
    Member,
    MemberRecord,
    Plan,
    Share,
    StepRecord,
    TokenTree,
    chain_parents,
)
from specens.decoding.verify import Coupled, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.drafters.retrieval.datastore import build as build_datastore
from specens.drafters.retrieval.retrieval import Retrieval
from specens.errors import UserError
from specens.models.tiny import random_model
from specens.records.files import COSTS_NAME
from specens.records.writer import RunWriter
from specens.run import cost_cache

AR_MS = 10.0
"""Milliseconds of an AR step in the tables of these tests."""


def table_of(node: float = 0.05, host: float = 0.0, **draft: float) -> CostTable:
    """Every node costs `node` AR steps, every depth of a member's draft `draft[name]` AR steps."""
    return CostTable(
        ((0, AR_MS - host), (64, AR_MS - host + 64 * node * AR_MS)),
        {name: ((1, cost * AR_MS), (2, 2 * cost * AR_MS)) for name, cost in draft.items()},
        host,
        "a test",
    )


FREE = CostTable(((0, AR_MS),), {}, 0.0, "a test")


# A decoding without any model: the text is given, members propose what they are given.

Propose = Callable[[int, Share], tuple[Sequence[int], Sequence[float | None]]]
"""(tokens before this step, share) -> a chain of tokens, and their confidences (empty: none)."""


@dataclass
class Step:
    context: PlanContext
    plan: Plan
    mode: str
    draft: Draft
    tree: TokenTree
    commit: Commit
    ms: float

    @property
    def scheduled(self) -> list[bool]:
        return [share.num_tokens > 0 for share in self.plan.shares]


def drive(
    policy: Policy,
    members: Sequence[Member],
    proposals: Sequence[Propose],
    text: Sequence[int],
    costs: CostTable,
    **more: Any,
) -> list[Step]:
    """The loop's own order of calls, over a text that is known."""
    done, steps = 0, []
    while done < len(text):
        context = PlanContext(tuple(members), done, len(text) - done, **more)
        plan = policy.plan(context)
        mode = policy.mode
        draft = side_by_side(
            [
                propose(done, share) if share.num_tokens else ((), ())
                for propose, share in zip(proposals, plan.shares, strict=True)
            ]
        )
        tree = policy.select(merge(draft, plan))
        path, node, table = [], ROOT, tree.children()
        for token in text[done:-1]:
            node = table.get(node, {}).get(token, None)
            if node is None:
                break
            path.append(node)
        commit = Commit(tuple(path), tuple(text[done : done + len(path) + 1]))
        policy.observe(draft, tree, commit)
        spent = costs.verify(len(tree)) + costs.host_ms
        for place, (member, share) in enumerate(zip(members, plan.shares, strict=True)):
            if share.num_tokens:
                # chains: as deep as they are long
                spent += costs.draft(member.name, max(draft.owners.count(place), 1))
        steps.append(Step(context, plan, mode, draft, tree, commit, spent))
        done += len(commit.token_ids)
    return steps


def side_by_side(chains: Sequence[tuple[Sequence[int], Sequence[float | None]]]) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    confidences: list[float | None] = []
    for owner, (chain, own) in enumerate(chains):
        parents += [
            parent if parent == ROOT else parent + len(tokens)
            for parent in chain_parents(len(chain))
        ]
        tokens += chain
        owners += [owner] * len(chain)
        confidences += own or [None] * len(chain)
    return Draft(tuple(tokens), tuple(parents), tuple(owners), confidences=tuple(confidences))


def text_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1009 + place).randrange(1000) for place in range(length)]


def right(
    text: Sequence[int],
    confidence: float | None = None,
    when: Callable[[int], bool] = lambda done: True,
) -> Propose:
    """The text to come where `when` is true, else tokens that never come; always the same
    confidence at depth 1.
    """

    def propose(done: int, share: Share) -> tuple[list[int], list[float | None]]:
        tokens = list(text[done : done + share.num_tokens])
        if not when(done):
            tokens = [-token - 1 for token in tokens]
        if confidence is None:
            return tokens, []
        return tokens, [confidence**depth for depth in range(1, len(tokens) + 1)]

    return propose


def wrong(text: Sequence[int], confidence: float | None = None) -> Propose:
    return right(text, confidence, lambda done: False)


def member(name: str, depth: int = 4, context_limit: int | None = None) -> Member:
    return Member(name, depth, depth, context_limit)


def total_ms(steps: Sequence[Step]) -> float:
    return sum(step.ms for step in steps)


def num_emitted(steps: Sequence[Step]) -> int:
    return sum(len(step.commit.token_ids) for step in steps)


# Cost tables


def test_costs_between_two_points_are_on_the_line_and_beyond_the_last_goes_on():
    table = CostTable(
        ((0, 10.0), (4, 12.0), (8, 20.0)), {"a": ((1, 3.0), (5, 7.0)), "b": ((1, 2.0),)}, 1.5
    )
    assert [table.verify(n) for n in (0, 2, 4, 6, 8, 10)] == [10.0, 11.0, 12.0, 16.0, 20.0, 24.0]
    assert [table.draft("a", depth) for depth in (0, 0.5, 1, 2, 2.5, 5, 6)] == [
        0.0,
        3.0,
        3.0,
        4.0,
        4.5,
        7.0,
        8.0,
    ]
    assert [table.draft("b", depth) for depth in (1, 9)] == [2.0, 2.0], "one point: every depth"
    assert table.draft("unknown", 4) == 0.0
    assert table.plain() == 11.5
    assert CostTable().verify(64) == CostTable().plain() == 1.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 5))
def test_a_table_returns_what_was_measured_and_beyond_it_more_nodes_never_cost_less(times, gap):
    table = CostTable(tuple((gap * place, ms) for place, ms in enumerate(times)))
    last = gap * (len(times) - 1)
    costs = [table.verify(n) for n in range(last + 20)]
    assert costs[: last + 1 : gap] == times
    assert all(min(times) <= cost <= max(times) + 1e-9 for cost in costs[: last + 1])
    assert all(before <= after for before, after in itertools.pairwise(costs[last:]))


def test_what_a_depth_costs_is_never_less_than_nothing():
    assert CostTable(draft_ms={"a": ((1, 5.0), (2, 1.0))}).draft("a", 50) == 1.0


NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"verify_ms": ()}, "verify_ms"),
        ({"verify_ms": ((1, 2.0),)}, "0 nodes"),
        ({"verify_ms": ((0, 0.0),)}, "0 nodes"),
        ({"verify_ms": ((0, -1.0),)}, "verify_ms"),
        ({"verify_ms": ((0, NAN),)}, "verify_ms"),
        ({"verify_ms": ((0, float("inf")),)}, "verify_ms"),
        ({"verify_ms": ((0, 1.0), (4, 2.0), (2, 3.0))}, "rising counts; 2 follows 4"),
        ({"verify_ms": ((0, 1.0), (4, 2.0), (4, 3.0))}, "rising"),
        ({"verify_ms": ((0, 1.0), (4, NAN))}, "verify_ms"),
        ({"draft_ms": {"small": ()}}, "draft_ms.small"),
        ({"draft_ms": {"small": ((2, 1.0), (1, 1.0))}}, "draft_ms.small"),
        ({"draft_ms": {"small": ((1, -1.0),)}}, "draft_ms.small"),
        ({"host_ms": -1.0}, "host_ms"),
        ({"host_ms": NAN}, "host_ms"),
        ({"host_ms": float("inf")}, "host_ms"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_in_a_line(fields, word):
    with pytest.raises(UserError) as error:
        CostTable(**fields)
    assert "\n" not in str(error.value) and word in str(error.value) and "costs" in str(error.value)


TABLE = CostTable(
    ((0, 10.25), (4, 12.0)), {"a/b": ((1, 3.0), (5, 7.0)), "c": ((1, 0.0),)}, 1.5, "calibrated"
)


def test_a_table_comes_back_from_json_as_it_was():
    content = json.loads(json.dumps(TABLE.content(), allow_nan=False))
    assert CostTable.of(content) == TABLE and CostTable.of(content).origin == "calibrated"
    assert CostTable.of(content, origin="there").origin == "there"
    assert CostTable.of({"verify_ms": [[0, 1]], "draft_ms": {}}) == CostTable(
        ((0, 1.0),), origin=""
    )


BROKEN = [
    *(None, 5, "text", [], [1], {}, {"verify_ms": [[0, 1]]}, {"draft_ms": {}}),
    *(
        {"verify_ms": 5, "draft_ms": {}},
        {"verify_ms": [[0]], "draft_ms": {}},
        {"verify_ms": [0, 1], "draft_ms": {}},
    ),
    *({"verify_ms": [[0, "a"]], "draft_ms": {}}, {"verify_ms": [[0, 1]], "draft_ms": []}),
    *({"verify_ms": [[0, 1]], "draft_ms": {"a": 5}}, {"verify_ms": [[0, 1]], "draft_ms": None}),
    *(
        {"verify_ms": [[0, 1]], "draft_ms": {}, "host_ms": None},
        {"verify_ms": [[0, NAN]], "draft_ms": {}},
    ),
    *(
        {"verify_ms": [[0, 1], [float("inf"), 2]], "draft_ms": {}},
        {"verify_ms": [[0, 1]], "draft_ms": {"a": [[1, {}]]}},
    ),
    *(
        {"versions": [1]},
        {"versions": {"a": 1}},
        {"versions": [{}]},
        {"versions": [{"table": None}]},
        {"versions": []},
    ),
    {"versions": "abc"},
]


@pytest.mark.parametrize("content", BROKEN, ids=str)
def test_a_file_that_holds_no_table_is_refused_by_its_name(content, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    for use in (
        read_costs,
        lambda path: CostAwareBudget(costs=path),
        lambda path: BanditBudget(costs=path),
    ):
        with pytest.raises(UserError) as error:
            use(str(path))
        assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_file_is_a_table_or_the_versions_of_a_run(tmp_path):
    alone = tmp_path / "table.json"
    alone.write_text(json.dumps(TABLE.content()))
    assert read_costs(str(alone)) == replace(TABLE, origin=str(alone))
    writer = RunWriter(tmp_path / "run")
    writer.write_costs([CostTable(), TABLE])
    path = str(tmp_path / "run" / COSTS_NAME)
    assert read_costs(path) == replace(TABLE, origin=path), "of several versions the last"


@pytest.mark.parametrize("budget", ["cost_aware", "bandit"])
@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "\x00\xff", '{"verify_ms": [[0, 1]]}', "folder"]
)
def test_a_file_of_costs_that_is_missing_or_broken_is_refused_before_a_model_is_loaded(
    budget, content, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "specens.models.load.ModelSpec.load", lambda self: pytest.fail("a model was loaded")
    )
    path = tmp_path / "costs.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content.encode("latin-1"))
    config = compose([f"budget={budget}", f"budget.costs={path}"])
    with pytest.raises(UserError) as error:
        build(config.budget)
    line = str(error.value)
    assert "\n" not in line and str(path) in line and "cost table" in line


def test_a_good_file_of_costs_is_taken_from_the_configuration(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TABLE.content()))
    budget = build(compose(["budget=cost_aware", f"budget.costs={path}"]).budget)
    assert budget == CostAwareBudget(costs=str(path)) and budget.needs_costs


# A table follows what steps took


def record(
    verify_ms: float,
    num_nodes: int = 0,
    host_ms: float = 1.0,
    members: Sequence[MemberRecord] = (),
    number: int = 0,
) -> StepRecord:
    return StepRecord(
        number,
        10,
        num_nodes,
        0,
        (1,),
        (0,),
        0.0,
        verify_ms,
        host_ms,
        "tree",
        members=tuple(members),
    )


def drafted(name: str, draft_ms: float, num_planned: int = 2, num_drafted: int = 2) -> MemberRecord:
    return MemberRecord(name, num_drafted, 0, 0, 0, draft_ms, num_planned)


MEASURED = CostTable(
    ((0, 10.0), (4, 12.0), (8, 20.0)),
    {"a": ((1, 3.0), (2, 6.0)), "b": ((1, 5.0),)},
    1.0,
    "calibrated",
)


def verify_row(table: CostTable) -> list[float]:
    return [ms for _, ms in table.verify_ms]


def test_a_table_goes_half_way_to_what_a_prompt_took():
    """In logarithm: twice half of the way is all of it. Narrow steps, wider ones, each member and
    the host by themselves.
    """
    steps = [record(1000.0)]  # the first, which is cold
    steps += [record(10.0 * 1.44)] * 3
    steps += [
        record(1.21 * MEASURED.verify(n), n, members=[drafted("a", 0.64 * 6.0)]) for n in (2, 4, 8)
    ]
    new = refreshed(MEASURED, steps)
    assert verify_row(new) == pytest.approx([10 * 1.2, 12 * 1.1, 20 * 1.1])
    assert [ms for _, ms in new.draft_ms["a"]] == pytest.approx([3 * 0.8, 6 * 0.8])
    assert new.draft_ms["b"] == MEASURED.draft_ms["b"] and new.host_ms == pytest.approx(1.0)
    host = refreshed(MEASURED, [record(10.0, host_ms=1.69)] * 9)
    assert 1.0 < host.host_ms < 1.69 and verify_row(host) == pytest.approx(verify_row(MEASURED))
    assert new.origin == "calibrated"


def test_every_width_that_was_met_often_moves_by_itself_and_the_others_with_all_of_them():
    steps = [record(1.44 * MEASURED.verify(n), n) for n in (1, 3, 4, 4, 5)]  # nearest to 4
    steps += [record(MEASURED.verify(n), n) for n in (8, 7, 7, 8, 7, 8)]
    new = refreshed(
        replace(MEASURED, verify_ms=(*MEASURED.verify_ms, (64, 90.0))), [record(9.0), *steps]
    )
    assert verify_row(new) == pytest.approx([10.0, 12 * 1.2, 20.0, 90.0])


def test_a_wide_forward_may_cost_less_than_a_narrower_one():
    table = CostTable(((0, 10.0), (1, 13.0), (3, 9.0), (8, 20.0)))
    assert [table.verify(n) for n in (0, 1, 2, 3, 8)] == pytest.approx(
        [10.0, 13.0, 11.0, 9.0, 20.0]
    )


@pytest.mark.parametrize(
    ("ratio", "moved"), [(1e6, MOST_CHANGE**0.5), (1e-6, MOST_CHANGE**-0.5), (1.0, 1.0)]
)
def test_one_prompt_moves_no_cost_far(ratio, moved):
    """A busy machine, or a prompt that met a pause, must not spoil the table."""
    steps = [
        record(ratio * MEASURED.verify(n), n, host_ms=ratio, members=[drafted("a", ratio * 6.0)])
        for n in (0, 0, 0, 0, 4, 4, 4, 8)
    ]
    new = refreshed(MEASURED, steps)
    assert verify_row(new) == pytest.approx([moved * ms for ms in verify_row(MEASURED)])
    assert [ms for _, ms in new.draft_ms["a"]] == pytest.approx([3 * moved, 6 * moved])
    assert 1 / MOST_CHANGE - 1e-9 <= new.host_ms / MEASURED.host_ms <= MOST_CHANGE + 1e-9


def test_too_few_steps_change_nothing_and_the_first_never_counts():
    few = LEAST_SAMPLES - 1
    steps = [record(99.0, 4, host_ms=9.0, members=[drafted("a", 60.0)])] * (1 + few)
    assert refreshed(MEASURED, steps) == MEASURED
    assert refreshed(MEASURED, []) == refreshed(MEASURED, steps[:1]) == MEASURED
    assert refreshed(MEASURED, [*steps, steps[0]]) != MEASURED
    cold = [record(99.0, 4), *[record(12.0, 4)] * 3]
    assert refreshed(MEASURED, cold) == MEASURED


def test_a_member_that_was_idle_or_abstained_keeps_its_cost():
    idle = [drafted("a", 50.0, num_planned=0), drafted("b", 50.0, num_drafted=0)]
    new = refreshed(MEASURED, [record(10.0, members=idle)] * 6)
    assert new.draft_ms == MEASURED.draft_ms


def test_ar_steps_alone_move_the_wider_ones_with_them():
    new = refreshed(MEASURED, [record(14.4)] * 5)
    assert verify_row(new) == pytest.approx([1.2 * ms for ms in verify_row(MEASURED)])


def test_a_table_is_refreshed_without_a_clock(monkeypatch):
    steps = [record(12.0, 4, members=[drafted("a", 5.0)])] * 6
    before = refreshed(MEASURED, steps)
    stop_clocks(monkeypatch)
    assert refreshed(MEASURED, steps) == before


def stop_clocks(monkeypatch) -> None:
    def fail(*args: Any) -> float:
        raise AssertionError("the clock was read")

    for name in (
        "time",
        "perf_counter",
        "monotonic",
        "process_time",
        "perf_counter_ns",
        "monotonic_ns",
        "time_ns",
    ):
        monkeypatch.setattr(time, name, fail)


# What a budget may see


PURE = (
    *(f"budgets.{name}" for name in ("base", "fixed", "cost_aware", "bandit", "costs")),
    *(f"budgets.{name}" for name in ("tuning", "calibration", "gain", "guard")),
    "merge",
    "schedule",
    "types",
    "stopping",
)


@pytest.mark.parametrize("module", PURE)
def test_decisions_import_neither_clock_nor_torch_nor_chance(module):
    tree = ast.parse(
        (Path(specens.__file__).parent / "decoding" / f"{module.replace('.', '/')}.py").read_text()
    )
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert not names & {"time", "datetime", "timeit", "torch", "numpy", "os", "secrets", "uuid"}
    assert "random" not in names or module == "budgets.bandit"


def test_decisions_load_no_torch():
    """Not through what they import either: replay runs without it."""
    modules = ", ".join(f"specens.decoding.{name}" for name in PURE)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


LEARNING = {
    "cost_aware": CostAwareBudget(),
    "unguarded": CostAwareBudget(guard=False),
    "narrow": CostAwareBudget(max_nodes=3),
    "ucb1": BanditBudget(),
    "thompson": BanditBudget(strategy="thompson"),
}


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("is_blind", [False, True])
def test_plans_and_trees_are_a_function_of_what_was_observed(name, is_blind, monkeypatch):
    """The same twice, without a clock; no state is shared between the two policies."""
    text, members = text_of(200), [member("a", 4), member("b", 6), member("c", 2)]
    proposals = [
        right(text, 0.9, lambda done: done % 3 > 0),
        wrong(text, 0.7),
        right(text, None, lambda done: done > 100),
    ]
    costs = table_of(a=0.1, b=0.2)
    policies = [LEARNING[name].begin(members, costs) for _ in range(2)]
    stop_clocks(monkeypatch)
    first, second = (
        drive(policy, members, proposals, text, costs, is_blind=is_blind) for policy in policies
    )
    assert [(s.plan, s.mode, s.tree, s.draft) for s in first] == [
        (s.plan, s.mode, s.tree, s.draft) for s in second
    ]
    assert len({s.plan for s in first}) > 2 and any(s.tree for s in first)


MEMBERS = st.lists(
    st.builds(
        lambda name, depth, width, limit: Member(name, depth, depth * width, limit),
        st.sampled_from("abcd"),
        st.integers(1, 12),
        st.integers(1, 3),
        st.none() | st.integers(1, 60),
    ),
    max_size=4,
    unique_by=lambda made: made.name,
)
ALL_BUDGETS = {
    **LEARNING,
    "fixed": FixedBudget(5),
    "priority": FixedBudget(6, first_only=True),
    "none": CostAwareBudget(0),
}


@pytest.mark.parametrize("name", ALL_BUDGETS)
@given(
    members=MEMBERS, context=st.integers(1, 80), wanted=st.integers(1, 20), is_blind=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_no_plan_goes_beyond_a_length_or_a_context(name, members, context, wanted, is_blind):
    budget: Any = ALL_BUDGETS[name]
    policy = budget.begin(members, table_of(a=0.1))
    seen = PlanContext(tuple(members), context, wanted, is_blind)
    plan = policy.plan(seen)
    assert len(plan.shares) == len(members)
    for own, share in zip(members, plan.shares, strict=True):
        assert (
            0 <= share.num_tokens <= draft_limit(own, seen) <= min(own.num_draft_tokens, wanted - 1)
        )
        assert (
            own.context_limit is None
            or not share.num_tokens
            or context + share.num_tokens <= own.context_limit
        )
        assert share.num_nodes <= own.num_draft_nodes and (share.num_tokens > 0) == (
            share.num_nodes > 0
        )
    assert 0 <= plan.num_nodes <= budget.max_nodes
    assert plan.num_tokens == max((share.num_tokens for share in plan.shares), default=0)


def test_a_drafters_own_context_is_its_limit():
    seen = PlanContext((), 50, 20)
    assert draft_limit(member("a", 8, 55), seen) == 5
    assert draft_limit(member("a", 8, 50), seen) == draft_limit(member("a", 8, 30), seen) == 0
    assert draft_limit(member("a", 8), seen) == 8
    assert draft_limit(member("a", 30), seen) == 19
    assert draft_limit(member("a", 8), PlanContext((), 50, 1)) == 0


# budget=cost_aware: what is verified


def test_where_nothing_costs_every_member_drafts_and_everything_is_verified():
    """Everything that may be right, that is: where one member is known to be right, there is no
    probability left beside it.
    """
    text, members = text_of(80), [member("a", 3), member("b", 5), member("c", 2)]
    proposals = [wrong(text, 0.3), right(text, 0.3), wrong([token + 1 for token in text], 0.2)]
    steps = drive(CostAwareBudget().begin(members, FREE), members, proposals, text, FREE)
    for step in steps[:-2]:  # the last ones have no room
        assert step.mode in ("draft", "probe") and all(step.scheduled), (
            "a free draft may always be probed"
        )
        assert len(step.draft) == 10 and len(step.commit.path) == 5
    assert len(steps[0].tree) == 10


def test_where_nodes_cost_more_than_an_ar_step_nothing_is_drafted():
    text, members = text_of(60), [member("a", 4), member("b", 1)]
    steep = table_of(node=1.5)
    steps = drive(
        CostAwareBudget().begin(members, steep), members, [right(text, 1.0)] * 2, text, steep
    )
    assert all(
        step.mode == "plain" and not len(step.draft) and not len(step.tree) for step in steps
    )
    assert total_ms(steps) == pytest.approx(60 * AR_MS)


def test_a_node_that_is_less_likely_than_it_costs_is_not_verified():
    """The price of time is AR decoding's rate in the first step: a node of 0.3 AR steps has to be
    right with 0.3.
    """
    members, costs = [member("a", 4)], table_of(node=0.3)
    for confidence, is_verified in ((0.29, False), (0.31, True)):
        policy = CostAwareBudget().begin(members, costs)
        plan = policy.plan(PlanContext(tuple(members), 0, 50))
        assert plan.shares[0].num_tokens == 4 and policy.rate == pytest.approx(1 / AR_MS)
        tree = policy.select(merge(Draft.chain((1, 2), confidences=(confidence, 0.1)), plan))
        assert tree.token_ids == ((1,) if is_verified else ())


@st.composite
def confident_trees(draw) -> Draft:
    """A draft of one member with up to 9 nodes, whose confidences are consistent: children together
    at most what their parent has.
    """
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(1, 9)))]
    left: dict[int, float] = {ROOT: 1.0}
    confidences = []
    for node, parent in enumerate(parents):
        share = draw(st.sampled_from((0.05, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0)))
        confidences.append(left[parent] * share)
        left[parent] -= confidences[-1]
        left[node] = confidences[-1]
    return Draft(
        tuple(range(100, 100 + len(parents))), tuple(parents), confidences=tuple(confidences)
    )


@st.composite
def verify_costs(draw) -> CostTable:
    """Any rising costs, convex or not: a kernel of 4, 8, 16 rows has steps."""
    rises = draw(
        st.lists(st.sampled_from((0.0, 0.01, 0.1, 0.3, 0.6, 1.0, 3.0)), min_size=9, max_size=9)
    )
    return CostTable(
        tuple(enumerate(AR_MS * total for total in itertools.accumulate(rises, initial=1.0)))
    )


def closed_sets(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the parents of all its nodes."""
    nodes = range(len(parents))
    every = itertools.chain.from_iterable(
        itertools.combinations(nodes, count) for count in range(len(parents) + 1)
    )
    return [
        chosen
        for chosen in every
        if all(parents[node] == ROOT or parents[node] in chosen for node in chosen)
    ]


def value_of(probabilities: Sequence[float], costs: CostTable, rate: float) -> float:
    added_ms = costs.verify(len(probabilities)) - costs.verify(0)
    return sum(probabilities) - rate * added_ms


def first_tree(
    budget: CostAwareBudget, draft: Draft, costs: CostTable, *, num_members: int = 1
) -> tuple[Any, Any, Any]:
    """A fresh policy that has to decide about a draft: the policy, the tree before and after."""
    members = tuple(Member(f"m{place}", 9, 9) for place in range(num_members))
    policy = budget.begin(members, costs)
    policy.plan(PlanContext(members, 0, 99))
    everything = Plan((Share(9, 9),) * num_members, 99)  # whatever the plan was
    tree = merge(draft, everything)
    return policy, tree, policy.select(tree)


@given(confident_trees(), verify_costs(), st.sampled_from((64, 5, 2, 1)))
@settings(max_examples=150, deadline=None)
def test_what_is_verified_is_the_best_of_all_trees(draft, costs, max_nodes):
    """Confidences are taken as they are in the first step, so the best tree is known by going
    through all of them.
    """
    policy, tree, chosen = first_tree(CostAwareBudget(max_nodes=max_nodes), draft, costs)
    rate = policy.rate
    sets = [nodes for nodes in closed_sets(tree.parents) if len(nodes) <= max_nodes]
    best = max(
        value_of([draft.confidences[node] or 0.0 for node in nodes], costs, rate) for nodes in sets
    )
    kept = [tree.token_ids.index(token) for token in chosen.token_ids]
    assert tuple(kept) in sets, "each with its parent, and no more than may be"
    assert value_of(
        [draft.confidences[node] or 0.0 for node in kept], costs, rate
    ) == pytest.approx(best, abs=1e-9)


@given(st.integers(2, 4), st.integers(0, 10**6), verify_costs())
# an only child, likelier by one rounding
@example(2, 469, CostTable(tuple(enumerate([10.0, 10.0, *[20.0] * 8]))))
@settings(max_examples=100, deadline=None)
def test_so_it_is_for_several_members_whose_confidences_contradict_each_other(
    num_members, seed, costs
):
    """Their confidences are made consistent: no child is likelier than its parent, nor all children
    together.
    """
    chance = random.Random(seed)
    chains = [
        (
            [chance.randrange(3) for _ in range(chance.randrange(1, 4))],
            [chance.choice((None, 0.0, 0.3, 0.9, 1.0)) for _ in range(3)],
        )
        for _ in range(num_members)
    ]
    draft = side_by_side([(tokens, own[: len(tokens)]) for tokens, own in chains])
    policy, tree, chosen = first_tree(CostAwareBudget(), draft, costs, num_members=num_members)
    probabilities = policy._probabilities(tree, None)
    for parent in (ROOT, *range(len(tree))):
        children = [
            probabilities[node] for node in range(len(tree)) if tree.parents[node] == parent
        ]
        room = 1.0 if parent == ROOT else probabilities[parent]
        assert min(children, default=0.0) >= 0 and max(children, default=0.0) <= room, (
            "exactly, or a tree loses a parent"
        )
        assert sum(children) <= room + 1e-9
    rate = policy.rate
    best = max(
        value_of([probabilities[node] for node in nodes], costs, rate)
        for nodes in closed_sets(tree.parents)
    )
    paths = [tuple(tree.token_ids[n] for n in tree.path_to(node)) for node in range(len(tree))]
    kept = [
        paths.index(tuple(chosen.token_ids[n] for n in chosen.path_to(node)))
        for node in range(len(chosen))
    ]
    assert value_of([probabilities[node] for node in kept], costs, rate) == pytest.approx(
        best, abs=1e-9
    )


def test_two_members_that_agree_count_more_than_each_of_them():
    costs = table_of(node=0.5)
    alone = first_tree(
        CostAwareBudget(), side_by_side([((7,), (0.45,)), ((), ())]), costs, num_members=2
    )[2]
    agreed = first_tree(
        CostAwareBudget(), side_by_side([((7,), (0.45,)), ((7,), (0.45,))]), costs, num_members=2
    )[2]
    assert len(alone) == 0 and agreed.token_ids == (7,)


def test_a_tree_whose_nodes_were_sampled_is_never_cut_by_their_tokens():
    """Where verification tests samples, which of them are verified must not depend on what they
    are.
    """
    text, members, costs = text_of(120), [member("a", 4), member("b", 4)], table_of(node=0.2)
    policy = CostAwareBudget().begin(members, costs)
    inner, trees = policy.select, []

    def select(tree: TokenTree) -> TokenTree:
        trees.append((tree, inner(tree)))
        return trees[-1][1]

    policy.select = select  # pyright: ignore[reportAttributeAccessIssue]
    steps = drive(
        policy, members, [wrong(text, 0.01), right(text, 0.02)], text, costs, is_blind=True
    )
    assert any(len(tree) for tree, _ in trees) and all(before is after for before, after in trees)
    widths = [step.plan.num_nodes for step in steps if step.plan.num_tokens]
    assert widths[0] == 8 and min(widths) >= 1, "at least one node, or nothing could be learned"
    seen = drive(
        CostAwareBudget().begin(members, costs),
        members,
        [wrong(text, 0.01), right(text, 0.02)],
        text,
        costs,
    )
    assert any(len(step.tree) < len(step.draft) for step in seen), (
        "the same drafts are cut where that is allowed"
    )


def test_a_blind_budget_learns_how_wide_to_be():
    """From the trees that would have been best."""
    text, members, costs = text_of(300), [member("a", 8)], table_of(node=0.15)
    widths = {}
    for name, propose in {
        "right": right(text, 0.9),
        "modest": right(text, 0.5, lambda done: done % 2 == 0),
    }.items():
        steps = drive(
            CostAwareBudget().begin(members, costs), members, [propose], text, costs, is_blind=True
        )
        widths[name] = [step.plan.num_nodes for step in steps if step.scheduled[0]]
    assert min(widths["right"][:-3]) >= 6
    assert widths["modest"][0] == 8 and max(widths["modest"][12:]) <= 4


# budget=cost_aware: what is learned


def test_a_confidence_is_taken_as_it_is_until_more_is_known():
    for confidence in (0.0, 0.01, 0.2, 0.5, 0.99, 1.0):
        assert Calibration().probability(confidence) == pytest.approx(confidence)


def test_confidences_that_never_come_true_lose_probability_and_those_that_do_gain_it():
    overconfident, modest = Calibration(), Calibration()
    before = (overconfident.probability(0.9), modest.probability(0.1))
    for _ in range(40):
        overconfident.learn(0.9, False)
        overconfident.steps += 1
        modest.learn(0.1, True)
        modest.steps += 1
    assert (
        overconfident.probability(0.9) < 0.02 < before[0]
        and modest.probability(0.1) > 0.8 > before[1]
    )
    assert overconfident.probability(0.6) < 0.1, "also confidences that it has not had yet"
    for _ in range(80):
        overconfident.learn(0.9, True)
        overconfident.steps += 1
    assert overconfident.probability(0.9) > 0.8, "and what was is forgotten"


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60), st.floats(0, 1))
def test_a_calibrated_probability_is_always_one(observed, confidence):
    calibration = Calibration()
    for earlier, is_hit in observed:
        calibration.learn(earlier, is_hit)
        calibration.steps += 1
    assert 0 <= calibration.probability(confidence) <= 1


def test_proposals_that_were_not_verified_are_learned_from_too():
    """A member whose confidences are too low to be verified, but which is always right, is verified
    before long.
    """
    text, members, costs = text_of(100), [member("a", 1)], table_of(node=0.3)
    steps = drive(CostAwareBudget().begin(members, costs), members, [right(text, 0.1)], text, costs)
    verified = [len(step.tree) for step in steps]
    assert verified[0] == 0 and sum(verified[-10:-1]) == 9


def test_the_member_that_is_right_is_verified_and_the_one_that_is_wrong_is_not():
    """Both have the same confidences."""
    text, members, costs = (
        text_of(300),
        [member("overconfident", 4), member("honest", 4)],
        table_of(node=0.1),
    )
    steps = drive(
        CostAwareBudget().begin(members, costs),
        members,
        [wrong(text, 0.9), right(text, 0.9)],
        text,
        costs,
    )
    late = steps[len(steps) // 2 : -3]
    assert late and all(set(step.tree.owners) == {2} and len(step.tree) == 4 for step in late)
    assert any(1 in step.tree.owners for step in steps[:3])


# budget=cost_aware: which members are scheduled


def drafts_ms(steps: Sequence[Step], place: int, costs: CostTable) -> float:
    """What a member's drafts took, by the table."""
    name = steps[0].context.members[place].name
    return sum(
        costs.draft(name, max(step.draft.owners.count(place), 1))
        for step in steps
        if step.scheduled[place]
    )


SLOW = table_of(node=0.02, slow=0.2)
"""A draft of 4 costs 0.8 AR steps: a gain where it is right."""


@pytest.mark.parametrize("guard", [True, False])
def test_a_member_without_gain_is_probed_rarely_and_less_and_less(guard):
    """Its calibration decays while it is idle, so its expected gain may turn positive again: it has
    to be right for that.
    """
    text, members = text_of(8000), [member("slow", 4)]
    steps = drive(
        CostAwareBudget(guard=guard).begin(members, SLOW), members, [wrong(text)], text, SLOW
    )
    times = [number for number, step in enumerate(steps) if step.scheduled[0]]
    assert times[0] == 0 and steps[0].mode == "draft"
    probes = [number for number, step in enumerate(steps) if step.mode == "probe"]
    assert len(probes) >= 5, "it is not given up"
    assert drafts_ms(steps, 0, SLOW) <= TUNING.probe_shares[0] * total_ms(steps)
    late = steps[4000:]
    assert drafts_ms(late, 0, SLOW) <= 3 * TUNING.probe_shares[1] * total_ms(late)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps[1] > 1.5 * gaps[0] and max(gaps) < 1.2 * 0.8 / TUNING.probe_shares[1]


def test_a_member_comes_back_when_it_begins_to_gain():
    text, members = text_of(4000), [member("slow", 4)]
    proposals = [right(text, 0.9, lambda done: done > 1500)]
    steps = drive(CostAwareBudget().begin(members, SLOW), members, proposals, text, SLOW)
    before = [step for step in steps if 100 < step.context.context_tokens < 1500]
    late = steps[-60:-2]
    assert sum(step.scheduled[0] for step in before) < 0.02 * len(before)
    assert all(step.scheduled[0] and step.mode == "draft" for step in late)
    assert num_emitted(late) == 5 * len(late)


@pytest.mark.parametrize("cost", [0.9, 5.0, 100.0])
def test_a_member_that_cannot_gain_by_its_cost_alone_is_never_tried(cost):
    """Even if it were right as often as the optimistic estimate."""
    text, members, costs = text_of(2000), [member("model", 4)], table_of(node=0.02, model=cost)
    steps = drive(CostAwareBudget().begin(members, costs), members, [right(text, 1.0)], text, costs)
    assert not any(step.scheduled[0] for step in steps) and total_ms(steps) == pytest.approx(
        2000 * AR_MS
    )


def test_a_member_that_only_repeats_a_cheaper_one_is_not_scheduled():
    """What it adds counts, not how often it is right."""
    text, members = text_of(2000), [member("free", 4), member("slow", 4)]
    steps = drive(
        CostAwareBudget().begin(members, SLOW), members, [right(text, 0.95)] * 2, text, SLOW
    )
    late = steps[50:-3]
    assert all(step.scheduled[0] for step in late)
    assert sum(step.scheduled[1] for step in late) < 0.02 * len(late)
    alone = drive(
        CostAwareBudget().begin(members[1:], SLOW), members[1:], [right(text, 0.95)], text, SLOW
    )
    assert all(step.scheduled[0] for step in alone[50:-3])


# budget=cost_aware: the guard


def loss(steps: Sequence[Step]) -> list[float]:
    """After each step: ms lost against AR decoding of the same tokens, from the best moment so far
    on.
    """
    lost, worst = 0.0, []
    for step in steps:
        lost += step.ms - len(step.commit.token_ids) * AR_MS
        worst.append(lost)
    return worst


def restless(
    text: Sequence[int], seed: int, confidence: Callable[[random.Random], float | None]
) -> Propose:
    """Always wrong, with other confidences in every step."""
    chance = random.Random(seed)

    def propose(done: int, share: Share) -> tuple[list[int], list[float | None]]:
        tokens = [-token - 1 for token in text[done : done + share.num_tokens]]
        return tokens, [confidence(chance)] * len(tokens)

    return propose


CONFIDENCES: dict[str, Callable[[random.Random], float | None]] = {
    "certain": lambda chance: 1.0,
    "none": lambda chance: None,
    "any": lambda chance: chance.random(),
    "low": lambda chance: 0.05,
}
PRICES = {
    "cheap nodes": table_of(node=0.02),
    "expensive nodes": table_of(node=0.4),
    "steps of a kernel": CostTable(((0, AR_MS), (1, 2 * AR_MS), (64, 2.2 * AR_MS))),
    "expensive drafts": table_of(node=0.05, a=0.25, b=0.1, c=0.4),
    "host": table_of(node=0.1, host=3.0, a=0.1),
}


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("is_blind", [False, True])
def test_members_that_are_always_wrong_lose_little_whatever_their_confidence(
    prices, confidence, is_blind
):
    """A few AR steps, and a share of the time that is small in the long run."""
    text, costs = text_of(1000), PRICES[prices]
    members = [member("a", 8), member("b", 4), member("c", 4)]
    proposals = [restless(text, seed, CONFIDENCES[confidence]) for seed in range(3)]
    steps = drive(
        CostAwareBudget().begin(members, costs), members, proposals, text, costs, is_blind=is_blind
    )
    elapsed, worst_step = 0.0, max(step.ms for step in steps) - AR_MS
    for step, lost in zip(steps, loss(steps), strict=True):
        # A step is begun while there is room left: it may end below.
        assert (
            lost <= TUNING.guard_steps * AR_MS + TUNING.guard_share * elapsed + worst_step + 1e-6
        ), step.context.context_tokens
        elapsed += step.ms
    assert num_emitted(steps) == 1000


def test_members_that_turn_wrong_lose_little_of_what_they_gained():
    """Of a long good beginning only so much counts."""
    text, members, costs = text_of(4000), [member("a", 8)], table_of(node=0.1, a=0.02)
    proposals = [right(text, 0.99, lambda done: done < 2000)]
    steps = drive(CostAwareBudget().begin(members, costs), members, proposals, text, costs)
    first = [step for step in steps if step.context.context_tokens < 2000]
    assert num_emitted(first) / len(first) > 5
    after = steps[len(first) :]
    lost = max(loss(after))
    assert (
        lost
        <= (TUNING.guard_steps + TUNING.guard_credit) * AR_MS
        + TUNING.guard_share * total_ms(steps)
        + max(s.ms for s in after)
        - AR_MS
    )


def test_drafting_resumes_when_it_begins_to_gain_again():
    text, members, costs = text_of(6000), [member("a", 4)], table_of(node=0.3, a=0.1)
    proposals = [right(text, 0.95, lambda done: done > 3000)]
    steps = drive(CostAwareBudget().begin(members, costs), members, proposals, text, costs)
    assert all(step.scheduled[0] for step in steps[-50:-3])
    assert sum(step.scheduled[0] for step in steps if 100 < step.context.context_tokens < 3000) < 60


def test_the_guard_pauses_and_without_it_nothing_does():
    """Three members whose first drafts cost more than may be lost: with the guard only two are
    tried at once, and no member is probed before there is time for it.
    """
    text, costs, members = (
        text_of(400),
        table_of(node=0.1, a=0.3, b=0.3, c=0.3),
        [member(name, 4) for name in "abc"],
    )
    for proposals in (
        [wrong(text)] * 3,
        [right(text, 0.95, lambda done, at=at: done % 9 == at) for at in range(3)],
    ):
        guarded, unguarded = (
            drive(
                CostAwareBudget(guard=guard).begin(members, costs), members, proposals, text, costs
            )
            for guard in (True, False)
        )
        assert list(guarded[0].scheduled) == [True, True, False] and all(unguarded[0].scheduled)
        assert sum(any(step.scheduled) for step in guarded) < sum(
            any(step.scheduled) for step in unguarded
        )
        assert 1.5 * max(loss(guarded)) <= max(loss(unguarded))


# budget=cost_aware: what is remembered


@pytest.mark.parametrize("make", [CostAwareBudget, BanditBudget])
def test_what_was_learned_is_forgotten_with_the_prompt_or_kept_with_the_run(make):
    text, members = text_of(300), [member("slow", 4)]
    other = replace(SLOW, origin="newer")
    learned = {}
    for reset in ("prompt", "run"):
        budget = make(reset=reset)
        first = budget.begin(members, SLOW)
        drive(first, members, [wrong(text)], text, SLOW)
        second = budget.begin(members, other, first)
        assert (second is first) == (reset == "run") and second.costs is other
        learned[reset] = drive(second, members, [wrong(text)], text[:20], other)
    fresh = drive(make().begin(members, other), members, [wrong(text)], text[:20], other)
    assert [s.plan for s in learned["prompt"]] == [s.plan for s in fresh]
    assert [s.plan for s in learned["run"]] != [s.plan for s in fresh]
    assert not learned["run"][0].scheduled[0] and fresh[0].scheduled[0]


def test_a_budget_that_remembers_begins_anew_after_another_budget():
    members = [member("a")]
    bandit = BanditBudget(reset="run").begin(members, SLOW)
    policy = CostAwareBudget(reset="run").begin(members, SLOW, bandit)
    assert isinstance(policy, CostAware)
    assert BanditBudget(reset="run").begin(members, SLOW, policy) is not policy


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        *((make, "reset", "never") for make in (CostAwareBudget, BanditBudget)),
        *(
            (make, "max_nodes", value)
            for make in (CostAwareBudget, BanditBudget)
            for value in (-1, 2.5, True, "4")
        ),
        *((make, "refresh", "no") for make in (CostAwareBudget, BanditBudget)),
        (CostAwareBudget, "guard", 1),
        *((BanditBudget, "exploration", value) for value in (-1, "much", True)),
        *((BanditBudget, "window", value) for value in (0, 1.5)),
        (BanditBudget, "strategy", "greedy"),
        (BanditBudget, "seed", -1),
        (BanditBudget, "exploration", NAN),
    ],
)
def test_an_option_out_of_range_is_refused_in_a_line_that_names_it(make, option, value):
    with pytest.raises(UserError, match=f"budget.{option}") as error:
        make(**{option: value})
    assert "\n" not in str(error.value)


# budget=bandit


def arms_of(steps: Sequence[Step]) -> list[int]:
    """Which member drafted in each step; their number where none did."""
    return [
        step.scheduled.index(True) if any(step.scheduled) else len(step.scheduled) for step in steps
    ]


@pytest.mark.parametrize("strategy", ["ucb1", "thompson"])
def test_a_bandit_plays_every_arm_once_and_then_the_best_most_often(strategy):
    text, members = text_of(2500), [member("wrong", 4), member("best", 4), member("costly", 4)]
    costs = table_of(node=0.02, wrong=0.1, best=0.05, costly=0.8)
    proposals = [wrong(text), right(text), right(text)]
    steps = drive(
        BanditBudget(strategy=strategy).begin(members, costs), members, proposals, text, costs
    )
    arms = arms_of(steps[:-5])
    assert sorted(arms[:4]) == [0, 1, 2, 3]
    counts = [arms.count(arm) for arm in range(4)]
    assert counts[1] == max(counts) and counts[1] > 0.6 * len(arms)
    assert all(sum(step.scheduled) <= 1 for step in steps)


def test_a_bandits_reward_is_by_the_table_and_not_by_tokens():
    """A perfect member that costs more than it gains loses to no draft at all."""
    text, members = text_of(1500), [member("costly", 4)]
    for cost, arm in ((0.3, 0), (2.0, 1)):
        costs = table_of(node=0.02, costly=cost)
        arms = arms_of(
            drive(BanditBudget().begin(members, costs), members, [right(text)], text, costs)
        )
        assert arms[5:].count(arm) > 0.6 * len(arms[5:]), cost


def test_thompsons_samples_come_from_its_seed():
    text, members = text_of(400), [member("a", 4), member("b", 4)]
    proposals = [
        right(text, None, lambda done: done % 3 > 0),
        right(text, None, lambda done: done % 2 > 0),
    ]

    def arms(seed: int) -> list[int]:
        budget = BanditBudget(strategy="thompson", seed=seed)
        return arms_of(drive(budget.begin(members, SLOW), members, proposals, text, SLOW))

    random.seed(5)
    first = arms(0)
    random.seed(6)
    assert arms(0) == first and random.Random(6).random() == random.random(), (
        "the global numbers are left alone"
    )
    assert arms(1) != first


def test_a_bandit_forgets_what_is_out_of_its_window():
    """And so it keeps trying; one that remembers everything has known for long that a member is
    wrong.
    """
    text, members, costs = text_of(900), [member("a", 4)], table_of(node=0.2)
    short, long = (
        arms_of(
            drive(
                BanditBudget(window=window, exploration=0.3).begin(members, costs),
                members,
                [wrong(text)],
                text,
                costs,
            )
        )
        for window in (40, 2000)
    )
    assert short[300:].count(0) > 20 > 5 > long[300:].count(0)


def test_a_bandit_never_plays_an_arm_that_has_no_room():
    members = [member("full", 4, 10), member("open", 4)]
    policy = BanditBudget().begin(members, SLOW)
    for done in range(20, 60):
        plan = policy.plan(PlanContext(tuple(members), done, 50))
        assert plan.shares[0].num_tokens == 0
        tree = policy.select(TokenTree())
        policy.observe(Draft(), tree, Commit((), (1,)))


# Calibration


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(vocab_size=128, max_position_embeddings=256, hidden_size=64, seed=3)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    chance = random.Random(0)
    folder = tmp_path_factory.mktemp("library") / "datastore"
    texts = [[chance.randrange(128) for _ in range(100)] for _ in range(20)]
    build_datastore(texts, folder, fingerprint="none", vocab_size=128, source="random ids")
    return str(folder)


PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def an_ensemble(model: Any, library: str, **growing: Any) -> Ensemble:
    members = {
        "ngram": NGram(6, num_continuations=2),
        "lm": LanguageModel(
            random_model(vocab_size=128, max_position_embeddings=256, seed=9), 3, num_branches=2
        ),
        "twin": LanguageModel(model, 2),
        "one": LanguageModel(model, 1),
        "retrieval": Retrieval(library, 4, 8, **growing),
        "idle": Fake(lambda context: [], depth=5),
    }
    return Ensemble(members)


def decoder_of(model: Any, drafter: Any, layout: Any = "tree", budget: Any = None) -> Decoder:
    target = Target(model)
    drafter.bind(target)
    return Decoder(target, drafter, budget or FixedBudget(), Coupled(), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_nodes", [0, 1, 7, 64, 300])
def test_calibration_measures_every_width_and_every_member_at_two_depths(
    model, library, layout, max_nodes
):
    ensemble = an_ensemble(model, library)
    table = calibrate(decoder_of(model, ensemble, layout), PROMPT, max_nodes)
    assert [width for width, _ in table.verify_ms] == [
        width for width in WIDTHS if width <= max_nodes
    ]
    assert (
        all(ms > 0 for _, ms in table.verify_ms)
        and table.host_ms > 0
        and table.origin == "calibrated"
    )
    depths = {name: [depth for depth, _ in row] for name, row in table.draft_ms.items()}
    assert depths == {
        "ngram": [1, 6],
        "lm": [1, 3],
        "twin": [1, 2],
        "one": [1],
        "retrieval": [1, 4],
        "idle": [1, 5],
    }
    assert all(ms > 0 for row in table.draft_ms.values() for _, ms in row)
    assert all(row[0][1] <= row[-1][1] for row in table.draft_ms.values())
    assert CostTable.of(table.content()) == table


def test_a_model_that_drafts_deeper_is_measured_to_cost_more(model):
    """That the numbers are those of the members and depths that they are labelled with."""

    class Sleeper(Fake):
        def propose(self, context_ids, plan, sampler):
            time.sleep(0.002 * plan.num_tokens)
            return Draft.chain([5] * plan.num_tokens)

    table = calibrate(
        decoder_of(model, Ensemble({"slow": Sleeper(lambda c: [], depth=6), "ngram": NGram(3)})),
        PROMPT,
        2,
    )
    assert 2 <= table.draft("slow", 1) < 8 and 12 <= table.draft("slow", 6) < 30
    assert table.draft("ngram", 3) < 1.9


def test_without_drafters_there_is_only_the_target_to_measure(model):
    table = calibrate(decoder_of(model, NoDrafter()), PROMPT, 8)
    assert table.draft_ms == {} and table.host_ms == 0 and table.plain() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 50, 63])
def test_calibration_fits_into_any_context(layout, length, library):
    """Learned positions end with the context: one too many is an error in the model."""
    small = random_model("gpt2", vocab_size=128, max_position_embeddings=64)
    ensemble = Ensemble(
        {"ngram": NGram(10), "twin": LanguageModel(small, 6), "retrieval": Retrieval(library, 8, 8)}
    )
    prompt = [place % 7 + 5 for place in range(length)]
    table = calibrate(decoder_of(small, ensemble, layout), prompt, 16)
    assert [width for width, _ in table.verify_ms][-1] == 16 and set(table.draft_ms) >= {"ngram"}
    spec = Speculator(decoder_of(small, ensemble, layout, CostAwareBudget()))
    expected = plain_greedy(small, prompt, min(8, 64 - length))
    assert generate(spec, prompt, 8) == expected


def test_a_context_shorter_than_what_is_measured_is_measured_too():
    small = random_model("gpt2", vocab_size=128, max_position_embeddings=16)
    ensemble = Ensemble({"ngram": NGram(10), "twin": LanguageModel(small, 6)})
    spec = Speculator(decoder_of(small, ensemble, budget=CostAwareBudget()))
    assert generate(spec, [5, 6, 7], 5) == plain_greedy(small, [5, 6, 7], 5)


@pytest.mark.parametrize(("layout", "length"), [("tree", 1), ("tree", 10), ("rows", 200)])
def test_calibration_leaves_no_trace(model, library, layout, length):
    """A prompt's output and counts are those without it, in drafters, target and cache, also of
    drafters that learn.
    """
    chance = random.Random(length)
    prompt, after = [chance.randrange(3, 128) for _ in range(length)], [9, 3, 9, 3, 9, 3, 44, 12, 9]

    def counts(is_calibrated: bool) -> list[Any]:
        decoder = decoder_of(model, an_ensemble(model, library, grow=True), layout)
        if is_calibrated:
            calibrate(decoder, prompt, 16)
        found: list[Any] = []
        for ids in (prompt, after, prompt):
            stop = StopRules(len(ids) + 20, (), 256)
            steps = list(decode_steps(decoder, ids, Sampler(noise=KeyedNoise(3, "p")), stop))
            found.append(
                [
                    (s.token_ids, s.num_nodes, s.num_accepted, [m.num_drafted for m in s.members])
                    for s in steps
                ]
            )
        return found

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert counts(True) == counts(False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("num_prompt", [250, 700])
def test_calibration_on_the_beginning_of_a_long_prompt_teaches_drafters_nothing(
    num_prompt, library
):
    """Only the beginning is used, which is another prompt to them."""
    long = random_model(
        vocab_size=128,
        max_position_embeddings=256 if num_prompt < 256 else 2048,
        hidden_size=32,
        seed=3,
    )
    chance = random.Random(1)
    prompt = [chance.randrange(3, 128) for _ in range(num_prompt)]

    def grown(is_calibrated: bool) -> Any:
        drafter = Ensemble({"growing": Retrieval(library, 4, 8, grow=True)})
        decoder = decoder_of(long, drafter)
        if is_calibrated:
            calibrate(decoder, prompt, 4)
        decoder.prefill(prompt).close()
        drafter.begin([5, 6])
        return drafter.drafters["growing"]._grown._sorted  # pyright: ignore

    assert grown(True) == grown(False)


def test_the_trees_that_are_timed_have_the_widths_that_are_recorded():
    for width in WIDTHS:
        tree = comb((5, 6, 7), width)
        assert len(tree) == width and max(tree.depths, default=0) == min(width, 4)


# A table in force


def speculator(model: Any, budget: Any, drafters: Any = None) -> Speculator:
    drafters = drafters or Ensemble({"ngram": NGram(6), "twin": LanguageModel(model, 3)})
    return Speculator(Decoder(Target(model), drafters, budget, Coupled()))


def complete(
    spec: Speculator, prompt: Sequence[int], count: int = 24, **options: Any
) -> Completion:
    seed = options.pop("seed", 0)
    given = {"max_new_tokens": count, "do_sample": False, "eos_token_id": [], **options}
    config = merge_options(spec.target, None, **given)
    return spec.complete(prompt, config, seed=seed, prompt_key=str(list(prompt)))


def generate(spec: Speculator, prompt: Sequence[int], count: int = 24) -> list[int]:
    return list(complete(spec, prompt, count).output_ids)


@pytest.mark.parametrize("make", [CostAwareBudget, BanditBudget])
def test_costs_are_measured_before_the_first_prompt_and_follow_the_prompts(make, model):
    spec = speculator(model, make())
    assert spec.costs is None
    done = complete(spec, PROMPT)
    assert list(done.output_ids) == plain_greedy(model, PROMPT, 24)
    measured, moved = done.costs, spec.costs
    assert measured is not None and moved is not None and measured.origin == "calibrated"
    assert moved != measured, "what the prompt took"
    assert moved.plain() / measured.plain() == pytest.approx(1, rel=1)
    assert complete(spec, PROMPT[3:]).costs == moved


def test_costs_stay_as_measured_without_refresh_and_as_given_in_a_file(model, tmp_path):
    spec = speculator(model, CostAwareBudget(refresh=False))
    assert complete(spec, PROMPT).costs is spec.costs
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(SLOW.content()))
    spec = speculator(model, CostAwareBudget(costs=str(path)))
    done = complete(spec, PROMPT)
    assert spec.costs == done.costs == replace(SLOW, origin=str(path))


def test_a_budget_that_needs_no_costs_measures_none(model, monkeypatch):
    monkeypatch.setattr(
        "specens.decoding.speculator.calibrate", lambda *args: pytest.fail("measured")
    )
    spec = speculator(model, FixedBudget())
    assert complete(spec, PROMPT).costs is None and spec.costs is None


@pytest.mark.parametrize(
    ("budget", "seed"), [("cost_aware", None), ("cost_aware", 1), ("ucb1", 1), ("thompson", None)]
)
def test_law_9_with_a_given_table_a_prompts_counts_do_not_depend_on_other_prompts(
    budget, seed, model, library, tmp_path
):
    """Nor on how long anything took: whichever member is slow today."""
    path = tmp_path / "costs.json"
    table = table_of(0.05, ngram=0.01, twin=0.2, lm=0.1, one=0.2)
    path.write_text(json.dumps(table.content()))
    prompts = [tuple(PROMPT), (100,), (9, 3, 9, 3, 9, 3, 44, 12, 9)]
    made = replace(LEARNING[budget], costs=str(path))  # pyright: ignore

    def counts(order: Sequence[tuple[int, ...]], spec: Speculator) -> dict[Any, Any]:
        found = {}
        for prompt in order:
            options = {} if seed is None else {"do_sample": True, "seed": seed}
            done = complete(spec, prompt, 16, **options)
            found[prompt] = (
                done.output_ids,
                [
                    (
                        s.num_nodes,
                        s.num_accepted,
                        s.mode,
                        s.rate,
                        [m.num_planned for m in s.members],
                    )
                    for s in done.steps
                ],
            )
        return found

    def fresh() -> Speculator:
        return speculator(model, made, an_ensemble(model, library))

    forwards, shared = counts(prompts, fresh()), fresh()
    assert any(mode != "plain" for _, steps in forwards.values() for _, _, mode, _, _ in steps)
    assert forwards == counts(prompts[::-1], shared) == counts(prompts, shared)
    assert forwards == {prompt: counts([prompt], fresh())[prompt] for prompt in prompts}


def test_a_cached_table_comes_back_for_the_same_subject_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    subject = {"device": "cpu", "members": ["a"], "width": 64}
    assert cost_cache.cached(subject) is None
    cost_cache.keep(subject, TABLE)
    cost_cache.keep({**subject, "width": 8}, FREE)
    found = cost_cache.cached(dict(reversed(subject.items())))
    assert found is not None and replace(found, origin=TABLE.origin) == TABLE
    for changed in ({"device": "cuda"}, {"members": ["a", "b"]}, {"width": None}):
        assert cost_cache.cached({**subject, **changed}) is None
    for path in (tmp_path / "cache" / "costs").iterdir():
        path.write_text("{")
    assert cost_cache.cached(subject) is None, "a damaged one is measured again"


# Replay


class Recorder:
    """A policy that records its inputs and its decisions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steps: list[dict[str, Any]] = []

    @property
    def mode(self) -> str:
        return self.policy.mode

    @property
    def rate(self) -> float | None:
        return self.policy.rate

    def plan(self, context: PlanContext) -> Plan:
        plan = self.policy.plan(context)
        self.steps.append({"context": context, "plan": plan, "mode": self.mode, "rate": self.rate})
        return plan

    def select(self, tree: TokenTree) -> TokenTree:
        chosen = self.policy.select(tree)
        self.steps[-1].update(merged=bare_tree(tree), tree=bare_tree(chosen))
        return chosen

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        self.steps[-1].update(
            draft=dataclasses.replace(draft, draft_probs=(), seconds=(), scheduled=()),
            commit=commit,
        )
        self.policy.observe(draft, tree, commit)


def bare_tree(tree: TokenTree) -> TokenTree:
    """Without the draft_probs of samples, which are tensors."""
    return dataclasses.replace(tree, samples=(), is_sampled_chain=False)


REPLAYED = {**LEARNING, "remembers": CostAwareBudget(reset="run")}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=["coupled", "residual"])
def test_a_decoding_can_be_replayed_without_any_model(
    name, seed, verifier, model, library, monkeypatch
):
    """A fresh policy with the same table, given what was proposed and emitted, decides the same in
    every step of two texts.
    """
    if seed is None and not verifier.coupled:
        pytest.skip("testing samples is for sampling")
    budget, ensemble = REPLAYED[name], an_ensemble(model, library)
    costs = table_of(0.05, 1.0, ngram=0.01, twin=0.15, lm=0.1, one=0.1)
    decoder = replace(decoder_of(model, ensemble), verifier=verifier)
    recorders: list[Recorder] = []
    policy = None
    for prompt in (PROMPT, [9, 3, 9, 3, 9, 3, 44, 12, 9]):
        policy = budget.begin(ensemble.members, costs, policy)
        recorders.append(Recorder(policy))
        noise = None if seed is None else KeyedNoise(seed, str(prompt))
        sampler = Sampler(noise=noise, coupled=verifier.coupled)
        stop = StopRules(len(prompt) + 60, (), 256)
        list(decode_steps(decoder, prompt, sampler, stop, recorders[-1]))
    stop_clocks(monkeypatch)
    replay, plans = None, []
    for recorder in recorders:
        replay = budget.begin(ensemble.members, costs, replay)
        for step in recorder.steps:
            plans.append(replay.plan(step["context"]))
            assert (plans[-1], replay.mode, replay.rate) == (
                step["plan"],
                step["mode"],
                step["rate"],
            )
            if not step["context"].is_blind:  # blind drafts are cut before they are merged
                assert merge(step["draft"], plans[-1]) == step["merged"]
            assert replay.select(step["merged"]) == step["tree"]
            replay.observe(step["draft"], step["tree"], step["commit"])
    assert len(set(plans)) > 3 and any(
        len(step["tree"]) for recorder in recorders for step in recorder.steps
    )
    assert any(step["context"].is_blind for step in recorders[0].steps) == (not verifier.coupled)


# Through the loop


def test_records_hold_what_the_budget_decided(model):
    """Mode, rate and which members were scheduled, in every step."""
    text = plain_greedy(model, PROMPT, 40)
    members = {
        "knows": text_drafter(PROMPT, text, depth=4),
        "wrong": text_drafter(PROMPT, text, depth=4, wrong=True),
    }
    output, steps = decode(model, Ensemble(members), PROMPT, 40, budget=CostAwareBudget())
    assert output == text
    assert {step.mode for step in steps} <= {"draft", "probe", "plain"} and all(
        step.rate for step in steps
    )
    assert steps[0].mode == "draft" and [m.num_planned for m in steps[0].members] == [4, 4]
    for step in steps:
        assert (step.mode == "plain") == (not any(member.num_planned for member in step.members))
        assert all(not member.num_drafted for member in step.members if not member.num_planned)
        assert all(member.was_scheduled == (member.num_planned > 0) for member in step.members)
    rates = [step.rate for step in steps if step.rate]
    assert rates[-1] > rates[0], "the price of time rises with the speed that is reached"
    assert statistics.mean(step.num_accepted for step in steps) > 2


def test_max_nodes_0_is_ar_decoding(model):
    output, steps = decode(
        model, Ensemble({"ngram": NGram(4)}), PROMPT, 12, budget=CostAwareBudget(max_nodes=0)
    )
    assert output == plain_greedy(model, PROMPT, 12) and len(steps) == 12
    assert all(step.mode == "plain" and not step.num_nodes for step in steps)
