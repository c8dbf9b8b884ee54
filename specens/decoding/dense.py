"""trace=dense: what every member proposes at every position of a text, not only where steps began. Greedy and keyed sampling give
one text whoever drafts, so these proposals say exactly what any other team of the same members would have done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from specens.decoding.budget import FixedBudget, PlanContext
from specens.decoding.drafter import Drafter, condition, describe, hidden_layers
from specens.decoding.merge import part_of, side_by_side
from specens.decoding.types import Commit, Draft, Member, Plan

if TYPE_CHECKING:
    from specens.decoding.sampling import Sampler
    from specens.decoding.stopping import StopRules
    from specens.decoding.target import Target

Hidden = Mapping[int, torch.Tensor]
"""Layer -> states `[num_positions, hidden_size]`."""


@dataclass(frozen=True)
class Passage:
    """A text that was decoded: the prompt, what was emitted, the target's states at all positions but the last, its sampler."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    hidden: Hidden
    sampler: Sampler


@runtime_checkable
class Everywhere(Protocol):
    """A drafter that proposes at many positions at once for less than one by one."""

    def propose_everywhere(self, text: Passage, plans: Sequence[Plan]) -> list[Draft] | None:
        """What `propose` says after the prompt and `output_ids[:t]`, with `plans[t]`, for every t; None: ask one by one."""
        ...


class Listening:
    """A drafter that does what the one inside does, and remembers of the current prompt what it was shown and what it said:
    `said[length]` is its plan and its draft behind so many tokens.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._shown: list[Hidden] = []
        self.said: dict[int, tuple[Plan, Draft]] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        return self.inner.members

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return hidden_layers(self.inner)

    def facts(self) -> dict[str, Any]:
        return describe(self.inner)

    def bind(self, target: Target) -> None:
        self.inner.bind(target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._shown, self.said = [], {}
        self.inner.start(prompt_ids)

    def condition(self, hidden: Hidden) -> None:
        self._shown.append({layer: states.clone() for layer, states in hidden.items()})
        condition(self.inner, hidden)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        draft = self.inner.propose(context_ids, plan, sampler)
        self.said[len(context_ids)] = (plan, draft)
        return draft

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def drafts(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], stop: StopRules, sampler: Sampler
    ) -> list[Draft]:
        """The drafts at every position of the text that was just decoded. Where the run itself asked a member, it is what the
        member said then: arithmetic in other batches may round otherwise.
        """
        layers = self._shown[0] if self._shown else ()
        hidden = {layer: torch.cat([shown[layer] for shown in self._shown]) for layer in layers}
        said, plans = self.said, full_plans(self.members, len(prompt_ids), len(output_ids), stop)
        drafts = everywhere(self.inner, Passage(prompt_ids, output_ids, hidden, sampler), plans)
        return [
            _as_said(draft, plan, said.get(len(prompt_ids) + position), self.members)
            for position, (draft, plan) in enumerate(zip(drafts, plans, strict=True))
        ]


def full_plans(members: Sequence[Member], num_prompt: int, num_output: int, stop: StopRules) -> list[Plan]:
    """At every position, the most that each member may draft there."""
    budget = FixedBudget(max_nodes=sum(member.num_draft_nodes for member in members))
    contexts = [
        PlanContext(tuple(members), length, stop.tokens_wanted(length))
        for length in range(num_prompt, num_prompt + num_output)
    ]
    return [budget.plan(context) for context in contexts]


def everywhere(drafter: Drafter, text: Passage, plans: Sequence[Plan]) -> list[Draft]:
    """One draft for every plan: at once if the drafter can, else one by one, as in a run that accepts nothing."""
    if isinstance(drafter, Everywhere):
        drafts = drafter.propose_everywhere(text, plans)
        if drafts is not None:
            return drafts
    ids, num_before, hidden = tuple(text.prompt_ids), len(text.prompt_ids) - 1, text.hidden
    drafter.start(ids)
    condition(drafter, {layer: states[:num_before] for layer, states in hidden.items()} if num_before else {})
    drafts = []
    for position, (token, plan) in enumerate(zip(text.output_ids, plans, strict=True)):
        drafts.append(drafter.propose(ids, plan, text.sampler) if plan.num_tokens else Draft())
        place = num_before + position
        condition(drafter, {layer: states[place : place + 1] for layer, states in hidden.items()})
        drafter.observe(Commit((), (token,)))
        ids += (token,)
    return drafts


def _as_said(full: Draft, plan: Plan, said: tuple[Plan, Draft] | None, members: Sequence[Member]) -> Draft:
    """The full draft, with what members said in the run in its place."""
    if said is None:
        return replace(full, seconds=(), laws=())
    parts = []
    for index, member in enumerate(members):
        part, own = part_of(full, index), part_of(said[1], index)
        given, asked = (_share(each, index) for each in (plan, said[0]))
        is_passed_over = said[0].first_only and any(said[1].owner(node) < index for node in range(len(said[1])))
        if asked.num_tokens == given.num_tokens and asked.num_nodes >= given.num_nodes and not is_passed_over:
            part = _continued(own, part) if member.stops_early else own
        parts.append(part)
    return side_by_side(parts)


def _share(plan: Plan, index: int) -> Plan:
    """A member's own plan; of a drafter without others, the whole."""
    return plan.members[index] if len(plan.members) > 1 else plan


def _continued(own: Draft, full: Draft) -> Draft:
    """A draft that may have ended early, with the rest of the full one if that begins alike."""
    count = len(own)
    if len(full) <= count or full.token_ids[:count] != own.token_ids or full.parents[:count] != own.parents:
        return own
    claims = tuple((own if node < count else full).claim(node) for node in range(len(full)))
    return replace(full, claims=claims, laws=(), owners=(), seconds=())
