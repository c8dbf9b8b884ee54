"""What any subset of a dense trace's members would have done, by the very code of the loop, without
a target.

Greedy and keyed sampling give one text whoever drafts. So a step of any subset and any budget is
known: it begins at a position of the text, all proposals there are in the trace, and the target
outputs the text's own tokens. `loop.Decoder.decode` calls the drafters and the target; `play` looks
both up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from specens.decoding.budgets.base import Budget, PlanContext, Policy
from specens.decoding.budgets.costs import CostTable
from specens.decoding.merge import merge, side_by_side
from specens.decoding.schedule import propose_in_order
from specens.decoding.types import ROOT, Commit, Draft, Plan, Share, TokenTree, depths_of
from specens.replay.all_subsets import MergedDrafts
from specens.replay.trace import NOT_SCHEDULED, Subset, Trace, steps_frame

Costs = CostTable | Mapping[str, CostTable]
"""What a budget decides by: one table, or that of each prompt id."""


def replay(
    trace: Trace,
    budget: Budget,
    costs: Costs | None = None,
    members: Sequence[str] | None = None,
    lengths: Mapping[str, int] | None = None,
    merged: MergedDrafts | None = None,
) -> pd.DataFrame:
    """The steps of `members` (by default all, in the run's order) under a budget: one row per step
    with prompt_id, step, position (in the output), context_tokens, num_nodes, num_accepted,
    num_emitted, mode, and for each member `depth_<name>`: how deep its proposal went, 0 if it
    abstained, -1 if it was not scheduled.

    `lengths` (member -> draft tokens) as in `Subset.of`; `merged` is `MergedDrafts.of` of these, if
    known. A budget that remembers (reset=run) meets the prompts in the run's order.
    """
    subset = Subset.of(trace, members, lengths)
    if getattr(budget, "schedules_all", False):
        merged = merged or MergedDrafts.of(trace, lengths)
        steps = merged.steps(subset, budget.max_nodes)
        if steps is not None:
            return steps
    earlier: Policy | None = None

    def begin(prompt: int) -> Policy:
        nonlocal earlier
        table = costs[trace.prompt_ids[prompt]] if isinstance(costs, Mapping) else costs
        earlier = budget.begin(subset.members, table or CostTable(), earlier)
        return earlier

    return play(trace, subset, begin)


def play(trace: Trace, subset: Subset, begin: Callable[[int], Policy]) -> pd.DataFrame:
    """All texts, step by step, each under the policy that `begin` gives for its number."""
    prompts = range(len(trace.prompt_ids))
    rows = [row for prompt in prompts for row in _steps(trace, prompt, subset, begin(prompt))]
    positions, num_nodes, accepted, emitted, modes, depths = zip(*rows, strict=True)
    return steps_frame(
        trace,
        subset,
        np.array(positions),
        num_nodes=np.array(num_nodes),
        num_accepted=np.array(accepted),
        num_emitted=np.array(emitted),
        depths=np.array(depths, np.int64).reshape(len(rows), len(subset.members)),
        mode=list(modes),
    )


Row = tuple[int, int, int, int, str, list[int]]
"""Position, nodes, accepted, emitted, mode, depth of every member's proposal."""


def _steps(trace: Trace, prompt: int, subset: Subset, policy: Policy) -> Iterator[Row]:
    """The loop over one text. A text that ends inside what was accepted ends the step there, as the
    stop rules would.
    """
    position, end = int(trace.starts[prompt]), int(trace.starts[prompt + 1])
    text = tuple(trace.text[position:end].tolist())
    while text:
        length, wanted = trace.context_tokens[position], trace.tokens_wanted[position]
        plan = policy.plan(PlanContext(subset.members, int(length), int(wanted)))
        draft, depths = _proposal(trace.drafts[position], subset, plan)
        tree = policy.select(merge(draft, plan, trace.eos_ids))
        path = _agreement(tree, text)
        commit = Commit(path, text[: len(path) + 1])
        policy.observe(draft, tree, commit)
        yield position, len(tree), len(path), len(commit.token_ids), policy.mode, depths
        position, text = position + len(commit.token_ids), text[len(commit.token_ids) :]


def _agreement(tree: TokenTree, text: Sequence[int]) -> tuple[int, ...]:
    """The path of nodes, from the root on, that agrees with the text."""
    path: list[int] = []
    node = ROOT
    for child, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if len(path) == len(text):
            break
        if parent == node and token == text[len(path)]:
            path.append(child)
            node = child
    return tuple(path)


def _proposal(drafts: Sequence[Draft], subset: Subset, plan: Plan) -> tuple[Draft, list[int]]:
    """What the subset would have proposed under a plan, and the depth of each member's part."""

    def propose(index: int, share: Share) -> Draft:
        draft, member = drafts[subset.places[index]], subset.members[index]
        return _within(draft, share, stops_early=member.stops_early)

    parts = propose_in_order(plan.shares, plan.first_only, propose)
    depths = [
        NOT_SCHEDULED if part is None else max(depths_of(part.parents), default=0) for part in parts
    ]
    return side_by_side([part or Draft() for part in parts]), depths


def _within(draft: Draft, share: Share, *, stops_early: bool) -> Draft:
    """What of its full proposal a member outputs in a share: so deep, so many nodes, and if it
    `stops_early` no further than the first token of its chain whose confidence is below the share's
    `min_confidence`.
    """
    stop = _stop(draft, share.min_confidence) if stops_early else share.num_tokens
    depth = min(share.num_tokens, stop)
    kept = [node for node, at in enumerate(depths_of(draft.parents)) if at <= depth]
    kept = kept[: share.num_nodes]
    return draft if len(kept) == len(draft) else draft.only(kept)


def _stop(draft: Draft, min_confidence: float) -> int:
    """The depth at which a draft that grows token by token ends. Its chain stands first; what hangs
    beside it does not count.
    """
    for node, parent in enumerate(draft.parents):
        confidence = draft.confidence(node)
        if parent != node - 1:
            break
        if confidence is not None and confidence < min_confidence:
            return node + 1
    return len(draft)
