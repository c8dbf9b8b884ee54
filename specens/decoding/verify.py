"""(tree, the target's scores at its nodes) -> Verdict. Pure: all randomness comes through the
scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specens.decoding.types import ROOT, SampledNode, TokenTree, Verdict
from specens.errors import check_number


class NodeScores(Protocol):
    """What a verifier may know of the target at a node (or ROOT), and its only source of
    randomness. (Tests put in one that goes through all outcomes.)
    """

    def target_token(self, node: int) -> int:
        """The token that AR decoding outputs after the node."""
        ...

    def target_probs(self, node: int) -> torch.Tensor:
        """The distribution that it is sampled from, after all processors: `[vocab]`, float64. At
        temperature 0 all on the best token.
        """
        ...

    def flip(self, node: int, probability: float, turn: int) -> bool:
        """True with a probability; another `turn` at a node is another coin."""
        ...

    def sample(self, node: int, probs: torch.Tensor) -> int:
        """A token sampled from `probs`. Once at a node: a second one would not be independent."""
        ...


class Verifier(Protocol):
    """The acceptance rule."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in records."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's exact distribution."""
        ...

    @property
    def coupled(self) -> bool:
        """Whether drafters that sample share the target's noise, and the output for a seed is that
        of AR decoding. If not, each samples with noise of its own, and reports its `draft_probs`.
        """
        ...

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict: ...


