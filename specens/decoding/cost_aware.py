"""budget=cost_aware: who drafts, how deep, and which nodes are verified, so that the most tokens come out per second.

The long-run rate of tokens per second is greatest when every step maximises (expected tokens) - rate x (its cost), with the rate
itself as the price of time (renewal reward; Dinkelbach 1967). So a node is verified when its probability exceeds what it costs at
that price, and a member is asked when what it adds to the best tree exceeds what its draft costs. Costs come from a recorded
table (`costs.CostTable`), probabilities from the members' own claims, corrected by how often such claims have come true in this
text: every proposal is compared with what was emitted, verified or not.

No clock is read here, so replay makes the same decisions from the same records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from specens.decoding.budget import PlanContext, Policy, check_learning, depth_drafted, draft_limit
from specens.decoding.costs import CostTable
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan, TokenTree, depths_of
from specens.errors import UserError

CLAIM_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Claims between two of these are corrected together."""

TRUST, TRUST_ALL = 20.0, 0.5
"""A claim counts for as many observations of claims as high; that a member's claims are right, for so many that came true."""

MEMORY = 0.98
"""What an observation counts after one more step: texts change."""

NO_CLAIM = (0.5, 0.8)
"""Of a member that claims nothing: the probability at depth 1, and the factor from one depth to the next."""

AGREEMENT = 0.5
"""How far a second opinion moves a probability towards certainty; 1 would take members for independent."""

LEARNING = 0.5
"""Weight of the newest step in what is known of a member's worth."""

HOPE = 0.8
"""A member that was never asked is hoped to be right with this probability at each depth: if even that would not pay for its
draft, it is not tried."""

FIRST_SHARE, LAST_SHARE = 0.01, 0.001
"""Of the time of decoding, what may go into asking a member again that did not pay: halved each time it does not."""

ALLOWANCE, LOSS_SHARE, CREDIT = 3.0, 0.01, 4.0
"""The guard lets drafting lose so many plain steps in a text, and this share of its time; of what it has gained, so many plain
steps count against later losses.
"""


@dataclass
class Calibration:
    """How often a member's claims come true: all of them together, and by how high they are."""

    hits: list[float] = field(default_factory=lambda: [0.0] * (len(CLAIM_EDGES) + 1))
    tries: list[float] = field(default_factory=lambda: [0.0] * (len(CLAIM_EDGES) + 1))
    claimed: float = 0.0
    came_true: float = 0.0
    steps: int = 0
    """Since the counts last faded: a member that is silent costs no time."""

    def chance(self, claim: float) -> float:
        self._fade()
        place = bisect_right(CLAIM_EDGES, claim)
        expected = claim * (self.came_true + TRUST_ALL) / (self.claimed + TRUST_ALL)
        return (self.hits[place] + TRUST * min(expected, 1.0)) / (self.tries[place] + TRUST)

    def learn(self, claim: float, is_hit: bool) -> None:
        self._fade()
        place = bisect_right(CLAIM_EDGES, claim)
        self.hits[place] += is_hit
        self.tries[place] += 1
        self.came_true += is_hit
        self.claimed += claim

    def _fade(self) -> None:
        if self.steps:
            left, self.steps = MEMORY**self.steps, 0
            self.hits = [left * count for count in self.hits]
            self.tries = [left * count for count in self.tries]
            self.came_true *= left
            self.claimed *= left


@dataclass
class Worth:
    """What asking a member has brought: tokens per step beyond what the others would have brought, verification paid."""

    gain: float
    depth: float
    probe_share: float = FIRST_SHARE
    silent_ms: float = 0.0
    is_tried: bool = False


@dataclass(frozen=True, slots=True)
class CostAwareBudget:
    """Options of budget=cost_aware. `max_nodes` is the widest tree; `guard`: decode plainly while drafting loses. `reset`: what
    is learned begins anew with every prompt, or only with the run (results then depend on the order of prompts).

    `costs` is a file with a cost table, and decisions are then the same on every machine; by default the table is measured at the
    start. `refresh`: move a measured table to what each finished prompt took.
    """

    needs_costs: ClassVar[bool] = True

    max_nodes: int = 64
    guard: bool = True
    reset: str = "prompt"
    costs: str | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        check_learning(self)
        if not isinstance(self.guard, bool):
            raise UserError(f"budget.guard={self.guard!r}: give true or false")

    def begin(self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None) -> Policy:
        if self.reset == "run" and isinstance(earlier, CostAware):
            earlier.costs = costs
            return earlier
        return CostAware(self, tuple(members), costs)


