"""Score an output again with the target alone, in three ways that differ by rounding only: one
token per forward pass (as AR decoding does), in chunks, and in higher precision. Nothing here uses
the decoding loop, a verifier or a drafter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specens.audit.outputs import Output
from specens.decoding.sampling import Sampler
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import Layout
from specens.decoding.target.target import Target
from specens.decoding.types import TokenTree

FULL_PRECISION = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Position:
    """One token of an output: all ids before it, the token, the target's `logits` `[vocab]` for it,
    and the hidden states (layer -> `[1, hidden_size]`) of the last id before it.
    """

    prefix_ids: tuple[int, ...]
    token: int
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


def rescore(target: Target, cache: KVCache, output: Output) -> Iterator[Position]:
    """Every position of an output, one token per forward pass; `cache` holds its prompt."""
    ids = output.prompt_ids
    for token in output.output_ids:
        logits = target.score(cache, ids[-1], TokenTree(), "tree")[0]
        cache.accept(())
        yield Position(ids, token, logits, cache.hidden)
        ids += (token,)


@dataclass(frozen=True)
class Rescored:
    """What AR decoding, which has this `sampler`, would have chosen at each of the n positions of
    an output. Scores are those whose argmax it outputs (`Sampler.perturbed`).

    `best` `[n, 2]` are its two best tokens and `scores` `[n, 2]` theirs, `output_scores` `[n]`
    those of the output's own tokens; `baseline_score` is that of the baseline's token where the
    baseline diverges from the output (None: nowhere). The control scores the same output in chunks,
    without a drafter: `control_scores` `[n, 2]` of the two tokens, and the `control_choices` `[n]`.
    """

    output: Output
    sampler: Sampler
    best: np.ndarray
    scores: np.ndarray
    output_scores: np.ndarray
    baseline_score: float | None
    control_scores: np.ndarray
    control_choices: np.ndarray

    @property
    def choices(self) -> np.ndarray:
        """`[n]`: the token that AR decoding outputs at each position."""
        return self.best[:, 0]

    @property
    def deficits(self) -> np.ndarray:
        """`[n]`: how far the score of the output's own token is below the best one."""
        return self.scores[:, 0] - self.output_scores


def rescored(
    output: Output, sampler: Sampler, positions: Iterable[Position], control: Iterable[torch.Tensor]
) -> Rescored:
    """Of the positions token by token, and then the scores `[vocab]` of the control at each."""
    best, scores, own = [], [], []
    at, baseline_ids, baseline_score = output.baseline_divergence, output.baseline_ids or (), None
    for index, position in enumerate(positions):
        perturbed = sampler.perturbed(position.prefix_ids, position.logits)
        # `argmax`, as AR decoding takes it: of equal scores `topk` may name another first.
        choice, top = int(perturbed.argmax()), perturbed.topk(2).indices.tolist()
        pair = [choice, top[1] if choice == top[0] else top[0]]
        best.append(pair)
        scores.append([float(perturbed[token]) for token in pair])
        own.append(float(perturbed[position.token]))
        if index == at and index < len(baseline_ids):
            baseline_score = float(perturbed[baseline_ids[index]])
    control_scores, choices = [], []
    for row, pair in zip(control, best, strict=True):
        control_scores.append([float(row[token]) for token in pair])
        choices.append(int(row.argmax()))
    return Rescored(
        output,
        sampler,
        np.array(best, dtype=np.int64).reshape(-1, 2),
        np.array(scores, dtype=np.float64).reshape(-1, 2),
        np.array(own, dtype=np.float64),
        baseline_score,
        np.array(control_scores, dtype=np.float64).reshape(-1, 2),
        np.array(choices, dtype=np.int64),
    )


def in_chunks(
    target: Target, output: Output, sampler: Sampler, layout: Layout, width: int
) -> Iterator[torch.Tensor]:
    """The scores `[vocab]` of every position, in forward passes over chains of `width` nodes that
    are all accepted.
    """
    ids, left = output.prompt_ids, list(output.output_ids)
    with target.prefill(ids) as cache:
        while left:
            nodes = left[: min(width, len(left) - 1)]
            logits = target.score(cache, ids[-1], TokenTree.chain(nodes), layout)
            cache.accept(tuple(range(len(nodes))))
            for row, token in zip(logits, left, strict=False):
                yield sampler.perturbed(ids, row)
                ids += (token,)
            left = left[len(logits) :]


def reference_of(target: Target) -> tuple[Target, str]:
    """The target that judges where two ways disagree, and its name: a float32 copy of one in
    half precision, else the target itself (quantised weights in another arithmetic would be another
    model). It scores an output in one forward.
    """
    if target.dtype in FULL_PRECISION or target.is_quantized:
        return target, "the target itself, in one forward"
    model = copy.deepcopy(target.model).float()
    return Target(model, target.tokenizer), "a float32 copy of the target, in one forward"
