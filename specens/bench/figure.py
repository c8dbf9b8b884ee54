"""The figure of a bench: speed-up of every system, and where a token's time goes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specens.analysis.palette import PALETTE
from specens.bench.summary import AR

BLUE, ORANGE, GREEN, _, _, PINK = (f"#{colour}" for colour in PALETTE[:6])
COLOURS = {"verify": BLUE, "draft": ORANGE, "host": PINK}
TITLES = {"host": "CPU overhead"}

Systems = Mapping[str, Mapping[str, Any]]


def draw(content: Mapping[str, Any], folder: Path) -> str | None:
    """Write `bench.png` and `bench.svg`; if that cannot be, say so in one line."""
    systems = {
        name: numbers
        for name, numbers in content["systems"].items()
        if numbers["speedup"] is not None
    }
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


def _speedups(axes: Any, systems: Systems) -> None:
    spans = [numbers["speedup"] for numbers in systems.values()]
    medians = [span["median"] for span in spans]
    below = [span["median"] - span["min"] for span in spans]
    above = [span["max"] - span["median"] for span in spans]
    colours = ["#9d9da1" if name == AR else GREEN for name in systems]
    axes.barh(list(systems), medians, xerr=[below, above], color=colours, capsize=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("x AR decoding (median, least to most of the repeats)")


def _times(axes: Any, systems: Systems) -> None:
    """Milliseconds per token: in parts where a system reports what it spends."""
    per_token = [1e3 / numbers["tokens_per_s"]["median"] for numbers in systems.values()]
    left = [0.0] * len(systems)
    for part, colour in COLOURS.items():
        shares = [numbers[f"{part}_fraction"] or 0.0 for numbers in systems.values()]
        widths = [share * ms for share, ms in zip(shares, per_token, strict=True)]
        axes.barh(list(systems), widths, left=left, color=colour, label=TITLES.get(part, part))
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    whole = [0.0 if known else ms for known, ms in zip(left, per_token, strict=True)]
    axes.barh(list(systems), whole, color="#e0e0e0", label="not reported")
    axes.set_xlabel("ms per token")
    legend = {"frameon": False, "fontsize": "small", "ncols": 4}
    axes.legend(**legend, loc="lower center", bbox_to_anchor=(0.5, 1))
