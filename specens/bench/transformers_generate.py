"""transformers' own generate, on the same model object: greedy, with prompt lookup, assisted by a
small model, compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specens.bench.clock import Clock, Timed
from specens.bench.systems import BenchSetup
from specens.decoding.target.attention import library_attention
from specens.drafters.lm import ModelSource
from specens.errors import check_count
from specens.prompts.chat import Prompt


@dataclass(frozen=True)
class TransformersGenerate:
    """`model.generate` with the run's own generation options. `prompt_lookup_num_tokens`: with
    prompt lookup; `assistant`: with an assistant model, by transformers' defaults (20 tokens, cut
    where it is unsure); `compiled`: with a static cache, which transformers compiles on CUDA. The
    cache then has the length of the run's longest text, so that one graph serves all prompts.

    Its clock is a streamer: it starts when the tokens of the first forward are known, and what that
    forward emitted is not counted. So the prompt, which generate reads in its first forward, costs
    it nothing, nor does the draft verified with it.
    """

    prompt_lookup_num_tokens: int | None = None
    assistant: ModelSource | None = None
    compiled: bool = False
    cuda_only: bool = False

    def __post_init__(self) -> None:
        if self.prompt_lookup_num_tokens is not None:
            check_count("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens)

    def check(self) -> str | None:
        if self.assistant is not None:
            self.assistant.check()
        return None

    def load(self, setup: BenchSetup) -> TransformersRunner:
        assistant = None if self.assistant is None else self.assistant.load_for(setup.target).model
        options: dict[str, Any] = {}
        if self.prompt_lookup_num_tokens is not None:
            options["prompt_lookup_num_tokens"] = self.prompt_lookup_num_tokens
        if self.compiled:
            options |= {"cache_implementation": "static", "max_cache_len": setup.longest_tokens}
        return TransformersRunner(setup, assistant, options, self.compiled)


@dataclass(frozen=True)
class TransformersRunner:
    """One of the ways above, ready to decode."""

    setup: BenchSetup
    assistant: PreTrainedModel | None
    options: dict[str, Any]
    compiled: bool = False

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config, target = self.setup.config_for(prompt, max_new_tokens), self.setup.target
        config.update(**self.options)
        ids = prompt_tensor(prompt.token_ids, target.device)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        if config.stop_strings:
            options["tokenizer"] = target.tokenizer
        generate: Any = target.model.generate
        with as_a_library(self.compiled, target.model, self.assistant):
            clock = Clock(target.device)
            ids = generate(ids, generation_config=config, streamer=clock, **options)
        return clock.timed(ids[0, len(prompt.token_ids) :].tolist())

    def facts(self) -> dict[str, Any]:
        return {} if self.assistant is None else {"assistant": self.assistant.config.name_or_path}


def prompt_tensor(token_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([list(token_ids)], device=device)


@contextmanager
def as_a_library(compiled: bool, *models: PreTrainedModel | None) -> Iterator[None]:
    """How others decode: with transformers' own attention; in inference mode, which saves some
    time, unless they compile, in the mode that they chose; and without warnings, which are about
    their own options and would cost time to print.
    """
    with ExitStack() as stack:
        for model in models:
            if model is not None:
                stack.enter_context(library_attention(model))
        stack.enter_context(torch.no_grad() if compiled else torch.inference_mode())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        yield
