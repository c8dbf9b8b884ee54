"""What a step costs: milliseconds of a target forward by its width, and of every member by how deep
it drafts. Pure: budgets and replay decide from such a table, never from the clock of the step at
hand.
"""

from __future__ import annotations

import itertools
import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from specens.decoding.types import Member, StepRecord
from specens.errors import UserError, one_line

Points = tuple[tuple[int, float], ...]
"""(count, milliseconds) with rising counts; linear between two points, and beyond the last with the
slope of the last two.
"""

LEAST_SAMPLES = 3
"""A prompt's steps move a cost only if there are this many of the kind."""

MOST_CHANGE = 2.0
"""One prompt changes no cost by more than this factor: it may have met a busy machine."""


@dataclass(frozen=True)
class CostTable:
    """`verify_ms`: a target forward over the last committed token and so many nodes (0: AR
    decoding). `draft_ms`: for each member by the depth of its draft. `host_ms`: the rest of a step.
    `origin` says where the numbers come from.
    """

    verify_ms: Points = ((0, 1.0),)
    draft_ms: Mapping[str, Points] = field(default_factory=dict)
    host_ms: float = 0.0
    origin: str = "none: every step is taken to cost the same"

    def __post_init__(self) -> None:
        drafts = [(f"draft_ms.{name}", row) for name, row in self.draft_ms.items()]
        for name, row in [("verify_ms", self.verify_ms), *drafts]:
            if (fault := _fault(row)) is not None:
                raise UserError(
                    f"costs: {name} must be pairs [count, milliseconds] with rising counts; {fault}"
                )
        if self.verify_ms[0][0] != 0 or self.verify_ms[0][1] <= 0:
            first = list(self.verify_ms[:1])
            raise UserError(f"costs: verify_ms must begin with the cost of 0 nodes, got {first}")
        if not 0 <= self.host_ms < 1e9:
            raise UserError(f"costs: host_ms must be milliseconds, 0 or more, got {self.host_ms}")

    def verify(self, num_nodes: int) -> float:
        """Milliseconds of one forward over `num_nodes` nodes. Perhaps less than over fewer: latency
        is not monotonic in width for some kernels.
        """
        return self._verify(num_nodes)

    @cached_property
    def _verify(self) -> Callable[[int], float]:
        return cache(lambda num_nodes: interpolate(self.verify_ms, num_nodes))

    def draft(self, name: str, depth: float) -> float:
        """Milliseconds of a member's draft of this depth; 0 for one that is not in the table."""
        points = self.draft_ms.get(name)
        return interpolate(points, depth) if points and depth > 0 else 0.0

    def plain(self) -> float:
        """Milliseconds of a step without drafts: an AR step."""
        return self.verify(0) + self.host_ms

    def check(self, members: Sequence[Member]) -> None:
        """Refuse a table in which a member would draft for nothing."""
        for member in members:
            if member.name not in self.draft_ms:
                raise UserError(
                    f"costs ({self.origin}): draft_ms has no member {member.name}, whose drafts "
                    f"would then be free; add a row, such as {member.name}: [[1, 0.5]]"
                )

    def content(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "verify_ms": [list(point) for point in self.verify_ms],
            "draft_ms": {name: list(map(list, row)) for name, row in self.draft_ms.items()},
            "host_ms": self.host_ms,
            "origin": self.origin,
        }

    @classmethod
    def of(cls, content: Any, origin: str = "") -> CostTable:
        """The inverse of `content`. Raises UserError for anything else."""
        try:
            drafts = {str(name): _points(row) for name, row in content["draft_ms"].items()}
            host_ms = float(content.get("host_ms", 0.0))
            origin = origin or str(content.get("origin", ""))
            return cls(_points(content["verify_ms"]), drafts, host_ms, origin)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"costs: not a cost table ({type(error).__name__}: {one_line(error)}); it has "
                "verify_ms, draft_ms and host_ms"
            ) from error


def _points(row: Any) -> Points:
    return tuple((int(count), float(ms)) for count, ms in row)


def _fault(row: Points) -> str | None:
    """What is wrong with the first wrong pair."""
    if not row:
        return "it has none"
    for (before, _), (count, _) in itertools.pairwise(row):
        if count <= before:
            return f"{count} follows {before}"
    return next((f"{count} costs {ms}" for count, ms in row if not 0 <= ms < 1e9), None)


