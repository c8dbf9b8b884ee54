"""The exact distribution of an emitted text: every outcome of all randomness, with its probability,
through the real code.

`outcomes` runs a function again and again, each time with a noise that takes another path through
its samples and flips. With it `step_distribution` has the distribution of what one step emits
(propose, merge, score, verify, trim), and `decoder_distribution` that of whole texts of the real
loop. `target_distribution` is what they must be: a product of the target's own probabilities, from
forwards of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from helpers import ScriptedTarget, decode_steps
from transformers import LogitsProcessorList

from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.drafter import condition, hidden_layers
from specens.decoding.loop import Decoder
from specens.decoding.merge import merge
from specens.decoding.sampling import Sampler, TreeScores
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Member, Plan, Share, TokenTree
from specens.models.tiny import random_model

T = TypeVar("T")
Distribution = dict[tuple[int, ...], float]
"""Text -> probability."""
Logits = Callable[[tuple[int, ...]], torch.Tensor]
"""Prefix -> logits `[vocab]`, float64."""


class Every:
    """A noise that takes the path `script` through the outcomes, and the first one where the script
    ends.

    `strict`: a position's noise used for a second time must have had its first outcome removed
    (sampling without replacement), and no coin is flipped twice. With keyed noise such outcomes
    would not be independent.
    """

    def __init__(self, script: Sequence[int] = (), *, strict: bool = True) -> None:
        self.script, self.strict, self.name = script, strict, ""
        self.trail: list[tuple[int, int]] = []  # outcome taken, number of outcomes
        self.weights: list[float] = []
        self.used: dict[tuple[Any, ...], list[int]] = {}

    @property
    def probability(self) -> float:
        return float(np.prod(self.weights)) if self.weights else 1.0

    def fork(self, name: str) -> Every:
        other = Every(self.script, strict=self.strict)
        other.name, other.trail, other.weights = f"{self.name}/{name}", self.trail, self.weights
        other.used = self.used
        return other

    def choice(self, scores: torch.Tensor, position: int) -> int:
        probs = scores.double().softmax(-1).tolist()
        chosen = self.used.setdefault((self.name, position), [])
        is_new = not self.strict or all(probs[token] == 0 for token in chosen)
        assert is_new, f"noise of {self.name}, position {position}: used twice"
        tokens = [token for token, probability in enumerate(probs) if probability > 0]
        token = tokens[self._take([probs[token] for token in tokens])]
        chosen.append(token)
        return token

    def flip(self, probability: float, position: int, turn: int) -> bool:
        key = (self.name, position, turn)
        assert not self.strict or key not in self.used, f"coin {key}: flipped twice"
        self.used[key] = []
        return self._take([1 - probability, probability]) == 1

    def perturbed(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        raise AssertionError("perturbed scores have too many outcomes to go through")

    def _take(self, probabilities: Sequence[float]) -> int:
        taken = self.script[len(self.trail)] if len(self.trail) < len(self.script) else 0
        self.trail.append((taken, len(probabilities)))
        self.weights.append(probabilities[taken])
        return taken


def outcomes(
    run: Callable[[Every], T], *, make: Callable[..., Every] = Every, **options: Any
) -> Iterator[tuple[float, T]]:
    """Every outcome of `run(noise)` with its probability, depth first."""
    script: list[int] | None = []
    while script is not None:
        noise = make(script, **options)
        result = run(noise)
        yield noise.probability, result
        script = [taken for taken, _ in noise.trail]
        counts = [count for _, count in noise.trail]
        while script and script[-1] + 1 == counts[len(script) - 1]:
            script.pop()
        if script:
            script[-1] += 1
        else:
            script = None


# Targets of three or four tokens.


@functools.cache
def table(seed: int, vocab_size: int = 3, spread: float = 1.2) -> Logits:
    """A random distribution for every prefix, fixed by the seed."""

    @functools.cache
    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        numbers = np.random.default_rng([seed, vocab_size, len(prefix), *prefix])
        return torch.from_numpy(spread * numbers.standard_normal(vocab_size))

    return logits


def constant(*probs: float) -> Logits:
    """The same distribution after every prefix."""
    logits = torch.tensor(probs, dtype=torch.float64).log()
    return lambda prefix: logits


def without(logits: Logits, tokens: Callable[[tuple[int, ...]], Iterable[int]]) -> Logits:
    """A distribution in which some tokens never come, which ones depending on the prefix."""
    return lambda prefix: logits(prefix).index_fill(
        0, torch.tensor(sorted(tokens(prefix))), -torch.inf
    )


class Tables(ScriptedTarget):
    """A target whose distribution is a table, in float64."""

    dtype = torch.float64

    def __init__(self, logits: Logits) -> None:
        super().__init__(lambda prefix: 0, len(logits((0,))))
        self.logits = logits

    def _logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.logits(prefix)


class TinyTarget(Target):
    """A real model in float64, that scores each tree once. `logits` are fresh forwards without a
    cache.
    """

    def __init__(self, vocab_size: int = 3, model_type: str = "gpt2", seed: int = 1) -> None:
        super().__init__(tiny_model(vocab_size, model_type, seed))
        self._scored: dict[Any, torch.Tensor] = {}

    @functools.cache  # noqa: B019
    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return fresh(self.model, prefix)

    def scored(self, context: Sequence[int], tree: TokenTree, layout: Any) -> torch.Tensor:
        """The logits of a tree behind a context."""
        key = (tuple(context), tree.token_ids, tree.parents, layout)
        if key not in self._scored:
            with self.prefill(context) as cache:
                self._scored[key] = self.score(cache, context[-1], tree, layout).detach()
        return self._scored[key]


def tiny_model(vocab_size: int, model_type: str = "gpt2", seed: int = 1) -> Any:
    """A random model in float64, whose norms are too (a Llama's compute in float32)."""
    specials = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    model = random_model(
        model_type, vocab_size=vocab_size, seed=seed, max_position_embeddings=32, **specials
    )
    return model.double()


@torch.inference_mode()
def fresh(model: Any, prefix: Sequence[int]) -> torch.Tensor:
    """Logits `[vocab]` after a prefix: one forward, no cache."""
    return model(torch.tensor([list(prefix)]), use_cache=False).logits[0, -1]


# Distributions.


def target_distribution(
    logits: Logits,
    prompt: Sequence[int],
    length: int,
    processors: Iterable[Any] = (),
    eos: Sequence[int] = (),
) -> Distribution:
    """The distribution of `length` tokens after a prompt, or fewer where a text ends."""
    probs = _Probs(logits, processors)
    distribution: Distribution = {}
    complete(distribution, probs, tuple(prompt), (), 1.0, length, eos)
    return distribution


class _Probs:
    """prefix -> the target's probabilities after it, by processors of its own."""

    def __init__(self, logits: Logits, processors: Iterable[Any] = ()) -> None:
        self.logits, self.processors = logits, LogitsProcessorList(list(processors))
        self.known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, prefix: tuple[int, ...]) -> list[float]:
        if prefix not in self.known:
            scores = self.processors(torch.tensor([prefix]), self.logits(prefix)[None].clone())
            self.known[prefix] = scores[0].softmax(-1).tolist()
        return self.known[prefix]