class CostAware:
    """The decisions of one prompt."""

    def __init__(self, options: CostAwareBudget, members: tuple[Member, ...], costs: CostTable) -> None:
        self.options, self.members, self.costs = options, members, costs
        self._claims = [Calibration() for _ in members]
        self._worth = [self._hoped(member) for member in members]
        self._emitted = self._spent = 0.0  # fading sums: tokens, and what the table says they cost in ms
        self._balance = self._elapsed = 0.0  # ms gained over plain decoding, at most CREDIT steps; ms of all steps
        self._width = float(options.max_nodes)  # for drafts that must be cut before they are seen
        self._step: _Step | None = None

    def _hoped(self, member: Member) -> Worth:
        depth = member.num_draft_tokens
        return Worth(gain=sum(HOPE**i for i in range(1, depth + 1)), depth=depth)

    @property
    def rate(self) -> float:
        """Tokens per millisecond: what has been reached of late, and no less than plain decoding's."""
        plain = 1 / self.costs.plain()
        return max(plain, self._emitted / self._spent) if self._spent else plain

    def plan(self, context: PlanContext) -> Plan:
        rate = self.rate
        depths = [draft_limit(member, context) if self.options.max_nodes else 0 for member in self.members]
        asked, mode = self._asked(depths, rate)
        shares = tuple(
            Plan(depth, member.num_draft_nodes, min_claim=self._least_claim(member, rate)) if is_asked else Plan(0, 0)
            for member, depth, is_asked in zip(self.members, depths, asked, strict=True)
        )
        num_nodes = min(sum(share.num_nodes for share in shares), self.options.max_nodes)
        if context.is_blind:
            num_nodes = min(num_nodes, max(round(self._width), 1))
        depth = max((share.num_tokens for share in shares), default=0)
        least = shares[0].min_claim if len(shares) == 1 else 0.0
        self._step = _Step(rate, tuple(share.num_tokens for share in shares), context.is_blind)
        return Plan(depth, num_nodes, shares, min_claim=least, mode=mode, rate=rate)

    def _asked(self, depths: Sequence[int], rate: float) -> tuple[list[bool], str]:
        """Who drafts, and what the step is about."""
        room = self._balance + ALLOWANCE * self.costs.plain() + LOSS_SHARE * self._elapsed  # ms that may yet be lost
        if self.options.guard and room < 0:
            return [False] * len(depths), "plain"
        mode, asked = "draft", []
        for member, worth, depth in zip(self.members, self._worth, depths, strict=True):
            cost = self.costs.draft(member.name, worth.depth)
            pays = depth > 0 and self._pays(member, worth, rate)
            if pays and not worth.is_tried and self.options.guard:  # nobody knows it yet: not all of them at once
                pays = cost <= room
                room -= cost if pays else 0.0
            if not pays and depth and worth.is_tried and cost <= worth.probe_share * worth.silent_ms:
                pays, mode = True, "probe" if cost else mode
            asked.append(pays)
        return asked, mode if any(asked) else "plain"

    def _pays(self, member: Member, worth: Worth, rate: float) -> bool:
        cost = self.costs.draft(member.name, worth.depth)
        if worth.is_tried:
            return worth.gain > rate * cost
        # All that could be hoped for, in a step that it pays for alone.
        whole = self.costs.plain() + cost + self.costs.verify(round(worth.depth)) - self.costs.verify(0)
        return (1 + worth.gain) / whole > rate

    def _least_claim(self, member: Member, rate: float) -> float:
        """The least probable path below which one more depth of a draft is worth its time."""
        draft = self.costs.draft(member.name, 2) - self.costs.draft(member.name, 1)
        node = (self.costs.verify(4) - self.costs.verify(0)) / 4
        return rate * (max(draft, 0.0) + max(node, 0.0))

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes to verify. Where members draw, the tree stays as it is: it was cut before its tokens were seen."""
        assert self._step is not None, "plan comes first"
        if not len(tree):
            return tree
        chances = self._chances(tree, None)
        best, value = self._best(tree, chances, self._step.rate)
        self._step.tree, self._step.chances, self._step.value = tree, chances, value
        self._step.num_best = len(best)
        return tree if self._step.is_blind or len(best) == len(tree) else tree.only(best)

    def _chances(self, tree: TokenTree, without: int | None) -> list[float]:
        """The probability that each node is on the path that will be emitted: its owners' corrected claims together; siblings
        share what their parent has if they claim more, whoever comes first.
        """
        claimed: list[float] = []
        sums: dict[int, float] = {}
        for parent, depth, claims in zip(tree.parents, tree.depths, tree.claims, strict=True):
            best, doubt = 0.0, 1.0
            for owner, claim in claims:
                if owner != without:
                    chance = self._claims[owner].chance(default_claim(depth) if claim is None else claim)
                    best = max(best, chance)
                    doubt *= 1 - AGREEMENT * chance
            if best:
                best = 1 - (1 - best) * doubt / (1 - AGREEMENT * best)
            claimed.append(best)
            sums[parent] = sums.get(parent, 0.0) + best
        chances: list[float] = []
        for parent, claim in zip(tree.parents, claimed, strict=True):
            room = 1.0 if parent == ROOT else chances[parent]
            # Rounding must not make a child likelier than its parent: the likeliest nodes are then a tree.
            chances.append(min(claim * room / sums[parent], room) if sums[parent] > room else claim)
        return chances

    def _best(self, tree: TokenTree, chances: Sequence[float], rate: float) -> tuple[list[int], float]:
        """The nodes that are worth most together at the price of `rate`, and that worth: tokens above plain decoding."""
        order = sorted(range(len(tree)), key=lambda node: (-chances[node], node))[: self.options.max_nodes]
        first = self.costs.verify(0)
        total = value = 0.0
        count = 0
        for place, node in enumerate(order, start=1):
            if not chances[node]:
                break
            total += chances[node]
            worth = total - rate * (self.costs.verify(place) - first)
            if worth > value:
                value, count = worth, place
        return order[:count], value

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        """Learn from a step: `tree` is what was verified."""
        assert self._step is not None, "plan comes first"
        step, self._step = self._step, None
        spent = self._spent_ms(step, draft, tree)
        self._learn_claims(draft, commit)
        self._learn_worth(step, draft, commit, spent)
        self._emitted = self._emitted * MEMORY + len(commit.token_ids)
        self._spent = self._spent * MEMORY + spent
        self._width = (1 - LEARNING) * self._width + LEARNING * step.num_best if step.tree is not None else self._width
        plain = self.costs.plain()
        self._elapsed += spent
        self._balance = min(self._balance + len(commit.token_ids) * plain - spent, CREDIT * plain)

    def _spent_ms(self, step: _Step, draft: Draft, tree: TokenTree) -> float:
        """What the table says the step took."""
        spent = self.costs.verify(len(tree)) + self.costs.host_ms
        drafted = depth_drafted(draft, len(self.members))
        for member, worth, planned, depth in zip(self.members, self._worth, step.depths, drafted, strict=True):
            if planned:
                worth.depth += LEARNING * (max(depth, 1) - worth.depth)
                spent += self.costs.draft(member.name, max(depth, 1))
        return spent

    def _learn_claims(self, draft: Draft, commit: Commit) -> None:
        """Compare every proposal with what was emitted, as far as that is known."""
        for calibration in self._claims:
            calibration.steps += 1
        emitted, depths = commit.token_ids, depths_of(draft.parents)
        on_path: list[bool | None] = []  # None: goes on where the emitted tokens end
        for node, (token, parent, depth) in enumerate(zip(draft.token_ids, draft.parents, depths, strict=True)):
            above = True if parent == ROOT else on_path[parent]
            hit = above and (None if depth > len(emitted) else token == emitted[depth - 1])
            on_path.append(hit)
            if hit is not None:
                claim = draft.claim(node)
                self._claims[draft.owner(node)].learn(default_claim(depth) if claim is None else claim, hit)

    def _learn_worth(self, step: _Step, draft: Draft, commit: Commit, spent: float) -> None:
        """A member's worth in this step: the best tree with its proposals against the best one without. It is believed before
        it is known; so a member that was wrong again has not paid, whatever it seemed worth.
        """
        is_right = {
            draft.owner(node)
            for node, parent in enumerate(draft.parents)
            if parent == ROOT and draft.token_ids[node] == commit.token_ids[0]
        }
        for index, (worth, planned) in enumerate(zip(self._worth, step.depths, strict=True)):
            if not planned:
                worth.silent_ms += spent
                continue
            gain = 0.0
            if step.tree is not None and any(owner == index for claims in step.tree.claims for owner, _ in claims):
                gain = step.value - self._best(step.tree, self._chances(step.tree, index), step.rate)[1]
            worth.gain = worth.gain + LEARNING * (gain - worth.gain) if worth.is_tried else gain
            if index in is_right and worth.gain > step.rate * self.costs.draft(self.members[index].name, worth.depth):
                worth.probe_share = FIRST_SHARE
            elif worth.silent_ms:
                worth.probe_share = max(worth.probe_share / 2, LAST_SHARE)
            worth.is_tried, worth.silent_ms = True, 0.0


@dataclass
class _Step:
    """The step at hand: its price of time, what was planned, and the tree before it was cut."""

    rate: float
    depths: tuple[int, ...]
    is_blind: bool
    tree: TokenTree | None = None
    chances: Sequence[float] = ()
    value: float = 0.0
    num_best: int = 0


def default_claim(depth: int) -> float:
    first, factor = NO_CLAIM
    return first * factor ** (depth - 1)
