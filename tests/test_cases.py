"""Public bug reports of the field, one test a case (some have two), named after the case: stopping,
caches, sampling, drafters and vocabularies, counting and timing.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Fake,
    FakeProposer,
    ScriptedTarget,
    decode,
    decode_steps,
    plain_greedy,
    text_drafter,
)
from transformers import GenerationConfig, LogitsProcessorList, MinNewTokensLengthLogitsProcessor

import specens
from specens.analysis.summary import summarise
from specens.config.compose import compose
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.generation import SamplingOptions, eos_ids, merge_options, stop_test
from specens.decoding.loop import Decoder
from specens.decoding.merge import merge
from specens.decoding.sampling import KeyedNoise, Sampler, TreeScores
from specens.decoding.stopping import StopRules
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import Layout
from specens.decoding.target.target import Target
from specens.decoding.types import (
    ROOT,
    Commit,
    Draft,
    Plan,
    Share,
    StepRecord,
    TokenTree,
    Verdict,
    chain_parents,
)
from specens.decoding.verify import Coupled, Residual, Verifier, acceptance, residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel, LanguageModelProposer
from specens.drafters.ngram import NGram, NGramProposer
from specens.drafters.none import NoDrafter
from specens.drafters.scripted import Fixed
from specens.errors import UserError
from specens.models.load import ModelSpec
from specens.models.tiny import byte_tokenizer, random_model
from specens.records.reader import Run, load
from specens.records.schema import PromptRecord, frames_of
from specens.run import run

LAYOUTS: tuple[Layout, ...] = ("tree", "rows")
PROMPT = (11, 12, 13, 14, 11, 12, 13)

Job = Callable[..., tuple[dict[str, Any], Run]]


def count_up(prefix: Sequence[int]) -> int:
    """A script: every token is one more than the last (mod 128)."""
    return (prefix[-1] + 1) % 128


def ups(context: Sequence[int], count: int) -> list[int]:
    return [(context[-1] + i) % 128 for i in range(1, count + 1)]


def numbers(steps: Sequence[StepRecord], output: Sequence[int]) -> dict[str, Any]:
    """The run's summary from one prompt's records, as the commands compute it."""
    record = PromptRecord("p", output_ids=output, num_steps=len(steps), decode_s=1.0, prefill_s=1.0)
    return summarise(*frames_of([(record, steps)]))


def resized(model: Any, vocab_size: int) -> Any:
    """The same weights with another number of embedding rows: dropped, or random ones added."""
    other = random_model(vocab_size=vocab_size, max_position_embeddings=128, seed=9)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), model.parameters(), strict=True):
            rows = min(len(mine), len(its))
            mine[:rows] = its[:rows]
    return other


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Run one job with the tiny target in this process -> its summary and its tables."""
    monkeypatch.setenv("SPECENS_CACHE", str(cache))
    count = iter(range(1000))

    def start(*overrides: str) -> tuple[dict[str, Any], Run]:
        folder = tmp_path / f"run-{next(count)}"
        base = [
            "model@target=tiny",
            "drafter=ngram",
            "budget=fixed",
            "tracker=none",
            "prompts.chat=false",
        ]
        config = compose([*base, *overrides])
        summary = run(config, folder)
        return summary, load(folder)

    return start


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write lines -> the overrides that read them."""

    def write(*rows: dict[str, Any]) -> str:
        path = tmp_path / f"prompts-{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"prompts.path={path}"

    return write


def outputs(loaded: Run) -> dict[str, list[int]]:
    return {row.prompt_id: list(row.output_ids) for row in loaded.prompts.itertuples()}


# A. Stopping and length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b01_eos_in_the_middle_of_a_block(tiny: Any, layout: Layout) -> None:
    """The text ends right after the first end-of-sequence token, wherever in a commit it stands."""
    base = plain_greedy(tiny, PROMPT, 20)
    inside = 0
    for eos in base[:9]:
        expected = base[: base.index(eos) + 1]
        new, steps = decode(tiny, text_drafter(PROMPT, base), PROMPT, 20, eos=[eos], layout=layout)
        assert new == expected
        assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["eos"]
        trimmed = sum(step.num_accepted for step in steps) + len(steps) - len(new)
        assert trimmed == (
            steps[-1].token_owners[-1] != 0
        )  # an accepted EOS costs the step's own token, nothing else does
        inside += trimmed
    assert inside  # else no EOS was ever drafted, and this shows nothing


def test_b01_an_eos_inside_the_accepted_run_cuts_ids_and_counts() -> None:
    """The commit itself ends at the EOS, whatever stands behind it in the tree."""
    tree = TokenTree((5, 2, 6), (-1, 0, 1), (1, 2, 3), (1, 1, 1))
    commit = StopRules(100, (2,)).trim([9], tree, Verdict((0, 1, 2), 7))
    assert (commit.token_ids, commit.path, commit.finish_reason) == ((5, 2), (0, 1), "eos")


def test_b02_every_eos_id_ends_the_text_and_a_drafters_own_does_not(tiny: Any) -> None:
    """Any id of the target's list ends the text; a drafter with another EOS changes nothing."""
    target = ScriptedTarget(lambda prefix: {5: 6, 6: 7, 7: 8}.get(prefix[-1], 5))
    for drafter in (NoDrafter(), Fixed([5, 6, 7, 8])):
        new, steps = decode(target, drafter, [1], eos=(2, 7))
        assert (new, steps[-1].finish_reason) == ([5, 6, 7], "eos")

    base = plain_greedy(tiny, PROMPT, 20)
    small = copy.deepcopy(tiny)
    small.config.eos_token_id = small.generation_config.eos_token_id = base[3]
    new, steps = decode(tiny, LanguageModel(small), PROMPT, 20)
    assert (new, steps[-1].finish_reason) == (base, "length")
    assert any(step.num_accepted for step in steps)


def test_b02_the_generation_config_is_the_one_source_of_eos(tiny: Any, job: Job) -> None:
    """The tokenizer names one end token, the generation config two: the list counts, and the
    results record which was used.
    """
    model = copy.deepcopy(tiny)
    model.generation_config.eos_token_id = [2, 7]
    target = Target(model, byte_tokenizer())
    assert byte_tokenizer().eos_token_id == 1
    assert eos_ids(SamplingOptions().generation_config(target)) == (2, 7)
    assert eos_ids(SamplingOptions(eos_token_ids=[9]).generation_config(target)) == (9,)

    _, loaded = job(
        "prompts=inline",
        "prompts.texts=[hello]",
        "sampling.eos_token_ids=[]",
        "sampling.max_new_tokens=24",
    )
    (free,) = outputs(loaded).values()
    first = free[8]
    summary, loaded = job(
        "prompts=inline",
        "prompts.texts=[hello]",
        f"sampling.eos_token_ids=[{free[15]},{first}]",
        "drafter=oracle",
    )
    (ended,) = outputs(loaded).values()
    cut = min(free.index(first), free.index(free[15])) + 1
    assert ended == free[:cut]
    assert loaded.prompts.finish_reason.tolist() == ["eos"]
    assert summary["environment"]["eos_token_ids"] == [free[15], first]


