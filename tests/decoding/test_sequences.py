"""Several sequences of one Speculator at once, interleaved or in threads, give the texts of one by
one; and whatever ends a sequence, what it held is free again.
"""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import test_laws as laws
import torch
from helpers import Fake, FakeProposer, plain_greedy

import specens
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.dense import FinishedText, full_plans, propose_all
from specens.decoding.generation import merge_options
from specens.decoding.loop import Decoder
from specens.decoding.sampling import Sampler
from specens.decoding.speculator import Completion, Decoding, Speculator
from specens.decoding.stopping import StopRules
from specens.decoding.target.compiled import CompileOptions
from specens.decoding.target.kv_cache import StaticBuffers, StaticCache
from specens.decoding.target.target import Target
from specens.decoding.types import Draft
from specens.decoding.verify import Coupled, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel, LanguageModelProposer
from specens.drafters.ngram import NGram
from specens.errors import DrafterError
from specens.models.tiny import random_model

model, other, _library = laws.model, laws.other, laws._library
KINDS = [name for name in laws.DRAFTERS if "+" not in name]
"""One drafter of each kind; all of their models are tiny."""

MIXED = "idle+wrong+ngram+lm+oracle+heads+retrieval"
COUNT = 16


def options_of(seed: int | None) -> dict[str, Any]:
    return {"max_new_tokens": COUNT, "do_sample": seed is not None, "eos_token_id": []}


def begin(spec: Speculator, prompt: list[int], seed: int | None) -> Decoding:
    config = merge_options(spec.target, None, **options_of(seed), top_k=0)
    return spec.begin(prompt, config, seed=seed or 0, prompt_key=str(prompt))


def counts(steps: Any) -> list[Any]:
    return [(s.token_ids, s.num_nodes, s.num_accepted, s.mode, s.finish_reason) for s in steps]


@pytest.mark.laws
@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("name", [*KINDS, MIXED])
def test_interleaved_sequences_are_those_of_one_by_one(model, other, name, verifier):
    """Steps and counts too: each sequence has a state of its own."""
    drafter = laws.drafter_of(name, model, other)
    if not verifier.coupled and any(member.coupled_only for member in drafter.members):
        pytest.skip("this verifier refuses it")
    spec = Speculator(Decoder(Target(model), drafter, FixedBudget(), verifier))
    jobs = [*itertools.product(laws.PROMPTS, (None, 7)), (laws.PROMPTS[0], 7)]
    alone = []
    for job in jobs:
        decoding = begin(spec, *job)
        alone.append(counts(decoding))
        decoding.close()
    decodings = [begin(spec, *job) for job in jobs]
    rounds = list(itertools.zip_longest(*decodings))
    together = [counts(step for step in steps if step) for steps in zip(*rounds, strict=True)]
    if name == "growing":  # earlier texts are part of what it knows
        together, alone = ([texts_of(steps) for steps in each] for each in (together, alone))
    assert together == alone


def texts_of(steps: Any) -> list[int]:
    return [token for token_ids, *_ in steps for token in token_ids]


