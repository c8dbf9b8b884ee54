"""FlashSpec (PyPI `flashspec`), on the same model object. The only file that imports it."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from specens.bench.clock import Timed
from specens.bench.systems import BenchSetup
from specens.bench.transformers_generate import as_a_library, prompt_tensor
from specens.decoding.generation import eos_ids
from specens.drafters.lm import ModelSource
from specens.errors import UserError, check_count
from specens.models.cpu_linear import pack, packing
from specens.prompts.chat import Prompt


@dataclass(frozen=True)
class FlashSpec:
    """Its n-gram drafter, `gamma` tokens a step; with an `assistant` its default strategy instead
    (lookup up to six tokens, else two of the model's). It decides itself whether it compiles (on
    CUDA it does), with a cache as long as the run's longest text.

    Its own step times are taken: the first step holds the prompt and is left out, with what it
    emitted.
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

    def load(self, setup: BenchSetup) -> FlashSpecRunner:
        _refuse_processors(setup)
        assistant = None if self.assistant is None else self.assistant.load_for(setup.target).model
        models = [model for model in (setup.target.model, assistant) if model is not None]
        packed = [packing(model) for model in models]
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # it reports what it chose, in lines of JSON
        try:
            engine = self._engine(setup, assistant)
        finally:
            logging.disable(before)
            # It moves every model to where it is already, and packed layers are lost by that.
            for model, kind in zip(models, packed, strict=True):
                if kind is not None and packing(model) is None:
                    pack(model, kind)
        return FlashSpecRunner(setup, engine, assistant)

    def _engine(self, setup: BenchSetup, assistant: PreTrainedModel | None) -> Any:
        from flashspec.engine import (  # pyright: ignore[reportMissingImports]
            HuggingFaceDrafter,
            NgramDrafter,
            SpeculativeEngine,
            TargetModel,
        )
        from flashspec.utils import config  # pyright: ignore[reportMissingImports]

        name, device, dtype = setup.target.name, setup.target.device, setup.target.dtype
        options: dict[str, Any] = {
            "drafter_name": "drafter",
            "target_name": name,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "sampling": config.SamplingConfig(gamma=self.gamma, temperature=0),
            "compile_max_cache_len": setup.longest_tokens + 16,
        }
        drafter: Any = None
        if assistant is None:
            drafter = NgramDrafter()
            options |= {"drafter_strategy": "bandit", "bandit": config.BanditConfig(n_arms=1)}
        else:
            drafter = HuggingFaceDrafter("assistant", device, dtype, temperature=0, model=assistant)
        target = TargetModel(name, device, dtype, model=setup.target.model)
        return SpeculativeEngine(config.FlashSpecConfig(**options), [drafter], target)


@dataclass(frozen=True)
class FlashSpecRunner:
    """One engine, used for all prompts."""

    setup: BenchSetup
    engine: Any
    assistant: PreTrainedModel | None = None

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config = self.setup.config_for(prompt, max_new_tokens)
        ids, ends = prompt_tensor(prompt.token_ids, self.setup.target.device), eos_ids(config)
        with as_a_library(self.engine.compiled, self.setup.target.model, self.assistant):
            done = self.engine.generate(
                ids, max_new_tokens=config.max_new_tokens, eos_token_ids=ends
            )
        steps = done.arm_steps
        times = itertools.accumulate(step.seconds for step in steps)
        emissions = tuple((step.emitted, at) for step, at in zip(steps, times, strict=True))
        return Timed(tuple(done.output_ids[0, : done.n_tokens_generated].tolist()), emissions)

    def facts(self) -> dict[str, Any]:
        return {
            "version": version("flashspec"),
            "strategy": self.engine.drafter_strategy,
            "compiled": self.engine.compiled,
        }


def _refuse_processors(setup: BenchSetup) -> None:
    """It knows no logits processors and no stop strings."""
    config = setup.config
    given = {
        "stop_strings": config.stop_strings,
        "bad_words_ids": config.bad_words_ids,
        "min_new_tokens": config.min_new_tokens,
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "repetition_penalty": config.repetition_penalty not in (None, 1.0),
    }
    for name, value in given.items():
        if value:
            raise UserError(f"it has no {name}, which this run uses")
