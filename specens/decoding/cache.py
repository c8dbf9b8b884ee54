"""The only file that knows how the key-value cache is laid out: length, rollback, compaction, rows, masks.

Every layer keeps the whole context, sliding-window layers too; the window lives in the mask. That costs memory on long
contexts, and buys one rule for all attention models: what is kept can be cut back to any length. (transformers'
sliding-window cache layer forgets, and can be rolled back only while it is told to record.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Keys and values `[rows, heads, positions, head_dim]` as views of the filled part of buffers that grow by doubling.

    transformers' own layer concatenates, which copies the whole context in every forward; here a forward writes what is new
    behind what is there. Rolling back shortens the views, and the next forward overwrites what was behind them.
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
        self._fill(end)
        self.keys[..., begin:, :] = key_states
        self.values[..., begin:, :] = value_states
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self.buffers = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            keys, values = (states.repeat_interleave(repeats, dim=0) for states in (self.keys, self.values))
            self._move(keys, values, keys.shape[-2] + SPARE_POSITIONS)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            keys, values = (states[indices.to(self.device)] for states in (self.keys, self.values))
            self._move(keys, values, keys.shape[-2] + SPARE_POSITIONS)

    def _move(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Put what is given at the beginning of new buffers of `capacity` positions."""
        self.buffers = tuple(
            states.new_empty(*states.shape[:-2], capacity, states.shape[-1]) for states in (keys, values)
        )
        self._fill(keys.shape[-2])
        self.keys.copy_(keys)
        self.values.copy_(values)

    def _fill(self, end: int) -> None:
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)


class GrowingCache(DynamicCache):
    """A cache of such layers, which come into being with the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer


class KVCache:
    """Keys and values of one context. After a step it holds all committed tokens but the last.

    `states` goes to the model's forward. A step calls `open_tree` or `open_rows`, runs the forward over the last committed
    token and the nodes, and then `accept`s the path that was committed.

    With `hidden_layers` it also carries the hidden states of the last forward, by index of transformers' `hidden_states`
    (0: embeddings, the last: what the output projection reads): `[rows, width, hidden_size]` after the forward, and
    `[num_new, hidden_size]` of the positions that stayed after `accept`.
    """

    def __init__(self, hidden_layers: Sequence[int] = ()) -> None:
        self.states = GrowingCache()
        self.hidden_layers = tuple(hidden_layers)
        self.hidden: dict[int, torch.Tensor] = {}
        self._base = 0
        self._rows: tuple[tuple[int, ...], ...] | None = None

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self.states.get_seq_length())

    def rollback(self, keep: int) -> None:
        """Keep the first `keep` positions. In transformers 5.24, `crop` takes a negative count of positions to remove."""
        if not 0 <= keep <= self.length:
            raise ValueError(f"cannot keep {keep} of {self.length} positions")
        if keep < self.length:
            self.states.crop(keep - self.length)

    def open_tree(self) -> None:
        """The next forward appends [last committed token, nodes in order] in one row."""
        self._base, self._rows = self.length, None

    def open_rows(self, rows: Sequence[Sequence[int]]) -> None:
        """The next forward appends [last committed token, `rows[r]`, padding] to row r of the batch."""
        self._base, self._rows = self.length, tuple(tuple(row) for row in rows)
        if len(rows) > 1:
            self.states.batch_repeat_interleave(len(rows))

    @torch.inference_mode()
    def accept(self, path: Sequence[int]) -> None:
        """Keep the context, the last committed token and the nodes on `path`; drop the rest. One row again."""
        keep = self._base + 1 + len(path)
        row, slots = 0, [0, *(node + 1 for node in path)]
        if self._rows is None:
            self._gather(path)
        else:
            slots = list(range(len(slots)))
            row = next(r for r, nodes in enumerate(self._rows) if nodes[: len(path)] == tuple(path))
            if len(self._rows) > 1:
                self.states.batch_select_indices(torch.tensor([row]))
        self._rows = None
        self.rollback(keep)
        self.hidden = {layer: states[row, slots] for layer, states in self.hidden.items()}

    def repeat_rows(self, num_rows: int) -> None:
        """Copy a cache of one row: several texts go on from the same prefix."""
        self.states.batch_repeat_interleave(num_rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop the texts that are finished."""
        self.states.batch_select_indices(torch.tensor(list(rows), dtype=torch.long))

    def _gather(self, path: Sequence[int]) -> None:
        """Move the path's positions, which may lie apart in the tree, right behind the last committed token."""
        if list(path) == list(range(len(path))):
            return
        begin = self._base + 1
        slots = [begin + node for node in path]
        layer: Any
        index: dict[torch.device, torch.Tensor] = {}
        for layer in self.states.layers:
            if layer.get_seq_length() == 0:
                continue
            if layer.device not in index:
                index[layer.device] = torch.tensor(slots, device=layer.device)
            for states in (layer.keys, layer.values):
                states[..., begin : begin + len(path), :] = states.index_select(-2, index[layer.device])


def ancestry(parents: Sequence[int]) -> np.ndarray:
    """Boolean `[n + 1, n + 1]`: may tree position i see tree position j? Position 0 is the last committed token."""
    seen = np.zeros((len(parents) + 1, len(parents) + 1), dtype=bool)
    seen[:, 0] = True
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node + 1] |= seen[parent + 1]
        seen[node + 1, node + 1] = True
    return seen


def tree_mask(tree: TokenTree, base: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask `[1, 1, n + 1, base + n + 1]` for [last committed token, nodes] behind `base` cached positions.

    Each node sees the context, its ancestors and itself; 0 where it sees, the dtype's lowest number elsewhere (eager
    attention adds the mask, so a boolean one would be silently wrong). A window counts positions, which are depths in
    the tree, not slots.
    """
    width, lowest = len(tree) + 1, torch.finfo(dtype).min
    mask = torch.zeros(width, base + width, dtype=dtype, device=device)
    among = torch.zeros(width, width, dtype=dtype).masked_fill_(torch.from_numpy(~ancestry(tree.parents)), lowest)
    mask[:, base:] = among.to(device)
    if window is not None:
        query = torch.tensor((0, *tree.depths), device=device) + base
        key = torch.cat([torch.arange(base, device=device), query])
        mask.masked_fill_(query[:, None] - key[None, :] >= window, lowest)
    return mask[None, None]


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Kind of attention layer -> its window in positions (None: all). Also holds kinds that cannot be rolled back, so that
    the caller can name them.
    """
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return {kind: opts.get("sliding_window") for kind, opts in zip(kinds, options, strict=True) if kind != "dummy"}


def tree_masks(
    tree: TokenTree, base: int, windows: Mapping[str, int | None], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask in the form the model takes: one tensor when all layers are alike, else one per kind of layer."""
    masks = {kind: tree_mask(tree, base, window, dtype, device) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))
