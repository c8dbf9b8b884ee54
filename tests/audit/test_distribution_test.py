"""Sampled output with the target's distribution passes, biased output is rejected, and the control
shows that it would be.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Fake

from specens.audit.distribution_test import (
    BEST,
    FAVOURED,
    SUPPORT,
    SURPRISE,
    DistributionTest,
    Term,
    first_proposals,
    functions,
    is_rejected,
    sampled_by,
    statistic,
    term,
    z_bound,
    z_score,
)
from specens.audit.examine import Evidence, examine
from specens.audit.outputs import Output
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.target import Target
from specens.decoding.types import Draft, Member
from specens.decoding.verify import Coupled, PerRow, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel


def test_z_is_excess_over_deviation_and_small_counts_are_held_back():
    assert z_score(30.0, 20.0, 25.0, 0.0) == 2.0
    assert z_score(10.0, 20.0, 25.0, 0.0) == -2.0
    assert z_score(5.0, 5.0, 0.0, 1 / 3) == 0.0
    # One event of probability 0.001: over nine deviations, and of no weight.
    assert z_score(1.0, 0.001, 0.001, 0.0) > 30 and z_score(1.0, 0.001, 0.001, 1 / 3) < 2
    # A token that the target never outputs, a hundred times.
    assert z_score(100.0, 0.0, 0.0, 1 / 3) > 10
    found = statistic("event", [Term(1.0, 0.5, 0.25)] * 3 + [Term(0.0, 0.5, 0.25)])
    sums = (found.num_tokens, found.observed, found.expected, found.variance)
    assert sums == (4, 3.0, 2.0, 1.0)
    assert found.z == pytest.approx(1 / math.sqrt(1 + 1 / 3))
    assert z_bound(1) == pytest.approx(3.8906, abs=1e-4) and z_bound(8) > z_bound(2)
    assert not is_rejected(()) and is_rejected((replace(found, z=-5.0),))


def test_moments_and_functions_of_a_hand_made_distribution():
    target_probs = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    probs = torch.tensor([0.2, 0.8, 0.0, 0.0], dtype=torch.float64)
    given = (probs, probs, None, None)
    draft = Draft((1, 2, 3, 0), (-1, 0, -1, -1), (0, 0, 1, 1), draft_probs=given)
    assert first_proposals(draft) == ({0: (1, probs)}, {1: [3, 0]})
    found = functions(target_probs, draft, (Member("a", 1, 1), Member("b", 1, 1)))
    names = ["log draft_prob of a", sampled_by("a"), "is proposed by b"]
    assert list(found) == [SURPRISE, BEST, FAVOURED, SUPPORT, *names]
    assert found[sampled_by("a")].tolist() == [0, 1, 0, 0]
    assert found[BEST].tolist() == [1, 0, 0, 0]
    assert found[FAVOURED].tolist() == [0, 1, 0, 1]  # the last one is 0 under both
    assert found["is proposed by b"].tolist() == [1, 0, 0, 1]
    assert found[SUPPORT].tolist() == [1, 1, 0, 2]
    logs = [math.log(0.2), math.log(0.8), -20, -20]
    assert found["log draft_prob of a"].tolist() == pytest.approx(logs)
    assert term(found[BEST], target_probs, 1) == Term(0.0, 0.5, 0.25)
    surprise = term(found[SURPRISE], target_probs, 0)
    assert surprise.value == pytest.approx(math.log(2))
    assert surprise.mean == pytest.approx(1.5 * math.log(2))
    assert surprise.variance == pytest.approx(0.25 * math.log(2) ** 2)


def speculator_of(model, drafter, verifier=None) -> Speculator:
    return Speculator(Decoder(Target(model), drafter, FixedBudget(), verifier or Coupled()))


def config_of(speculator: Speculator, length: int, top_k: int):
    options = SamplingOptions(max_new_tokens=length, temperature=1.0, top_k=top_k)
    return options.generation_config(speculator.target)


def sampled(
    speculator: Speculator, num_texts: int, length: int, seed: int, top_k: int = 8
) -> Evidence:
    config, outputs = config_of(speculator, length, top_k), []
    for number in range(num_texts):
        prompt = (3 + number % 7, 5, 8)
        done = speculator.complete(prompt, config, seed=seed, prompt_key=str(number))
        outputs.append(Output(str(number), prompt, done.output_ids, done.finish_reason, seed))
    return examine(speculator.decoder, config, outputs, 4)


@pytest.fixture(scope="module")
def ensemble(tiny, near):
    names = [f"near{number}" for number in range(3)]
    copies = {n: LanguageModel(near(tiny, 1), name=n, num_draft_tokens=1) for n in names}
    return Ensemble({**copies, "fixed": Fake(lambda context: [context[-1]], "fixed")})


@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=lambda verifier: verifier.name)
def test_z_of_honest_output_is_that_of_a_normal_number(tiny, ensemble, verifier):
    speculator = speculator_of(tiny, ensemble, verifier)
    zs = []
    for seed in range(4):
        found = sampled(speculator, 4, 25, seed)
        assert found.distribution == "distribution not rejected" and found.is_lossless
        names = {row.name for row in found.statistics}
        assert names >= {SURPRISE, BEST, FAVOURED, SUPPORT}
        assert names >= {"log draft_prob of near2", "is proposed by fixed"}
        zs += [row.z for row in found.statistics]
    assert max(map(abs, zs)) < 4
    assert 0.3 < np.mean(np.square(zs)) < 2.5


def test_biased_output_is_rejected_and_the_control_shows_that_it_would_be(tiny, ensemble):
    honest = sampled(speculator_of(tiny, ensemble, Residual()), 6, 50, seed=1)
    assert honest.distribution == "distribution not rejected"
    assert is_rejected(honest.control) and honest.num_contested > 0.9 * honest.num_tokens
    biased = sampled(speculator_of(tiny, ensemble, PerRow()), 6, 50, seed=1)
    assert biased.distribution == "NOT LOSSLESS"
    assert not biased.is_lossless and biased.identity is None


def test_the_control_would_pass_if_it_were_fair(tiny, ensemble, monkeypatch):
    """It is rejected for its bias, not for seeing the proposals that the statistics are made of."""
    fair = functools.partial(DistributionTest, control=Residual())
    monkeypatch.setattr("specens.audit.examine.DistributionTest", fair)
    assert not is_rejected(sampled(speculator_of(tiny, ensemble, Residual()), 6, 50, 1).control)


class Liar(Fake):
    """Samples from a distribution with one peak; or takes the peak each time, and reports that it
    was sampled from the whole distribution.
    """

    def __init__(self, *, honest: bool) -> None:
        super().__init__(lambda context: [], "liar", 1)
        self.honest = honest

    def propose(self, context_ids, plan, sampler):
        peak = (7 * context_ids[-1] + 3) % 128
        logits = torch.zeros(128).index_fill(0, torch.tensor(peak), 3.0)
        ((token, probs),) = sampler.sample(context_ids, logits)
        return Draft.chain([token if self.honest else peak], [probs])


def liar(*, honest: bool) -> Ensemble:
    return Ensemble({"liar": Liar(honest=honest)})


def test_a_drafter_with_false_draft_probs_is_caught_by_what_it_samples(tiny):
    honest, lying = (
        sampled(speculator_of(tiny, liar(honest=is_honest), Residual()), 8, 60, 1, top_k=0)
        for is_honest in (True, False)
    )
    assert honest.distribution == "distribution not rejected"
    assert lying.distribution == "NOT LOSSLESS"
    shown = next(row for row in lying.statistics if row.name == sampled_by("liar"))
    assert shown.z > z_bound(len(lying.statistics))


def test_one_token_that_cannot_be_is_proof_enough(tiny):
    speculator = speculator_of(tiny, liar(honest=True), Residual())
    config, decoder = config_of(speculator, 12, top_k=4), speculator.decoder
    done = speculator.complete((3, 5, 8), config, seed=0, prompt_key="p")
    output = Output("p", (3, 5, 8), done.output_ids, done.finish_reason, 0)
    assert examine(decoder, config, [output], 4).impossible == ()
    with torch.no_grad():
        logits = tiny(torch.tensor([[3, 5, 8, *done.output_ids[:-1]]])).logits[0, -1]
    worst = int(logits.argmin())
    output = replace(output, output_ids=(*done.output_ids[:-1], worst))
    found = examine(decoder, config, [output], 4)
    assert found.impossible == (f"token {worst} at position 14",)
    assert found.distribution == "NOT LOSSLESS" and not found.is_lossless


def test_members_propose_in_step_with_the_output(tiny, monkeypatch):
    """Every drafter sees the very contexts that the output has, whoever wrote it, and what was
    begun is closed.
    """
    seen: list[tuple[int, ...]] = []
    begun: list[KVCache] = []
    closed: list[KVCache] = []
    fake = Fake(lambda context: seen.append(tuple(context)) or [1], "watch")
    prefill = Target.prefill

    def recorded(*given) -> KVCache:
        begun.append(prefill(*given))
        return begun[-1]

    monkeypatch.setattr(Target, "prefill", recorded)
    monkeypatch.setattr(KVCache, "close", lambda cache: closed.append(cache))
    found = sampled(speculator_of(tiny, Ensemble({"watch": fake})), 1, 10, seed=0)
    assert found.num_tokens == 10 and begun and all(cache in closed for cache in begun)
    assert [len(ids) for ids in seen[-10:]] == list(range(3, 13))
    assert [commit.path for commit in fake.commits] == [()] * 10
    assert seen[-1] == (3, 5, 8, *(commit.token_ids[0] for commit in fake.commits[:-1]))
