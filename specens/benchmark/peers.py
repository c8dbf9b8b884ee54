"""transformers' own generate, on the same model object: greedy, with prompt lookup, assisted by a small model, compiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specens.benchmark.measure import Clock, Timed
from specens.benchmark.systems import Ground
from specens.drafters.lm import ModelSource
from specens.errors import check_count
from specens.rendering import Prompt


@dataclass(frozen=True)
class Transformers:
    """`model.generate` with the run's own generation options. `prompt_lookup_num_tokens`: with prompt lookup; `assistant`: with
    an assistant model, by transformers' defaults (20 tokens, cut where it is unsure); `compiled`: with a static cache, which
    transformers compiles on CUDA. The cache then has the length of the run's longest text, so that one graph serves all prompts.

    Its clock is a streamer: it starts when the tokens of the first forward are known, and what that forward emitted is not
    counted. So the prompt, which generate reads in its first forward, costs it nothing, nor does the draft verified with it.
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

    def load(self, ground: Ground) -> TransformersRunner:
        assistant = None if self.assistant is None else self.assistant.load_for(ground.target).model
        options: dict[str, Any] = {}
        if self.prompt_lookup_num_tokens is not None:
            options["prompt_lookup_num_tokens"] = self.prompt_lookup_num_tokens
        if self.compiled:
            options |= {"cache_implementation": "static", "max_cache_len": ground.longest_tokens}
        return TransformersRunner(ground, assistant, options, self.compiled)


@dataclass(frozen=True)
class TransformersRunner:
    """One of the ways above, ready to decode."""

    ground: Ground
    assistant: PreTrainedModel | None
    options: dict[str, Any]
    compiled: bool = False

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        config = self.ground.config_for(prompt, max_new_tokens)
        config.update(**self.options)
        ids = prompt_tensor(prompt.token_ids, self.ground.target.device)
        arguments: dict[str, Any] = {} if self.assistant is None else {"assistant_model": self.assistant}
        if config.stop_strings:
            arguments["tokenizer"] = self.ground.target.tokenizer
        clock, model = Clock(self.ground.target.device), self.ground.target.model
        with without_gradients(self.compiled), quietly():
            ids = model.generate(  # pyright: ignore[reportCallIssue]
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **arguments
            )
        return clock.timed(ids[0, len(prompt.token_ids) :].tolist())

    def facts(self) -> dict[str, Any]:
        return {} if self.assistant is None else {"assistant": str(self.assistant.config.name_or_path)}


def prompt_tensor(token_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([list(token_ids)], device=device)


def without_gradients(compiled: bool) -> Any:
    """Inference mode saves a peer some time; what it compiles is left in the mode that it chose itself."""
    return torch.no_grad() if compiled else torch.inference_mode()


def quietly() -> warnings.catch_warnings[None]:
    """A peer's warnings are about its own options, and printing them would cost it time."""
    return warnings.catch_warnings(action="ignore")