@pytest.fixture
def _impatient():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(spec: Any, jobs: list[tuple[list[int], int | None]]) -> list[list[int]]:
    """The texts of all jobs, four at once."""
    start = threading.Barrier(4)

    def texts(own: list[tuple[list[int], int | None]]) -> list[list[int]]:
        start.wait()
        return [text(spec, *job) for job in own]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(texts, (jobs[place::4] for place in range(4))))
    return [parts[place % 4][place // 4] for place in range(len(jobs))]


def text(spec: Any, prompt: list[int], seed: int | None) -> list[int]:
    out = spec.generate(torch.tensor([prompt]), **options_of(seed), seed=seed, top_k=0)
    return out[0, len(prompt) :].tolist()


JOBS = [*itertools.product(laws.PROMPTS, (None, 1))]


@pytest.mark.laws
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("name", [*KINDS, MIXED])
def test_four_threads_on_one_attached_model_give_the_texts_of_one_by_one(model, other, name):
    drafter = laws.drafter_of(name, model, other)
    spec = specens.attach(model, None, drafter, budget=FixedBudget())
    alone = [text(spec, *job) for job in JOBS]
    assert alone[0] == plain_greedy(model, laws.PROMPTS[0], COUNT)
    assert in_threads(spec, JOBS) == alone
    assert len(spec._done) == 2 * len(JOBS)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("reset", ["prompt", "run"])
def test_four_threads_share_what_a_budget_measures_and_learns(model, other, reset):
    """Costs are measured once, whichever thread is first; a policy is never at two sequences."""
    drafter = laws.drafter_of("ngram+lm+oracle", model, other)
    spec = specens.attach(model, None, drafter, budget=CostAwareBudget(reset=reset))
    expected = [text(specens.attach(model, None, "none"), *job) for job in JOBS]
    assert in_threads(spec, JOBS) == expected
    tables = {done.costs.origin for done in spec._done}
    assert tables == {"calibrated"}


def test_a_policy_that_remembers_is_handed_on_only_by_a_sequence_that_worked_with_it(model):
    drafter = Ensemble({"ngram": NGram()})
    budget = CostAwareBudget(reset="run")
    spec = Speculator(Decoder(Target(model), drafter, budget, Coupled()))

    def complete() -> Completion:
        config = merge_options(spec.target, None, **options_of(None))
        return spec.complete(laws.PROMPTS[0], config, seed=0, prompt_key="p")

    complete()
    learned = spec._policy
    assert learned is not None
    begin(spec, laws.PROMPTS[1], None).close()  # never stepped
    assert spec._policy is learned
    drafter.drafters["ngram"].begin = lambda prompt_ids: 1 / 0  # pyright: ignore
    with pytest.raises(DrafterError):
        complete()
    assert spec._policy is learned
    del drafter.drafters["ngram"].begin  # pyright: ignore
    first = begin(spec, laws.PROMPTS[0], None)
    next(iter(first))
    assert spec._policy is None, "at work"
    complete()
    first.close()
    assert spec._policy is learned
    spec.forget()
    complete()
    assert spec._policy is not learned


# What a sequence holds


@pytest.fixture(scope="module")
def held():
    """A Speculator with a compiled target and a compiled drafter, and the buffers of the two."""
    config = {"vocab_size": 128, "max_position_embeddings": 256, "num_hidden_layers": 1}
    target, first = Target(random_model(seed=3, **config)), random_model(seed=9, **config)
    options = CompileOptions(backend="aot_eager", mode=None, room=24, block=32, warm_ups=1)
    target.compile(options, max_nodes=3, num_tokens=10)
    drafter = LanguageModel(first, 2)
    members = {"first": drafter, "flaky": Fake(lambda context: [], "flaky")}
    spec = Speculator(Decoder(target, Ensemble(members), FixedBudget(3), Coupled()))
    begin(spec, laws.PROMPTS[0], None).close()  # compiles
    return spec, [one._buffers for one in (target.compiled, drafter._compiled)]


def all_free(buffers: list[StaticBuffers]) -> bool:
    return all(each.is_free for each in buffers)


def fail(*given: Any, **options: Any) -> Any:
    raise RuntimeError("on purpose")


def test_buffers_are_free_after_a_sequence_has_ended_or_was_closed(held):
    spec, buffers = held
    expected = plain_greedy(spec.target.model, laws.PROMPTS[0], COUNT)
    for num_steps in (None, 0, 1, 3):
        decoding = begin(spec, laws.PROMPTS[0], None)
        assert not any(each.is_free for each in buffers)
        steps = list(itertools.islice(decoding, num_steps))
        assert all_free(buffers) == (num_steps is None), "a text that has ended needs no close"
        decoding.close()
        decoding.close()
        assert all_free(buffers)
        assert list(decoding) == [], "closed is closed"
        tokens = [token for step in steps for token in step.token_ids]
        assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("place", ["begin", "propose", "observe"])
def test_buffers_are_free_after_a_drafter_has_failed(held, place, monkeypatch):
    spec, buffers = held
    owner = FakeProposer if place == "observe" else Fake
    monkeypatch.setattr(owner, place, fail)
    error = RuntimeError if place == "observe" else DrafterError
    for _ in range(2):
        with pytest.raises(error, match="on purpose"):
            list(begin(spec, laws.PROMPTS[0], None))
        assert all_free(buffers)
    monkeypatch.undo()
    assert len(list(begin(spec, laws.PROMPTS[0], None))) > 0


def test_buffers_are_free_after_a_model_drafter_has_failed_on_the_prompt(held, monkeypatch):
    spec, buffers = held
    monkeypatch.setattr(LanguageModelProposer, "_next_logits", fail)
    with pytest.raises(DrafterError, match="drafter first: RuntimeError: on purpose"):
        begin(spec, laws.PROMPTS[0], None)
    assert all_free(buffers)


def test_buffers_are_free_after_the_target_has_failed(held, monkeypatch):
    spec, buffers = held
    monkeypatch.setattr(Target, "_forward", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        begin(spec, laws.PROMPTS[0], None)
    monkeypatch.undo()
    monkeypatch.setattr(Target, "score", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        list(begin(spec, laws.PROMPTS[0], None))
    assert all_free(buffers)


def test_buffers_are_free_after_all_positions_were_drafted_at(held, monkeypatch):
    """Also when that fails."""
    spec, buffers = held
    prompt, drafter = laws.PROMPTS[0], spec.decoder.drafter
    stop = StopRules(len(prompt) + COUNT)
    plans = full_plans(drafter.members, len(prompt), COUNT, stop)
    finished = FinishedText(prompt, [5] * COUNT, {}, Sampler())
    assert len(propose_all(drafter, finished, plans)) == COUNT
    assert all_free(buffers)
    monkeypatch.setattr(LanguageModel, "propose_batch", lambda *given: None)
    monkeypatch.setattr(LanguageModelProposer, "propose", fail)
    with pytest.raises(DrafterError, match="on purpose"):
        propose_all(drafter, finished, plans)
    assert all_free(buffers)


def test_a_second_sequence_meanwhile_works_uncompiled(held):
    """Target and drafters; the first goes on undisturbed, and the next one is compiled again."""
    spec, buffers = held
    texts = [plain_greedy(spec.target.model, prompt, COUNT) for prompt in laws.PROMPTS[::2]]
    first, second = (begin(spec, prompt, None) for prompt in laws.PROMPTS[::2])
    caches = [decoding._sequence.cache for decoding in (first, second)]
    assert [isinstance(cache, StaticCache) for cache in caches] == [True, False]
    found: list[list[int]] = [[], []]
    for pair in itertools.zip_longest(first, second):
        for place, step in enumerate(pair):
            found[place] += step.token_ids if step else ()
    assert found == texts and all_free(buffers)
    third = begin(spec, laws.PROMPTS[0], None)
    assert isinstance(third._sequence.cache, StaticCache)
    third.close()


@pytest.mark.usefixtures("_impatient")
def test_four_threads_take_turns_with_the_buffers(held):
    """Whoever finds them taken goes on uncompiled; the texts are the same."""
    spec, buffers = held

    def output(job: tuple[list[int], int | None]) -> tuple[int, ...]:
        decoding = begin(spec, *job)
        return tuple(token for step in decoding for token in step.token_ids)

    alone = [output(job) for job in JOBS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(output, JOBS)) == alone
    assert all_free(buffers)


def test_a_sequence_that_is_closed_late_takes_nothing_from_its_successor(held):
    spec, buffers = held
    first = begin(spec, laws.PROMPTS[0], None)
    next(iter(first))
    first.close()
    second = begin(spec, laws.PROMPTS[0], None)
    first.close()
    assert not any(each.is_free for each in buffers)
    tokens = [token for step in second for token in step.token_ids]
    assert tokens == plain_greedy(spec.target.model, laws.PROMPTS[0], COUNT)


def test_a_draft_without_a_schedule_is_that_of_a_drafter_that_was_called(model):
    """A drafter without others records no schedule; its plan tells."""
    spec = Speculator(Decoder(Target(model), NGram(), FixedBudget(), Coupled()))
    steps = list(begin(spec, laws.PROMPTS[0], None))
    assert Draft().scheduled == ()
    assert [step.members[0].was_scheduled for step in steps[:-1]] == [True] * (len(steps) - 1)
    assert all(m.was_scheduled == (m.num_planned > 0) for step in steps for m in step.members)
