"""Grouped attention is sdpa's, without its copies; the model's own configuration is left as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specens.decoding.attention import grouped, grouped_attention
from specens.decoding.target import Target
from specens.decoding.types import TokenTree
from specens.tiny import random_model


def inputs(heads: int, key_heads: int, width: int, positions: int, rows: int = 1) -> Any:
    numbers = torch.Generator().manual_seed(width + positions)
    shapes = ((rows, heads, width, 8), (rows, key_heads, positions, 8), (rows, key_heads, positions, 6))
    return tuple(torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes)


def mask_of(width: int, positions: int, boolean: bool = False) -> torch.Tensor:
    seen = torch.rand(1, 1, width, positions, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 0] = True
    return seen if boolean else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e300)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("mask", ["none", "float", "bool"])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_are_those_of_sdpa(heads, width, mask, rows):
    positions = width + 11 if mask != "none" or width == 1 else width
    query, key, value = inputs(heads[0], heads[1], width, positions, rows)
    attention_mask = None if mask == "none" else mask_of(width, positions, mask == "bool")
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True)
    ours, _ = grouped_attention(module, query, key, value, attention_mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=0.3)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_position_bias_goes_to_sdpa():
    query, key, value = inputs(4, 2, 3, 9)
    bias = torch.randn(1, 4, 3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    ours, theirs = (
        attend(module, query, key, value, mask_of(3, 9), position_bias=bias)[0]
        for attend in (grouped_attention, sdpa_attention_forward)
    )
    plain, _ = grouped_attention(module, query, key, value, mask_of(3, 9))
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, plain)


@pytest.mark.parametrize(("attention", "inside"), [("sdpa", "specens_grouped"), ("eager", "eager")])
def test_the_model_is_left_as_it_was(attention, inside):
    model = random_model(vocab_size=32, attn_implementation=attention)
    seen = []

    def fail():
        with grouped(model):
            seen.append(model.model.layers[0].self_attn.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [inside]
    assert model.config._attn_implementation == attention


def test_a_target_takes_the_short_way(monkeypatch):
    """Keys of 2 heads are never copied for the 4 query heads."""

    copies = []
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", lambda *given: copies.append(given))
    target = Target(random_model(vocab_size=32))
    cache = target.prefill([5])
    target.score(cache, 5, TokenTree.chain((5, 6)), "tree")
    target.score(cache, 6, TokenTree(), "tree")
    assert not copies
