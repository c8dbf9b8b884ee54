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
from transformers.cache_utils import get_layer_types_and_kwargs

from specens.decoding.types import ROOT, TokenTree

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
"""Layer kinds whose cache can be cut back to an earlier length. The others keep a running state."""


class KVCache:
    """Keys and values of one context. After a step it holds all committed tokens but the last.

    `states` goes to the model's forward. A step calls `open_tree` or `open_rows`, runs the forward over the last committed
    token and the nodes, and then `accept`s the path that was committed.

    With `hidden_layers` it also carries the hidden states of the last forward, by index of transformers' `hidden_states`
    (0: embeddings, the last: what the output projection reads): `[rows, width, hidden_size]` after the forward, and
    `[num_new, hidden_size]` of the positions that stayed after `accept`.
    """

    def __init__(self, hidden_layers: Sequence[int] = ()) -> None:
        self.states = DynamicCache()
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
        for layer in self.states.layers:
            if layer.get_seq_length() == 0:
                continue
            for states in (layer.keys, layer.values):
                states[..., begin : begin + len(path), :] = states[..., slots, :]


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
    seen = np.concatenate([np.ones((len(tree) + 1, base), dtype=bool), ancestry(tree.parents)], axis=1)
    if window is not None:
        query = base + np.array((0, *tree.depths))
        key = np.concatenate([np.arange(base), query])
        seen &= query[:, None] - key[None, :] < window
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), torch.finfo(dtype).min)
    return mask[None, None].to(device)


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