def complete(
    distribution: Distribution,
    probs: _Probs,
    prompt: tuple[int, ...],
    text: tuple[int, ...],
    weight: float,
    length: int,
    eos: Sequence[int],
) -> None:
    """Add to `distribution` the texts of `length` tokens that begin with `text`."""
    if len(text) >= length or (text and text[-1] in eos):
        distribution[text[:length]] = distribution.get(text[:length], 0.0) + weight
        return
    for token, probability in enumerate(probs((*prompt, *text))):
        if probability > 0:
            complete(distribution, probs, prompt, (*text, token), weight * probability, length, eos)


def distance(left: Distribution, right: Distribution) -> float:
    """The largest difference of probability of a text."""
    return max(abs(left.get(text, 0.0) - right.get(text, 0.0)) for text in {*left, *right})


def total_variation(left: Distribution, right: Distribution) -> float:
    return sum(abs(left.get(text, 0.0) - right.get(text, 0.0)) for text in {*left, *right}) / 2


def step_distribution(
    target: Any,
    drafter: Any,
    verifier: Any,
    *,
    prompt: Sequence[int] = (0, 1),
    budget: Any = None,
    layout: Any = "tree",
    processors: Sequence[Any] = (),
    eos: Sequence[int] = (),
    length: int | None = None,
    merge: Callable[..., TokenTree] = merge,
    strict: bool = True,
    make: Callable[..., Every] = Every,
    drafts: Sequence[tuple[float, Draft]] | None = None,
) -> tuple[Distribution, Distribution, float]:
    """The distribution of the first `length` tokens (one more than the deepest draft) when one step
    emits the first of them and AR decoding the rest; the distribution that it must be; the mean
    number of accepted tokens.

    The outcomes of drafting are gone through first, then for each draft those of verification: the
    two use different noise. `drafts` are those outcomes where they are known.
    """
    prompt, processor_list = tuple(prompt), LogitsProcessorList(list(processors))
    stop = StopRules(len(prompt) + 12, tuple(eos))
    plan = (budget or FixedBudget()).plan(PlanContext(drafter.members, len(prompt), 12))
    length = length or plan.num_tokens + 1
    if drafts is None:
        options = {"coupled": verifier.coupled, "strict": strict, "make": make}
        drafts = every_draft(drafter, target, plan, prompt, processors, **options)
    probs, distribution, accepted = _Probs(target.logits, processors), {}, 0.0
    for tree, drafted in _different(
        (weight, merge(draft, plan, stop.eos_ids)) for weight, draft in drafts
    ):
        logits = _scored(target, prompt, tree, layout)

        def verify(noise: Every, tree: TokenTree = tree, logits: torch.Tensor = logits) -> Commit:
            sampler = Sampler(processor_list, noise, coupled=verifier.coupled)
            scores = TreeScores(sampler, prompt, tree, logits)
            return stop.trim(prompt, tree, verifier(tree, scores))

        for verified, commit in outcomes(verify, strict=strict):
            complete(distribution, probs, prompt, commit.token_ids, drafted * verified, length, eos)
            accepted += drafted * verified * commit.num_accepted
    wanted = target_distribution(target.logits, prompt, length, processors, eos)
    return distribution, wanted, accepted


