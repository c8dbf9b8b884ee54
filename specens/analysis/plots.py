"""Figures for notebooks, from the tables of a run: they show numbers that `metrics`, `teams` and `sweeps` define, and compute none.

Every function returns a matplotlib figure and shows nothing. Colours are the report's (one per drafter, in member order), and
nothing is told by colour alone: drafters have markers of their own, bars have labels. Only this file imports matplotlib, when a
figure is drawn; UserError names the extra to install if it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specens.analysis.html import PALETTE
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specens.decoding.costs import CostTable

WIDTH = 9.0
"""Of every figure, inches: a notebook's column."""

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


def win_rates(summary: Mapping[str, Any]) -> Figure:
    """Bars: the share of steps that each drafter won, what it won alone in full colour; and the steps that nobody won."""
    drafters = _drafters(summary)
    names = [*drafters, "no drafter"]
    sole = _percents([numbers["sole_win_rate"] for numbers in drafters.values()] + [summary["no_win_rate"]])
    whole = _percents([numbers["win_rate"] for numbers in drafters.values()] + [summary["no_win_rate"]])
    shades = [*colours(drafters).values(), GREY]
    figure, (axes,) = _canvas("Share of steps won", 1.3 + 0.36 * len(names))
    axes.barh(names, sole, color=shades)
    axes.barh(names, whole - sole, left=sole, color=shades, alpha=0.45, hatch="///", edgecolor="white")
    _name_bars(axes, whole, "%.0f%%")
    axes.set_xlabel("steps (%); hatched: its part of ties")
    axes.invert_yaxis()
    return figure


def share_against_time(summary: Mapping[str, Any]) -> Figure:
    """Points: what each drafter gave (its Shapley share of the accepted tokens) against what it took (ms per step)."""
    drafters = _drafters(summary)
    figure, (axes,) = _canvas("Token share against drafting time", 3.6)
    times = _floats([numbers["draft_ms_per_step"] for numbers in drafters.values()])
    shares = _percents([numbers["token_share"] for numbers in drafters.values()])
    for (name, colour), marker, ms, share in zip(colours(drafters).items(), _markers(drafters), times, shares, strict=True):
        if math.isnan(share):
            continue
        axes.plot([ms], [share], marker, color=colour, markersize=10, markeredgecolor="black", markeredgewidth=0.5)
        axes.annotate(name, (ms, share), xytext=(8, 5), textcoords="offset points")
    if times.min(initial=math.inf) > 0:
        axes.set_xscale("log")
    axes.margins(0.15)
    axes.set_xlabel(LABELS["draft_ms_per_step"])
    axes.set_ylabel(LABELS["token_share"])
    return figure


def acceptance_by_depth(summary: Mapping[str, Any]) -> Figure:
    """Lines: the chance that a drafter's proposal agrees at a depth, once it agreed above and goes that deep."""
    drafters = _drafters(summary)
    figure, (axes,) = _canvas("Acceptance by depth", 3.6)
    deepest = 1
    for (name, colour), marker in zip(colours(drafters).items(), _markers(drafters), strict=True):
        rates = _percents(drafters[name]["acceptance_by_depth"])
        deepest = max(deepest, len(rates))
        axes.plot(range(1, len(rates) + 1), rates, marker=marker, color=colour, label=name)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(-3, 103)
    axes.set_xlabel("depth in the proposal (tokens)")
    axes.set_ylabel("proposals that agree there (%)")
    _legend_beside(axes)
    return figure


def by_category(summary: Mapping[str, Any]) -> Figure:
    """Bars per category: speed (against plain decoding, if the run has a baseline) and tokens per target forward."""
    categories: Mapping[str, Mapping[str, Any]] = summary.get("by_category") or {}
    if not categories:
        raise UserError("no category has a finished prompt: there is nothing to compare")
    has_baseline = any(numbers["speedup"] is not None for numbers in categories.values())
    columns = ("speedup" if has_baseline else "tokens_per_s", "acceptance_length")
    figure, panels = _canvas("Speed and acceptance by category", 1.4 + 0.36 * len(categories), columns=2, sharey=True)
    for axes, column, colour in zip(panels, columns, (PALETTE[2], PALETTE[0]), strict=True):
        values = _floats([numbers[column] for numbers in categories.values()])
        axes.barh(list(categories), values, color=f"#{colour}")
        _name_bars(axes, values, "%.2f" if column != "tokens_per_s" else "%.1f")
        axes.set_xlabel(LABELS[column])
        if column != "tokens_per_s":
            axes.axvline(1, color="black", linewidth=0.8)
    panels[0].invert_yaxis()
    return figure


