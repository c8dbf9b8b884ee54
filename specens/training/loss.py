"""What a drafter learns to make small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax

from specens.errors import UserError, check_number


@dataclass(frozen=True)
class Loss:
    """`kl`: Kullback-Leibler divergence from the target's distribution. `rejection`: the chance that a token drawn from the
    drafter's distribution is rejected, 1 - sum of min(target_probs, draft_probs) (Leviathan et al. 2023, arXiv 2211.17192,
    section 3.2). The loss is their weighted sum.
    """

    kl: float = 1.0
    rejection: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kl", "rejection"):
            check_number(f"stage.loss.{name}", getattr(self, name))
        if not (self.kl or self.rejection):
            raise UserError(
                "stage.loss: kl=0 and rejection=0 leave nothing to learn; give one of them a weight above 0"
            )

    def __call__(self, logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
        """Per token, `[tokens]`, of two sets of logits `[tokens, kept]`."""
        ours, theirs = log_softmax(logits.float(), -1), log_softmax(target_logits.float(), -1)
        target_probs = theirs.exp()
        loss = self.kl * (target_probs * (theirs - ours)).sum(-1)
        if self.rejection:
            loss = loss + self.rejection * (1 - torch.minimum(target_probs, ours.exp()).sum(-1))
        return loss
