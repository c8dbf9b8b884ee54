"""The figure of one step: a token tree, which drafters proposed each node, what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specens.analysis.figures.canvas import GREY, WIDTH, canvas, colours, markers
from specens.decoding.types import ROOT, TokenTree, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def token_tree(
    tree: TokenTree, verdict: Verdict, texts: Sequence[str], names: Sequence[str],
    context: str, target_text: str,
) -> Figure:  # fmt: skip
    """Boxes: the text of every node, at its depth, with a marker of every member that proposed it.
    The accepted path has a bold frame, and ends in the target's own token. `context` is the text of
    the last committed token.
    """
    places = _places(tree)
    figure, (axes,) = canvas("", 0.9 + 0.62 * (1 + max(-y for _, y in places.values())))
    axes.set_axis_off()
    accepted = {ROOT, *verdict.path}
    for node, parent in enumerate(tree.parents):
        is_accepted = node in accepted
        _edge(axes, places[parent], places[node], 2.4 if is_accepted else 0.8)
        _box(axes, places[node], texts[node], "#ffffff", 2.4 if is_accepted else 0.8)
    _box(axes, places[ROOT], context, "#e4e7eb", 2.4)
    x, y = places[verdict.path[-1] if verdict.path else ROOT]
    end = (x + 1, y)
    if end in places.values():
        end = (x + 1, min(b for _, b in places.values()) - 1)
    _edge(axes, (x, y), end, 2.4)
    _box(axes, end, target_text, "#1f2933", 2.4, "#ffffff")
    for index, (name, marker) in enumerate(zip(names, markers(names), strict=True)):
        owned = [place for node, place in places.items() if _owns(tree, node, index)]
        shift = 0.13 * (index - (len(names) - 1) / 2)
        style: dict[str, Any] = {"color": colours(names)[name], "marker": marker, "s": 48}
        xs, ys = [x + shift for x, _ in owned], [y - 0.36 for _, y in owned]
        axes.scatter(xs, ys, label=name, zorder=4, edgecolor="#1f2933", linewidth=0.5, **style)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names))
    axes.set_xlim(-0.5, max(x for x, _ in [*places.values(), end]) + 0.5)
    axes.set_ylim(min(y for _, y in [*places.values(), end]) - 0.6, 0.5)
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1])
    return figure


def _owns(tree: TokenTree, node: int, member: int) -> bool:
    return node != ROOT and bool(tree.owners[node] >> member & 1)


def _places(tree: TokenTree) -> dict[int, tuple[float, float]]:
    """(depth, row) of every node and of the root; a first child keeps its parent's row."""
    places: dict[int, tuple[float, float]] = {ROOT: (0.0, 0.0)}
    rows = 0
    children = tree.children()
    stack = [ROOT]
    while stack:
        parent = stack.pop()
        below = list(children.get(parent, {}).values())
        if parent != ROOT and parent not in places:
            rows += 1
            places[parent] = (float(tree.depths[parent]), -float(rows))
        for first in below[:1]:
            places[first] = (float(tree.depths[first]), places[parent][1])
        stack += [*reversed(below[1:]), *below[:1]]
    return places


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    (x0, y0), (x1, y1) = start, end
    axes.plot([x0, (x0 + x1) / 2, (x0 + x1) / 2, x1], [y0, y0, y1, y1], "-", color=GREY, lw=width)


def _box(
    axes: Axes, place: tuple[float, float], text: str, fill: str, width: float, ink: str = "#1f2933"
) -> None:
    frame = {"boxstyle": "round,pad=0.35", "facecolor": fill, "edgecolor": "#1f2933", "lw": width}
    style: dict[str, Any] = {"ha": "center", "va": "center", "family": "monospace", "zorder": 3}
    axes.text(*place, text, bbox=frame, color=ink, fontsize=9, **style)