def every_draft(
    drafter: Any,
    target: Any,
    plan: Plan,
    prompt: tuple[int, ...],
    processors: Sequence[Any] = (),
    *,
    coupled: bool,
    strict: bool = True,
    make: Callable[..., Every] = Every,
) -> list[tuple[float, Draft]]:
    """Every draft behind a prompt, with its probability. Where the noise would be shared, samples
    are independent instead.
    """
    drafter.bind(target)

    def propose(noise: Every) -> Draft:
        sampler = Sampler(LogitsProcessorList(list(processors)), noise, coupled=coupled)
        return first_draft(drafter, target, plan, prompt, sampler.fork(f"step {len(prompt)}"))

    return list(outcomes(propose, strict=strict and not coupled, make=make))


def first_draft(
    drafter: Any, target: Any, plan: Plan, prompt: tuple[int, ...], sampler: Sampler
) -> Draft:
    """What the drafter proposes behind a prompt."""
    with target.prefill(prompt, hidden_layers(drafter)) as cache:
        proposer = drafter.begin(prompt)
        condition(proposer, cache.hidden)
        return proposer.propose(prompt, plan, sampler)


def _different(trees: Iterable[tuple[float, TokenTree]]) -> Iterable[tuple[TokenTree, float]]:
    """Equal trees once, with the sum of their weights."""
    found: dict[Any, tuple[TokenTree, float]] = {}
    for weight, tree in trees:
        samples = tuple((s.node, s.owner, *s.draft_probs.tolist()) for s in tree.samples)
        key = (tree.token_ids, tree.parents, tree.owners, samples)
        found[key] = (tree, weight + (found[key][1] if key in found else 0.0))
    return found.values()


def _scored(target: Any, prompt: tuple[int, ...], tree: TokenTree, layout: Any) -> torch.Tensor:
    if isinstance(target, TinyTarget):
        return target.scored(prompt, tree, layout)
    with target.prefill(prompt) as cache:
        return target.score(cache, prompt[-1], tree, layout)


