"""A language model as drafter: a small model with the target's vocabulary, or a quantised copy of the target."""

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

from specens.decoding.attention import grouped
from specens.decoding.cache import KVCache
from specens.decoding.compiled import CannotCompileError, CompiledModel, widths_for
from specens.decoding.dense import Passage
from specens.decoding.refusals import refuse_training_mode, refuse_unsupported
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan, TokenTree, chain_parents, depths_of, rounded
from specens.errors import check_count
from specens.models import LoadedModel, check_same_vocabulary


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
    """A draft that grows token by token: `ids` is the text with the chain so far, `path` the chain's probability."""

    ids: list[int]
    tip: int = ROOT
    path: float = 1.0
    drawn: list[list[tuple[int, torch.Tensor | None]]] = field(default_factory=list)
    """At each depth: the chain's token, and its next best, each with its law."""
    claims: list[list[float]] = field(default_factory=list)

    def grow(self, logits: torch.Tensor, sampler: Sampler, width: int) -> bool:
        """One more depth, from logits `[vocab]` after `ids`. False if the chain has ended."""
        row = sampler.draw(self.ids, logits, width)
        if row:
            probs = logits.float().softmax(-1)[[token for token, _ in row]].tolist()
            self.drawn.append(row)
            self.claims.append([self.path * prob for prob in probs])
            self.path *= probs[0]
            self.ids.append(row[0][0])
        return bool(row)

    def draft(self) -> Draft:
        chain = [(*row[0], depth - 1) for depth, row in enumerate(self.drawn)]
        beside = [(*entry, depth - 1) for depth, row in enumerate(self.drawn) for entry in row[1:]]
        tokens, laws, parents = zip(*chain, *beside, strict=True) if chain else ((), (), ())
        claims = [row[0] for row in self.claims] + [claim for row in self.claims for claim in row[1:]]
        return Draft(tokens, parents, laws=laws, claims=tuple(claims))


