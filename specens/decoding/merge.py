"""Drafts -> TokenTree under a node budget. Pure: no torch, no state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specens.decoding.types import (
    ROOT,
    Draft,
    Plan,
    SampledNode,
    TokenTree,
    chain_parents,
    depths_of,
)


def merge(draft: Draft, plan: Plan, eos_ids: Collection[int] = ()) -> TokenTree:
    """Merge a draft (an ensemble's: all members' forests in a row) into one tree within the plan.

    After "the", member 0 proposes the chain "cat sat down", member 1 the tree "cat" with the
    continuations "sat" and "ran". Equal siblings become one node with several owners:

        node    0      1      2     3
        token   cat    sat    down  ran
        parent  -1     0      1     0
        owners  {0,1}  {0,1}  {0}   {1}

    Dropped are nodes below an end-of-sequence token, as nothing can be accepted there, and what
    exceeds a member's own share, which could reach over the end of the context or crowd out the
    others. When `plan.num_nodes` is short, the members take turns: everybody's first node, then
    everybody's second, in the order in which each proposed them, which is for the drafter to choose
    (most probable first, say). With 3 nodes that is cat (turn 0 of both), sat (turn 1 of both),
    then of turn 2 "down", which came first. A parent always has an earlier turn than its child, so
    what stays is always a tree.

    A draft with `draft_probs` is cut before it is merged: which samples stay must not depend on the
    tokens (equal ones need one node, and nodes below an end none), or testing them would be biased.
    """
    if draft.draft_probs:
        draft = _cut_before_merging(draft, plan)
    building = _Building(draft)
    num_kept = [0] * len(plan.shares)
    for node, depth in enumerate(depths_of(draft.parents)):
        owner = draft.owner(node)
        share, turn = plan.shares[owner], num_kept[owner]
        if depth <= share.num_tokens and turn < share.num_nodes:
            num_kept[owner] += building.add(node, turn, eos_ids)
    tree = building.tree()
    return tree if len(tree) <= plan.num_nodes else building.cut(tree, plan.num_nodes)


class _Building:
    """A tree that grows node by node of a draft. `place` is where the nodes of the draft went,
    `turns` the earliest turn at which any member proposed each node of the tree.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.owners: list[int] = []
        self.confidences: list[tuple[tuple[int, float | None], ...]] = []
        self.samples: list[SampledNode] = []
        self.turns: list[int] = []
        self.place: dict[int, int] = {ROOT: ROOT}
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, node: int, turn: int, eos_ids: Collection[int]) -> bool:
        """Merge one node of the draft, unless its parent was dropped or ends the sequence."""
        draft = self.draft
        above, owner = self.place.get(draft.parents[node]), draft.owner(node)
        if above is None or (above != ROOT and self.token_ids[above] in eos_ids):
            return False
        merged = self._node(above, draft.token_ids[node], turn)
        self.owners[merged] |= 1 << owner
        self.confidences[merged] += ((owner, draft.confidence(node)),)
        self.turns[merged] = min(self.turns[merged], turn)
        self.place[node] = merged
        if draft.draft_probs and draft.draft_probs[node] is not None:
            self.samples.append(SampledNode(merged, owner, draft.draft_probs[node]))
        return True

    def _node(self, above: int, token: int, turn: int) -> int:
        """The node with this token under `above`; a new one if there is none."""
        found = self._nodes.get((above, token))
        if found is None:
            found = self._nodes[(above, token)] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(above)
            self.owners.append(0)
            self.confidences.append(())
            self.turns.append(turn)
        return found

    def tree(self) -> TokenTree:
        return TokenTree(
            token_ids=tuple(self.token_ids),
            parents=tuple(self.parents),
            depths=depths_of(self.parents),
            owners=tuple(self.owners),
            samples=tuple(self.samples),
            is_sampled_chain=_is_sampled_chain(self.draft),
            confidences=tuple(self.confidences),
        )

    def cut(self, tree: TokenTree, num_nodes: int) -> TokenTree:
        """The `num_nodes` nodes with the earliest turns, those with more owners first."""
        ranked = sorted(
            range(len(tree)),
            key=lambda node: (self.turns[node], -tree.owners[node].bit_count(), node),
        )
        return tree.only(ranked[:num_nodes])


def side_by_side(parts: Sequence[Draft], sizes: Sequence[int] | None = None) -> Draft:
    """Several drafters' proposals one after another in one draft, each node with its owner.
    `sizes[i]` is the number of members that `parts[i]` speaks for, by default one each. Seconds and
    schedule are left out.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    draft_probs: list[object] = []
    confidences: list[float | None] = []
    first_owner = 0
    for part, size in zip(parts, sizes or [1] * len(parts), strict=True):
        offset = len(token_ids)
        token_ids += part.token_ids
        parents += [parent if parent == ROOT else parent + offset for parent in part.parents]
        owners += [first_owner + part.owner(node) for node in range(len(part))]
        draft_probs += part.draft_probs or [None] * len(part)
        confidences += part.confidences or [None] * len(part)
        first_owner += size
    return Draft(
        tuple(token_ids),
        tuple(parents),
        tuple(owners),
        draft_probs=tuple(draft_probs),
        confidences=tuple(confidences),
    )


def part_of(draft: Draft, member: int) -> Draft:
    """One member's own proposal: tokens, parents and confidences."""
    own = draft.only([node for node in range(len(draft)) if draft.owner(node) == member])
    return Draft(own.token_ids, own.parents, confidences=own.confidences)


def _is_sampled_chain(draft: Draft) -> bool:
    is_chain = draft.parents == chain_parents(len(draft))
    all_sampled = bool(draft.draft_probs) and None not in draft.draft_probs
    return is_chain and len(set(draft.owners)) < 2 and all_sampled


def _cut_before_merging(draft: Draft, plan: Plan) -> Draft:
    """The nodes that stay when members take turns, decided without looking at the tokens.

    Turns of a sampling member are reserved even if unused, because the number of nodes that it
    proposes may depend on the samples (a chain that ends early, a distribution with fewer tokens
    than branches), and no other member's samples may come or go with that.
    """
    num_turns = [0] * len(plan.shares)
    turns: dict[int, tuple[int, int]] = {}  # node -> its turn among its member's nodes, the member
    for node, depth in enumerate(depths_of(draft.parents)):
        owner = draft.owner(node)
        share = plan.shares[owner]
        if depth <= share.num_tokens and num_turns[owner] < share.num_nodes:
            turns[node] = (num_turns[owner], owner)
            num_turns[owner] += 1
    for owner in {draft.owner(n) for n, probs in enumerate(draft.draft_probs) if probs is not None}:
        num_turns[owner] = plan.shares[owner].num_nodes
    in_order = sorted((turn, owner) for owner, n in enumerate(num_turns) for turn in range(n))
    stay = set(in_order[: plan.num_nodes])
    return draft.only([node for node, turn in turns.items() if turn in stay])
