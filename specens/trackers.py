"""Experiment trackers: Weights & Biases, and none. The only file that imports wandb, and only inside functions.

The files of a run folder are the results; a tracker shows them elsewhere. So a failing service never raises, nothing
asks a question and nothing keeps a run waiting for long: what goes wrong becomes one warning line.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from specens.errors import UserError, one_line
from specens.files import plain

log = logging.getLogger("specens")

Cell = str | float | int | bool | None
Mode = Literal["online", "offline", "disabled"]

MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""Accepted modes, W&B's older words included, and what they mean."""

EXIT_CODES = {"failed": 1, "interrupted": 130}
"""Exit code shown by W&B for a run's status; every other status is a success."""

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 120.0

PROMPT_COLUMNS = (
    "prompt_id",
    "category",
    "prompt_text",
    "text",
    "finish_reason",
    "num_steps",
    "decode_s",
    "prefill_s",
    "baseline_decode_s",
    "is_identical",
    "fork_at",
    "fork_margin",
    "error",
)
"""Columns of every run's table of prompts, in this order; further ones follow."""


class Tracker(Protocol):
    """Follows one run: `start`, `prompt_done` after every prompt, `finish` in a `finally` (twice does no harm)."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Open a run whose own files lie under `folder`; `config` is the resolved configuration."""
        ...

    def prompt_done(self, row: Mapping[str, Any], step: int) -> None:
        """`row` is the running summary over the first `step` prompts (keys of `summary.json`)."""
        ...

    def finish(
        self,
        summary: Mapping[str, Any],
        drafters: Sequence[Mapping[str, Any]],
        prompts: Sequence[Mapping[str, Any]],
        status: str,
    ) -> None:
        """Log the final summary and one row per drafter and per prompt, then close the run.

        `status` is "failed", "interrupted", or anything else for a success.
        """
        ...


class NoTracker:
    """Tracks nothing."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        pass

    def prompt_done(self, row: Mapping[str, Any], step: int) -> None:
        pass

    def finish(
        self,
        summary: Mapping[str, Any],
        drafters: Sequence[Mapping[str, Any]],
        prompts: Sequence[Mapping[str, Any]],
        status: str,
    ) -> None:
        pass


class WandbTracker:
    """One W&B run per job, also when many jobs share a process.

    `mode` is "online", "offline", "disabled", or None for what WANDB_MODE says (online if it says nothing). Online
    without an API key or without the network becomes offline with one notice that tells how to upload later.

    Raises:
        UserError: `mode` or `tags` (when built) or WANDB_MODE (at `start`) is not usable.
    """

    def __init__(
        self,
        *,
        project: str = "specens",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        if isinstance(tags, str):
            raise UserError(f"tracker.tags is the text {tags!r}: give a list, tracker.tags=[{tags}]")
        self._mode: Mode | None = None if mode is None else _known_mode(mode, "tracker.mode")
        self._identity = {"project": project, "entity": entity, "name": name, "group": group, "tags": tuple(tags)}
        self._run: Any = None
        self._has_warned = False

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        mode = self._mode
        if mode is None:
            mode = _known_mode(os.environ.get("WANDB_MODE") or "online", "the environment variable WANDB_MODE")
        if mode == "disabled":
            return
        self._run = self._attempt("start", lambda: self._open(folder, plain(config), mode))

    def prompt_done(self, row: Mapping[str, Any], step: int) -> None:
        if self._run is None or self._has_warned:
            return
        # Committed at once: W&B would hold the row back and let it overwrite the final summary later.
        self._attempt("log progress", lambda: self._run.log(progress_scalars(row), step=step, commit=True))

    def finish(
        self,
        summary: Mapping[str, Any],
        drafters: Sequence[Mapping[str, Any]],
        prompts: Sequence[Mapping[str, Any]],
        status: str,
    ) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        self._attempt("log the summary", lambda: run.summary.update({**flatten(summary), "status": status}))
        self._attempt("log the tables", lambda: run.log(_tables(summary, drafters, prompts)))
        self._attempt("close its run", lambda: run.finish(exit_code=EXIT_CODES.get(status, 0)))

    def _open(self, folder: Path, config: dict[str, Any], mode: Mode) -> Any:
        import wandb

        # Global settings first: they silence the login as well, and a silent library never prompts.
        quiet: dict[str, Any] = {"silent": True, "quiet": True, "console": "off"}
        wandb.setup(settings=wandb.Settings(mode=mode, **quiet))
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, disable_job_creation=True, **quiet
        )

        def init(mode: Mode) -> Any:
            # "create_new": the default would hand every later job of a sweep the first job's run.
            return wandb.init(
                **self._identity, config=config, dir=str(folder), mode=mode, reinit="create_new", settings=settings
            )

        if mode == "offline":
            return init(mode)
        try:
            # `verify` asks the server, so a dead network shows here within seconds.
            if wandb.login(prompt=False, verify=True):
                run = init("online")
                log.info("W&B run: %s", run.url)
                return run
            reason = "no API key found"
        except Exception as error:
            reason = one_line(error)
        run = init("offline")
        log.warning("W&B: %s; logging offline, upload later with: wandb sync %s", reason, Path(run.dir).parent)
        return run

    def _attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """What `action` returns; None and a warning if it fails. One line per run: later ones are mostly echoes."""
        try:
            return action()
        except Exception as error:
            if not self._has_warned:
                log.warning(
                    "W&B failed to %s (%s); going on without, the run folder has everything", what, one_line(error)
                )
            self._has_warned = True


def progress_scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a running summary, flat: its own, and `win_rate/<name>`, `token_share/<name>` of every drafter.

    Missing values (None, NaN) are left out, so a chart has a gap there and not a zero.
    """
    summary = plain(row)
    scalars = {key: value for key, value in summary.items() if _is_number(value)}
    for name, numbers in summary.get("drafters", {}).items():
        for key in ("win_rate", "token_share"):
            if _is_number(numbers.get(key)):
                scalars[f"{key}/{name}"] = numbers[key]
    return scalars


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level, keys joined by "/" ("drafters/ngram/win_rate"). Lists stay, NaN becomes None."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = plain(value)
    return flat


