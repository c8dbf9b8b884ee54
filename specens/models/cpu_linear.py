"""What makes a few rows cheap on a CPU: packed linear layers.

PyTorch's plain linear layer reorders its weights in every product, and over a few rows (a verified
tree) that costs more than the product. Packed layers keep their weights in the order in which the
matrix kernel reads them. What they compute with:

- `float32`: oneDNN; the same numbers as a plain layer up to rounding (1e-6 of their size).
- `float16`: FBGEMM, weights rounded to half precision, everything else in float32. Half the memory
  to read, and so the fastest that is still one model: every row is computed alone, in the same way
  whatever stands beside it.
- `int8`: FBGEMM, weights rounded to 8 bits by output channel, inputs to 7 bits by row, so that here
  too a row's result depends on nothing beside it. Fastest, and another model: for drafters only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from specens.compat import (
    attention_name,
    reorder_linear_weight,
    reordered_linear,
    set_attention_name,
    takes_attention_functions,
)
from specens.decoding.target.attention import GROUPED, grouped_attention

KINDS = ("float32", "float16", "int8")

DRAFTER_KIND = "int8"
"""How a drafter's own layers are packed when the target's are: its errors cost acceptance, never
the output.
"""

MOST_ROWS = 128
"""Over more rows than this (a prompt) reordering the weights is little of the work, and the plain
product is as fast.
"""

BEST_ROWS = 8
"""The number of rows that oneDNN's order is made for."""

LEVELS = 63
"""Of an input's rounding, on either side of 0: 7 bits in all, so that no kernel's 16-bit sums
overflow.
"""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weights. `weight` stays what it was, for whoever
    reads it.

    The packed copy does not follow later changes of `weight`. A layer that is moved, converted,
    copied or stored loses it and computes as a plain one: oneDNN's packed tensors cannot follow.
    """

    kind: str | None = None
    _packed: Any = None

    @classmethod
    def of(cls, layer: nn.Linear, kind: str) -> PackedLinear:
        """A packed layer over the same parameters. With `float16` these are rounded to half
        precision too, so that it is the same model whoever computes with it.
        """
        packed = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        packed.weight, packed.bias = layer.weight, layer.bias
        packed.train(layer.training)
        packed.kind = kind
        if kind == "float16":
            with torch.no_grad():
                layer.weight.copy_(layer.weight.half())
        with torch.inference_mode(False), torch.no_grad():
            packed._packed = _pack(layer.weight.detach(), layer.bias, kind)
        return packed

    def unpack(self) -> None:
        self.kind = self._packed = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        if kind is None or (kind != "int8" and input.numel() > MOST_ROWS * self.in_features):
            return linear(input, self.weight, self.bias)
        if input.dim() == 1:  # FBGEMM wants rows
            return self(input[None])[0]
        if kind == "float32":
            return reordered_linear(input, self._packed, self.bias)
        if kind == "float16":
            return torch.ops.quantized.linear_dynamic_fp16(input, self._packed)
        return self._by_row(input)

    def _by_row(self, rows: torch.Tensor) -> torch.Tensor:
        """The 8-bit product of `[..., in]`, each row in a scale of its own: every row is stretched
        to [-1, 1], which the kernel rounds in one scale.
        """
        size = rows.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / size, 1 / LEVELS, LEVELS + 1, self._packed
        )
        if self.bias is None:
            return product.mul_(size)
        return torch.addcmul(self.bias, product, size)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.unpack()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: v for name, v in self.__dict__.items() if name not in ("_packed", "kind")}


def _pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Any:
    if kind == "float32":
        return reorder_linear_weight(weight, BEST_ROWS)
    if kind == "float16":
        return torch.ops.quantized.linear_prepack_fp16(weight, bias)
    scales = (weight.abs().amax(1) / 127).clamp_min(1e-8)
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        # The tensor type is old; the kernels that take it are maintained.
        warnings.simplefilter("ignore")
        rounded = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    # The bias is added where the rows have their own size again.
    return torch.ops.quantized.linear_prepack(rounded, None)


def pack(model: nn.Module, kind: str) -> None:
    """Pack every float32 linear layer inside `model` that lies on a CPU and is not packed."""
    assert kind in KINDS, kind
    for parent in model.modules():
        for name, layer in list(parent.named_children()):
            if type(layer) not in (nn.Linear, PackedLinear) or getattr(layer, "kind", None):
                continue
            weight: Any = layer.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear.of(layer, kind))  # pyright: ignore


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> nn.Linear:
    """A packed layer over weights `[out, in]` that exist."""
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear.of(layer, kind)


def unpack(module: nn.Module) -> None:
    """Let the packed layers of `module` compute as plain ones."""
    for layer in _packed_layers(module):
        layer.unpack()


def packing(model: nn.Module) -> str | None:
    """How the linear layers of `model` are packed; None if they are plain."""
    return next((layer.kind for layer in _packed_layers(model)), None)


def packed_bytes(model: nn.Module) -> int:
    """Memory of the packed copies, beside the weights."""
    sizes = {"float32": 4, "float16": 2, "int8": 1}
    return sum(sizes[str(layer.kind)] * layer.weight.numel() for layer in _packed_layers(model))


def _packed_layers(module: nn.Module) -> Iterator[PackedLinear]:
    for layer in module.modules():
        if isinstance(layer, PackedLinear) and layer.kind is not None:
            yield layer


EXACT = "specens_exact"


def attend_exactly(model: PreTrainedModel) -> None:
    """Let a model that attends with sdpa do so in float64. Kernels add in another order for other
    shapes, and rounding to 8 bits makes a last digit large; what differs in float64 is gone in
    float32. So an 8-bit drafter computes the same at a position whether it reads one token or many,
    and a replay of it is the run.
    """
    if attention_name(model) in ("sdpa", GROUPED) and takes_attention_functions(model):
        set_attention_name(model, EXACT)


def exact_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`grouped_attention` in float64, its result in the query's own type."""
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.double()
    states = (query.double(), key.double(), value.double())
    output, _ = grouped_attention(module, *states, attention_mask, *args, **options)
    return output.to(query.dtype), None


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
