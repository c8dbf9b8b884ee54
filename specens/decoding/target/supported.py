"""Which models can be verified exactly, and at which lengths; the others are refused by name before
anything is decoded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from specens.compat import attention_name, is_stateful
from specens.decoding.target.kv_cache import ATTENTION_KINDS, attention_windows
from specens.errors import UserError

Layout = Literal["tree", "rows"]
"""`tree`: one row, 4D mask. `rows`: one batch row per root-to-leaf path, ordinary causal attention.
"""

LAYOUTS: tuple[Layout, ...] = ("tree", "rows")


def model_name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "name_or_path", "") or type(model).__name__)


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def context_limit(model: PreTrainedModel) -> int | None:
    """The most tokens of prompt and output together; None when the model sets no limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(limit) if limit else None


def refuse_training_mode(model: PreTrainedModel, name: str) -> None:
    """In training mode dropout makes a model's output random. Not ours to switch off."""
    if model.training:
        raise UserError(f"{name} is in training mode: call model.eval() first")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse by name the models whose state cannot be cut back after a rejected draft."""
    name = f"{getattr(model.config, 'name_or_path', '') or 'model'} ({model.config.model_type})"
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{name}: encoder-decoder models are not supported; use a decoder-only causal language "
            "model"
        )
    others = sorted(set(attention_windows(model.config)) - ATTENTION_KINDS)
    if is_stateful(model) or others:
        what = f"layers of kind {', '.join(others)}" if others else "a recurrent state"
        raise UserError(
            f"{name}: has {what}, which cannot be rolled back after a rejected draft; use an "
            "attention-only model"
        )


def refuse_layout(model: PreTrainedModel, layout: Layout) -> None:
    """Refuse a layout that this model cannot run, by name and with the reason."""
    if layout != "tree":
        return
    name, config, attention = model_name(model), model.config, attention_name(model)
    if not takes(model, "position_ids"):
        raise UserError(
            f"{name}: layout=tree needs a model that takes position_ids; use layout=rows"
        )
    # moshi ignores the window that its config names; GPT-Neo's local layers count slots, not
    # positions.
    if config.model_type == "moshi" or "local" in getattr(config, "attention_layers", ()):
        raise UserError(
            f"{name} ({config.model_type}): its attention window fits no tree; use layout=rows"
        )
    if "flash" in attention:
        raise UserError(
            f"{name}: {attention} takes no tree mask; use layout=rows or attention=sdpa"
        )


@dataclass(frozen=True)
class RopeBoundary:
    """A context length at which a model's rotary positions change for all tokens at once, so that a
    verified tree that reaches over it would score its nodes before it differently from AR decoding.
    """

    kind: str
    length: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> RopeBoundary | None:
        config = model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = (value for value in parameters.values() if isinstance(value, dict))
        for entry in (parameters, *nested):
            if entry.get("rope_type") in ("dynamic", "longrope"):
                length = entry.get("original_max_position_embeddings")
                return cls(entry["rope_type"], int(length or config.max_position_embeddings))
        return None

    def check(self, name: str, num_prompt: int, max_length: int) -> None:
        """Dynamic NTK scaling changes at every length past the boundary, longrope once: with the
        first forward that is longer, and a prompt's own forward is one token short of it.
        """
        crosses = self.kind == "dynamic" or num_prompt - 1 <= self.length
        if max_length > self.length and crosses:
            raise UserError(
                f"{name}: prompt and output reach {max_length} tokens, over the {self.length} at "
                f"which {self.kind} rotary positions change; shorten the prompt or "
                "sampling.max_new_tokens"
            )
