"""The data of a decoding step, as frozen dataclasses. Without torch: replay runs on the same ones.

A *draft* is a forest of tokens written flat: `token_ids[i]` hangs on node `parents[i]`, and
`parents[i] == -1` hangs on the last committed token. Parents stand before their children, so a
chain is the forest with parents -1, 0, 1, ...
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

ROOT = -1
"""The parent of a node that hangs on the last committed token."""

CONFIDENCE_DIGITS = 4
"""Decimals to which drafts keep confidences: records hold them exactly, and replay decides by the
same numbers.
"""


def depths_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of every node: 1 for a child of the last committed token, parent's depth + 1 below."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return tuple(depths)


def chain_parents(length: int) -> tuple[int, ...]:
    """Parents of a chain: -1, 0, 1, ..."""
    return tuple(range(ROOT, length - 1))


def new_parents(parents: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    """Parents of the forest that consists of the nodes `kept`, in that order. Raises KeyError for a
    node that is kept without its parent.

    parents (-1, 0, 0, 2) of the nodes "the", "cat", "dog", "barks", kept (0, 2, 3): (-1, 0, 1).
    """
    index = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    return tuple(index[parents[node]] for node in kept)


def round_confidence(confidence: float) -> float:
    """A confidence as drafts keep it."""
    return round(float(confidence), CONFIDENCE_DIGITS)


@dataclass(frozen=True, slots=True)
class Member:
    """What the budget must know of a drafter: its name and the most it can propose in a step.

    `num_draft_tokens` is the greatest depth, `num_draft_nodes` the most nodes of a proposal (equal
    to the depth for a chain), `context_limit` the drafter's own context in tokens (None: no limit).
    `coupled_only`: it cannot report the distribution that its tokens are sampled from, so that
    verifiers which test drafts refuse it. `stops_early`: it drafts token after token, and ends a
    draft with the first whose confidence is below its share's `min_confidence`.
    """

    name: str
    num_draft_tokens: int
    num_draft_nodes: int
    context_limit: int | None = None
    coupled_only: bool = False
    stops_early: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one member may draft in a step: how deep, how many nodes. Depth 0: it is idle.

    A drafter for which every further depth costs time, and which knows its probabilities, need not
    go below a path that it takes for less likely than `min_confidence`.
    """

    num_tokens: int = 0
    num_nodes: int = 0
    min_confidence: float = 0.0


