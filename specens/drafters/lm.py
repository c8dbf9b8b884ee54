"""A language model as drafter: a small model with the target's vocabulary, or a quantised copy of
the target.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specens.decoding.dense import FinishedText
from specens.decoding.sampling import Sampler
from specens.decoding.target.compiled import CannotCompileError, CompiledModel, widths_for
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import (
    context_limit,
    refuse_training_mode,
    refuse_unsupported,
)
from specens.decoding.target.target import Target
from specens.decoding.types import (
    ROOT,
    Commit,
    Draft,
    Member,
    Plan,
    TokenTree,
    chain_parents,
    depths_of,
    round_confidence,
)
from specens.errors import check_count
from specens.models.load import LoadedModel, check_same_vocabulary


class ModelSource(Protocol):
    """Where a drafter's model comes from, such as a ModelSpec or a TargetCopy."""

    def check(self) -> None:
        """Refuse what can be known to be wrong before anything is loaded."""
        ...

    def load_for(self, target: Any) -> LoadedModel: ...


PIECE = 64
"""So many positions of a text are drafted at in one forward."""


@dataclass
class _Branch:
    """A draft that grows token by token: `ids` is the text with the chain so far, `tip` its last
    node, `path` the chain's probability. At each depth `samples` has the chain's token and its next
    best, each with its distribution, and `confidences` theirs.
    """

    ids: list[int]
    tip: int = ROOT
    path: float = 1.0
    samples: list[list[tuple[int, torch.Tensor | None]]] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)

    def grow(self, logits: torch.Tensor, sampler: Sampler, width: int) -> bool:
        """One more depth, from logits `[vocab]` after `ids`. False if the chain has ended."""
        row = sampler.sample(self.ids, logits, width)
        if row:
            probs = logits.float().softmax(-1)[[token for token, _ in row]].tolist()
            self.samples.append(row)
            self.confidences.append([self.path * prob for prob in probs])
            self.path *= probs[0]
            self.ids.append(row[0][0])
        return bool(row)

    def draft(self) -> Draft:
        """The chain first, then the tokens beside each of its links."""
        rows = [
            list(zip(row, own, strict=True))
            for row, own in zip(self.samples, self.confidences, strict=True)
        ]
        chain = [(*row[0], depth - 1) for depth, row in enumerate(rows)]
        beside = [(*entry, depth - 1) for depth, row in enumerate(rows) for entry in row[1:]]
        entries = chain + beside
        return Draft(
            tuple(token for (token, _), _, _ in entries),
            tuple(parent for _, _, parent in entries),
            draft_probs=tuple(probs for (_, probs), _, _ in entries),
            confidences=tuple(confidence for _, confidence, _ in entries),
        )


