"""What a drafter is. A new one is a class with these five names, and a YAML file that points to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specens.decoding.types import Commit, Draft, Member, Plan

if TYPE_CHECKING:
    import torch

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


@runtime_checkable
class Conditioned(Protocol):
    """A drafter that reads the target's hidden states, besides the five names of a Drafter. They come from the forwards that
    run anyway, so they cost nothing, and the target stays as it is.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What it wants, after `bind`: indices of transformers' `hidden_states` (0: embeddings, 1: after the first layer)."""
        ...

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Layer -> `[num_new, hidden_size]`, at the positions that have entered the target's cache: after `start` those of
        the prompt but its last token, then, before each `observe`, those of the last committed token and the accepted run.
        """
        ...


def hidden_layers(drafter: Drafter) -> tuple[int, ...]:
    """The layers that a drafter (or any of its members) wants to see."""
    return drafter.hidden_layers if isinstance(drafter, Conditioned) else ()


def condition(drafter: Drafter, hidden: Mapping[int, torch.Tensor]) -> None:
    """Hand the hidden states to a drafter that wants any."""
    if hidden and isinstance(drafter, Conditioned):
        drafter.condition(hidden)


def describe(drafter: Drafter) -> dict[str, Any]:
    """What a run's record should say of a drafter besides its configuration, such as a model's real dtype and size: whatever
    its method `facts` returns, if it has one.
    """
    facts = getattr(drafter, "facts", None)
    return dict(facts()) if facts is not None else {}
