"""Is it the text that plain decoding writes? Definitions of the noise floor, of a fork that it explains, and of the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specens.decoding.stopping import StopRules
from specens.evidence.texts import Text

IDENTICAL, ROUNDING, BUG = "identical", "explained by rounding", "BUG"

FLOAT32_ULPS = 4
"""The least noise floor, in float32 units of the last place of the largest score."""
CONTROL_ALPHA = 1e-4


@dataclass(frozen=True)
class Fork:
    """A position at which a text has another token than plain decoding, forced along it, would say.

    `position` counts output tokens from 0; `said` is the text's token, `plain` the other one (`source`: the walk's, or the
    baseline's on file), `margin` how far `plain` is ahead in the walk. Of the reference: `gap` between its two best tokens,
    `plain_rank` and `said_rank` (1: the best), and `shortfall`, how far the lower of the two tokens is below its best one.
    """

    prompt_id: str
    seed: int
    position: int
    said: int
    plain: int
    source: str
    margin: float
    gap: float
    plain_rank: int
    said_rank: int
    shortfall: float
    is_explained: bool


def noise_floor(differences: np.ndarray, size: float, epsilon: float) -> float:
    """nu: the 99.9th percentile of |l_1 - l_n|, the differences of the two best tokens' scores between forwards of one token
    and of several; at least one unit in the last place (`epsilon` relative) of scores of a `size`, and four of float32, so that
    a floor measured as 0 condemns nobody. Scores that a processor cut off (infinite) have no difference.
    """
    finite = np.abs(differences[np.isfinite(differences)])
    measured = float(np.quantile(finite, 0.999, method="higher")) if len(finite) else 0.0
    return max(measured, size * max(epsilon, FLOAT32_ULPS * torch.finfo(torch.float32).eps))


def noise_limit(size: float, epsilon: float) -> float:
    """What rounding can make of scores of a `size` at the very most: half of the digits. A noise floor above it is no rounding:
    several tokens in one forward then get scores that are not the target's own.
    """
    return size * math.sqrt(epsilon)


def is_explained(
    margin: float, shortfall: float, floor: float, reference_floor: float, *, same_as_control: bool
) -> bool:
    """Whether rounding explains a fork: the two tokens are at most 2 nu apart in the walk, and both at most 2 nu below the best
    one of the reference, which makes them its two best unless several are as near. Where a cut-off such as top-p removed a
    token there is no margin, and the control, which has no drafter, has to make the same choice.
    """
    if not math.isfinite(margin) or not math.isfinite(shortfall):
        return same_as_control
    return margin <= 2 * floor and shortfall <= 2 * reference_floor


def rank(scores: torch.Tensor, token: int) -> int:
    """1 for the best token; equals share the better rank."""
    return 1 + int((scores > scores[token]).sum())


@dataclass(frozen=True)
class Deficits:
    """Of delta_t over all positions: the share above 0, the largest, and how many are above 2 nu, which must be none."""

    share: float
    largest: float
    num_beyond: int


def deficits_of(deltas: np.ndarray, floor: float) -> Deficits:
    if not len(deltas):
        return Deficits(0.0, 0.0, 0)
    return Deficits(float((deltas > 0).mean()), float(deltas.max()), int((deltas > 2 * floor).sum()))


def end_fault(stop: StopRules, text: Text) -> str | None:
    """What is wrong with where a text ends, None if plain decoding would have ended it there and for the same reason."""
    if not text.output_ids:
        return "it is empty"
    ids, reason = list(text.prompt_ids), None
    for count, token in enumerate(text.output_ids, start=1):
        ids.append(token)
        reason = stop.reason(ids)
        if reason is not None and count < len(text.output_ids):
            return f"it goes on after token {count}, where it ends ({reason})"
    if reason is None:
        return f"it ends after token {len(text.output_ids)}, where no stop rule does"
    if reason != text.finish_reason:
        return f"it ends for {reason}, and says {text.finish_reason}"
    if text.baseline_ids is not None and text.baseline_fork == min(len(text.output_ids), len(text.baseline_ids)):
        return f"it has {len(text.output_ids)} tokens, its baseline on file {len(text.baseline_ids)}"
    return None


def more_than_control(num_forks: int, num_control: int) -> bool:
    """Whether the run forks more than twice as often as plain decoding re-scored without a drafter over the same positions: the
    one-sided binomial test of `num_forks` among all forks against 2/3, at a level of 1e-4.
    """
    total = num_forks + num_control
    return sum(_binomial(total, count, 2 / 3) for count in range(num_forks, total + 1)) < CONTROL_ALPHA


def _binomial(total: int, count: int, p: float) -> float:
    log = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    return math.exp(log + count * math.log(p) + (total - count) * math.log1p(-p))


def identity_verdict(
    forks: Sequence[Fork], faults: Sequence[str], deficits: Deficits, *, is_noise: bool, is_more: bool
) -> str:
    """`identical` only without any fork. A BUG: a fork, an end or a deficit that rounding does not explain, more forks than
    the control's, or a noise floor that is no rounding.
    """
    # A deficit beyond 2 nu is a fork too: an explained one only where a cut-off left no margin.
    beyond = deficits.num_beyond - sum(
        fork.is_explained and fork.source == "walk" and math.isinf(fork.margin) for fork in forks
    )
    if faults or beyond > 0 or is_more or not is_noise or not all(fork.is_explained for fork in forks):
        return BUG
    return ROUNDING if forks else IDENTICAL
