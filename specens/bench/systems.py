"""What a bench measures: systems as the configuration describes them, and how our own decode while
they are timed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import GenerationConfig

from specens.bench.adversarial import AlwaysWrong
from specens.bench.clock import Clock, Spent, Timed
from specens.decoding.budgets.base import Budget
from specens.decoding.drafter import Drafter
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.supported import LAYOUTS, Layout
from specens.decoding.target.target import Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Verifier
from specens.drafters.ensemble import Ensemble
from specens.errors import UserError, check_choice, check_flag, check_list
from specens.prompts.chat import Prompt
from specens.run.job import check_exact_width


@dataclass(frozen=True)
class SpecensSystem:
    """A system of ours: the composed configuration with parts of its own (None: the run's part; a
    mapping without `_target_`: the run's part with these options). `members`: only these members of
    the drafter. `adversarial`: every token of every member is replaced by a wrong one. `ar`: no
    drafter, decoded as every run's baseline is.
    """

    members: list[str] | None = None
    drafter: Any = None
    budget: Any = None
    verifier: Any = None
    layout: str | None = None
    adversarial: bool = False
    ar: bool = False

    def __post_init__(self) -> None:
        if self.members is not None:
            check_list("members", self.members, str, "[ngram]", least=1)
        if self.layout is not None:
            check_choice("layout", self.layout, LAYOUTS)
        check_flag("adversarial", self.adversarial)
        check_flag("ar", self.ar)


@dataclass(frozen=True)
class BenchSetup:
    """What all systems share: one loaded target, one generation configuration, the length of the
    longest text to come, and AR decoding's outputs as they become known (prompt ids -> output ids).
    """

    target: Target
    config: GenerationConfig
    seed: int
    longest_tokens: int
    outputs: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _bound: list[Drafter] = field(default_factory=list, init=False)

    def config_for(self, prompt: Prompt, max_new_tokens: int | None) -> GenerationConfig:
        """A copy of the configuration, with another number of new tokens if one is given; never
        more than the target's context holds, where our loop stops and others would go on.
        """
        count, limit = max_new_tokens or self.config.max_new_tokens, self.target.context_limit
        if limit is not None:
            count = max(min(count, limit - len(prompt.token_ids)), 1)
        own = {"max_new_tokens": count, "return_dict_in_generate": False}
        return GenerationConfig(**{**self.config.to_dict(), **own})

    def bind(self, drafter: Drafter) -> None:
        """Systems share their drafters, so that a model is in memory (and compiled) once."""
        if not any(drafter is other for other in self._bound):
            drafter.bind(self.target)
            self._bound.append(drafter)


class Runner(Protocol):
    """A system that is loaded."""

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        """One prompt, timed. `max_new_tokens` None: as many as the configuration says."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the result should say of it besides its description."""
        ...


class Peer(Protocol):
    """A system that is not ours. `cuda_only`: measured elsewhere only when it is named."""

    cuda_only: bool

    def check(self) -> str | None:
        """Why it cannot run here, such as a package that is not installed; None when it can. Called
        before models are loaded.
        """
        ...

    def load(self, setup: BenchSetup) -> Runner: ...


@dataclass(frozen=True)
class Parts:
    """A system of ours, built: its drafters by name, and the rules between them and the target."""

    drafters: Mapping[str, Drafter]
    budget: Budget
    verifier: Verifier
    layout: Layout
    adversarial: bool = False

    def __post_init__(self) -> None:
        if self.budget.reset != "prompt":
            raise UserError(
                "budget.reset=run would remember a prompt when it comes again: the bench repeats; "
                "use reset=prompt"
            )
        for name, drafter in self.drafters.items():
            if getattr(drafter, "grow", False):
                raise UserError(
                    f"drafter {name}: grow=true would find a prompt's own answer when it comes "
                    "again: the bench repeats"
                )

    def load(self, setup: BenchSetup) -> SpecensRunner:
        """Bind it to the target."""
        if setup.target.exact_width is not None:
            check_exact_width(setup.target.exact_width, self.layout, self.budget)
        drafters = dict(self.drafters)
        for name, drafter in drafters.items():
            setup.bind(drafter)
            if self.adversarial:
                drafters[name] = AlwaysWrong(drafter, setup.outputs, setup.target.vocab_size)
        (drafter,) = drafters.values() if len(drafters) == 1 else (Ensemble(drafters),)
        decoder = Decoder(setup.target, drafter, self.budget, self.verifier, self.layout)
        return SpecensRunner(Speculator(decoder, bind=False), setup)


@dataclass(frozen=True)
class SpecensRunner:
    """The loop of this package, timed from outside by when its steps come out: its record keeping
    is charged to it.
    """

    speculator: Speculator
    setup: BenchSetup

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config = self.setup.config_for(prompt, max_new_tokens)
        clock = Clock(self.setup.target.device)

        def on_step(step: StepRecord) -> None:
            clock.emitted(step.num_emitted)

        done = self.speculator.complete(
            prompt.token_ids, config, seed=self.setup.seed, prompt_key=prompt.id, on_step=on_step
        )
        steps = done.steps
        spent = (Spent(step.draft_ms / 1e3, step.verify_ms / 1e3, step.num_nodes) for step in steps)
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


def shuffled(names: Sequence[str], seed: int, prompt_id: str, repeat: int) -> list[str]:
    """The order in which the systems take their turns: another one for every prompt and repeat, the
    same for a seed.
    """
    order = list(names)
    random.Random(f"{seed}\x00{prompt_id}\x00{repeat}").shuffle(order)
    return order
