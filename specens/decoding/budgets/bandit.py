"""budget=bandit: one member drafts alone in a step, chosen by the reward of its earlier steps.

As in BanditSpec (Hou et al. 2025, arXiv 2505.15141) and FlashSpec: the arms are the members, each
with its full draft, and no draft at all; the reward of a step is its tokens per millisecond, by the
recorded cost table. Only the arm that was played is learned about.
"""

from __future__ import annotations

import math
import random
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
from specens.decoding.budgets.costs import CostTable
from specens.decoding.types import IDLE, Commit, Draft, Member, Plan, Share, TokenTree
from specens.errors import check_choice, check_count, check_number

STRATEGIES = ("ucb1", "thompson")


@dataclass(frozen=True, slots=True)
class BanditBudget:
    """Options of budget=bandit. `exploration` scales the bonus of UCB1 (Auer et al. 2002), or the
    spread of Thompson sampling, whose samples come from `seed`; `window` steps are remembered.
    `reset`, `costs` and `refresh` as in budget=cost_aware.
    """

    needs_costs: ClassVar[bool] = True
    name: ClassVar[str] = "bandit"

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
        check_choice("budget.strategy", self.strategy, STRATEGIES)
        check_number("budget.exploration", self.exploration)

    def begin(
        self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None
    ) -> Policy:
        if self.reset == "run" and isinstance(earlier, Bandit):
            earlier.costs = costs
            return earlier
        return Bandit(self, tuple(members), costs)


class Bandit:
    """The decisions of one prompt. Arm i is member i, the last arm AR decoding."""

    rate: float | None = None

    def __init__(
        self, options: BanditBudget, members: tuple[Member, ...], costs: CostTable
    ) -> None:
        self.options, self.members, self.costs = options, members, costs
        self.mode = "draft"
        self._random = random.Random(options.seed)
        self._rewards: list[tuple[int, float]] = []
        self._arm = len(members)

    def plan(self, context: PlanContext) -> Plan:
        most = self.options.max_nodes
        limits = [draft_limit(member, context) if most else 0 for member in self.members]
        arms = [arm for arm, limit in enumerate(limits) if limit] + [len(limits)]
        self._arm = max(arms, key=self._index)
        shares = [
            Share(limit, min(member.num_draft_nodes, most)) if arm == self._arm else IDLE
            for arm, (member, limit) in enumerate(zip(self.members, limits, strict=True))
        ]
        self.mode = "draft" if self._arm < len(shares) else "plain"
        return Plan.of(shares)

    def _index(self, arm: int) -> float:
        """The upper confidence bound of an arm, or its Thompson sample; rewards are counted in the
        greatest seen.
        """
        own = [reward for played, reward in self._rewards if played == arm]
        if not own:
            return math.inf
        greatest = max(reward for _, reward in self._rewards)
        mean = sum(own) / len(own) / greatest
        exploration = self.options.exploration
        if self.options.strategy == "ucb1":
            return mean + exploration * math.sqrt(2 * math.log(len(self._rewards)) / len(own))
        variance = sum((reward / greatest - mean) ** 2 for reward in own) / len(own)
        spread = math.sqrt(variance) if len(own) > 1 else 0.5
        return self._random.gauss(mean, exploration * max(spread, 0.05) / math.sqrt(len(own)))

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        spent = self.costs.verify(len(tree)) + self.costs.host_ms
        if self._arm < len(self.members):
            depth = depth_drafted(draft, len(self.members))[self._arm]
            spent += self.costs.draft(self.members[self._arm].name, max(depth, 1))
        reward = (self._arm, len(commit.token_ids) / spent)
        self._rewards = [*self._rewards, reward][-self.options.window :]