@pytest.mark.parametrize("count", range(1, 10))
def test_b04_max_new_tokens_is_exact(count: int) -> None:
    """Never more tokens than requested, whatever is accepted; the last one needs no draft."""
    target = ScriptedTarget(count_up)
    expected = ups([3], count)
    for depth in range(1, 9):
        obedient = Fake(lambda context: ups(context, 8), depth=depth)
        # ignores its plan
        careless = Fake(lambda context: Draft.chain(ups(context, 8)), depth=depth)
        for drafter in (obedient, careless):
            new, steps = decode(target, drafter, [3], count)
            assert (new, steps[-1].finish_reason) == (expected, "length")
            wanted = count
            for step in steps:
                assert step.num_nodes <= min(depth, wanted - 1)
                wanted -= step.num_emitted
            assert (
                sum(step.num_accepted for step in steps) + len(steps) == count
            )  # nothing was trimmed, hence none wasted
        if count == 1:
            assert steps[0].members[0].num_drafted == 0


def test_b04_zero_new_tokens_are_refused(tiny: Any) -> None:
    """Nothing to generate is an error that names the option, not one token."""
    with pytest.raises(UserError, match="max_new_tokens"):
        SamplingOptions(max_new_tokens=0)
    with pytest.raises(UserError, match="max_new_tokens"):
        merge_options(Target(tiny), None, max_new_tokens=0)


def test_b05_a_stop_string_inside_a_commit_comes_before_the_length() -> None:
    """Rules are checked token by token: a stop string before the cap names the reason, one behind
    the cap never counts.
    """
    tree = TokenTree((10, 11, 99, 20, 21), chain_parents(5), (1, 2, 3, 4, 5), (1,) * 5)
    verdict = Verdict((0, 1, 2, 3, 4), 22)
    cap5 = StopRules(1 + 5, stop_test=lambda ids: ids[-1] == 99)
    commit = cap5.trim([1], tree, verdict)
    assert (commit.token_ids, commit.path, commit.finish_reason) == (
        (10, 11, 99),
        (0, 1, 2),
        "stop",
    )
    late = StopRules(1 + 5, stop_test=lambda ids: ids[-1] == 22)
    commit = late.trim([1], tree, verdict)
    assert (commit.token_ids, commit.finish_reason) == ((10, 11, 99, 20, 21), "length")
    at_the_cap = StopRules(1 + 3, stop_test=lambda ids: ids[-1] == 99).trim([1], tree, verdict)
    assert (at_the_cap.token_ids, at_the_cap.finish_reason) == ((10, 11, 99), "stop")


def test_b05_a_stop_string_is_found_at_every_place_of_a_commit(tokenizer: Any) -> None:
    """A stop string, split over tokens, ends the text at its last token: drafted or not, wherever
    in the block it lies.
    """
    prompt = tokenizer.encode("say: ", add_special_tokens=False)
    test = stop_test(GenerationConfig(stop_strings=["ha ha"]), tokenizer)
    num_trimmed = 0
    for shift in range(10):
        before = "x" * shift + "ha ha"
        script = tokenizer.encode(before + " ha ha and on", add_special_tokens=False)
        target = ScriptedTarget(
            lambda prefix, script=script: (script + [5] * 40)[len(prefix) - len(prompt)], 259
        )
        stop = StopRules(len(prompt) + 30, (), None, test)
        for drafter in (NoDrafter(), text_drafter(prompt, script, depth=8)):
            new, steps = decode(target, drafter, prompt, stop=stop)
            assert tokenizer.decode(new) == before
            assert steps[-1].finish_reason == "stop"
            assert sum(step.num_emitted for step in steps) == len(new)
            num_trimmed += sum(step.num_accepted for step in steps) + len(steps) - len(new)
    assert num_trimmed >= 5


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("cycle", [[7, 7, 7, 7, 2], [7, 2, 7, 2, 7], [2, 2, 2, 2, 2], [9, 9, 9]])
def test_b06_min_new_tokens_counts_tokens_and_not_steps(depth: int, cycle: list[int]) -> None:
    """A target that always wants EOS outputs exactly four other tokens first, however many a step
    commits.
    """
    scores = [0.0] * 128
    scores[7], scores[2] = 5.0, 9.0
    prompt = [3, 4]
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(len(prompt), 4, [2])])
    drafter = Fake(lambda context: cycle[(len(context) - 2) % len(cycle) :], depth=depth)
    new, steps = decode(
        ScriptedTarget(lambda _: scores), drafter, prompt, 20, eos=[2], sampler=Sampler(processors)
    )
    assert new == [7, 7, 7, 7, 2]
    assert steps[-1].finish_reason == "eos"


# B. Greedy verification and caches

