"""Who drafts how much in a step. Pure and without torch: replay runs this very code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from specens.decoding.costs import CostTable, read_costs
from specens.decoding.types import Commit, Draft, Member, Plan, TokenTree, depths_of
from specens.errors import UserError, check_count


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What a budget may look at: the members, the committed length, and how many more tokens the step may emit
    (what is left of max_new_tokens and of the target's context, whichever is less; at least 1). `is_blind`: members draw with
    noise of their own, so that nodes have to be chosen before their tokens are seen.
    """

    members: tuple[Member, ...]
    context_tokens: int
    tokens_wanted: int
    is_blind: bool = False


RESETS = ("prompt", "run")
"""When a budget forgets what it has learned."""


class Policy(Protocol):
    """A budget at work on one prompt. What it decides follows from what it was told, never from a clock."""

    def plan(self, context: PlanContext) -> Plan:
        """Before anybody drafts: who does, and how much."""
        ...

    def select(self, tree: TokenTree) -> TokenTree:
        """After merging: the nodes to verify, each with its parent. A tree with draws stays as it is."""
        ...

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        """What was proposed, what of it was verified, and what was emitted."""
        ...


class Budget(Protocol):
    """The options of a policy, and its beginning.

    `max_nodes` is the widest tree, `needs_costs` says whether the policy wants to know what a step costs here: from the file
    `costs`, or else measured, and with `refresh` moved to what finished prompts took. `reset` says when it forgets.
    """

    needs_costs: ClassVar[bool]

    @property
    def max_nodes(self) -> int: ...

    @property
    def reset(self) -> str: ...

    @property
    def costs(self) -> str | None: ...

    @property
    def refresh(self) -> bool: ...

    def begin(self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None) -> Policy:
        """The policy of a new prompt; `earlier` is that of the prompt before, for budgets that remember."""
        ...


def check_learning(budget: Budget) -> None:
    """Refuse the options that all budgets that learn have in common."""
    check_count("budget.max_nodes", budget.max_nodes, 0)
    if budget.reset not in RESETS:
        raise UserError(f"budget.reset={budget.reset}: choose one of {', '.join(RESETS)}")
    if not isinstance(budget.refresh, bool):
        raise UserError(f"budget.refresh={budget.refresh!r}: give true or false")
    if budget.costs is not None:
        read_costs(str(budget.costs))


def draft_limit(member: Member, context: PlanContext) -> int:
    """How deep a member may draft: its own setting, one less than the tokens still wanted (the step's last token is the
    target's own), and its own context, in which the committed tokens and its draft must fit.
    """
    depth = min(member.num_draft_tokens, context.tokens_wanted - 1)
    if member.context_limit is not None:
        depth = min(depth, member.context_limit - context.context_tokens)
    return max(depth, 0)


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Every member drafts its own full length in every step; the merged tree keeps at most `max_nodes` nodes.

    With `first_only` (budget=priority), the first member in the ensemble's order that has something to say drafts alone: what
    serving engines do when several drafters are configured. The members after it are not asked and count as silent.
    """

    needs_costs: ClassVar[bool] = False

    max_nodes: int = 64
    first_only: bool = False

    def __post_init__(self) -> None:
        check_count("budget.max_nodes", self.max_nodes, 0)

    @property
    def reset(self) -> str:
        return "prompt"

    @property
    def costs(self) -> None:
        return None

    @property
    def refresh(self) -> bool:
        return False

    def begin(self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None) -> Policy:
        return self

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None: ...

    def plan(self, context: PlanContext) -> Plan:
        depths = [draft_limit(member, context) if self.max_nodes else 0 for member in context.members]
        shares = tuple(
            Plan(depth, member.num_draft_nodes if depth else 0)
            for member, depth in zip(context.members, depths, strict=True)
        )
        # A plain drafter has one member: the whole plan is then that member's own.
        num_nodes = min(sum(share.num_nodes for share in shares), self.max_nodes)
        return Plan(max(depths, default=0), num_nodes, shares, self.first_only)


def depth_drafted(draft: Draft, num_members: int) -> list[int]:
    """The depth of every member's own proposal."""
    deepest = [0] * num_members
    for node, depth in enumerate(depths_of(draft.parents)):
        owner = draft.owner(node)
        deepest[owner] = max(deepest[owner], depth)
    return deepest
