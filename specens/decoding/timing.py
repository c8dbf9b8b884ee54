"""One stopwatch for a step. On CUDA it lays events into the stream, and when the step is read waits
for the last of them. That is the verdict's, which the host has waited for already: what comes after
it, such as moving the cache, overlaps with the next step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up named spans of one step: `with watch.span("verify"): ...`, then `watch.read()` ->
    seconds by name.

    The host's clock gives the step's whole time; a span on CUDA is the time between two events in
    the stream, so that measuring does not add synchronisations to what it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []
        self.restart()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self._marks.append((name, begin, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """A new step begins now: what happened since the last one (a streamer, a progress bar) is
        not part of it.
        """
        self._marks.clear()
        self._begin = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds by span name since the (re)start, and `step`: all of the step."""
        if self._cuda and self._marks:
            self._marks[-1][2].synchronize()
        seconds = {"step": time.perf_counter() - self._begin}
        for name, begin, end in self._marks:
            elapsed = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[name] = seconds.get(name, 0.0) + elapsed
        return seconds
