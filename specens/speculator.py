"""As a library: several drafters plugged into any model, in three lines.

spec = specens.attach(model, tokenizer, drafters=["ngram", small_model])
out = spec.generate(input_ids, max_new_tokens=64)
spec.stats
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specens.decoding.budget import Budget, Policy
from specens.decoding.calibrate import QUICK, Effort, calibrate
from specens.decoding.cost_aware import CostAwareBudget
from specens.decoding.costs import CostTable, between, read_costs, refreshed
from specens.decoding.drafter import Drafter
from specens.decoding.generation import merge_options, prepare
from specens.decoding.loop import Decoder
from specens.decoding.self_check import self_check
from specens.decoding.target import LAYOUTS, Layout, Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Coupled, Verifier
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.errors import UserError, check_count


@dataclass(frozen=True)
class Completion:
    """One prompt's result: the emitted ids, why they end, a record per step, and the seconds of prefill and decoding."""

    output_ids: tuple[int, ...]
    finish_reason: str
    steps: tuple[StepRecord, ...]
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, steps: Sequence[StepRecord], prefill_s: float) -> Completion:
        """The result of all steps of a prompt: decoding took what they took."""
        output_ids = tuple(token for step in steps for token in step.token_ids)
        decode_s = sum(step.draft_ms + step.verify_ms + step.host_ms for step in steps) / 1e3
        return cls(output_ids, str(steps[-1].finish_reason), tuple(steps), prefill_s, decode_s)


