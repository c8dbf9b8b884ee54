"""A run with a dense trace, read back whole, and its study: `replay.md`, `replay.csv` and
`replay.json` in the run's folder.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from specens.decoding.budgets.base import Budget, budget_name
from specens.decoding.budgets.costs import read_versions
from specens.errors import UserError, check_count, one_line
from specens.records.files import COSTS_NAME, REPLAY_NAME, REPLAY_PAGE_NAME, plain, write_result
from specens.records.reader import Run, load, load_dense, missing_tables, status_of
from specens.replay.page import page_of
from specens.replay.study import Live, study
from specens.replay.trace import Trace


def read_trace(folder: Path | str, plugins: Sequence[str] = ()) -> tuple[Trace, Live]:
    """The dense trace of one run, and what the run itself did. `plugins` are packages that its
    budget may come from. Raises UserError for a folder that is none, has no trace, is broken, or
    holds more than one run.
    """
    run = load_one(Path(folder))
    dense, facts = load_dense(folder)
    trace = Trace.of(dense, run.prompts, facts)
    members = tuple(member.name for member in trace.members)
    return trace, _live(Path(folder), run, budget_node(facts), members, plugins)


def read_live(folder: Path | str, plugins: Sequence[str] = ()) -> Live:
    """What one run did; it needs no dense trace. Raises UserError as `read_trace` does."""
    from specens.config.compose import resolved
    from specens.config.folder import run_config

    run, config = load_one(Path(folder)), resolved(run_config(Path(folder)))
    names = tuple(map(str, run.drafts["drafter"].unique()))
    drafter = config["drafter"] or {}
    members = drafter.get("members") or dict.fromkeys(names[:1], drafter)
    nodes = {name: members.get(name, {}) for name in names}
    key = "num_draft_tokens"
    lengths = {name: node[key] for name, node in nodes.items() if key in node}
    live = _live(Path(folder), run, config["budget"], names, plugins)
    return replace(live, lengths=lengths)


def _live(
    folder: Path,
    run: Run,
    node: Mapping[str, Any],
    members: tuple[str, ...],
    plugins: Sequence[str],
) -> Live:
    """What a run did, with the cost tables of its folder."""
    path, budget = folder / COSTS_NAME, budget_of(node, plugins)
    tables = read_versions(str(path)) if path.exists() else ()
    frames = (run.prompts, run.steps, run.drafts)
    return Live(str(folder), *frames, budget, members, tables, budget_node=node)


def budget_node(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run's budget, from the facts of its trace."""
    try:
        record = facts["budget"]
        if "node" in record:
            return dict(record["node"])
        return {**_node(str(record["name"])), **record["options"]}  # schema version 3
    except (KeyError, TypeError) as error:
        raise UserError(
            f"dense trace: its facts do not name the budget ({one_line(error)}); run it again with "
            "trace=dense"
        ) from error


def _node(name: str) -> dict[str, Any]:
    """The configuration of a file in conf/budget."""
    from specens.config.compose import group_node, resolved

    return resolved(group_node("budget", name))


def budget_of(node: Mapping[str, Any], plugins: Sequence[str] = (), **changed: Any) -> Budget:
    """A budget by its configuration. A file of costs is left out: replay is given the table."""
    from specens.config.build import instantiate

    given = {key: value for key, value in {**node, **changed}.items() if key != "costs"}
    return instantiate(given, plugins)


def known_budgets(
    live: Live,
    max_nodes: int | None = None,
    plugins: Sequence[str] = (),
    further: Mapping[str, Any] | None = None,
) -> dict[str, Budget]:
    """The budgets to compare, by name: those of conf/budget, the simple ones first, the run's own
    if it is another one, and the one that the configuration `further` describes; each with at most
    `max_nodes` nodes (None: as many as the run had).
    """
    from specens.config.compose import group_names

    most = live.budget.max_nodes if max_nodes is None else max_nodes
    found = {name: budget_of(_node(name), max_nodes=most) for name in group_names("budget")}
    budgets = dict(sorted(found.items(), key=lambda entry: entry[1].needs_costs))
    if budget_name(live.budget) not in budgets:
        budgets[budget_name(live.budget)] = _as_wide(live.budget_node, most, plugins)
    if further is not None:
        budget = _as_wide(further, most, plugins)
        budgets[budget_name(budget)] = budget
    return budgets


def _as_wide(node: Mapping[str, Any], most: int, plugins: Sequence[str]) -> Budget:
    """A budget by its configuration, with `most` nodes at most; one that is so anyway need not have
    that option.
    """
    budget = budget_of(node, plugins)
    return budget if budget.max_nodes == most else budget_of(node, plugins, max_nodes=most)


def _note(name: str, budget: Budget) -> str:
    """A sentence on what a budget is: the comment of its file, or its class's first line."""
    from specens.cli_help import about
    from specens.config.compose import group_names

    if name in group_names("budget"):
        return about("budget", name)
    first = (inspect.getdoc(type(budget)) or "").partition("\n")[0]
    is_signature = first.startswith(f"{type(budget).__name__}(")  # what @dataclass writes
    return "" if is_signature else first


def load_one(folder: Path) -> Run:
    """A run whose files are whole. What merging runs may skip is an error here: part of a run would
    pass for all of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            run = load(folder)
        except UserWarning as broken:
            fault = str(broken).removeprefix("skipped ")
            raise UserError(f"run={folder}: {fault}; make the run again") from broken
    home, *others = run.folders
    if others:
        inner = next(path for path in run.folders if path != folder)
        is_inside = folder in run.folders
        move, choose = f"{inner} lies in it: move it elsewhere", f"name one, such as run={inner}"
        hint = move if is_inside else choose
        raise UserError(f"run={folder}: holds {len(run.folders)} runs; {hint}")
    for name in missing_tables(home):
        raise UserError(f"run={folder}: has no {name}; make the run again")
    return run


def write_study(
    folder: Path,
    plugins: Sequence[str] = (),
    *,
    policy: str | Mapping[str, Any] = "fixed",
    max_nodes: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Study the run in `folder`, leave the files there, and return the content of replay.json.

    `policy` is the budget under which the subsets are compared: one of `known_budgets`, or the
    configuration of a further one (`_target_` and options). `max_nodes`: None for what that
    configuration says, else the run's own; `options` are those of `study`.
    """
    trace, live = read_trace(folder, plugins)
    further = None if isinstance(policy, str) else policy
    most = (further or {}).get("max_nodes") if max_nodes is None else max_nodes
    most = live.budget.max_nodes if most is None else most
    check_count("max_nodes", most)
    budgets = known_budgets(live, most, plugins, further)
    name = policy if isinstance(policy, str) else list(budgets)[-1]
    notes = {name: _note(name, budget) for name, budget in budgets.items()}
    content = study(trace, live, budgets, policy=name, max_nodes=most, notes=notes, **options)
    content = plain({**content, "status": status_of(folder)})
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    files = {
        REPLAY_NAME: text + "\n",
        "replay.csv": pd.DataFrame(content["subsets"]).to_csv(index=False, lineterminator="\n"),
        REPLAY_PAGE_NAME: page_of(content),
    }
    write_result(folder, files, "the replay")
    return content
