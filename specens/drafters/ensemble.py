"""Several drafters as one: a drafter made of named drafters."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specens.decoding.dense import Passage, everywhere
from specens.decoding.drafter import Conditioned, Drafter, describe
from specens.decoding.merge import side_by_side
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan
from specens.errors import DrafterError, UserError

MAX_MEMBERS = 62
"""A node's owners are a bit mask, stored as a 64-bit number."""


class Ensemble:
    """Named members that all draft in every step. Their forests stand one after another in one Draft, each node with its
    owner; merging them is not the ensemble's business. Without members it is plain decoding. A member with several
    members of its own shows them as `outer/inner`.
    """

    def __init__(self, members: Mapping[str, Drafter] | None = None) -> None:
        self._drafters = dict(members or {})
        for name, member in self._drafters.items():
            if not name or "/" in name or isinstance(member, type) or not isinstance(member, Drafter):
                raise UserError(
                    f"drafter.members.{name}: a member needs a name without '/' and a drafter, got {reprlib.repr(member)}"
                )
        self._members: tuple[Member, ...] | None = None
        self._conditioned: tuple[Conditioned, ...] = ()
        if len(self.members) > MAX_MEMBERS:
            raise UserError(f"an ensemble has at most {MAX_MEMBERS} members, got {len(self.members)}")

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members or tuple(
            replace(inner, name=name if len(drafter.members) == 1 else f"{name}/{inner.name}")
            for name, drafter in self._drafters.items()
            for inner in drafter.members
        )

    def facts(self) -> dict[str, Any]:
        return {name: describe(drafter) for name, drafter in self._drafters.items()}

    def bind(self, target: Target) -> None:
        self._members = None
        for drafter in self._drafters.values():
            drafter.bind(target)
        # Asked for several times a step, and only a bind changes them.
        self._members = self.members
        self._conditioned = tuple(drafter for drafter in self._drafters.values() if isinstance(drafter, Conditioned))

    def start(self, prompt_ids: Sequence[int]) -> None:
        for drafter in self._drafters.values():
            drafter.start(prompt_ids)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for drafter in self._conditioned for layer in drafter.hidden_layers}))

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        for drafter in self._conditioned:
            drafter.condition(hidden)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        parts: list[Draft] = []
        seconds: list[float] = []
        for (name, drafter), share in zip(self._drafters.items(), self._plans(plan), strict=True):
            silent = share.num_tokens == 0 or (plan.first_only and any(map(len, parts)))
            begin = time.perf_counter()
            draft = Draft() if silent else _ask(name, drafter.propose, context_ids, share, sampler.fork(name))
            elapsed = time.perf_counter() - begin
            parts.append(draft)
            seconds += draft.seconds or ([elapsed] + [0.0] * len(drafter.members))[: len(drafter.members)]
        return replace(side_by_side(parts, self._sizes), seconds=tuple(seconds))

    def propose_everywhere(self, text: Passage, plans: Sequence[Plan]) -> list[Draft]:
        shares = [self._plans(plan) for plan in plans]
        parts = [
            _ask(name, everywhere, drafter, text, [share[place] for share in shares])
            for place, (name, drafter) in enumerate(self._drafters.items())
        ]
        return [side_by_side(drafts, self._sizes) for drafts in zip(*parts, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        return [len(drafter.members) for drafter in self._drafters.values()]

    def _plans(self, plan: Plan) -> list[Plan]:
        """What each drafter is to do."""
        shares = iter(plan.members or [plan] * len(self.members))
        return [_plan_of([next(shares) for _ in drafter.members], plan) for drafter in self._drafters.values()]

    def observe(self, commit: Commit) -> None:
        for drafter in self._drafters.values():
            drafter.observe(commit)


def _plan_of(shares: list[Plan], plan: Plan) -> Plan:
    """The plan of one member: its own share, or the shares of an inner ensemble under one roof."""
    if len(shares) == 1:
        return shares[0]
    depth = max((share.num_tokens for share in shares), default=0)
    return Plan(depth, sum(share.num_nodes for share in shares), tuple(shares), plan.first_only)


def _ask(name: str, question: Callable[..., Any], *arguments: Any) -> Any:
    """What a member proposes; an error that says whose it is."""
    try:
        said = question(*arguments)
    except Exception as error:
        raise DrafterError(f"drafter {name}: {type(error).__name__}: {error}") from error
    for draft in said if isinstance(said, list) else (said,):
        if not isinstance(draft, Draft):
            raise DrafterError(f"drafter {name}: proposed {type(draft).__name__}, not a Draft")
    return said
