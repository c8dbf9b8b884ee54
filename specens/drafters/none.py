"""No drafter at all: AR decoding, and the baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Sequence

from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan


class NoDrafter:
    """Has no members and never proposes. It is its own proposer: a sequence has no state."""

    members: tuple[Member, ...] = ()

    def bind(self, target: Target) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> NoDrafter:
        return self

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        return Draft()

    def observe(self, commit: Commit) -> None: ...