COPYING = (
    'Fill in: {"type": "object", "done": true, "open": true, "name": "a"} -> '
    '{"done": true, "name": "b", "open": true, ',
    "The cat sits on the mat. The cat sits on the mat. Continue with 2 more.",
    "def f(x):\n    return x + 1\n\nRename x to y:\ndef f(y):\n    return y + 1\n\ndef f(",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b08_copy_heavy_prompts_stay_greedy(tokenizer: Any, layout: Layout) -> None:
    """n-gram drafts that are accepted in part leave the text as AR decoding writes it."""
    partly, lengths = 0, set()
    for seed, text in enumerate(COPYING):
        # With such weights the text repeats itself, but not for ever: drafts are accepted, and
        # often only in part.
        model = random_model(seed=seed, initializer_range=0.2)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        base = plain_greedy(model, prompt, 48)
        ngram = NGram(num_draft_tokens=5, num_continuations=2, min_ngram=1, max_ngram=3)
        new, steps = decode(model, ngram, prompt, 48, layout=layout)
        assert new == base
        partly += sum(0 < step.num_accepted < 5 for step in steps)
        noisy = Fake(lambda context, whole=[*prompt, *base]: _partly_right(whole, context), depth=5)
        new, steps = decode(model, noisy, prompt, 48, layout=layout)
        assert new == base
        lengths |= {step.num_accepted for step in steps[:-1]}
    assert partly > 10 and lengths >= {0, 1, 2, 3, 4}


def _partly_right(whole: Sequence[int], context: Sequence[int]) -> list[int]:
    """The true continuation with one wrong token, whose place depends on the text so far."""
    tokens = list(whole[len(context) : len(context) + 5])
    wrong = sum(context[-2:]) % 5
    return [(token + 1) % 128 if i == wrong else token for i, token in enumerate(tokens)]


def spied_proposers(drafter: LanguageModel) -> list[LanguageModelProposer]:
    """The proposers that the drafter makes from now on."""
    made: list[LanguageModelProposer] = []
    begin = drafter.begin

    def spy(prompt_ids: Sequence[int]) -> LanguageModelProposer:
        made.append(begin(prompt_ids))
        return made[-1]

    drafter.begin = spy  # pyright: ignore
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [FixedBudget(), FixedBudget(first_only=True)])
def test_b09_a_drafter_with_the_targets_weights_is_always_right(
    tiny: Any, layout: Layout, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache ends every step at the committed text: after full acceptance, after losing, and
    after idle rounds.
    """
    base = plain_greedy(tiny, PROMPT, 60)
    alone = LanguageModel(copy.deepcopy(tiny), num_draft_tokens=3)
    new, steps = decode(tiny, alone, PROMPT, 60, layout=layout)
    assert new == base
    assert all(step.num_accepted == step.num_nodes for step in steps)

    whole = [*PROMPT, *base]
    same = LanguageModel(copy.deepcopy(tiny), num_draft_tokens=3)
    cached: list[tuple[int, int]] = []
    proposers = spied_proposers(same)
    observe = FakeProposer.observe

    def spy(self: FakeProposer, commit: Commit) -> None:
        cached.append((proposers[0]._cache.length, len(commit.token_ids)))
        observe(self, commit)

    monkeypatch.setattr(FakeProposer, "observe", spy)
    rival = Fake(
        lambda context: whole[len(context) : len(context) + (6 if len(context) % 3 else 0)], "rival"
    )
    new, steps = decode(
        tiny, Ensemble({"rival": rival, "same": same}), PROMPT, 60, layout=layout, budget=budget
    )
    assert new == base
    mine = [step.members[1] for step in steps]
    assert all(member.num_matched == member.num_drafted for member in mine)
    assert any(
        step.num_accepted > member.num_matched for step, member in zip(steps, mine, strict=True)
    )
    assert any(member.num_drafted for member in mine)
    committed = len(PROMPT)
    # seen before `same` observes: at most what was committed, and its own draft
    for held, count in cached:
        assert held <= committed + 3
        committed += count
    assert len(proposers) == 1 and proposers[0]._cache.length <= committed - 1
    if budget.first_only:
        assert any(member.num_drafted == 0 for member in mine[:-1])  # idle rounds happened


@pytest.mark.parametrize("budget", [FixedBudget(), FixedBudget(first_only=True)])
def test_b09_a_drafter_that_is_often_wrong_drafts_from_the_committed_text_alone(
    budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, lost or idle, it proposes what its own model outputs after the committed
    text: nothing rejected remains.
    """
    model = random_model(vocab_size=128, initializer_range=0.2)
    small = copy.deepcopy(model)
    with torch.no_grad():  # near enough to be right at times
        for parameter in small.parameters():
            parameter.add_(
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    base = plain_greedy(model, PROMPT, 60)
    whole = [*PROMPT, *base]
    rival = Fake(
        lambda context: whole[len(context) : len(context) + (3 if len(context) % 3 == 0 else 0)],
        "rival",
    )
    drafter = LanguageModel(small, num_draft_tokens=4)
    proposed: list[tuple[list[int], Draft]] = []
    propose = LanguageModelProposer.propose

    def spy(self: Any, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        draft = propose(self, context_ids, plan, sampler)
        proposed.append((list(context_ids), draft))
        return draft

    monkeypatch.setattr(LanguageModelProposer, "propose", spy)
    new, steps = decode(
        model, Ensemble({"rival": rival, "small": drafter}), PROMPT, 60, budget=budget
    )
    assert new == base
    assert {step.members[1].num_matched for step in steps} >= {0, 1}
    for context, draft in proposed:
        assert list(draft.token_ids) == plain_greedy(small, context, len(draft))


def test_b10_rollback_keeps_as_many_positions_as_are_given() -> None:
    """`rollback(keep)` means the number to keep, whatever transformers' `crop` means."""
    for keep in (3, 2, 0):
        cache = KVCache()
        keys = torch.arange(3.0).reshape(1, 1, 3, 1)
        cache.dynamic().update(keys, keys, 0)
        cache.rollback(keep)
        assert cache.length == keep
        assert cache.dynamic().layers[0].keys.flatten().tolist() == [0.0, 1.0, 2.0][:keep]
        for wrong in (-1, keep + 1):
            with pytest.raises(ValueError, match="cannot keep"):
                cache.rollback(wrong)


def test_b11_a_divergence_is_reported_with_its_place_and_logit_gap(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 is identical; in bfloat16, and with a faulty verifier, the first divergence and the
    target's logit gap there are recorded.
    """
    overrides = (
        "prompts.limit=2",
        "sampling.max_new_tokens=12",
        "drafter=oracle",
        "sampling.eos_token_ids=[]",
    )
    summary, loaded = job(*overrides)
    assert loaded.prompts.is_identical.tolist() == [True, True]
    assert loaded.prompts.divergence.isna().all() and loaded.prompts.logit_gap.isna().all()
    assert summary["num_identical"] == 2

    _, half = job(*overrides, "target.dtype=bfloat16")
    for row in half.prompts.itertuples():
        same = list(row.output_ids) == list(row.baseline_ids)
        assert row.is_identical == same
        assert same == (row.divergence != row.divergence)  # NaN: none
        assert same or row.logit_gap < 0.5

    def faulty(self: Coupled, tree: TokenTree, scores: Any) -> Verdict:
        token = scores.target_token(ROOT)
        return Verdict(
            (), (token + 1) % 128 if len(tree) == 3 else token
        )  # a logic fault, only where three were drafted

    monkeypatch.setattr(Coupled, "__call__", faulty)
    summary, wrong = job(*overrides)
    model = random_model()
    assert summary["num_identical"] == 0
    for row in wrong.prompts.itertuples():
        output, base = list(row.output_ids), list(row.baseline_ids)
        at = int(row.divergence)
        assert not row.is_identical
        assert output[:at] == base[:at] and output[at] != base[at]
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt_ids, *base[:at]]]), use_cache=False).logits[
                0, -1
            ]
        best, second = logits.topk(2).values.tolist()
        assert row.logit_gap == pytest.approx(best - second, abs=1e-3)


WINDOWED = (
    ("mistral", {"sliding_window": 8}),
    (
        "qwen3",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("model_type", "options"), WINDOWED)
def test_b12_a_sliding_window_is_rolled_back_exactly(
    model_type: str, options: dict, attention: str
) -> None:
    """Past its window a target with rejected drafts still writes what it writes alone; so does a
    drafter of its kind.
    """
    model = random_model(model_type, vocab_size=128, max_position_embeddings=128, **options)
    model.set_attn_implementation(attention)
    prompt = [(7 * i) % 120 + 3 for i in range(20)]
    base = plain_greedy(model, prompt, 30)
    for layout in LAYOUTS:
        members = {
            "wrong": text_drafter(prompt, base, name="wrong", wrong=True),
            "partly": Fake(lambda context: _partly_right([*prompt, *base], context), depth=5),
            "same": LanguageModel(copy.deepcopy(model), num_draft_tokens=3),
        }
        new, steps = decode(model, Ensemble(members), prompt, 30, layout=layout)
        assert new == base
        same = [step.members[2] for step in steps]
        assert sum(member.num_drafted for member in same) > 20
        assert all(member.num_matched == member.num_drafted for member in same)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("mamba", {}), ("qwen3_next", {}), ("lfm2", {"layer_types": ["conv", "full_attention"]})],
)
def test_b12_a_running_state_is_refused_by_name(model_type: str, options: dict) -> None:
    """What cannot be cut back after a rejected draft is refused at start, as a target and as a
    drafter.
    """
    model = random_model(model_type, **options)
    with pytest.raises(UserError, match=rf"{model_type}.*cannot be rolled back"):
        Target(model)
    with pytest.raises(UserError, match=rf"{model_type}.*cannot be rolled back"):
        LanguageModel(model).bind(Target(random_model()))


TREE = TokenTree((31, 32, 33, 34, 35), (-1, 0, 0, -1, 3), (1, 2, 2, 1, 2), (1,) * 5)
"""A with the children B and C, and beside it D with the child E."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b13_a_branching_tree_scores_every_branch_as_if_alone(tiny: Any, layout: Layout) -> None:
    """Positions, mask and surviving cache rows of each branch are those of a separate forward."""
    model = copy.deepcopy(tiny).double()
    target = Target(model)

    def alone(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]

    for node in (ROOT, *range(5)):
        path = TREE.path_to(node)
        cache = target.prefill(PROMPT)
        logits = target.score(cache, PROMPT[-1], TREE, layout)
        for each in (ROOT, *range(5)):
            branch = [TREE.token_ids[n] for n in TREE.path_to(each)]
            torch.testing.assert_close(
                logits[each + 1], alone([*PROMPT, *branch]), atol=1e-9, rtol=0
            )
        cache.accept(path)
        text = [*PROMPT, *(TREE.token_ids[n] for n in path), 40]
        assert cache.length == len(text) - 1
        again = target.score(cache, 40, TREE, layout)  # a second tree, behind what the first left
        torch.testing.assert_close(again[0], alone(text), atol=1e-9, rtol=0)
        torch.testing.assert_close(again[3], alone([*text, 31, 33]), atol=1e-9, rtol=0)


def test_b13_whichever_branch_is_right_the_output_is_the_targets(tiny: Any) -> None:
    """Three drafters that part at different depths; now one, now another is right; tree, rows and
    AR decoding agree.
    """
    base = plain_greedy(tiny, PROMPT, 40)
    whole = [*PROMPT, *base]

    def right_for(turn: int) -> Fake:
        def propose(context: Sequence[int]) -> list[int]:
            tokens = whole[len(context) : len(context) + 4]
            right = 4 if len(context) % 3 == turn else turn
            return [
                token if i < right else (token + 1 + turn) % 128 for i, token in enumerate(tokens)
            ]

        return Fake(propose, depth=4)

    for layout in LAYOUTS:
        trio = Ensemble({name: right_for(turn) for turn, name in enumerate("abc")})
        new, steps = decode(tiny, trio, PROMPT, 40, layout=layout)
        assert new == base
        winners = {owners for step in steps for owners in step.token_owners if owners in (1, 2, 4)}
        assert winners == {1, 2, 4}  # each branch was the accepted one, alone, at least once


def test_b14_more_than_one_prompt_at_once_is_refused(tiny: Any) -> None:
    """A batch is refused in one line, before anything runs."""
    spec = specens.attach(tiny)
    for shape in ((3, 5), (0, 5), (5,)):
        with pytest.raises(UserError, match=r"\[1, seq\]"):
            spec.generate(torch.full(shape, 7), max_new_tokens=3)


def test_b16_options_are_honoured_or_refused_by_name(tiny: Any, job: Job, tmp_path: Path) -> None:
    """Sampling options change the speculative text as they change the AR text; unknown ones are
    refused, naming them.
    """
    with pytest.raises(UserError, match="num_beams"):
        merge_options(Target(tiny), None, num_beams=4)
    with pytest.raises(UserError, match="num_return_sequences"):
        merge_options(Target(tiny), None, num_return_sequences=2)

    with pytest.raises(UserError, match="num_beams"):
        job("sampling.num_beams=4")
    with pytest.raises(UserError, match="num_beams"):
        job("+sampling.num_beams=4")
    status = [json.loads(path.read_text())["status"] for path in tmp_path.rglob("summary.json")]
    assert status == ["failed"]

    model = random_model()
    target = Target(model, byte_tokenizer())
    spec = specens.attach(
        model, byte_tokenizer(), drafters=[NGram(), LanguageModel(random_model(seed=1))]
    )
    baseline = specens.attach(model, byte_tokenizer(), drafters=[])
    prompt = byte_tokenizer().encode("abcabcab")

    def texts(**options: Any) -> tuple[int, ...]:
        config = SamplingOptions(
            max_new_tokens=24, **{"temperature": 0.6, "eos_token_ids": [], **options}
        )
        drafted, alone = (
            each.speculator.complete(
                prompt, config.generation_config(target), seed=0, prompt_key="p"
            ).output_ids
            for each in (spec, baseline)
        )
        assert drafted == alone
        return drafted

    free = texts()
    options = (
        {"temperature": 1.5},
        {"top_k": 1},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"bad_words": [byte_tokenizer().decode([t]) for t in set(free) if 20 < t < 90]},
    )
    for option in options:
        assert texts(**option) != free, option
    assert texts(temperature=1.0, top_k=1) == texts(temperature=0.0)
    assert len(set(texts(no_repeat_ngram_size=1))) == 24


def test_b16_the_ngram_size_reaches_the_drafter(job: Job) -> None:
    """Different n-gram settings are different runs, not one code path measured twice."""
    overrides = (
        "prompts=inline",
        "prompts.texts=[abcdabceabcfabcd]",
        "sampling.max_new_tokens=24",
        "sampling.eos_token_ids=[]",
    )
    _, short = job(*overrides, "drafter.max_ngram=1")
    _, long = job(*overrides, "drafter.max_ngram=5", "drafter.min_ngram=5")
    assert outputs(short) == outputs(long)
    assert short.drafts.num_drafted.sum() != long.drafts.num_drafted.sum()


# C. Sampling


P, Q = (
    torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64),
    torch.tensor([0.7, 0.2, 0.05, 0.05], dtype=torch.float64),
)


def test_b17_the_residual_is_normalised_and_never_empty() -> None:
    """min(p, q) is accepted, and the rest comes from (p - q)+ over its sum; equal distributions
    leave the target's own.
    """
    accepted = sum(float(Q[x]) * acceptance(P, Q, x) for x in range(4))
    assert accepted == pytest.approx(0.9, abs=1e-12)
    left = residual(P, Q)
    assert left.tolist() == pytest.approx([0, 0, 0.5, 0.5], abs=1e-12)
    emitted = [
        float(Q[x]) * acceptance(P, Q, x) + (1 - accepted) * float(left[x]) for x in range(4)
    ]
    assert emitted == pytest.approx(P.tolist(), abs=1e-12)
    assert torch.equal(residual(P, P.clone()), P) and all(
        acceptance(P, P, x) == 1 for x in range(4)
    )


ONE = Plan.of([Share(1, 1)])
"""One token of one drafter."""


@pytest.mark.parametrize("sampled_from", ["argmax", "temperature", "top_k"])
def test_b18_a_sample_is_tested_with_the_distribution_it_was_sampled_from(
    sampled_from: str,
) -> None:
    """However a drafter samples: with the draft_probs of that very sample, or as deterministic, the
    text keeps the target's distribution.
    """
    all_probs = {
        "argmax": None,
        "temperature": (Q.log() / 0.7).softmax(-1),
        "top_k": Q.log().masked_fill(Q < 0.2, -torch.inf).softmax(-1),
    }
    probs, logits = all_probs[sampled_from], P.log().expand(2, 4)
    count, first = 12_000, Counter()
    for seed in range(count):
        sampler = Sampler(noise=KeyedNoise(seed, "p"), coupled=False)
        drafter = sampler.fork("step 1").fork("lm")
        token = 0 if probs is None else drafter.sample([0], probs.log())[0][0]
        draft_probs = () if probs is None else (probs,)
        tree = merge(Draft.chain([token], draft_probs), ONE)
        verdict = Residual()(tree, TreeScores(sampler, [0], tree, logits))
        first[token if verdict.path else verdict.target_token] += 1
    for token in range(4):
        # 4 standard deviations
        assert first[token] / count == pytest.approx(float(P[token]), abs=0.018)


@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=lambda verifier: verifier.name)
def test_b19_a_draft_without_probabilities_is_accepted_with_the_targets_probability(
    verifier: Verifier,
) -> None:
    """p = (.5, .3, .2) and the draft is token 1: accepted in .3 of the runs, and the distribution
    of the output stays p.
    """
    probs = torch.tensor([0.5, 0.3, 0.2])
    tree = merge(Draft.chain([1]), ONE)
    logits = probs.log().expand(2, 3)
    count, accepted, first = 12_000, 0, Counter()
    for seed in range(count):
        sampler = Sampler(noise=KeyedNoise(seed, "p"), coupled=verifier.coupled)
        verdict = verifier(tree, TreeScores(sampler, [0], tree, logits))
        accepted += len(verdict.path)
        first[1 if verdict.path else verdict.target_token] += 1
    assert accepted / count == pytest.approx(0.3, abs=0.016)  # 3.8 standard deviations
    for token, p in enumerate((0.5, 0.3, 0.2)):
        assert first[token] / count == pytest.approx(p, abs=0.018)


A, B, C, D, E, F = range(1, 7)
ROWS = {"ab": [A, B], "ac": [A, C], "ad": [A, D], "ef": [E, F]}


def _a_or_e(prefix: Sequence[int]) -> list[float]:
    """After the prompt A or E, half each; after those, any of the six."""
    scores = [-50.0] * 8
    for token in (A, E) if len(prefix) == 1 else range(1, 7):
        scores[token] = 0.0
    return scores


@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=lambda verifier: verifier.name)
def test_b20_several_drafters_do_not_bias_the_first_token(verifier: Verifier) -> None:
    """Three rows begin with A and one with E, the target gives half to each: A comes first in half
    of the runs.
    """
    target = ScriptedTarget(_a_or_e, 8)
    ensemble = Ensemble({name: Fake(lambda _, row=row: row) for name, row in ROWS.items()})
    plan = Plan((Share(2, 2),) * 4, 8)
    tree = merge(ensemble.begin([0]).propose([0], plan, Sampler()), plan)
    logits = target.score(target.prefill([0]), 0, tree, "tree")
    count, first, lengths = 10_000, Counter(), Counter()
    for seed in range(count):
        verdict = verifier(
            tree, TreeScores(Sampler(noise=KeyedNoise(seed, "p")), [0], tree, logits)
        )
        emitted = [*(tree.token_ids[n] for n in verdict.path), verdict.target_token]
        first[emitted[0]] += 1
        lengths[len(verdict.path)] += 1
    assert first[A] / count == pytest.approx(0.5, abs=0.02)  # 4 standard deviations
    assert first[A] + first[E] == count
    # A goes on to one of its three drafted children in half of its runs, E to its one in a sixth.
    assert lengths[2] / count == pytest.approx(0.5 * 3 / 6 + 0.5 / 6, abs=0.02)


