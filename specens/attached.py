"""As a library: several drafters plugged into any model, in three lines.

spec = specens.attach(model, tokenizer, drafters=["ngram", small_model])
out = spec.generate(input_ids, max_new_tokens=64)
spec.stats
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specens.analysis.summary import drafter_table, summarise
from specens.config.build import named
from specens.config.compose import group_names
from specens.decoding.budgets.base import Budget
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.drafter import Drafter
from specens.decoding.generation import merge_options
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Completion, Speculator
from specens.decoding.target.supported import Layout
from specens.decoding.target.target import Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Coupled, Verifier
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.errors import UserError, check_count
from specens.models.load import ModelSpec
from specens.records.schema import PromptRecord, frames_of


class Attached:
    """A model with its drafters. Its `speculator` decodes; `generate` has the arguments of
    transformers' own. Several threads may generate at once.
    """

    def __init__(self, speculator: Speculator, seed: int) -> None:
        self.speculator = speculator
        self.seed = seed
        self._done: list[Completion] = []

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        inputs: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """`model.generate` with the same arguments and return shape, for one prompt `[1, seq]`: the
        ids `[1, seq + new]`, or an output object with `return_dict_in_generate=True`. Options that
        cannot be honoured are refused by name.

        Sampling is keyed by (seed, prompt, position): the same call gives the same text, another
        seed another one.
        """
        if input_ids is not None and inputs is not None:
            raise UserError("inputs and input_ids are two names for the prompt: give one of them")
        ids = _checked(input_ids if input_ids is not None else inputs, attention_mask)
        config = merge_options(self.speculator.target, generation_config, **options)
        prompt_ids = ids[0].tolist()
        key, seed = ",".join(map(str, prompt_ids)), self.seed if seed is None else seed
        check_count("seed", seed, 0)
        complete = self.speculator.complete
        with streaming(streamer, ids) as on_step:
            done = complete(prompt_ids, config, seed=seed, prompt_key=key, on_step=on_step)
        self._done.append(done)
        new = torch.tensor([done.output_ids], dtype=ids.dtype, device=ids.device)
        whole: Any = torch.cat([ids, new], dim=-1)
        as_object = config.return_dict_in_generate
        return GenerateDecoderOnlyOutput(sequences=whole) if as_object else whole

    @property
    def stats(self) -> pd.DataFrame:
        """One row per drafter over all `generate` calls so far: win rate, acceptance, cost (see
        analysis/metrics.py).
        """
        rows = [
            (
                PromptRecord(
                    prompt_id=str(number),
                    output_ids=done.output_ids,
                    finish_reason=done.finish_reason,
                    num_steps=len(done.steps),
                    decode_s=done.decode_s,
                    prefill_s=done.prefill_s,
                ),
                done.steps,
            )
            for number, done in enumerate(self._done)
        ]
        return drafter_table(summarise(*frames_of(rows)))


def _checked(ids: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
        raise UserError(
            f"input_ids must be a tensor of token ids of shape [1, seq], got {type(ids).__name__}; "
            "a tokenizer's output is passed as **inputs"
        )
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise UserError(
            f"input_ids must have shape [1, seq], got {tuple(ids.shape)}; decode a batch's prompts "
            "one by one"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError("attention_mask hides tokens of the prompt; strip the padding instead")
    return ids


@contextmanager
def streaming(
    streamer: BaseStreamer | None, prompt: torch.Tensor
) -> Iterator[Callable[[StepRecord], None]]:
    """Feed a streamer of transformers: the prompt, each emitted token, and the end, also when
    decoding fails.
    """
    if streamer is None:
        yield lambda step: None
        return

    def on_step(step: StepRecord) -> None:
        for token in step.token_ids:
            streamer.put(torch.tensor([token]))

    try:
        streamer.put(prompt.cpu())
        yield on_step
    finally:
        streamer.end()


def attach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafters: Any = "ngram",
    *,
    budget: Budget | str | None = None,
    verifier: Verifier | str | None = None,
    layout: Layout = "tree",
    seed: int = 0,
) -> Attached:
    """Plug drafters into `model`, which is left as it is.

    `drafters` is one drafter or several, as a sequence or as a mapping from names: each a Drafter,
    a causal language model with the target's vocabulary, or the name of a file in conf/drafter,
    such as "ngram" or "quantized". `verifier` and `budget` are one, or the name of a file in
    conf/verifier or conf/budget, such as "residual" and "priority".
    """
    decoder = Decoder(
        Target(model, tokenizer),
        _ensemble(drafters),
        _named("budget", budget) or CostAwareBudget(),
        _named("verifier", verifier) or Coupled(),
        layout,
    )
    return Attached(Speculator(decoder), seed)


def load_model(source: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, ready to `attach` to: `source` is the name of a file in conf/model
    (such as "smollm2-135m"), a folder, a GGUF file or a hub id; `options` are those of
    models.load.ModelSpec, such as dtype="bfloat16". On a CPU its weights are packed.
    """
    if source in group_names("model"):
        spec: ModelSpec = replace(named("model", source), **options)
    else:
        spec = ModelSpec(source, **options)
    loaded = spec.load()
    assert loaded.tokenizer is not None
    return loaded.model, loaded.tokenizer


def _named(group: str, entry: Any) -> Any:
    return named(group, entry) if isinstance(entry, str) else entry


def _ensemble(drafters: Any) -> Drafter:
    is_one = isinstance(drafters, str | PreTrainedModel)
    if is_one or not isinstance(drafters, Sequence | Mapping):
        drafters = [drafters]
    if isinstance(drafters, Mapping):
        return Ensemble({name: _drafter(drafter, name) for name, drafter in drafters.items()})
    members: dict[str, Drafter] = {}
    for entry in drafters:
        drafter = _drafter(entry, "lm")
        own = drafter.members[0].name if drafter.members else "none"
        name = entry if isinstance(entry, str) else own
        if name in members:
            raise UserError(
                f"two drafters are called {name!r}; pass a mapping with a name for each: "
                "drafters={'a': ..., 'b': ...}"
            )
        members[name] = drafter
    return Ensemble(members)


def _drafter(entry: Any, name: str) -> Drafter:
    if isinstance(entry, str):
        return named("drafter", entry)
    if isinstance(entry, PreTrainedModel):
        return LanguageModel(entry, name=name)
    if isinstance(entry, Drafter) and not isinstance(entry, type):  # a class has the names too
        return entry
    got = getattr(entry, "__name__", None) or reprlib.repr(entry)
    hint = ""
    if hasattr(entry, "start") and not hasattr(entry, "begin"):
        hint = "; it has start() and no begin(), see docs/extending.md"
    raise UserError(
        f"drafter {name}: expected a drafter, a causal language model or a name in conf/drafter, "
        f"got {got}{hint}"
    )
