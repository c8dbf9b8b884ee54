"""What any team of a dense trace's members would have done, by the very code of the loop, without a target.

Greedy and keyed sampling give one text whoever drafts. So a step of any team and any budget is known: it begins at a position
of the text, all proposals there are in the trace, and the target says what the text says. `loop.Decoder.decode` asks the
drafters and the target; `play` looks both up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from specens.analysis.merged import Merged
from specens.analysis.trace import NOT_ASKED, Team, Trace, steps_frame
from specens.decoding.budget import Budget, FixedBudget, PlanContext, Policy
from specens.decoding.costs import CostTable
from specens.decoding.merge import merge, side_by_side
from specens.decoding.types import ROOT, Commit, Draft, Plan, TokenTree, depths_of

__all__ = ["Trace", "play", "replay"]

Costs = CostTable | Mapping[str, CostTable]
"""What a budget decides by: one table, or that of each prompt id."""


def replay(
    trace: Trace,
    budget: Budget,
    costs: Costs | None = None,
    members: Sequence[str] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> pd.DataFrame:
    """The steps of `members` (by default all, in the run's order) under a budget: one row per step with prompt_id, step, position
    (in the output), context_tokens, num_nodes, num_accepted, num_emitted, mode, and for each member `depth_<name>`: how deep its
    proposal went, 0 if it had nothing to say, -1 if it was not asked.

    `lengths` (member -> draft tokens) as in `Team.of`. A budget that remembers (reset=run) meets the prompts in the run's order.
    """
    team = Team.of(trace, members, lengths)
    if isinstance(budget, FixedBudget) and not budget.first_only:
        steps = Merged.of(trace, lengths).steps(team, budget.max_nodes)
        if steps is not None:
            return steps
    earlier: Policy | None = None

    def begin(prompt: int) -> Policy:
        nonlocal earlier
        table = costs[trace.prompt_ids[prompt]] if isinstance(costs, Mapping) else costs
        earlier = budget.begin(team.members, table or CostTable(), earlier)
        return earlier

    return play(trace, team, begin)


def play(trace: Trace, team: Team, begin: Callable[[int], Policy]) -> pd.DataFrame:
    """All texts, step by step, each under the policy that `begin` gives for its number."""
    rows = [row for prompt in range(len(trace.prompt_ids)) for row in _steps(trace, prompt, team, begin(prompt))]
    positions, num_nodes, accepted, emitted, modes, depths = zip(*rows, strict=True)
    return steps_frame(
        trace,
        team,
        np.array(positions),
        num_nodes=np.array(num_nodes),
        num_accepted=np.array(accepted),
        num_emitted=np.array(emitted),
        depths=np.array(depths, np.int64).reshape(len(rows), len(team.members)),
        mode=list(modes),
    )


Row = tuple[int, int, int, int, str, list[int]]
"""Position, nodes, accepted, emitted, mode, depth of every member's proposal."""


def _steps(trace: Trace, prompt: int, team: Team, policy: Policy) -> Iterator[Row]:
    """The loop over one text. A text that ends inside what was accepted ends the step there, as the stop rules would."""
    position, end = int(trace.starts[prompt]), int(trace.starts[prompt + 1])
    text = tuple(trace.text[position:end].tolist())
    while text:
        context = PlanContext(team.members, int(trace.context_tokens[position]), int(trace.tokens_wanted[position]))
        plan = policy.plan(context)
        draft, depths = _proposal(trace.drafts[position], team, plan)
        tree = policy.select(merge(draft, plan, trace.eos_ids))
        path = _agreement(tree, text)
        commit = Commit(path, text[: len(path) + 1])
        policy.observe(draft, tree, commit)
        yield position, len(tree), len(path), len(commit.token_ids), plan.mode, depths
        position, text = position + len(commit.token_ids), text[len(commit.token_ids) :]


def _agreement(tree: TokenTree, text: Sequence[int]) -> tuple[int, ...]:
    """The nodes that say what the text says, from the root on."""
    path: list[int] = []
    node = ROOT
    for child, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if len(path) == len(text):
            break
        if parent == node and token == text[len(path)]:
            path.append(child)
            node = child
    return tuple(path)


def _proposal(drafts: Sequence[Draft], team: Team, plan: Plan) -> tuple[Draft, list[int]]:
    """What the team would have said under a plan, and the depth of each member's part: as `drafters.ensemble` asks them."""
    parts: list[Draft] = []
    depths: list[int] = []
    for place, member, share in zip(team.places, team.members, plan.members, strict=True):
        if share.num_tokens == 0 or (plan.first_only and any(map(len, parts))):
            parts.append(Draft())
            depths.append(NOT_ASKED)
        else:
            part = _within(drafts[place], share, stops_early=member.stops_early)
            parts.append(part)
            depths.append(max(depths_of(part.parents), default=0))
    return side_by_side(parts), depths


def _within(draft: Draft, share: Plan, *, stops_early: bool) -> Draft:
    """What of its full proposal a member says under a plan: so deep, so many nodes, and if it `stops_early` no further than the
    first token of its chain that it takes for less likely than `min_claim`.
    """
    depth = min(share.num_tokens, _stop(draft, share.min_claim)) if stops_early else share.num_tokens
    kept = [node for node, at in enumerate(depths_of(draft.parents)) if at <= depth][: share.num_nodes]
    if len(kept) == len(draft):
        return draft
    index = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    return Draft(
        tuple(draft.token_ids[node] for node in kept),
        tuple(index[draft.parents[node]] for node in kept),
        claims=tuple(draft.claim(node) for node in kept),
    )


def _stop(draft: Draft, min_claim: float) -> int:
    """The depth at which a draft that grows token by token ends. Its chain stands first; what hangs beside it does not count."""
    for node, parent in enumerate(draft.parents):
        claim = draft.claim(node)
        if parent != node - 1:
            break
        if claim is not None and claim < min_claim:
            return node + 1
    return len(draft)