def table_rows(rows: Sequence[Mapping[str, Any]], fixed_columns: Sequence[str]) -> tuple[list[str], list[list[Cell]]]:
    """Column names and cells of a table: the fixed columns, then the rows' further ones in order of appearance.

    W&B refuses a column that mixes types and rows of unequal length. So every column is all bool, all int, all float or
    all str, with None for what a row lacks; token lists become JSON text.
    """
    columns = list(dict.fromkeys([*fixed_columns, *(key for row in rows for key in row)]))
    by_column = [_one_type([plain(row.get(column)) for row in rows]) for column in columns]
    return columns, [list(cells) for cells in zip(*by_column, strict=True)]


def _one_type(cells: Sequence[Any]) -> list[Cell]:
    """A column's plain values as one type; None stays None."""
    types = {type(cell) for cell in cells if cell is not None}
    if types == {int, float}:
        return [None if cell is None else float(cell) for cell in cells]
    if len(types) <= 1 and types <= {bool, int, float, str}:
        return list(cells)
    return [cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]


def _tables(
    summary: Mapping[str, Any], drafters: Sequence[Mapping[str, Any]], prompts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Both tables and the bar chart. A table logged twice keeps its first state, so this happens once, at the end."""
    import wandb

    logged: dict[str, Any] = {}
    from specens.analysis.metrics import DRAFTER_COLUMNS  # pandas only when a run is logged

    for key, rows, fixed in (("drafters", drafters, DRAFTER_COLUMNS), ("prompts", prompts, PROMPT_COLUMNS)):
        columns, data = table_rows(rows, fixed)
        logged[key] = wandb.Table(columns=list(columns), data=list(data))
    rates = {name: numbers.get("win_rate") for name, numbers in plain(summary).get("drafters", {}).items()}
    bars: list[Any] = [[name, rate] for name, rate in rates.items() if _is_number(rate)]
    if bars:
        bar_table = wandb.Table(columns=["drafter", "win_rate"], data=bars)
        logged["win_rates"] = wandb.plot.bar(bar_table, "drafter", "win_rate", title="Win rate by drafter")
    return logged


def _known_mode(mode: str, source: str) -> Mode:
    if mode not in MODES:
        raise UserError(f"{source} is {mode!r}: use online, offline or disabled")
    return MODES[mode]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)  # a bool is a number here: it charts as 0 or 1
