"""Drafters whose every token is wrong, at their full cost: what useless drafts cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from specens.decoding.drafter import Drafter, Proposer, close, condition, hidden_layers
from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan

Outputs = Mapping[tuple[int, ...], Sequence[int]]
"""AR decoding's: prompt ids -> output ids."""


class AlwaysWrong:
    """A drafter that drafts as ever, at its own cost; all its tokens are then replaced by others,
    so that none is accepted as long as the text is AR decoding's own.
    """

    def __init__(self, drafter: Drafter, outputs: Outputs, vocab_size: int) -> None:
        self._drafter, self._outputs, self._vocab_size = drafter, outputs, vocab_size

    @property
    def members(self) -> tuple[Member, ...]:
        return self._drafter.members

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return hidden_layers(self._drafter)

    def bind(self, target: Target) -> None:
        self._drafter.bind(target)

    def begin(self, prompt_ids: Sequence[int]) -> WrongProposer:
        whole = (*prompt_ids, *self._outputs.get(tuple(prompt_ids), ()))
        return WrongProposer(self._drafter.begin(prompt_ids), whole, self._vocab_size)


@dataclass(frozen=True)
class WrongProposer:
    """`whole`: the prompt and AR decoding's output."""

    proposer: Proposer
    whole: tuple[int, ...]
    vocab_size: int

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        condition(self.proposer, hidden)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        draft = self.proposer.propose(context_ids, plan, sampler)
        right = self.whole[len(context_ids)] if len(context_ids) < len(self.whole) else None
        nodes = zip(draft.token_ids, draft.parents, strict=True)
        first = [token for token, parent in nodes if parent == ROOT]
        # One shift for all tokens, so that siblings stay different: the smallest one with which no
        # first token is right.
        shifts = range(1, len(first) + 2)
        shift = next(shift for shift in shifts if right not in self._shifted(first, shift))
        return replace(draft, token_ids=self._shifted(draft.token_ids, shift), draft_probs=())

    def _shifted(self, token_ids: Sequence[int], shift: int) -> tuple[int, ...]:
        return tuple((token + shift) % self.vocab_size for token in token_ids)

    def observe(self, commit: Commit) -> None:
        self.proposer.observe(commit)

    def close(self) -> None:
        close(self.proposer)