def decoder_distribution(
    target: Any,
    drafter: Any,
    verifier: Any,
    *,
    prompt: Sequence[int] = (0, 1),
    count: int = 3,
    budget: Any = None,
    layout: Any = "tree",
    processors: Sequence[Any] = (),
    eos: Sequence[int] = (),
    make: Callable[..., Every] = Every,
) -> tuple[Distribution, Distribution]:
    """The distribution of whole texts of `count` tokens from the real loop, and the distribution
    that it must be.
    """
    prompt = tuple(prompt)
    drafter.bind(target)
    decoder = Decoder(target, drafter, budget or FixedBudget(), verifier, layout)

    def run(noise: Every) -> tuple[int, ...]:
        sampler = Sampler(LogitsProcessorList(list(processors)), noise, coupled=verifier.coupled)
        steps = decode_steps(decoder, prompt, sampler, StopRules(len(prompt) + count, tuple(eos)))
        return tuple(token for step in steps for token in step.token_ids)

    distribution: Distribution = {}
    for weight, text in outcomes(run, strict=not verifier.coupled, make=make):
        distribution[text] = distribution.get(text, 0.0) + weight
    return distribution, target_distribution(target.logits, prompt, count, processors, eos)


# Toy drafters: a function of (context, plan, sampler).


class Toy:
    """A drafter that proposes what a function of (context, plan, sampler) returns."""

    def __init__(
        self,
        function: Callable[[tuple[int, ...], Plan, Sampler], Draft],
        depth: int = 2,
        nodes: int = 0,
    ) -> None:
        self.function, self.members = function, (Member("toy", depth, nodes or depth),)

    def bind(self, target: Any) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> Toy:
        return self

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        return self.function(tuple(context_ids), plan, sampler)

    def observe(self, commit: Commit) -> None: ...


def sampled(
    logits: Logits,
    depth: int = 2,
    *,
    recorded: bool = True,
    stop: Callable[[int], bool] = lambda token: False,
) -> Toy:
    """A chain of samples, each from the distribution after the chain so far. It ends behind a token
    that `stop` is true of.
    """

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        ids, probs = context, []
        for _ in range(plan.num_tokens):
            ((token, prob),) = sampler.sample(ids, logits(ids))
            ids, probs = (*ids, token), [*probs, prob]
            if stop(token):
                break
        is_recorded = recorded and sampler.needs_draft_probs
        return Draft.chain(ids[len(context) :], probs if is_recorded else ())

    return Toy(propose, depth)


def parallel(logits: Logits, depth: int = 2) -> Toy:
    """A chain whose i-th token is sampled from a distribution of its own, whatever stands before
    it.
    """

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        ids, probs = context, []
        for i in range(plan.num_tokens):
            ((token, prob),) = sampler.sample(ids, logits((*context, 7 + i)))
            ids, probs = (*ids, token), [*probs, prob]
        return Draft.chain(ids[len(context) :], probs if sampler.needs_draft_probs else ())

    return Toy(propose, depth)


def greedy(logits: Logits, depth: int = 2) -> Toy:
    """A chain of the likeliest tokens: deterministic."""

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        ids = context
        for _ in range(plan.num_tokens):
            ids = (*ids, int(logits(ids).argmax()))
        return Draft.chain(ids[len(context) :])

    return Toy(propose, depth)


def lookup(seed: int, depth: int = 2, vocab_size: int = 3) -> Toy:
    """A chain that is any function of the context: deterministic."""

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        numbers = np.random.default_rng([seed, len(context), *context])
        return Draft.chain(numbers.integers(vocab_size, size=plan.num_tokens).tolist())

    return Toy(propose, depth)


def fixed(token_ids: Sequence[int], parents: Sequence[int]) -> Toy:
    """Always the same tree."""
    draft = Draft(tuple(token_ids), tuple(parents))
    return Toy(lambda context, plan, sampler: draft, 3, len(draft))


