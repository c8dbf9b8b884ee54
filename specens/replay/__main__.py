"""python -m specens.replay run=<folder>: what would any other subset of the drafters have done?
From the dense trace of a run, without its models; `replay.md`, `replay.csv` and `replay.json` in
the run's folder, and a report.html that shows them.

Exit code 2: the replay of what ran is not the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specens.cli import Call, command, show
from specens.config.build import plugins_of, refuse_unknown
from specens.config.compose import resolved
from specens.decoding.budgets.costs import read_costs
from specens.errors import UserError, check_count, check_list
from specens.replay.files import read_live, write_study
from specens.replay.page import page_of
from specens.replay.study import Live
from specens.report.__main__ import rebuild

NOT_THE_RUN = 2


def replay(options: Mapping[str, Any]) -> dict[str, Any]:
    """Study the run that `run` names, leave the files in its folder, and return the content of
    replay.json.
    """
    refuse_unknown(options, ("run", "policy", "max_nodes", "costs", "others", "plugins"))
    if not str(options["run"] or ""):
        raise UserError(
            "run is not set: give run=<folder>, a run with a dense trace (python -m specens.run "
            "trace=dense)"
        )
    if options["max_nodes"] is not None:
        check_count("max_nodes", options["max_nodes"])
    folder, plugins = Path(str(options["run"])).expanduser(), plugins_of(options)
    content = write_study(
        folder,
        plugins,
        policy=_policy(options["policy"]),
        max_nodes=options["max_nodes"],
        other_costs=read_costs(str(options["costs"])) if options["costs"] else None,
        others=_others(options["others"] or [], plugins),
    )
    rebuild(folder)
    return content


def _policy(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, Mapping) and "_target_" not in value:
        raise UserError(f"policy={value}: give a budget's name, or {{_target_: my_package.Budget}}")
    return value if isinstance(value, Mapping) else str(value)


def _others(names: list[str], plugins: Sequence[str]) -> list[Live]:
    check_list("others", names, str, f"[{names}]")
    found = []
    for name in names:
        try:
            found.append(read_live(Path(name).expanduser(), plugins))
        except UserError as error:
            raise UserError(f"others=[{name}]: {error}") from error
    return found


@command("replay", interrupted="interrupted; nothing was written", uses_models=False)
def main(call: Call) -> int:
    content = replay(resolved(call.config))
    show(page_of(content).rstrip("\n"))
    return NOT_THE_RUN if content["live"]["num_different"] else 0


if __name__ == "__main__":
    main()
