"""What a bench can measure: descriptions (the configuration's `systems`), and how our own decode while they are timed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from transformers import GenerationConfig

from specens.benchmark.measure import Clock, Spent, Timed
from specens.benchmark.wrong import Spoiled
from specens.decoding.budget import Budget
from specens.decoding.drafter import Drafter
from specens.decoding.loop import Decoder
from specens.decoding.target import Layout, Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Verifier
from specens.drafters.ensemble import Ensemble
from specens.errors import UserError
from specens.job import check_exact_width
from specens.rendering import Prompt
from specens.speculator import Speculator


@dataclass(frozen=True)
class Ours:
    """A system of ours: the composed configuration with more `words`, which may change the drafter, the budget, the verifier and
    the layout. `member`: that member of the composed ensemble alone. `wrong`: every member's tokens are replaced by wrong ones.
    `plain`: no drafter, decoded as every baseline is.
    """

    words: list[str] = field(default_factory=list)
    member: str | None = None
    wrong: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Ground:
    """What all systems decode on: one loaded target, one generation configuration, and the length of the longest text to come."""

    target: Target
    config: GenerationConfig
    seed: int
    longest_tokens: int

    def config_for(self, prompt: Prompt, max_new_tokens: int | None) -> GenerationConfig:
        """The same configuration, as a copy of its own, with another number of new tokens if one is given; never more than the
        target's context holds, where our own decoding stops and peers would go on.
        """
        count, limit = max_new_tokens or self.config.max_new_tokens, self.target.context_limit
        if limit is not None:
            count = max(min(count, limit - len(prompt.token_ids)), 1)
        return GenerationConfig(**{**self.config.to_dict(), "max_new_tokens": count, "return_dict_in_generate": False})


class Runner(Protocol):
    """A system that is loaded."""

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        """One prompt, timed. `max_new_tokens` None: as many as the configuration says."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the result should say of it besides its description."""
        ...


@runtime_checkable
class Peer(Protocol):
    """A system that is not ours. `cuda_only`: measured elsewhere only when it is named."""

    cuda_only: bool

    def check(self) -> str | None:
        """Why it cannot run here, such as a package that is not installed; None when it can. Before models are loaded."""
        ...

    def load(self, ground: Ground) -> Runner: ...


@dataclass(frozen=True)
class OurRunner:
    """The loop of this package, timed from outside by when its steps come out: its record keeping is charged to it."""

    speculator: Speculator
    ground: Ground

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config = self.ground.config_for(prompt, max_new_tokens)
        clock = Clock(self.ground.target.device)

        def on_step(step: StepRecord) -> None:
            clock.emitted(step.num_emitted)

        done = self.speculator.complete(
            prompt.token_ids, config, seed=self.ground.seed, prompt_key=prompt.id, on_step=on_step
        )
        spent = (Spent(step.draft_ms / 1e3, step.verify_ms / 1e3, step.num_nodes) for step in done.steps)
        return clock.timed(done.output_ids, tuple(spent))

    def facts(self) -> dict[str, Any]:
        decoder, costs = self.speculator.decoder, self.speculator.costs
        return {
            "drafters": [member.name for member in decoder.drafter.members],
            "budget": repr(decoder.budget),
            "verifier": decoder.verifier.name,
            "lossy": not decoder.verifier.lossless,
            "layout": decoder.layout,
            "costs": None if costs is None else costs.content(),
        }


@dataclass(frozen=True)
class Parts:
    """A system of ours, built: its drafters by name, and the rules between them and the target."""

    drafters: Mapping[str, Drafter]
    budget: Budget
    verifier: Verifier
    layout: Layout
    wrong: bool = False


def our_runner(parts: Parts, ground: Ground, texts: Mapping[tuple[int, ...], Sequence[int]]) -> OurRunner:
    """Bind a system of ours to the target. `texts`: plain decoding's own, for drafters that have to be wrong."""
    if ground.target.exact_width is not None:
        check_exact_width(ground.target.exact_width, parts.layout, parts.budget)
    drafters = dict(parts.drafters)
    if parts.wrong:
        drafters = {name: Spoiled(drafter, texts) for name, drafter in drafters.items()}
    (drafter,) = drafters.values() if len(drafters) == 1 else (Ensemble(drafters),)
    return OurRunner(
        Speculator(Decoder(ground.target, drafter, parts.budget, parts.verifier, parts.layout), seed=ground.seed),
        ground,
    )


def bind_once(drafter: Drafter) -> Drafter:
    """The same drafter, which meets the target only the first time it is told to: systems share their members, so that a model
    is in memory (and compiled) once. They decode one after another, and every prompt begins with `start`.
    """
    bind, bound = drafter.bind, []

    def once(target: Target) -> None:
        if not bound:
            bind(target)
            bound.append(True)

    drafter.bind = once
    return drafter


def chosen(described: Mapping[str, Any], names: Sequence[str] | None, *, is_cuda: bool, sampled: bool) -> list[str]:
    """The systems to measure, in the configuration's order, plain decoding first. UserError for a name that is not there."""
    plain = next((name for name, system in described.items() if isinstance(system, Ours) and system.plain), None)
    if plain != "plain":
        raise UserError("systems.plain: has to be plain decoding (plain: true), which all others are measured against")
    for name in names or ():
        if name not in described:
            raise UserError(f"bench.systems: no system is called {name}; there are {', '.join(described)}")
        if sampled and not isinstance(described[name], Ours):
            raise UserError(
                f"bench.systems: {name} draws with noise of its own, so it has no text to compare; use sampling.temperature=0"
            )
    if names is None:
        names = [
            name for name, system in described.items() if isinstance(system, Ours) or _fits(system, is_cuda, sampled)
        ]
    return ["plain", *(name for name in described if name in names and name != "plain")]


def _fits(system: Peer, is_cuda: bool, sampled: bool) -> bool:
    return not sampled and (is_cuda or not system.cuda_only)


def shuffled(names: Sequence[str], seed: int, prompt_id: str, repeat: int) -> list[str]:
    """The order in which the systems take their turns: another one for every prompt and repeat, the same for a seed."""
    order = list(names)
    random.Random(f"{seed}\x00{prompt_id}\x00{repeat}").shuffle(order)
    return order