def branches(logits: Logits, depth: int = 2, count: int = 2) -> Toy:
    """A chain of samples with further samples, without replacement, beside each: all of the chain
    first.
    """

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        ids, rows = context, []
        for _ in range(plan.num_tokens):
            rows.append(_samples(sampler, ids, logits, count))
            ids = (*ids, rows[-1][0][0])
        nodes = [(*row[0], depth - 1) for depth, row in enumerate(rows)]
        nodes += [(*entry, depth - 1) for depth, row in enumerate(rows) for entry in row[1:]]
        tokens, probs, parents = zip(*nodes, strict=True)
        return Draft(tokens, parents, draft_probs=probs if sampler.needs_draft_probs else ())

    return Toy(propose, depth, depth * count)


def _samples(
    sampler: Sampler, ids: tuple[int, ...], logits: Logits, count: int
) -> list[tuple[int, Any]]:
    """Samples without replacement; one where noise is shared, as the next best of perturbed scores
    cannot be gone through.
    """
    return sampler.sample(ids, logits(ids), count if sampler.needs_draft_probs else 1)


def twice(logits: Logits, depth: int = 1, count: int = 2) -> Toy:
    """Independent chains from one distribution: equal siblings happen."""

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        rows = [
            sampled(logits, depth).function(context, plan, sampler.fork(f"row {row}"))
            for row in range(count)
        ]
        return side_by_side(rows, owned=False)

    return Toy(propose, depth, depth * count)


def sampled_tree(logits: Logits) -> Toy:
    """Two samples without replacement, and two more below each."""

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        top = _samples(sampler.fork("top"), context, logits, 2)
        nodes = [(*entry, -1) for entry in top]
        for node, (token, _) in enumerate(top):
            ids = (*context, token)
            below_it = _samples(sampler.fork(f"below {node}"), ids, logits, 2)
            nodes += [(*entry, node) for entry in below_it]
        tokens, probs, parents = zip(*nodes, strict=True)
        return Draft(tokens, parents, draft_probs=probs if sampler.needs_draft_probs else ())

    return Toy(propose, 2, 6)


def below(
    token: int, logits: Logits, depth: int = 2, stop: Callable[[int], bool] = lambda token: False
) -> Toy:
    """A deterministic token with samples below it."""

    def propose(context: tuple[int, ...], plan: Plan, sampler: Sampler) -> Draft:
        rest = Plan.of([Share(plan.num_tokens - 1, 9)])
        row = sampled(logits, depth - 1, stop=stop).function((*context, token), rest, sampler)
        probs = (None, *row.draft_probs) if row.draft_probs else ()
        return Draft.chain((token, *row.token_ids), probs)

    return Toy(propose, depth)


class Onlooker:
    """A drafter and a deterministic chain that looked at its first sample, as two members; the
    chain stands after it or before it.
    """

    def __init__(
        self, inner: Toy, seed: int, *, first: bool = False, depth: int = 2, vocab_size: int = 3
    ) -> None:
        self.inner, self.first, self.rows = inner, first, lookup(seed, depth, vocab_size)
        row = Member("onlooker", depth, depth)
        self.members = (row, *inner.members) if first else (*inner.members, row)

    def bind(self, target: Any) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> Onlooker:
        return self

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        own, other = plan.part(0, 1), plan.part(1, 2)
        if self.first:
            own, other = other, own
        seen = self.inner.propose(context_ids, own, sampler)
        row = self.rows.function((*context_ids, *seen.token_ids[:1]), other, sampler)
        return side_by_side([row, seen] if self.first else [seen, row])

    def observe(self, commit: Commit) -> None: ...


def side_by_side(drafts: Sequence[Draft], *, owned: bool = True) -> Draft:
    """Drafts one after another, each of an owner of its own (or all of one)."""
    tokens: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    probs: list[Any] = []
    for owner, draft in enumerate(drafts):
        parents += [parent if parent < 0 else parent + len(tokens) for parent in draft.parents]
        tokens += draft.token_ids
        owners += [owner if owned else 0] * len(draft)
        probs += draft.draft_probs or [None] * len(draft)
    recorded = tuple(probs) if any(each is not None for each in probs) else ()
    return Draft(tuple(tokens), tuple(parents), tuple(owners), draft_probs=recorded)