@dataclass(frozen=True)
class Coupled:
    """Sample, then match: sample the target's token once per distinct prefix and walk to the child
    equal to it.

    The token is a function of the target's logits and of noise that never depends on the drafts, so
    any drafts, duplicates and prunings leave the output unchanged, token for token; temperature 0
    is the special case of argmax. With the noise shared by drafter and target this is the Gumbel
    coupling of Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative
    Decoding" (arXiv 2408.07978).
    """

    name = "coupled"
    lossless = coupled = True

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        children = tree.children()
        path: list[int] = []
        node = ROOT
        while True:
            token = scores.target_token(node)
            child = children.get(node, {}).get(token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child


@dataclass(frozen=True)
class Residual:
    """Rejection sampling with residuals: at each node the sampled tokens are tested in turn, each
    with the distribution that it was really sampled from, and a rejection leaves the residual of
    the target's distribution. The last residual is sampled, and if that token was proposed as a
    deterministic one, the walk goes on there too.

    The chain of tests is multi-step speculative sampling (Miao et al., "SpecInfer", arXiv
    2305.09781, section 4.3), with one drafter and one token that of Leviathan et al. (arXiv
    2211.17192). Sampled tokens come first and deterministic ones last, which is optimal for one
    sampled token beside any set of deterministic ones (Hu et al., arXiv 2502.18779). The output has
    the target's exact distribution, if no order and no pruning depended on sampled tokens: `merge`
    sees to that.
    """

    name = "residual"
    lossless = True
    coupled = False

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        children, samples = tree.children(), _by_parent(tree)
        path: list[int] = []
        node = ROOT
        while True:
            probs = scores.target_probs(node)
            for turn, sample in enumerate(samples.get(node, ())):
                # Also if an equal token was rejected before: the test then fails, and its residual
                # has to be taken.
                chance = acceptance(probs, sample.draft_probs, tree.token_ids[sample.node])
                if scores.flip(node, chance, turn):
                    child = sample.node
                    break
                probs = residual(probs, sample.draft_probs)
            else:
                token = scores.sample(node, probs)
                found = children.get(node, {}).get(token)
                if found is None:
                    return Verdict(tuple(path), token)
                child = found
            path.append(child)
            node = child


@dataclass(frozen=True)
class Block:
    """Block verification (Sun et al., arXiv 2403.10444, Algorithm 2) of a draft that is one sampled
    chain: its tokens are judged together, and the longest beginning that passes is kept, which
    accepts more of them than testing one after another. Any other draft, of several members or with
    deterministic tokens, is verified as by `Residual` (judging whole rows jointly accepts less
    there, as rows then cannot share a beginning; see experiments/08-proof).
    """

    name = "block"
    lossless = True
    coupled = False

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        if not tree.is_sampled_chain:
            return Residual()(tree, scores)
        path, kept = tuple(range(len(tree))), 0
        left = probs = scores.target_probs(ROOT)
        weight = 1.0  # a_i: how much of the chain's probability is wanted
        for i, sample in enumerate(tree.samples):
            token = tree.token_ids[i]
            ratio = float(probs[token]) / max(float(sample.draft_probs[token]), 1e-300)
            weight = min(1.0, weight * ratio)
            probs = scores.target_probs(i)
            if i + 1 < len(tree):
                rest = (weight * probs - tree.samples[i + 1].draft_probs).clamp_min(0)
                total = float(rest.sum())
                passes = total / (total + 1 - weight) if total + 1 - weight > 0 else 1.0
                rest = rest / total if total > 0 else probs
            else:
                passes, rest = weight, probs
            # No early end: a longer beginning may pass where this one does not.
            if scores.flip(i, passes, 0):
                kept, left = i + 1, rest
        if kept == 0:
            left = residual(left, tree.samples[0].draft_probs)
        return Verdict(path[:kept], scores.sample(kept - 1, left))


@dataclass(frozen=True)
class Typical:
    """Lossy. Accepts a token whose probability is above min(epsilon, delta * exp(-entropy)), and of
    all runs of accepted tokens keeps the longest, the likelier of two as long: Medusa's typical
    acceptance (Cai et al., arXiv 2401.10774, section 2.3.1). The text is not the target's own, but
    one that it finds plausible; at temperature 0 it is the target's own.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name = "typical"
    lossless = coupled = False

    def __post_init__(self) -> None:
        check_number("verifier.epsilon", self.epsilon, above=True, most=1.0)
        check_number("verifier.delta", self.delta, above=True, most=1.0)

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        children = tree.children()
        best, best_rank = ROOT, (0, 0.0)
        waiting = [(ROOT, 0, 0.0)]
        while waiting:
            node, depth, likelihood = waiting.pop()
            if (depth, likelihood) > best_rank:
                best, best_rank = node, (depth, likelihood)
            if node not in children:
                continue
            probs = scores.target_probs(node)
            entropy = float(torch.special.entr(probs).sum())
            threshold = min(self.epsilon, self.delta * math.exp(-entropy))
            for token, child in children[node].items():
                if float(probs[token]) > threshold:
                    waiting.append((child, depth + 1, likelihood + math.log(float(probs[token]))))
        return Verdict(tree.path_to(best), scores.target_token(best))


@dataclass(frozen=True)
class PerRow:
    """Biased, for negative controls: every member's row is tested by itself, and the longest is
    kept. It would be exact with one row; but every row spends the same probability again, so with
    several rows tokens that the drafters favour come out too often. At temperature 0 it is exact.
    """

    name = "per_row"
    lossless = coupled = False

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        known = {(sample.owner, sample.node): sample.draft_probs for sample in tree.samples}
        num_members = max(tree.owners, default=0).bit_length()
        verdicts = [self._row(tree, scores, known, owner) for owner in range(num_members)]
        if not verdicts:
            return Verdict((), scores.sample(ROOT, scores.target_probs(ROOT)))
        return max(verdicts, key=lambda verdict: len(verdict.path))

    def _row(
        self, tree: TokenTree, scores: NodeScores, known: dict[tuple[int, int], Any], owner: int
    ) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            own = [
                n
                for n in range(len(tree))
                if tree.parents[n] == node and tree.owners[n] >> owner & 1
            ]
            probs = scores.target_probs(node)
            if not own:
                return Verdict(tuple(path), scores.sample(node, probs))
            token = tree.token_ids[own[0]]
            draft_probs = known.get((owner, own[0]))
            if draft_probs is None:
                draft_probs = torch.zeros_like(probs)
                draft_probs[token] = 1.0
            if not scores.flip(node, acceptance(probs, draft_probs, token), owner):
                left = residual(probs, draft_probs)
                return Verdict(tuple(path), scores.sample(node, left))
            path.append(own[0])
            node = own[0]


def acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor, token: int) -> float:
    """The probability that a sampled token is accepted: min(1, target_probs / draft_probs)."""
    wanted, sampled = float(target_probs[token]), float(draft_probs[token])
    return min(1.0, wanted / sampled) if sampled > 0 else float(wanted > 0)


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """The distribution to sample after a rejection: (target_probs - draft_probs)+, normalised. When
    the two are equal, a rejection has probability 0, and what rounding makes of it does not matter.
    """
    left = (target_probs - draft_probs).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else target_probs


def _by_parent(tree: TokenTree) -> dict[int, list[SampledNode]]:
    table: dict[int, list[SampledNode]] = {}
    for sample in tree.samples:
        table.setdefault(tree.parents[sample.node], []).append(sample)
    return table
