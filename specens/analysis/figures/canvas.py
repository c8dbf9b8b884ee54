"""What all figures share: a canvas at a notebook's width, colours, labels. The only file here that
imports matplotlib, when a figure is drawn.

Colours are the report's, one per drafter in member order. Nothing is shown by colour alone:
drafters have markers of their own, bars have labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specens.analysis.formats import MISSING, number
from specens.analysis.frames import rows_where
from specens.analysis.metrics import METRICS
from specens.analysis.palette import PALETTE
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Of every figure, inches: a notebook's column."""

COLOURS = tuple(f"#{colour}" for colour in PALETTE)
GREY = "#8a8f98"
MARKERS = "oDs^vPX*"

KNOWN = {(metric.scope, metric.key): metric for metric in METRICS}


def label(key: str, scope: str = "run") -> str:
    """The label of an axis: a metric's unit; a column that is no metric is its own label."""
    metric = KNOWN.get((scope, key))
    return metric.unit if metric else key


def factor(key: str) -> int:
    """100 for a metric that is drawn in percent."""
    metric = KNOWN.get(("run", key)) or KNOWN.get(("drafter", key))
    return 100 if metric and metric.form.endswith("%") else 1


def canvas(
    title: str,
    height: float,
    *,
    columns: int = 1,
    sharey: bool = False,
    widths: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with its title at the left and one row of axes. Made without pyplot: nothing global,
    nothing to close.
    """
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


def name_bars(axes: Axes, values: np.ndarray, form: str, unit: str = "") -> None:
    """The value at the end of each bar, a dash where nothing was measured; the first bar at the
    top, and room for all of them.
    """
    for place, value in enumerate(values):
        end = (0 if math.isnan(value) else value, place)
        text = MISSING if math.isnan(value) else number(value, form) + unit
        axes.annotate(text, end, xytext=(4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)
    axes.set_ylim(len(values) - 0.5, -0.5)


def line(
    axes: Axes, rows: pd.DataFrame, x: str, key: str, colour: str, marker: str, name: str
) -> None:
    """A column over an override. Values that are no numbers stand side by side, in the order of the
    table; numbers that grow by factors have equal steps.
    """
    values = rows[key].to_numpy(float) * factor(key)
    style: dict[str, Any] = {"marker": marker, "color": colour, "label": name or None}
    if not pd.api.types.is_numeric_dtype(rows[x]):
        axes.plot(rows[x].fillna("(default)").astype(str).to_numpy(object), values, **style)
        return
    places = rows[x].to_numpy(float)
    axes.plot(places, values, **style)
    if places.min() > 0 and places.max() / places.min() >= 8:
        axes.set_xscale("log", base=2)
    different = np.unique(places)
    if len(different) <= 8:
        axes.set_xticks(different, [f"{place:g}" for place in different])


def from_zero(axes: Axes) -> None:
    """Values from zero up to all that was drawn: so that a small difference looks small."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)


def means(table: pd.DataFrame, x: str, key: str) -> pd.DataFrame:
    """The mean of a column at every `x`, in the order of the table."""
    return pd.DataFrame(table.groupby(x, as_index=False, sort=False, dropna=False)[[key]].mean())


def only(table: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    """The rows with that value."""
    return rows_where(table, np.asarray(table[column] == value))


def legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
