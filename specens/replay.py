"""python -m specens.replay run=<folder>: what would any other team of the drafters have done? From the dense trace of a run,
without its models; `replay.md`, `replay.csv` and `replay.json` in the run's folder, and a report.html that shows them.

Exit code 2: the replay of what ran is not the run itself.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specens.analysis.policies import budget_named
from specens.analysis.study import Live, study
from specens.analysis.study_page import page_of
from specens.analysis.trace import Trace
from specens.audit import run_config
from specens.config import CONF_DIR, VERSION_BASE, build, resolved
from specens.decoding.budget import Budget
from specens.decoding.costs import read_costs, read_versions
from specens.errors import UserError, check_count
from specens.files import plain, write_whole
from specens.loading import Run, load, load_dense
from specens.records import COSTS_NAME, SUMMARY_NAME
from specens.report import rebuild
from specens.run import failing_in_one_line

NOT_THE_RUN = 2


def read_trace(folder: Path | str) -> tuple[Trace, Live]:
    """The dense trace of one run, and what the run itself did. Raises UserError for a folder that is none, has no trace, is
    broken, or holds more than one run.
    """
    run = _load_one(Path(folder))
    dense, facts = load_dense(folder)
    trace = Trace.of(dense, run.prompts, facts)
    budget = budget_named(facts["budget"]["name"], facts["budget"]["options"])
    return trace, _live(Path(folder), run, budget, tuple(member.name for member in trace.members))


def read_live(folder: Path | str) -> Live:
    """What one run did, which need not have a dense trace. Raises UserError as `read_trace` does."""
    run, options = _load_one(Path(folder)), run_config(Path(folder))["budget"]
    own = OmegaConf.masked_copy(
        options, [str(key) for key in options if key != "costs"]
    )  # the tables are in its costs.json
    return _live(Path(folder), run, build(own), tuple(map(str, run.drafts["drafter"].unique())))


def _live(folder: Path, run: Run, budget: Budget, members: tuple[str, ...]) -> Live:
    path = folder / COSTS_NAME
    tables = read_versions(str(path)) if path.exists() else ()
    return Live(str(folder), run.prompts, run.steps, run.drafts, budget, members, tables)


def _load_one(folder: Path) -> Run:
    """A run whose files are whole. What merging runs may skip is an error here: part of a run would pass for all of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            run = load(folder)
        except UserWarning as broken:
            raise UserError(f"run={folder}: {str(broken).removeprefix('skipped ')}; make the run again") from broken
    if len(run.folders) > 1:
        raise UserError(f"run={folder}: holds {len(run.folders)} runs; name one of them, such as run={run.folders[0]}")
    return run


def replay(config: DictConfig) -> dict[str, Any]:
    """Study the run that `run` names, leave the files in its folder, and return the content of replay.json."""
    options = resolved(config)
    if not str(options["run"] or ""):
        raise UserError(
            "run is not set: give run=<folder>, a run with a dense trace (python -m specens.run trace=dense)"
        )
    if options["max_nodes"] is not None:
        check_count("max_nodes", options["max_nodes"])
    folder = Path(str(options["run"])).expanduser()
    trace, live = read_trace(folder)
    content = study(
        trace,
        live,
        policy=str(options["policy"]),
        max_nodes=options["max_nodes"],
        other_costs=None if options["costs"] is None else read_costs(str(options["costs"])),
        others=_others(options["others"]),
    )
    content = plain({**content, "status": _status_of(folder)})
    _write(folder, content, page_of(content))
    rebuild(folder)
    return content


def _others(names: Any) -> list[Live]:
    if not isinstance(names, list | None):
        raise UserError(f"others={names}: give a list of run folders, others=[{names}]")
    found = []
    for name in names or ():
        try:
            found.append(read_live(Path(str(name)).expanduser()))
        except UserError as error:
            raise UserError(f"others=[{name}]: {error}") from error
    return found


def _status_of(folder: Path) -> str:
    """How the run ended; a process that was killed left no summary."""
    path = folder / SUMMARY_NAME
    return json.loads(path.read_text(encoding="utf-8")).get("status", "unknown") if path.exists() else "killed"


def _write(folder: Path, content: dict[str, Any], page: str) -> None:
    files = {
        "replay.json": json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        "replay.csv": pd.DataFrame(content["teams"]).to_csv(index=False, lineterminator="\n"),
        "replay.md": page,
    }
    try:
        write_whole(folder, files)
    except OSError as error:
        raise UserError(f"cannot write the replay into {folder}: {error.strerror}") from error


@hydra.main(config_path=CONF_DIR, config_name="replay", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(HydraConfig.get().mode, "interrupted; nothing was written"):
        content = replay(config)
    print(page_of(content), end="")
    if content["live"]["num_different"]:
        sys.exit(NOT_THE_RUN)


if __name__ == "__main__":
    main()
