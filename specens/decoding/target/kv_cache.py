"""The only file that knows how the key-value cache is laid out: length, rollback, compaction, rows,
masks.

Every layer keeps the whole context, sliding-window layers too; the window lives in the mask. That
costs memory on long contexts, and buys one rule for all attention models: what is kept can be cut
back to any length. (transformers' sliding-window cache layer forgets, and can be rolled back only
while it is told to record.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from specens.decoding.types import ROOT, TokenTree

SPARE_POSITIONS = 256
"""Room that a layer's buffer is given beyond what it must hold now."""

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
"""Layer kinds whose cache can be cut back to an earlier length. The others keep a running state."""


class GrowingLayer(DynamicLayer):
    """Keys and values `[rows, heads, positions, head_dim]` as views of the filled part of buffers
    that grow by doubling.

    transformers' own layer concatenates, which copies the whole context in every forward; here a
    forward writes what is new behind what is there. Rolling back shortens the views, and the next
    forward overwrites what was behind them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    buffers: tuple[torch.Tensor, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True
        self._move(key_states[..., :0, :], value_states[..., :0, :], 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, capacity = self.keys.shape[-2], self.buffers[0].shape[-2]
        end = begin + key_states.shape[-2]
        if end > capacity:
            self._move(self.keys, self.values, max(2 * capacity, end + SPARE_POSITIONS))
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(-2, begin, end - begin).copy_(states)
        self.show(end)
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self.buffers = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            keys, values = (s.repeat_interleave(repeats, dim=0) for s in (self.keys, self.values))
            self._move(keys, values, keys.shape[-2] + SPARE_POSITIONS)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            keys, values = (s[indices.to(self.device)] for s in (self.keys, self.values))
            self._move(keys, values, keys.shape[-2] + SPARE_POSITIONS)

    def _move(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Put what is given at the beginning of new buffers of `capacity` positions."""
        self.buffers = tuple(
            states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
            for states in (keys, values)
        )
        self.show(keys.shape[-2])
        self.keys.copy_(keys)
        self.values.copy_(values)

    def show(self, end: int) -> None:
        """The filled part ends here."""
        self.keys, self.values = (buffer.narrow(-2, 0, end) for buffer in self.buffers)


