"""transformers' own generation options -> a Sampler and StopRules for one prompt.

Options are read, merged and turned into logits processors and stop tests by transformers itself, so
that they mean here what they mean in `model.generate`. What cannot run on a token tree is refused
by name.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from specens.compat import generation_config, generation_defaults, logits_processors
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules, StopTest
from specens.decoding.target.target import Target
from specens.errors import UserError, check_count, check_list, check_number

HONOURED = frozenset(
    {
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "stop_strings",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "return_dict_in_generate",
    }
)
"""Options of GenerationConfig that mean the same here; any other one that is set to more than its
default is refused.
"""

WITHOUT_EFFECT = frozenset(
    {
        "transformers_version",
        "_from_model_config",
        "decoder_start_token_id",
        "early_stopping",
        "length_penalty",
        "max_cache_len",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "is_assistant",
        "compile_config",
        "disable_compile",
        "diversity_penalty",
        "num_beam_groups",
    }
)
"""Options that cannot change the output of AR decoding with one beam."""


def merge_options(
    target: Target, given: GenerationConfig | None, **options: Any
) -> GenerationConfig:
    """The model's own generation config, overridden by `given` and `options`, or a UserError that
    names what cannot be honoured. `max_length` stays None unless somebody set it.
    """
    model: Any = target.model
    explicit = [
        options.get("max_length"),
        given and given.max_length,
        model.generation_config.max_length,
    ]
    try:
        config, unknown = generation_config(model, given, options)
    except (ValueError, TypeError) as error:
        raise UserError(f"generation options: {error}") from error
    if unknown:
        known = inspect.signature(model.generate).parameters
        name = sorted(unknown)[0]
        what = (
            "argument {} of generate cannot be honoured here"
            if name in known
            else "unknown generation option {}"
        )
        raise UserError(f"{what.format(repr(name))}; leave it out")
    for name in ("max_length", "max_new_tokens", "min_new_tokens"):
        if options.get(name) is not None:
            check_count(name, options[name], 0)
    config.max_length = next((length for length in explicit if length is not None), None)
    defaults = generation_defaults()
    for name, value in config.to_dict().items():
        if (
            name in HONOURED
            or name in WITHOUT_EFFECT
            or value is None
            or value == defaults.get(name)
            or value is False
        ):
            continue
        raise UserError(
            f"generation option {name}={value!r} cannot be honoured in speculative decoding; leave "
            "it out"
        )
    _check_temperature(config.temperature)
    if config.do_sample and config.temperature == 0:
        # the limit of sampling at low temperatures, and what people mean by it
        config.do_sample = False
    return config


def _check_temperature(temperature: float | None) -> None:
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature={temperature}: give a number of 0 (greedy) or more")


def prepare(
    target: Target,
    config: GenerationConfig,
    prompt_ids: Sequence[int],
    *,
    seed: int,
    prompt_key: str,
    coupled: bool = True,
) -> tuple[Sampler, StopRules]:
    """The sampler and the stop rules of one prompt. The noise is keyed by (seed, prompt_key), not
    by what ran before; `coupled` says whether drafters share it.
    """
    config, num_prompt = copy.deepcopy(config), len(prompt_ids)
    if config.max_new_tokens is not None:
        config.max_length = num_prompt + config.max_new_tokens
    elif config.max_length is None:
        config.max_length = num_prompt + generation_defaults()["max_length"]
    if config.max_length <= num_prompt:
        raise UserError(
            f"nothing to generate: the prompt has {num_prompt} tokens and max_length is "
            f"{config.max_length}"
        )
    target.check_prompt(prompt_ids, config.max_length)
    try:
        processors = logits_processors(target.model, config, num_prompt, target.device)
    except ValueError as error:
        raise UserError(f"generation options: {error}") from error
    test = stop_test(config, target.tokenizer)
    stop = StopRules(config.max_length, eos_ids(config), target.context_limit, test)
    noise = KeyedNoise(seed, prompt_key) if config.do_sample else None
    return Sampler(processors, noise, coupled=coupled), stop


def eos_ids(config: GenerationConfig) -> tuple[int, ...]:
    """All ids that end a text: the generation config's list, the one source of truth (a drafter's
    never ends anything).
    """
    ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def stop_test(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None
) -> StopTest | None:
    """transformers' own test for stop strings, also those split over tokens, on the end of the ids
    only.
    """
    if not config.stop_strings:
        return None
    if tokenizer is None:
        raise UserError(
            "stop strings need the target's tokenizer: specens.attach(model, tokenizer, ...)"
        )
    criteria = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer)

    def test(ids: Sequence[int]) -> bool:
        tail = torch.tensor([list(ids[-criteria.maximum_token_len :])])
        return bool(criteria(tail, None))  # pyright: ignore[reportArgumentType]

    return test


@dataclass(frozen=True)
class SamplingOptions:
    """The `sampling.*` overrides. Temperature 0 is greedy; `eos_token_ids` None takes the model's
    own.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    bad_words: list[str] = field(default_factory=list)
    eos_token_ids: list[int] | None = None
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_count("sampling.max_new_tokens", self.max_new_tokens)
        for name in ("min_new_tokens", "top_k", "no_repeat_ngram_size", "seed"):
            check_count(f"sampling.{name}", getattr(self, name), 0)
        check_number("sampling.temperature", self.temperature)
        for name in ("top_p", "min_p"):
            check_number(f"sampling.{name}", getattr(self, name), most=1)
        check_number("sampling.repetition_penalty", self.repetition_penalty, above=True)
        for name in ("stop", "bad_words"):
            check_list(f"sampling.{name}", getattr(self, name), str, "['###']")
        if self.eos_token_ids is not None:
            check_list("sampling.eos_token_ids", self.eos_token_ids, int, "[2,7]")
        for token in self.eos_token_ids or ():
            check_count("sampling.eos_token_ids", token, 0)
        defaults = type(self).__dict__
        unused = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) != defaults[n]]
        if self.temperature == 0 and unused:
            warnings.warn(
                f"sampling.{unused[0]} has no effect at temperature 0 (greedy)", stacklevel=2
            )

    def generation_config(self, target: Target) -> GenerationConfig:
        """The same as transformers' options, merged with the model's own defaults."""
        sampled = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p or None,
        }
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens or None,
            "do_sample": self.temperature > 0,
            "repetition_penalty": self.repetition_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "bad_words_ids": self._bad_words_ids(target.tokenizer),
            "stop_strings": list(self.stop) or None,
            **(sampled if self.temperature > 0 else {}),
        }
        if self.eos_token_ids is not None:
            options["eos_token_id"] = list(self.eos_token_ids)
        return merge_options(target, None, **options)

    def _bad_words_ids(self, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]] | None:
        """Each word at the start of a text and after a space: most vocabularies have other tokens
        for the two.
        """
        if not self.bad_words:
            return None
        assert tokenizer is not None
        texts = [text for word in self.bad_words for text in (word, f" {word}")]
        return [
            ids
            for ids in (tokenizer.encode(text, add_special_tokens=False) for text in texts)
            if ids
        ]
