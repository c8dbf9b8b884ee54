"""What a drafter is. A new one is a class with `members`, `bind` and `begin`, and a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specens.decoding.types import Commit, Draft, Member, Plan

if TYPE_CHECKING:
    import torch

    from specens.decoding.sampling import Sampler
    from specens.decoding.target.target import Target

    Hidden = Mapping[int, torch.Tensor]
    """Layer -> states `[num_positions, hidden_size]`."""


@runtime_checkable
class Proposer(Protocol):
    """A drafter at work on one sequence; it holds all state of that sequence. In every step the
    loop calls `propose`, unless the plan leaves this drafter idle, and then `observe`.

    Two more methods are optional. `condition(hidden)` is called by proposers of a drafter with
    `hidden_layers`: layer -> `[num_new, hidden_size]`, at the positions that have entered the
    target's cache: once after `begin` those of the prompt but its last token, then, before each
    `observe`, those of the last committed token and the accepted run. `close()` is called when the
    sequence has ended, for whoever holds something that others wait for.
    """

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        """What may follow `context_ids`: at most `plan.num_tokens` deep and `plan.num_nodes` nodes;
        empty to abstain. A drafter that samples does so with `sampler`, which shares its noise with
        the target.
        """
        ...

    def observe(self, commit: Commit) -> None:
        """Learn what the step emitted, whoever proposed it."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens: weights and options, but no state of a sequence. The loop
    calls `bind` once, and `begin` for every sequence. Whatever a drafter proposes, the output stays
    the target's own; only its speed changes.

    Three more names are optional: `hidden_layers`, the indices of transformers' `hidden_states`
    that its proposers read (0: embeddings, 1: after the first layer), known after `bind`;
    `facts()`, what a run's record should say besides the configuration; and `propose_batch` (see
    `dense.BatchProposer`).
    """

    @property
    def members(self) -> tuple[Member, ...]:
        """One entry per drafter inside: a plain drafter names itself, an ensemble its members."""
        ...

    def bind(self, target: Target) -> None:
        """Meet the target: load models, compare vocabularies. Raises UserError when the two do not
        fit.
        """
        ...

    def begin(self, prompt_ids: Sequence[int]) -> Proposer:
        """The state of a new sequence. Its time counts as prefill, so it is the place for work that
        grows with the prompt.
        """
        ...


def hidden_layers(drafter: Drafter) -> tuple[int, ...]:
    """The layers that the proposers of a drafter (or of any of its members) read."""
    return tuple(getattr(drafter, "hidden_layers", ()))


def condition(proposer: Proposer, hidden: Hidden) -> None:
    """Hand the target's hidden states to a proposer that reads any."""
    if hidden and hasattr(proposer, "condition"):
        proposer.condition(hidden)  # pyright: ignore[reportAttributeAccessIssue]


def close(proposer: Proposer) -> None:
    """Tell a proposer that its sequence has ended."""
    if hasattr(proposer, "close"):
        proposer.close()  # pyright: ignore[reportAttributeAccessIssue]


def facts_of(drafter: Drafter) -> dict[str, Any]:
    """What a run's record should say of a drafter besides its configuration, such as a model's real
    dtype and size.
    """
    facts = getattr(drafter, "facts", None)
    return dict(facts()) if facts is not None else {}
