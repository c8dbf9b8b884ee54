"""Whether a model that nothing refused really scores trees as it scores plain text: tried on it, at
the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specens.decoding.target.kv_cache import KVCache
from specens.decoding.types import TokenTree
from specens.errors import UserError, one_line

if TYPE_CHECKING:
    from specens.decoding.target.supported import Layout
    from specens.decoding.target.target import Target


def self_check(target: Target, layout: Layout) -> None:
    """Refuse a model whose tree scores are not what it computes for each branch alone: an attention
    backend that ignores the mask, positions taken from slots, a cache that does not roll back.
    Costs five short forwards.
    """
    try:
        error = verification_error(target, layout)
    except Exception as failure:  # whatever a model that was not made for this raises
        raise UserError(
            f"{target.name}: cannot verify with layout={layout} ({one_line(failure)}); try the "
            "other layout"
        ) from failure
    if not error <= tolerance(target.dtype, is_quantized=target.is_quantized):
        raise UserError(
            f"{target.name}: verifying with layout={layout} does not reproduce the model's own "
            f"scores (relative error {error:.2g}), so the output would not be its own; try the "
            "other layout or attention=eager"
        )


def tolerance(dtype: torch.dtype, *, is_quantized: bool) -> float:
    """The `relative_error` that arithmetic in another order may cause."""
    is_exact = dtype in (torch.float32, torch.float64) and not is_quantized
    return 1e-3 if is_exact else 0.1


def relative_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean absolute error, in standard deviations of the expected scores."""
    return float((scores - expected).abs().mean() / expected.std().clamp_min(1e-6))


def verification_error(target: Target, layout: Layout) -> float:
    """`relative_error` of two branches' scores after an earlier branch was accepted; the larger
    one. NaN counts as infinite.
    """
    *prefix, a, b, c = _check_ids(target)
    tree = TokenTree((a, b, c, b), (-1, 0, 0, -1), (1, 2, 2, 1), (1, 1, 1, 1))
    with target.prefill(prefix) as cache:
        target.score(cache, prefix[-1], tree, layout)
        cache.accept((0, 2))
        scored = target.score(cache, b, tree, layout)
    errors = [
        relative_error(scored[node + 1], _in_one_forward(target, [*prefix, a, c, b, *branch])[-1])
        for node, branch in ((1, (a, b)), (3, (b,)))
    ]
    return max(errors, key=lambda error: error if error == error else float("inf"))


def _check_ids(target: Target) -> list[int]:
    """Eight ids from all over the vocabulary: its beginning is full of special tokens, on which
    models are least exact.
    """
    return [target.vocab_size * (i + 1) // 9 for i in range(8)]


def _in_one_forward(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` after each of them."""
    return target.score(KVCache(), ids[0], TokenTree.chain(ids[1:]), "rows")
