"""What is seen of a race: on a terminal two panes that fill as they decode, in a pipe the two texts
at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specens.analysis.palette import PALETTE, contrast
from specens.race.lane import Lane, readout, standing
from specens.report.markup import visible

SIDE_BY_SIDE = 80
"""Columns from which the panes stand beside each other; in fewer they stand one above the other."""

FRAME_S = 0.05
"""Between two frames, at least. Drawing happens between steps, on neither clock."""

NOTE = "underlined: several; plain: target"


class View:
    """Shows the lanes of a race. `members` are the drafters' names, in the owner bits' order."""

    def __init__(self, console: Console, members: Sequence[str]) -> None:
        self.console = console
        self._members = [visible(name) for name in members]
        # Escape codes that move the cursor are for terminals alone, also where FORCE_COLOR asks for
        # colours.
        self._is_live = console.is_interactive and console.file.isatty()

    def title(self, text: str) -> None:
        """Which prompt it is, on one line of a terminal."""
        line = Text(visible(" ".join(text.split())))
        if self._is_live:
            self.console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self.console.print(line, soft_wrap=True)

    @contextmanager
    def watching(self, lanes: Sequence[Lane]) -> Iterator[Callable[[], None]]:
        """While it is open, the panes are on the screen; call what it yields after every step."""
        if not self._is_live:
            yield lambda: None
            return
        shown_at = 0.0
        with Live(
            console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop"
        ) as live:

            def refresh() -> None:
                nonlocal shown_at
                if time.monotonic() - shown_at >= FRAME_S:
                    live.update(self.frame(lanes), refresh=True)
                    shown_at = time.monotonic()

            yield refresh

    def frame(self, lanes: Sequence[Lane]) -> RenderableType:
        """All of a screen, and not a line more: the legend, the panes with the ends of their texts,
        and which is ahead.
        """
        legend, footer = (
            self._legend(NOTE if self.console.width >= SIDE_BY_SIDE else ""),
            Text(standing(lanes)),
        )
        taken = sum(len(text.wrap(self.console, self.console.width)) for text in (legend, footer))
        return Group(legend, self._panes(lanes, self.console.height - taken - 1), footer)

    def result(self, lanes: Sequence[Lane], verdict: str) -> None:
        """Both texts, whole, and the verdict."""
        if self._is_live:
            self.console.print(self._legend(NOTE))
            self.console.print(self._panes(lanes))
        else:
            for lane in lanes:
                self.console.print(Text(f"\n{_headline(lane)}: {readout(lane)}"), soft_wrap=True)
                self.console.print(self._text(lane), soft_wrap=True)
            self.console.print()
        self.console.print(Text(visible(verdict), style="bold"), soft_wrap=True)

    def _panes(self, lanes: Sequence[Lane], height: int | None = None) -> RenderableType:
        """The panes in `height` lines together, or in as many as their texts need."""
        width = self.console.width
        if width < SIDE_BY_SIDE:
            each = None if height is None else height // len(lanes)
            return Group(*(self._pane(lane, width, each) for lane in lanes))
        grid = Table.grid(padding=0)
        grid.add_row(*(self._pane(lane, width // len(lanes), height) for lane in lanes))
        return grid

    def _pane(self, lane: Lane, width: int, height: int | None) -> Panel:
        lines = self._text(lane).wrap(self.console, max(width - 4, 1), overflow="fold")
        room = max(len(lines) if height is None else height - 2, 1)
        body = Text("\n").join(lines[-room:])  # the end of the text, which is where it grows
        return Panel(
            body,
            title=Text(_headline(lane)),
            subtitle=Text(readout(lane)),
            width=width,
            height=room + 2,
        )

    def _text(self, lane: Lane) -> Text:
        """A lane's text, every token in the colours of the first member that proposed it."""
        text = Text()
        for piece, mask in lane.coloured():
            text.append(visible(piece), style_of(mask))
        return text

    def _legend(self, note: str) -> Text:
        legend = Text()
        for index, name in enumerate(self._members):
            legend.append(name, style_of(1 << index)).append("  ")
        return legend.append(note, "dim")


def _headline(lane: Lane) -> str:
    return f"{visible(lane.name)}, {lane.num_tokens} tokens"


def style_of(mask: int) -> Style:
    """How a token looks that these members proposed: on the first one's colour, underlined if there
    are several. Black or white on it, whichever is easier to read, so that it does not matter what
    the terminal's own colours are.
    """
    if not mask:
        return Style.null()
    first = (mask & -mask).bit_length() - 1
    colour = PALETTE[first % len(PALETTE)]
    ink = max("000000", "ffffff", key=lambda ink: contrast(ink, colour))
    return Style(color=f"#{ink}", bgcolor=f"#{colour}", bold=True, underline=mask & (mask - 1) != 0)