IDLE = Share()


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to draft in a step: one share for every member of the drafter that it is for, in
    order, and the most nodes of the merged tree.

    `first_only`: members are called in order until one proposes something; the others stay idle
    (see `schedule.propose_in_order`).
    """

    shares: tuple[Share, ...]
    num_nodes: int
    first_only: bool = False

    @classmethod
    def of(cls, shares: Sequence[Share], max_nodes: int | None = None) -> Plan:
        """The plan of these shares, with at most `max_nodes` nodes together."""
        total = sum(share.num_nodes for share in shares)
        return cls(tuple(shares), total if max_nodes is None else min(total, max_nodes))

    @property
    def num_tokens(self) -> int:
        """The greatest depth of any member; 0: nobody drafts."""
        return max((share.num_tokens for share in self.shares), default=0)

    @property
    def min_confidence(self) -> float:
        """Of a drafter with one member: that member's."""
        return self.shares[0].min_confidence if len(self.shares) == 1 else 0.0

    def part(self, begin: int, end: int) -> Plan:
        """The plan of some neighbouring members, such as those of an ensemble in an ensemble."""
        part = Plan.of(self.shares[begin:end])
        return Plan(part.shares, part.num_nodes, self.first_only)


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposal: a flat forest of tokens. To abstain is the empty Draft, never a dummy token.

    An ensemble's draft is the concatenation of its members' forests: `owners[i]` is the index of
    the member that proposed node i (empty: all by member 0), `seconds[d]` the time that member d
    took and `scheduled[d]` whether it was called (both empty: not recorded).

    `draft_probs[i]` is the distribution `[vocab]` that node i was really sampled from, given the
    path to it and its earlier siblings; None for a deterministic token (empty: all are). Only
    verifiers that test drafts want it. Leaving it out is always safe: a sampled token without
    `draft_probs` is tested as a deterministic one, and accepted less often. (A member that looks at
    another's samples must not let them decide how many nodes it proposes: nodes count when a budget
    is short.)

    `confidences[i]` is the drafter's own estimate of the probability that the path down to node i
    is what the target will output; None where it has none (empty: nowhere). Budgets that weigh
    nodes calibrate it.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    draft_probs: tuple[Any, ...] = ()
    confidences: tuple[float | None, ...] = ()
    scheduled: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        # Plain ints, whatever integers a drafter counts in: the items of a tensor would never
        # equal a token.
        put("token_ids", tuple(map(operator.index, self.token_ids)))
        put("parents", tuple(map(operator.index, self.parents)))
        put(
            "confidences",
            tuple(None if c is None else round_confidence(c) for c in self.confidences),
        )
        size = len(self.token_ids)
        if len(self.parents) != size:
            raise ValueError(f"a draft has {size} token ids but {len(self.parents)} parents")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"a draft's parents must precede their children, got {self.parents}")
        for name in ("owners", "draft_probs", "confidences"):
            if len(getattr(self, name)) not in (0, size):
                raise ValueError(
                    f"a draft has {size} token ids but {len(getattr(self, name))} {name}"
                )
        if all(probs is None for probs in self.draft_probs):
            put("draft_probs", ())

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        draft_probs: Sequence[Any] = (),
        confidences: Sequence[float | None] = (),
    ) -> Draft:
        """A draft without branches: every token hangs on the one before."""
        parents = chain_parents(len(token_ids))
        return cls(
            tuple(token_ids),
            parents,
            draft_probs=tuple(draft_probs),
            confidences=tuple(confidences),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def owner(self, node: int) -> int:
        return self.owners[node] if self.owners else 0

    def confidence(self, node: int) -> float | None:
        return self.confidences[node] if self.confidences else None

    def only(self, nodes: Sequence[int]) -> Draft:
        """Some of its nodes in this order, each with its parent; without seconds and schedule."""
        picked = {
            name: tuple(values[node] for node in nodes) if (values := getattr(self, name)) else ()
            for name in ("token_ids", "owners", "draft_probs", "confidences")
        }
        return Draft(parents=new_parents(self.parents, nodes), **picked)


@dataclass(frozen=True, slots=True)
class SampledNode:
    """One token that a member sampled: the node of the tree that it became, and the distribution
    `[vocab]` that it was sampled from.
    """

    node: int
    owner: int
    draft_probs: Any


@dataclass(frozen=True, slots=True)
class TokenTree:
    """All drafts merged: no two siblings carry the same token. `owners[i]` is a bit mask of the
    members that proposed the exact path from the last committed token to node i. Parents stand
    before their children.

    `samples` are the sampled tokens in the order in which they were drafted, which is fixed before
    anyone sees them; two samples of one token are one node, but two samples. `is_sampled_chain`:
    all that was drafted is one chain of samples by one member. `confidences[i]` are those of node
    i's owners: (owner, confidence) each.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    samples: tuple[SampledNode, ...] = ()
    is_sampled_chain: bool = False
    confidences: tuple[tuple[tuple[int, float | None], ...], ...] = ()

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> TokenTree:
        """The tokens one after another, all proposed by member 0."""
        count = len(token_ids)
        depths = tuple(range(1, count + 1))
        return cls(tuple(token_ids), chain_parents(count), depths, (1,) * count)

    def __len__(self) -> int:
        return len(self.token_ids)

    def only(self, nodes: Collection[int]) -> TokenTree:
        """The tree of some of its nodes, each with its parent, in their old order. Not for trees
        with samples: which of them stay is decided before they are merged.
        """
        assert not self.samples, "trees with samples are cut before their tokens are looked at"
        kept = sorted(nodes)
        return TokenTree(
            token_ids=tuple(self.token_ids[node] for node in kept),
            parents=new_parents(self.parents, kept),
            depths=tuple(self.depths[node] for node in kept),
            owners=tuple(self.owners[node] for node in kept),
            confidences=tuple(self.confidences[n] for n in kept) if self.confidences else (),
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
    """What verification decided: the accepted node path from the root, and the target's own next
    token after it (the bonus token after a fully accepted draft, else the recovered token).
    """

    path: tuple[int, ...]
    target_token: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step really emits, after the stop rules: the accepted nodes kept, and the tokens.

    `token_ids` are the tokens of `path`, then the target's own token unless a stop rule ended the
    text inside the accepted run; so `len(token_ids)` is `num_accepted + 1`, or `num_accepted` when
    the target's token was trimmed.
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

    `num_drafted` nodes it proposed, `num_verified` those that were in the verified tree,
    `num_matched` the length of agreement of its own proposal with the emitted tokens (pruned nodes
    count), `num_tested` the number of depths at which it had a proposal on the matching branch and
    the emitted token is known (`num_matched` or one more). `draft_ms` its drafting time.
    `num_planned` is the depth that the budget gave it, and `was_scheduled` whether it was called
    (with budget=priority a member may be planned and then left out).
    """

    drafter: str
    num_drafted: int
    num_verified: int
    num_matched: int
    num_tested: int
    draft_ms: float
    num_planned: int = 0
    was_scheduled: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: exactly one target forward. `context_tokens` is the committed length before it.

    `token_owners[i]` is the bit mask of members that proposed emitted token i on the committed path
    (0: the target's own). Times are milliseconds: `draft_ms` all drafting, `verify_ms` the target's
    forward and the verdict, `host_ms` the rest of the step (CPU overhead). `mode` is what the
    budget's policy made of the step: `draft`, `probe` (to learn what a member gains) or `plain`
    (AR decoding), with the `rate` in tokens per ms by which it judged. `logit_gaps[i]` is how far
    emitted token i was ahead of the target's next best, in logits (empty: not measured).
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
    logit_gaps: tuple[float, ...] = ()

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        return (self.draft_ms + self.verify_ms + self.host_ms) / 1e3


def member_of(content: dict[str, Any]) -> Member:
    """A Member from plain data, such as a record of one; what this version does not know is left
    out. Raises TypeError when something is missing.
    """
    known = {entry.name for entry in fields(Member)}
    return Member(**{key: value for key, value in content.items() if key in known})
