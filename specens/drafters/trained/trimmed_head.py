"""A trimmed output vocabulary: logits for the most frequent ids only, mapped back exactly.

The output projection is most of a small drafter's work (49152 rows against 2 layers), and nearly
all text is made of few ids (Zhao et al. 2025, FR-Spec, arXiv 2502.14856). The rows are the target's
own, so they need not be stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from specens.decoding.target.supported import model_name
from specens.errors import UserError
from specens.models.cpu_linear import packed_linear

AFTER_PROJECTION = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
"""What models do to logits after their output projection (a factor, a divisor, a soft cap), and the
value that does nothing.
"""


class TrimmedHead(nn.Module):
    """A model's output projection, and what it does to logits after it, only for the ids `kept_ids`
    `[kept]`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    kept_ids: torch.Tensor

    def __init__(self, model: Any, kept_ids: torch.Tensor) -> None:
        super().__init__()
        head, config = output_projection(model), model.config.get_text_config(decoder=True)
        kept_ids = kept_ids.long().to(head.weight.device)
        self.vocab_size = int(config.vocab_size)
        factor = float(getattr(config, "logit_scale", None) or 1)
        self.scale = factor / float(getattr(config, "logits_scaling", None) or 1)
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.register_buffer("weight", head.weight.detach()[kept_ids].clone(), persistent=False)
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias.detach()[kept_ids].clone()
        self.register_buffer("bias", bias, persistent=False)
        self._packed: nn.Linear | None = None

    def pack(self, kind: str) -> None:
        """Compute with packed weights from now on (specens.models.cpu_linear)."""
        self._packed = packed_linear(self.weight, self.bias, kind)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., kept]`, computed in the dtype of `hidden`."""
        if self._packed is not None:
            logits = self._packed(hidden)
        else:
            bias = None if self.bias is None else self.bias.to(hidden.dtype)
            logits = linear(hidden, self.weight.to(hidden.dtype), bias)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab]`; an id that was left out has -inf and is never proposed."""
        return self.spread(self.logits(hidden))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., kept]` -> `[..., vocab]`."""
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.kept_ids] = logits
        return whole


def output_projection(model: Any) -> Any:
    """The module from the last hidden state to logits. Raises UserError when a model has none that
    could be trimmed.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if weight is None or not weight.is_floating_point() or weight.shape[0] != vocab_size:
        problem = "has no plain output projection, which a trained drafter needs"
        raise UserError(f"{model_name(model)}: the model {problem}")
    return head


@torch.inference_mode()
def check_projection(model: Any) -> None:
    """Raise UserError unless the last hidden states and a TrimmedHead give the model's own logits.
    One short forward.
    """
    device = model.get_input_embeddings().weight.device
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 9, device=device)[None] % vocab_size
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    head, theirs = TrimmedHead(model, torch.arange(vocab_size)), output.logits.float()
    ours = head.logits(output.hidden_states[-1].to(head.weight)).float()
    if not float((ours - theirs).abs().mean()) <= 0.05 * float(theirs.std()):
        raise UserError(
            f"{model_name(model)} ({model.config.model_type}): its logits are not a projection of "
            "its last hidden states, so no drafter can be trained from them; use drafter=untrained"
        )
