"""The clock of a bench and its memory gauge: the same for every system."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

CLEAR_PEAK, PROCESS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Spent:
    """What one step spent, and the draft nodes that it verified."""

    draft_s: float
    verify_s: float
    num_nodes: int


@dataclass(frozen=True)
class Timed:
    """One decoding: `emissions` are (number of tokens, seconds since the call) of every step,
    `spent` what each of them spent, None for a system that does not report it.
    """

    output_ids: tuple[int, ...]
    emissions: tuple[tuple[int, float], ...]
    spent: tuple[Spent, ...] | None = None

    def __post_init__(self) -> None:
        emitted = sum(count for count, _ in self.emissions)
        if emitted != len(self.output_ids) or not self.emissions:
            raise ValueError(
                f"{len(self.output_ids)} tokens came back, {emitted} were seen while they were "
                "timed"
            )

    def columns(self) -> dict[str, Any]:
        """Its columns of a Row."""
        counts = [count for count, _ in self.emissions]
        prefill_s, end_s = self.emissions[0][1], self.emissions[-1][1]
        columns: dict[str, Any] = {
            "num_tokens": len(self.output_ids),
            "num_steps": len(counts),
            "num_timed_tokens": sum(counts[1:]),
            "num_timed_steps": len(counts) - 1,
            "prefill_s": prefill_s,
            "decode_s": end_s - prefill_s,
        }
        if self.spent is not None:
            draft_s = sum(step.draft_s for step in self.spent[1:])
            verify_s = sum(step.verify_s for step in self.spent[1:])
            columns |= {"draft_s": draft_s, "verify_s": verify_s}
            columns["host_s"] = columns["decode_s"] - draft_s - verify_s
            columns["num_nodes"] = sum(step.num_nodes for step in self.spent[1:])
        return columns


@dataclass
class Clock(BaseStreamer):
    """Notes when tokens are emitted. It is a streamer too: transformers' generate gives it the
    prompt first, and then the tokens of each step, copied from the device, which waits for them.
    """

    device: torch.device
    emissions: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        wait(self.device)
        self._begin, self._is_prompt = time.perf_counter(), True

    def emitted(self, count: int) -> None:
        self.emissions.append((count, time.perf_counter() - self._begin))

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
        else:
            self.emitted(value.numel())

    def end(self) -> None: ...

    def timed(self, output_ids: Sequence[int], spent: tuple[Spent, ...] | None = None) -> Timed:
        return Timed(tuple(output_ids), tuple(self.emissions), spent)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Peak:
    num_bytes: int | None = None


def memory_kind(device: torch.device) -> str | None:
    """What `peak_memory_bytes` is, in words; None where it cannot be measured."""
    models = "during a decoding, the models of all systems included"
    if device.type == "cuda":
        return f"most CUDA memory allocated {models}"
    if device.type == "cpu" and CLEAR_PEAK.exists():
        return f"largest resident set of the process {models}"
    return None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The most memory that was in use inside; see `memory_kind`."""
    peak, kind = Peak(), memory_kind(device)
    if kind is None:
        yield peak
    elif device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
    else:
        is_cleared = _clear_peak()
        yield peak
        peak.num_bytes = _peak_resident() if is_cleared else None


def _clear_peak() -> bool:
    """Linux: forget the largest resident set so far."""
    try:
        CLEAR_PEAK.write_text("5")
    except OSError:  # not allowed in this container
        return False
    return True


def _peak_resident() -> int | None:
    lines = (line.split() for line in PROCESS.read_text().splitlines())
    return next((1024 * int(words[1]) for words in lines if words and words[0] == "VmHWM:"), None)