def read_costs(path: str) -> CostTable:
    """The table in a JSON file: a table alone, or the last version of a run's costs.json."""
    return read_versions(path)[-1]


def read_versions(path: str) -> tuple[CostTable, ...]:
    """All versions of a run's costs.json, or the one table in a JSON file."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"costs {path}: cannot be read ({one_line(error)}); give a JSON file with a cost table"
        ) from error
    try:
        if isinstance(content, dict) and content.get("versions"):
            versions = content["versions"]
            return tuple(CostTable.of(version["table"], origin=path) for version in versions)
        return (CostTable.of(content, origin=path),)
    except (UserError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"costs {path}: {one_line(error)}; give a JSON file with a cost table"
        ) from error


def interpolate(points: Sequence[tuple[int, float]], count: float) -> float:
    place = bisect_left([at for at, _ in points], count)
    if place < len(points) and points[place][0] == count:
        return points[place][1]
    if len(points) == 1 or place == 0:
        return points[0][1]
    (low, before), (high, after) = points[min(place, len(points) - 1) - 1 :][:2]
    slope = (after - before) / (high - low)
    if count < high:
        return before + slope * (count - low)
    return after + max(slope, 0.0) * (count - high)


def refreshed(table: CostTable, steps: Iterable[StepRecord]) -> CostTable:
    """The table moved half way to what the steps of a finished prompt really took: forwards of each
    width that occurred often, the wide ones together, every member and the CPU overhead each by one
    factor, the median of measured over expected. The first step, which may be cold, does not count.
    """
    steps = list(steps)[1:]
    members = {member.drafter for step in steps for member in step.members}
    factors = {name: _factor(list(_draft_times(table, steps, name))) or 1.0 for name in members}
    host = _factor([(step.host_ms, table.host_ms) for step in steps]) or 1.0
    moved = {
        name: tuple((count, ms * factors.get(name, 1.0)) for count, ms in row)
        for name, row in table.draft_ms.items()
    }
    verify_ms = _verify_moved(table, steps)
    return replace(table, verify_ms=verify_ms, draft_ms=moved, host_ms=table.host_ms * host)


def between(table: CostTable, other: CostTable) -> CostTable:
    """Half way, in logarithm, at every point that both have measured: errors of one moment become
    less.
    """
    drafts = {
        name: _points_between(table.draft_ms.get(name, ()), points)
        for name, points in other.draft_ms.items()
    }
    verify_ms = _points_between(table.verify_ms, other.verify_ms)
    host_ms = (table.host_ms * other.host_ms) ** 0.5
    return replace(other, verify_ms=verify_ms, draft_ms=drafts, host_ms=host_ms)


def _points_between(points: Points, others: Points) -> Points:
    known = dict(points)
    return tuple((count, (known.get(count, ms) * ms) ** 0.5) for count, ms in others)


def _verify_moved(table: CostTable, steps: Sequence[StepRecord]) -> Points:
    """A width's own steps are those nearest to it. One that has too few of them moves like all wide
    ones together; AR steps and wide forwards stand for each other only where there is nothing else.
    """
    pairs: dict[int, list[tuple[float, float]]] = {count: [] for count, _ in table.verify_ms}
    for step in steps:
        alike = [count for count in pairs if bool(count) == bool(step.num_nodes)] or [0]
        nearest = min(alike, key=lambda count: abs(count - step.num_nodes))
        pairs[nearest].append((step.verify_ms, table.verify(step.num_nodes)))
    plain = _factor(pairs[0])
    wide = _factor([pair for count, row in pairs.items() if count for pair in row]) or plain or 1.0
    factors = {count: _factor(row) or wide for count, row in pairs.items()} | {0: plain or wide}
    return tuple((count, ms * factors[count]) for count, ms in table.verify_ms)


def _draft_times(
    table: CostTable, steps: Sequence[StepRecord], name: str
) -> Iterable[tuple[float, float]]:
    for step in steps:
        for member in step.members:
            if member.drafter == name and member.num_planned and member.num_drafted:
                depth = min(member.num_planned, member.num_drafted)
                yield member.draft_ms, table.draft(name, depth)


def _factor(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Half way (in logarithm) to the median of measured / expected; None when there are too few."""
    ratios = [measured / expected for measured, expected in pairs if measured > 0 and expected > 0]
    if len(ratios) < LEAST_SAMPLES:
        return None
    return min(max(statistics.median(ratios), 1 / MOST_CHANGE), MOST_CHANGE) ** 0.5
