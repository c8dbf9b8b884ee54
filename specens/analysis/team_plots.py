"""Figures of teams, from the tables of `teams` and `whatif`: who earns a place, here and where other things are cheap.

Every function returns a matplotlib figure and shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from specens.analysis.canvas import (
    COLOURS,
    GREY,
    LABELS,
    MARKERS,
    canvas,
    colours,
    from_zero,
    legend_above,
    legend_beside,
    line,
    markers,
    only,
)
from specens.analysis.frames import rows_where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specens.decoding.costs import CostTable


def teams(table: pd.DataFrame, *, most: int = 32) -> Figure:
    """Dots: tokens per second of the `most` fastest teams and of plain decoding; the number in a dot is the team's size.

    `table` is that of `teams.subset_table`. The matrix beside the dots says who is in the team.
    """
    rows, names = _fastest(table, "tokens_per_s", most), _members(table)
    figure, (matrix, axes) = canvas(
        f"Tokens per second of {_which(table, most)}, by the cost model",
        1.5 + 0.25 * len(rows),
        columns=2,
        sharey=True,
        widths=(1, 3),
    )
    _show_members(matrix, rows, names)
    places = range(len(rows))
    axes.hlines(places, rows["tokens_per_s"].min(), rows["tokens_per_s"], color="#d8dce2", zorder=1)
    axes.scatter(rows["tokens_per_s"], places, s=150, color=COLOURS[0], zorder=2)
    for place, speed, size in zip(places, rows["tokens_per_s"], rows["num_members"], strict=True):
        axes.text(speed, place, str(size), color="white", ha="center", va="center_baseline", fontsize=8)
    axes.axvline(_plain_speed(table), color="black", linewidth=0.8, label="plain decoding")
    axes.set_xlabel(f"{LABELS['tokens_per_s']} (in the dot: number of members)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def member_values(values: pd.DataFrame, title: str = "What each member saves, by the cost model") -> Figure:
    """Points with 95% intervals: a member's Shapley value and what the whole team loses without it, in target calls and in
    seconds. `values` are those of `teams.member_values`.
    """
    places = np.arange(len(values))
    figure, panels = canvas(title, 1.5 + 0.5 * len(values), columns=2, sharey=True)
    for axes, unit, label in zip(panels, ("calls", "s"), ("target forwards saved", "seconds saved"), strict=True):
        for kind, marker, shift, colour in (
            ("shapley", "o", -0.14, COLOURS[0]),
            ("leave_one_out", "D", 0.14, COLOURS[1]),
        ):
            middle, low, high = (values[f"{kind}_{unit}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
            axes.hlines(places + shift, low, high, color=colour)
            axes.plot(middle, places + shift, marker, color=colour, label=kind.replace("_", " "))
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
    panels[0].set_yticks(places, values["member"].tolist())
    panels[0].invert_yaxis()
    legend_above(panels[0])
    return figure


def pairs(table: pd.DataFrame, title: str, *, rows: str, columns: str) -> Figure:
    """Heat map of a square table of shares, such as `teams.overlap` and `teams.rescue`; `rows` and `columns` name the axes."""
    shares = 100 * table.to_numpy(float)
    figure, (axes,) = canvas(title, 1.6 + 0.5 * len(table))
    axes.grid(False)
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        text = "-" if math.isnan(share) else f"{share:.0f}"
        axes.text(column, row, text, ha="center", va="center", color="white" if share <= 50 else "black")
    axes.set_xticks(range(len(table.columns)), list(map(str, table.columns)))
    axes.set_yticks(range(len(table)), list(map(str, table.index)))
    axes.set_xlabel(columns)
    axes.set_ylabel(rows)
    figure.colorbar(image, label="positions (%)")
    return figure


def what_if(tables: Mapping[str, pd.DataFrame], *, most: int = 32) -> Figure:
    """Dots: speed-up of every team over plain decoding under several cost tables, each against its own plain decoding.

    `tables` are subset tables by the name of their costs; teams are sorted by the first of them.
    """
    first = next(iter(tables.values()))
    rows, names = _fastest(first, "speedup", most), _members(first)
    figure, (matrix, axes) = canvas(
        f"Modelled speed-up of {_which(first, most)}", 1.7 + 0.25 * len(rows), columns=2, sharey=True, widths=(1, 3)
    )
    _show_members(matrix, rows, names)
    for (label, table), colour, marker in zip(tables.items(), COLOURS, MARKERS, strict=False):
        speedups = table.set_index("team").loc[rows["team"], "speedup"]
        axes.plot(speedups, range(len(rows)), marker, color=colour, markersize=8, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(LABELS["speedup"])
    legend_above(axes)
    return figure


def over_width_price(table: pd.DataFrame) -> Figure:
    """Lines: modelled speed-up as width becomes cheaper, of each member alone, of all together, and of the best team at each
    price. `table` is that of `whatif.over_width_price`.
    """
    names, every = _members(table), only(table, "num_members", table["num_members"].max())
    figure, (axes,) = canvas("Modelled speed-up if width were cheaper", 3.8)
    for (name, colour), marker in zip(colours(names).items(), markers(names), strict=True):
        line(axes, only(table, "team", name), "width_price", "speedup", colour, marker, name)
    line(axes, every, "width_price", "speedup", "black", ".", "all together")
    best = pd.DataFrame(table.groupby("width_price", as_index=False, sort=False)[["speedup"]].max())
    axes.plot(best["width_price"], best["speedup"], ":", color="black", linewidth=2, label="best team at this price")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.invert_xaxis()
    axes.set_xlabel("price of width (1: as measured, 0: verifying costs nothing)")
    axes.set_ylabel(LABELS["speedup"])
    legend_beside(axes)
    return figure


def forward_times(tables: Mapping[str, CostTable], *, most: int = 64) -> Figure:
    """Lines: what a forward over n nodes takes, in plain forwards, by each cost table: how far verifying is from free."""
    figure, (axes,) = canvas("Price of width: time of a forward over n nodes", 3.4)
    nodes = np.arange(most + 1)
    for (label, costs), colour, style in zip(tables.items(), COLOURS, ("-", "--", "-.", ":"), strict=False):
        times = np.array([costs.verify(int(count)) for count in nodes]) / costs.verify(0)
        axes.plot(nodes, times, style, color=colour, label=label)
    from_zero(axes)
    axes.set_xlabel("nodes verified in one forward")
    axes.set_ylabel("time (forwards of plain decoding)")
    legend_beside(axes)
    return figure


def _plain_speed(table: pd.DataFrame) -> float:
    """Tokens per second of the team of nobody."""
    return only(table, "num_members", 0)["tokens_per_s"].to_numpy(float).item()


def _members(table: pd.DataFrame) -> list[str]:
    """Names in member order: the teams of one."""
    return only(table, "num_members", 1)["team"].unique().tolist()


def _fastest(table: pd.DataFrame, column: str, most: int) -> pd.DataFrame:
    """The `most` best teams, best last: it is drawn at the top."""
    teams_of_some = rows_where(table, np.asarray(table["num_members"] > 0))
    return teams_of_some.nlargest(most, column).iloc[::-1].reset_index(drop=True)


def _which(table: pd.DataFrame, most: int) -> str:
    return "every team" if len(table) <= most + 1 else f"the {most} fastest teams"


def _show_members(axes: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """A matrix of dots: row = team, column = member, filled where it belongs to the team."""
    inside = np.array([[name in team.split("+") for name in names] for team in rows["team"]])
    for column, colour in enumerate(colours(names).values()):
        places = np.arange(len(rows))
        axes.scatter(np.full(len(rows), column), places, s=30, color="#e4e7eb")
        axes.scatter(np.full(len(rows), column)[inside[:, column]], places[inside[:, column]], s=60, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
