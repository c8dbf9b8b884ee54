"""The default target itself (a real model of 135M parameters, fetched once): pytest -m slow."""

from __future__ import annotations

import pytest
import torch

import specens
from specens.config import build, compose
from specens.prompts import next_prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded():
    return build(compose().target).load()


@pytest.fixture(scope="module")
def prompts(loaded):
    questions = build(compose(["prompts.limit=4"]).prompts).questions()
    return [torch.tensor([next_prompt(q, [], loaded.tokenizer, None).token_ids]) for q in questions]


@pytest.mark.parametrize("layout", ["tree", "rows"])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.1, "no_repeat_ngram_size": 4}], ids=["plain", "penalised"]
)
def test_greedy_text_is_transformers_own(loaded, prompts, layout, options):
    spec = specens.attach(loaded.model, loaded.tokenizer, ["ngram", "quantized"], layout=layout)
    for ids in prompts:
        expected = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, **options
        )
        assert torch.equal(spec.generate(ids, max_new_tokens=32, do_sample=False, **options), expected)
    assert spec.stats["win_rate"].sum() > 0


def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(loaded, prompts):
    plain = specens.attach(loaded.model, loaded.tokenizer, "none")
    spec = specens.attach(loaded.model, loaded.tokenizer, ["ngram", "quantized"])
    texts = set()
    for seed in (0, 1):
        options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": seed}
        expected = plain.generate(prompts[0], **options)
        assert torch.equal(spec.generate(prompts[0], **options), expected)
        texts.add(tuple(expected[0].tolist()))
    assert len(texts) == 2
