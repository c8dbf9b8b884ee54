"""A distilled small model: one to four of the target's own layers, trained further on the target's distribution.

It shares the target's input embeddings and, trimmed to the most frequent ids, its output projection: only the layers between them
are its own (and are all that its weights file holds).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specens.cpu import DRAFTER_KIND, attend_exactly, pack, packing
from specens.drafters.vocabulary import AFTER_PROJECTION, TrimmedHead
from specens.errors import UserError
from specens.models import LoadedModel
from specens.trained import check_weights_path, load_trained

KIND = "distilled"
LAYER_INDEX = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Distilled:
    """Where a distilled model's weights are: a file, or None for those that come with the package for this target."""

    weights: str | None = None

    def check(self) -> None:
        check_weights_path(KIND, self.weights)

    def load_for(self, target: Any) -> LoadedModel:
        trained = load_trained(KIND, self.weights, target.model)
        layers, tensors = trained.config.get("layers", []), dict(trained.tensors)
        kept_ids = tensors.pop("kept_ids", None)
        model = empty_copy(target.model, layers)
        own = own_tensors(model)
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if kept_ids is None or shapes != {name: tensor.shape for name, tensor in tensors.items()}:
            raise UserError(f"drafter {KIND}: {trained.path} does not fit this target's architecture")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        share_embeddings(model, target.model)
        head = TrimmedHead(target.model, kept_ids)
        if packing(target.model) is not None:
            pack(model, DRAFTER_KIND)
            head.pack(DRAFTER_KIND)
            attend_exactly(model)
        model.set_output_embeddings(head)
        model.config.name_or_path = f"{target.name} ({KIND}, {len(layers)} layers)"
        return LoadedModel.of(model.eval(), target.tokenizer)


def empty_copy(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the same architecture, device and dtype with only as many layers; its weights mean nothing yet, and its
    logits are the bare projection: what else the target does to its own is the TrimmedHead's business.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if not layers or not all(0 <= layer < text.num_hidden_layers for layer in layers):
        raise UserError(f"layers={list(layers)}: give layers of the target, 0 to {text.num_hidden_layers - 1}")
    for name, value in text.to_dict().items():  # layer_types, no_rope_layers, ...: an entry per layer
        if "layer" in name and isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, name, [value[layer] for layer in layers])
    for name, neutral in AFTER_PROJECTION.items():
        if hasattr(text, name):
            setattr(text, name, neutral)
    text.num_hidden_layers = len(layers)
    text.tie_word_embeddings = config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device(model.device):
        return AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )


def small_copy(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model with only the given layers of `model` (indices), and a copy of its final norm and embeddings."""
    small, theirs, ours = empty_copy(model, layers), model.state_dict(), {}
    for name, tensor in small.state_dict().items():
        index = LAYER_INDEX.search(name)
        source = name if index is None else f"{name[: index.start(1)]}{layers[int(index[1])]}{name[index.end(1) :]}"
        if source not in theirs or theirs[source].shape != tensor.shape:
            raise UserError(
                f"drafter {KIND}: cannot begin from this target's layers ({source} is missing or quantised)"
            )
        ours[name] = theirs[source]
    small.load_state_dict(ours)
    return small


def share_embeddings(model: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """One matrix in memory for both."""
    model.set_input_embeddings(target_model.get_input_embeddings())


def own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that is not embedding or output projection: what is trained and stored, by name in the state dict."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    shared = tuple(f"{name}." for name, module in model.named_modules() if any(module is end for end in ends))
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(shared)}
