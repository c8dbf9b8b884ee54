"""A language model as drafter: a small model with the target's vocabulary, or a quantised copy of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specens.decoding.cache import KVCache
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target, refuse_training_mode, refuse_unsupported
from specens.decoding.types import Commit, Draft, Member, Plan
from specens.errors import check_count
from specens.models import LoadedModel, ModelSpec, TargetCopy, check_same_vocabulary


class LanguageModel:
    """Drafts a chain of its own most likely tokens; under sampling, its own draws with the target's noise.

    Its cache always holds a prefix of the committed text: after a step it is cut back to where its draft and the text part,
    and a member that was idle catches up in its next forward. `model` is a spec to load, or a model in memory (then the
    caller answers for the vocabulary being the target's).
    """

    def __init__(
        self, model: ModelSpec | TargetCopy | PreTrainedModel, num_draft_tokens: int = 4, name: str = "lm"
    ) -> None:
        check_count(f"{name}.num_draft_tokens", num_draft_tokens)
        if not isinstance(model, PreTrainedModel):
            model.check()
        self._source = model
        self._member = Member(name, num_draft_tokens, num_draft_tokens)
        self._loaded: LoadedModel | None = None
        self._cache = KVCache()
        self._drafted: list[int] = []
        self._base = 0

    @property
    def members(self) -> tuple[Member, ...]:
        return (self._member,)

    def facts(self) -> dict[str, Any]:
        return self._loaded.facts() if self._loaded is not None else {}

    @property
    def cached_tokens(self) -> int:
        """Positions in this drafter's own cache."""
        return self._cache.length

    def bind(self, target: Target) -> None:
        if isinstance(self._source, PreTrainedModel):
            refuse_training_mode(self._source, self._member.name)
            self._loaded = LoadedModel.of(self._source)
        else:
            self._loaded = self._source.load_for(target)
            check_same_vocabulary(self._member.name, self._loaded.tokenizer, target.tokenizer)
        refuse_unsupported(self._loaded.model)
        self._vocab_size, self._device = target.vocab_size, target.device
        limit = getattr(self._loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        num_tokens = self._member.num_draft_tokens
        self._member = Member(self._member.name, num_tokens, num_tokens, context_limit=limit)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._cache, self._drafted = KVCache(), []
        limit = self._member.context_limit
        if len(prompt_ids) > 1 and (limit is None or len(prompt_ids) <= limit):
            self._next_logits(prompt_ids[:-1])

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        ids = list(context_ids)
        self._base = len(ids)
        for _ in range(plan.num_tokens):
            logits = self._next_logits(ids)
            if logits is None:
                break
            ids.append(sampler.pick(ids, logits))
        self._drafted = ids[self._base :]
        return Draft.chain(self._drafted)

    @torch.inference_mode()
    def _next_logits(self, ids: Sequence[int]) -> torch.Tensor | None:
        """Logits `[target's vocab]` after `ids`, feeding what the cache lacks; None if this model cannot read the text
        (an id beyond its own vocabulary).
        """
        assert self._loaded is not None, "bind comes first"
        model = self._loaded.model
        embeddings = model.get_input_embeddings().weight
        new = list(ids[self._cache.length :])
        if max(new) >= embeddings.shape[0]:  # pyright: ignore[reportIndexIssue]
            return None
        batch = torch.tensor([new], device=embeddings.device)  # pyright: ignore[reportArgumentType]
        output = model(batch, cache=self._cache.states, use_cache=True, **self._loaded.last_logits_only)
        logits = output.logits[0, -1].to(self._device)  # where the processors' own tensors are
        # Padded embeddings: same tokenizer, other length of a logits row. Ids that the target lacks are never proposed.
        extra = self._vocab_size - logits.shape[-1]
        return logits[: self._vocab_size] if extra <= 0 else pad(logits, (0, extra), value=-torch.inf)

    def observe(self, commit: Commit) -> None:
        agreed = 0
        # The last emitted token stays outside the cache even if it was drafted (and pruned): it is the next forward's first.
        for drafted, emitted in zip(self._drafted, commit.token_ids[:-1], strict=False):
            if drafted != emitted:
                break
            agreed += 1
        if self._drafted:
            self._cache.rollback(min(self._cache.length, self._base + agreed))
        self._drafted = []
