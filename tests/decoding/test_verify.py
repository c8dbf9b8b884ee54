"""Verifiers that sample otherwise than AR decoding, and the width of a forward. (The exact
distribution: test_exact.py.)
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import test_laws as laws
import torch
from helpers import decode, plain_greedy

import specens
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.sampling import KeyedNoise, Sampler, TreeScores
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Draft, Plan, SampledNode, Share, TokenTree
from specens.decoding.verify import PerRow, Residual, Typical, acceptance, residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.none import NoDrafter
from specens.errors import DrafterError, UserError
from specens.models.tiny import random_model
from specens.records.schema import PromptRecord, frames_of

pytestmark = pytest.mark.laws

model, other, _library = laws.model, laws.other, laws._library
DRAFTERS = [name for name in laws.DRAFTERS if name != "quantized"]


@pytest.fixture(scope="module")
def double(model):
    """The laws' target in float64, where a flip does not hang on rounding."""
    return copy.deepcopy(model).double()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_ar_decodings_with_any_verifier(model, other, name, layout):
    for prompt in laws.PROMPTS:
        for verifier in (Residual(), Typical(), PerRow()):
            output, _ = decode(
                Target(model),
                laws.drafter_of(name, model, other),
                prompt,
                12,
                layout=layout,
                verifier=verifier,
            )
            assert output == plain_greedy(model, prompt, 12), verifier.name


