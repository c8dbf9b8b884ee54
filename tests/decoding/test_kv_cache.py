"""Keys and values in buffers that grow: what they hold is what concatenating would hold, and a step
copies no context.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache

from specens.decoding.target.kv_cache import SPARE_POSITIONS, GrowingCache, KVCache, tree_masks
from specens.decoding.target.target import Target
from specens.decoding.types import TokenTree
from specens.models.tiny import random_model

TREE = TokenTree((5, 6, 7, 8), (-1, 0, 0, -1), (1, 2, 2, 1), (1, 1, 1, 1))


def layers_of(cache: KVCache | Cache) -> list[Any]:
    return list(cache.dynamic().layers if isinstance(cache, KVCache) else cache.layers)


class Writes(TorchDispatchMode):
    """The most elements that any one operator has written, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.what = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {
            tensor.untyped_storage().data_ptr()
            for tensor in args
            if isinstance(tensor, torch.Tensor)
        }
        is_view = isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() in seen
        writes = isinstance(out, torch.Tensor) and (
            not is_view or func.overloadpacket is torch.ops.aten.copy_
        )
        if writes and out.numel() > self.most:
            self.most, self.what = out.numel(), str(func)
        return out


@pytest.mark.parametrize("seed", range(6))
def test_any_history_holds_what_concatenation_would(seed):
    """Appends of any width, cuts, and batches of texts, in any order."""
    chance, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    ours, theirs, rows = GrowingCache(), DynamicCache(), 1
    for _ in range(60):
        length = int(theirs.get_seq_length())
        what = chance.choice(("append", "append", "append", "cut", "repeat", "select"))
        if what == "append":
            added = chance.randint(1, 90)
            for layer in (0, 1):
                keys = torch.randn(rows, 2, added, 4, generator=numbers)
                values = torch.randn(rows, 2, added, 6, generator=numbers)
                pairs = zip(
                    ours.update(keys, values, layer),
                    theirs.update(keys, values, layer),
                    strict=True,
                )
                assert all(torch.equal(a, b) for a, b in pairs)
        elif what == "cut" and length:
            count = chance.randint(0, length)
            for cache in (ours, theirs):
                cache.crop(-count)
        elif what == "repeat" and rows == 1:
            rows = chance.randint(1, 3)
            for cache in (ours, theirs):
                cache.batch_repeat_interleave(rows)
        elif what == "select":
            kept = torch.tensor(sorted(chance.sample(range(rows), chance.randint(1, rows))))
            for cache in (ours, theirs):
                cache.batch_select_indices(kept)
            rows = len(kept)
        assert ours.get_seq_length() == theirs.get_seq_length()
        for a, b in zip(layers_of(ours), layers_of(theirs), strict=True):
            if b.get_seq_length():
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_a_step_copies_no_context():
    """A step writes its own positions, whether they are accepted or dropped, and nothing as large
    as the context.
    """
    # with fewer, sdpa itself repeats the keys
    target = Target(random_model(vocab_size=32, num_key_value_heads=4))
    cache = target.prefill([1 + i % 30 for i in range(301)])
    layers = layers_of(cache)
    addresses = [layer.keys.data_ptr() for layer in layers]
    for path in ((0, 2), (), (3,)):
        with Writes() as writes:
            target.score(cache, 3, TREE, "tree")
            cache.accept(path)
        assert writes.most < layers[0].keys.numel() / 2, writes.what
    assert [layer.keys.data_ptr() for layer in layers] == addresses


def test_buffers_grow_by_doubling():
    target = Target(random_model(vocab_size=32, max_position_embeddings=4096))
    cache = target.prefill([3] * 11)
    capacities = []
    for _ in range(3 * SPARE_POSITIONS):
        target.score(cache, 3, TokenTree(), "tree")
        cache.accept(())
        capacity = layers_of(cache)[0].buffers[0].shape[-2]
        capacities += [capacity] if capacity not in capacities[-1:] else []
    assert capacities == [
        10 + SPARE_POSITIONS,
        2 * (10 + SPARE_POSITIONS),
        4 * (10 + SPARE_POSITIONS),
    ]


def test_what_is_behind_the_filled_part_is_never_read():
    target = Target(random_model(vocab_size=32))
    prompt = [4, 9, 2, 7, 5]
    clean, dirty = target.prefill(prompt), target.prefill(prompt)
    with torch.inference_mode():
        for layer in layers_of(dirty):
            for buffer in layer.buffers:
                buffer[..., len(prompt) - 1 :, :] = 1e30
    for layout in ("tree", "rows"):
        scores = [target.score(cache, 5, TREE, layout) for cache in (clean, dirty)]
        assert torch.equal(*scores)
        for cache in (clean, dirty):
            cache.accept((0, 2))


@pytest.mark.parametrize("window", [None, 3, 6, 100])
def test_a_node_sees_the_context_its_ancestors_and_itself_within_the_window(window):
    base = 5
    kinds = {"some_attention": window}
    mask = tree_masks(TREE, base, kinds, torch.float32, torch.device("cpu"))[0, 0]
    places = [*range(base), base, *(base + depth for depth in TREE.depths)]
    for row, node in enumerate((-1, 0, 1, 2, 3)):
        above = {base, *(base + 1 + n for n in (TREE.path_to(node) if node >= 0 else ()))}
        for column, place in enumerate(places):
            near = window is None or places[base + row] - place < window
            assert (mask[row, column] == 0) == ((column < base or column in above) and near)
            assert mask[row, column] in (0, torch.finfo(torch.float32).min)


def test_an_empty_cache_has_no_positions():
    cache = KVCache()
    assert cache.length == 0
    cache.rollback(0)
