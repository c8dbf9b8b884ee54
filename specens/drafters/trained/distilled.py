"""A distilled small model: one to four of the target's own layers, trained further on the target's
distribution.

It shares the target's input embeddings and, trimmed to the most frequent ids, its output
projection. Only the layers between them are its own, and in its weights file.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specens.compat import attention_name
from specens.drafters.trained.trimmed_head import AFTER_PROJECTION, TrimmedHead
from specens.drafters.trained.weights import check_weights_path, load_trained
from specens.errors import UserError
from specens.models.cpu_linear import DRAFTER_KIND, attend_exactly, pack, packing
from specens.models.load import LoadedModel

KIND = "distilled"
LAYER_INDEX = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Distilled:
    """Where a distilled model's weights are: a file, or None for those that come with the package
    for this target.
    """

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
            problem = "does not fit this target's architecture"
            raise UserError(f"drafter {KIND}: {trained.path} {problem}")
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
    """A model of the same architecture, device and dtype with only as many layers. Its weights are
    random, and its logits are the bare projection: what else the target does to its logits is in
    the TrimmedHead.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        known = f"give layers of the target, 0 to {num_layers - 1}"
        raise UserError(f"layers={list(layers)}: {known}")
    # layer_types, no_rope_layers, ...: an entry per layer
    for name, value in text.to_dict().items():
        is_list = "layer" in name and isinstance(value, list | tuple)
        if is_list and len(value) == num_layers:
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
            config, dtype=model.dtype, attn_implementation=attention_name(model)
        )


def small_copy(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model with only the given layers of `model` (indices), and a copy of its final norm and
    embeddings.
    """
    small, theirs, ours = empty_copy(model, layers), model.state_dict(), {}
    for name, tensor in small.state_dict().items():
        source = LAYER_INDEX.sub(lambda index: f".{layers[int(index[1])]}.", name, count=1)
        if source not in theirs or theirs[source].shape != tensor.shape:
            problem = f"cannot begin from this target's layers ({source} is missing or quantised)"
            raise UserError(f"drafter {KIND}: {problem}")
        ours[name] = theirs[source]
    small.load_state_dict(ours)
    return small


def share_embeddings(model: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """One matrix in memory for both."""
    model.set_input_embeddings(target_model.get_input_embeddings())


def own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that is not embedding or output projection: what is trained and stored, by name in the
    state dict.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules, state = model.named_modules(), model.state_dict()
    shared = tuple(f"{name}." for name, module in modules if any(module is end for end in ends))
    return {name: tensor for name, tensor in state.items() if not name.startswith(shared)}
