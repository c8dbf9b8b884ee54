"""Bars as inline SVG. Widths are percentages, so that they fit any screen while their text keeps
its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specens.report.markup import Child, Html, markup, tag

HEIGHT = 20
"""Of a bar, in CSS pixels."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar between two values, in a drafter's colour: `pale` is its tint. Without a
    drafter (None) it is grey.
    """

    begin: float
    end: float
    drafter: int | None = None
    letter: str = ""
    pale: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: what it is about, its parts, and its number in words. `goal` is a mark across it,
    `span` an interval.
    """

    label: Child
    parts: Sequence[Part]
    value: str
    goal: float | None = None
    span: tuple[float, float] | None = None

    def reach(self) -> list[float]:
        """All values that must be on the scale."""
        edges = [edge for part in self.parts for edge in (part.begin, part.end)]
        return [*edges, *(self.span or ()), *([] if self.goal is None else [self.goal])]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `least` to `most` as percent of the width, with ticks at round numbers."""

    least: float
    most: float
    ticks: tuple[float, ...]

    @staticmethod
    def over(values: Sequence[float], num_ticks: int = 6) -> Scale:
        """The scale that has 0 and all values on it, with at most so many ticks."""
        least, most = min(0.0, *values), max(0.0, *values)
        if least == most:
            return Scale(0.0, 1.0, (0.0, 1.0))
        width = (most - least) / (num_ticks - 1)
        power = 10.0 ** math.floor(math.log10(width))
        units = (round_number * power for round_number in (1, 2, 2.5, 5, 10))
        unit = next(unit for unit in units if unit >= width * (1 - 1e-9))
        first, last = math.ceil(least / unit - 1e-9), math.floor(most / unit + 1e-9)
        return Scale(least, most, tuple(unit * number for number in range(first, last + 1)))

    def at(self, value: float) -> float:
        """Percent of the width; what lies outside is at the end."""
        share = (value - self.least) / (self.most - self.least)
        return round(100 * min(max(share, 0.0), 1.0), 2)


def bars(
    rows: Sequence[Bar], *, unit: str, form: str = "g", note: Child = None, beside: bool = True
) -> Html:
    """Rows of bars over one axis, whose ticks are written as `form` says; `unit` is what is
    measured. Where there is room, label and value stand beside the bar; not `beside`: above it, for
    long values.
    """
    if not rows:
        return Html()
    scale = Scale.over([value for row in rows for value in row.reach()])
    shown: list[Html] = []
    for row in rows:
        name, value = tag("div", row.label, class_="name"), tag("div", row.value, class_="value")
        shown.append(tag("div", name, _bar(row, scale), value, class_="row"))
    axis = tag("div", _axis(scale, form), tag("div", unit, class_="unit"), class_="axis")
    caption = tag("figcaption", note, class_="faint") if note else None
    kind = "bars beside" if beside else "bars"
    return tag("figure", tag("div", shown, axis, class_=kind), caption)


def _bar(row: Bar, scale: Scale) -> Html:
    """The row's drawing. Readers without eyes have the label and the number beside it."""
    grid = [_line(scale.at(tick), 0, "100%", "grid") for tick in scale.ticks]
    marks: list[Html] = []
    if row.span is not None:
        low, high = map(scale.at, row.span)
        middle = HEIGHT / 2
        level = {"y1": middle, "y2": middle, "class_": "span"}
        marks.append(tag("line", x1=f"{low}%", x2=f"{high}%", **level))
        marks += [_line(edge, middle - 4, middle + 4, "span") for edge in (low, high)]
    if row.goal is not None:
        marks.append(_line(scale.at(row.goal), 0, "100%", "goal"))
    drawing = [*grid, *(_part(part, scale) for part in row.parts), *marks]
    return tag("svg", drawing, class_="bar", width="100%", height=HEIGHT, aria_hidden="true")


def _part(part: Part, scale: Scale) -> Html:
    left, right = sorted((scale.at(part.begin), scale.at(part.end)))
    width = round(right - left, 2)
    colour = "none" if part.drafter is None else f"c{part.drafter}"
    kind = f"part {colour}" + (" pale" if part.pale else "")
    shape = tag("rect", x=f"{left}%", width=f"{width}%", y=2, height=HEIGHT - 4, class_=kind)
    if not part.letter or width < 3 + 2.5 * len(part.letter):  # no room for it on a phone
        return shape
    at = {"x": f"{round(left + width / 2, 2)}%", "y": HEIGHT / 2 + 4, "text_anchor": "middle"}
    return markup(shape, tag("text", part.letter, **at))


def _axis(scale: Scale, form: str) -> Html:
    drawing: list[Html] = []
    for tick in scale.ticks:
        at = scale.at(tick)
        anchor = "start" if at < 5 else "end" if at > 95 else "middle"
        text = tag("text", f"{tick:{form}}", x=f"{at}%", y=17, text_anchor=anchor)
        drawing += [_line(at, 0, 4, "tick"), text]
    return tag("svg", drawing, width="100%", height=20, aria_hidden="true")


def _line(at: float, top: float | str, bottom: float | str, kind: str) -> Html:
    return tag("line", x1=f"{at}%", x2=f"{at}%", y1=top, y2=bottom, class_=kind)


def meter(value: float, most: float) -> Html:
    """A small bar for a table's cell, beside its number."""
    share = round(100 * value / most, 1) if most > 0 else 0.0
    bar = tag("rect", width=f"{share}%", height="100%", class_="part none")
    return tag("svg", bar, class_="meter", width=80, height=10, aria_hidden="true")
