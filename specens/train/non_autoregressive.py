"""stage=non_autoregressive: a network learns to predict several tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from specens.decoding.target.target import Target
from specens.drafters.trained.networks import ARCHITECTURES, Heads, Network, NetworkConfig, Places
from specens.drafters.trained.non_autoregressive import KIND
from specens.drafters.trained.trimmed_head import check_projection
from specens.errors import UserError, check_choice, check_count, check_list, check_number
from specens.train.loss import Learner, Loss, Teacher
from specens.train.packing import Row, before_answers
from specens.train.shards import TextShards
from specens.train.trainer import TrainingStage


class MultiTokenLearner(Learner):
    """A network that predicts, at some positions of the answers (anchors), the distributions of the
    next tokens at once.
    """

    kind = KIND

    def __init__(
        self, teacher: Teacher, network: Network, loss: Loss, anchors_per_row: int, decay: float
    ) -> None:
        super().__init__(teacher, loss)
        self.network, self.anchors_per_row = network, anchors_per_row
        self.sizes, self.hidden_layers = asdict(network.config), network.config.hidden_layers
        self.suffix = f"-{network.config.architecture}"
        self.weights = decay ** torch.arange(network.config.num_positions)

    def _places(self, row: Row, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[anchors, num_positions]`: the position before each predicted token, and whether the
        text goes on that far.
        """
        places = anchors[:, None] + torch.arange(len(self.weights), device=anchors.device)
        return places, places + 1 < row["ends"][anchors, None]

    def _logits(self, row: Row, anchors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits `[predictions, kept]` of the network and of the target, and the depth of each
        prediction `[predictions]`.
        """
        last = self.teacher.embeddings(row["token_ids"][anchors])
        features, positions = row["features"], row["positions"]
        hidden = self.network(Places(features.float(), last, anchors, positions, row["begins"]))
        places, exists = self._places(row, anchors)
        needed, back = places[exists].unique(return_inverse=True)
        target_logits = self.teacher.logits(features[needed, -1])
        depths = (places - anchors[:, None])[exists]
        return self.teacher.head.logits(hidden[exists]), target_logits[back], depths

    def anchors(self, row: Row) -> torch.Tensor:
        """Positions after which a token of an answer follows, `anchors_per_row` of them at most: in
        training at random, in measuring evenly spread.
        """
        most = self.anchors_per_row
        index = torch.arange(len(row["begins"]), device=row["begins"].device)
        places = (before_answers(row) & (index > row["begins"])).nonzero()[:, 0]
        if len(places) <= most:
            return places
        if self.training:
            return places[torch.randperm(len(places), device=places.device)[:most].sort().values]
        return places[torch.arange(most, device=places.device) * len(places) // most]

    def forward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        total, count = torch.zeros((), device=rows[0]["begins"].device), 0.0
        for row in rows:
            ours, theirs, depths = self._logits(row, self.anchors(row))
            weights = self.weights.to(ours.device)[depths]
            total = total + (weights * self.loss(ours, theirs)).sum()
            count = count + weights.sum()
        return {"loss": total / max(count, 1e-6)}  # rows without an answer are possible

    def measure(self, rows: list[Row]) -> dict[str, float]:
        """Sums over anchors: how often the target's best id is the first, or among the first three,
        at each depth. What the trimmed vocabulary leaves out counts as missed.
        """
        sums: dict[str, float] = {"count": 0.0, "loss": 0.0}
        for row in rows:
            anchors = self.anchors(row)
            ours, theirs, depths = self._logits(row, anchors)
            places, exists = self._places(row, anchors)
            best = self.teacher.whole_logits(row["features"][places[exists], -1]).argmax(-1)
            top = self.teacher.head.kept_ids[ours.topk(min(3, ours.shape[-1]), -1).indices]
            hits = top == best[:, None]
            num_anchors = int((depths == 0).sum())
            if not num_anchors:
                continue
            for depth in range(len(self.weights)):
                here = hits[depths == depth]
                share = num_anchors / max(len(here), 1)  # texts end: deep predictions are fewer
                found = (("top1", here[:, 0].sum()), ("top3", here.any(-1).sum()))
                for name, number in found:
                    key = f"{name}_at_{depth + 1}"
                    sums[key] = sums.get(key, 0.0) + float(number) * share
            sums["loss"] += float(self.loss(ours, theirs).mean()) * num_anchors
            sums["count"] += num_anchors
        return sums

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.network.state_dict()


@torch.no_grad()
def begin_from_target(network: Network, target: Target, layers: Sequence[int]) -> None:
    """Start where the target is: a block's layers from the target's, so that its keys and values
    are at first the target's own at that layer. Where shapes or names do not fit (other
    architectures), the random start stays.
    """
    ends = ("model.norm", ".ln_f", "final_layer_norm")
    named = target.model.named_modules()
    norms = [module for name, module in named if name.endswith(ends) and has_weight(module)]
    size, hidden_layers = network.config.hidden_size, network.config.hidden_layers
    if norms:
        network.norm.weight.copy_(gain(norms[-1]))
    if isinstance(network, Heads):
        nn.init.zeros_(network.blocks.weight)
        nn.init.zeros_(network.blocks.bias)
        nn.init.normal_(network.join.weight, std=0.1 / size**0.5)
        begin = (len(hidden_layers) - 1) * size
        network.join.weight[:, begin : begin + size] += torch.eye(size)
        return
    embeddings: Any = target.model.get_input_embeddings()
    network.masks.normal_(std=float(embeddings.weight.float().std()))
    network.feed.weight.copy_(0.05 * torch.eye(size))  # about as large as an embedding
    fed = [hidden_layers.index(layer) for layer in layers if layer in hidden_layers]
    nn.init.normal_(network.join.weight, std=0.1 / network.join.weight.shape[1] ** 0.5)
    for place in fed[-1:]:
        network.join.weight[:, place * size : (place + 1) * size] += torch.eye(size)
    for ours, layer in zip(network.layers, layers, strict=True):
        source = layer_list(target)[layer]
        theirs = source.state_dict()
        for name, module in source.named_modules():
            if name.endswith("norm") and has_weight(module):
                theirs[f"{name}.weight"] = gain(module)
        for name, tensor in ours.state_dict().items():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
        if fed and "input_layernorm.weight" in theirs:
            network.join_norm.weight.copy_(theirs["input_layernorm.weight"])


def has_weight(module: nn.Module) -> bool:
    return getattr(module, "weight", None) is not None


def gain(norm: Any) -> torch.Tensor:
    """What a norm multiplies with, `[hidden_size]`. Some models (Gemma) store it less one: a vector
    of ones shows it.
    """
    return norm.weight if isinstance(norm, nn.LayerNorm) else norm(torch.ones_like(norm.weight))


def layer_list(target: Target) -> nn.ModuleList:
    """The target's decoder layers."""
    num_layers = target.text_config.num_hidden_layers
    for module in target.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(f"{target.name}: no list of {num_layers} layers found in the model")