class LanguageModel:
    """Drafts a chain of its own most likely tokens; under sampling, its own draws with the target's noise. With `num_branches`
    above 1 it also hangs its next best tokens beside each link of the chain, which costs it no further forward.

    Its cache always holds a prefix of the committed text: after a step it is cut back to where its draft and the text part,
    and a member that was idle catches up in its next forward. `model` is a source to load from, or a model in memory (then the
    caller answers for the vocabulary being the target's).
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
        self._source = model
        self._num_branches = num_branches
        self._member = Member(name, num_draft_tokens, num_draft_tokens * num_branches, stops_early=True)
        self._loaded: LoadedModel | None = None
        self._target: Target | None = None
        self._compiled: CompiledModel | None = None
        self._tried: tuple[object, object] = (None, None)
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
        self._target = target
        self._vocab_size, self._device = target.vocab_size, target.device
        limit = getattr(self._loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._member = replace(self._member, context_limit=limit)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._cache = KVCache()  # gives the buffers back
        self._cache, self._drafted = self._empty_cache(len(prompt_ids)), []
        limit = self._member.context_limit
        if len(prompt_ids) > 1 and (limit is None or len(prompt_ids) <= limit):
            self._next_logits(prompt_ids[:-1])

    def _empty_cache(self, num_tokens: int) -> KVCache:
        """In buffers of fixed size when the target's is: this model is then compiled like it, or says why not."""
        assert self._target is not None and self._loaded is not None, "bind comes first"
        model, like = self._loaded.model, self._target.compiled
        try:
            if self._tried != (model, like):
                self._tried, self._compiled = (model, like), None
                if like is not None:
                    most = self._member.num_draft_tokens + 2  # what was committed since the last draft
                    self._compiled = CompiledModel(model, like.options, widths_for(most))
                    self._compiled.reserve(like.reserved)
            if self._compiled is not None:
                return self._compiled.begin(num_tokens)
        except CannotCompileError as failure:
            self._compiled = None
            warnings.warn(f"drafter {self._member.name}: goes on uncompiled: {failure}", stacklevel=2)
        return KVCache()

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        ids = list(context_ids)
        self._base = len(ids)
        width = self._width(plan)
        if self._compiled is not None and sampler.is_plain_greedy and width == 1:
            tokens, said = self._greedy_chain(ids, plan)
            self._drafted = list(tokens)
            return Draft.chain(tokens, claims=said)
        branch = _Branch(ids)
        for _ in range(plan.num_tokens):
            logits = self._next_logits(ids)
            if logits is None or not branch.grow(logits, sampler, width) or rounded(branch.path) < plan.min_claim:
                break
        self._drafted = ids[self._base :]
        return branch.draft()

    @torch.inference_mode()
    def propose_everywhere(self, text: Passage, plans: Sequence[Plan]) -> list[Draft] | None:
        """All positions of a piece of the text in one forward for each depth of the drafts: the text is a chain of nodes, and
        the drafts are branches of it.
        """
        assert self._loaded is not None, "bind comes first"
        model = Target(self._loaded.model)
        if not model.fits_tree:
            return None
        ids = [*text.prompt_ids, *text.output_ids]
        num_ids = model.model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
        num_readable = next((place for place, token in enumerate(ids) if token >= num_ids), len(ids))
        lengths = range(len(text.prompt_ids), len(ids))
        num_open = sum(
            plan.num_tokens > 0 and length <= num_readable for plan, length in zip(plans, lengths, strict=True)
        )
        cache = model.prefill(text.prompt_ids) if num_open else KVCache()
        drafts: list[Draft] = []
        for begin in range(0, num_open, PIECE):
            piece = plans[begin : min(begin + PIECE, num_open)]
            drafts += self._branches(model, cache, ids, lengths[begin], piece, text.sampler)
        return drafts + [Draft()] * (len(plans) - num_open)

    def _branches(
        self, model: Target, cache: KVCache, ids: Sequence[int], first: int, plans: Sequence[Plan], sampler: Sampler
    ) -> list[Draft]:
        """Drafts after `ids[:first]`, `ids[:first + 1]`, ..., one for each plan. The cache holds the first of these texts but its
        last token, and then what comes before the next piece.
        """
        text = ids[first : first + len(plans) - 1]
        tree = TokenTree.chain(text)
        branches = [_Branch(list(ids[: first + place]), tip=place - 1) for place in range(len(plans))]
        for depth in range(max(plan.num_tokens for plan in plans)):
            if depth:
                cache.accept(())
                cache.rollback(first - 1)
            logits = model.score(cache, ids[first - 1], tree, "tree")
            tokens, parents = list(tree.token_ids), list(tree.parents)
            for plan, branch in zip(plans, branches, strict=True):
                if depth < plan.num_tokens and branch.grow(
                    self._fit(logits[branch.tip + 1]), sampler, self._width(plan)
                ):
                    parents.append(branch.tip)
                    branch.tip = len(tokens)
                    tokens.append(branch.ids[-1])
            tree = TokenTree(tuple(tokens), tuple(parents), depths_of(tuple(parents)), (1,) * len(tokens))
        cache.accept(range(len(text)))
        return [branch.draft() for branch in branches]

    def _width(self, plan: Plan) -> int:
        """How many tokens to propose at each depth."""
        return max(min(self._num_branches, plan.num_nodes // max(plan.num_tokens, 1)), 1)

    @torch.inference_mode()
    def _greedy_chain(self, ids: Sequence[int], plan: Plan) -> tuple[list[int], list[float]]:
        """The most likely tokens one after another, and their claims. Each stays on the device and is the next forward's input
        there; the host reads all of them at the end, at once, and only then can see that some claim too little.
        """
        assert self._compiled is not None
        drawn: list[torch.Tensor] = []  # [2]: token and its probability; float64 holds both exactly
        for _ in range(plan.num_tokens):
            if not drawn:
                logits = self._next_logits(ids)
                if logits is None:
                    return [], []
            elif self._compiled.takes(self._cache, 1):
                logits = self._fit(self._compiled.forward(self._cache, drawn[-1][:1].long(), ())[-1])
            else:  # the buffers are full: the model's own forward needs ids
                logits = self._next_logits([*ids, *(int(token) for token, _ in torch.stack(drawn).tolist())])
                assert logits is not None
            token = logits.argmax(-1, keepdim=True)
            drawn.append(torch.cat([token, logits.float().softmax(-1).gather(-1, token)]).double())
        rows = torch.stack(drawn).tolist() if drawn else []
        claims = list(itertools.accumulate((prob for _, prob in rows), operator.mul))
        count = next((i + 1 for i, claim in enumerate(claims) if rounded(claim) < plan.min_claim), len(rows))
        return [int(token) for token, _ in rows[:count]], claims[:count]

    @torch.inference_mode()
    def _next_logits(self, ids: Sequence[int]) -> torch.Tensor | None:
        """Logits `[target's vocab]` after `ids`, feeding what the cache lacks; None if this model cannot read the text
        (an id beyond its own vocabulary).
        """
        assert self._loaded is not None, "bind comes first"
        logits = feed(self._loaded, self._cache, ids, self._compiled)
        return None if logits is None else self._fit(logits)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.to(self._device)  # where the processors' own tensors are
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


@torch.inference_mode()
def feed(
    loaded: LoadedModel, cache: KVCache, ids: Sequence[int], compiled: CompiledModel | None = None
) -> torch.Tensor | None:
    """Logits `[model's vocab]` after `ids`, of which the cache holds a prefix: one forward over the rest, at least one id.
    None, and no forward, when one of these is beyond the model's embeddings.
    """
    embeddings = loaded.model.get_input_embeddings().weight
    new = list(ids[cache.length :])
    if max(new) >= embeddings.shape[0]:  # pyright: ignore[reportIndexIssue]
        return None
    if compiled is not None and compiled.takes(cache, len(new)):
        return compiled.forward(cache, new, chain_parents(len(new) - 1))[-1]
    batch = torch.tensor([new], device=embeddings.device)  # pyright: ignore[reportArgumentType]
    with grouped(loaded.model):
        output = loaded.model(batch, cache=cache.states, use_cache=True, **loaded.last_logits_only)
    return output.logits[0, -1]
