"""Models that cannot be verified exactly, or not at every length: named and refused before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from specens.decoding.cache import ATTENTION_KINDS, attention_windows
from specens.errors import UserError


def refuse_training_mode(model: PreTrainedModel, name: str) -> None:
    """In training mode dropout makes a model's output random. Not ours to switch off: the model is not touched."""
    if model.training:
        raise UserError(f"{name} is in training mode: call model.eval() first")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse by name the models whose state cannot be cut back after a rejected draft."""
    name = f"{getattr(model.config, 'name_or_path', '') or 'model'} ({model.config.model_type})"
    if model.config.is_encoder_decoder:
        raise UserError(f"{name}: encoder-decoder models are not supported; use a decoder-only causal language model")
    others = sorted(set(attention_windows(model.config)) - ATTENTION_KINDS)
    if getattr(model, "_is_stateful", False) or others:
        what = f"layers of kind {', '.join(others)}" if others else "a recurrent state"
        raise UserError(
            f"{name}: has {what}, which cannot be rolled back after a rejected draft; use an attention-only model"
        )


@dataclass(frozen=True)
class RopeBoundary:
    """A context length at which a model's rotary positions change for all tokens at once, so that a verified tree that
    reaches over it would score its nodes before it differently from plain decoding.
    """

    kind: str
    length: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> RopeBoundary | None:
        config = model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        for entry in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
            if entry.get("rope_type") in ("dynamic", "longrope"):
                length = entry.get("original_max_position_embeddings") or config.max_position_embeddings
                return cls(entry["rope_type"], int(length))
        return None

    def check(self, name: str, num_prompt: int, max_length: int) -> None:
        """Dynamic NTK scaling changes at every length past the boundary, longrope once: with the first forward that is longer,
        and a prompt's own forward is one token short of it.
        """
        if max_length > self.length and (self.kind == "dynamic" or num_prompt - 1 <= self.length):
            raise UserError(
                f"{name}: prompt and output reach {max_length} tokens, over the {self.length} at which {self.kind} rotary "
                "positions change; shorten the prompt or sampling.max_new_tokens"
            )
