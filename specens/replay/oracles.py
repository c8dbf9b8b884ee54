"""Budgets beside policies that no run can have, because they know more or pay less."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from specens.decoding.budgets.base import Budget, PlanContext, draft_limit
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.types import IDLE, Commit, Draft, Plan, Share, TokenTree
from specens.replay.all_subsets import MergedDrafts
from specens.replay.cost_model import CostModel
from specens.replay.simulate import play, replay
from specens.replay.subsets import TOTALS, Subsets, prompt_totals
from specens.replay.trace import NOT_SCHEDULED, Subset, Trace, depth_column

ORACLES = {
    "choose_one": "One member a step, by what each would have gained (their drafts for that are "
    "free).",
    "best_alone": "Hindsight: each prompt's best single member.",
    "union": "Ceiling: all that any member proposes, drafting and width free.",
}

DISCOUNT = 0.9
"""What an observation counts after one more step, for choose_one."""


def compare(
    trace: Trace,
    model: CostModel,
    subsets: Subsets,
    budgets: Mapping[str, Budget],
    max_nodes: int,
    notes: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """One row per budget and oracle, all members drafting: calls, acceptance_length, seconds by the
    model, tokens_per_s, speedup over AR decoding, `regret` and `regret_by_prompt` (see
    `Subsets.regret`), and a note on what it is. `subsets` are those of budget=fixed.
    """
    totals = {
        name: prompt_totals(replay(trace, budget, model.table), model)
        for name, budget in budgets.items()
    }
    totals |= {
        "choose_one": prompt_totals(choose_one(trace, model, max_nodes), model),
        "best_alone": _best_alone(subsets),
        "union": _ceiling(trace, model, max_nodes),
    }
    ar_s, rows = subsets.seconds[0].sum(), []
    for name, table in totals.items():
        total = dict(zip(TOTALS, table.T, strict=True))
        seconds = total["draft_s"] + total["verify_s"] + total["host_s"]
        num_emitted, calls = total["num_emitted"].sum(), total["calls"].sum()
        rows.append(
            {
                "policy": name,
                "calls": int(calls),
                "acceptance_length": num_emitted / calls,
                "seconds": seconds.sum(),
                "tokens_per_s": num_emitted / seconds.sum(),
                "speedup": ar_s / seconds.sum(),
                **subsets.regret(seconds),
                "note": {**(notes or {}), **ORACLES}.get(name, ""),
            }
        )
    return pd.DataFrame(rows)


def _best_alone(subsets: Subsets) -> np.ndarray:
    alone = [1 << place for place in range(len(subsets.names))]
    best = subsets.seconds[alone].argmin(axis=0)
    return subsets.totals[alone][best, np.arange(len(best))]


def _ceiling(trace: Trace, model: CostModel, max_nodes: int) -> np.ndarray:
    """Every step costs the cheapest forward: latency is not monotonic in width for some kernels."""
    widths = [count for count, _ in model.table.verify_ms if count <= max_nodes]
    cheapest = min(widths, key=model.table.verify)
    return prompt_totals(union(trace).assign(num_nodes=cheapest), model)


def union(trace: Trace) -> pd.DataFrame:
    """The steps in which all that any member proposes is verified, as if drafting and width cost
    nothing: depths and nodes are left out, so that a cost model takes each for an AR step.

    No step could be longer. That it takes the fewest steps is no theorem: one that ended earlier
    might let the next begin where a member happens to be right.
    """
    all_nodes = sum(member.num_draft_nodes for member in trace.members)
    depths = {depth_column(member.name): NOT_SCHEDULED for member in trace.members}
    return replay(trace, FixedBudget(all_nodes)).assign(num_nodes=0, **depths)


def choose_one(trace: Trace, model: CostModel, max_nodes: int) -> pd.DataFrame:
    """The steps of a learner with full information, in the spirit of HedgeSpec (ICLR 2026): after
    every step it learns what each member would have gained there alone, and the best so far drafts
    next. See `ChooseOne`.
    """
    subset, merged, table = Subset.of(trace), MergedDrafts.of(trace), model.table
    tokens = np.minimum(merged.matched + 1, merged.num_left[:, None])
    cost = np.full((trace.num_positions, len(subset.members) + 1), table.plain())
    verify = np.array([table.verify(count) for count in range(max_nodes + 1)])
    deepest = range(max(int(merged.depths.max()), 0) + 1)
    for place, member in enumerate(subset.members):
        alone = replace(subset, places=(place,), members=(member,))
        draft = np.array([table.draft(member.name, max(depth, 1)) for depth in deepest])
        depths = merged.depths[:, place]
        cost[:, place] = verify[np.minimum(merged.num_nodes(alone), max_nodes)] + table.host_ms
        cost[:, place] += np.where(depths == NOT_SCHEDULED, 0.0, draft[np.maximum(depths, 0)])
    tokens = np.hstack([tokens, np.ones((len(tokens), 1), np.int64)])

    def begin(prompt: int) -> ChooseOne:
        own = slice(trace.starts[prompt], trace.starts[prompt + 1])
        first = int(trace.context_tokens[trace.starts[prompt]])
        return ChooseOne(first, tokens[own], cost[own], max_nodes)

    return play(trace, subset, begin)


class ChooseOne:
    """A policy: every member, and no draft at all, is an arm; the arm with the best discounted
    tokens per millisecond drafts alone.

    `tokens` and `cost` `[num_positions, num_arms]` are what each arm would emit and take in a step
    that begins there. They become known when the text has grown past what any arm would have
    emitted, never before a run could know them.
    """

    mode = "draft"
    rate = None

    def __init__(self, first: int, tokens: np.ndarray, cost: np.ndarray, max_nodes: int) -> None:
        self._first, self._max_nodes = first, max_nodes
        self._all_tokens, self._all_cost = tokens, cost
        self._known_at = np.arange(len(tokens)) + tokens.max(axis=1)
        self._waiting: deque[int] = deque()
        # All arms begin as AR decoding, and the first member goes first.
        self._tokens = np.ones(tokens.shape[1])
        self._cost = np.full(tokens.shape[1], cost[0, -1])

    def plan(self, context: PlanContext) -> Plan:
        position = context.context_tokens - self._first
        while self._waiting and self._known_at[self._waiting[0]] <= position:
            seen = self._waiting.popleft()
            self._tokens = DISCOUNT * self._tokens + self._all_tokens[seen]
            self._cost = DISCOUNT * self._cost + self._all_cost[seen]
        self._waiting.append(position)
        chosen, most = int((self._tokens / self._cost).argmax()), self._max_nodes
        shares = [IDLE] * len(context.members)
        if chosen < len(shares) and most:
            member = context.members[chosen]
            depth = draft_limit(member, context)
            shares[chosen] = Share(depth, min(member.num_draft_nodes, most)) if depth else IDLE
        return Plan.of(shares)

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None: ...
