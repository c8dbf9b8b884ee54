"""A trimmed output vocabulary: logits for the most frequent ids only, mapped back exactly.

The output projection is most of a small drafter's work (49152 rows against 2 layers), and nearly all text is made of few ids
(Zhao et al. 2025, FR-Spec, arXiv 2502.14856). The rows are the target's own, so they need not be stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


class TrimmedHead(nn.Module):
    """The target's output projection, only for the ids `kept_ids` `[kept]`."""

    weight: torch.Tensor
    kept_ids: torch.Tensor

    def __init__(self, head: Any, kept_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        kept_ids = kept_ids.long().to(head.weight.device)
        self.vocab_size = vocab_size
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.register_buffer("weight", head.weight.detach()[kept_ids].clone(), persistent=False)
        bias = getattr(head, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach()[kept_ids].clone(), persistent=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., kept]`."""
        return linear(hidden, self.weight, self.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab]`; an id that was left out has -inf and is never proposed."""
        return self.spread(self.logits(hidden))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., kept]` -> `[..., vocab]`."""
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.kept_ids] = logits
        return whole


def output_projection(model: Any) -> Any:
    """The module from the last hidden state to logits. Raises ValueError when a model has none that could be trimmed."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if (
        weight is None
        or not weight.is_floating_point()
        or weight.shape[0] != model.config.get_text_config(decoder=True).vocab_size
    ):
        raise ValueError("the model has no plain output projection")
    return head
