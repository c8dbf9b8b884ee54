"""From a member's confidences to calibrated probabilities, by how often they came true so far."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from specens.decoding.budgets.tuning import TUNING

NUM_BINS = len(TUNING.confidence_edges) + 1


@dataclass
class Calibration:
    """How often a member's confidences come true, together and by bin; all counts decay by step.

    The calibrated probability of a confidence c in bin b is

        (hits_b + k min(c r, 1)) / (tries_b + k),   r = (all_hits + m) / (total + m)

    where `total` is the sum of all confidences, with the priors k = `bin_prior` and m =
    `member_prior`: the share of hits in the bin, shrunk towards c times the member's overall ratio
    of hits to confidences.
    """

    hits: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    tries: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    all_hits: float = 0.0
    total: float = 0.0
    steps: int = 0
    """Since the counts last decayed: a member that is idle costs no time."""

    def probability(self, confidence: float) -> float:
        self._decay()
        place, prior = bisect_right(TUNING.confidence_edges, confidence), TUNING.bin_prior
        member = TUNING.member_prior
        expected = confidence * (self.all_hits + member) / (self.total + member)
        return (self.hits[place] + prior * min(expected, 1.0)) / (self.tries[place] + prior)

    def learn(self, confidence: float, is_hit: bool) -> None:
        self._decay()
        place = bisect_right(TUNING.confidence_edges, confidence)
        self.hits[place] += is_hit
        self.tries[place] += 1
        self.all_hits += is_hit
        self.total += confidence

    def _decay(self) -> None:
        if self.steps:
            left, self.steps = TUNING.decay**self.steps, 0
            self.hits = [left * count for count in self.hits]
            self.tries = [left * count for count in self.tries]
            self.all_hits *= left
            self.total *= left
