"""The distribution of sampled texts from the code that runs in production: keyed noise, real
models, real drafters, both layouts.

What test_exact.py computes for every outcome is counted here: many texts of three tokens, with
three possible ones each, against the product of the target's probabilities. Counting sees large
errors only (see `test_per_row_is_rejected` for how large), but nothing is replaced by an
enumerator.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import pytest
import torch
from exact import Tables, fresh, greedy, parallel, sampled, target_distribution
from helpers import decode_steps, guesser_weights
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Coupled, PerRow, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.scripted import Oracle
from specens.drafters.trained.non_autoregressive import NonAutoregressive
from specens.models.tiny import random_model

pytestmark = pytest.mark.laws

PROMPT = (9, 6, 11, 9, 6)
COUNT = 3
ALPHA = 1e-3 / 20
"""One in a thousand over all tests of this file together (Bonferroni). The seeds are fixed: what
passes once, passes.
"""

PROCESSORS = {
    "temperature": (TemperatureLogitsWarper(0.8), TopKLogitsWarper(3)),
    "top_p": (TopKLogitsWarper(3), TopPLogitsWarper(0.9)),
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(3)),
}


def chi_square_limit(degrees: int, alpha: float = ALPHA) -> float:
    """The value that a chi-square of so many degrees of freedom exceeds with probability alpha:
    Wilson and Hilferty's approximation (1931), by which its cube root is nearly normal.
    """
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NormalDist().inv_cdf(1 - alpha) * math.sqrt(spread)) ** 3


def chi_square(
    counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]
) -> tuple[float, float]:
    """The statistic of the counted texts against their distribution, and its limit. Cells with less
    than 5 expected are one cell.
    """
    assert not set(counts) - set(distribution), "texts that the target never outputs"
    total = sum(counts.values())
    cells = [(counts[text], total * probability) for text, probability in distribution.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + (
        [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    )
    cells = [cell for cell in cells if cell[1] > 0.5]
    return sum((seen - mean) ** 2 / mean for seen, mean in cells), chi_square_limit(len(cells) - 1)


@functools.cache
def target_model(dtype: torch.dtype = torch.float32) -> Any:
    model = random_model(
        seed=3, num_hidden_layers=1, vocab_size=12, max_position_embeddings=32, pad_token_id=None
    )
    return model.to(dtype)


@functools.cache
def near_model(seed: int = 0, noise: float = 0.06, dtype: torch.dtype = torch.float32) -> Any:
    """The target with noise on its weights: a drafter that is often right."""
    model = copy.deepcopy(target_model()).float()
    numbers = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=numbers)
    return model.to(dtype)


def real_ensemble(dtype: torch.dtype = torch.float32) -> Ensemble:
    model = target_model(dtype)
    guesser = guesser_weights(
        model, kept=range(12), num_positions=2, num_layers=1, hidden_layers=(1,)
    )
    return Ensemble(
        {
            "lm": LanguageModel(near_model(0, dtype=dtype), 2),
            "other": LanguageModel(near_model(1, dtype=dtype), 1),
            "third": LanguageModel(near_model(2, dtype=dtype), 1),
            "ngram": NGram(2),
            "guesser": NonAutoregressive(guesser, 2, 4),
        }
    )


def logits_of(model: Any) -> Any:
    """prefix -> its logits, each computed once."""
    return functools.cache(lambda prefix: fresh(model, prefix))


@functools.cache
def quick_target() -> Tables:
    return Tables(logits_of(target_model()))


def quick_ensemble() -> Ensemble:
    """The same kinds of members, with distributions that are looked up: for many texts in little
    time.
    """
    near = [logits_of(near_model(seed)) for seed in range(3)]
    rows = {"lm": sampled(near[0]), "other": sampled(near[1], 1), "third": sampled(near[2], 1)}
    return Ensemble(
        {**rows, "ngram": NGram(2), "guesser": parallel(near[2]), "best": greedy(near[0], 1)}
    )


def texts(
    target: Any,
    drafter: Any,
    verifier: Any,
    processors: Sequence[Any],
    num_texts: int,
    layout: Any = "tree",
    seed: int = 0,
) -> tuple[Counter[tuple[int, ...]], list[StepRecord]]:
    """How often each text was output, and all steps."""
    drafter.bind(target)
    decoder = Decoder(target, drafter, FixedBudget(), verifier, layout)
    counts, steps = Counter(), []
    for index in range(num_texts):
        noise = KeyedNoise(seed, f"text {index}")
        sampler = Sampler(LogitsProcessorList(list(processors)), noise, coupled=verifier.coupled)
        own = list(decode_steps(decoder, PROMPT, sampler, StopRules(len(PROMPT) + COUNT)))
        counts[tuple(token for step in own for token in step.token_ids)] += 1
        steps += own
    return counts, steps


def distribution(model: Any, processors: Sequence[Any]) -> dict[tuple[int, ...], float]:
    """By teacher forcing: forwards without a cache, and processors of their own."""
    return target_distribution(
        lambda prefix: fresh(model, prefix).float(), PROMPT, COUNT, processors
    )


def matches(steps: Sequence[StepRecord]) -> Counter[str]:
    """Member -> its tokens that were emitted."""
    found: Counter[str] = Counter()
    for step in steps:
        found.update({member.drafter: member.num_matched for member in step.members})
    return found


def check(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """How far below its limit the statistic stays (negative: above)."""
    value, limit = chi_square(counts, wanted)
    # shown by pytest -rP
    print(f"chi-square {value:.1f}, limit {limit:.1f}, {sum(counts.values())} texts")
    return limit - value


def test_the_limit_is_the_books():
    """Quantiles of the chi-square distribution, from a printed table."""
    assert chi_square_limit(10, 0.05) == pytest.approx(18.307, rel=2e-3)
    assert chi_square_limit(26, 0.001) == pytest.approx(54.052, rel=5e-3)


# Laws that are looked up: the real loop, noise and n-gram lookup, many texts.


@pytest.mark.parametrize(
    ("verifier", "name"),
    [(Residual(), "temperature"), (Residual(), "repetition_penalty"), (Coupled(), "top_p")],
    ids=lambda value: getattr(value, "name", value),
)
def test_sampled_texts_have_the_targets_distribution(verifier, name):
    seed = 1 + list(PROCESSORS).index(name)
    counts, steps = texts(
        quick_target(), quick_ensemble(), verifier, PROCESSORS[name], 1200, seed=seed
    )
    assert check(counts, distribution(target_model(), PROCESSORS[name])) > 0
    assert all(
        matches(steps)[member] > 0
        for member in ("lm", "other", "third", "ngram", "guesser", "best")
    )
    assert sum(step.num_accepted for step in steps) > 0.5 * len(steps)


def test_per_row_is_rejected():
    """The positive control: the same ensemble, the same number of texts, every row tested by itself
    and the longest kept.
    """
    counts, _ = texts(
        quick_target(), quick_ensemble(), PerRow(), PROCESSORS["temperature"], 1200, seed=1
    )
    assert check(counts, distribution(target_model(), PROCESSORS["temperature"])) < 0


# Nothing looked up.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_drafters_keep_the_distribution(layout):
    processors = PROCESSORS["repetition_penalty"]
    counts, steps = texts(
        Target(target_model()), real_ensemble(), Residual(), processors, 120, layout
    )
    assert check(counts, distribution(target_model(), processors)) > 0
    assert all(
        matches(steps)[member] > 0 for member in ("lm", "other", "third", "ngram", "guesser")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "name", "layout"),
    [
        (Residual(), "temperature", "tree"),
        (Residual(), "top_p", "rows"),
        (Residual(), "repetition_penalty", "tree"),
        (Residual(), "repetition_penalty", "rows"),
        (Coupled(), "top_p", "tree"),
        (PerRow(), "temperature", "rows"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_real_drafters_keep_the_distribution_over_many_texts(verifier, name, layout):
    """6500 texts: an error of chi-square divergence 0.01 is found with probability 0.99. One that
    is there has to be.
    """
    counts, _ = texts(
        Target(target_model()), real_ensemble(), verifier, PROCESSORS[name], 6500, layout, seed=1
    )
    assert (check(counts, distribution(target_model(), PROCESSORS[name])) > 0) == verifier.lossless


# Half precision.

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_keeps_the_half_precision_models_own_distribution(dtype, layout):
    """Rounding differs between a tree and AR decoding, by less than this many texts can show."""
    model, processors = target_model(dtype), PROCESSORS["temperature"]
    counts, _ = texts(Target(model), real_ensemble(dtype), Residual(), processors, 100, layout)
    assert check(counts, distribution(model, processors)) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_accepts_the_targets_own_distribution(dtype, layout):
    """Nothing is left of the target's distribution after a test with an equal one, and rounding
    must not make NaN of it.
    """
    model = target_model(dtype)
    for drafter in (Oracle(2), LanguageModel(model, 2)):
        counts, steps = texts(
            Target(model), drafter, Residual(), PROCESSORS["temperature"], 40, layout
        )
        drafted = sum(member.num_drafted for step in steps for member in step.members)
        assert sum(counts.values()) == 40
        assert sum(step.num_accepted for step in steps) >= 0.97 * drafted


def test_single_precision_accepts_the_targets_own_distribution():
    for drafter in (Oracle(2), LanguageModel(target_model(), 2)):
        _, steps = texts(
            Target(target_model()), drafter, Residual(), PROCESSORS["temperature"], 100
        )
        assert len(steps) == 100, "two tokens accepted and the target's own"
