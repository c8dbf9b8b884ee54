"""What all figures of `specens.analysis` share: a canvas at a notebook's width, colours, labels. The only file here that imports
matplotlib, when a figure is drawn.

Colours are the report's, one per drafter in member order. Nothing is told by colour alone: drafters have markers of their own,
bars have labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specens.analysis.frames import rows_where
from specens.analysis.html import PALETTE
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Of every figure, inches: a notebook's column."""

COLOURS = tuple(f"#{colour}" for colour in PALETTE)
GREY = "#8a8f98"
MARKERS = "oDs^vPX*"

LABELS = {
    "acceptance_length": "tokens per target forward",
    "tokens_per_s": "tokens per second",
    "speedup": "x plain decoding",
    "draft_ms_per_step": "drafting, ms per step",
    "verify_ms_per_step": "verifying, ms per step",
    "wasted_nodes_per_token": "verified nodes wasted per token",
    "token_share": "accepted tokens (%)",
    "win_rate": "steps won (%)",
}
"""Axis labels with units; a column that is not listed is its own label."""

PERCENT = ("token_share", "win_rate", "sole_win_rate", "silent_rate", "acceptance_rate")
"""Columns of shares, which are drawn in percent."""


def canvas(
    title: str, height: float, *, columns: int = 1, sharey: bool = False, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with its title at the left and one row of axes. Made without pyplot: nothing global, nothing to close."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError("figures need matplotlib: pip install 'specens[notebooks]'") from error

    figure = Figure(figsize=(WIDTH, height), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    panels = figure.subplots(1, columns, sharey=sharey, squeeze=False, width_ratios=widths)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, list(panels)


def colours(names: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """The colour of each drafter, by its place among the members, as in report.html."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def markers(names: Sequence[str] | Mapping[str, Any]) -> list[str]:
    return [MARKERS[index % len(MARKERS)] for index in range(len(names))]


def floats(values: Sequence[float | None]) -> np.ndarray:
    """NaN for what was not measured: matplotlib leaves it out."""
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def percents(values: Sequence[float | None]) -> np.ndarray:
    return 100 * floats(values)


def name_bars(axes: Axes, values: np.ndarray, form: str) -> None:
    """The value at the end of each bar, a dash where nothing was measured; the first bar at the top, and room for all of them."""
    for place, value in enumerate(values):
        is_known = not math.isnan(value)
        text = form % value if is_known else "-"
        axes.annotate(text, (value if is_known else 0, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)
    axes.set_ylim(len(values) - 0.5, -0.5)


def line(axes: Axes, rows: pd.DataFrame, x: str, number: str, colour: str, marker: str, label: str) -> None:
    """Values over a word. Words that are no numbers stand side by side, in the order of the table; numbers that grow by factors
    have equal steps.
    """
    is_number = pd.api.types.is_numeric_dtype(rows[x])
    places = rows[x].to_numpy(float) if is_number else rows[x].fillna("(default)").astype(str).to_numpy(object)
    values = rows[number].to_numpy(float) * (100 if number in PERCENT else 1)
    axes.plot(places, values, marker=marker, color=colour, label=label or None)
    if not is_number:
        return
    if places.min() > 0 and places.max() / places.min() >= 8:
        axes.set_xscale("log", base=2)
    different = np.unique(places)
    if len(different) <= 8:
        axes.set_xticks(different, [f"{place:g}" for place in different])


def from_zero(axes: Axes) -> None:
    """Values from zero up to all that was drawn: so that a small difference looks small."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)


def means(table: pd.DataFrame, x: str, number: str) -> pd.DataFrame:
    """The mean of `number` at every `x`, in the order of the table."""
    return pd.DataFrame(table.groupby(x, as_index=False, sort=False, dropna=False)[[number]].mean())


def only(table: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    """The rows with that value."""
    return rows_where(table, np.asarray(table[column] == value))


def legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
