"""Grouped attention is sdpa's, without its copies; a model that is handed in keeps its own."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specens.decoding.target.attention import (
    grouped_attention,
    library_attention,
    mask_repeats,
    use_grouped_attention,
)
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import TokenTree
from specens.models.tiny import random_model


def inputs(heads: int, key_heads: int, width: int, positions: int, rows: int = 1) -> Any:
    numbers = torch.Generator().manual_seed(width + positions)
    shapes = (
        (rows, heads, width, 8),
        (rows, key_heads, positions, 8),
        (rows, key_heads, positions, 6),
    )
    return tuple(torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes)


def mask_of(width: int, positions: int, boolean: bool = False) -> torch.Tensor:
    seen = torch.rand(1, 1, width, positions, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 0] = True
    return (
        seen if boolean else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e300)
    )


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


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_mask_may_be_repeated_for_the_groups_already(repeats):
    """Once for a forward; for another number of groups than a layer has it is cut to one."""
    query, key, value = inputs(4, 2, 3, 9)
    mask, module = mask_of(3, 9), SimpleNamespace(num_key_value_groups=2, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask)  # pyright: ignore
    masks = mask.repeat(1, 1, repeats, 1)
    found, _ = grouped_attention(module, query, key, value, masks)  # pyright: ignore
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("attention", "grouped"), [("sdpa", "specens_grouped"), ("eager", "eager")]
)
def test_a_loaded_model_attends_in_groups_but_for_the_librarys_own_decoding(attention, grouped):
    model = random_model(vocab_size=32, attn_implementation=attention)
    layer = model.model.layers[0].self_attn
    seen = []

    def fail():
        with library_attention(model):
            seen.append(layer.config._attn_implementation)
            raise KeyError

    use_grouped_attention(model)
    assert layer.config._attn_implementation == model.config._attn_implementation == grouped
    assert mask_repeats(model) == (2 if attention == "sdpa" else 1)
    with pytest.raises(KeyError):
        fail()
    assert seen == [attention]
    assert model.config._attn_implementation == grouped


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_target_leaves_the_model_as_it_was(attention):
    model = random_model(vocab_size=32, attn_implementation=attention)
    target = Target(model)
    with target.prefill([5, 6]) as cache:
        target.score(cache, 6, TokenTree.chain((5, 6)), "tree")
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grouped_target_scores_trees_like_the_model_itself(dtype):
    prompt, tree = [5, 6, 7], TokenTree((8, 9, 4, 3), (-1, 0, 0, -1), (1, 2, 2, 1), (1,) * 4)
    scores = []
    for is_grouped in (False, True):
        model = random_model(vocab_size=32).to(dtype)
        if is_grouped:
            use_grouped_attention(model)
        target = Target(model)
        for layout in LAYOUTS:
            with target.prefill(prompt) as cache:
                scores.append(target.score(cache, 7, tree, layout))
    for other in scores[1:]:
        assert torch.allclose(scores[0], other, atol=1e-4 if dtype == torch.float32 else 1e-6)


def test_a_target_takes_the_short_way(monkeypatch):
    """Keys of 2 heads are never copied for the 4 query heads."""

    copies = []
    monkeypatch.setattr(
        "transformers.integrations.sdpa_attention.repeat_kv", lambda *given: copies.append(given)
    )
    model = random_model(vocab_size=32)
    for is_grouped in (False, True):
        if is_grouped:
            use_grouped_attention(model)
        target = Target(model)
        with target.prefill([5]) as cache, contextlib.suppress(AttributeError):
            target.score(cache, 5, TokenTree.chain((5, 6)), "tree")
            target.score(cache, 6, TokenTree(), "tree")
        assert bool(copies) != is_grouped
        copies.clear()