class GrowingCache(DynamicCache):
    """A cache of such layers, which are created by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer

    def fill(self, buffers: StaticBuffers, num_positions: int) -> None:
        """Be the first positions of buffers that exist."""
        self.layers = []
        for pair in zip(buffers.keys, buffers.values, strict=True):
            layer = GrowingLayer()
            layer.device, layer.is_initialized, layer.buffers = pair[0].device, True, pair
            layer.show(num_positions)
            self.layers.append(layer)

    def lies_in(self, buffers: StaticBuffers) -> bool:
        """Whether it is still where it was filled, and has not outgrown that."""
        pairs = zip(self.layers, buffers.keys, strict=True)
        return all(layer.buffers[0] is keys for layer, keys in pairs)


class StaticBuffers:
    """Keys and values `[1, heads, capacity, head_dim]` of every layer, at addresses that never
    change: one sequence at a time, `is_free` between them. `num_moves` positions can be moved at
    once, by `mover`.
    """

    def __init__(self, like: Sequence[GrowingLayer], capacity: int, num_moves: int) -> None:
        self.capacity, self.num_moves = capacity, num_moves
        self.is_free = True
        with torch.inference_mode(False):
            self.keys = [_empty(layer.keys, capacity) for layer in like]
            self.values = [_empty(layer.values, capacity) for layer in like]
        self.mover: Callable[..., None] = move_positions

    def move(self, moves: torch.Tensor) -> None:
        """Copy positions: `[2, num_moves]`, to and from."""
        self.mover(moves, self.keys, self.values)


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = (*like.shape[:-2], capacity, like.shape[-1])
    return torch.zeros(*shape, dtype=like.dtype, device=like.device)


def move_positions(
    moves: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Copy positions within every layer, `[2, num_moves]` to and from; all are read before any is
    written.
    """
    for states in (*keys, *values):
        states.index_copy_(-2, moves[0], states.index_select(-2, moves[1]))


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Whole numbers on a device, without waiting for it."""
    tensor = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class KVCache:
    """Keys and values of one sequence. After a step it holds all committed tokens but the last.

    A step calls `open_tree` or `open_rows`, runs a forward with `dynamic()` over the last committed
    token and the nodes, and then `accept`s the path that was committed. `close` ends the sequence;
    a `with` block does it too.

    With `hidden_layers` it also carries the hidden states of the last forward, by index of
    transformers' `hidden_states` (0: embeddings, the last: what the output projection reads):
    `[rows, width, hidden_size]` after the forward, and `[num_new, hidden_size]` of the positions
    that stayed after `accept`.
    """

    def __init__(self, hidden_layers: Sequence[int] = ()) -> None:
        self._states = GrowingCache()
        self.hidden_layers = tuple(hidden_layers)
        self.hidden: dict[int, torch.Tensor] = {}
        self._base = 0
        self._rows: tuple[tuple[int, ...], ...] | None = None

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """The sequence has ended. Nothing to give back here."""

    def dynamic(self) -> GrowingCache:
        """The layers that the model's own forward appends to."""
        return self._states

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self._states.get_seq_length())

    def rollback(self, keep: int) -> None:
        """Keep the first `keep` positions. transformers' `crop` takes a negative count of positions
        to remove.
        """
        if not 0 <= keep <= self.length:
            raise ValueError(f"cannot keep {keep} of {self.length} positions")
        if keep < self.length:
            self.dynamic().crop(keep - self.length)

    def open_tree(self) -> None:
        """The next forward appends [last committed token, nodes in order] in one row."""
        self._base, self._rows = self.length, None

    def open_rows(self, rows: Sequence[Sequence[int]]) -> None:
        """The next forward appends [last committed token, `rows[r]`, padding] to row r of the
        batch.
        """
        self._base, self._rows = self.length, tuple(tuple(row) for row in rows)
        if len(rows) > 1:
            self.repeat_rows(len(rows))

    @torch.inference_mode()
    def accept(self, path: Sequence[int]) -> None:
        """Keep the context, the last committed token and the nodes on `path`; drop the rest. One
        row again.
        """
        keep = self._base + 1 + len(path)
        row, slots = 0, [0, *(node + 1 for node in path)]
        if self._rows is None:
            if list(path) != list(range(len(path))):
                self._gather(path)
        else:
            slots = list(range(len(slots)))
            wanted = tuple(path)
            row = next(r for r, nodes in enumerate(self._rows) if nodes[: len(path)] == wanted)
            if len(self._rows) > 1:
                self.keep_rows([row])
        self._rows = None
        self.rollback(keep)
        if self.hidden:
            self._keep_hidden(row, slots)

    def _keep_hidden(self, row: int, slots: Sequence[int]) -> None:
        if list(slots) == list(range(len(slots))):
            kept = {layer: states[row, : len(slots)] for layer, states in self.hidden.items()}
        else:
            devices = {states.device for states in self.hidden.values()}
            index = {device: on_device(slots, device) for device in devices}
            kept = {
                layer: states[row, index[states.device]] for layer, states in self.hidden.items()
            }
        self.hidden = kept

    def repeat_rows(self, num_rows: int) -> None:
        """Copy a cache of one row: several texts go on from the same prefix."""
        self.dynamic().batch_repeat_interleave(num_rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.dynamic().batch_select_indices(torch.tensor(list(rows), dtype=torch.long))

    def _gather(self, path: Sequence[int]) -> None:
        """Move the path's positions, which lie apart, behind the last committed token."""
        begin = self._base + 1
        slots = [begin + node for node in path]
        layer: Any
        index: dict[torch.device, torch.Tensor] = {}
        for layer in self.dynamic().layers:
            if layer.get_seq_length() == 0:
                continue
            if layer.device not in index:
                index[layer.device] = on_device(slots, layer.device)
            for states in (layer.keys, layer.values):
                moved = states.index_select(-2, index[layer.device])
                states[..., begin : begin + len(path), :] = moved


class StaticCache(KVCache):
    """A sequence in static buffers, which are its own until it is closed. Forwards of fixed shapes
    write there and see all of it, so that only the length is counted here. For any other forward
    `dynamic` leaves the counting to ordinary layers, which are views of the same buffers, and may
    outgrow them.
    """

    def __init__(self, buffers: StaticBuffers, hidden_layers: Sequence[int] = ()) -> None:
        super().__init__(hidden_layers)
        self.buffers = buffers
        self._count: int | None = 0  # None: the layers know
        self._is_open = True
        buffers.is_free = False

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.buffers.is_free = True

    def dynamic(self) -> GrowingCache:
        assert self._is_open, "this sequence has ended, and its buffers may be another one's"
        if self._count is not None:
            self._states.fill(self.buffers, self._count)
            self._count = None
        return self._states

    @property
    def length(self) -> int:
        return super().length if self._count is None else self._count

    def settle(self, width: int) -> bool:
        """Whether a forward of a fixed width can go on from here; then the length is counted here
        again.
        """
        if not self._is_open:
            return False
        if self._count is None and self._states.lies_in(self.buffers):
            self._count = super().length
        return self._count is not None and self._count + width <= self.buffers.capacity

    def advance(self, num_tokens: int) -> None:
        """A forward of a fixed shape has written so many more positions."""
        assert self._count is not None
        self._count += num_tokens

    def rollback(self, keep: int) -> None:
        if self._count is None:
            return super().rollback(keep)
        if not 0 <= keep <= self._count:
            raise ValueError(f"cannot keep {keep} of {self._count} positions")
        self._count = keep
        return None

    def _gather(self, path: Sequence[int]) -> None:
        if self._count is None:
            return super()._gather(path)
        moves = [(i, node) for i, node in enumerate(path) if i != node]
        # Filled up with the last committed token, which stays where it is.
        moves += [(-1, -1)] * (self.buffers.num_moves - len(moves))
        slots = np.array(moves).T.copy() + self._base + 1
        self.buffers.move(on_device(slots, self.buffers.keys[0].device))
        return None


Masks = torch.Tensor | dict[str, torch.Tensor]
"""The mask in the form the model takes: one tensor when all layers are alike, else one per kind."""


def additive_masks(
    seen: torch.Tensor,
    windows: Mapping[str, int | None],
    dtype: torch.dtype,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
    repeats: int = 1,
) -> Masks:
    """From what each query may see, bool `[queries, keys]`, to additive masks
    `[1, 1, repeats * queries, keys]`: 0 where it sees, the dtype's lowest number elsewhere (eager
    attention adds the mask, so a boolean one would be silently wrong).

    A layer with a window sees keys less than that many positions back; `positions` are those of the
    queries and of the keys (None where no layer has a window).
    """
    masks: dict[str, torch.Tensor] = {}
    for kind, window in windows.items():
        visible = seen
        if window is not None:
            assert positions is not None
            visible = seen & (positions[0][:, None] - positions[1] < window)
        mask = torch.zeros(visible.shape, dtype=dtype, device=seen.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]
        masks[kind] = mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def ancestry(parents: Sequence[int]) -> np.ndarray:
    """Boolean `[n + 1, n + 1]`: may tree position i see tree position j? Position 0 is the last
    committed token.
    """
    seen = np.zeros((len(parents) + 1, len(parents) + 1), dtype=bool)
    seen[:, 0] = True
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node + 1] |= seen[parent + 1]
        seen[node + 1, node + 1] = True
    return seen


def tree_masks(
    tree: TokenTree,
    base: int,
    windows: Mapping[str, int | None],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 1,
) -> Masks:
    """Masks `[1, 1, n + 1, base + n + 1]` for [last committed token, nodes] behind `base` cached
    positions. Each node sees the context, its ancestors and itself. A window counts positions,
    which are depths in the tree, not slots.
    """
    width, positions = len(tree) + 1, None
    seen = torch.ones(width, base + width, dtype=torch.bool, device=device)
    seen[:, base:] = torch.from_numpy(ancestry(tree.parents)).to(device)
    if any(window is not None for window in windows.values()):
        queries = torch.tensor((0, *tree.depths), device=device) + base
        positions = (queries, torch.cat([torch.arange(base, device=device), queries]))
    return additive_masks(seen, windows, dtype, positions, repeats)


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Kind of attention layer -> its window in positions (None: all). Also holds kinds that cannot
    be rolled back, so that the caller can name them.
    """
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return {
        kind: given.get("sliding_window")
        for kind, given in zip(kinds, options, strict=True)
        if kind != "dummy"
    }
