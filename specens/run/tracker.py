"""Experiment trackers: Weights & Biases, and none. The only file that imports wandb, and only
inside functions.

The files of a run folder are the results; a tracker shows them elsewhere. So a failing service
never raises, nothing asks a question and nothing keeps a run waiting for long: what goes wrong
becomes one warning line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from specens.errors import UserError, one_line
from specens.records.files import COSTS_NAME, DENSE_NAME, REPLAY_NAME, SUMMARY_NAME, plain
from specens.run.tracker_tables import (
    PROMPT_COLUMNS,
    depth_rows,
    flatten,
    is_number,
    progress_scalars,
    table_rows,
)

log = logging.getLogger("specens")

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

STEP_METRICS = ("win_rate/*", "token_share/*")
"""Running numbers whose charts count target forwards, not prompts."""

TRACE_FILES = (
    DENSE_NAME,
    "prompts.parquet",
    "steps.parquet",
    "drafts.parquet",
    SUMMARY_NAME,
    COSTS_NAME,
)
"""Files of a run folder that go with its dense trace: with them it can be replayed."""

REPLAY_TABLES = ("subsets", "members", "policies")
"""Lists of rows in a replay's results: every subset of the members, what each member contributes,
and what other budgets would do.
"""


class Tracker(Protocol):
    """Follows one run: `start`, `prompt_done` after every prompt, `finish` in a `finally` (twice
    does no harm).
    """

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

    `mode` is "online", "offline", "disabled", or None for what WANDB_MODE says (online if it says
    nothing). Online without an API key or without the network becomes offline with one notice that
    tells how to upload later.

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
            raise UserError(
                f"tracker.tags is the text {tags!r}: give a list, tracker.tags=[{tags}]"
            )
        self._mode: Mode | None = None if mode is None else _known_mode(mode, "tracker.mode")
        self._identity = {
            "project": project,
            "entity": entity,
            "name": name,
            "group": group,
            "tags": tuple(tags),
        }
        self._run: Any = None
        self._folder = Path()
        self._has_warned = False

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        mode = self._mode
        if mode is None:
            mode = _known_mode(
                os.environ.get("WANDB_MODE") or "online", "the environment variable WANDB_MODE"
            )
        if mode == "disabled":
            return
        self._folder = folder
        self._run = run = self._attempt("start", lambda: self._open(folder, plain(config), mode))
        if run is not None:
            self._attempt("set its axes", lambda: _set_axes(run))

    def prompt_done(self, row: Mapping[str, Any], step: int) -> None:
        if self._run is None or self._has_warned:
            return
        # Committed at once: W&B would hold the row back and let it overwrite the final summary
        # later.
        self._attempt(
            "log progress", lambda: self._run.log(progress_scalars(row), step=step, commit=True)
        )

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
        with _copies_in(self._folder / "wandb"):
            self._attempt(
                "log the summary",
                lambda: run.summary.update({**flatten(summary), "status": status}),
            )
            self._attempt("log the tables", lambda: run.log(_tables(summary, drafters, prompts)))
            if (self._folder / REPLAY_NAME).is_file():
                self._attempt(
                    "log the replay", lambda: run.log(_replay_tables(self._folder / REPLAY_NAME))
                )
            if (self._folder / DENSE_NAME).is_file():
                self._attempt(
                    "log the dense trace",
                    lambda: run.log_artifact(_trace_artifact(self._folder, run.id)),
                )
            self._attempt("close its run", lambda: run.finish(exit_code=EXIT_CODES.get(status, 0)))

    def _open(self, folder: Path, config: dict[str, Any], mode: Mode) -> Any:
        import wandb

        # Global settings first: they silence the login as well, and a silent library never prompts.
        quiet: dict[str, Any] = {"silent": True, "quiet": True, "console": "off"}
        wandb.setup(settings=wandb.Settings(mode=mode, **quiet))
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            disable_job_creation=True,
            **quiet,
        )

        def init(mode: Mode) -> Any:
            # "create_new": the default would hand every later job of a sweep the first job's run.
            return wandb.init(
                **self._identity,
                config=config,
                dir=str(folder),
                mode=mode,
                reinit="create_new",
                settings=settings,
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
        log.warning(
            "W&B: %s; logging offline, upload later with: wandb sync %s",
            reason,
            Path(run.dir).parent,
        )
        return run

    def _attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """What `action` returns; None and a warning if it fails. One line per run: later ones are
        mostly echoes.
        """
        try:
            return action()
        except Exception as error:
            if not self._has_warned:
                log.warning(
                    "W&B failed to %s (%s); going on without, the run folder has everything",
                    what,
                    one_line(error),
                )
            self._has_warned = True


def _set_axes(run: Any) -> None:
    for name in STEP_METRICS:
        run.define_metric(name, step_metric="num_steps")


@contextmanager
def _copies_in(folder: Path) -> Iterator[None]:
    """W&B copies what tables and artifacts hold, to be uploaded later, into the home folder. Here
    it goes to `folder`, so that nothing of an offline run is anywhere else; unless the user has
    said where (WANDB_DATA_DIR).
    """
    if os.environ.get("WANDB_DATA_DIR"):
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str(folder.absolute())
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]


def _tables(
    summary: Mapping[str, Any],
    drafters: Sequence[Mapping[str, Any]],
    prompts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """All tables and charts. A table logged twice keeps its first state, so this happens once, at
    the end.
    """
    import wandb

    from specens.analysis.summary import DRAFTER_COLUMNS  # pandas only when a run is logged

    numbers = plain(summary)
    categories = [{"category": name, **row} for name, row in numbers.get("by_category", {}).items()]
    wins = [
        {"drafter": name, "win_rate": row.get("win_rate")}
        for name, row in numbers.get("drafters", {}).items()
    ]
    wins, depths = [row for row in wins if is_number(row["win_rate"])], depth_rows(summary)
    logged = {
        "drafters": _table(drafters, DRAFTER_COLUMNS),
        "prompts": _table(prompts, PROMPT_COLUMNS),
    }
    if categories:
        logged["categories"] = _table(categories)
    if wins:
        logged["win_rates"] = wandb.plot.bar(
            _table(wins), "drafter", "win_rate", title="Win rate by drafter"
        )
    if depths:
        logged["acceptance_by_depth"] = wandb.plot.line(
            _table(depths),
            "depth",
            "acceptance_rate",
            stroke="drafter",
            title="Acceptance by depth",
        )
    return logged


def _table(rows: Sequence[Mapping[str, Any]], fixed_columns: Sequence[str] = ()) -> Any:
    import wandb

    columns, data = table_rows(rows, fixed_columns)
    return wandb.Table(columns=list(columns), data=list(data))


def _replay_tables(path: Path) -> dict[str, Any]:
    """A table `replay_<name>` of each list of rows that the replay of this run has left."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {f"replay_{name}": _table(found[name]) for name in REPLAY_TABLES if found.get(name)}


def _trace_artifact(folder: Path, run_id: str) -> Any:
    """The dense trace and what else a replay reads: downloaded, it is a folder that can be
    replayed.
    """
    import wandb

    artifact = wandb.Artifact(f"dense-trace-{run_id}", type="dense_trace")
    for name in TRACE_FILES:
        if (folder / name).is_file():
            artifact.add_file(str(folder / name), name=name)
    return artifact


def _known_mode(mode: str, source: str) -> Mode:
    if mode not in MODES:
        raise UserError(f"{source} is {mode!r}: use online, offline or disabled")
    return MODES[mode]
