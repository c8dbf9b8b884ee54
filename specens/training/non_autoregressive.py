"""stage=non_autoregressive: heads or a block learn to guess several tokens at once from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specens.decoding.generation import eos_ids
from specens.decoding.target import Target
from specens.drafters.networks import ARCHITECTURES, Block, BlockLayer, Heads, Network, NetworkConfig, Places
from specens.drafters.non_autoregressive import KIND
from specens.drafters.vocabulary import TrimmedHead, check_projection
from specens.errors import UserError, check_count, check_number
from specens.models import tokenizer_fingerprint
from specens.trained import Trained, model_fingerprint
from specens.training.card import save_with_card
from specens.training.distill import whole_logits
from specens.training.loss import Loss
from specens.training.rows import before_answers, kept_ids, split
from specens.training.texts import Texts
from specens.training.trainer import TrainingStage, describe_training, is_layers, stored, train


class Guessing(nn.Module):
    """A network and the loss on rows: at random places of the answers, the next tokens' distributions at once."""

    def __init__(
        self, target: Target, network: Network, kept: torch.Tensor, loss: Loss, anchors_per_row: int, decay: float
    ) -> None:
        super().__init__()
        self.network = network
        self.loss, self.anchors_per_row = loss, anchors_per_row
        self.weights = decay ** torch.arange(network.config.num_positions)
        self.frozen: Any = (
            target.model.get_input_embeddings(),
            TrimmedHead(target.model, kept).to(target.device),
        )
        self.whole = whole_logits(target)

    def _logits(
        self, row: dict[str, torch.Tensor], anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `[guesses, kept]` of the network and of the target, and each guess's depth `[guesses]`."""
        embeddings, head = self.frozen
        with torch.no_grad():
            last = embeddings(row["token_ids"][anchors]).float()
        hidden = self.network(Places(row["features"].float(), last, anchors, row["positions"], row["begins"]))
        depths = torch.arange(hidden.shape[1], device=hidden.device)
        places = anchors[:, None] + depths
        exists = places + 1 < row["ends"][anchors, None]  # the text goes on that far
        with torch.no_grad():
            needed, back = places[exists].unique(return_inverse=True)
            target_logits = head.logits(row["features"][needed, -1].to(head.weight.dtype))
        return head.logits(hidden[exists]), target_logits[back], depths.expand_as(places)[exists]

    def anchors(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Places after which a token of an answer follows, `anchors_per_row` of them at most: in training at random, in
        measuring evenly spread.
        """
        most = self.anchors_per_row
        index = torch.arange(len(row["begins"]), device=row["begins"].device)
        places = (before_answers(row) & (index > row["begins"])).nonzero()[:, 0]
        if len(places) <= most:
            return places
        if self.training:
            return places[torch.randperm(len(places), device=places.device)[:most].sort().values]
        return places[torch.arange(most, device=places.device) * len(places) // most]

    def forward(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        total, count = torch.zeros((), device=rows[0]["begins"].device), 0.0
        for row in rows:
            ours, theirs, depths = self._logits(row, self.anchors(row))
            weights = self.weights.to(ours.device)[depths]
            total = total + (weights * self.loss(ours, theirs)).sum()
            count = count + weights.sum()
        return {"loss": total / max(count, 1e-6)}  # rows without an answer are possible

    def measure(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over places: how often the target's best id is the first, or among the first three, at each depth."""
        sums: dict[str, float] = {"count": 0.0, "loss": 0.0}
        for row in rows:
            anchors = self.anchors(row)
            ours, theirs, depths = self._logits(row, anchors)
            places = anchors[:, None] + torch.arange(self.network.config.num_positions, device=anchors.device)
            said = self.whole(row["features"][places[places + 1 < row["ends"][anchors, None]], -1]).argmax(-1)
            guesses = self.frozen[1].kept_ids[ours.topk(min(3, ours.shape[-1]), -1).indices]
            hits = guesses == said[:, None]  # what the trimmed vocabulary leaves out counts as missed
            num_anchors = int((depths == 0).sum())
            if not num_anchors:
                continue
            for depth in range(self.network.config.num_positions):
                here = hits[depths == depth]
                share = num_anchors / max(len(here), 1)  # texts end: deeper guesses are fewer
                sums[f"top1_at_{depth + 1}"] = sums.get(f"top1_at_{depth + 1}", 0.0) + float(here[:, 0].sum()) * share
                sums[f"top3_at_{depth + 1}"] = sums.get(f"top3_at_{depth + 1}", 0.0) + float(here.any(-1).sum()) * share
            sums["loss"] += float(self.loss(ours, theirs).mean()) * num_anchors
            sums["count"] += num_anchors
        return sums


@torch.no_grad()
def begin_from_target(network: Network, target: Target, layers: Sequence[int]) -> None:
    """Start where the target is: a block's layers from the target's, so that its keys and values are at first the target's own
    at that layer; where shapes or names do not fit (other architectures), the random start stays.
    """
    embeddings: Any = target.model.get_input_embeddings()
    norms = [
        module
        for name, module in target.model.named_modules()
        if name.endswith(("model.norm", ".ln_f", "final_layer_norm")) and getattr(module, "weight", None) is not None
    ]
    size = network.config.hidden_size
    if norms:
        network.norm.weight.copy_(gain(norms[-1]))  # pyright: ignore
    if isinstance(network, Heads):
        nn.init.zeros_(network.blocks.weight)
        nn.init.zeros_(network.blocks.bias)
        nn.init.normal_(network.join.weight, std=0.1 / size**0.5)
        begin = (len(network.config.hidden_layers) - 1) * size
        network.join.weight[:, begin : begin + size] += torch.eye(size)
        return
    assert isinstance(network, Block)
    network.masks.normal_(std=float(embeddings.weight.float().std()))
    network.feed.weight.copy_(0.05 * torch.eye(size))  # about as large as an embedding
    source = layer_list(target)
    fed = [network.config.hidden_layers.index(layer) for layer in layers if layer in network.config.hidden_layers]
    nn.init.normal_(network.join.weight, std=0.1 / network.join.weight.shape[1] ** 0.5)
    for place in fed[-1:]:
        network.join.weight[:, place * size : (place + 1) * size] += torch.eye(size)
    for ours, layer in zip(network.layers, layers, strict=True):
        assert isinstance(ours, BlockLayer)
        theirs = source[layer].state_dict()
        for name, module in source[layer].named_modules():
            if name.endswith("norm") and getattr(module, "weight", None) is not None:
                theirs[f"{name}.weight"] = gain(module)
        for name, tensor in ours.state_dict().items():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
        if fed and "input_layernorm.weight" in theirs:
            network.join_norm.weight.copy_(theirs["input_layernorm.weight"])


def gain(norm: Any) -> torch.Tensor:
    """What a norm multiplies with, `[hidden_size]`. Some models (Gemma) store it less one: a vector of ones shows it."""
    return norm.weight if isinstance(norm, nn.LayerNorm) else norm(torch.ones_like(norm.weight))


def layer_list(target: Target) -> nn.ModuleList:
    """The target's decoder layers."""
    num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    for module in target.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(f"{target.name}: no list of {num_layers} layers found in the model")


@dataclass(frozen=True)
class Guess(TrainingStage):
    """Options of stage=non_autoregressive. `hidden_layers` (None: all that stage=corpus kept) must end with the last one, which
    the output projection reads: it teaches. `layers` are the target's layers that a block begins from.
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
        if self.architecture not in ARCHITECTURES:
            raise UserError(f"stage.architecture={self.architecture!r}: choose one of {', '.join(ARCHITECTURES)}")
        if not is_layers(self.layers) or not (self.hidden_layers is None or is_layers(self.hidden_layers)):
            name = "hidden_layers" if is_layers(self.layers) else "layers"
            raise UserError(f"stage.{name}={getattr(self, name)!r}: give layers, such as [8,16]")

    def check_target(self, target: Target) -> None:
        """What can be known before there is a corpus."""
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        if not all(0 <= layer < num_layers for layer in self.layers):
            raise UserError(f"stage.layers={self.layers}: give layers of the target, 0 to {num_layers - 1}")
        if self.layers and self.architecture == "heads":
            raise UserError(f"stage.layers={self.layers}: heads begin from no layers; leave it out, or choose block")
        if self.hidden_layers is not None and (not self.hidden_layers or self.hidden_layers[-1] != num_layers):
            raise UserError(f"stage.hidden_layers={self.hidden_layers}: end with {num_layers}, the target's last")
        check_projection(target.model)

    def run(self, target: Target) -> Path:
        self.check_target(target)
        texts = Texts.open(self.corpus, tokenizer_fingerprint(target.tokenizer), model_fingerprint(target.model))
        config = self.network_config(target, texts)
        kept, coverage = kept_ids(
            texts, self.num_output_ids, target.vocab_size, eos_ids(target.model.generation_config)
        )
        rows, held_out = split(texts, self.row_tokens, config.hidden_layers, self.num_held_out)
        torch.manual_seed(self.schedule.seed)
        network = config.build()
        begin_from_target(network, target, self._layers(config))
        learner = Guessing(target, network, kept, self.loss, self.anchors_per_row, self.decay)
        folder = Path(self.folder).expanduser()
        curves = train(learner, rows, held_out, folder / f"checkpoints-{self.architecture}", self, target)
        trained = Trained(
            KIND,
            model_fingerprint(target.model),
            asdict(config),
            describe_training(target, texts, rows, asdict(self), curves, coverage),
            stored(network.state_dict(), self.dtype) | {"kept_ids": kept.int()},
        )
        path = folder / f"{KIND}-{self.architecture}.safetensors"
        save_with_card(trained, path)
        print(f"{path}: {coverage:.1%} of the corpus's tokens are in the trimmed vocabulary")
        return path

    def _layers(self, config: NetworkConfig) -> list[int]:
        if config.architecture == "heads":
            return []
        return self.layers or [max(config.hidden_layers[:-1], default=config.hidden_layers[-1] - 1)] * config.num_layers

    def network_config(self, target: Target, texts: Texts) -> NetworkConfig:
        """Sizes like the target's own."""
        text: Any = target.model.config.get_text_config(decoder=True)
        hidden_layers = self.hidden_layers or texts.manifest.get("options", {}).get("hidden_layers") or []
        if not hidden_layers or hidden_layers[-1] != text.num_hidden_layers:
            raise UserError(
                f"corpus {texts.folder}: keeps the hidden states of layers {list(hidden_layers)}, and the target's last, "
                f"{text.num_hidden_layers}, is needed; write another corpus with stage.hidden_layers=null"
            )
        heads = int(text.num_attention_heads)
        rope = getattr(text, "rope_parameters", None) or {}
        return NetworkConfig(
            architecture=self.architecture,
            hidden_size=int(text.hidden_size),
            hidden_layers=tuple(hidden_layers),
            num_positions=self.num_positions,
            num_layers=max(len(self.layers), 1),
            num_heads=heads,
            num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
        )
