"""stage=distilled: a small model of the target's own layers learns the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specens.compat import attention_name
from specens.decoding.target.attention import GROUPED
from specens.decoding.target.kv_cache import Masks, additive_masks, attention_windows
from specens.decoding.target.supported import takes
from specens.decoding.target.target import Target
from specens.drafters.trained.distilled import KIND, own_tensors, small_copy
from specens.drafters.trained.trimmed_head import check_projection
from specens.errors import UserError, check_list
from specens.train.loss import Learner, Loss, Teacher
from specens.train.packing import Row, before_answers
from specens.train.shards import TextShards
from specens.train.trainer import TrainingStage


class DistillLearner(Learner):
    """A small model without embeddings and output projection, which are the teacher's."""

    kind = KIND

    def __init__(self, teacher: Teacher, layers: Sequence[int], loss: Loss) -> None:
        super().__init__(teacher, loss)
        target = teacher.target
        self.sizes = {"layers": list(layers)}
        self.hidden_layers = [target.text_config.num_hidden_layers]
        small = small_copy(target.model, layers).float()
        if not takes(small, "position_ids"):
            needs = "needs a model that takes position_ids, as texts share a row"
            raise UserError(f"{target.name}: stage=distilled {needs}")
        attention = attention_name(small)
        if attention == GROUPED or "flash" in attention:  # flash attention takes no mask
            small.set_attn_implementation("sdpa")
        self.names = tuple(own_tensors(small))
        self.prefix = f"{small.base_model_prefix}."
        self.windows = attention_windows(small.config)
        self.small: Any = small.base_model
        # Its inputs come as embeddings.
        self.small.set_input_embeddings(nn.Embedding(1, 1).requires_grad_(False))

    def _logits(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[answer tokens, kept]`, the small model's and the target's."""
        hidden = self.small(
            inputs_embeds=self.teacher.embeddings(row["token_ids"][None]),
            position_ids=row["positions"][None],
            attention_mask=self._masks(row),
            use_cache=False,
        ).last_hidden_state[0]
        places = before_answers(row).nonzero()[:, 0]
        target_logits = self.teacher.logits(row["features"][places, -1])
        return self.teacher.head.logits(hidden[places]), target_logits

    def _masks(self, row: Row) -> Masks:
        """Every token sees those of its own text up to itself."""
        index = torch.arange(len(row["begins"]), device=row["begins"].device)
        seen = (index[:, None] >= index) & (row["begins"][:, None] == row["begins"])
        return additive_masks(seen, self.windows, torch.float32, (index, index))

    def forward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        losses = torch.cat([self.loss(*self._logits(row)) for row in rows])
        return {"loss": losses.sum() / max(len(losses), 1)}  # rows without an answer are possible

    def measure(self, rows: list[Row]) -> dict[str, float]:
        """Sums: how often the best ids agree, the probability of acceptance, the loss. What the
        trimmed vocabulary leaves out counts as missed, except in the loss.
        """
        sums = {"match": 0.0, "acceptance": 0.0, "loss": 0.0, "count": 0.0}
        kept = self.teacher.head.kept_ids
        for row in rows:
            ours, theirs = self._logits(row)
            whole = self.teacher.whole_logits(row["features"][before_answers(row), -1])
            overlap = torch.minimum(ours.float().softmax(-1), whole.softmax(-1)[:, kept])
            sums["match"] += float((kept[ours.argmax(-1)] == whole.argmax(-1)).sum())
            sums["acceptance"] += float(overlap.sum())
            sums["loss"] += float(self.loss(ours, theirs).sum())
            sums["count"] += len(ours)
        return sums

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the small model's own state dict."""
        state = self.small.state_dict()
        return {name: state[name.removeprefix(self.prefix)] for name in self.names}


@dataclass(frozen=True)
class Distill(TrainingStage):
    """Options of stage=distilled. `layers` are one to four of the target's layers to begin from."""

    layers: list[int] = field(default_factory=lambda: [0, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_list("stage.layers", self.layers, int, "[0,1]", least=1)
        if len(self.layers) > 4:
            raise UserError(f"stage.layers={self.layers}: give one to four layers")

    def check_target(self, target: Target) -> None:
        num_layers, layers = target.text_config.num_hidden_layers, set(self.layers)
        if not layers <= set(range(num_layers)) or len(layers) < len(self.layers):
            known = f"different layers of the target, 0 to {num_layers - 1}"
            raise UserError(f"stage.layers={self.layers}: give {known}")
        check_projection(target.model)

    def learner(self, teacher: Teacher, texts: TextShards) -> DistillLearner:
        return DistillLearner(teacher, self.layers, self.loss)
