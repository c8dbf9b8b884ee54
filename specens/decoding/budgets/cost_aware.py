"""budget=cost_aware: who drafts, how deep, and which nodes are verified, for the most tokens per
second.

The long-run rate of tokens per second is greatest when every step maximises

    E[emitted tokens] - rate * cost_ms

with the rate itself (tokens per millisecond, as reached so far) as the price of time: renewal
reward, solved by Dinkelbach's iteration (1967). So a node is verified when its calibrated
probability exceeds the rate times what it adds to the forward, and a member drafts when what it
adds to the best tree exceeds the rate times what its draft costs. Costs come from a recorded table
(`costs.CostTable`), probabilities from the members' own confidences, calibrated online: every
proposal is compared with the emitted tokens, verified or not.

No clock is read here, so replay makes the same decisions from the same records. Formulas and
constants: docs/budgets.md, `tuning.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specens.decoding.budgets.base import (
    PlanContext,
    Policy,
    check_learning,
    depth_drafted,
    draft_limit,
)
from specens.decoding.budgets.calibration import Calibration
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.gain import Gain
from specens.decoding.budgets.guard import Guard
from specens.decoding.budgets.tuning import TUNING, default_confidence
from specens.decoding.types import (
    IDLE,
    ROOT,
    Commit,
    Draft,
    Member,
    Plan,
    Share,
    TokenTree,
    depths_of,
)
from specens.errors import check_flag


@dataclass(frozen=True, slots=True)
class CostAwareBudget:
    """Options of budget=cost_aware. `max_nodes` is the most nodes of a tree; `guard`: AR
    decoding while drafting loses. `reset`: what is learned is forgotten with every prompt, or only
    with the run (results then depend on the order of prompts).

    `costs` is a file with a cost table, and decisions are then the same on every machine; by
    default the table is measured at the start. `refresh`: move a measured table to what each
    finished prompt took.
    """

    needs_costs: ClassVar[bool] = True
    name: ClassVar[str] = "cost_aware"

    max_nodes: int = 64
    guard: bool = True
    reset: str = "prompt"
    costs: str | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        check_learning(self)
        check_flag("budget.guard", self.guard)

    def begin(
        self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None
    ) -> Policy:
        if self.reset == "run" and isinstance(earlier, CostAware):
            earlier.costs = costs
            return earlier
        return CostAware(self, tuple(members), costs)


@dataclass
class _Step:
    """The step at hand: its rate, the planned depths, and the tree before it was cut, with the
    expected gain of its best part over AR decoding.
    """

    rate: float
    depths: tuple[int, ...]
    is_blind: bool
    tree: TokenTree | None = None
    gain: float = 0.0
    num_best: int = 0


class CostAware:
    """The decisions of one prompt. `emitted` tokens and `spent_ms` by the cost table decay by step;
    their ratio is the rate reached of late. `width` is the smoothed number of nodes worth
    verifying, for drafts that must be cut before they are seen.
    """

    def __init__(
        self, options: CostAwareBudget, members: tuple[Member, ...], costs: CostTable
    ) -> None:
        self.options, self.members, self.costs = options, members, costs
        self.mode = "draft"
        self.calibrations = [Calibration() for _ in members]
        self.gains = [Gain.of(member) for member in members]
        self.guard = Guard()
        self._emitted = self._spent_ms = 0.0
        self._width = float(options.max_nodes)
        self._step = _Step(0.0, (), False)

    @property
    def rate(self) -> float:
        """Tokens per millisecond that the step planned last had to exceed."""
        return self._step.rate

    def _current_rate(self) -> float:
        """What has been reached of late, and no less than AR decoding's."""
        plain = 1 / self.costs.plain()
        return max(plain, self._emitted / self._spent_ms) if self._spent_ms else plain

    def plan(self, context: PlanContext) -> Plan:
        rate, most = self._current_rate(), self.options.max_nodes
        depths = [draft_limit(member, context) if most else 0 for member in self.members]
        scheduled, self.mode = self._schedule(depths, rate)
        shares = [
            Share(depth, member.num_draft_nodes, self._least_confidence(member, rate))
            if is_scheduled
            else IDLE
            for member, depth, is_scheduled in zip(self.members, depths, scheduled, strict=True)
        ]
        if context.is_blind:
            most = min(most, max(round(self._width), 1))
        self._step = _Step(rate, tuple(share.num_tokens for share in shares), context.is_blind)
        return Plan.of(shares, most)

    def _schedule(self, depths: Sequence[int], rate: float) -> tuple[list[bool], str]:
        """Who drafts, and the mode of the step."""
        room_ms = self.guard.room_ms(self.costs.plain())
        if self.options.guard and room_ms < 0:
            return [False] * len(depths), "plain"
        mode, scheduled = "draft", []
        for member, gain, depth in zip(self.members, self.gains, depths, strict=True):
            cost_ms = self.costs.draft(member.name, gain.depth)
            pays = depth > 0 and gain.pays(cost_ms, self.costs, rate)
            if pays and not gain.is_tried and self.options.guard:  # not all untried ones at once
                pays = cost_ms <= room_ms
                room_ms -= cost_ms if pays else 0.0
            if not pays and depth and gain.may_probe(cost_ms):
                pays, mode = True, "probe" if cost_ms else mode
            scheduled.append(pays)
        return scheduled, mode if any(scheduled) else "plain"

    def _least_confidence(self, member: Member, rate: float) -> float:
        """The least probable path below which one more depth of a draft is worth its time."""
        draft_ms = self.costs.draft(member.name, 2) - self.costs.draft(member.name, 1)
        node_ms = (self.costs.verify(4) - self.costs.verify(0)) / 4
        return rate * (max(draft_ms, 0.0) + max(node_ms, 0.0))

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes to verify. Where members sample, the tree stays as it is: it was cut before its
        tokens were seen.
        """
        if not len(tree):
            return tree
        step = self._step
        best, step.gain = self._best(tree, self._probabilities(tree, None), step.rate)
        step.tree, step.num_best = tree, len(best)
        return tree if step.is_blind or len(best) == len(tree) else tree.only(best)

    def _probabilities(self, tree: TokenTree, without: int | None) -> list[float]:
        """The probability that each node is on the path that will be emitted, from its owners but
        `without`.

        With p the largest of the owners' calibrated probabilities p_d, and a = `agreement`, a node
        has 1 - (1 - p) prod_d (1 - a p_d) / (1 - a p). Siblings that together exceed their parent
        share what the parent has.
        """
        own: list[float] = []
        sums: dict[int, float] = {}
        a = TUNING.agreement
        for parent, depth, confidences in zip(
            tree.parents, tree.depths, tree.confidences, strict=True
        ):
            best, doubt = 0.0, 1.0
            for owner, confidence in confidences:
                if owner != without:
                    known = default_confidence(depth) if confidence is None else confidence
                    probability = self.calibrations[owner].probability(known)
                    best = max(best, probability)
                    doubt *= 1 - a * probability
            if best:
                best = 1 - (1 - best) * doubt / (1 - a * best)
            own.append(best)
            sums[parent] = sums.get(parent, 0.0) + best
        probabilities: list[float] = []
        for parent, mine in zip(tree.parents, own, strict=True):
            room = 1.0 if parent == ROOT else probabilities[parent]
            # Rounding must not make a child likelier than its parent: the likeliest nodes are then
            # a tree.
            shared = min(mine * room / sums[parent], room) if sums[parent] > room else mine
            probabilities.append(shared)
        return probabilities

    def _best(
        self, tree: TokenTree, probabilities: Sequence[float], rate: float
    ) -> tuple[list[int], float]:
        """The nodes with the greatest expected tokens - rate * added verification time together,
        and that value: tokens above AR decoding.
        """
        order = sorted(range(len(tree)), key=lambda node: (-probabilities[node], node))
        first = self.costs.verify(0)
        total = best_value = 0.0
        count = 0
        for place, node in enumerate(order[: self.options.max_nodes], start=1):
            if not probabilities[node]:
                break
            total += probabilities[node]
            value = total - rate * (self.costs.verify(place) - first)
            if value > best_value:
                best_value, count = value, place
        return order[:count], best_value

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        """Learn from a step: `tree` is what was verified."""
        step, num_emitted = self._step, len(commit.token_ids)
        spent_ms = self._spent(step, draft, tree)
        self._calibrate(draft, commit)
        self._learn_gains(step, draft, commit, spent_ms)
        self._emitted = self._emitted * TUNING.decay + num_emitted
        self._spent_ms = self._spent_ms * TUNING.decay + spent_ms
        if step.tree is not None:
            smoothing = TUNING.smoothing
            self._width = (1 - smoothing) * self._width + smoothing * step.num_best
        self.guard.observe(num_emitted, spent_ms, self.costs.plain())

    def _spent(self, step: _Step, draft: Draft, tree: TokenTree) -> float:
        """Milliseconds of the step, by the table."""
        spent = self.costs.verify(len(tree)) + self.costs.host_ms
        drafted = depth_drafted(draft, len(self.members))
        for member, gain, planned, depth in zip(
            self.members, self.gains, step.depths, drafted, strict=True
        ):
            if planned:
                gain.observe_depth(max(depth, 1))
                spent += self.costs.draft(member.name, max(depth, 1))
        return spent

    def _calibrate(self, draft: Draft, commit: Commit) -> None:
        """Compare every proposal with what was emitted, as far as that is known."""
        for calibration in self.calibrations:
            calibration.steps += 1
        emitted = commit.token_ids
        on_path: list[bool | None] = []  # None: goes on where the emitted tokens end
        for node, depth in enumerate(depths_of(draft.parents)):
            parent = draft.parents[node]
            above = True if parent == ROOT else on_path[parent]
            known = None if depth > len(emitted) else draft.token_ids[node] == emitted[depth - 1]
            hit = above and known
            on_path.append(hit)
            if hit is not None:
                confidence = draft.confidence(node)
                known_confidence = default_confidence(depth) if confidence is None else confidence
                self.calibrations[draft.owner(node)].learn(known_confidence, hit)

    def _learn_gains(self, step: _Step, draft: Draft, commit: Commit, spent_ms: float) -> None:
        """A member's gain in this step: the value of the best tree with its proposals less that of
        the best one without. Probabilities are optimistic at first, so a member that was wrong did
        not gain, whatever its proposals seemed worth.
        """
        first = commit.token_ids[0]
        is_right = {
            draft.owner(node)
            for node, parent in enumerate(draft.parents)
            if parent == ROOT and draft.token_ids[node] == first
        }
        for index, (gain, planned) in enumerate(zip(self.gains, step.depths, strict=True)):
            if not planned:
                gain.idle_ms += spent_ms
                continue
            tokens = 0.0
            if step.tree is not None and _has_owner(step.tree, index):
                others = self._probabilities(step.tree, index)
                tokens = step.gain - self._best(step.tree, others, step.rate)[1]
            cost_ms = self.costs.draft(self.members[index].name, gain.depth)
            gain.learn(tokens, index in is_right, step.rate * cost_ms)


def _has_owner(tree: TokenTree, index: int) -> bool:
    return any(owner == index for confidences in tree.confidences for owner, _ in confidences)
