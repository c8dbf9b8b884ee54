"""Two decodings of one prompt that take turns, each by a clock of its own. No torch: a lane only
asks for its next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from specens.decoding.types import StepRecord
from specens.models.detokenize import Pieces


class Steps(Protocol):
    """A decoding: its steps, made one by one, and the seconds of its prefill."""

    @property
    def prefill_s(self) -> float: ...

    def __iter__(self) -> Iterator[StepRecord]: ...

    def close(self) -> None: ...


class Lane:
    """One side of a race: its steps, what they wrote, and the seconds that they took.

    `clock_s` is time of decoding: prefill is apart (`prefill_s`), and so is all that happens
    between its steps. `settle` waits for what a step leaves running on the device, on this lane's
    clock: it must not run in the other's time.
    """

    def __init__(
        self,
        name: str,
        decoding: Steps,
        pieces: Pieces,
        *,
        settle: Callable[[], object] | None = None,
    ) -> None:
        self.name, self.prefill_s, self.close = name, decoding.prefill_s, decoding.close
        self.steps: list[StepRecord] = []
        self.clock_s = 0.0
        self.is_done = False
        self.num_tokens = 0
        self._coming, self._pieces, self._settle = iter(decoding), pieces, settle

    def advance(self) -> None:
        """Make the next step; without one the lane is done."""
        step = next(self._coming, None)
        if step is None:
            self._pieces.finish()
            self.is_done = True
            return
        self.clock_s += step.seconds
        if self._settle is not None:
            begin = time.perf_counter()
            self._settle()
            self.clock_s += time.perf_counter() - begin
        self.steps.append(step)
        self.num_tokens += step.num_emitted
        self._pieces.add(step.token_ids)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.token_ids)

    @property
    def tokens_per_s(self) -> float | None:
        return self.num_tokens / self.clock_s if self.clock_s else None

    def coloured(self) -> list[tuple[str, int]]:
        """Per token the text that it adds and the bit mask of the members that proposed it (0: the
        target's own).
        """
        owners = [mask for step in self.steps for mask in step.token_owners]
        return list(zip(self._pieces.shown, owners, strict=True))


def turns(lanes: Sequence[Lane]) -> Iterator[Lane]:
    """Let the lanes run to their ends; yields after every step the one that made it. The one whose
    own clock is behind goes next (the first of two that are level), so that at every moment all
    have decoded for about the same time.
    """
    while running := [lane for lane in lanes if not lane.is_done]:
        lane = min(running, key=lambda lane: lane.clock_s)
        lane.advance()
        yield lane


def readout(lane: Lane) -> str:
    """Speed, tokens a step and time by its own clock, of what there is so far. Fits into a pane of
    40 columns.
    """
    if lane.tokens_per_s is None:
        return "no step yet"
    per_step = lane.num_tokens / len(lane.steps)
    return f"{lane.tokens_per_s:.1f} tok/s, {per_step:.2f} a step, {lane.clock_s:.1f} s"


def standing(lanes: Sequence[Lane]) -> str:
    """Who is ahead, in tokens at the same time; once one is done, who was."""
    done = [lane for lane in lanes if lane.is_done]
    if done:
        first = min(done, key=lambda lane: lane.clock_s)
        return f"{first.name} has finished"
    ahead, behind = sorted(lanes, key=lambda lane: lane.num_tokens, reverse=True)
    lead = ahead.num_tokens - behind.num_tokens
    return f"{ahead.name} is {lead} token{'s' if lead > 1 else ''} ahead" if lead else "level"


def verdict(own: Lane, ar: Lane, identity: str) -> str:
    """The result in a sentence: tokens per second of `own` over those of AR decoding, prefill
    apart.
    """
    if own.tokens_per_s is None or ar.tokens_per_s is None:
        return "interrupted before both had made a step"
    is_over = own.is_done and ar.is_done
    reached = "finished" if is_over else "reached"
    other = f" {ar.num_tokens} tokens" if ar.num_tokens != own.num_tokens else ""
    times = f"{own.tokens_per_s / ar.tokens_per_s:.2f} times as fast{'' if is_over else ' so far'}"
    return (
        f"{own.name} {reached} {own.num_tokens} tokens in {own.clock_s:.2f} s, {ar.name}{other} in "
        f"{ar.clock_s:.2f} s: {times}; identical text: {identity} (prefill {own.prefill_s:.2f} s "
        f"and {ar.prefill_s:.2f} s)"
    )
