"""Grouped-query attention without repeated keys: the query heads that share a key head attend in one product.

transformers' sdpa, given a mask, copies keys and values for every query head, which on a long context costs more than the
attention itself. Here the heads of a group stand under one another as more queries of their key head. The same scores, up to
the order in which a kernel adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specens_grouped"
CHANGES_SCORES = ("softcap", "position_bias", "s_aux")
"""Arguments with which attention is no longer a plain softmax over products."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: query `[rows, heads, width, dim]`, key and value `[rows, key_heads, positions,
    dim]`, mask `[rows or 1, 1, width, positions]` or None -> `[rows, width, heads, dim]`. What it has no short way for is
    sdpa's.
    """
    rows, num_heads, width, _ = query.shape
    num_groups = num_heads // key.shape[1]
    is_plain = dropout == 0 and all(options.get(name) is None for name in CHANGES_SCORES)
    sees_all = attention_mask is None and width == 1
    is_shared = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    if num_groups == 1 or not is_plain or not (sees_all or is_shared):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)  # pyright: ignore[reportReturnType]
    grouped = query.reshape(rows, key.shape[1], num_groups * width, query.shape[-1])
    mask = None if attention_mask is None else _repeated(attention_mask, num_groups)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, num_heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


def _repeated(mask: torch.Tensor, times: int) -> torch.Tensor:
    """The mask's rows so many times over. All layers of a forward are given one mask, which remembers the result."""
    if torch.compiler.is_compiling():
        return mask.repeat(1, 1, times, 1)
    known = getattr(mask, "_specens_repeated", None)
    if known is None or known[0] != times:
        known = (times, mask.repeat(1, 1, times, 1))
        mask._specens_repeated = known  # pyright: ignore[reportAttributeAccessIssue]
    return known[1]


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model that attends with sdpa does it like this; others are left as they are."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
