"""Drafters whose every guess is wrong, at their own full cost: what is lost when drafting never helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from specens.decoding.drafter import Drafter, condition, hidden_layers
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan


class Spoiled:
    """A drafter that works as ever, and whose tokens are then all replaced by others, so that none is accepted: it costs what it
    costs, and is silent when it is silent. `texts` are plain decoding's own (prompt ids -> output ids); as long as the text is
    one of them, no guess at the next token is right.
    """

    def __init__(self, drafter: Drafter, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._drafter, self._texts = drafter, texts
        self._whole: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        return self._drafter.members

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return hidden_layers(self._drafter)

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        condition(self._drafter, hidden)

    def bind(self, target: Target) -> None:
        self._vocab_size = target.vocab_size
        self._drafter.bind(target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._whole = (*prompt_ids, *self._texts.get(tuple(prompt_ids), ()))
        self._drafter.start(prompt_ids)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        draft = self._drafter.propose(context_ids, plan, sampler)
        right = self._whole[len(context_ids)] if len(context_ids) < len(self._whole) else None
        first = [token for token, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == ROOT]
        # One shift for all tokens, so that siblings stay different; the smallest one that makes no first guess right.
        shift = next(shift for shift in range(1, len(first) + 2) if right not in self._shifted(first, shift))
        return replace(draft, token_ids=self._shifted(draft.token_ids, shift), laws=())

    def _shifted(self, token_ids: Sequence[int], shift: int) -> tuple[int, ...]:
        return tuple((token + shift) % self._vocab_size for token in token_ids)

    def observe(self, commit: Commit) -> None:
        self._drafter.observe(commit)
