"""Is the output identical to AR decoding's? The noise floor, the divergences that it explains, and
the verdict.

A divergence is attributed to floating-point rounding only if the logit gap is below twice the noise
floor, both token by token and in a higher-precision reference; otherwise it is reported as a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specens.audit.outputs import Output
from specens.audit.rescore import Rescored, in_chunks, reference_of
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target

IDENTICAL, ROUNDING, BUG = "identical", "explained by rounding", "BUG"

FLOAT32_ULPS = 4
"""The least noise floor, in float32 units of the last place of the largest score."""
CONTROL_ALPHA = 1e-4

RESCORING, BASELINE = "rescoring", "baseline"
"""Where the AR token of a divergence comes from."""


@dataclass(frozen=True)
class Divergence:
    """A position at which an output has another token than AR decoding outputs after the same
    prefix.

    `position` counts output tokens from 0; `ar_token` is AR decoding's by `source`, and `logit_gap`
    how far it is ahead of `output_token` token by token. In the reference: `reference_gap` between
    its two best tokens, `ar_rank` and `output_rank` (1: the best), and `shortfall`, how far the
    lower of the two tokens is below its best one.
    """

    prompt_id: str
    seed: int
    position: int
    output_token: int
    ar_token: int
    source: str
    logit_gap: float
    reference_gap: float = math.nan
    ar_rank: int = 0
    output_rank: int = 0
    shortfall: float = math.nan
    is_explained: bool = False


def noise_of(target: Target, found: Sequence[Rescored]) -> tuple[float, float]:
    """The noise floor over all positions, and its limit."""
    one_by_one = np.concatenate([one.scores for one in found])
    control = np.concatenate([one.control_scores for one in found])
    finite = np.abs(one_by_one[np.isfinite(one_by_one)])
    size = float(finite.max()) if len(finite) else 1.0
    epsilon = torch.finfo(torch.bfloat16 if target.is_quantized else target.dtype).eps
    with np.errstate(invalid="ignore"):
        floor = noise_floor(one_by_one - control, size, torch.finfo(target.dtype).eps)
    return floor, noise_limit(size, epsilon)


def noise_floor(differences: np.ndarray, size: float, epsilon: float) -> float:
    """The 99.9th percentile of the differences between the two best tokens' scores in forwards of
    one token and of several; at least one unit in the last place (`epsilon` relative) of scores of
    a `size`, and four of float32: a lower bound, so that a measured floor of 0 does not flag every
    rounding. Scores that a processor cut off (infinite) have no difference.
    """
    finite = np.abs(differences[np.isfinite(differences)])
    measured = float(np.quantile(finite, 0.999, method="higher")) if len(finite) else 0.0
    return max(measured, size * max(epsilon, FLOAT32_ULPS * torch.finfo(torch.float32).eps))


def noise_limit(size: float, epsilon: float) -> float:
    """The most that rounding can make of scores of a `size`: half of the digits. A noise floor
    above it is no rounding: the scores of several tokens in one forward are then not the target's
    own.
    """
    return size * math.sqrt(epsilon)


def is_explained(
    logit_gap: float, shortfall: float, floors: tuple[float, float], same_as_control: bool
) -> bool:
    """Whether rounding explains a divergence; `floors` are the noise floors of the rescoring and of
    the reference. Where a cut-off such as top-p removed a token there is no logit gap, and the
    control, which has no drafter, has to make the same choice.
    """
    if not math.isfinite(logit_gap) or not math.isfinite(shortfall):
        return same_as_control
    return logit_gap <= 2 * floors[0] and shortfall <= 2 * floors[1]


def rank(scores: torch.Tensor, token: int) -> int:
    """1 for the best token; equals share the better rank."""
    return 1 + int((scores > scores[token]).sum())


def divergences_of(
    target: Target, found: Sequence[Rescored], floor: float
) -> tuple[tuple[Divergence, ...], str | None]:
    """All divergences of all outputs, judged by a reference, made only if there are any."""
    wanted = [(one, places) for one in found if (places := _places(one))]
    if not wanted:
        return (), None
    reference, name = reference_of(target)
    judged: list[Divergence] = []
    for one, places in wanted:
        width = len(one.output.output_ids)
        rows = list(in_chunks(reference, one.output, one.sampler, "rows", width))
        floors = (floor, floor)
        if reference is not target:  # the copy's own distance from the target counts too
            pairs = zip(rows, one.best, strict=True)
            own = np.array([[float(row[token]) for token in best] for row, best in pairs])
            with np.errstate(invalid="ignore"):
                floors = (floor, max(floor, noise_floor(own - one.scores, 0.0, 0.0)))
        for place in places:
            same = int(one.control_choices[place.position]) == place.output_token
            judged.append(_judged(place, rows[place.position], floors, same_as_control=same))
    return tuple(judged), name


def _places(found: Rescored) -> list[Divergence]:
    """Where an output diverges, not yet judged by the reference."""
    output, gaps = found.output, found.deficits

    def place(at: int, ar_token: int, source: str, logit_gap: float) -> Divergence:
        token = output.output_ids[at]
        return Divergence(output.prompt_id, output.seed, at, token, ar_token, source, logit_gap)

    differs = np.flatnonzero(found.choices != np.array(output.output_ids, dtype=np.int64))
    places = [
        place(at, int(found.choices[at]), RESCORING, float(gaps[at])) for at in differs.tolist()
    ]
    at = output.baseline_divergence
    if at is not None and output.baseline_ids is not None and found.baseline_score is not None:
        token = output.baseline_ids[at]
        if all((one.position, one.ar_token) != (at, token) for one in places):
            gap = abs(found.baseline_score - float(found.output_scores[at]))
            places.append(place(at, token, BASELINE, gap))
    return places


def _judged(
    place: Divergence, scores: torch.Tensor, floors: tuple[float, float], *, same_as_control: bool
) -> Divergence:
    """A divergence with what the reference's `scores` `[vocab]` at its position make of it."""
    best, second = scores.topk(2).values.tolist()
    shortfall = best - min(float(scores[place.ar_token]), float(scores[place.output_token]))
    return replace(
        place,
        reference_gap=best - second,
        ar_rank=rank(scores, place.ar_token),
        output_rank=rank(scores, place.output_token),
        shortfall=shortfall,
        is_explained=is_explained(place.logit_gap, shortfall, floors, same_as_control),
    )


