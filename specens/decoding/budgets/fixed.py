"""budget=fixed and budget=priority: budgets that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from specens.decoding.budgets.base import PlanContext, Policy, draft_limit
from specens.decoding.budgets.costs import CostTable
from specens.decoding.types import IDLE, Commit, Draft, Member, Plan, Share, TokenTree
from specens.errors import check_count, check_flag


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Every member drafts its own full length in every step; the merged tree keeps at most
    `max_nodes` nodes.

    With `first_only` (budget=priority), the first member in the ensemble's order that proposes
    something drafts alone: what serving engines do when several drafters are configured. The
    members after it stay idle.
    """

    needs_costs: ClassVar[bool] = False

    max_nodes: int = 64
    first_only: bool = False

    def __post_init__(self) -> None:
        check_count("budget.max_nodes", self.max_nodes, 0)
        check_flag("budget.first_only", self.first_only)

    @property
    def name(self) -> str:
        if type(self) is not FixedBudget:
            return type(self).__name__
        return "priority" if self.first_only else "fixed"

    @property
    def schedules_all(self) -> bool:
        """Whether every member drafts in every step, so that one merge of all proposals tells what
        any subset of the members would have done.
        """
        return type(self) is FixedBudget and not self.first_only

    @property
    def mode(self) -> str:
        return "draft"

    @property
    def rate(self) -> None:
        return None

    @property
    def reset(self) -> str:
        return "prompt"

    @property
    def costs(self) -> None:
        return None

    @property
    def refresh(self) -> bool:
        return False

    def begin(
        self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None
    ) -> Policy:
        return self

    def plan(self, context: PlanContext) -> Plan:
        shares = [full_share(member, context) for member in context.members]
        plan = Plan.of(shares if self.max_nodes else [IDLE] * len(shares), self.max_nodes)
        return replace(plan, first_only=self.first_only) if self.first_only else plan

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None: ...


def full_share(member: Member, context: PlanContext) -> Share:
    """As deep as the member may draft, and all of its nodes."""
    depth = draft_limit(member, context)
    return Share(depth, member.num_draft_nodes) if depth else IDLE
