"""Along a text with the target alone, in the three ways whose scores differ by rounding only: token by token (what plain decoding
does), in chunks, and with higher precision. Independent of the decoding loop, its verifiers and its drafters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from specens.decoding.sampling import Sampler
from specens.decoding.target import Layout, Target
from specens.decoding.types import TokenTree
from specens.evidence.texts import Text

FULL_PRECISION = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Place:
    """One position of a walk: `ids` is all before the token `said`, `logits` `[vocab]` what the target says there, `hidden` the
    states (layer -> `[1, hidden_size]`) of the position that has just entered its cache.
    """

    ids: tuple[int, ...]
    said: int
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


def along(target: Target, text: Text, hidden_layers: Sequence[int] = ()) -> Iterator[Place | dict[int, torch.Tensor]]:
    """First the prompt's hidden states, then every position of the output, by forwards over one token each."""
    cache = target.prefill(text.prompt_ids, hidden_layers)
    yield cache.hidden
    ids = tuple(text.prompt_ids)
    for token in text.output_ids:
        logits = target.score(cache, ids[-1], TokenTree(), "tree")[0]
        cache.accept(())
        yield Place(ids, token, logits, cache.hidden)
        ids += (token,)


@dataclass(frozen=True)
class Walk:
    """What plain decoding, forced along a text of n tokens, makes of it. Scores are those whose argmax it would say
    (`Sampler.race`): processed logits, under sampling less the logarithm of the position's noise.

    `best` `[n, 2]` its two best tokens and `scores` `[n, 2]` theirs, `said` `[n]` the scores of the text's own tokens; `baseline`
    the score of the baseline's token where that first differs from the text (None: nowhere).
    """

    text: Text
    best: np.ndarray
    scores: np.ndarray
    said: np.ndarray
    baseline: float | None = None

    @property
    def choices(self) -> np.ndarray:
        """`[n]`: the token that plain decoding says at each position."""
        return self.best[:, 0]

    @property
    def deficits(self) -> np.ndarray:
        """`[n]`: delta_t = max l_t - l_t(z_t), how far the text's own token is behind the best one."""
        return self.scores[:, 0] - self.said


class WalkRecorder:
    """Collects a Walk, position by position."""

    def __init__(self, text: Text, sampler: Sampler) -> None:
        self._text, self._sampler = text, sampler
        self._best: list[list[int]] = []
        self._scores: list[list[float]] = []
        self._said: list[float] = []
        self._baseline: float | None = None

    def add(self, place: Place) -> None:
        race = self._sampler.race(place.ids, place.logits)
        top = race.topk(2)
        # `argmax`, as plain decoding takes it: among equals `topk` may name another first.
        choice = int(race.argmax())
        first, second = top.indices.tolist()
        other = second if choice == first else first
        if len(self._said) == self._text.baseline_fork and self._text.baseline_ids is not None:
            plain = self._text.baseline_ids[len(self._said) :][:1]
            self._baseline = float(race[plain[0]]) if plain else None
        self._best.append([choice, other])
        self._scores.append([float(race[choice]), float(race[other])])
        self._said.append(float(race[place.said]))

    def walk(self) -> Walk:
        best = np.array(self._best, dtype=np.int64).reshape(-1, 2)
        scores = np.array(self._scores, dtype=np.float64).reshape(-1, 2)
        return Walk(self._text, best, scores, np.array(self._said, dtype=np.float64), self._baseline)


def in_chunks(target: Target, text: Text, layout: Layout, width: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(all before it, logits) of every position of the output again: `width` nodes a forward, as chains that are all accepted."""
    cache, ids, left = target.prefill(text.prompt_ids), tuple(text.prompt_ids), list(text.output_ids)
    while left:
        nodes = left[: min(width, len(left) - 1)]
        logits = target.score(cache, ids[-1], TokenTree.chain(nodes), layout)
        cache.accept(tuple(range(len(nodes))))
        for row, token in zip(logits, left, strict=False):
            yield ids, row
            ids += (token,)
        left = left[len(logits) :]


def in_one_forward(target: Target, text: Text) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(all before it, logits) of every position of the output: the prompt in one forward, the output in another."""
    yield from in_chunks(target, text, "rows", len(text.output_ids))


def scores_at(
    positions: Iterator[tuple[tuple[int, ...], torch.Tensor]], sampler: Sampler, best: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The scores `[n, 2]` of a walk's two best tokens, scored in another way, and that way's own choices `[n]`."""
    scores, choices = [], []
    for (ids, logits), tokens in zip(positions, best.tolist(), strict=True):
        race = sampler.race(ids, logits)
        scores.append([float(race[token]) for token in tokens])
        choices.append(int(race.argmax()))
    return np.array(scores, dtype=np.float64).reshape(-1, 2), np.array(choices, dtype=np.int64)


def reference_of(target: Target) -> tuple[Target, str]:
    """A target of the same weights to ask in one forward when two ways disagree, and what it is called: a float32 copy of one in
    half precision, else the target itself (quantised weights in another arithmetic would be another model).
    """
    if target.dtype in FULL_PRECISION or target.is_quantized:
        return target, "the target itself, in one forward"
    model: PreTrainedModel = copy.deepcopy(target.model).float()
    return Target(model, target.tokenizer), "a float32 copy of the target, in one forward"
