"""Budgets: who drafts how much in a step, and what is verified. Pure and without torch: replay runs
the very same code.

A budget of your own is one class with the names of `Budget`, and a policy with those of `Policy`
(docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from specens.decoding.budgets.costs import CostTable, read_costs
from specens.decoding.types import Commit, Draft, Member, Plan, TokenTree, depths_of
from specens.errors import check_choice, check_count, check_flag


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What a budget may look at: the members, the committed length, and how many more tokens the
    step may emit (what is left of max_new_tokens and of the target's context, whichever is less; at
    least 1). `is_blind`: members sample with noise of their own, so that nodes have to be chosen
    before their tokens are seen.
    """

    members: tuple[Member, ...]
    context_tokens: int
    tokens_wanted: int
    is_blind: bool = False


RESETS = ("prompt", "run")
"""When a budget forgets what it has learned."""


class Policy(Protocol):
    """A budget at work on one prompt. Its decisions follow from what it is given, never from a
    clock, so that a replay makes the same ones.

    `mode` and `rate` describe the step that was planned last, for the records: `draft`, `probe` (to
    learn what a member gains) or `plain` (AR decoding), and the tokens per millisecond that the
    step had to exceed (None: no such notion).
    """

    @property
    def mode(self) -> str: ...

    @property
    def rate(self) -> float | None: ...

    def plan(self, context: PlanContext) -> Plan:
        """Before anybody drafts: who does, and how much."""
        ...

    def select(self, tree: TokenTree) -> TokenTree:
        """After merging: the nodes to verify, each with its parent. A tree with samples stays as it
        is.
        """
        ...

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        """What was proposed, what of it was verified, and what was emitted."""
        ...


class Budget(Protocol):
    """The options of a policy, and its beginning.

    `max_nodes` is the most nodes of a tree. `needs_costs`: the policy wants to know what a step
    costs here, from the file `costs`, or else measured, and with `refresh` moved to what finished
    prompts took. `reset` says when it forgets.
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

    def begin(
        self, members: Sequence[Member], costs: CostTable, earlier: Policy | None = None
    ) -> Policy:
        """The policy of a new prompt; `earlier` is that of the prompt before, for budgets that
        remember.
        """
        ...


def budget_name(budget: Budget) -> str:
    """What a budget is called on pages: its own `name` if it has one, else its class."""
    return str(getattr(budget, "name", type(budget).__name__))


def check_learning(budget: Budget) -> None:
    """Refuse the options that all budgets that learn have in common."""
    check_count("budget.max_nodes", budget.max_nodes, 0)
    check_choice("budget.reset", budget.reset, RESETS)
    check_flag("budget.refresh", budget.refresh)
    if budget.costs is not None:
        read_costs(str(budget.costs))


def draft_limit(member: Member, context: PlanContext) -> int:
    """How deep a member may draft: its own setting, one less than the tokens still wanted (the
    step's last token is the target's own), and its own context, in which the committed tokens and
    its draft must fit.
    """
    depth = min(member.num_draft_tokens, context.tokens_wanted - 1)
    if member.context_limit is not None:
        depth = min(depth, member.context_limit - context.context_tokens)
    return max(depth, 0)


def depth_drafted(draft: Draft, num_members: int) -> list[int]:
    """The depth of every member's own proposal."""
    deepest = [0] * num_members
    for node, depth in enumerate(depths_of(draft.parents)):
        owner = draft.owner(node)
        deepest[owner] = max(deepest[owner], depth)
    return deepest