@dataclass(frozen=True)
class Guess(TrainingStage):
    """Options of stage=non_autoregressive. `hidden_layers` (None: all that stage=corpus kept) must
    end with the last one, which the output projection reads: it teaches. `layers` are the target's
    layers that a block begins from.
    """

    architecture: str = "heads"
    hidden_layers: list[int] | None = None
    layers: list[int] = field(default_factory=list)
    num_positions: int = 4
    anchors_per_row: int = 256
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_positions", "anchors_per_row"):
            check_count(f"stage.{name}", getattr(self, name))
        check_number("stage.decay", self.decay, 0, 1, above=True)
        check_choice("stage.architecture", self.architecture, ARCHITECTURES)
        check_list("stage.layers", self.layers, int, "[8,16]")
        if self.hidden_layers is not None:
            check_list("stage.hidden_layers", self.hidden_layers, int, "[8,16]")

    def check_target(self, target: Target) -> None:
        last, layers, hidden = target.text_config.num_hidden_layers, self.layers, self.hidden_layers
        if not all(0 <= layer < last for layer in layers):
            raise UserError(f"stage.layers={layers}: give layers of the target, 0 to {last - 1}")
        if layers and self.architecture == "heads":
            problem = "heads begin from no layers; leave it out, or choose block"
            raise UserError(f"stage.layers={layers}: {problem}")
        if hidden is not None and (not hidden or hidden[-1] != last):
            raise UserError(f"stage.hidden_layers={hidden}: end with {last}, the target's last")
        check_projection(target.model)

    def learner(self, teacher: Teacher, texts: TextShards) -> MultiTokenLearner:
        config = self.network_config(teacher.target, texts)
        *below, last = config.hidden_layers
        # A block that names no layers begins from the highest one kept below the last.
        layers = self.layers or [max(below, default=last - 1)]
        torch.manual_seed(self.schedule.seed)
        network = config.build()
        begin_from_target(network, teacher.target, layers)
        return MultiTokenLearner(teacher, network, self.loss, self.anchors_per_row, self.decay)

    def network_config(self, target: Target, texts: TextShards) -> NetworkConfig:
        """Sizes like the target's own."""
        text = target.text_config
        last = text.num_hidden_layers
        hidden_layers = tuple(self.hidden_layers or texts.options.get("hidden_layers") or ())
        if hidden_layers[-1:] != (last,):
            problem = f"keeps layers {list(hidden_layers)}, not the target's last, {last}"
            remedy = "write another with stage.hidden_layers=null"
            raise UserError(f"corpus {texts.folder}: {problem}; {remedy}")
        heads = int(text.num_attention_heads)
        rope = getattr(text, "rope_parameters", None) or {}
        return NetworkConfig(
            architecture=self.architecture,
            hidden_size=int(text.hidden_size),
            hidden_layers=hidden_layers,
            num_positions=self.num_positions,
            num_layers=max(len(self.layers), 1),
            num_heads=heads,
            num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
        )
