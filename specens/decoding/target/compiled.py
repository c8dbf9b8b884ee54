"""Forwards of fixed shapes, compiled: a context in static buffers, widths rounded up, one copy to
the device a forward.

On a GPU a step of a small model is over before the host has launched its kernels one by one. A
compiled forward of one shape is recorded and launched as a whole (a CUDA graph), if everything that
changes comes in tensors: ids, positions, and who sees whom. Nothing is read back, so the host is
free to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from specens.compat import attention_name, mark_static_address
from specens.decoding.target.attention import mask_repeats
from specens.decoding.target.kv_cache import (
    ATTENTION_KINDS,
    GrowingCache,
    KVCache,
    Masks,
    StaticBuffers,
    StaticCache,
    additive_masks,
    attention_windows,
    move_positions,
    on_device,
)
from specens.decoding.target.self_check import relative_error, tolerance
from specens.decoding.target.supported import takes
from specens.decoding.types import ROOT, chain_parents
from specens.errors import one_line

WORD = 64
"""Bits of the words that say which nodes a node sees."""

Program = Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


class CannotCompileError(Exception):
    """Why a model goes on uncompiled, in one line."""


@dataclass(frozen=True)
class CompileOptions:
    """`backend` and `mode` are torch.compile's. A context gets room for `room` tokens beyond the
    prompt, rounded up to a multiple of `block`, so that prompts share their shapes. The first
    `warm_ups` calls of a shape are not for use: they compile and record.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = "reduce-overhead"
    room: int = 512
    block: int = 1024
    warm_ups: int = 3

    @classmethod
    def of(cls, device: torch.device) -> CompileOptions:
        """CUDA graphs on CUDA. Elsewhere the same program, traced and run operator by operator: for
        tests, not for speed.
        """
        return cls() if device.type == "cuda" else cls(backend="aot_eager", mode=None, warm_ups=1)


