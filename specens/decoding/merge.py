"""Drafts -> TokenTree under a node budget. Pure: no torch, no state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specens.decoding.types import ROOT, Draft, Drawn, Plan, TokenTree, chain_parents, depths_of


def merge(draft: Draft, plan: Plan, eos_ids: Collection[int] = ()) -> TokenTree:
    """Merge a draft (an ensemble's: all members' forests in a row) into one tree within the plan.

    Equal siblings become one node with several owners. Nodes below an end-of-sequence token are dropped, as nothing can be
    accepted there, and so is what goes beyond a member's own plan, which could reach over the end of the context or crowd
    out the others. When the whole budget is short, the members take turns: everybody's first node, then everybody's second,
    in the order in which each proposed them, which is for it to choose (best first, say). A parent always had an earlier turn
    than its child, so what stays is always a tree.

    A draft that tells the laws of its draws is cut before it is merged: which of them stay must not depend on what was drawn
    (equal tokens need one node, and nodes below an end none), or testing them would be biased.
    """
    if draft.laws:
        draft = _cut_blindly(draft, plan)
    token_ids: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    draws: list[Drawn] = []
    turns: list[int] = []  # of a node: the earliest at which a member proposed it
    claims: list[tuple[tuple[int, float | None], ...]] = []
    merged: dict[tuple[int, int], int] = {}
    depths, shares = depths_of(draft.parents), _shares(draft, plan)
    num_kept = [0] * len(shares)
    place: list[int | None] = []  # draft node -> tree node, None for a dropped one
    for index, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        above = ROOT if parent == ROOT else place[parent]
        owner = draft.owner(index)
        is_over = depths[index] > shares[owner].num_tokens or num_kept[owner] >= shares[owner].num_nodes
        if above is None or is_over or (above != ROOT and token_ids[above] in eos_ids):
            place.append(None)
            continue
        turn = num_kept[owner]
        num_kept[owner] += 1
        node = merged.get((above, token))
        if node is None:
            node = merged[(above, token)] = len(token_ids)
            token_ids.append(token)
            parents.append(above)
            owners.append(0)
            turns.append(turn)
            claims.append(())
        owners[node] |= 1 << owner
        claims[node] += ((owner, draft.claim(index)),)
        turns[node] = min(turns[node], turn)
        place.append(node)
        if draft.laws and draft.laws[index] is not None:
            draws.append(Drawn(node, owner, draft.laws[index]))
    tree = TokenTree(
        token_ids=tuple(token_ids),
        parents=tuple(parents),
        depths=depths_of(tuple(parents)),
        owners=tuple(owners),
        draws=tuple(draws),
        is_drawn_row=_is_drawn_row(draft),
        claims=tuple(claims),
    )
    return tree if len(tree) <= plan.num_nodes else _cut(tree, turns, plan.num_nodes)


def side_by_side(parts: Sequence[Draft], sizes: Sequence[int] | None = None) -> Draft:
    """Several drafters' proposals one after another in one draft, each node with its owner. `sizes[i]` is the number of members
    that `parts[i]` speaks for, by default one each. Seconds are left out.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    laws: list[Any] = []
    claims: list[float | None] = []
    first_owner = 0
    for part, size in zip(parts, sizes or [1] * len(parts), strict=True):
        offset = len(token_ids)
        token_ids += part.token_ids
        parents += [parent if parent == ROOT else parent + offset for parent in part.parents]
        owners += [first_owner + part.owner(node) for node in range(len(part))]
        laws += part.laws or [None] * len(part)
        claims += part.claims or [None] * len(part)
        first_owner += size
    return Draft(tuple(token_ids), tuple(parents), tuple(owners), laws=tuple(laws), claims=tuple(claims))


def part_of(draft: Draft, member: int) -> Draft:
    """One member's own proposal, without laws and seconds."""
    nodes = [node for node in range(len(draft)) if draft.owner(node) == member]
    index = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    return Draft(
        tuple(draft.token_ids[node] for node in nodes),
        tuple(index[draft.parents[node]] for node in nodes),
        claims=tuple(draft.claim(node) for node in nodes),
    )


def _shares(draft: Draft, plan: Plan) -> tuple[Plan, ...]:
    """Each member's own plan; of a plain drafter, the whole."""
    return plan.members or (plan,) * (1 + max(draft.owners, default=0))


def _is_drawn_row(draft: Draft) -> bool:
    is_chain = draft.parents == chain_parents(len(draft))
    return is_chain and len(set(draft.owners)) < 2 and bool(draft.laws) and None not in draft.laws


def _cut(tree: TokenTree, turns: Sequence[int], num_nodes: int) -> TokenTree:
    """The `num_nodes` nodes with the earliest turns, those with more owners first; in their old order."""
    rank = sorted(range(len(tree)), key=lambda node: (turns[node], -tree.owners[node].bit_count(), node))
    return tree.only(rank[:num_nodes])


def _cut_blindly(draft: Draft, plan: Plan) -> Draft:
    """The nodes that stay when members take turns, decided without a look at the tokens.

    A member that draws keeps all its turns, also those that it does not use: how much it says may depend on what it drew (a
    row that ends early, a law with fewer tokens than branches), and no other member's draws may come or go with that.
    """
    depths, shares = depths_of(draft.parents), _shares(draft, plan)
    num_kept = [0] * len(shares)
    turns: dict[int, tuple[int, int]] = {}  # node -> its turn among its member's nodes, and the member
    for node in range(len(draft)):
        owner = draft.owner(node)
        if depths[node] <= shares[owner].num_tokens and num_kept[owner] < shares[owner].num_nodes:
            turns[node] = (num_kept[owner], owner)
            num_kept[owner] += 1
    for owner in {draft.owner(node) for node, law in enumerate(draft.laws) if law is not None}:
        num_kept[owner] = shares[owner].num_nodes
    all_turns = sorted((turn, owner) for owner, count in enumerate(num_kept) for turn in range(count))
    stay = set(all_turns[: plan.num_nodes])
    kept = [node for node, turn in turns.items() if turn in stay]
    new_index = {node: index for index, node in enumerate(kept)}
    return Draft(
        token_ids=tuple(draft.token_ids[node] for node in kept),
        parents=tuple(new_index.get(draft.parents[node], ROOT) for node in kept),
        owners=tuple(draft.owner(node) for node in kept),
        laws=tuple(draft.laws[node] for node in kept),
        claims=tuple(draft.claim(node) for node in kept),
    )