def test_b20_neither_the_order_nor_a_copy_of_a_drafter_changes_the_text() -> None:
    """For each seed all ensembles, and none, give the same tokens."""
    target = ScriptedTarget(_a_or_e, 8)

    def text(names: Sequence[str], seed: int) -> list[int]:
        members = {
            f"{name}{i}": Fake(lambda _, row=ROWS[name]: row) for i, name in enumerate(names)
        }
        return decode(target, Ensemble(members), [0], 6, seed=seed)[0]

    ensembles = (
        ["ab", "ac", "ad", "ef"],
        ["ef", "ad", "ac", "ab"],
        ["ab", "ac", "ad", "ef", "ef", "ab"],
        ["ef"],
        [],
    )
    seen = set()
    for seed in range(60):
        (only,) = {tuple(text(names, seed)) for names in ensembles}
        seen.add(only)
    assert len(seen) > 50


def test_b22_temperature_zero_is_greedy_and_nonsense_is_refused(tiny: Any) -> None:
    """0 means argmax, also with sampling switched on; a tiny temperature gives no NaN; negative and
    NaN are refused.
    """
    base = plain_greedy(tiny, PROMPT, 12)
    spec = specens.attach(tiny, drafters=["ngram", tiny])
    ids = torch.tensor([PROMPT])
    for options in (
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "temperature": 1e-5},
        {"do_sample": False},
    ):
        assert spec.generate(ids, max_new_tokens=12, **options)[0].tolist() == [*PROMPT, *base]
    assert spec.generate(ids, max_new_tokens=12, do_sample=True, temperature=1.0)[0].tolist() != [
        *PROMPT,
        *base,
    ]
    for nonsense in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="temperature"):
            spec.generate(ids, max_new_tokens=12, do_sample=True, temperature=nonsense)
        with pytest.raises(UserError, match="temperature"):
            SamplingOptions(temperature=nonsense)
    target = Target(tiny, byte_tokenizer())
    assert [
        SamplingOptions(temperature=t).generation_config(target).do_sample for t in (0.0, 0.7)
    ] == [False, True]


