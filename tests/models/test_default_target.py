"""The default target itself (a real model of 135M parameters, fetched once): pytest -m slow."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import specens
from specens.config.build import build
from specens.config.compose import compose
from specens.drafters.retrieval.datastore import Header, map_tokens
from specens.drafters.retrieval.retrieval import shipped
from specens.models.load import tokenizer_fingerprint
from specens.prompts.chat import next_prompt
from specens.prompts.sources import DEMO_FILE
from specens.train.corpus import texts_of_jsonl
from specens.train.shards import overlaps, runs_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded():
    return build(compose().target).load()


MEMBERS = ["ngram", "retrieval", "non_autoregressive", "distilled", "quantized"]


@pytest.fixture(scope="module")
def prompts(loaded):
    questions = build(compose(["prompts.limit=4"]).prompts).questions()
    return [torch.tensor([next_prompt(q, [], loaded.tokenizer, None).token_ids]) for q in questions]


@pytest.mark.parametrize("budget", ["fixed", "cost_aware"])
@pytest.mark.parametrize("layout", ["tree", "rows"])
@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.1, "no_repeat_ngram_size": 4}],
    ids=["greedy", "penalised"],
)
def test_greedy_text_is_transformers_own(loaded, prompts, layout, options, budget):
    spec = specens.attach(loaded.model, loaded.tokenizer, MEMBERS, layout=layout, budget=budget)
    for ids in prompts:
        expected = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, **options
        )
        assert torch.equal(
            spec.generate(ids, max_new_tokens=32, do_sample=False, **options), expected
        )
    stats = spec.stats.set_index("drafter")
    assert list(stats.index) == MEMBERS
    # which finds nothing when n-grams may not repeat
    alone = stats["solo_acceptance_length"].drop("ngram")
    assert budget != "fixed" or (alone > 1.1).all(), (
        "every drafter that comes with the package is right now and then"
    )


def test_sampled_text_is_that_of_ar_decoding_with_the_same_seed(loaded, prompts):
    baseline = specens.attach(loaded.model, loaded.tokenizer, "none")
    spec = specens.attach(loaded.model, loaded.tokenizer, MEMBERS)
    texts = set()
    for seed in (0, 1):
        options = {
            "max_new_tokens": 24,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": seed,
        }
        expected = baseline.generate(prompts[0], **options)
        assert torch.equal(spec.generate(prompts[0], **options), expected)
        texts.add(tuple(expected[0].tolist()))
    assert len(texts) == 2


def test_no_measuring_text_is_in_the_text_that_comes_with_the_package(loaded):
    """No run of 32 tokens of the demo prompts, nor of Spec-Bench (SPEC_BENCH names its
    question.jsonl).
    """
    folder = shipped(tokenizer_fingerprint(loaded.tokenizer))
    tokens = map_tokens(folder, Header.read(folder))
    paths = [DEMO_FILE, *([os.environ["SPEC_BENCH"]] if "SPEC_BENCH" in os.environ else [])]
    texts = [text for path in paths for text in texts_of_jsonl(path)]
    runs = np.unique(np.concatenate([runs_of(loaded.tokenizer.encode(text)) for text in texts]))
    assert len(runs) > 100
    assert not overlaps(tokens, runs)
