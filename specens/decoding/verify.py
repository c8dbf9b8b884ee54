"""(tree, what the target says at its nodes) -> Verdict. Pure: all randomness comes through the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specens.decoding.types import ROOT, Drawn, TokenTree, Verdict
from specens.errors import check_number


class Answers(Protocol):
    """What a verifier may ask of the target at a node (or ROOT), and its only source of randomness. (Tests put in one that
    goes through all outcomes.)
    """

    def pick(self, node: int) -> int:
        """The token that plain decoding says after the node."""
        ...

    def probs(self, node: int) -> torch.Tensor:
        """The law it is drawn from, after all processors: `[vocab]`, float64. Temperature 0: all on the best token."""
        ...

    def flip(self, node: int, probability: float, turn: int) -> bool:
        """True with a probability; another `turn` at a node is another coin."""
        ...

    def choice(self, node: int, probs: torch.Tensor) -> int:
        """A token drawn from `probs`. Once at a node: a second draw would not be independent."""
        ...


class Verifier(Protocol):
    """The acceptance rule."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in records."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's exact law."""
        ...

    @property
    def coupled(self) -> bool:
        """Whether drafters that sample share the target's noise, and the output for a seed is that of plain decoding. If not,
        each draws with noise of its own, and says from which law.
        """
        ...

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict: ...


