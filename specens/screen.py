"""What a person at the terminal sees of a run: a line per prompt, a live line while one is decoded, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from specens.analysis.html.markup import visible
from specens.decoding.types import StepRecord
from specens.errors import one_line
from specens.files import REPLAY_PAGE_NAME
from specens.tables import PromptRecord


class Screen:
    """Writes to the terminal; in a pipe the live line is left out."""

    def __init__(self, console: Console | None = None) -> None:
        # Without a terminal to measure, rich would squeeze the table into 80 columns.
        self._console = console or Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 100)
        self._status: Status | None = None

    def say(self, line: str) -> None:
        self._console.print(escape(line))

    def begin_prompt(self, label: str) -> None:
        self.end_prompt()
        if self._console.is_terminal:
            self._status = self._console.status(escape(label))
            self._status.start()

    def step(self, label: str, steps: Sequence[StepRecord]) -> None:
        """Refresh the live line."""
        if self._status is not None and steps:
            self._status.update(escape(f"{label}  {progress(steps)}"))

    def end_prompt(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def prompt_done(self, label: str, record: PromptRecord, steps: Sequence[StepRecord]) -> None:
        self.end_prompt()
        label = visible(label).replace("\n", " ")  # with the prompt's id, which may be anything
        if record.error is not None:
            return self._console.print(f"{escape(label)}  [red]failed:[/red] {escape(one_line(record.error))}")
        line = f"{label}  {progress(steps)}"
        if record.baseline_decode_s and record.decode_s and record.baseline_ids:
            plain = len(record.baseline_ids) / record.baseline_decode_s
            line += f"  plain {plain:.1f} tok/s ({len(record.output_ids) / record.decode_s / plain:.2f}x)"
        line = escape(line)
        if record.is_identical is not None:
            at = f"DIFFERS at token {record.fork_at}, margin {record.fork_margin:.2g}" if record.fork_margin else ""
            line += "  identical" if record.is_identical else f"  [red]{at or 'DIFFERS'}[/red]"
        return self._console.print(line)

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The table of drafters and the run's main numbers."""
        self.drafters(summary)
        parts = [
            f"acceptance length {_number(summary['acceptance_length'], '.2f')}",
            f"{_number(summary['tokens_per_s'], '.1f')} tok/s",
        ]
        if summary["speedup"] is not None:
            plain = _number(summary["baseline_tokens_per_s"], ".1f")
            width = summary.get("exact_width")
            also = f" at exact_width={width} too" if width is not None else ""
            parts.append(f"{summary['speedup']:.2f}x of plain decoding{also} ({plain} tok/s)")
        if summary["num_identical"] is not None:
            parts.append(f"identical {summary['num_identical']}/{summary['num_prompts'] - summary['num_failed']}")
        parts.append(f"time outside drafting and verifying {_number(summary['host_fraction'], '.1%')}")
        if summary["lossy"]:
            parts.append(f"LOSSY (verifier={summary['verifier']}): need not be the target's own text")
        if summary["num_failed"]:
            parts.append(f"{summary['num_failed']} of {summary['num_prompts']} prompts FAILED")
        self.say(", ".join(parts))
        self.say(f"run folder: {folder}")
        if (folder / REPLAY_PAGE_NAME).is_file():
            self.say(f"what every team of the drafters would have done: {folder / REPLAY_PAGE_NAME}")

    def drafters(self, summary: Mapping[str, Any]) -> None:
        """The table of drafters, if there are any."""
        title = f"LOSSY: verifier={summary['verifier']}" if summary["lossy"] else None
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title)
        table.add_column("drafter", no_wrap=True)
        for header, _, _ in _COLUMNS:
            table.add_column(header, justify="right")
        for name, numbers in summary["drafters"].items():
            table.add_row(escape(name), *(_number(numbers.get(key), form) for _, key, form in _COLUMNS))
        if summary["drafters"]:
            self._console.print(table)


_COLUMNS = (
    ("win rate", "win_rate", ".1%"),
    ("sole wins", "sole_win_rate", ".1%"),
    ("token share", "token_share", ".1%"),
    ("accepted", "acceptance_rate", ".1%"),
    ("length alone", "solo_acceptance_length", ".2f"),
    ("silent", "silent_rate", ".1%"),
    ("draft ms/step", "draft_ms_per_step", ".2f"),
)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def progress(steps: Sequence[StepRecord]) -> str:
    """Tokens, speed, acceptance length and who wins, over the steps so far. Wins are first-come here: the table at the end
    splits ties.
    """
    num_tokens = sum(step.num_emitted for step in steps)
    seconds = sum(step.draft_ms + step.verify_ms + step.host_ms for step in steps) / 1e3
    line = f"{num_tokens:4d} tokens  {num_tokens / seconds:5.1f} tok/s  acceptance length {num_tokens / len(steps):.2f}"
    names = [member.drafter for member in steps[0].members]
    tokens = {
        name: sum(owners >> index & 1 for step in steps for owners in step.token_owners)
        for index, name in enumerate(names)
    }
    best = max(tokens, key=lambda name: tokens[name], default=None)
    return line if best is None or tokens[best] == 0 else f"{line}  ahead: {best} ({tokens[best]} tokens)"