def teams(table: pd.DataFrame, *, most: int = 32) -> Figure:
    """Dots: tokens per second of the `most` fastest teams and of plain decoding; the number in a dot is the team's size.

    `table` is that of `teams.subset_table`. The matrix beside the dots says who is in the team.
    """
    rows, names = _fastest(table, "tokens_per_s", most), _members(table)
    figure, (matrix, axes) = _canvas(
        "Tokens per second of every team, by the cost model", 1.5 + 0.25 * len(rows), columns=2, sharey=True, widths=(1, 3)
    )
    _show_members(matrix, rows, names)
    places = range(len(rows))
    axes.hlines(places, rows["tokens_per_s"].min(), rows["tokens_per_s"], color="#d8dce2", zorder=1)
    axes.scatter(rows["tokens_per_s"], places, s=150, color=f"#{PALETTE[0]}", zorder=2)
    for place, speed, size in zip(places, rows["tokens_per_s"], rows["num_members"], strict=True):
        axes.text(speed, place, str(size), color="white", ha="center", va="center_baseline", fontsize=8)
    axes.axvline(_plain(table)["tokens_per_s"], color="black", linewidth=0.8, label="plain decoding")
    axes.set_xlabel(LABELS["tokens_per_s"])
    axes.legend(frameon=False, loc="lower right")
    return figure