@pytest.mark.parametrize("budget", laws.BUDGETS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_residual_accounts_balance_and_rows_are_trees(double, other, name, budget):
    results = []
    for prompt in laws.PROMPTS:
        texts = [
            decode(
                Target(double),
                laws.drafter_of(name, double, other),
                prompt,
                laws.COUNT,
                layout=layout,
                budget=laws.BUDGETS[budget],
                seed=3,
                verifier=Residual(),
            )
            for layout in LAYOUTS
        ]
        (output, steps), (by_rows, _) = texts
        assert output == by_rows
        assert len(output) == laws.COUNT == sum(step.num_accepted for step in steps) + len(steps)
        assert all(step.num_nodes <= laws.BUDGETS[budget].max_nodes for step in steps)
        results.append(
            (PromptRecord(str(prompt), output_ids=output, decode_s=1.0, prefill_s=0.0), steps)
        )
    laws._accounts_balance(*frames_of(results))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_residual_accepts_all_of_a_drafter_with_the_targets_own_distribution(double, layout):
    """Zero residual everywhere: target_probs / draft_probs is 1 but for rounding."""
    for members in (
        {"same": LanguageModel(double, 4)},
        {"one": LanguageModel(double, 3), "two": LanguageModel(double, 4)},
    ):
        _, steps = decode(
            Target(double),
            Ensemble(members),
            [5, 6, 7],
            40,
            layout=layout,
            seed=1,
            verifier=Residual(),
        )
        assert [step.num_accepted for step in steps[:-1]] == [
            4 if len(members) == 1 else step.num_accepted for step in steps[:-1]
        ]
        assert all(step.num_accepted >= 3 for step in steps[:-1])
    assert all(
        s.num_accepted >= 3
        for s in decode(
            Target(double),
            laws.drafter_of("oracle", double, double),
            [5],
            24,
            seed=2,
            verifier=Residual(),
        )[1][:-1]
    )


def test_residual_text_depends_on_its_seed_and_prompt_key_alone(double, other):
    target, drafter = Target(double), laws.drafter_of("ngram+lm+block+retrieval", double, other)

    def text(prompt, seed=1, key="p"):
        return decode(target, drafter, prompt, 12, seed=seed, prompt_key=key, verifier=Residual())[
            0
        ]

    first = [text(prompt) for prompt in laws.PROMPTS]
    assert [text(prompt) for prompt in laws.PROMPTS[::-1]][::-1] == first
    assert len({tuple(text([5, 6], seed, key)) for seed in (1, 2) for key in "ab"}) == 4


def test_residual_without_drafts_is_ar_sampling(double):
    assert (
        decode(Target(double), NoDrafter(), [5, 6, 7], 20, seed=4, verifier=Residual())[0]
        == decode(Target(double), NoDrafter(), [5, 6, 7], 20, seed=4)[0]
    )


def test_members_sample_with_independent_noise_and_record_their_draft_probs(double):
    members = {"one": LanguageModel(double, 3, num_branches=2), "two": LanguageModel(double, 3)}
    drafter, sampler = Ensemble(members), Sampler(noise=KeyedNoise(0, "p"), coupled=False)
    drafter.bind(Target(double))
    plan = Plan((Share(3, 6), Share(3, 3)), 9)
    differ = 0
    for seed in range(8):
        ids, step_sampler = [5, 6, seed], sampler.fork(f"step {seed}")
        draft = drafter.begin(ids).propose(ids, plan, step_sampler)
        assert len(draft) == 9 and all(probs is not None for probs in draft.draft_probs)
        for token, probs in zip(draft.token_ids, draft.draft_probs, strict=True):
            assert probs.dtype == torch.float64 and probs[token] > 0
            assert float(probs.sum()) == pytest.approx(1, abs=1e-12)
        chain, beside = draft.token_ids[0], draft.token_ids[3]
        assert draft.draft_probs[3][chain] == 0 and beside != chain, (
            "sampled without the chain's own token"
        )
        assert torch.allclose(draft.draft_probs[0], draft.draft_probs[6]), (
            "the same model, at the same prefix"
        )
        differ += draft.token_ids[0] != draft.token_ids[6]
        again = drafter.begin(ids).propose(ids, plan, step_sampler)
        assert again.token_ids == draft.token_ids
    assert differ >= 4, "equal distributions, but not equal samples"
    greedy = drafter.begin([5, 6, 7]).propose([5, 6, 7], plan, Sampler(coupled=False))
    assert greedy.draft_probs == () and greedy.token_ids[0] == greedy.token_ids[6]


def test_residual_of_equal_distributions_and_of_tokens_that_cannot_be():
    probs = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert torch.equal(residual(probs, probs), probs)
    assert torch.equal(residual(probs, probs * (1 + 1e-16)), probs)
    other = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    assert [acceptance(probs, other, token) for token in range(3)] == [1, 1, 0]
    assert torch.allclose(
        residual(probs, other), torch.tensor([0.375, 0.625, 0.0], dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_residual_in_half_precision_has_no_nan_and_accepts_the_targets_own_distribution(
    dtype, layout
):
    half = random_model(vocab_size=128, max_position_embeddings=256, hidden_size=64, seed=3).to(
        dtype
    )
    members = {"same": LanguageModel(half, 4), "ngram": laws.drafter_of("ngram", half, half)}
    accepted = steps_made = 0
    for seed in range(4):
        output, steps = decode(
            Target(half),
            Ensemble(members),
            [5, 6, 7],
            32,
            layout=layout,
            seed=seed,
            verifier=Residual(),
        )
        assert len(output) == 32
        accepted += sum(step.members[0].num_matched for step in steps[:-1])
        steps_made += len(steps) - 1
    assert accepted / steps_made > 3.6, "of 4: rounding may cost one now and then"


@pytest.mark.parametrize(
    "probs",
    [
        torch.full((127,), 1 / 127),
        torch.full((128,), 0.5),
        torch.full((128,), float("nan")),
        -torch.ones(128),
    ],
)
def test_what_is_no_distribution_fails_by_the_drafters_name(double, probs):
    members = {
        "ngram": laws.drafter_of("ngram", double, double),
        "culprit": laws.Fake(lambda context: Draft.chain([5], [probs])),
    }
    with pytest.raises(
        DrafterError, match=r"drafter culprit: the draft_probs of its token 5 are no distribution"
    ):
        decode(Target(double), Ensemble(members), [5, 6, 7], 4, seed=0, verifier=Residual())


def test_attach_takes_a_verifier_by_name(model):
    spec = specens.attach(model, drafters="ngram", verifier="residual")
    assert spec.speculator.decoder.verifier == Residual()
    with pytest.raises(UserError, match=r"verifier 'exact': choose one of block, coupled"):
        specens.attach(model, drafters="ngram", verifier="exact")


def tree_of(*tokens: int, samples=()) -> TokenTree:
    return replace(TokenTree.chain(tokens), samples=samples)


class Scripted:
    """Scores from a list of distributions, with coins that fall as scripted."""

    def __init__(self, distributions, coins=(), choices=()):
        self.distributions, self.coins, self.choices = distributions, list(coins), list(choices)
        self.calls = []

    def target_token(self, node):
        return int(self.distributions[node + 1].argmax())

    def target_probs(self, node):
        return self.distributions[node + 1]

    def flip(self, node, probability, turn):
        self.calls.append((node, round(probability, 9), turn))
        return self.coins.pop(0)

    def sample(self, node, probs):
        self.calls.append((node, [round(p, 9) for p in probs.tolist()]))
        return self.choices.pop(0)


def probs_of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_residual_by_hand():
    """Two samples of one token: the second test is lost, and its residual is taken all the same."""
    samples = (
        SampledNode(0, 0, probs_of(0.8, 0.1, 0.1)),
        SampledNode(0, 1, probs_of(0.5, 0.3, 0.2)),
    )
    target = [probs_of(0.4, 0.4, 0.2), probs_of(0, 0, 1.0)]
    scores = Scripted(target, coins=[False, False], choices=[1])
    verdict = Residual()(tree_of(0, samples=samples), scores)
    assert (verdict.path, verdict.target_token) == ((), 1)
    left = [0.0, 0.3 / 0.4, 0.1 / 0.4]
    second = [0.0, left[1] - 0.3, left[2] - 0.2]
    total = sum(second)
    assert scores.calls == [
        (ROOT, 0.5, 0),
        (ROOT, 0.0, 1),
        (ROOT, [0.0, round(second[1] / total, 9), round(second[2] / total, 9)]),
    ]


def test_typical_takes_the_longest_run_above_the_threshold_and_the_likelier_of_two():
    tree = TokenTree((0, 1, 2, 0), (-1, -1, 0, 1), (1, 1, 2, 2), (1, 1, 1, 1))
    flat, sharp = probs_of(0.5, 0.4, 0.1), probs_of(0.05, 0.05, 0.9)
    scores = Scripted([flat, sharp, probs_of(0.8, 0.1, 0.1), flat, probs_of(0.1, 0.2, 0.7)])
    verdict = Typical()(tree, scores)
    assert verdict.path == (0, 2), "0.5 * 0.9 against 0.4 * 0.8"
    assert verdict.target_token == 0
    assert Typical(epsilon=0.95, delta=1.0)(tree, scores).path == (0, 2)
    assert Typical(epsilon=0.45, delta=1.0)(TokenTree((2,), (-1,), (1,), (1,)), scores).path == ()
    for bad in ({"epsilon": 0}, {"delta": 2}, {"epsilon": "x"}):
        with pytest.raises(UserError, match=f"verifier.{next(iter(bad))}="):
            Typical(**bad)


def test_members_that_cannot_report_their_draft_probs_are_refused_where_they_are_needed(model):
    class Mute(laws.Fake):
        def __init__(self):
            super().__init__(lambda context: [], "mute")
            self.members = (replace(self.members[0], coupled_only=True),)

    specens.attach(model, drafters={"mute": Mute()})
    with pytest.raises(
        UserError, match=r"drafter mute: cannot report the distribution .*; use verifier=coupled"
    ):
        specens.attach(model, drafters={"ngram": "ngram", "mute": Mute()}, verifier=Residual())


@pytest.mark.parametrize("seed", [None, 7])
def test_exact_width_changes_no_text_and_no_cache(double, other, seed):
    alone = {
        tuple(p): decode(Target(double), NoDrafter(), p, 16, seed=seed)[0] for p in laws.PROMPTS
    }
    target = Target(double, exact_width=6)
    for name in ("none", "bushy+ngram", "oracle", "ngram+distilled+block+heads+wrong"):
        for prompt in laws.PROMPTS:
            output, steps = decode(
                target,
                laws.drafter_of(name, double, other),
                prompt,
                16,
                budget=FixedBudget(6),
                seed=seed,
            )
            assert output == alone[tuple(prompt)]
            assert all(step.num_nodes <= 6 for step in steps)


def test_exact_width_scores_a_chain_bit_for_bit_like_ar_decoding():
    """In bfloat16, where forwards of another width round otherwise. (Up to a length of 16, where a
    new vector begins.)
    """
    half = random_model(vocab_size=128, max_position_embeddings=256, hidden_size=64, seed=3).to(
        torch.bfloat16
    )
    target, prompt, chain = Target(half, exact_width=4), [5, 6, 7, 8, 9], [11, 12, 13, 14]
    scored = target.score(target.prefill(prompt), prompt[-1], tree_of(*chain), "tree")
    assert scored.shape[0] == 5
    cache, one_by_one = target.prefill(prompt), []
    for last in (prompt[-1], *chain):
        one_by_one.append(target.score(cache, last, TokenTree(), "tree"))
        assert one_by_one[-1].shape[0] == 1
        cache.accept(())
    assert torch.equal(scored, torch.cat(one_by_one))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processors_and_stop_rules_hold_at_every_node_under_residual(model, tokenizer, layout):
    """A drafter that proposes what the target outputs without them, and one that obeys them."""
    target = random_model(seed=3)
    spec = specens.attach(
        target,
        tokenizer,
        {
            "same": LanguageModel(target, 4),
            "wild": laws.Fake(lambda context: [1, 70, 70, 1], "wild", 4),
            "ngram": "ngram",
        },
        verifier=Residual(),
        layout=layout,
        budget="fixed",
    )
    prompt = torch.tensor([tokenizer.encode("abcabc")])
    accepted = 0
    for seed in range(6):
        options = {
            "do_sample": True,
            "max_new_tokens": 24,
            "seed": seed,
            "eos_token_id": 1,
            "top_k": 0,
        }
        new = spec.generate(
            prompt, **options, min_new_tokens=12, bad_words_ids=[[70]], no_repeat_ngram_size=2
        )[0, 6:]
        ids = new.tolist()
        assert 70 not in ids and 1 not in ids[:12] and len(ids) >= 12
        whole = [*prompt[0].tolist(), *ids]
        pairs = list(itertools.pairwise(whole))
        assert len(set(pairs[2:])) == len(pairs[2:]), "of the prompt's own pairs one is there twice"
        accepted += sum(step.num_accepted for step in spec._done[-1].steps)
    assert accepted > 30
    stop = tokenizer.decode([40])
    texts = [
        spec.generate(prompt, do_sample=True, max_new_tokens=60, seed=s, stop_strings=[stop])[
            0, 6:
        ].tolist()
        for s in range(9)
    ]
    ended = [ids for ids in texts if 40 in ids]
    assert ended and all(ids.index(40) == len(ids) - 1 for ids in ended)


def test_scores_count_positions_by_depth():
    """A node's noise is that of the position after it, whatever its place in the tree."""
    tree = TokenTree((1, 2, 3), (-1, -1, 0), (1, 1, 2), (1, 1, 1))
    logits = torch.zeros(4, 5)
    scores = TreeScores(Sampler(noise=KeyedNoise(0, "p")), [0, 0], tree, logits)
    sampler = Sampler(noise=KeyedNoise(0, "p"))
    assert scores.target_token(ROOT) == sampler.choose([0, 0], logits[0])
    assert scores.target_token(0) == scores.target_token(1) == sampler.choose([0, 0, 1], logits[0])
    assert scores.target_token(2) == sampler.choose([0, 0, 1, 3], logits[0])
    assert Draft.chain([1]).draft_probs == ()