class Speculator:
    """A target with its drafters, bound and checked. The command line and the library use this same object. `wants_costs`:
    measure what steps cost even if the budget has no use for it.
    """

    def __init__(self, decoder: Decoder, *, seed: int = 0, wants_costs: bool = False) -> None:
        if decoder.layout not in LAYOUTS:
            raise UserError(f"layout={decoder.layout}: choose one of {', '.join(LAYOUTS)}")
        check_laws(decoder.verifier, decoder.drafter)
        decoder.target.check_layout(decoder.layout)
        if decoder.drafter.members:
            self_check(decoder.target, decoder.layout)
        decoder.drafter.bind(decoder.target)
        self.decoder = decoder
        self.seed = seed
        self.wants_costs = wants_costs or decoder.budget.needs_costs
        given = decoder.budget.costs
        self.costs = read_costs(str(given)) if given is not None else None
        self.kept_costs: CostTable | None = None
        """What was measured before on this machine, to be measured once more, quickly."""
        self.costs_in_force: CostTable | None = None
        self._policy: Policy | None = None
        self._done: list[Completion] = []

    @property
    def target(self) -> Target:
        return self.decoder.target

    def complete(
        self,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        *,
        seed: int,
        prompt_key: str,
        on_step: Callable[[StepRecord], object] | None = None,
    ) -> Completion:
        """Decode one prompt to its end, calling `on_step` after each step; the time that takes is not counted."""
        prefill_s, coming = self.begin(prompt_ids, config, seed=seed, prompt_key=prompt_key)
        steps: list[StepRecord] = []
        for step in coming:
            steps.append(step)
            if on_step is not None:
                on_step(step)
        return Completion.of(steps, prefill_s)

    def begin(
        self, prompt_ids: Sequence[int], config: GenerationConfig, *, seed: int, prompt_key: str
    ) -> tuple[float, Iterator[StepRecord]]:
        """Prefill one prompt: the seconds that took, and its steps, each of which is made when it is asked for. What steps cost
        is measured before the first prompt, if that is wanted, and follows the prompts after it.
        """
        costs = self.known_costs(prompt_ids)
        self.costs_in_force = self.costs
        coupled = self.decoder.verifier.coupled
        sampler, stop = prepare(self.target, config, prompt_ids, seed=seed, prompt_key=prompt_key, coupled=coupled)
        self._policy = self.decoder.budget.begin(self.decoder.drafter.members, costs, self._policy)
        cache, prefill_s = self.decoder.prefill(prompt_ids)
        return prefill_s, self._learning(self.decoder.decode(prompt_ids, cache, sampler, stop, self._policy))

    def _learning(self, coming: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The same steps; after the last of them, the cost table has moved to what they took."""
        steps: list[StepRecord] = []
        for step in coming:
            steps.append(step)
            yield step
        budget = self.decoder.budget
        if self.costs is not None and budget.refresh and budget.costs is None:
            self.costs = refreshed(self.costs, steps)

    def forget(self) -> None:
        """Begin anew with what a budget has learned from one prompt for the next; costs stay known."""
        self._policy = None

    def known_costs(self, prompt_ids: Sequence[int]) -> CostTable:
        """The cost table in force; measured now if the budget wants one and there is none."""
        if self.costs is None and self.wants_costs:
            self.target.check_prompt(prompt_ids, len(prompt_ids))
            effort = Effort() if self.kept_costs is None else QUICK
            measured = calibrate(self.decoder, tuple(prompt_ids), self.decoder.budget.max_nodes, effort)
            self.costs = measured if self.kept_costs is None else between(self.kept_costs, measured)
        return self.costs or CostTable()

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
        """`model.generate` with the same arguments and return shape, for one prompt `[1, seq]`: the ids `[1, seq + new]`, or
        an output object with `return_dict_in_generate=True`. Options that cannot be honoured are refused by name.

        Sampling is keyed by (seed, prompt, position): the same call gives the same text, another seed another one.
        """
        if input_ids is not None and inputs is not None:
            raise UserError("inputs and input_ids are two names for the prompt: give one of them")
        ids = input_ids if input_ids is not None else inputs
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
            raise UserError(
                f"input_ids must be a tensor of token ids of shape [1, seq], got {type(ids).__name__}; "
                "a tokenizer's output is passed as **inputs"
            )
        if ids.dim() != 2 or ids.shape[0] != 1:
            got = tuple(ids.shape)
            raise UserError(f"input_ids must have shape [1, seq], got {got}; decode a batch's prompts one by one")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UserError("attention_mask hides tokens of the prompt; strip the padding instead")
        config = merge_options(self.target, generation_config, **options)
        prompt_ids = ids[0].tolist()
        key, seed = ",".join(map(str, prompt_ids)), self.seed if seed is None else seed
        check_count("seed", seed, 0)
        with streaming(streamer, ids) as on_step:
            done = self.complete(prompt_ids, config, seed=seed, prompt_key=key, on_step=on_step)
        self._done.append(done)
        sequences: Any = torch.cat([ids, torch.tensor([done.output_ids], dtype=ids.dtype, device=ids.device)], dim=-1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

    @property
    def stats(self) -> pd.DataFrame:
        """One row per drafter over all `generate` calls so far: win rate, acceptance, cost (specens.analysis.metrics)."""
        from specens.analysis.metrics import drafter_table, summarise
        from specens.tables import PromptRecord, frames_of

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


def check_laws(verifier: Verifier, drafter: Drafter) -> None:
    """Refuse a drafter that cannot say from which law it draws, where the verifier has to know."""
    for member in () if verifier.coupled else drafter.members:
        if member.coupled_only:
            raise UserError(
                f"drafter {member.name}: cannot say from which law it draws its tokens, which verifier={verifier.name} "
                "has to know; use verifier=coupled"
            )


@contextmanager
def streaming(streamer: BaseStreamer | None, prompt: torch.Tensor) -> Iterator[Callable[[StepRecord], None]]:
    """Feed a streamer of transformers: the prompt, each emitted token, and the end, also when decoding fails."""

    def on_step(step: StepRecord) -> None:
        for token in step.token_ids if streamer is not None else ():
            streamer.put(torch.tensor([token]))  # pyright: ignore[reportOptionalMemberAccess]

    try:
        if streamer is not None:
            streamer.put(prompt.cpu())
        yield on_step
    finally:
        if streamer is not None:
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
) -> Speculator:
    """Plug drafters into `model`.

    `drafters` is one drafter or several, as a sequence or as a mapping from names: each a Drafter, a causal language model
    with the target's vocabulary, or the name of a file in conf/drafter, such as "ngram" or "quantized". `verifier` and `budget`
    are one, or the name of a file in conf/verifier or conf/budget, such as "residual" and "priority".
    """
    rule = _named("verifier", verifier) or Coupled()
    decoder = Decoder(
        Target(model, tokenizer), _ensemble(drafters), _named("budget", budget) or CostAwareBudget(), rule, layout
    )
    return Speculator(decoder, seed=seed)


def _named(group: str, entry: Any) -> Any:
    if isinstance(entry, str):
        from specens.config import named

        return named(group, entry)
    return entry


def _ensemble(drafters: Any) -> Drafter:
    if isinstance(drafters, str | PreTrainedModel) or not isinstance(drafters, Sequence | Mapping):
        drafters = [drafters]
    if isinstance(drafters, Mapping):
        return Ensemble({name: _drafter(drafter, name) for name, drafter in drafters.items()})
    members: dict[str, Drafter] = {}
    for entry in drafters:
        drafter = _drafter(entry, "lm")
        name = entry if isinstance(entry, str) else drafter.members[0].name if drafter.members else "none"
        if name in members:
            raise UserError(
                f"two drafters are called {name!r}; pass a mapping with a name for each: drafters={{'a': ..., 'b': ...}}"
            )
        members[name] = drafter
    return Ensemble(members)


def _drafter(entry: Any, name: str) -> Drafter:
    if isinstance(entry, str):
        return _named("drafter", entry)
    if isinstance(entry, PreTrainedModel):
        return LanguageModel(entry, name=name)
    if isinstance(entry, Drafter) and not isinstance(entry, type):  # a class has the names too
        return entry
    got = getattr(entry, "__name__", None) or reprlib.repr(entry)
    raise UserError(f"drafter {name}: expected a drafter, a causal language model or a name in conf/drafter, got {got}")
