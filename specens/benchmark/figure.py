"""The figure of a bench: speed-up of every system, and where a token's time goes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specens.benchmark.summary import PLAIN

PARTS = {"verify": "#0072b2", "draft": "#e69f00", "host": "#cc79a7"}
"""Colours that colour-blind readers can tell apart (Okabe and Ito)."""


def draw(content: Mapping[str, Any], folder: Path) -> str | None:
    """Write `bench.png` and `bench.svg`; if that cannot be, say so in one line."""
    systems = {name: numbers for name, numbers in content["systems"].items() if numbers["speedup"] is not None}
    if not systems:
        return "no figure: nothing was measured"
    if importlib.util.find_spec("matplotlib") is None:
        return "no figure: matplotlib is not installed (pip install 'specens[bench]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.32 * len(systems)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _speedups(left, systems)
    _times(right, systems)
    left.invert_yaxis()
    for name in ("bench.png", "bench.svg"):
        figure.savefig(folder / name, dpi=150)
    return None


def _speedups(axes: Any, systems: Mapping[str, Mapping[str, Any]]) -> None:
    names, spans = list(systems), [numbers["speedup"] for numbers in systems.values()]
    medians = [span["median"] for span in spans]
    around = [
        [span["median"] - span["min"] for span in spans],
        [span["max"] - span["median"] for span in spans],
    ]
    axes.barh(
        names, medians, xerr=around, color=["#9d9da1" if name == PLAIN else "#009e73" for name in names], capsize=3
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("x plain decoding (median, least to most of the repeats)")


def _times(axes: Any, systems: Mapping[str, Mapping[str, Any]]) -> None:
    """Milliseconds per token: cut into parts where a system says what it spends."""
    begin = dict.fromkeys(systems, 0.0)
    for part, colour in PARTS.items():
        widths = {name: _ms_per_token(numbers, part) for name, numbers in systems.items()}
        axes.barh(list(systems), list(widths.values()), left=list(begin.values()), color=colour, label=part)
        begin = {name: begin[name] + widths[name] for name in systems}
    whole = {name: 0.0 if begin[name] else 1e3 / numbers["tokens_per_s"]["median"] for name, numbers in systems.items()}
    axes.barh(list(systems), list(whole.values()), color="#e0e0e0", label="not told apart")
    axes.set_xlabel("ms per token")
    axes.legend(frameon=False, fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _ms_per_token(numbers: Mapping[str, Any], part: str) -> float:
    share = numbers[f"{part}_fraction"]
    return 0.0 if share is None else share * 1e3 / numbers["tokens_per_s"]["median"]
