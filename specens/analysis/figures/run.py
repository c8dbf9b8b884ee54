"""Figures of a run and of a sweep, from their tables: they show what `metrics` and `sweeps` define,
and compute none of it.

Every function returns a matplotlib figure and shows nothing. Raises UserError if matplotlib is
missing or nothing is to be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from specens.analysis.figures.canvas import (
    COLOURS,
    GREY,
    KNOWN,
    MARKERS,
    canvas,
    colours,
    floats,
    from_zero,
    label,
    legend_beside,
    line,
    markers,
    means,
    name_bars,
    only,
    percents,
)
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def win_rates(summary: Mapping[str, Any]) -> Figure:
    """Bars: the share of steps that each drafter won, what it won alone in full colour; and the
    steps that none won.
    """
    drafters = _drafters(summary)
    names, none = [*drafters, "no drafter"], summary["no_win_rate"]
    sole = percents([*(numbers["sole_win_rate"] for numbers in drafters.values()), none])
    whole = percents([*(numbers["win_rate"] for numbers in drafters.values()), none])
    shades = [*colours(drafters).values(), GREY]
    figure, (axes,) = canvas("Share of steps won", 1.3 + 0.36 * len(names))
    axes.barh(names, sole, color=shades)
    ties: dict[str, Any] = {"alpha": 0.45, "hatch": "///", "edgecolor": "white"}
    axes.barh(names, whole - sole, left=sole, color=shades, **ties)
    name_bars(axes, whole, ".0f", "%")
    axes.set_xlabel("steps (%); hatched: its part of ties")
    return figure


def share_against_time(summary: Mapping[str, Any]) -> Figure:
    """Points: what each drafter gave (its Shapley share of the accepted tokens) against what it
    took (ms per step).
    """
    drafters = _drafters(summary)
    figure, (axes,) = canvas("Token share against drafting time", 3.6)
    times = floats([numbers["draft_ms_per_step"] for numbers in drafters.values()])
    shares = percents([numbers["token_share"] for numbers in drafters.values()])
    for (name, colour), marker, ms, share in zip(
        colours(drafters).items(), markers(drafters), times, shares, strict=True
    ):
        if math.isnan(share):
            continue
        edge: dict[str, Any] = {"markeredgecolor": "black", "markeredgewidth": 0.5}
        axes.plot([ms], [share], marker, color=colour, markersize=10, **edge)
        axes.annotate(name, (ms, share), xytext=(8, 5), textcoords="offset points")
    if times.min(initial=math.inf) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(0.15)
    axes.set_xlabel(label("draft_ms_per_step", "drafter"))
    axes.set_ylabel(label("token_share", "drafter"))
    return figure


def acceptance_by_depth(summary: Mapping[str, Any]) -> Figure:
    """Lines: the chance that a drafter's proposal agrees at a depth, once it agreed above and goes
    that deep.
    """
    drafters = _drafters(summary)
    figure, (axes,) = canvas("Acceptance by depth", 3.6)
    deepest = 1
    for (name, colour), marker in zip(colours(drafters).items(), markers(drafters), strict=True):
        rates = percents(drafters[name]["acceptance_by_depth"])
        deepest = max(deepest, len(rates))
        axes.plot(range(1, len(rates) + 1), rates, marker=marker, color=colour, label=name)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(-3, 103)
    axes.set_xlabel("depth in the proposal (tokens)")
    axes.set_ylabel("proposals that agree there (%)")
    legend_beside(axes)
    return figure


def by_category(summary: Mapping[str, Any]) -> Figure:
    """Bars per category: speed (against AR decoding, if the run has a baseline) and tokens per
    target forward.
    """
    categories: Mapping[str, Mapping[str, Any]] = summary.get("by_category") or {}
    if not categories:
        raise UserError("no category has a finished prompt: there is nothing to compare")
    has_baseline = any(numbers["speedup"] is not None for numbers in categories.values())
    columns = ("speedup" if has_baseline else "tokens_per_s", "acceptance_length")
    figure, panels = canvas(
        "Speed and acceptance by category", 1.4 + 0.36 * len(categories), columns=2, sharey=True
    )
    for axes, column, colour in zip(panels, columns, (COLOURS[2], COLOURS[0]), strict=True):
        values = floats([numbers[column] for numbers in categories.values()])
        axes.barh(list(categories), values, color=colour)
        name_bars(axes, values, KNOWN["run", column].form)
        axes.set_xlabel(label(column))
        if column != "tokens_per_s":
            axes.axvline(1, color="black", linewidth=0.8)
    return figure


def sweep(table: pd.DataFrame, x: str, numbers: Sequence[str], *, by: Sequence[str] = ()) -> Figure:
    """A panel per number of `sweeps.sweep_table`: its values over the override `x`, a line per
    combination of the overrides `by`.
    """
    figure, panels = canvas(f"Sweep over {x}", 3.4, columns=len(numbers))
    groups = table.groupby(list(by), sort=False, dropna=False) if by else [((), table)]
    lines: list[tuple[Any, pd.DataFrame]] = list(groups)
    for axes, number in zip(panels, numbers, strict=True):
        for index, (values, rows) in enumerate(lines):
            name = ", ".join(f"{key}={value}" for key, value in zip(by, values, strict=True))
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            line(axes, rows, x, number, colour, marker, name)
        if number == "tokens_per_s" and table["baseline_tokens_per_s"].notna().to_numpy().any():
            baseline = means(table, x, "baseline_tokens_per_s")
            line(axes, baseline, x, "baseline_tokens_per_s", GREY, "_", "AR decoding")
        from_zero(axes)
        axes.set_xlabel(x.rpartition(".")[2])
        axes.set_ylabel(label(number))
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
    return figure


def sweep_drafters(table: pd.DataFrame, x: str, number: str) -> Figure:
    """Lines: one number of `sweeps.sweep_drafters` over the override `x`, a line per drafter (the
    mean where jobs share an x).
    """
    names = list(table["drafter"].unique())
    title = f"{number.replace('_', ' ').capitalize()} of each drafter over {x}"
    figure, (axes,) = canvas(title, 3.4)
    for (name, colour), marker in zip(colours(names).items(), markers(names), strict=True):
        line(axes, means(only(table, "drafter", name), x, number), x, number, colour, marker, name)
    from_zero(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(label(number, "drafter"))
    legend_beside(axes)
    return figure


def _drafters(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    if not summary.get("drafters"):
        raise UserError("no drafter took part in this run: there is nothing to compare")
    return summary["drafters"]
