"""python -m specens.replay run=<folder>: what would any other team of the drafters have done? From the dense trace of a run,
without its models; `replay.md`, `replay.csv` and `replay.json` in the run's folder, and a report.html that shows them.

Exit code 2: the replay of what ran is not the run itself.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specens.analysis.study import Live
from specens.analysis.study_page import page_of
from specens.audit import run_config
from specens.config import CONF_DIR, VERSION_BASE, build, refuse_unknown, resolved
from specens.decoding.costs import read_costs
from specens.errors import UserError, check_count
from specens.report import rebuild
from specens.run import failing_in_one_line, refuse_sweep
from specens.traced import live_of, load_one, write_study

NOT_THE_RUN = 2


def read_live(folder: Path | str) -> Live:
    """What one run did, which need not have a dense trace. Raises UserError as `read_trace` does."""
    run, config = load_one(Path(folder)), run_config(Path(folder))
    options, names = config["budget"], tuple(map(str, run.drafts["drafter"].unique()))
    # The tables are in its costs.json.
    budget = build(OmegaConf.masked_copy(options, [str(key) for key in options if key != "costs"]))
    drafter = resolved(config)["drafter"] or {}
    members = drafter.get("members") or dict.fromkeys(names[:1], drafter)
    lengths = {name: members[name]["num_draft_tokens"] for name in names if "num_draft_tokens" in members.get(name, {})}
    return replace(live_of(Path(folder), run, budget, names), lengths=lengths)


def replay(config: DictConfig) -> dict[str, Any]:
    """Study the run that `run` names, leave the files in its folder, and return the content of replay.json."""
    options = resolved(config)
    refuse_unknown(options, ("run", "policy", "max_nodes", "costs", "others"))
    if not str(options["run"] or ""):
        raise UserError(
            "run is not set: give run=<folder>, a run with a dense trace (python -m specens.run trace=dense)"
        )
    if options["max_nodes"] is not None:
        check_count("max_nodes", options["max_nodes"])
    folder = Path(str(options["run"])).expanduser()
    content = write_study(
        folder,
        policy=str(options["policy"]),
        max_nodes=options["max_nodes"],
        other_costs=read_costs(str(options["costs"])) if options["costs"] else None,
        others=_others(options["others"]),
    )
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


@hydra.main(config_path=CONF_DIR, config_name="replay", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(HydraConfig.get().mode, "interrupted; nothing was written"):
        refuse_sweep(HydraConfig.get().mode)
        content = replay(config)
    print(page_of(content), end="")
    if content["live"]["num_different"]:
        sys.exit(NOT_THE_RUN)


if __name__ == "__main__":
    main()