class LanguageModel:
    """Drafts a chain of its own most likely tokens; under sampling, its own samples with the
    target's noise. With `num_branches` above 1 it also hangs its next best tokens beside each link
    of the chain, which costs it no further forward.

    `model` is a source to load from, or a model in memory (then the caller answers for the
    vocabulary being the target's).
    """

    def __init__(
        self,
        model: ModelSource | PreTrainedModel,
        num_draft_tokens: int = 4,
        name: str = "lm",
        num_branches: int = 1,
    ) -> None:
        check_count(f"{name}.num_draft_tokens", num_draft_tokens)
        check_count(f"{name}.num_branches", num_branches)
        if not isinstance(model, PreTrainedModel):
            model.check()
        self._source, self.num_branches = model, num_branches
        most = num_draft_tokens * num_branches
        self._member = Member(name, num_draft_tokens, most, stops_early=True)
        self._loaded: LoadedModel | None = None
        self._compiled: CompiledModel | None = None
        self._tried: tuple[object, object] = (None, None)

    @property
    def members(self) -> tuple[Member, ...]:
        return (self._member,)

    @property
    def loaded(self) -> LoadedModel:
        assert self._loaded is not None, "bind comes first"
        return self._loaded

    def facts(self) -> dict[str, Any]:
        return self._loaded.facts() if self._loaded is not None else {}

    def bind(self, target: Target) -> None:
        if isinstance(self._source, PreTrainedModel):
            refuse_training_mode(self._source, self._member.name)
            self._loaded = LoadedModel.of(self._source)
        else:
            self._loaded = self._source.load_for(target)
            check_same_vocabulary(self._member.name, self._loaded.tokenizer, target.tokenizer)
        refuse_unsupported(self._loaded.model)
        self._target = target
        limit = context_limit(self._loaded.model)
        self._member = replace(self._member, context_limit=limit)

    def begin(self, prompt_ids: Sequence[int]) -> LanguageModelProposer:
        return LanguageModelProposer(self, prompt_ids)

    def empty_cache(self, num_tokens: int) -> tuple[KVCache, CompiledModel | None]:
        """In buffers of fixed size when the target's is: this model is then compiled like it, or
        says why not.
        """
        model, like = self.loaded.model, self._target.compiled
        try:
            if self._tried != (model, like):
                self._tried, self._compiled = (model, like), None
                if like is not None:
                    most = self._member.num_draft_tokens + 2  # committed since the last draft
                    compiled = CompiledModel(model, like.options, widths_for(most))
                    compiled.reserve(like.reserved)
                    self._compiled = compiled
            if (compiled := self._compiled) is not None:
                return compiled.begin(num_tokens), compiled
        except CannotCompileError as failure:
            self._compiled = None
            name = self._member.name
            warnings.warn(f"drafter {name}: goes on uncompiled: {failure}", stacklevel=2)
        return KVCache(), None

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's ids, where the processors' own tensors are."""
        logits = logits.to(self._target.device)
        # Padded embeddings: same tokenizer, other length of a logits row. Ids that the target lacks
        # are never proposed.
        vocab_size = self._target.vocab_size
        extra = vocab_size - logits.shape[-1]
        return logits[:vocab_size] if extra <= 0 else pad(logits, (0, extra), value=-torch.inf)

    def width(self, plan: Plan) -> int:
        """How many tokens to propose at each depth."""
        return max(min(self.num_branches, plan.num_nodes // max(plan.num_tokens, 1)), 1)

    @torch.inference_mode()
    def propose_batch(self, text: FinishedText, plans: Sequence[Plan]) -> list[Draft] | None:
        """All positions of a piece of the text in one forward for each depth of the drafts: the
        text is a chain of nodes, and the drafts are branches of it.
        """
        model = Target(self.loaded.model)
        if not model.fits_tree:
            return None
        ids = [*text.prompt_ids, *text.output_ids]
        num_ids = model.model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        num_readable = next(
            (place for place, token in enumerate(ids) if token >= num_ids), len(ids)
        )
        lengths = range(len(text.prompt_ids), len(ids))
        num_open = sum(
            plan.num_tokens > 0 and length <= num_readable
            for plan, length in zip(plans, lengths, strict=True)
        )
        cache = model.prefill(text.prompt_ids) if num_open else KVCache()
        drafts: list[Draft] = []
        for begin in range(0, num_open, PIECE):
            piece = plans[begin : min(begin + PIECE, num_open)]
            drafts += self._branches(model, cache, ids, lengths[begin], piece, text.sampler)
        return drafts + [Draft()] * (len(plans) - num_open)

    def _branches(
        self,
        model: Target,
        cache: KVCache,
        ids: Sequence[int],
        first: int,
        plans: Sequence[Plan],
        sampler: Sampler,
    ) -> list[Draft]:
        """Drafts after `ids[:first]`, `ids[:first + 1]`, ..., one for each plan. The cache holds
        the first of these texts but its last token, and then what comes before the next piece.
        """
        text = ids[first : first + len(plans) - 1]
        tree = TokenTree.chain(text)
        branches = [
            _Branch(list(ids[: first + place]), tip=place - 1) for place in range(len(plans))
        ]
        for depth in range(max(plan.num_tokens for plan in plans)):
            if depth:
                cache.accept(())
                cache.rollback(first - 1)
            logits = model.score(cache, ids[first - 1], tree, "tree")
            tokens, parents = list(tree.token_ids), list(tree.parents)
            for plan, branch in zip(plans, branches, strict=True):
                if depth < plan.num_tokens and branch.grow(
                    self.fit(logits[branch.tip + 1]), sampler, self.width(plan)
                ):
                    parents.append(branch.tip)
                    branch.tip = len(tokens)
                    tokens.append(branch.ids[-1])
            tree = TokenTree(
                tuple(tokens), tuple(parents), depths_of(tuple(parents)), (1,) * len(tokens)
            )
        cache.accept(range(len(text)))
        return [branch.draft() for branch in branches]


class LanguageModelProposer:
    """One sequence. Its cache always holds a prefix of the committed text: after a step it is cut
    back to where its draft and the text part, and after idle steps it catches up in its next
    forward.
    """

    def __init__(self, drafter: LanguageModel, prompt_ids: Sequence[int]) -> None:
        self._drafter = drafter
        self._cache, self._compiled = drafter.empty_cache(len(prompt_ids))
        self._drafted: list[int] = []
        self._base = 0
        limit = drafter.members[0].context_limit
        try:
            if len(prompt_ids) > 1 and (limit is None or len(prompt_ids) <= limit):
                self._next_logits(prompt_ids[:-1])
        except BaseException:
            self.close()
            raise

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        ids = list(context_ids)
        self._base = len(ids)
        width = self._drafter.width(plan)
        if self._compiled is not None and sampler.is_plain_greedy and width == 1:
            tokens, confidences = self._greedy_chain(ids, plan)
            self._drafted = list(tokens)
            return Draft.chain(tokens, confidences=confidences)
        branch = _Branch(ids)
        for _ in range(plan.num_tokens):
            logits = self._next_logits(ids)
            if logits is None or not branch.grow(logits, sampler, width):
                break
            if round_confidence(branch.path) < plan.min_confidence:
                break
        self._drafted = ids[self._base :]
        return branch.draft()

    @torch.inference_mode()
    def _greedy_chain(self, ids: Sequence[int], plan: Plan) -> tuple[list[int], list[float]]:
        """The most likely tokens one after another, and their confidences. Each stays on the device
        and is the next forward's input there; the host reads all of them at the end, at once, and
        only then sees whose confidence is below the share's minimum.
        """
        assert self._compiled is not None
        # [2]: token and its probability; float64 holds both exactly
        drafted: list[torch.Tensor] = []
        for _ in range(plan.num_tokens):
            if not drafted:
                logits = self._next_logits(ids)
                if logits is None:
                    return [], []
            elif self._compiled.takes(self._cache, 1):
                logits = self._drafter.fit(
                    self._compiled.forward(self._cache, drafted[-1][:1].long(), ())[-1]
                )
            else:  # the buffers are full: the model's own forward needs ids
                logits = self._next_logits(
                    [*ids, *(int(token) for token, _ in torch.stack(drafted).tolist())]
                )
                assert logits is not None
            token = logits.argmax(-1, keepdim=True)
            drafted.append(
                torch.cat([token, logits.float().softmax(-1).gather(-1, token)]).double()
            )
        rows = torch.stack(drafted).tolist() if drafted else []
        paths = list(itertools.accumulate((prob for _, prob in rows), operator.mul))
        least = plan.min_confidence
        ends = (i + 1 for i, path in enumerate(paths) if round_confidence(path) < least)
        count = next(ends, len(rows))
        return [int(token) for token, _ in rows[:count]], paths[:count]

    @torch.inference_mode()
    def _next_logits(self, ids: Sequence[int]) -> torch.Tensor | None:
        """Logits `[target's vocab]` after `ids`, feeding what the cache lacks; None if this model
        cannot read the text (an id beyond its own vocabulary).
        """
        logits = feed(self._drafter.loaded, self._cache, ids, self._compiled)
        return None if logits is None else self._drafter.fit(logits)

    def observe(self, commit: Commit) -> None:
        agreed = 0
        # The last emitted token stays outside the cache even if it was drafted (and pruned): it is
        # the next forward's first.
        for drafted, emitted in zip(self._drafted, commit.token_ids[:-1], strict=False):
            if drafted != emitted:
                break
            agreed += 1
        if self._drafted:
            self._cache.rollback(min(self._cache.length, self._base + agreed))
        self._drafted = []

    def close(self) -> None:
        self._cache.close()


@torch.inference_mode()
def feed(
    loaded: LoadedModel, cache: KVCache, ids: Sequence[int], compiled: CompiledModel | None = None
) -> torch.Tensor | None:
    """Logits `[model's vocab]` after `ids`, of which the cache holds a prefix: one forward over the
    rest, at least one id. None, and no forward, when one of these is beyond the model's embeddings.
    """
    embeddings = loaded.model.get_input_embeddings().weight
    new = list(ids[cache.length :])
    if max(new) >= embeddings.shape[0]:  # pyright: ignore[reportIndexIssue]
        return None
    if compiled is not None and compiled.takes(cache, len(new)):
        return compiled.forward(cache, new, chain_parents(len(new) - 1))[-1]
    batch = torch.tensor([new], device=embeddings.device)  # pyright: ignore[reportArgumentType]
    output = loaded.model(batch, cache=cache.dynamic(), use_cache=True, **loaded.last_logits_only)
    return output.logits[0, -1]
