"""Figures of subsets of the members, from the tables of `replay.subsets` and `replay.whatif`: which
member earns a place, here and where other things are cheap.

Every function returns a matplotlib figure and shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specens.analysis.figures.canvas import (
    COLOURS,
    GREY,
    MARKERS,
    canvas,
    colours,
    from_zero,
    label,
    legend_above,
    legend_beside,
    line,
    markers,
    only,
)
from specens.analysis.formats import number
from specens.analysis.frames import rows_where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specens.decoding.budgets.costs import CostTable


def subsets(table: pd.DataFrame, *, most: int = 32) -> Figure:
    """Dots: tokens per second of the `most` fastest subsets and of AR decoding; the number in a dot
    is the subset's size.

    `table` is that of `Subsets.table`. The matrix beside the dots shows which members are in.
    """
    title = f"Tokens per second of {_which(table, most)}, by the cost model"
    figure, axes, rows = _beside_members(title, table, "tokens_per_s", most)
    places = range(len(rows))
    axes.hlines(places, rows["tokens_per_s"].min(), rows["tokens_per_s"], color="#d8dce2", zorder=1)
    axes.scatter(rows["tokens_per_s"], places, s=150, color=COLOURS[0], zorder=2)
    for place, speed, size in zip(places, rows["tokens_per_s"], rows["num_members"], strict=True):
        axes.text(
            speed, place, str(size), color="white", ha="center", va="center_baseline", fontsize=8
        )
    baseline = only(table, "num_members", 0)["tokens_per_s"].to_numpy(float).item()
    axes.axvline(baseline, color="black", linewidth=0.8, label="AR decoding")
    axes.set_xlabel(f"{label('tokens_per_s')} (in the dot: number of members)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def contributions(
    values: pd.DataFrame, title: str = "What each member saves, by the cost model"
) -> Figure:
    """Points with 95% intervals: a member's Shapley value and what all together lose without it, in
    target forwards and in seconds. `values` are those of `Subsets.contributions`.
    """
    places = np.arange(len(values))
    figure, panels = canvas(title, 1.5 + 0.5 * len(values), columns=2, sharey=True)
    units = (("calls", "target forwards saved"), ("s", "seconds saved"))
    kinds = (("shapley", "o", -0.14, COLOURS[0]), ("leave_one_out", "D", 0.14, COLOURS[1]))
    for axes, (unit, text) in zip(panels, units, strict=True):
        for kind, marker, shift, colour in kinds:
            middle, low, high = (
                values[f"{kind}_{unit}{end}"].to_numpy(float) for end in ("", "_low", "_high")
            )
            axes.hlines(places + shift, low, high, color=colour)
            axes.plot(middle, places + shift, marker, color=colour, label=kind.replace("_", " "))
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(text)
    panels[0].set_yticks(places, values["member"].tolist())
    panels[0].invert_yaxis()
    legend_above(panels[0])
    return figure


def pairs(table: pd.DataFrame, title: str, *, rows: str, columns: str) -> Figure:
    """Heat map of a square table of shares, such as `overlap` and `rescue`; `rows` and `columns`
    name the axes.
    """
    shares = 100 * table.to_numpy(float)
    figure, (axes,) = canvas(title, 1.6 + 0.5 * len(table))
    axes.grid(False)
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        colour, text = "white" if share <= 50 else "black", number(share, ".0f")
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(table.columns)), list(map(str, table.columns)))
    axes.set_yticks(range(len(table)), list(map(str, table.index)))
    axes.set_xlabel(columns)
    axes.set_ylabel(rows)
    figure.colorbar(image, label="positions (%)")
    return figure


def what_if(tables: Mapping[str, pd.DataFrame], *, most: int = 32) -> Figure:
    """Dots: speed-up of every subset under several cost tables, each over its own AR decoding.

    `tables` are those of `Subsets.table` by the name of their costs; the first one sorts them.
    """
    first = next(iter(tables.values()))
    title = f"Modelled speed-up of {_which(first, most)}"
    figure, axes, rows = _beside_members(title, first, "speedup", most)
    for (name, table), colour, marker in zip(tables.items(), COLOURS, MARKERS, strict=False):
        speedups = table.set_index("subset").loc[rows["subset"], "speedup"]
        axes.plot(speedups, range(len(rows)), marker, color=colour, markersize=8, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(label("speedup"))
    legend_above(axes)
    return figure


def over_width_price(table: pd.DataFrame) -> Figure:
    """Lines: modelled speed-up as width becomes cheaper, of each member alone, of all together, and
    of the best subset at each price. `table` is that of `whatif.over_width_price`.
    """
    names, every = _members(table), only(table, "num_members", table["num_members"].max())
    figure, (axes,) = canvas("Modelled speed-up if width were cheaper", 3.8)
    for (name, colour), marker in zip(colours(names).items(), markers(names), strict=True):
        line(axes, only(table, "subset", name), "width_price", "speedup", colour, marker, name)
    line(axes, every, "width_price", "speedup", "black", ".", "all together")
    best = pd.DataFrame(table.groupby("width_price", as_index=False, sort=False)[["speedup"]].max())
    style: dict[str, Any] = {"color": "black", "linewidth": 2, "label": "best subset at this price"}
    axes.plot(best["width_price"], best["speedup"], ":", **style)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.invert_xaxis()
    axes.set_xlabel("price of width (1: as measured, 0: verifying costs nothing)")
    axes.set_ylabel(label("speedup"))
    legend_beside(axes)
    return figure


def forward_times(tables: Mapping[str, CostTable], *, most: int = 64) -> Figure:
    """Lines: what a forward over n nodes takes, in AR forwards, by each cost table: how far
    verifying is from free.
    """
    figure, (axes,) = canvas("Price of width: time of a forward over n nodes", 3.4)
    nodes, styles = np.arange(most + 1), ("-", "--", "-.", ":")
    for (name, costs), colour, style in zip(tables.items(), COLOURS, styles, strict=False):
        times = np.array([costs.verify(int(count)) for count in nodes]) / costs.verify(0)
        axes.plot(nodes, times, style, color=colour, label=name)
    from_zero(axes)
    axes.set_xlabel("nodes verified in one forward")
    axes.set_ylabel("time (forwards of AR decoding)")
    legend_beside(axes)
    return figure


def _members(table: pd.DataFrame) -> list[str]:
    """Names in member order: the subsets of one."""
    return only(table, "num_members", 1)["subset"].unique().tolist()


def _which(table: pd.DataFrame, most: int) -> str:
    return "every subset" if len(table) <= most + 1 else f"the {most} fastest subsets"


def _beside_members(
    title: str, table: pd.DataFrame, column: str, most: int
) -> tuple[Figure, Axes, pd.DataFrame]:
    """A figure whose left panel shows which members are in each of the `most` best subsets; its
    other panel, and their rows, best last: it is drawn at the top.
    """
    some = rows_where(table, np.asarray(table["num_members"] > 0))
    rows = some.nlargest(most, column).iloc[::-1].reset_index(drop=True)
    height = 1.6 + 0.25 * len(rows)
    figure, (matrix, axes) = canvas(title, height, columns=2, sharey=True, widths=(1, 3))
    _show_members(matrix, rows, _members(table))
    return figure, axes, rows


def _show_members(axes: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """A matrix of dots: row = subset, column = member, filled where it belongs to the subset."""
    inside = np.array([[name in one.split("+") for name in names] for one in rows["subset"]])
    places = np.arange(len(rows))
    for column, colour in enumerate(colours(names).values()):
        axes.scatter(np.full(len(rows), column), places, s=30, color="#e4e7eb")
        filled = places[inside[:, column]]
        axes.scatter(np.full(len(filled), column), filled, s=60, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
