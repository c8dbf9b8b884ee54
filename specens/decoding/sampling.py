"""Logits -> processed scores -> token, with keyed noise. The only place where randomness enters; no
global generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessorList

from specens.decoding.types import ROOT, Commit, TokenTree


class Noise(Protocol):
    """All randomness of one prompt comes through these. Production passes a KeyedNoise; tests pass
    one that goes through every outcome and its probability.
    """

    def choice(self, scores: torch.Tensor, position: int) -> int:
        """A token sampled from softmax(scores), for a position of the text. The same position gives
        the same noise.
        """
        ...

    def perturbed(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """`[vocab]`, whose argmax is `choice`. For noise that can be known beforehand, which is
        what sharing it needs.
        """
        ...

    def flip(self, probability: float, position: int, turn: int) -> bool:
        """True with a probability; each (position, turn) is a coin of its own."""
        ...

    def fork(self, name: str) -> Noise:
        """Noise that is independent of this one, and of forks of other names."""
        ...


class KeyedNoise:
    """E_t: one independent Exp(1) number per vocabulary entry and absolute position, a pure
    function of (seed, prompt key, position).

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is counter based, so
    a position's noise does not depend on which positions, drafters or prompts came before. A
    shorter vocabulary gets a prefix of the same numbers, so models with padded embeddings share
    their noise.
    """

    def __init__(self, seed: int, prompt_key: str) -> None:
        self._name = f"{seed}\x00{prompt_key}"
        digest = hashlib.sha256(self._name.encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype=np.uint64)
        self._last: tuple[int, np.ndarray] | None = None

    def fork(self, name: str) -> KeyedNoise:
        return KeyedNoise(0, f"{self._name}\x00{name}")

    def log_exponential(self, position: int, size: int) -> torch.Tensor:
        """log E_t, float64 `[size]` on the CPU."""
        last = self._last
        if last is None or last[0] != position or len(last[1]) < size:
            last = self._last = (position, np.log(-np.log(self._uniform(position, 0, size))))
        return torch.from_numpy(last[1][:size])

    def choice(self, scores: torch.Tensor, position: int) -> int:
        """The exponential race: argmin_x E_t[x] / probs[x]."""
        return int(self.perturbed(scores, position).argmax())

    def perturbed(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """scores - log E_t, float64 `[vocab]`: the Gumbel-perturbed scores."""
        noise = self.log_exponential(position, scores.shape[-1])
        return scores.double() - noise.to(scores.device)

    def flip(self, probability: float, position: int, turn: int) -> bool:
        return bool(self._uniform(position, 1 + turn, 1)[0] < probability)

    def _uniform(self, position: int, use: int, size: int) -> np.ndarray:
        """Numbers in (0, 1), never 0 or 1, so that the double logarithm is finite."""
        counter = np.array([0, 0, position, use], dtype=np.uint64)
        bits = np.random.Philox(key=self._key, counter=counter).random_raw(size) >> np.uint64(11)
        return (bits.astype(np.float64) + 0.5) * 2.0**-53


class Sampler:
    """One prompt's choice of tokens: the processors of AR decoding, then argmax or a sample.

    `choose` is the whole definition of the token that the target outputs: the verifier applies it
    to the target's logits, and a drafter uses `sample` on its own. With `coupled`, drafters sample
    with the target's own noise, which raises the rate at which the two agree; otherwise each
    samples with noise of its own (`fork`) and reports its `draft_probs`.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        noise: Noise | None = None,
        *,
        coupled: bool = True,
    ) -> None:
        self._processors = processors or LogitsProcessorList()
        self._noise = noise
        self._coupled = coupled

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the bare logits: a whole tree can be chosen in one call."""
        return self._noise is None and not self._processors

    @property
    def needs_draft_probs(self) -> bool:
        """Whether drafters sample with noise of their own, so that a verifier has to know the
        distributions that they sample from.
        """
        return self._noise is not None and not self._coupled

    def fork(self, name: str) -> Sampler:
        """The sampler of a drafter: this one if its noise is to be shared, else one with
        independent noise.
        """
        if self._noise is None or self._coupled:
            return self
        return Sampler(self._processors, self._noise.fork(name), coupled=False)

    def scores(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The processed scores `[vocab]` (fp32, or float64 where the logits are; a copy) that
        follow `prefix_ids`, from logits `[vocab]`.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(dtype, copy=True)[None]
        if self._processors:
            prefix = torch.tensor([list(prefix_ids)], device=scores.device)
            scores = self._processors(prefix, scores)  # pyright: ignore[reportArgumentType]
        return scores[0]

    def perturbed(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The scores whose argmax `choose` takes: processed ones, under sampling less log E_t, with
        t = len(prefix_ids), the position of the token to come.
        """
        scores = self.scores(prefix_ids, logits)
        return scores if self._noise is None else self._noise.perturbed(scores, len(prefix_ids))

    def rank(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """What a drafter should order its proposals by: the perturbed scores where its noise is the
        target's, else the scores, which are known before anything is sampled.
        """
        ordered = self.scores if self.needs_draft_probs else self.perturbed
        return ordered(prefix_ids, logits)

    def choose(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `prefix_ids`: argmax of the scores, or argmin_x E_t[x] / probs[x]."""
        scores = self.scores(prefix_ids, logits)
        if self._noise is None:
            return int(scores.argmax())
        return self._noise.choice(scores, len(prefix_ids))

    def sample(
        self, prefix_ids: Sequence[int], logits: torch.Tensor, count: int = 1
    ) -> list[tuple[int, torch.Tensor | None]]:
        """What a drafter proposes after `prefix_ids`: `count` different tokens, the chosen one and
        the next best, each with the distribution `[vocab]` (float64) that it was sampled from given
        those before it; None when nobody has to know it. Fewer than `count` if the distribution has
        no more tokens. (Removing the argmax of perturbed scores and taking the next samples without
        replacement: the Gumbel-top-k trick, Kool et al., arXiv 1903.06059.)
        """
        if not self.needs_draft_probs:
            if count == 1:
                return [(self.choose(prefix_ids, logits), None)]
            best = self.perturbed(prefix_ids, logits).topk(count).indices.tolist()
            return [(token, None) for token in best]
        assert self._noise is not None
        left, samples = self.scores(prefix_ids, logits).double(), []
        for _ in range(min(count, int(torch.isfinite(left).sum()))):
            token = self._noise.choice(left, len(prefix_ids))
            samples.append((token, left.softmax(-1)))
            left = left.index_fill(0, torch.tensor(token, device=left.device), -torch.inf)
        return samples

    def probs(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The distribution of `choose`, float64 `[vocab]`; at temperature 0 all on one token."""
        scores = self.scores(prefix_ids, logits).double()
        if self._noise is None:
            return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
        return scores.softmax(-1)

    def flip(self, probability: float, position: int, turn: int) -> bool:
        """True with a probability, keyed by (position, turn)."""
        if probability >= 1:
            return True
        is_open = probability > 0 and self._noise is not None
        return is_open and self._noise.flip(probability, position, turn)  # pyright: ignore

    def choice(self, probs: torch.Tensor, position: int) -> int:
        """A token from `probs`, with the noise of a position."""
        if self._noise is None:
            return int(probs.argmax())
        return self._noise.choice(probs.log(), position)

    def logit_gap(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> float:
        """How far the chosen token is ahead of the next best, in logits. At a tiny gap rounding may
        turn the choice.
        """
        best, second = self.perturbed(prefix_ids, logits).topk(2).values.tolist()
        return best - second


class TreeScores:
    """The target's scores at the nodes of one tree (`verify.NodeScores`): its logits
    `[num_nodes + 1, vocab]`, row 0 the root's, each through the processors with its node's own full
    prefix. Only the nodes that are looked at are processed; bare greedy takes all at once, in one
    read from the device.
    """

    def __init__(
        self, sampler: Sampler, context_ids: Sequence[int], tree: TokenTree, logits: torch.Tensor
    ) -> None:
        self._sampler, self._context, self._tree = sampler, context_ids, tree
        self._logits = logits

    @cached_property
    def _greedy(self) -> list[int]:
        return self._logits.argmax(-1).tolist()

    def target_token(self, node: int) -> int:
        if self._sampler.is_plain_greedy:
            return self._greedy[node + 1]
        return self._sampler.choose(self._prefix(node), self._logits[node + 1])

    def target_probs(self, node: int) -> torch.Tensor:
        return self._sampler.probs(self._prefix(node), self._logits[node + 1])

    def flip(self, node: int, probability: float, turn: int) -> bool:
        # Coins are the step's own: a verifier may flip some at positions that it does not emit.
        coin = turn * (len(self._tree) + 1) + node + 1
        return self._sampler.flip(probability, len(self._context), coin)

    def sample(self, node: int, probs: torch.Tensor) -> int:
        return self._sampler.choice(probs, self._position(node))

    def logit_gaps(self, commit: Commit) -> tuple[float, ...]:
        """Of each emitted token: those of the path, and the target's own."""
        nodes = (ROOT, *commit.path)[: len(commit.token_ids)]
        return tuple(
            self._sampler.logit_gap(self._prefix(node), self._logits[node + 1]) for node in nodes
        )

    def _position(self, node: int) -> int:
        return len(self._context) + (0 if node == ROOT else self._tree.depths[node])

    def _prefix(self, node: int) -> list[int]:
        path = [] if node == ROOT else [self._tree.token_ids[n] for n in self._tree.path_to(node)]
        return [*self._context, *path]
