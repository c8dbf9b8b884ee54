"""What a member's drafts add to a step, estimated from its earlier ones; and when to probe it."""

from __future__ import annotations

from dataclasses import dataclass

from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.tuning import TUNING
from specens.decoding.types import Member


@dataclass
class Gain:
    """Of one member: `tokens` per step beyond what the others would have brought, verification paid
    for, and the `depth` of its drafts, both smoothed. `idle_ms` have passed since it last drafted;
    `probe_share` of them may go into probing it. Until it `is_tried`, the estimate is optimistic.
    """

    tokens: float
    depth: float
    probe_share: float = TUNING.probe_shares[0]
    idle_ms: float = 0.0
    is_tried: bool = False

    @classmethod
    def of(cls, member: Member) -> Gain:
        depth, rate = member.num_draft_tokens, TUNING.optimistic_hit_rate
        return cls(tokens=sum(rate**i for i in range(1, depth + 1)), depth=depth)

    def pays(self, cost_ms: float, costs: CostTable, rate: float) -> bool:
        """Whether drafting at this cost is expected to raise the tokens per millisecond above
        `rate`; of a member that was never tried, whether its optimistic gain would in a step of its
        own.
        """
        if self.is_tried:
            return self.tokens > rate * cost_ms
        wide_ms = costs.verify(round(self.depth))
        return (1 + self.tokens) / (costs.plain() + cost_ms + wide_ms - costs.verify(0)) > rate

    def may_probe(self, cost_ms: float) -> bool:
        return self.is_tried and cost_ms <= self.probe_share * self.idle_ms

    def observe_depth(self, depth: int) -> None:
        self.depth += TUNING.smoothing * (depth - self.depth)

    def learn(self, tokens: float, is_right: bool, cost_tokens: float) -> None:
        """`tokens` that its draft of this step was worth; a first step replaces the optimistic
        estimate. A member that was right and pays (`cost_tokens`: rate * its cost) may be probed as
        often as at first again, any other half as often.
        """
        old, weight = self.tokens, TUNING.smoothing
        self.tokens = old + weight * (tokens - old) if self.is_tried else tokens
        if is_right and self.tokens > cost_tokens:
            self.probe_share = TUNING.probe_shares[0]
        elif self.idle_ms:
            self.probe_share = max(self.probe_share / 2, TUNING.probe_shares[1])
        self.is_tried, self.idle_ms = True, 0.0
