"""trace=dense: what every member would propose at every position of a text, not only where steps
began. Greedy and keyed sampling give one text whoever drafts, so these proposals determine what any
subset of the members would have done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.drafter import Drafter, Proposer, close, condition
from specens.decoding.merge import part_of, side_by_side
from specens.decoding.types import Commit, Draft, Member, Plan

if TYPE_CHECKING:
    from specens.decoding.sampling import Sampler
    from specens.decoding.stopping import StopRules

Hidden = Mapping[int, torch.Tensor]
"""Layer -> states `[num_positions, hidden_size]`."""


@dataclass(frozen=True)
class FinishedText:
    """A text that was decoded: the prompt, the output, the target's hidden states at all positions
    but the last, and the sampler.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    hidden: Hidden
    sampler: Sampler


@runtime_checkable
class BatchProposer(Protocol):
    """A drafter that proposes at many positions at once for less than one by one."""

    def propose_batch(self, text: FinishedText, plans: Sequence[Plan]) -> list[Draft] | None:
        """What a proposer of it proposes after the prompt and `output_ids[:t]`, with `plans[t]`,
        for every t; None: go one by one.
        """
        ...


@dataclass
class Recording:
    """What a live sequence leaves for its dense trace: the hidden states that its proposer was
    given, and by committed length the plan and the draft of each step.
    """

    hidden: list[Hidden] = field(default_factory=list)
    drafts: dict[int, tuple[Plan, Draft]] = field(default_factory=dict)


class RecordingProposer:
    """Wraps a proposer and records its inputs and proposals."""

    def __init__(self, inner: Proposer, recording: Recording) -> None:
        self._inner, self._recording = inner, recording

    def condition(self, hidden: Hidden) -> None:
        self._recording.hidden.append({layer: states.clone() for layer, states in hidden.items()})
        condition(self._inner, hidden)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        draft = self._inner.propose(context_ids, plan, sampler)
        self._recording.drafts[len(context_ids)] = (plan, draft)
        return draft

    def observe(self, commit: Commit) -> None:
        self._inner.observe(commit)

    def close(self) -> None:
        close(self._inner)


def dense_drafts(
    drafter: Drafter,
    recording: Recording,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop: StopRules,
    sampler: Sampler,
) -> list[Draft]:
    """The drafts at every position of a text that was just decoded. Where a member drafted in the
    run itself, its recorded draft is taken: arithmetic in other batches may round otherwise.
    """
    layers = recording.hidden[0] if recording.hidden else ()
    hidden = {layer: torch.cat([part[layer] for part in recording.hidden]) for layer in layers}
    plans = full_plans(drafter.members, len(prompt_ids), len(output_ids), stop)
    text = FinishedText(prompt_ids, output_ids, hidden, sampler)
    return [
        _with_recorded(draft, plan, recording.drafts.get(length), drafter.members)
        for length, (draft, plan) in enumerate(
            zip(propose_all(drafter, text, plans), plans, strict=True), start=len(prompt_ids)
        )
    ]


def full_plans(
    members: Sequence[Member], num_prompt: int, num_output: int, stop: StopRules
) -> list[Plan]:
    """At every position, the most that each member may draft there."""
    budget = FixedBudget(max_nodes=sum(member.num_draft_nodes for member in members))
    lengths = range(num_prompt, num_prompt + num_output)
    return [
        budget.plan(PlanContext(tuple(members), length, stop.tokens_wanted(length)))
        for length in lengths
    ]


def propose_all(drafter: Drafter, text: FinishedText, plans: Sequence[Plan]) -> list[Draft]:
    """One draft for every plan: at once if the drafter can, else one by one, as in a run that
    accepts nothing.
    """
    if isinstance(drafter, BatchProposer):
        drafts = drafter.propose_batch(text, plans)
        if drafts is not None:
            return drafts
    proposer = drafter.begin(tuple(text.prompt_ids))
    try:
        return _one_by_one(proposer, text, plans)
    finally:
        close(proposer)


def _one_by_one(proposer: Proposer, text: FinishedText, plans: Sequence[Plan]) -> list[Draft]:
    ids, num_before, hidden = tuple(text.prompt_ids), len(text.prompt_ids) - 1, text.hidden
    prompt_states = {layer: states[:num_before] for layer, states in hidden.items()}
    condition(proposer, prompt_states if num_before else {})
    drafts = []
    for place, (token, plan) in enumerate(
        zip(text.output_ids, plans, strict=True), start=num_before
    ):
        drafts.append(proposer.propose(ids, plan, text.sampler) if plan.num_tokens else Draft())
        new = {layer: states[place : place + 1] for layer, states in hidden.items()}
        condition(proposer, new)
        proposer.observe(Commit((), (token,)))
        ids += (token,)
    return drafts


def _with_recorded(
    full: Draft, plan: Plan, recorded: tuple[Plan, Draft] | None, members: Sequence[Member]
) -> Draft:
    """The full draft, with the recorded proposals of members that could draft as much in their
    step.
    """
    if recorded is None:
        return replace(full, seconds=(), draft_probs=(), scheduled=())
    given, draft = recorded
    parts = []
    for index, member in enumerate(members):
        part, own = part_of(full, index), part_of(draft, index)
        share, wanted = given.shares[index], plan.shares[index]
        was_scheduled = draft.scheduled[index] if draft.scheduled else share.num_tokens > 0
        is_as_deep = share.num_tokens == wanted.num_tokens
        # A drafter without others is given the whole plan, which may have fewer nodes.
        num_nodes = share.num_nodes if len(members) > 1 else given.num_nodes
        if was_scheduled and is_as_deep and num_nodes >= wanted.num_nodes:
            part = _continued(own, part) if member.stops_early else own
        parts.append(part)
    return side_by_side(parts)


def _continued(own: Draft, full: Draft) -> Draft:
    """A draft that may have ended early, with the rest of the full one if that begins alike."""
    count = len(own)
    same_tokens = full.token_ids[:count] == own.token_ids
    if len(full) <= count or not same_tokens or full.parents[:count] != own.parents:
        return own
    confidences = [(own if node < count else full).confidence(node) for node in range(len(full))]
    return Draft(full.token_ids, full.parents, confidences=tuple(confidences))
