"""Grouped-query attention without repeated keys: the query heads that share a key head attend in
one product.

transformers' sdpa, given a mask, copies keys and values for every query head, which on a long
context costs more than the attention itself. Here the heads of a group stand under one another as
more queries of their key head. The same scores, up to the order in which a kernel adds.

Models that specens loads use it (`use_grouped_attention`, once, at load); a model that is handed to
`attach` keeps its own attention.
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

from specens.compat import attention_name, set_attention_name, takes_attention_functions

GROUPED = "specens_grouped"
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
    """An attention function of transformers: query `[rows, heads, width, dim]`, key and value
    `[rows, key_heads, positions, dim]`, mask `[rows or 1, 1, width, positions]`, or already
    repeated for every head of a group `[.., groups * width, ..]`, or None -> `[rows, width, heads,
    dim]`. What it has no short way for is sdpa's.
    """
    rows, num_heads, width, _ = query.shape
    num_groups = num_heads // key.shape[1]
    mask, repeated = attention_mask, num_groups * width
    if mask is not None and mask.dim() == 4 and mask.shape[2] not in (width, repeated):
        mask = mask[:, :, :width]  # repeated for another number of groups
    is_plain = dropout == 0 and all(options.get(name) is None for name in CHANGES_SCORES)
    sees_all = mask is None and width == 1
    is_shared = mask is not None and mask.dim() == 4 and mask.shape[1] == 1
    if num_groups == 1 or not is_plain or not (sees_all or is_shared):
        if mask is not None and mask.dim() == 4:
            mask = mask[:, :, :width]
        return sdpa_attention_forward(  # pyright: ignore[reportReturnType]
            module, query, key, value, mask, dropout, scaling, is_causal, **options
        )
    grouped = query.reshape(rows, key.shape[1], repeated, query.shape[-1])
    if mask is not None and mask.shape[2] != repeated:
        mask = mask.repeat(1, 1, num_groups, 1)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    output = output.reshape(rows, num_heads, width, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model that attends with sdpa do it like this; others are left as they are."""
    if attention_name(model) == "sdpa" and takes_attention_functions(model):
        set_attention_name(model, GROUPED)


def mask_repeats(model: PreTrainedModel) -> int:
    """How often the rows of a mask are to be repeated for this model's attention. Done once for a
    forward, it need not be done in every layer.
    """
    if attention_name(model) != GROUPED:
        return 1
    config = model.config.get_text_config(decoder=True)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads // key_heads


@contextmanager
def library_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, a model of ours attends as transformers alone would let it: for the bench's peers."""
    name = attention_name(model)
    if name != GROUPED:
        yield
        return
    set_attention_name(model, "sdpa")
    try:
        yield
    finally:
        set_attention_name(model, name)
