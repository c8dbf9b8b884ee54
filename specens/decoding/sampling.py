"""Logits -> processed scores -> token, with keyed noise. The only place where randomness enters; no global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LogitsProcessorList

from specens.decoding.types import ROOT, TokenTree


class KeyedNoise:
    """E_t: one independent Exp(1) number per vocabulary entry and absolute position, a pure function of
    (seed, prompt key, position).

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is counter based, so a position's noise does
    not depend on which positions, drafters or prompts were asked before. A shorter vocabulary gets a prefix of the same
    numbers, so models with padded embeddings still share their noise.
    """

    def __init__(self, seed: int, prompt_key: str) -> None:
        digest = hashlib.sha256(f"{seed}\x00{prompt_key}".encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype=np.uint64)
        self._last: tuple[int, np.ndarray] | None = None

    def log_exponential(self, position: int, size: int) -> torch.Tensor:
        """log E_t, float64 `[size]` on the CPU."""
        if self._last is None or self._last[0] != position or len(self._last[1]) < size:
            generator = np.random.Philox(key=self._key, counter=np.array([0, 0, position, 0], dtype=np.uint64))
            bits = generator.random_raw(size) >> np.uint64(11)
            uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), so the double logarithm is finite
            self._last = (position, np.log(-np.log(uniform)))
        return torch.from_numpy(self._last[1][:size])


class Sampler:
    """One prompt's choice of tokens: the processors of plain decoding, then argmax or the exponential race.

    `pick` is the whole definition of "what the target would have said": the verifier uses it on the target's logits, and a
    drafter that samples uses it on its own, with the same noise, which lifts the rate at which the two agree.
    """

    def __init__(self, processors: LogitsProcessorList | None = None, noise: KeyedNoise | None = None) -> None:
        self._processors = processors or LogitsProcessorList()
        self._noise = noise

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the bare logits: a whole tree can be picked in one call."""
        return self._noise is None and not self._processors

    def scores(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The processed scores `[vocab]` (fp32, a copy) that follow `prefix_ids`, from logits `[vocab]`."""
        scores = logits.to(torch.float32, copy=True)[None]
        if self._processors:
            prefix = torch.tensor([list(prefix_ids)], device=scores.device)
            scores = self._processors(prefix, scores)  # pyright: ignore[reportArgumentType]
        return scores[0]

    def race(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The scores whose argmax is chosen: processed ones, under sampling log p - log E_t up to a constant, with
        t = len(prefix_ids), the position of the token to come.
        """
        scores = self.scores(prefix_ids, logits)
        if self._noise is None:
            return scores
        noise = self._noise.log_exponential(len(prefix_ids), scores.shape[-1])
        return scores.double() - noise.to(scores.device)

    def pick(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> int:
        """The token chosen after `prefix_ids`: `argmax` of the scores, or `argmin_x E_t[x] / probs[x]`."""
        return int(self.race(prefix_ids, logits).argmax())

    def margin(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> float:
        """How far the chosen token is ahead of the next best, in logits: a fork at a tiny margin is rounding."""
        best, second = self.race(prefix_ids, logits).topk(2).values.tolist()
        return best - second

    def pick_over(self, context_ids: Sequence[int], tree: TokenTree, logits: torch.Tensor) -> Callable[[int], int]:
        """A `Pick` for the verifier over logits `[num_nodes + 1, vocab]`, row 0 the root's.

        Bare greedy takes all rows at once, one read from the device; otherwise only the nodes that the walk reaches are
        processed, each with its own full prefix.
        """
        if self.is_plain_greedy:
            tokens = logits.argmax(-1).tolist()
            return lambda node: tokens[node + 1]

        def pick(node: int) -> int:
            path = [] if node == ROOT else [tree.token_ids[n] for n in tree.path_to(node)]
            return self.pick([*context_ids, *path], logits[node + 1])

        return pick
