"""The nouns of a decoding step, as frozen dataclasses. No torch here: replay and analysis speak the same words.

A *draft* is a forest written flat: `token_ids[i]` hangs on node `parents[i]`, and `parents[i] == -1` hangs on the last
committed token. Parents stand before their children, so a chain is the forest with parents -1, 0, 1, ...
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

ROOT = -1
"""The parent of a node that hangs on the last committed token."""


def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of every node: 1 for a child of the last committed token, parent's depth + 1 below it."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return tuple(depths)


def chain_parents(length: int) -> tuple[int, ...]:
    """Parents of a chain: -1, 0, 1, ..."""
    return tuple(range(ROOT, length - 1))


CLAIM_DIGITS = 4


def rounded(claim: float) -> float:
    """A claim as drafts keep it."""
    return round(float(claim), CLAIM_DIGITS)


@dataclass(frozen=True, slots=True)
class Member:
    """What the budget must know of a drafter: its name and the most it can propose in a step.

    `num_draft_tokens` is the greatest depth, `num_draft_nodes` the most nodes of a proposal (equal to the depth for a
    chain), `context_limit` the drafter's own context in tokens (None: no limit). With `coupled_only` it cannot say from which
    law its tokens are drawn, and a verifier that needs to know refuses it. One that `stops_early` drafts token after token, and
    ends a draft with the first whose claim is below the plan's `min_claim`.
    """

    name: str
    num_draft_tokens: int
    num_draft_nodes: int
    context_limit: int | None = None
    coupled_only: bool = False
    stops_early: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to draft in a step. Depth 0 means: stay silent.

    A plan mirrors the drafter it is for: `members[i]` is the plan of an ensemble's i-th member. With `first_only`, members
    are asked in order and the first that has something to say drafts alone. A drafter for which every further depth costs time,
    and which knows its probabilities, need not go below a path that it takes for less likely than `min_claim`.

    `mode` and `rate` say for the records what the budget was about: `draft`, `probe` (to learn what somebody is worth) or
    `plain`, and the tokens per millisecond that the step had to beat.
    """

    num_tokens: int
    num_nodes: int
    members: tuple[Plan, ...] = ()
    first_only: bool = False
    min_claim: float = 0.0
    mode: str = "draft"
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposal: a flat forest of tokens. Silence is the empty Draft, never a placeholder token.

    An ensemble's draft is the concatenation of its members' forests: `owners[i]` is the index of the member that proposed
    node i (empty: all by member 0) and `seconds[d]` the time member d took (empty: not measured).

    `laws[i]` is the distribution `[vocab]` that node i was really drawn from, given the path to it and its earlier siblings;
    None for a token that was not drawn (empty: none was). Only verifiers that test drafts want it, and leaving it out of a whole
    draft is always safe: a draw whose law is not told counts as certain, and is accepted less often. (A member that looks at
    another's draw must not let it decide how many nodes it proposes: nodes count when a budget is short.)

    `claims[i]` is the drafter's own estimate of the probability that the path down to node i is what the target will say; None
    where it has none (empty: nowhere). Budgets that weigh nodes begin with it, and learn how often such claims come true. Claims
    are kept to `CLAIM_DIGITS` decimals: records hold them exactly, and replay decides by the same numbers.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    laws: tuple[Any, ...] = ()
    claims: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        # Plain ints, whatever kind of integer a drafter counts in: the items of a tensor would never equal a token.
        object.__setattr__(self, "token_ids", tuple(map(operator.index, self.token_ids)))
        object.__setattr__(self, "parents", tuple(map(operator.index, self.parents)))
        object.__setattr__(self, "claims", tuple(None if claim is None else rounded(claim) for claim in self.claims))
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"a draft has {len(self.token_ids)} token ids but {len(self.parents)} parents")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"a draft's parents must stand before their children, got {self.parents}")
        if len(self.owners) not in (0, len(self.token_ids)):
            raise ValueError(f"a draft has {len(self.token_ids)} token ids but {len(self.owners)} owners")
        if len(self.laws) not in (0, len(self.token_ids)):
            raise ValueError(f"a draft has {len(self.token_ids)} token ids but {len(self.laws)} laws")
        if len(self.claims) not in (0, len(self.token_ids)):
            raise ValueError(f"a draft has {len(self.token_ids)} token ids but {len(self.claims)} claims")
        if all(law is None for law in self.laws):
            object.__setattr__(self, "laws", ())

    @classmethod
    def chain(cls, token_ids: Sequence[int], laws: Sequence[Any] = (), claims: Sequence[float | None] = ()) -> Draft:
        """A draft without branches: every token hangs on the one before."""
        return cls(tuple(token_ids), chain_parents(len(token_ids)), laws=tuple(laws), claims=tuple(claims))

    def __len__(self) -> int:
        return len(self.token_ids)

    def owner(self, node: int) -> int:
        return self.owners[node] if self.owners else 0

    def claim(self, node: int) -> float | None:
        return self.claims[node] if self.claims else None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw of a member: the node of the tree it became, and the law `[vocab]` that it came from."""

    node: int
    owner: int
    law: Any


@dataclass(frozen=True, slots=True)
class TokenTree:
    """All drafts merged: no two siblings carry the same token. `owners[i]` is a bit mask of the members that proposed the
    exact path from the last committed token to node i. Parents stand before their children.

    `draws` are the drawn tokens in the order in which they were drafted, which is fixed before anyone sees them; two draws
    of one token are one node, but two draws. `is_drawn_row`: all that was drafted is one chain of draws by one member.
    `claims[i]` are what its owners claim of node i: (owner, claim) each.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    draws: tuple[Drawn, ...] = ()
    is_drawn_row: bool = False
    claims: tuple[tuple[tuple[int, float | None], ...], ...] = ()

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> TokenTree:
        """The tokens one after another, all proposed by member 0."""
        count = len(token_ids)
        return cls(tuple(token_ids), chain_parents(count), tuple(range(1, count + 1)), (1,) * count)

    def __len__(self) -> int:
        return len(self.token_ids)

    def only(self, nodes: Collection[int]) -> TokenTree:
        """The tree of some of its nodes, each with its parent, in their old order. Not for trees with draws: which of them stay
        is decided before they are merged.
        """
        assert not self.draws, "draws are cut blindly"
        kept = sorted(nodes)
        new_index = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        return TokenTree(
            token_ids=tuple(self.token_ids[node] for node in kept),
            parents=tuple(new_index[self.parents[node]] for node in kept),  # a node without its parent is an error
            depths=tuple(self.depths[node] for node in kept),
            owners=tuple(self.owners[node] for node in kept),
            claims=tuple(self.claims[node] for node in kept) if self.claims else (),
        )

    def children(self) -> dict[int, dict[int, int]]:
        """parent -> token id -> node."""
        table: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            table.setdefault(parent, {})[token] = node
        return table

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from depth 1 down to `node`; empty for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in order."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self)) if node not in inner)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided: the accepted node path from the root, and the target's own next token after it."""

    path: tuple[int, ...]
    target_token: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step really emits, after the stop rules: the accepted nodes kept, and the tokens.

    `token_ids` are the tokens of `path`, then the target's own token unless a stop rule ended the text inside the accepted
    run; so `len(token_ids)` is `num_accepted + 1`, or `num_accepted` when the target's token was trimmed.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One member in one step. All counts are after the stop rules.

    `num_drafted` nodes it proposed, `num_verified` those that were in the verified tree, `num_matched` the length of agreement
    of its own proposal with the emitted tokens (pruned nodes count), `num_tested` the number of depths at which it had a
    proposal on the matching branch and the emitted token is known (`num_matched` or one more). `draft_ms` its drafting time.
    `num_planned` is the depth that the budget gave it (0: not asked).
    """

    drafter: str
    num_drafted: int
    num_verified: int
    num_matched: int
    num_tested: int
    draft_ms: float
    num_planned: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: exactly one target forward. `context_tokens` is the committed length before the step.

    `token_owners[i]` is the bit mask of members that proposed emitted token i on the committed path (0: the target's own).
    Times are milliseconds: `draft_ms` all drafting, `verify_ms` the target's forward and the verdict, `host_ms` the rest of the
    step. `mode` is what the budget was about (see its policies), with the rate in tokens per ms by which it judged. `margins[i]`
    is how far emitted token i was ahead of the target's next best, in logits (empty: not measured).
    """

    step: int
    context_tokens: int
    num_nodes: int
    num_accepted: int
    token_ids: tuple[int, ...]
    token_owners: tuple[int, ...]
    draft_ms: float
    verify_ms: float
    host_ms: float
    layout: str
    finish_reason: str | None = None
    members: tuple[MemberRecord, ...] = field(default=())
    mode: str = "draft"
    rate: float | None = None
    margins: tuple[float, ...] = ()

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids)
