"""The constants of budget=cost_aware, in one place (docs/budgets.md has the formulas)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """None of these is an option: a run's record then need not hold them."""

    confidence_edges: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    """Confidences between two of these are calibrated together, as one bin."""

    bin_prior: float = 20.0
    """A confidence counts for as many observations of its bin."""

    member_prior: float = 0.5
    """That a member's confidences are right on average counts for as many hits."""

    decay: float = 0.98
    """Weight of an observation after one more step: texts change."""

    default_confidence: tuple[float, float] = (0.5, 0.8)
    """Of a member without confidences: the probability at depth 1, and its factor per depth."""

    agreement: float = 0.5
    """How far a second member that proposes a node moves its probability towards certainty; 1 would
    take members for independent.
    """

    smoothing: float = 0.5
    """Weight of the newest step in the running gain, depth and width."""

    optimistic_hit_rate: float = 0.8
    """Of a member that never drafted: the chance to be right at each depth, an optimistic estimate.
    If not even that would pay for its draft, it is not tried.
    """

    probe_shares: tuple[float, float] = (0.01, 0.001)
    """Share of the decoding time that may go into probing a member without gain: it begins with the
    first, and is halved by every probe without gain, down to the second.
    """

    guard_steps: float = 3.0
    guard_share: float = 0.01
    """Drafting may lose so many AR steps in a text, and this share of its time."""

    guard_credit: float = 4.0
    """Of what drafting has gained, so many AR steps count against later losses."""


TUNING = Tuning()


def default_confidence(depth: int) -> float:
    """What counts as the confidence of a member that reports none, at this depth."""
    first, factor = TUNING.default_confidence
    return first * factor ** (depth - 1)