def test_b23_a_prompts_text_depends_on_its_seed_and_id_alone(
    job: Job, jsonl: Callable[..., str], cache: Path, tmp_path: Path
) -> None:
    """Again, in another order, alone, with other drafters, in another process: the same sampled
    text per prompt id.
    """
    rows = [{"id": name, "text": "aab aab aab"} for name in ("one", "two", "three")]
    rows.append({"id": "four", "text": "another text"})
    sampled = ("sampling.temperature=1", "sampling.max_new_tokens=12", "sampling.eos_token_ids=[]")

    def texts(rows: Sequence[dict], *overrides: str) -> dict[str, list[int]]:
        return outputs(job("prompts=jsonl", jsonl(*rows), *sampled, *overrides)[1])

    first = texts(rows)
    # one text for three ids: not one stream for all
    assert len({tuple(ids) for ids in first.values()}) == 4
    torch.manual_seed(1)
    assert texts(rows) == first
    assert texts(rows[::-1], "drafter=none", "baseline=false") == first
    assert texts(rows[1:2], "drafter=oracle", "layout=rows") == {"two": first["two"]}
    assert texts(rows[:1], "sampling.seed=1")["one"] != first["one"]

    folder = tmp_path / "other-process"
    overrides = [
        "model@target=tiny",
        "drafter=ngram",
        "tracker=none",
        "prompts.chat=false",
        "prompts=jsonl",
        jsonl(*rows),
    ]
    command = [sys.executable, "-m", "specens.run", *overrides, *sampled, f"hydra.run.dir={folder}"]
    environment = {**os.environ, "SPECENS_CACHE": str(cache), "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert outputs(load(folder)) == first


# D. Drafters, vocabularies, prompt edges


def test_b25_an_empty_draft_is_not_token_zero() -> None:
    """Without a match nothing is drafted, verified or accepted, though the target wants token 0 and
    nothing else.
    """
    idle = NGram(min_ngram=40, max_ngram=40)
    new, steps = decode(ScriptedTarget(lambda _: 0), idle, [5, 6, 7], 20)
    assert new == [0] * 20
    assert all(
        (s.num_nodes, s.num_accepted, s.num_emitted, s.members[0].num_drafted) == (0, 0, 1, 0)
        for s in steps
    )
    new, steps = decode(
        ScriptedTarget(lambda _: 0), Ensemble({"idle": idle, "zero": Fixed([0])}), [5, 6, 7], 20
    )
    assert new == [0] * 20
    assert [step.num_accepted for step in steps] == [1] * 10
    assert {step.token_owners for step in steps} == {(2, 0)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b25_padding_is_never_accepted(layout: Layout) -> None:
    """Short rows are padded with the last token; a target that repeats its last token must not get
    the padding for free.
    """
    model = random_model(vocab_size=16, max_position_embeddings=64)
    with torch.no_grad():  # every position outputs what it reads
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    short_and_long = Draft((9, 1, 1, 1), (-1, -1, 1, 2))
    new, steps = decode(model, Fake(lambda _: short_and_long, depth=3), [9] * 4, 12, layout=layout)
    assert new == [9] * 12
    assert [step.num_accepted for step in steps] == [1] * 6


@pytest.mark.parametrize("kind", ["random", "constant", "period"])
def test_b27_the_work_of_a_proposal_does_not_grow_with_the_prompt(kind: str) -> None:
    """Neither Python steps nor memory of `propose` and `observe` grow with the text."""
    short, long = (_ngram_work(kind, length) for length in (2_000, 32_000))
    assert long[0] <= 2 * short[0]
    assert long[1] <= 2 * short[1] + 16_384  # a copy of the long text alone would be 256 kB


def _ngram_work(kind: str, length: int) -> tuple[int, int]:
    """(lines executed, median of the peak bytes allocated) over 20 steps on a text of `length`
    tokens.
    """
    rng = random.Random(0)
    texts = {
        "random": lambda _: rng.randrange(50),
        "constant": lambda _: 7,
        "period": lambda i: i % 9,
    }
    ids = [texts[kind](i) for i in range(length)]
    ngram = NGram(num_draft_tokens=5, num_continuations=2, max_ngram=5).begin(ids)
    plan = Plan.of([Share(5, 20)])
    lines, peaks = 0, []

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    try:
        for _ in range(20):
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            sys.settrace(trace)
            draft = ngram.propose(ids, plan, Sampler())
            ngram.observe(Commit((), (draft.token_ids[0],)))
            ids.append(draft.token_ids[0])
            sys.settrace(before)
            peaks.append(tracemalloc.get_traced_memory()[1] - held)
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return lines, sorted(peaks)[10]  # now and then a list or a dict grows, and is copied once


def test_b29_nothing_is_left_over_from_earlier_prompts_or_runs(job: Job) -> None:
    """The same prompt again, in a run or in the next run, is drafted and accepted alike; so it is
    in another order.
    """
    overrides = (
        "prompts=inline",
        "sampling.max_new_tokens=24",
        "sampling.eos_token_ids=[]",
        "baseline=false",
    )
    ensemble = (
        "drafter=untrained",
        "drafter@drafter.members.quantized=lm",
        "model@drafter.members.quantized.model=tiny",
    )

    def counts(texts: str) -> list[list[tuple[int, ...]]]:
        _, loaded = job(*overrides, *ensemble, f"prompts.texts={texts}")
        columns = ["step", "num_drafted", "num_verified", "num_matched"]
        groups = loaded.drafts.groupby("prompt_id", sort=True)
        return [[tuple(row) for row in group[columns].to_numpy().tolist()] for _, group in groups]

    twice = counts("[abcabcab,abcabcab]")
    assert twice[0] == twice[1]
    assert sum(row[1] for row in twice[0])
    other, same = counts("[xyzxyz,abcabcab]")
    assert same == twice[0]
    assert counts("[abcabcab,xyzxyz]") == [same, other]


@pytest.mark.parametrize("vocab_size", [120, 136])
def test_b31_padded_and_shortened_vocabularies_draft_and_stay_lossless(
    tiny: Any, vocab_size: int
) -> None:
    """A drafter of the same tokenizer with more or fewer embedding rows: lossless greedy and
    sampling, good acceptance.
    """
    small = resized(tiny, vocab_size)
    base = plain_greedy(tiny, PROMPT, 40)
    new, steps = decode(tiny, LanguageModel(small), PROMPT, 40)
    assert new == base
    assert all(0 <= token < 128 for step in steps for token in step.token_ids)
    if vocab_size > 128:
        # same weights where the target has ids
        assert all(step.num_accepted == step.num_nodes for step in steps)
    rates = []
    for seed in range(4):
        alone, _ = decode(tiny, NoDrafter(), PROMPT, 30, seed=seed)
        new, steps = decode(tiny, LanguageModel(small), PROMPT, 30, seed=seed)
        assert new == alone
        rates.append(
            sum(step.num_accepted for step in steps) / max(sum(step.num_nodes for step in steps), 1)
        )
    assert max(rates) > 0.5
    _, tested = decode(tiny, LanguageModel(small), PROMPT, 60, seed=0, verifier=Residual())
    assert sum(step.num_accepted for step in tested) / sum(step.num_nodes for step in tested) > 0.5
    beyond = [126, 127, 126]  # ids that the short one does not know
    new, steps = decode(tiny, LanguageModel(small), beyond, 10)
    assert new == plain_greedy(tiny, beyond, 10)


def test_b31_the_command_line_takes_a_padded_drafter(job: Job) -> None:
    """Same tokenizer, embeddings padded to another size: no refusal, identical output."""
    overrides = (
        "drafter=lm",
        "model@drafter.model=tiny",
        "+drafter.model.source.config.vocab_size=280",
        "prompts.limit=1",
    )
    summary, loaded = job(*overrides, "sampling.max_new_tokens=8")
    assert loaded.prompts.is_identical.tolist() == [True]
    assert summary["drafters"]["lm"]["num_drafted"] > 0


def test_b32_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    """Sizes prove nothing: ids that mean other strings are refused when the drafter meets the
    target, by name.
    """
    target = Target(random_model(), byte_tokenizer())
    folder = tmp_path / "other"
    random_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    # the same tokenizer, from a file: fine
    LanguageModel(ModelSpec(str(folder), device="cpu")).bind(target)

    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for one, other in ("ab", "WZ"):  # whether or not a sample text would show it
        swapped = copy.deepcopy(content)
        vocab = swapped["model"]["vocab"]
        vocab[one], vocab[other] = vocab[other], vocab[one]
        path.write_text(json.dumps(swapped))
        with pytest.raises(UserError, match=r"small.*tokenizer.*differs"):
            LanguageModel(ModelSpec(str(folder), device="cpu"), name="small").bind(target)


def test_b34_prompts_at_the_end_of_the_context(job: Job, jsonl: Callable[..., str]) -> None:
    """Too long a prompt is one row with both numbers and the next ones run; a text ends where the
    context ends.
    """
    lengths = (200, 127, 128, 100)
    rows = [{"id": str(n), "prompt_ids": [3 + i * 7 % 200 for i in range(n)]} for n in lengths]
    overrides = (
        "+target.source.config.max_position_embeddings=128",
        "sampling.max_new_tokens=60",
        "sampling.eos_token_ids=[]",
    )
    summary, loaded = job(*overrides, "prompts=jsonl", jsonl(*rows), "drafter=oracle")
    table = loaded.prompts.set_index("prompt_id")
    assert all(number in table.error["200"] for number in ("200", "128"))
    assert "128" in table.error["128"]
    assert (len(table.output_ids["127"]), len(table.output_ids["100"])) == (1, 28)
    assert table.finish_reason[["127", "100"]].tolist() == ["context", "context"]
    assert table.is_identical[["127", "100"]].tolist() == [True, True]
    assert (summary["num_failed"], summary["num_identical"], summary["status"]) == (
        2,
        2,
        "finished",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b34_no_row_is_computed_past_a_context(tiny: Any, layout: Layout) -> None:
    """Neither the target's verification nor a drafter with a shorter context ever reaches behind
    its last position.
    """
    prompt = [3 + i * 7 % 120 for i in range(100)]
    target, small = (
        copy.deepcopy(tiny),
        random_model(vocab_size=128, max_position_embeddings=112, seed=1),
    )
    reached: dict[str, int] = {"target": 0, "small": 0}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            end = kwargs["cache"].get_seq_length() + ids.shape[1]
            positions = kwargs.get("position_ids")
            reached[name] = max(
                reached[name], end if positions is None else int(positions.max()) + 1
            )

        return hook

    base = plain_greedy(target, prompt, 28)
    target.register_forward_pre_hook(watch("target"), with_kwargs=True)
    small.register_forward_pre_hook(watch("small"), with_kwargs=True)
    careless = Fake(
        lambda context: Draft.chain([*base, *[9] * 40][len(context) - 100 :][:8]), "careless"
    )
    ensemble = Ensemble({"careless": careless, "small": LanguageModel(small)})
    new, steps = decode(target, ensemble, prompt, 60, layout=layout)
    assert new == base and steps[-1].finish_reason == "context"
    assert reached == {"target": 127, "small": reached["small"]}  # the last token need not be fed
    assert 100 < reached["small"] <= 112
    assert any(step.members[1].num_drafted for step in steps)


def test_b35_special_tokens_in_a_prompt_are_tokens(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One BOS; an EOS or a padding token inside the prompt hides and ends nothing; drafters and
    target get the same ids.
    """
    given: list[list[int]] = []
    begin = NGram.begin

    def spy(self: NGram, prompt_ids: Sequence[int]) -> NGramProposer:
        given.append(list(prompt_ids))
        return begin(self, prompt_ids)

    monkeypatch.setattr(NGram, "begin", spy)
    overrides = (
        "prompts=inline",
        "prompts.texts=['<s>hi','a</s>b<pad>c</s>']",
        "sampling.max_new_tokens=12",
    )
    _, loaded = job(*overrides, "sampling.eos_token_ids=[]")
    byte = {character: byte_tokenizer().convert_tokens_to_ids(character) for character in "hiabc"}
    ids = [list(row) for row in loaded.prompts.prompt_ids]
    assert ids == [[0, byte["h"], byte["i"]], [byte["a"], 1, byte["b"], 2, byte["c"], 1]]
    assert all(each in given for each in ids)
    model = random_model()
    for row in loaded.prompts.itertuples():
        assert list(row.output_ids) == plain_greedy(model, list(row.prompt_ids), 12)
        assert row.is_identical


# F. Counting and timing


def test_b40_only_the_leading_run_is_accepted() -> None:
    """Agreement at (1, 0, 1) and (1, 1, 1): four of six drafted tokens are accepted, six are
    emitted.
    """

    def propose(context: Sequence[int]) -> list[int]:
        one, two, three = ups(context, 3)
        return [one, 99, three] if len(context) == 1 else [one, two, three]

    new, steps = decode(ScriptedTarget(count_up), Fake(propose, depth=3), [3], 6)
    result = numbers(steps, new)
    assert [step.num_accepted for step in steps] == [1, 3]
    assert (result["num_verified"], result["num_accepted"], result["num_emitted"]) == (6, 4, 6)
    assert result["acceptance_rate"] == pytest.approx(4 / 6)
    assert result["drafters"]["fake"]["acceptance_rate"] == pytest.approx(4 / 6)


def test_b40_published_counts_come_out_of_the_loop() -> None:
    """87 drafts, 259 drafted, 70, 55 and 42 accepted by position: rate .6448, length 2.92. And 129
    drafts of three.
    """
    depths = [0] * 17 + [1] * 15 + [2] * 13 + [3] * 42

    def result(matched: list[int], lengths: list[int]) -> dict[str, Any]:
        turns = iter(zip(matched, lengths, strict=True))

        def propose(context: Sequence[int]) -> list[int]:
            right, length = next(turns)
            return [token if i < right else 127 for i, token in enumerate(ups(context, length))]

        target = ScriptedTarget(lambda prefix: prefix[-1] % 100 + 1)
        count = sum(matched) + len(matched)
        # The script wraps at 100, and so does the drafter.
        fake = Fake(
            lambda context: [t if t == 127 else (t - 1) % 100 + 1 for t in propose(context)],
            depth=3,
        )
        new, steps = decode(target, fake, [1], count)
        assert len(new) == count and len(steps) == len(matched)
        return numbers(steps, new)

    first = result(depths, [2, 2] + [3] * 85)
    assert (first["num_verified"], first["num_accepted"], first["num_steps"]) == (259, 167, 87)
    assert first["acceptance_rate"] == pytest.approx(0.6448, abs=5e-5)
    assert first["acceptance_length"] == pytest.approx(2.92, abs=5e-3)
    by_depth = first["drafters"]["fake"]["acceptance_by_depth"]
    assert by_depth == pytest.approx([70 / 87, 55 / 70, 42 / 55])
    assert [by_depth[0], by_depth[0] * by_depth[1]] == pytest.approx([0.805, 0.632], abs=5e-4)
    second = result([0] * 64 + [1] + [2] * 43 + [3] * 21, [3] * 129)
    assert (second["num_verified"], second["num_accepted"]) == (387, 150)
    assert second["acceptance_rate"] == pytest.approx(0.388, abs=5e-4)
    assert second["acceptance_length"] == pytest.approx(2.16, abs=5e-3)


def test_b42_nothing_verified_has_no_rate(job: Job) -> None:
    """A drafter that never finds a match has an empty rate, and the run ends well."""
    summary, loaded = job(
        "prompts.limit=1",
        "drafter.min_ngram=400",
        "drafter.max_ngram=400",
        "sampling.max_new_tokens=6",
    )
    drafter = summary["drafters"]["ngram"]
    assert (summary["status"], summary["acceptance_rate"], drafter["acceptance_rate"]) == (
        "finished",
        None,
        None,
    )
    assert (drafter["no_draft_rate"], drafter["num_drafted"], drafter["win_rate"]) == (1.0, 0, 0.0)
    stored = json.loads((loaded.folders[0] / "summary.json").read_text())
    assert stored["acceptance_rate"] is None
    assert stored["drafters"]["ngram"]["tokens_per_draft_s"] in (None, 0.0)


def test_b42_proposed_verified_and_accepted_are_counted_apart() -> None:
    """Pruned nodes are proposed and not verified; short last rounds, and tokens trimmed after a
    stop, count as they were.
    """
    target = ScriptedTarget(count_up)
    half = Fake(lambda context: [*ups(context, 2), 99, 99], "half", depth=4)
    new, steps = decode(target, half, [3], 10, budget=FixedBudget(max_nodes=3))
    result = numbers(steps, new)
    member = result["drafters"]["half"]
    # Three tokens a step; ten wanted: 4, 4, 4 and (nothing to draft) 0 proposed, 3, 3, 3 and 0
    # verified.
    assert [step.num_emitted for step in steps] == [3, 3, 3, 1]
    assert [step.members[0].num_drafted for step in steps] == [4, 4, 3, 0]
    assert [step.num_nodes for step in steps] == [3, 3, 3, 0]
    assert (member["num_drafted"], member["num_verified"], member["num_accepted"]) == (11, 9, 6)
    assert member["acceptance_rate"] == result["acceptance_rate"] == pytest.approx(6 / 9)

    new, steps = decode(target, Fake(lambda context: ups(context, 4), depth=4), [3], 50, eos=[11])
    result = numbers(steps, new)
    assert new == list(range(4, 12))
    assert (
        result["num_emitted"]
        == len(new)
        == result["num_accepted"] + result["num_steps"] - result["num_trimmed"]
    )
    assert (
        result["num_trimmed"] == 1
    )  # 4..8, then 9, 10, 11 of which the last is accepted: no token of the target's own
    assert result["num_accepted"] == 7


def test_b43_ties_are_shared_and_the_order_decides_nothing() -> None:
    """Two equal oracles win half each, swapped or not; rounds without an accepted token have no
    winner.
    """
    target = ScriptedTarget(count_up)

    def right(count: int) -> Callable[[Sequence[int]], list[int]]:
        return lambda context: [*ups(context, count), 99] if len(context) > 1 else [99]

    def table(**functions: Any) -> dict[str, Any]:
        members = {name: Fake(propose, name, depth=4) for name, propose in functions.items()}
        new, steps = decode(target, Ensemble(members), [3], 40)
        assert new == ups([3], 40)
        assert all(step.num_emitted >= 1 for step in steps)
        assert any(step.num_accepted == 0 for step in steps)
        return numbers(steps, new)

    ab, ba = table(a=right(2), b=right(2)), table(b=right(2), a=right(2))
    for result in (ab, ba):
        wins = {name: each["win_rate"] for name, each in result["drafters"].items()}
        assert wins["a"] == wins["b"] > 0
        assert sum(wins.values()) + result["no_win_rate"] == pytest.approx(1.0)
        assert all(
            each["sole_win_rate"] == 0 and each["marginal"] == 0
            for each in result["drafters"].values()
        )

    long_last, long_first = table(a=right(1), b=right(3)), table(b=right(3), a=right(1))
    for result in (long_last, long_first):
        assert result["drafters"]["a"]["win_rate"] == 0
        assert result["drafters"]["b"]["sole_win_rate"] == pytest.approx(1 - result["no_win_rate"])
    free = ("draft_ms_per_step", "tokens_per_draft_s")
    for one, other in ((ab, ba), (long_last, long_first)):
        for name in "ab":
            mine, its = (
                {k: v for k, v in each["drafters"][name].items() if k not in free}
                for each in (one, other)
            )
            assert mine == its


def test_b43_a_member_without_drafters_takes_no_credit_from_the_others() -> None:
    """An ensemble with "no drafter" in it credits the other members as if it were not there."""
    target = ScriptedTarget(count_up)
    for members in (("none", "a"), ("a", "none")):
        drafters: dict[str, Any] = {
            "none": NoDrafter(),
            "a": Fake(lambda context: ups(context, 3), depth=3),
        }
        new, steps = decode(target, Ensemble({name: drafters[name] for name in members}), [3], 12)
        assert new == ups([3], 12)
        assert numbers(steps, new)["drafters"]["a"]["win_rate"] == 1.0
        assert {step.token_owners for step in steps} == {(1, 1, 1, 0)}


SLOW_S = 0.4


def _slow_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first proposal of a job is slow, as the first use of a kernel is."""
    propose, cold = NGramProposer.propose, [True]

    def slow(self: NGramProposer, *arguments: Any) -> Draft:
        if cold:
            time.sleep(SLOW_S * cold.pop())
        return propose(self, *arguments)

    monkeypatch.setattr(NGramProposer, "propose", slow)


def test_b44_prefill_and_warm_up_are_not_decoding_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start of a prompt is prefill, a slow first call is warm-up; the steps' times are the
    decoding time.
    """
    begin = NGram.begin

    def slow_begin(self: NGram, prompt_ids: Sequence[int]) -> NGramProposer:
        time.sleep(SLOW_S if len(prompt_ids) else 0)
        return begin(self, prompt_ids)

    monkeypatch.setattr(NGram, "begin", slow_begin)
    _slow_first_call(monkeypatch)
    summary, loaded = job(
        "prompts.limit=2", "sampling.max_new_tokens=6", "sampling.eos_token_ids=[]"
    )
    prompts, steps = loaded.prompts, loaded.steps
    assert (prompts.prefill_s >= SLOW_S).all()
    assert (prompts.decode_s < SLOW_S).all() and (prompts.baseline_decode_s < SLOW_S).all()
    per_prompt = (
        steps.groupby("prompt_id", sort=False)[["draft_ms", "verify_ms", "host_ms"]]
        .sum()
        .sum(axis=1)
        / 1e3
    )
    assert prompts.decode_s.tolist() == pytest.approx(per_prompt.tolist())
    assert set(steps.prompt_id) == set(prompts.prompt_id)  # the warm-up left no rows
    assert steps.groupby("prompt_id").num_emitted.sum().tolist() == [6, 6]
    assert summary["tokens_per_s"] == pytest.approx(12 / prompts.decode_s.sum())


def test_b44_a_first_prompt_that_fails_does_not_cost_the_warm_up(
    job: Job, jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt is refused; the one after it is timed warm all the same."""
    _slow_first_call(monkeypatch)
    rows = jsonl({"prompt_ids": [5] * 600}, {"prompt_ids": [5, 6, 7]})
    _, loaded = job("prompts=jsonl", rows, "sampling.max_new_tokens=6")
    assert loaded.prompts.error.notna().tolist() == [True, False]
    assert loaded.prompts.decode_s.iloc[1] < SLOW_S


def test_b44_what_a_reader_does_between_steps_is_not_timed() -> None:
    """A slow streamer or terminal is no part of a step; a slow drafter and a slow target are, each
    under its own name.
    """
    target = ScriptedTarget(lambda prefix: time.sleep(0.03) or count_up(prefix))
    drafter = Fake(lambda context: time.sleep(0.02) or [99], depth=2)
    decoder = Decoder(target, drafter, FixedBudget(), Coupled())  # pyright: ignore
    records = decode_steps(decoder, [3], Sampler(), StopRules(4))
    begin = time.perf_counter()
    steps = []
    for step in records:
        steps.append(step)
        time.sleep(0.1)
    total = sum(step.draft_ms + step.verify_ms + step.host_ms for step in steps) / 1e3
    assert total <= time.perf_counter() - begin - 0.1 * len(steps) + 1e-3
    assert steps[0].draft_ms >= 20 and steps[0].members[0].draft_ms >= 20
    assert steps[0].verify_ms >= 60  # the root and one node
    assert steps[0].host_ms < steps[0].verify_ms