class CompiledModel:
    """The compiled forwards of one model, one for each of `widths`, and the buffers they work on.

    Only one context at a time can be in the buffers; another one meanwhile, like anything wider
    than the widest program, takes the model's own forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: CompileOptions,
        widths: Sequence[int],
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self.options = options
        self.widths = tuple(sorted(set(widths)))
        self.hidden_layers = tuple(sorted(set(hidden_layers)))
        self._model = model
        self._windows = attention_windows(model.config)
        self._like = _layers_of(model, self.hidden_layers)
        self.reserved = 0
        """Tokens of the longest prompt that there is room for."""
        self._buffers: StaticBuffers | None = None
        self._lock = threading.Lock()
        self._programs: dict[int, Program] = {}

    @property
    def capacity(self) -> int:
        """Positions that fit, 0 before the first context."""
        return self._buffers.capacity if self._buffers is not None else 0

    def begin(self, num_tokens: int, hidden_layers: Sequence[int] = ()) -> KVCache:
        """An empty cache for a prompt of so many tokens: in the buffers, if no other sequence has
        acquired them. A prompt that is longer than all before makes them larger, and compiles
        again, as do hidden states that nobody wanted before; raises CannotCompileError when that
        fails.
        """
        with self._lock:
            if self._buffers is not None and not self._buffers.is_free:
                return KVCache(hidden_layers)
            self.reserve(num_tokens, hidden_layers)
            assert self._buffers is not None
            return StaticCache(self._buffers, hidden_layers)

    def reserve(self, num_tokens: int, hidden_layers: Sequence[int] = ()) -> None:
        """Have room for prompts of up to so many tokens, and programs that hand out these hidden
        states too.
        """
        self.reserved = max(self.reserved, num_tokens)
        layers = tuple(sorted({*self.hidden_layers, *hidden_layers}))
        wanted = self.reserved + self.options.room + self.widths[-1]
        if wanted <= self.capacity and layers == self.hidden_layers:
            return
        if layers != self.hidden_layers:
            self.hidden_layers, self._like = layers, _layers_of(self._model, layers)
        try:
            if wanted > self.capacity:
                capacity = -(-wanted // self.options.block) * self.options.block
                self._buffers = StaticBuffers(self._like, capacity, num_moves=self.widths[-1])
            assert self._buffers is not None
            self._compile(self._buffers)
        except (
            Exception
        ) as failure:  # whatever a compiler raises over a model that was not made for it
            self._buffers = None
            raise CannotCompileError(
                f"torch.compile cannot take it ({one_line(failure, 100)})"
            ) from failure

    def takes(self, cache: KVCache, num_tokens: int) -> bool:
        """Whether there is a program for a forward over so many tokens behind this context."""
        return (
            isinstance(cache, StaticCache)
            and cache.buffers is self._buffers
            and num_tokens <= self.widths[-1]
            and cache.settle(self._width(num_tokens))
        )

    @torch.inference_mode()
    def forward(
        self, cache: KVCache, token_ids: Sequence[int] | torch.Tensor, parents: Sequence[int]
    ) -> torch.Tensor:
        """Logits `[len(parents) + 1, vocab]` of the last committed token and the nodes behind it,
        which the cache then holds. `token_ids` may lie on the device: then they are not known to
        the host.
        """
        assert isinstance(cache, StaticCache)
        num_tokens, width = len(parents) + 1, self._width(len(parents) + 1)
        cache.open_tree()
        packed = on_device(pack(token_ids, parents, cache.length, width), self._like[0].device)
        if isinstance(token_ids, torch.Tensor):
            packed[0, :num_tokens] = token_ids
        logits, hidden = self._programs[width](packed, cache.buffers.keys, cache.buffers.values)
        cache.advance(num_tokens)
        # Copies: the next call of the program writes over its results.
        states = dict(zip(self.hidden_layers, hidden, strict=True))
        cache.hidden = {
            layer: states[layer][None, :num_tokens].clone() for layer in cache.hidden_layers
        }
        return logits[:num_tokens].clone()

    def _width(self, num_tokens: int) -> int:
        return next(width for width in self.widths if width >= num_tokens)

    @torch.inference_mode()
    def _compile(self, buffers: StaticBuffers) -> None:
        """Compile and warm up every width, and check it against the model's own forward over the
        same ids.
        """
        for states in (*buffers.keys, *buffers.values):
            mark_static_address(states)
        buffers.mover = self._launch(move_positions)
        for _ in range(self.options.warm_ups):
            buffers.move(on_device(np.zeros((2, buffers.num_moves)), self._like[0].device))
        for width in self.widths:
            self._programs[width] = self._launch(self._program(width, buffers.capacity))
            for _ in range(self.options.warm_ups):
                self._check(buffers, width)

    def _launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compile_it: Any = torch.compile  # its overloads do not know that an option may be left open
        options = {"backend": self.options.backend, "mode": self.options.mode}
        compiled = compile_it(
            function, fullgraph=True, dynamic=False, isolate_recompiles=True, **options
        )

        def launch(*given: Any) -> Any:
            if self.options.mode is not None:
                # what the last call returned has been copied
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(*given)

        return launch

    def _program(self, width: int, capacity: int) -> Program:
        model, windows, layers = self._model, self._windows, list(self.hidden_layers)
        repeats = mask_repeats(model)
        extra: dict[str, Any] = {"output_hidden_states": layers} if layers else {}

        def program(
            packed: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            slots = packed[1, :1] + torch.arange(width, device=packed.device)
            masks = static_masks(packed, capacity, windows, model.dtype, repeats)
            output = model(
                input_ids=packed[:1],
                position_ids=packed[1:2],
                attention_mask=masks,
                cache=ScatterCache(keys, values, slots),
                use_cache=True,
                **extra,
            )
            return output.logits[0], [output.hidden_states[layer][0] for layer in layers]

        return program

    def _check(self, buffers: StaticBuffers, width: int) -> None:
        """Three ids go before, then as many as this width takes but one, where that is not a
        narrower one: padding must not matter.
        """
        narrower = max((other for other in self.widths if other < width), default=0)
        vocab = self._model.config.get_text_config(decoder=True).vocab_size
        count = 3 + max(narrower + 1, width - 1)
        ids = [vocab * (i + 1) // (count + 1) for i in range(count)]
        cache = StaticCache(buffers, self.hidden_layers)
        device, dtype = self._like[0].device, self._model.dtype
        expected = self._model(torch.tensor([ids], device=device), use_cache=False).logits[0, 3:]
        self._model(
            torch.tensor([ids[:3]], device=device),
            position_ids=torch.tensor([[0, 1, 2]], device=device),
            cache=cache.dynamic(),
            use_cache=True,
        )
        cache.settle(width)
        error = relative_error(self.forward(cache, ids[3:], chain_parents(count - 4)), expected)
        cache.close()
        is_quantized = bool(getattr(self._model, "is_quantized", False))
        if not error <= tolerance(dtype, is_quantized=is_quantized):
            raise ValueError(f"a compiled forward of width {width} is off by {error:.2g}")


class ScatterCache(Cache):
    """What a compiled forward takes for a cache: it writes to given slots of the buffers, and shows
    all of them.
    """

    def __init__(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], slots: torch.Tensor
    ) -> None:
        super().__init__(layers=[])
        self._keys, self._values, self._slots = keys, values, slots

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(2, self._slots, key_states)
        values.index_copy_(2, self._slots, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._slots[0]


def pack(
    token_ids: Sequence[int] | torch.Tensor, parents: Sequence[int], base: int, width: int
) -> np.ndarray:
    """All that a forward has to know, `[2 + words, width]`: ids, positions, and in words of 64 bits
    which of the `width` a node sees. First comes the last committed token, at position `base` of
    the text. What is filled up sees the context and itself, and nobody sees it.
    """
    num_words = -(-width // WORD)
    packed = np.zeros((2 + num_words, width), dtype=np.uint64)
    depths, sees = [0], [1]
    for node, parent in enumerate(parents):
        above = 0 if parent == ROOT else parent + 1
        depths.append(depths[above] + 1)
        sees.append(sees[above] | 1 << (node + 1))
    if not isinstance(token_ids, torch.Tensor):
        packed[0, : len(depths)] = token_ids
    packed[1] = base
    packed[1, : len(depths)] += np.array(depths, dtype=np.uint64)
    sees += [1 << place for place in range(len(depths), width)]
    for word in range(num_words):
        packed[2 + word] = [bits >> WORD * word & (1 << WORD) - 1 for bits in sees]
    return packed.view(np.int64)


def static_masks(
    packed: torch.Tensor,
    capacity: int,
    windows: dict[str, int | None],
    dtype: torch.dtype,
    repeats: int = 1,
) -> Masks:
    """`tree_masks` over whole buffers: additive, `[1, 1, repeats * width, capacity]`. Whatever lies
    behind the context and the nodes is not seen.
    """
    width, device = packed.shape[1], packed.device
    positions = packed[1]
    bits = (packed[2:, :, None] >> torch.arange(WORD, device=device)) & 1
    among = bits.permute(1, 0, 2).reshape(width, -1)[:, :width] > 0
    slots = torch.arange(capacity, device=device)
    place = slots - positions[0]
    node = place.clamp(0, width - 1)
    seen = (place < 0) | (among[:, node] & (place < width))
    keys = torch.where(place < 0, slots, positions[node])
    return additive_masks(seen, windows, dtype, (positions, keys), repeats)


def widths_for(most: int) -> tuple[int, ...]:
    """Powers of two, and at the end room for `most` tokens in a multiple of 8, which matrix kernels
    like.
    """
    widths = [1]
    while 2 * widths[-1] <= most:
        widths.append(2 * widths[-1])
    return (
        tuple(widths) if widths[-1] >= most else (*widths, min(2 * widths[-1], -(-most // 8) * 8))
    )


def _layers_of(model: PreTrainedModel, hidden_layers: Sequence[int]) -> list[Any]:
    """The layers that one short forward of the model leaves behind: they tell the shapes. Raises
    CannotCompileError by name for models that do not fit fixed shapes.
    """
    attention = attention_name(model)
    others = sorted(set(attention_windows(model.config)) - ATTENTION_KINDS)
    if others:
        raise CannotCompileError(f"layers of kind {', '.join(others)}")
    if "flash" in attention or "flex" in attention:
        raise CannotCompileError(f"{attention} takes no mask over whole buffers")
    if not takes(model, "position_ids"):
        raise CannotCompileError("the model takes no position_ids")
    cache = GrowingCache()
    try:
        embeddings: Any = model.get_input_embeddings()
        ids = torch.zeros(1, 1, dtype=torch.long, device=embeddings.weight.device)
        extra: dict[str, Any] = (
            {"output_hidden_states": list(hidden_layers)} if hidden_layers else {}
        )
        with torch.inference_mode():
            # Also installs what records hidden states, which cannot be done while compiling.
            model(input_ids=ids, cache=cache, use_cache=True, **extra)
    except Exception as failure:
        raise CannotCompileError(f"{type(failure).__name__}: {one_line(failure)}") from failure
    layers: list[Any] = list(cache.layers)
    if any(not layer.is_initialized for layer in layers):
        raise CannotCompileError("some layers keep no keys of their own")
    if len({layer.device for layer in layers}) != 1:
        raise CannotCompileError("its layers lie on several devices")
    return layers
