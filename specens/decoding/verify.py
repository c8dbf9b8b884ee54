"""(tree, the target's choice at each node) -> Verdict. Pure: the randomness is inside the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specens.decoding.types import ROOT, TokenTree, Verdict

Pick = Callable[[int], int]
"""node (or ROOT) -> the token that the target itself chooses after it, from its own logits and the shared noise."""


class Verifier(Protocol):
    """The acceptance rule."""

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's exact law."""
        ...

    def __call__(self, tree: TokenTree, pick: Pick) -> Verdict: ...


@dataclass(frozen=True)
class Coupled:
    """Sample, then match: draw the target's token once per distinct prefix and walk to the child equal to it.

    The token is a function of the target's logits and of noise that never looks at the drafts, so any drafts, duplicates
    and prunings leave the output unchanged, token for token; temperature 0 is the special case of argmax. With the noise
    shared by drafter and target this is the Gumbel coupling of Daliri et al., "Coupling without Communication and
    Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).
    """

    lossless = True

    def __call__(self, tree: TokenTree, pick: Pick) -> Verdict:
        children = tree.children()
        path: list[int] = []
        node = ROOT
        while True:
            token = pick(node)
            child = children.get(node, {}).get(token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child
