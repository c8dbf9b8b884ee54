"""FlashSpec (PyPI `flashspec`), on the same model object. The only file that imports it."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specens.benchmark.measure import Timed
from specens.benchmark.peers import prompt_tensor, quietly, without_gradients
from specens.benchmark.systems import Ground
from specens.decoding.generation import eos_ids
from specens.drafters.lm import ModelSource
from specens.errors import UserError, check_count
from specens.rendering import Prompt


@dataclass(frozen=True)
class FlashSpec:
    """Its n-gram drafter, `gamma` tokens a step; with an `assistant` its default strategy instead (lookup up to six tokens, else
    two of the model's). It decides itself whether it compiles (on CUDA it does), with a cache as long as the run's longest text.

    Its own step times are taken: the first step holds the prompt and is left out, with what it emitted.
    """

    gamma: int = 4
    assistant: ModelSource | None = None
    cuda_only: bool = False

    def __post_init__(self) -> None:
        check_count("gamma", self.gamma)

    def check(self) -> str | None:
        if self.assistant is not None:
            self.assistant.check()
        if importlib.util.find_spec("flashspec") is None:
            return "not installed: pip install 'specens[bench]'"
        return None

    def load(self, ground: Ground) -> FlashSpecRunner:
        _refuse_processors(ground)
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # it says what it chose, in lines of JSON
        try:
            return FlashSpecRunner(ground, self._engine(ground))
        finally:
            logging.disable(before)

    def _engine(self, ground: Ground) -> Any:
        from flashspec.engine import (  # pyright: ignore[reportMissingImports]
            HuggingFaceDrafter,
            NgramDrafter,
            SpeculativeEngine,
            TargetModel,
        )
        from flashspec.utils.config import (  # pyright: ignore[reportMissingImports]
            BanditConfig,
            FlashSpecConfig,
            SamplingConfig,
        )

        device, dtype = ground.target.device, ground.target.dtype
        common: dict[str, Any] = {
            "drafter_name": "drafter",
            "target_name": ground.target.name,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "sampling": SamplingConfig(gamma=self.gamma, temperature=0),
            "compile_max_cache_len": ground.longest_tokens + 16,
        }
        if self.assistant is None:
            drafters: list[Any] = [NgramDrafter()]
            config = FlashSpecConfig(**common, drafter_strategy="bandit", bandit=BanditConfig(n_arms=1))
        else:
            model = self.assistant.load_for(ground.target).model
            with in_place(model):
                drafters = [HuggingFaceDrafter("assistant", device, dtype, temperature=0, model=model)]
            config = FlashSpecConfig(**common)
        with in_place(ground.target.model):
            target = TargetModel(ground.target.name, device, dtype, model=ground.target.model)
        return SpeculativeEngine(config, drafters, target)


@dataclass(frozen=True)
class FlashSpecRunner:
    """One engine, used for all prompts."""

    ground: Ground
    engine: Any

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config = self.ground.config_for(prompt, max_new_tokens)
        ids = prompt_tensor(prompt.token_ids, self.ground.target.device)
        with without_gradients(self.engine.compiled), quietly():
            done = self.engine.generate(ids, max_new_tokens=config.max_new_tokens, eos_token_ids=eos_ids(config))
        steps = done.arm_steps
        times = itertools.accumulate(step.seconds for step in steps)
        emissions = tuple((step.emitted, at) for step, at in zip(steps, times, strict=True))
        return Timed(tuple(done.output_ids[0, : done.n_tokens_generated].tolist()), emissions)

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "version": version("flashspec"),
            "strategy": self.engine.drafter_strategy,
            "compiled": self.engine.compiled,
        }


@contextmanager
def in_place(model: Any) -> Iterator[None]:
    """It moves every model that it is given, which would undo how the weights are packed, for all systems. They are in place."""
    model.to = lambda *args, **options: model
    try:
        yield
    finally:
        del model.to


def _refuse_processors(ground: Ground) -> None:
    """It knows no logits processors and no stop strings."""
    config = ground.config
    asked = {
        "stop_strings": config.stop_strings,
        "bad_words_ids": config.bad_words_ids,
        "min_new_tokens": config.min_new_tokens,
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "repetition_penalty": config.repetition_penalty not in (None, 1.0),
    }
    for name, value in asked.items():
        if value:
            raise UserError(f"it has no {name}, which this run uses")
