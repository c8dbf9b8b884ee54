"""Logits -> processed scores -> token, with keyed noise. The only place where randomness enters; no global generator."""

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
    """All randomness of one prompt comes through these. Production passes a KeyedNoise; tests pass one that goes through every
    outcome and its probability.
    """

    def choice(self, scores: torch.Tensor, position: int) -> int:
        """A token drawn from softmax(scores), for a position of the text. The same position gives the same noise."""
        ...

    def race(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """`[vocab]`, whose argmax `choice` takes. For noise that can be known beforehand, which is what sharing it needs."""
        ...

    def flip(self, probability: float, position: int, turn: int) -> bool:
        """True with a probability; each (position, turn) is a coin of its own."""
        ...

    def fork(self, name: str) -> Noise:
        """Noise that is independent of this one, and of forks of other names."""
        ...


class KeyedNoise:
    """E_t: one independent Exp(1) number per vocabulary entry and absolute position, a pure function of
    (seed, prompt key, position).

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is counter based, so a position's noise does
    not depend on which positions, drafters or prompts were asked before. A shorter vocabulary gets a prefix of the same
    numbers, so models with padded embeddings still share their noise.
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
        if self._last is None or self._last[0] != position or len(self._last[1]) < size:
            self._last = (position, np.log(-np.log(self._uniform(position, 0, size))))
        return torch.from_numpy(self._last[1][:size])

    def choice(self, scores: torch.Tensor, position: int) -> int:
        """The exponential race: argmin_x E_t[x] / probs[x]."""
        return int(self.race(scores, position).argmax())

    def race(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """scores - log E_t, float64 `[vocab]`, whose argmax is chosen."""
        return scores.double() - self.log_exponential(position, scores.shape[-1]).to(scores.device)

    def flip(self, probability: float, position: int, turn: int) -> bool:
        return bool(self._uniform(position, 1 + turn, 1)[0] < probability)

    def _uniform(self, position: int, use: int, size: int) -> np.ndarray:
        """Numbers in (0, 1), never 0 or 1, so that the double logarithm is finite."""
        generator = np.random.Philox(key=self._key, counter=np.array([0, 0, position, use], dtype=np.uint64))
        bits = generator.random_raw(size) >> np.uint64(11)
        return (bits.astype(np.float64) + 0.5) * 2.0**-53


class Sampler:
    """One prompt's choice of tokens: the processors of plain decoding, then argmax or a draw.

    `pick` is the whole definition of "what the target would have said": the verifier uses it on the target's logits, and a
    drafter uses `draw` on its own. With `coupled`, drafters draw with the target's own noise, which lifts the rate at which
    the two agree; otherwise each draws with noise of its own (`fork`) and tells from which law.
    """

    def __init__(
        self, processors: LogitsProcessorList | None = None, noise: Noise | None = None, *, coupled: bool = True
    ) -> None:
        self._processors = processors or LogitsProcessorList()
        self._noise = noise
        self._coupled = coupled

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the bare logits: a whole tree can be picked in one call."""
        return self._noise is None and not self._processors

    @property
    def tells_laws(self) -> bool:
        """Whether drafters draw with noise of their own, so that a verifier has to know their laws."""
        return self._noise is not None and not self._coupled

    def fork(self, name: str) -> Sampler:
        """The sampler of a drafter: this one if its noise is to be shared, else one with independent noise."""
        if self._noise is None or self._coupled:
            return self
        return Sampler(self._processors, self._noise.fork(name), coupled=False)

    def scores(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The processed scores `[vocab]` (fp32, or float64 where the logits are; a copy) that follow `prefix_ids`, from logits
        `[vocab]`.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)[None]
        if self._processors:
            prefix = torch.tensor([list(prefix_ids)], device=scores.device)
            scores = self._processors(prefix, scores)  # pyright: ignore[reportArgumentType]
        return scores[0]

    def race(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The scores whose argmax `pick` chooses: processed ones, under sampling log p - log E_t up to a constant, with
        t = len(prefix_ids), the position of the token to come.
        """
        scores = self.scores(prefix_ids, logits)
        return scores if self._noise is None else self._noise.race(scores, len(prefix_ids))

    def rank(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """What a drafter should order its guesses by: the race itself where its noise is the target's, else the scores, which
        are known before anything is drawn.
        """
        return self.scores(prefix_ids, logits) if self.tells_laws else self.race(prefix_ids, logits)

    def pick(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> int:
        """The token chosen after `prefix_ids`: `argmax` of the scores, or `argmin_x E_t[x] / probs[x]`."""
        scores = self.scores(prefix_ids, logits)
        return int(scores.argmax()) if self._noise is None else self._noise.choice(scores, len(prefix_ids))

    def draw(
        self, prefix_ids: Sequence[int], logits: torch.Tensor, count: int = 1
    ) -> list[tuple[int, torch.Tensor | None]]:
        """What a drafter proposes after `prefix_ids`: `count` different tokens, the one chosen and the next best, each with the
        law `[vocab]` (float64) it was drawn from given those before it; None when nobody has to know it. Fewer than `count`
        if the law allows no more. (Removing the winner of a race and looking again draws without replacement: the
        Gumbel-top-k trick, Kool et al., arXiv 1903.06059.)
        """
        if not self.tells_laws:
            if count == 1:
                return [(self.pick(prefix_ids, logits), None)]
            return [(token, None) for token in self.race(prefix_ids, logits).topk(count).indices.tolist()]
        assert self._noise is not None
        left, drawn = self.scores(prefix_ids, logits).double(), []
        for _ in range(min(count, int(torch.isfinite(left).sum()))):
            token = self._noise.choice(left, len(prefix_ids))
            drawn.append((token, left.softmax(-1)))
            left = left.index_fill(0, torch.tensor(token, device=left.device), -torch.inf)
        return drawn

    def probs(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The law of `pick`, float64 `[vocab]`; at temperature 0 all on one token."""
        scores = self.scores(prefix_ids, logits).double()
        if self._noise is None:
            return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
        return scores.softmax(-1)

    def flip(self, probability: float, position: int, turn: int) -> bool:
        """True with a probability, keyed by (position, turn)."""
        return probability >= 1 or (
            probability > 0 and self._noise is not None and self._noise.flip(probability, position, turn)
        )

    def choice(self, probs: torch.Tensor, position: int) -> int:
        """A token from `probs`, with the noise of a position."""
        return int(probs.argmax()) if self._noise is None else self._noise.choice(probs.log(), position)

    def margin(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> float:
        """How far the chosen token is ahead of the next best, in logits: a fork at a tiny margin is rounding."""
        best, second = self.race(prefix_ids, logits).topk(2).values.tolist()
        return best - second


class TreeAnswers:
    """What the target says at the nodes of one scored tree (`verify.Answers`): its logits `[num_nodes + 1, vocab]`, row 0 the
    root's, each through the processors with its node's own full prefix. Only the nodes that are asked about are processed;
    bare greedy takes all at once, in one read from the device.
    """

    def __init__(self, sampler: Sampler, context_ids: Sequence[int], tree: TokenTree, logits: torch.Tensor) -> None:
        self._sampler, self._context, self._tree, self._logits = sampler, context_ids, tree, logits

    @cached_property
    def _greedy(self) -> list[int]:
        return self._logits.argmax(-1).tolist()

    def pick(self, node: int) -> int:
        if self._sampler.is_plain_greedy:
            return self._greedy[node + 1]
        return self._sampler.pick(self._prefix(node), self._logits[node + 1])

    def probs(self, node: int) -> torch.Tensor:
        return self._sampler.probs(self._prefix(node), self._logits[node + 1])

    def flip(self, node: int, probability: float, turn: int) -> bool:
        # Coins are the step's own: a verifier may flip some at positions that it then does not emit.
        return self._sampler.flip(probability, len(self._context), turn * (len(self._tree) + 1) + node + 1)

    def choice(self, node: int, probs: torch.Tensor) -> int:
        return self._sampler.choice(probs, self._position(node))

    def margins(self, commit: Commit) -> tuple[float, ...]:
        """How far each emitted token was ahead of the next best: those of the path, and the target's own."""
        nodes = (ROOT, *commit.path)[: len(commit.token_ids)]
        return tuple(self._sampler.margin(self._prefix(node), self._logits[node + 1]) for node in nodes)

    def _position(self, node: int) -> int:
        return len(self._context) + (0 if node == ROOT else self._tree.depths[node])

    def _prefix(self, node: int) -> list[int]:
        path = [] if node == ROOT else [self._tree.token_ids[n] for n in self._tree.path_to(node)]
        return [*self._context, *path]
