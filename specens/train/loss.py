"""What a drafter learns to make small, and the target's part in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.functional import log_softmax

from specens.decoding.target.target import Target
from specens.drafters.trained.trimmed_head import TrimmedHead
from specens.errors import UserError, check_number


@dataclass(frozen=True)
class Loss:
    """`kl`: Kullback-Leibler divergence from the target's distribution. `rejection`: the
    probability that a token sampled from the drafter's distribution is rejected, 1 - sum of
    min(target_probs, draft_probs) (Leviathan et al. 2023, arXiv 2211.17192, section 3.2). The loss
    is their weighted sum.
    """

    kl: float = 1.0
    rejection: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kl", "rejection"):
            check_number(f"stage.loss.{name}", getattr(self, name))
        if not (self.kl or self.rejection):
            raise UserError("stage.loss: kl=0 and rejection=0 leave nothing to learn; raise one")

    def __call__(self, logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
        """Per token, `[tokens]`, of two sets of logits `[tokens, kept]`."""
        ours, theirs = log_softmax(logits.float(), -1), log_softmax(target_logits.float(), -1)
        target_probs = theirs.exp()
        loss = self.kl * (target_probs * (theirs - ours)).sum(-1)
        if self.rejection:
            loss = loss + self.rejection * (1 - torch.minimum(target_probs, ours.exp()).sum(-1))
        return loss


class Teacher:
    """The target, its embeddings, and its output projection trimmed to the ids `kept` `[kept]`. All
    frozen, and no module of the learner's.
    """

    def __init__(self, target: Target, kept: torch.Tensor) -> None:
        self.target = target
        self.head = TrimmedHead(target.model, kept).to(target.device)

    @cached_property
    def _whole_head(self) -> TrimmedHead:
        ids = torch.arange(self.target.vocab_size)
        return TrimmedHead(self.target.model, ids).to(self.target.device)

    @torch.no_grad()  # else every row would make a gradient of the whole matrix's size
    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]` in fp32."""
        return self.target.model.get_input_embeddings()(token_ids).float()

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits `[tokens, kept]`, from its last hidden states."""
        return self.head.logits(states.to(self.head.weight.dtype))

    @torch.no_grad()
    def whole_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The same `[tokens, vocab]`, in fp32: for measuring."""
        return self._whole_head.logits(states.to(self.head.weight.dtype)).float()


class Learner(nn.Module, ABC):
    """What is trained. `forward(rows)` gives {"loss": scalar}, `measure(rows)` sums by name over
    `count` tokens. `kind`, `sizes` and `tensors` go to the weights file, whose name ends with
    `suffix`; `hidden_layers` are the layers whose states it reads.
    """

    kind: str
    suffix: str = ""
    sizes: dict[str, Any]
    hidden_layers: Sequence[int]

    def __init__(self, teacher: Teacher, loss: Loss) -> None:
        super().__init__()
        self.teacher, self.loss = teacher, loss

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the weights file has, by name."""
