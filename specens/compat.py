"""Every private name of transformers and torch that specens uses, in one place.

They are why both versions are capped in pyproject.toml; tests/test_compat.py names each of them, so
that a new version fails there first.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList


def generation_config(
    model: Any, given: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The model's generation config overridden by `given` and `options`, and what is no option."""
    return model._prepare_generation_config(given, **options)


def generation_defaults() -> dict[str, Any]:
    """The options of transformers' generate that hold when nobody says otherwise."""
    return GenerationConfig._get_default_generation_params()


def logits_processors(
    model: Any, config: GenerationConfig, num_prompt: int, device: torch.device
) -> LogitsProcessorList:
    """The processors that `model.generate` would run; completes the special tokens of `config`.
    Raises ValueError for options that transformers refuses.
    """
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=num_prompt,
        logits_processor=LogitsProcessorList(),
        device=device,
    )


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a running state that cannot be cut back."""
    return bool(getattr(model, "_is_stateful", False))


def takes_attention_functions(model: Any) -> bool:
    """Whether the model attends by a function that is registered by name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_name(model: Any) -> str:
    """The attention function that the model's decoder uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation or "")


def set_attention_name(model: Any, name: str) -> None:
    model.config.get_text_config(decoder=True)._attn_implementation = name


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that a tensor will not move."""
    torch._dynamo.mark_static_address(tensor)


def reorder_linear_weight(weight: torch.Tensor, num_rows: int) -> Any:
    """oneDNN's own order of a linear layer's weight, for products over about `num_rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)


def reordered_linear(rows: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear layer of such a weight."""
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def use_one_gpu(arguments: Any) -> None:
    """Let transformers' Trainer use one GPU at most: several would get parts of a batch."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