@dataclass(frozen=True)
class Coupled:
    """Sample, then match: draw the target's token once per distinct prefix and walk to the child equal to it.

    The token is a function of the target's logits and of noise that never looks at the drafts, so any drafts, duplicates
    and prunings leave the output unchanged, token for token; temperature 0 is the special case of argmax. With the noise
    shared by drafter and target this is the Gumbel coupling of Daliri et al., "Coupling without Communication and
    Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).
    """

    name = "coupled"
    lossless = coupled = True

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict:
        children = tree.children()
        path: list[int] = []
        node = ROOT
        while True:
            token = answers.pick(node)
            child = children.get(node, {}).get(token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child


@dataclass(frozen=True)
class Residual:
    """Test, and go on with what is left: at each node the drawn tokens are tested in turn, each with the law it was really
    drawn from, and a rejection leaves the residual of the target's law. What is left in the end is drawn from, and if that
    token was proposed (for certain, so without a law), the walk goes on there too.

    The chain of tests is multi-step speculative sampling (Miao et al., "SpecInfer", arXiv 2305.09781, section 4.3), with one
    drafter and one token that of Leviathan et al. (arXiv 2211.17192). Drawn tokens come first and certain ones last, which is
    optimal for one drawn token beside any set of certain ones (Hu et al., arXiv 2502.18779). The output has the target's
    exact law, if no order and no pruning looked at drawn tokens: `merge` sees to that.
    """

    name = "residual"
    lossless = True
    coupled = False

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict:
        children, draws = tree.children(), _by_parent(tree)
        path: list[int] = []
        node = ROOT
        while True:
            probs = answers.probs(node)
            for turn, drawn in enumerate(draws.get(node, ())):
                # Also if an equal token was rejected before: the test is then lost, and its residual has to be taken.
                if answers.flip(node, acceptance(probs, drawn.law, tree.token_ids[drawn.node]), turn):
                    child = drawn.node
                    break
                probs = residual(probs, drawn.law)
            else:
                token = answers.choice(node, probs)
                found = children.get(node, {}).get(token)
                if found is None:
                    return Verdict(tuple(path), token)
                child = found
            path.append(child)
            node = child


@dataclass(frozen=True)
class Block:
    """Block verification (Sun et al., arXiv 2403.10444, Algorithm 2) of a draft that is one drawn row: its tokens are judged
    together, and the longest beginning that passes is kept, which accepts more of them than testing one after another. Any
    other draft, of several members or with certain tokens, is verified like `Residual` does it (where judging whole rows jointly
    accepts less, as rows then cannot share a beginning; see experiments/08-proof).
    """

    name = "block"
    lossless = True
    coupled = False

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict:
        if not tree.is_drawn_row:
            return Residual()(tree, answers)
        path, kept = tuple(range(len(tree))), 0
        left = probs = answers.probs(ROOT)
        weight = 1.0  # a_i: how much of the row's probability is wanted
        for i, drawn in enumerate(tree.draws):
            ratio = float(probs[tree.token_ids[i]]) / max(float(drawn.law[tree.token_ids[i]]), 1e-300)
            weight = min(1.0, weight * ratio)
            probs = answers.probs(i)
            if i + 1 < len(tree):
                rest = (weight * probs - tree.draws[i + 1].law).clamp_min(0)
                total = float(rest.sum())
                passes = total / (total + 1 - weight) if total + 1 - weight > 0 else 1.0
                rest = rest / total if total > 0 else probs
            else:
                passes, rest = weight, probs
            if answers.flip(i, passes, 0):  # no early end: a later beginning may pass where this one does not
                kept, left = i + 1, rest
        if kept == 0:
            left = residual(left, tree.draws[0].law)
        return Verdict(path[:kept], answers.choice(kept - 1, left))


@dataclass(frozen=True)
class Typical:
    """Lossy. Accepts a token whose probability is above min(epsilon, delta * exp(-entropy)), and of all runs of accepted
    tokens keeps the longest, the likelier of two as long: Medusa's typical acceptance (Cai et al., arXiv 2401.10774, section
    2.3.1). The text is not the target's own, but one that it finds plausible; at temperature 0 it is the target's own.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name = "typical"
    lossless = coupled = False

    def __post_init__(self) -> None:
        check_number("verifier.epsilon", self.epsilon, above=True, most=1.0)
        check_number("verifier.delta", self.delta, above=True, most=1.0)

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict:
        children = tree.children()
        best, best_rank = ROOT, (0, 0.0)
        waiting = [(ROOT, 0, 0.0)]
        while waiting:
            node, depth, likelihood = waiting.pop()
            if (depth, likelihood) > best_rank:
                best, best_rank = node, (depth, likelihood)
            if node not in children:
                continue
            probs = answers.probs(node)
            threshold = min(self.epsilon, self.delta * math.exp(-float(torch.special.entr(probs).sum())))
            for token, child in children[node].items():
                if float(probs[token]) > threshold:
                    waiting.append((child, depth + 1, likelihood + math.log(float(probs[token]))))
        return Verdict(tree.path_to(best), answers.pick(best))


@dataclass(frozen=True)
class PerRow:
    """Biased, for negative controls: every member's row is tested by itself, and the longest is kept. It looks right, and
    would be with one row; but every row spends the same probability again, so with several rows tokens that the drafters
    like come out too often. At temperature 0 it is exact.
    """

    name = "per_row"
    lossless = coupled = False

    def __call__(self, tree: TokenTree, answers: Answers) -> Verdict:
        laws = {(drawn.owner, drawn.node): drawn.law for drawn in tree.draws}
        num_members = max(tree.owners, default=0).bit_length()
        verdicts = [self._row(tree, answers, laws, owner) for owner in range(num_members)]
        if not verdicts:
            return Verdict((), answers.choice(ROOT, answers.probs(ROOT)))
        return max(verdicts, key=lambda verdict: len(verdict.path))

    def _row(self, tree: TokenTree, answers: Answers, laws: dict[tuple[int, int], Any], owner: int) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            own = [n for n in range(len(tree)) if tree.parents[n] == node and tree.owners[n] >> owner & 1]
            probs = answers.probs(node)
            if not own:
                return Verdict(tuple(path), answers.choice(node, probs))
            token = tree.token_ids[own[0]]
            law = laws.get((owner, own[0]))
            if law is None:
                law = torch.zeros_like(probs)
                law[token] = 1.0
            if not answers.flip(node, acceptance(probs, law, token), owner):
                return Verdict(tuple(path), answers.choice(node, residual(probs, law)))
            path.append(own[0])
            node = own[0]


def acceptance(probs: torch.Tensor, law: torch.Tensor, token: int) -> float:
    """The probability with which a token drawn from `law` is accepted where `probs` is wanted: min(1, probs / law)."""
    wanted, drawn = float(probs[token]), float(law[token])
    return min(1.0, wanted / drawn) if drawn > 0 else float(wanted > 0)


def residual(probs: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """What is wanted after a token drawn from `law` was rejected: (probs - law)+, normalised. When the two are equal, a
    rejection has probability 0, and what rounding makes of it does not matter.
    """
    left = (probs - law).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else probs


def _by_parent(tree: TokenTree) -> dict[int, list[Drawn]]:
    table: dict[int, list[Drawn]] = {}
    for drawn in tree.draws:
        table.setdefault(tree.parents[drawn.node], []).append(drawn)
    return table
