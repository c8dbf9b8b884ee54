"""What the terminal shows of a run: a line per prompt, a live line while one is decoded, a table at
the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from specens.analysis.formats import number
from specens.analysis.metrics import metrics_of
from specens.cli import discard_output
from specens.decoding.types import StepRecord
from specens.errors import one_line
from specens.records.files import REPLAY_PAGE_NAME
from specens.records.schema import PromptRecord
from specens.report.markup import visible


class PatientConsole(Console):
    """A console whose reader may leave before the end, as `head` does: the work goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


class Terminal:
    """Writes to the terminal; in a pipe the live line is left out."""

    def __init__(self, console: Console | None = None) -> None:
        # Without a terminal to measure, rich would squeeze the table into 80 columns.
        width = None if sys.stdout.isatty() else 100
        self._console = console or PatientConsole(highlight=False, soft_wrap=True, width=width)
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

    def watch(self, label: str) -> Callable[[str, Sequence[StepRecord]], None]:
        """A function that shows a decoding of one prompt: its beginning, then each step."""

        def show(what: str, steps: Sequence[StepRecord]) -> None:
            if steps:
                self.step(label + what, steps)
            else:
                self.begin_prompt(label + what)

        return show

    def end_prompt(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def prompt_done(self, label: str, record: PromptRecord, steps: Sequence[StepRecord]) -> None:
        self.end_prompt()
        label = visible(label).replace("\n", " ")  # with the prompt's id, which may be anything
        if record.error is not None:
            error = escape(one_line(record.error))
            return self._console.print(f"{escape(label)}  [red]failed:[/red] {error}")
        line = f"{label}  {progress(steps)}"
        if record.baseline_decode_s and record.decode_s and record.baseline_ids:
            baseline = len(record.baseline_ids) / record.baseline_decode_s
            speedup = len(record.output_ids) / record.decode_s / baseline
            line += f"  AR {baseline:.1f} tok/s ({speedup:.2f}x)"
        line = escape(line)
        if record.is_identical:
            line += "  identical"
        elif record.is_identical is not None:
            gap = "" if record.logit_gap is None else f", logit gap {record.logit_gap:.2g}"
            line += f"  [red]DIFFERS at token {record.divergence}{gap}[/red]"
        return self._console.print(line)

    def summary(
        self, summary: Mapping[str, Any], folder: Path, metrics: Sequence[Any] = ()
    ) -> None:
        """The table of drafters and the run's main numbers, those of further metrics at the end."""
        self.drafters(summary, metrics)
        parts = [
            f"acceptance length {number(summary['acceptance_length'], '.2f')}",
            f"{number(summary['tokens_per_s'], '.1f')} tok/s",
        ]
        if summary["speedup"] is not None:
            width = summary.get("exact_width")
            also = f" at exact_width={width} too" if width is not None else ""
            baseline = number(summary["baseline_tokens_per_s"], ".1f")
            parts.append(f"{summary['speedup']:.2f}x of AR decoding{also} ({baseline} tok/s)")
        if summary["num_identical"] is not None:
            done = summary["num_prompts"] - summary["num_failed"]
            parts.append(f"identical {summary['num_identical']}/{done}")
        parts.append(f"CPU overhead {number(summary['host_fraction'], '.1%')}")
        for metric in metrics_of("run", "terminal", metrics):
            parts.append(f"{metric.title} {number(summary.get(metric.key), metric.form)}")
        if summary["lossy"]:
            verifier = summary["verifier"]
            parts.append(f"LOSSY (verifier={verifier}): need not be the target's own text")
        if summary["num_failed"]:
            parts.append(f"{summary['num_failed']} of {summary['num_prompts']} prompts FAILED")
        self.say(", ".join(parts))
        self.say(f"run folder: {folder}")
        if (folder / REPLAY_PAGE_NAME).is_file():
            self.say(f"what every subset would have done: {folder / REPLAY_PAGE_NAME}")

    def drafters(self, summary: Mapping[str, Any], metrics: Sequence[Any] = ()) -> None:
        """The table of drafters, if there are any."""
        title = f"LOSSY: verifier={summary['verifier']}" if summary["lossy"] else None
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title)
        table.add_column("drafter", no_wrap=True)
        columns = metrics_of("drafter", "terminal", metrics)
        for metric in columns:
            table.add_column(metric.title, justify="right")
        for name, numbers in summary["drafters"].items():
            cells = [number(numbers.get(metric.key), metric.form) for metric in columns]
            table.add_row(escape(name), *cells)
        if summary["drafters"]:
            self._console.print(table)


def progress(steps: Sequence[StepRecord]) -> str:
    """Tokens, speed, acceptance length and the leading drafter, over the steps so far. Ties go to
    the first member here: the table at the end splits them.
    """
    num_tokens = sum(step.num_emitted for step in steps)
    speed = num_tokens / sum(step.seconds for step in steps)
    length = num_tokens / len(steps)
    line = f"{num_tokens:4d} tokens  {speed:5.1f} tok/s  acceptance length {length:.2f}"
    tokens = {
        member.drafter: sum(owners >> index & 1 for step in steps for owners in step.token_owners)
        for index, member in enumerate(steps[0].members)
    }
    best = max(tokens, key=lambda name: tokens[name], default=None)
    if best is None or tokens[best] == 0:
        return line
    return f"{line}  ahead: {best} ({tokens[best]} tokens)"
