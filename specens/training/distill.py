"""stage=distilled: a small model of the target's own layers learns the target's distribution."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specens.decoding.cache import attention_windows
from specens.decoding.generation import eos_ids
from specens.decoding.target import Target
from specens.drafters.distilled import KIND, own_tensors, small_copy
from specens.drafters.vocabulary import TrimmedHead, check_projection
from specens.errors import UserError
from specens.models import tokenizer_fingerprint
from specens.trained import Trained, model_fingerprint
from specens.training.card import save_with_card
from specens.training.loss import Loss
from specens.training.rows import before_answers, kept_ids, split
from specens.training.texts import Texts
from specens.training.trainer import TrainingStage, describe_training, is_layers, stored, train


class Distilling(nn.Module):
    """A small model and the loss on rows. Embeddings and output projection are the target's, frozen, and no part of it."""

    def __init__(self, target: Target, layers: Sequence[int], kept: torch.Tensor, loss: Loss) -> None:
        super().__init__()
        small = small_copy(target.model, layers).float()
        if "position_ids" not in inspect.signature(small.forward).parameters:
            raise UserError(
                f"{target.name}: stage=distilled needs a model that takes position_ids, as texts share a row"
            )
        if "flash" in str(small.config._attn_implementation):  # which takes no mask
            small.set_attn_implementation("sdpa")
        self.names = tuple(own_tensors(small))
        self.prefix = f"{small.base_model_prefix}."
        self.small: Any = small.base_model
        self.small.set_input_embeddings(nn.Embedding(1, 1).requires_grad_(False))  # inputs come as embeddings
        self.windows = attention_windows(small.config)
        self.loss = loss
        self.frozen: Any = (
            target.model.get_input_embeddings(),
            TrimmedHead(target.model, kept).to(target.device),
        )
        self.whole = whole_logits(target)

    def _logits(self, row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[answer tokens, kept]`, the small model's and the target's."""
        embeddings, head = self.frozen
        with torch.no_grad():  # the target's matrix would be given a gradient of its own size in every row
            inputs = embeddings(row["token_ids"][None]).float()
        hidden = self.small(
            inputs_embeds=inputs, position_ids=row["positions"][None], attention_mask=self._masks(row), use_cache=False
        ).last_hidden_state[0]
        places = before_answers(row).nonzero()[:, 0]
        with torch.no_grad():
            target_logits = head.logits(row["features"][places, -1].to(head.weight.dtype))
        return head.logits(hidden[places]), target_logits

    def _masks(self, row: dict[str, torch.Tensor]) -> Any:
        index = torch.arange(len(row["begins"]), device=row["begins"].device)
        seen = (index[:, None] >= index) & (row["begins"][:, None] == row["begins"])
        masks = {}
        for kind, window in self.windows.items():
            visible = seen if window is None else seen & (index[:, None] - index < window)
            masks[kind] = torch.zeros(seen.shape, device=seen.device).masked_fill(
                ~visible, torch.finfo(torch.float32).min
            )[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def forward(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        losses = torch.cat([self.loss(*self._logits(row)) for row in rows])
        return {"loss": losses.sum() / max(len(losses), 1)}  # rows without an answer are possible

    def measure(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums: how often the best ids agree, the chance of acceptance, the loss. What the trimmed vocabulary leaves out counts
        as missed, except in the loss.
        """
        sums, kept = {"match": 0.0, "acceptance": 0.0, "loss": 0.0, "count": 0.0}, self.frozen[1].kept_ids
        for row in rows:
            ours, theirs = self._logits(row)
            whole = self.whole(row["features"][before_answers(row), -1])
            sums["match"] += float((kept[ours.argmax(-1)] == whole.argmax(-1)).sum())
            sums["acceptance"] += float(torch.minimum(ours.float().softmax(-1), whole.softmax(-1)[:, kept]).sum())
            sums["loss"] += float(self.loss(ours, theirs).sum())
            sums["count"] += len(ours)
        return sums

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the small model's own state dict."""
        state = self.small.state_dict()
        return {name: state[name.removeprefix(self.prefix)] for name in self.names}


def whole_logits(target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    """From last hidden states `[tokens, hidden_size]` to the target's own logits `[tokens, vocab]`, in fp32, for measuring."""

    @functools.cache
    def head() -> TrimmedHead:
        return TrimmedHead(target.model, torch.arange(target.vocab_size)).to(target.device)

    return lambda hidden: head().logits(hidden.to(head().weight.dtype)).float()


@dataclass(frozen=True)
class Distill(TrainingStage):
    """Options of stage=distilled. `layers` are the target's layers to begin from (1 to 4 of them)."""

    layers: list[int] = field(default_factory=lambda: [0, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_layers(self.layers) or not 1 <= len(self.layers) <= 4:
            raise UserError(f"stage.layers={self.layers!r}: give one to four layers, such as [0,1]")

    def check_target(self, target: Target) -> None:
        """What can be known before there is a corpus."""
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        if not all(0 <= layer < num_layers for layer in self.layers) or len(set(self.layers)) < len(self.layers):
            raise UserError(f"stage.layers={self.layers}: give different layers of the target, 0 to {num_layers - 1}")
        check_projection(target.model)

    def run(self, target: Target) -> Path:
        self.check_target(target)
        num_layers, layers = target.model.config.get_text_config(decoder=True).num_hidden_layers, self.layers
        texts = Texts.open(self.corpus, tokenizer_fingerprint(target.tokenizer), model_fingerprint(target.model))
        kept, coverage = kept_ids(
            texts, self.num_output_ids, target.vocab_size, eos_ids(target.model.generation_config)
        )
        rows, held_out = split(texts, self.row_tokens, [num_layers], self.num_held_out)
        learner = Distilling(target, layers, kept, self.loss)
        folder = Path(self.folder).expanduser()
        curves = train(learner, rows, held_out, folder / "checkpoints", self, target)
        trained = Trained(
            KIND,
            model_fingerprint(target.model),
            {"layers": layers},
            describe_training(target, texts, rows, asdict(self), curves, coverage),
            stored(learner.tensors(), self.dtype) | {"kept_ids": kept.int()},
        )
        path = folder / f"{KIND}.safetensors"
        save_with_card(trained, path)
        print(f"{path}: {coverage:.1%} of the corpus's tokens are in the trimmed vocabulary")
        return path
