"""Several drafters as one: a drafter made of named drafters."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from specens.decoding.dense import FinishedText, propose_all
from specens.decoding.drafter import Drafter, Proposer, close, condition, facts_of, hidden_layers
from specens.decoding.merge import side_by_side
from specens.decoding.sampling import Sampler
from specens.decoding.schedule import propose_in_order
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan
from specens.errors import DrafterError, UserError, check_list

MAX_MEMBERS = 62
"""A node's owners are a bit mask, stored as a 64-bit number."""


class Ensemble:
    """Named members that all draft in every step. Their forests stand one after another in one
    Draft, each node with its owner; merging them is not the ensemble's business. Without members it
    is AR decoding. A member with several members of its own shows them as `outer/inner`.

    `only` chooses some of `members`, in the order given (None: all).
    """

    def __init__(
        self, members: Mapping[str, Drafter] | None = None, only: list[str] | None = None
    ) -> None:
        self.drafters = _chosen(dict(members or {}), only)
        for name, drafter in self.drafters.items():
            is_class = isinstance(drafter, type)  # a class has the names too
            if not name or "/" in name or is_class or not isinstance(drafter, Drafter):
                raise UserError(f"drafter.members.{name}: {_fault(name, drafter)}")
        if len(self.members) > MAX_MEMBERS:
            raise UserError(
                f"an ensemble has at most {MAX_MEMBERS} members, got {len(self.members)}"
            )

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(
            replace(inner, name=name if len(drafter.members) == 1 else f"{name}/{inner.name}")
            for name, drafter in self.drafters.items()
            for inner in drafter.members
        )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        drafters = self.drafters.values()
        return tuple(sorted({layer for one in drafters for layer in hidden_layers(one)}))

    def facts(self) -> dict[str, Any]:
        return {name: facts_of(drafter) for name, drafter in self.drafters.items()}

    def bind(self, target: Target) -> None:
        for name, drafter in self.drafters.items():
            _call(name, drafter.bind, target)

    def begin(self, prompt_ids: Sequence[int]) -> EnsembleProposer:
        proposers: dict[str, Proposer] = {}
        with ExitStack() as opened:  # closed where a later member fails
            for name, drafter in self.drafters.items():
                proposers[name] = _call(name, drafter.begin, prompt_ids)
                opened.callback(close, proposers[name])
            opened.pop_all()
        return EnsembleProposer(proposers, self._sizes)

    def propose_batch(self, text: FinishedText, plans: Sequence[Plan]) -> list[Draft]:
        named = zip(self.drafters.items(), _bounds(self._sizes), strict=True)
        parts: list[list[Draft]] = []
        for (name, drafter), bounds in named:
            own = [plan.part(*bounds) for plan in plans]
            drafts = _call(name, propose_all, drafter, text, own)
            parts.append([_draft_of(name, draft) for draft in drafts])
        return [side_by_side(drafts, self._sizes) for drafts in zip(*parts, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        return [len(drafter.members) for drafter in self.drafters.values()]


class EnsembleProposer:
    """The proposers of one sequence, called in turn."""

    def __init__(self, proposers: Mapping[str, Proposer], sizes: Sequence[int]) -> None:
        self._names, self._proposers = list(proposers), list(proposers.values())
        self._sizes, self._bounds = sizes, _bounds(sizes)

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        for proposer in self._proposers:
            condition(proposer, hidden)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        seconds: list[float] = [0.0] * len(self._proposers)

        def propose(place: int, part: Plan) -> Draft:
            name, begin = self._names[place], time.perf_counter()
            call = self._proposers[place].propose
            draft = _draft_of(name, _call(name, call, context_ids, part, sampler.fork(name)))
            seconds[place] = time.perf_counter() - begin
            return draft

        parts = [plan.part(*bounds) for bounds in self._bounds]
        drafts = propose_in_order(parts, plan.first_only, propose)
        took: list[float] = []
        scheduled: list[bool] = []
        for draft, size, elapsed in zip(drafts, self._sizes, seconds, strict=True):
            was_called = draft is not None
            took += (was_called and draft.seconds) or ([elapsed] + [0.0] * size)[:size]
            scheduled += (was_called and draft.scheduled) or [was_called] * size
        whole = side_by_side([draft or Draft() for draft in drafts], self._sizes)
        return replace(whole, seconds=tuple(took), scheduled=tuple(scheduled))

    def observe(self, commit: Commit) -> None:
        for name, proposer in zip(self._names, self._proposers, strict=True):
            if not hasattr(proposer, "observe"):
                raise DrafterError(
                    f"drafter {name}: {type(proposer).__name__} has no observe(commit), see "
                    "docs/extending.md"
                )
            _call(name, proposer.observe, commit)

    def close(self) -> None:
        for proposer in self._proposers:
            close(proposer)


def _chosen(members: dict[str, Drafter], only: list[str] | None) -> dict[str, Drafter]:
    if only is None:
        return members
    check_list("drafter.only", only, str, "[ngram,retrieval]")
    for place, name in enumerate(only):
        if name in only[:place]:
            raise UserError(f"drafter=[{','.join(only)}]: {name} stands there twice")
        if name not in members:
            raise UserError(
                f"drafter=[{','.join(only)}]: the ensemble has no member {name}; it has "
                f"{', '.join(members)}; add one with +drafter@drafter.members.{name}={name}"
            )
    return {name: members[name] for name in only}


def _fault(name: str, drafter: object) -> str:
    if hasattr(drafter, "start") and not hasattr(drafter, "begin"):
        return (
            f"{type(drafter).__name__} has start() and no begin(): a drafter now makes a proposer "
            "for every sequence, see docs/extending.md"
        )
    return f"a member needs a name without '/' and a drafter, got {reprlib.repr(drafter)}"


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each drafter's members begin and end among all of them."""
    bounds, begin = [], 0
    for size in sizes:
        bounds.append((begin, begin + size))
        begin += size
    return bounds


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a member returns; an error that says whose it is. What a user can put right is said in
    the words of the one who found it.
    """
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:
        raise DrafterError(f"drafter {name}: {type(error).__name__}: {error}") from error


def _draft_of(name: str, proposed: Any) -> Draft:
    if not isinstance(proposed, Draft):
        raise DrafterError(f"drafter {name}: proposed {type(proposed).__name__}, not a Draft")
    return proposed