@dataclass(frozen=True)
class Deficits:
    """Of the deficits of all positions: the share above 0, the largest, and how many are above
    twice the noise floor, which must be none.
    """

    share: float
    largest: float
    num_beyond: int


def deficits_of(deficits: np.ndarray, floor: float) -> Deficits:
    if not len(deficits):
        return Deficits(0.0, 0.0, 0)
    num_beyond = int((deficits > 2 * floor).sum())
    return Deficits(float((deficits > 0).mean()), float(deficits.max()), num_beyond)


def end_fault(stop: StopRules, output: Output) -> str | None:
    """What is wrong with where an output ends, None if AR decoding would have ended it there and
    for the same reason.
    """
    num_tokens = len(output.output_ids)
    if not num_tokens:
        return "it is empty"
    ids, reason = list(output.prompt_ids), None
    for count, token in enumerate(output.output_ids, start=1):
        ids.append(token)
        reason = stop.reason(ids)
        if reason is not None and count < num_tokens:
            return f"it goes on after token {count}, where it ends ({reason})"
    if reason is None:
        return f"it ends after token {num_tokens}, where no stop rule does"
    if reason != output.finish_reason:
        return f"it ends for {reason}, but {output.finish_reason} is recorded"
    baseline_ids = output.baseline_ids or ()
    if output.baseline_divergence in (num_tokens, len(baseline_ids)):
        return f"it has {num_tokens} tokens, its recorded baseline {len(baseline_ids)}"
    return None


def more_than_control(num_divergences: int, num_control: int) -> bool:
    """Whether the run diverges more than twice as often as the control, AR decoding re-scored
    without a drafter over the same positions: the one-sided binomial test of `num_divergences`
    among all against 2/3, at a level of 1e-4.
    """
    total = num_divergences + num_control
    tail = range(num_divergences, total + 1)
    return sum(_binomial(total, count, 2 / 3) for count in tail) < CONTROL_ALPHA


def _binomial(total: int, count: int, p: float) -> float:
    log = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    return math.exp(log + count * math.log(p) + (total - count) * math.log1p(-p))


def identity_verdict(
    divergences: Sequence[Divergence],
    deficits: Deficits,
    *,
    faults: Sequence[str] = (),
    is_noise: bool = True,
    is_more: bool = False,
) -> str:
    """`identical` only without any divergence. A BUG: a divergence, an end or a deficit that
    rounding does not explain, more divergences than the control's, or a noise floor that is no
    rounding.
    """
    # A deficit beyond twice the floor is a divergence too, an explained one only where a cut-off
    # left no logit gap.
    cut_off = [one for one in divergences if one.source == RESCORING and math.isinf(one.logit_gap)]
    is_beyond = deficits.num_beyond > sum(one.is_explained for one in cut_off)
    are_explained = all(one.is_explained for one in divergences)
    if faults or is_beyond or is_more or not is_noise or not are_explained:
        return BUG
    return ROUNDING if divergences else IDENTICAL
