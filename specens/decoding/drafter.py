"""What a drafter is. A new one is a class with these five names, and a YAML file that points to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specens.decoding.types import Commit, Draft, Member, Plan

if TYPE_CHECKING:
    from specens.decoding.sampling import Sampler
    from specens.decoding.target import Target


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens. The loop calls, once a run: `bind`; once a prompt: `start`; in every step `observe`,
    and before it `propose`, unless the plan leaves this drafter out. Whatever a drafter proposes, the output stays the
    target's own; only its speed changes.
    """

    @property
    def members(self) -> tuple[Member, ...]:
        """One entry per drafter inside: a plain drafter names itself, an ensemble its members, none is empty."""
        ...

    def bind(self, target: Target) -> None:
        """Meet the target: load models, compare vocabularies. Raises UserError when the two do not fit."""
        ...

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a prompt and forget the one before. Counted as prefill, so the place for work that grows with the prompt."""
        ...

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        """Guess what follows `context_ids`: at most `plan.num_tokens` deep and `plan.num_nodes` nodes; empty when it has
        nothing to say. A drafter that samples picks with `sampler`, which shares its noise with the target.
        """
        ...

    def observe(self, commit: Commit) -> None:
        """Learn what the step emitted, whoever proposed it."""
        ...


def describe(drafter: Drafter) -> dict[str, Any]:
    """What a run's record should say of a drafter besides its configuration, such as a model's real dtype and size: whatever
    its method `facts` returns, if it has one.
    """
    facts = getattr(drafter, "facts", None)
    return dict(facts()) if facts is not None else {}
