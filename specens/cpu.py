"""What makes a few rows cheap on a CPU: packed linear layers.

PyTorch's plain linear layer reorders its weights in every product, and over a few rows (a verified tree) that costs more than the
product. Packed layers keep their weights in the order in which the matrix kernel reads them. What they compute with:

- `float32`: oneDNN; the same numbers as a plain layer up to rounding (1e-6 of their size).
- `float16`: FBGEMM, weights rounded to half precision, everything else in float32. Half the memory to read, and so the fastest
  that is still one model: every row is computed alone, in the same way whatever stands beside it.
- `int8`: FBGEMM, weights rounded to 8 bits by output channel, inputs to 7 bits by row, so that here too a row's result depends on
  nothing beside it. Fastest, and another model: for drafters only.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from specens.decoding.attention import grouped_attention

KINDS = ("float32", "float16", "int8")

MOST_ROWS = 128
"""Over more rows than this (a prompt) reordering the weights is little of the work, and the plain product is as fast."""


LEVELS = 63
"""Of an input's rounding, on either side of 0: 7 bits in all, so that no kernel's 16-bit sums overflow."""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weights. `weight` stays what it was, for whoever reads it.

    The packed copy does not follow later changes of `weight`. A layer that is moved or converted becomes a plain one again, and
    what is copied or stored of it is plain: oneDNN's packed tensors can be neither.
    """

    kind: str
    _packed: Any

    def pack(self, kind: str) -> None:
        self.kind = kind
        with torch.inference_mode(False), torch.no_grad():
            self._packed = _pack(self.weight.detach(), self.bias, kind)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.kind != "int8" and input.numel() > MOST_ROWS * self.in_features:
            return linear(input, self.weight, self.bias)
        if input.dim() == 1:  # FBGEMM wants rows
            return self(input[None])[0]
        if self.kind == "float32":
            return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        if self.kind == "float16":
            return torch.ops.quantized.linear_dynamic_fp16(input, self._packed)
        return self._by_row(input)

    def _by_row(self, rows: torch.Tensor) -> torch.Tensor:
        """The 8-bit product of `[..., in]`, each row in a scale of its own: every row is stretched to [-1, 1], which the kernel
        rounds in one scale.
        """
        size = rows.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / size, 1 / LEVELS, LEVELS + 1, self._packed
        )
        return product.mul_(size) if self.bias is None else torch.addcmul(self.bias, product, size)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        unpack(self)
        return nn.Linear._apply(self, fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_packed", "kind")}
        return _empty_layer, (), state


def _empty_layer() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


def _pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Any:
    if kind == "float32":
        return torch.ops.mkldnn._reorder_linear_weight(weight, 8)  # the number of rows it is best for
    if kind == "float16":
        return torch.ops.quantized.linear_prepack_fp16(weight, bias)
    scales = (weight.abs().amax(1) / 127).clamp_min(1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tensor type is old; the kernels that take it are maintained
        rounded = torch.quantize_per_channel(
            weight, scales.double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
        )
    return torch.ops.quantized.linear_prepack(
        rounded, None
    )  # the bias is added where the rows have their own size again


def pack(model: nn.Module, kind: str) -> None:
    """Pack every plain float32 linear layer of `model` that lies on a CPU. With `float16`, what the layer keeps as `weight` is
    rounded to half precision too, so that it is the same model whoever computes with it.
    """
    assert kind in KINDS, kind
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.dtype != torch.float32:
            continue
        if kind == "float16":
            with torch.no_grad():
                layer.weight.copy_(layer.weight.half())
        layer.__class__ = PackedLinear
        layer.pack(kind)  # pyright: ignore[reportCallIssue]


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> nn.Linear:
    """A packed layer over weights `[out, in]` that exist."""
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    pack(layer, kind)
    return layer


def unpack(module: nn.Module) -> None:
    """Make the packed layers of `module` plain ones."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
            del layer.__dict__["_packed"], layer.__dict__["kind"]


def packing(model: nn.Module) -> str | None:
    """How the linear layers of `model` are packed; None if they are plain."""
    return next((layer.kind for layer in model.modules() if isinstance(layer, PackedLinear)), None)


def packed_bytes(model: nn.Module) -> int:
    """Memory of the packed copies, beside the weights."""
    sizes = {"float32": 4, "float16": 2, "int8": 1}
    return sum(sizes[layer.kind] * layer.weight.numel() for layer in model.modules() if isinstance(layer, PackedLinear))


DRAFTER_KIND = "int8"
"""How a drafter's own layers are packed when the target's are: its errors cost acceptance, never the output."""

EXACT_ATTENTION = "specens_exact"


def attend_exactly(model: PreTrainedModel) -> None:
    """Let a model that attends with sdpa do so in float64. Kernels add in another order for other shapes, and rounding to 8 bits
    makes a last digit large; what differs in float64 is gone in float32. So an 8-bit drafter says the same of a position whether
    it reads one token or many, and a replay of it is the run.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa" and getattr(model, "_supports_attention_backend", False):
        config._attn_implementation = EXACT_ATTENTION


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


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION, sdpa_mask)
