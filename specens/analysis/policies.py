"""The policies that replay compares, by name: the budgets of a run, and some that no run can have."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.merged import Merged
from specens.analysis.model import CostModel
from specens.analysis.replay import play, replay
from specens.analysis.teams import TOTALS, Teams, prompt_totals
from specens.analysis.trace import NOT_ASKED, Team, Trace, depth_column
from specens.decoding.bandit import BanditBudget
from specens.decoding.budget import Budget, FixedBudget, PlanContext, draft_limit
from specens.decoding.cost_aware import CostAwareBudget
from specens.decoding.types import Commit, Draft, Plan, TokenTree
from specens.errors import UserError

BUDGETS: dict[str, type[FixedBudget | BanditBudget | CostAwareBudget]] = {
    "fixed": FixedBudget,
    "priority": FixedBudget,
    "bandit": BanditBudget,
    "cost_aware": CostAwareBudget,
}

POLICIES = {
    "fixed": "everybody drafts, everything is verified",
    "priority": "the first member with something to say drafts alone",
    "bandit": "one member a step, by what it earned",
    "cost_aware": "the members that pay, the nodes worth verifying",
    "choose_one": "one member a step, by what all would have earned (their drafts for that are free)",
    "best_alone": "hindsight: each prompt's best single member",
    "union": "ceiling: all that anybody proposes, drafting and width free",
}
"""Names, and what is said of them. `choose_one`, `best_alone` and `union` know more than a run can, or pay less."""

DISCOUNT = 0.9
"""What an observation counts after one more step, for choose_one."""


def budget_named(name: str, options: Mapping[str, Any] | None = None) -> Budget:
    """A budget as in conf/budget. A file of costs among the options is left out: replay is given the table itself."""
    if name not in BUDGETS:
        raise UserError(f"policy={name}: choose one of {', '.join(BUDGETS)}")
    given = {key: value for key, value in (options or {}).items() if key != "costs"}
    if name == "priority":
        given["first_only"] = True
    try:
        return BUDGETS[name](**given)
    except TypeError as error:
        raise UserError(f"policy={name}: {error}") from error


def name_of(budget: Budget) -> str:
    """A budget's name in conf/budget; of somebody's own its class."""
    names: dict[type, str] = {made: name for name, made in reversed(BUDGETS.items())}
    return "priority" if getattr(budget, "first_only", False) else names.get(type(budget), type(budget).__name__)


def compare(
    trace: Trace, model: CostModel, teams: Teams, max_nodes: int, lengths: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """One row per policy, all members drafting: calls, acceptance_length, seconds by the model, tokens_per_s, speedup over plain
    decoding, `regret` and `regret_by_prompt` (see `Teams.regret`), and a note on what it is. `teams` are those of budget=fixed.
    """
    plain_s = teams.seconds[0].sum()
    rows = []
    for name, note in POLICIES.items():
        totals = dict(zip(TOTALS, _totals(name, trace, model, teams, max_nodes, lengths).T, strict=True))
        seconds = totals["draft_s"] + totals["verify_s"] + totals["host_s"]
        num_emitted, calls = totals["num_emitted"].sum(), totals["calls"].sum()
        rows.append(
            {
                "policy": name,
                "calls": int(calls),
                "acceptance_length": num_emitted / calls,
                "seconds": seconds.sum(),
                "tokens_per_s": num_emitted / seconds.sum(),
                "speedup": plain_s / seconds.sum(),
                **teams.regret(seconds),
                "note": note,
            }
        )
    return pd.DataFrame(rows)


def _totals(
    name: str,
    trace: Trace,
    model: CostModel,
    teams: Teams,
    max_nodes: int,
    lengths: Mapping[str, int] | None,
) -> np.ndarray:
    """`TOTALS` by prompt, `[num_prompts, len(TOTALS)]`."""
    if name == "best_alone":
        alone = [1 << place for place in range(len(teams.names))]
        best = teams.seconds[alone].argmin(axis=0)
        return teams.totals[alone][best, np.arange(len(best))]
    if name == "union":
        widths = [count for count, _ in model.table.verify_ms if count <= max_nodes]
        cheapest = min(widths, key=model.table.verify)  # some kernels like a few rows better than one
        return prompt_totals(union(trace, lengths).assign(num_nodes=cheapest), model)
    if name == "choose_one":
        return prompt_totals(choose_one(trace, model, max_nodes, lengths), model)
    return prompt_totals(replay(trace, budget_named(name, {"max_nodes": max_nodes}), model.table, None, lengths), model)


def union(trace: Trace, lengths: Mapping[str, int] | None = None) -> pd.DataFrame:
    """The steps in which all that anybody proposes is verified, as if drafting and width cost nothing: no depth and no node is
    written down, so that a cost model takes each for a plain step.

    No step could be longer. That it takes the fewest steps is no theorem: one that ended earlier might let the next begin where
    somebody is luckier.
    """
    all_nodes = sum(member.num_draft_nodes for member in trace.members)
    steps = replay(trace, FixedBudget(max_nodes=all_nodes), None, None, lengths)
    return steps.assign(num_nodes=0, **{depth_column(member.name): NOT_ASKED for member in trace.members})


def choose_one(
    trace: Trace, model: CostModel, max_nodes: int, lengths: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """The steps of a learner with full information, in the spirit of HedgeSpec (ICLR 2026): after every step it is told what each
    member would have earned there alone, and the best so far drafts next. See `ChooseOne`.
    """
    team = Team.of(trace, None, lengths)
    merged = Merged.of(trace, lengths)
    alone = [replace(team, places=(place,), members=(member,)) for place, member in enumerate(team.members)]
    table = model.table
    tokens = np.minimum(merged.matched + 1, merged.num_left[:, None])
    cost = np.full((trace.num_positions, len(alone) + 1), table.plain())
    verify = np.array([table.verify(count) for count in range(max_nodes + 1)])
    deepest = max(int(merged.depths.max()), 0)
    for place, one in enumerate(alone):
        draft = np.array([table.draft(one.members[0].name, max(depth, 1)) for depth in range(deepest + 1)])
        depths = merged.depths[:, place]
        cost[:, place] = verify[np.minimum(merged.num_nodes(one), max_nodes)] + table.host_ms
        cost[:, place] += np.where(depths == NOT_ASKED, 0.0, draft[np.maximum(depths, 0)])
    tokens = np.hstack([tokens, np.ones((len(tokens), 1), np.int64)])

    def begin(prompt: int) -> ChooseOne:
        own = slice(trace.starts[prompt], trace.starts[prompt + 1])
        first = int(trace.context_tokens[trace.starts[prompt]])
        return ChooseOne(first, tokens[own], cost[own], max_nodes)

    return play(trace, team, begin)


class ChooseOne:
    """A policy: every member, and no draft at all, is an arm; the arm with the best discounted tokens per millisecond drafts
    alone.

    `tokens` and `cost` `[num_positions, num_arms]` are what each arm would emit and take in a step that begins there. They
    become known when the text has grown past what any arm would have emitted: nothing is told before a run could know it.
    """

    def __init__(self, first: int, tokens: np.ndarray, cost: np.ndarray, max_nodes: int) -> None:
        self._first, self._all_tokens, self._all_cost, self._max_nodes = first, tokens, cost, max_nodes
        self._known_at = np.arange(len(tokens)) + tokens.max(axis=1)
        self._waiting: deque[int] = deque()
        # All arms begin as plain decoding, and the first member goes first.
        self._tokens, self._cost = np.ones(tokens.shape[1]), np.full(tokens.shape[1], cost[0, -1])

    def plan(self, context: PlanContext) -> Plan:
        position = context.context_tokens - self._first
        while self._waiting and self._known_at[self._waiting[0]] <= position:
            seen = self._waiting.popleft()
            self._tokens = DISCOUNT * self._tokens + self._all_tokens[seen]
            self._cost = DISCOUNT * self._cost + self._all_cost[seen]
        self._waiting.append(position)
        chosen = int((self._tokens / self._cost).argmax())
        depths = [
            draft_limit(member, context) if place == chosen and self._max_nodes else 0
            for place, member in enumerate(context.members)
        ]
        shares = tuple(
            Plan(depth, min(member.num_draft_nodes, self._max_nodes) if depth else 0)
            for depth, member in zip(depths, context.members, strict=True)
        )
        return Plan(max(depths), max(share.num_nodes for share in shares), shares)

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None: ...