def member_values(values: pd.DataFrame, title: str = "What each member saves, by the cost model") -> Figure:
    """Points with 95% intervals: a member's Shapley value and what the whole team loses without it, in target calls and in
    seconds. `values` are those of `teams.member_values`.
    """
    places = np.arange(len(values))
    figure, panels = _canvas(title, 1.5 + 0.5 * len(values), columns=2, sharey=True)
    for axes, unit, label in zip(panels, ("calls", "s"), ("target forwards saved", "seconds saved"), strict=True):
        for kind, marker, shift, colour in (("shapley", "o", -0.14, PALETTE[0]), ("leave_one_out", "D", 0.14, PALETTE[1])):
            middle, low, high = (values[f"{kind}_{unit}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
            axes.hlines(places + shift, low, high, color=f"#{colour}")
            axes.plot(middle, places + shift, marker, color=f"#{colour}", label=kind.replace("_", " "))
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
    panels[0].set_yticks(places, values["member"].tolist())
    panels[0].invert_yaxis()
    _legend_above(panels[0])
    return figure


def what_if(tables: Mapping[str, pd.DataFrame], *, most: int = 32) -> Figure:
    """Dots: speed-up of every team over plain decoding under several cost tables, each against its own plain decoding.

    `tables` are subset tables by the name of their costs; teams are sorted by the first of them.
    """
    first = next(iter(tables.values()))
    rows, names = _fastest(first, "speedup", most), _members(first)
    figure, (matrix, axes) = _canvas(
        "Modelled speed-up of every team", 1.7 + 0.25 * len(rows), columns=2, sharey=True, widths=(1, 3)
    )
    _show_members(matrix, rows, names)
    for (label, table), colour, marker in zip(tables.items(), PALETTE, MARKERS, strict=False):
        speedups = table.set_index("team").loc[rows["team"], "speedup"]
        axes.plot(speedups, range(len(rows)), marker, color=f"#{colour}", markersize=8, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(LABELS["speedup"])
    _legend_above(axes)
    return figure


def over_width_price(table: pd.DataFrame) -> Figure:
    """Lines: modelled speed-up as width becomes cheaper, of each member alone, of all together, and of the best team at each price.

    `table` is that of `whatif.over_width_price`.
    """
    names, every = _members(table), table[table["num_members"] == table["num_members"].max()]
    figure, (axes,) = _canvas("Modelled speed-up if width were cheaper", 3.8)
    for (name, colour), marker in zip(colours(names).items(), _markers(names), strict=True):
        _line(axes, table[table["team"] == name], "width_price", "speedup", colour[1:], marker, name)
    _line(axes, every, "width_price", "speedup", "000000", ".", "all together")
    best = table.groupby("width_price", as_index=False, sort=False)["speedup"].max()
    axes.plot(best["width_price"], best["speedup"], ":", color="black", linewidth=2, label="best team at this price")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.invert_xaxis()
    axes.set_xlabel("price of width (1: as measured, 0: verifying costs nothing)")
    axes.set_ylabel(LABELS["speedup"])
    _legend_beside(axes)
    return figure


def pairs(table: pd.DataFrame, title: str, *, rows: str, columns: str) -> Figure:
    """Heat map of a square table of shares, such as `teams.overlap` and `teams.rescue`; `rows` and `columns` name the axes."""
    shares = 100 * table.to_numpy(float)
    figure, (axes,) = _canvas(title, 1.6 + 0.5 * len(table))
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


def sweep(table: pd.DataFrame, x: str, numbers: Sequence[str], *, by: Sequence[str] = ()) -> Figure:
    """A panel per number of `sweeps.sweep_table`: its values over the word `x`, a line per combination of the words `by`."""
    figure, panels = _canvas(f"Sweep over {x}", 3.4, columns=len(numbers))
    lines = list(table.groupby(list(by), sort=False, dropna=False)) if by else [((), table)]
    for axes, number in zip(panels, numbers, strict=True):
        for index, (words, rows) in enumerate(lines):
            label = ", ".join(f"{key}={word}" for key, word in zip(by, words, strict=True))
            _line(axes, rows, x, number, PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)], label)
        if number == "tokens_per_s" and table["baseline_tokens_per_s"].notna().any():
            _line(axes, _means(table, x, "baseline_tokens_per_s"), x, "baseline_tokens_per_s", GREY[1:], "_", "plain decoding")
        axes.set_xlabel(x.rpartition(".")[2])
        axes.set_ylabel(LABELS.get(number, number))
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
    return figure


def sweep_drafters(table: pd.DataFrame, x: str, number: str) -> Figure:
    """Lines: one number of `sweeps.sweep_drafters` over the word `x`, a line per drafter (the mean where jobs share an x)."""
    names = list(table["drafter"].unique())
    figure, (axes,) = _canvas(f"{LABELS.get(number, number)}: each drafter over {x}", 3.4)
    for (name, colour), marker in zip(colours(names).items(), _markers(names), strict=True):
        _line(axes, _means(table[table["drafter"] == name], x, number), x, number, colour[1:], marker, name)
    axes.set_xlabel(x)
    axes.set_ylabel(LABELS.get(number, number))
    _legend_beside(axes)
    return figure


def forward_times(tables: Mapping[str, CostTable], *, most: int = 64) -> Figure:
    """Lines: what a forward over n nodes takes, in plain forwards, by each cost table: how far verifying is from free."""
    figure, (axes,) = _canvas("Price of width: time of a forward over n nodes", 3.4)
    nodes = np.arange(most + 1)
    for (label, costs), colour, style in zip(tables.items(), PALETTE, ("-", "--", "-.", ":"), strict=False):
        times = np.array([costs.verify(int(count)) for count in nodes]) / costs.verify(0)
        axes.plot(nodes, times, style, color=f"#{colour}", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes verified in one forward")
    axes.set_ylabel("time (forwards of plain decoding)")
    _legend_beside(axes)
    return figure


def colours(names: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """The colour of each drafter, by its place among the members, as in report.html."""
    return {name: f"#{PALETTE[index % len(PALETTE)]}" for index, name in enumerate(names)}


def _canvas(
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


def _drafters(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    if not summary.get("drafters"):
        raise UserError("no drafter took part in this run: there is nothing to compare")
    return summary["drafters"]


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """NaN for what was not measured: matplotlib leaves it out."""
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def _percents(values: Sequence[float | None]) -> np.ndarray:
    return 100 * _floats(values)


def _markers(names: Sequence[str] | Mapping[str, Any]) -> list[str]:
    return [MARKERS[index % len(MARKERS)] for index in range(len(names))]


def _name_bars(axes: Axes, values: np.ndarray, form: str) -> None:
    """The value at the end of each bar, and room for it; a dash where nothing was measured."""
    for place, value in enumerate(values):
        is_known = not math.isnan(value)
        text = form % value if is_known else "-"
        axes.annotate(text, (value if is_known else 0, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)


def _means(table: pd.DataFrame, x: str, number: str) -> pd.DataFrame:
    return table.groupby(x, as_index=False, sort=False, dropna=False)[[number]].mean()


def _line(axes: Axes, rows: pd.DataFrame, x: str, number: str, colour: str, marker: str, label: str) -> None:
    """Words that are no numbers stand side by side, in the order of the table."""
    places = rows[x] if pd.api.types.is_numeric_dtype(rows[x]) else rows[x].fillna("(default)").astype(str)
    values = rows[number].to_numpy(float) * (100 if number in PERCENT else 1)
    axes.plot(places.to_numpy(), values, marker=marker, color=f"#{colour}", label=label or None)
    if pd.api.types.is_numeric_dtype(rows[x]) and len(places.unique()) <= 8:
        axes.set_xticks(sorted(places.unique()))


def _legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _plain(table: pd.DataFrame) -> pd.Series:
    return table[table["num_members"] == 0].iloc[0]


def _members(table: pd.DataFrame) -> list[str]:
    """Names in member order: the teams of one."""
    return table.loc[table["num_members"] == 1, "team"].unique().tolist()


def _fastest(table: pd.DataFrame, column: str, most: int) -> pd.DataFrame:
    """The `most` best teams, best last: it is drawn at the top."""
    return table[table["num_members"] > 0].nlargest(most, column).iloc[::-1].reset_index(drop=True)


def _show_members(axes: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """A matrix of dots: row = team, column = member, filled where it belongs to the team."""
    inside = np.array([[name in team.split("+") for name in names] for team in rows["team"]])
    for column, (name, colour) in enumerate(colours(names).items()):
        places = np.arange(len(rows))
        axes.scatter(np.full(len(rows), column), places, s=30, color="#e4e7eb")
        axes.scatter(np.full(len(rows), column)[inside[:, column]], places[inside[:, column]], s=60, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
