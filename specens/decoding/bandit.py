"""budget=bandit: one member drafts alone in a step, chosen by what it has earned: what the field compares several drafters with.

As in BanditSpec (Hou et al. 2025, arXiv 2505.15141) and FlashSpec: the arms are the members, each with its full draft, and no
draft at all; the reward of a step is its tokens per millisecond, by the recorded cost table. Only the arm that was played is
learned about.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specens.decoding.budget import PlanContext, Policy, check_learning, depth_drafted, draft_limit
from specens.decoding.costs import CostTable
from specens.decoding.types import Commit, Draft, Member, Plan, TokenTree
from specens.errors import UserError, check_count, check_number

STRATEGIES = ("ucb1", "thompson")


@dataclass(frozen=True, slots=True)
class BanditBudget:
    """Options of budget=bandit. `exploration` scales the bonus of UCB1 (Auer et al. 2002), or the spread of Thompson's draws,
    which come from `seed`; `window` steps are remembered. `reset`, `costs` and `refresh` as in budget=cost_aware.
    """

    needs_costs: ClassVar[bool] = True

    max_nodes: int = 64
    strategy: str = "ucb1"
    exploration: float = 1.0
    window: int = 500
    seed: int = 0
    reset: str = "prompt"
    costs: str | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        check_learning(self)
        check_count("budget.window", self.window)
        check_count("budget.seed", self.seed, 0)
        if self.strategy not in STRATEGIES:
            raise UserError(f"budget.strategy={self.strategy}: choose one of {', '.join(STRATEGIES)}")
        check_number("budget.exploration", self.exploration)

    def begin(self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None) -> Policy:
        if self.reset == "run" and isinstance(earlier, Bandit):
            earlier.costs = costs
            return earlier
        return Bandit(self, tuple(members), costs)


class Bandit:
    """The decisions of one prompt. Arm i is member i, the last arm plain decoding."""

    def __init__(self, options: BanditBudget, members: tuple[Member, ...], costs: CostTable) -> None:
        self.options, self.members, self.costs = options, members, costs
        self._random = random.Random(options.seed)
        self._rewards: list[tuple[int, float]] = []
        self._arm = len(members)
        self._planned = 0

    def plan(self, context: PlanContext) -> Plan:
        limits = [draft_limit(member, context) if self.options.max_nodes else 0 for member in self.members]
        arms = [arm for arm, limit in enumerate(limits) if limit] + [len(limits)]
        self._arm = max(arms, key=self._index)
        shares = tuple(
            Plan(limit, min(member.num_draft_nodes, self.options.max_nodes)) if arm == self._arm else Plan(0, 0)
            for arm, (member, limit) in enumerate(zip(self.members, limits, strict=True))
        )
        chosen = shares[self._arm] if self._arm < len(shares) else Plan(0, 0)
        self._planned = chosen.num_tokens
        return Plan(chosen.num_tokens, chosen.num_nodes, shares, mode="draft" if chosen.num_tokens else "plain")

    def _index(self, arm: int) -> float:
        """What the arm may be worth: rewards are counted in the greatest seen."""
        own = [reward for played, reward in self._rewards if played == arm]
        if not own:
            return math.inf
        greatest = max(reward for _, reward in self._rewards)
        mean = sum(own) / len(own) / greatest
        if self.options.strategy == "ucb1":
            return mean + self.options.exploration * math.sqrt(2 * math.log(len(self._rewards)) / len(own))
        spread = math.sqrt(sum((reward / greatest - mean) ** 2 for reward in own) / len(own)) if len(own) > 1 else 0.5
        return self._random.gauss(mean, self.options.exploration * max(spread, 0.05) / math.sqrt(len(own)))

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        spent = self.costs.verify(len(tree)) + self.costs.host_ms
        if self._planned:
            depth = depth_drafted(draft, len(self.members))[self._arm]
            spent += self.costs.draft(self.members[self._arm].name, max(depth, 1))
        self._rewards = [*self._rewards, (self._arm, len(commit.token_ids) / spent)][-self.options.window :]
