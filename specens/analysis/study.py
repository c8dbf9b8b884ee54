"""One dense trace, looked at from all sides: the content of replay.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.frames import floats, of_prompts
from specens.analysis.model import CostModel, held_out_error, measured_seconds, prediction_error
from specens.analysis.policies import budget_named, compare, name_of
from specens.analysis.replay import replay
from specens.analysis.teams import PLAIN, Teams, overlap, rescue
from specens.analysis.trace import Trace
from specens.decoding.budget import Budget, FixedBudget
from specens.decoding.costs import CostTable
from specens.errors import UserError

STUDY_VERSION = 1
"""Of `replay.json`."""

_COMPARED = ("context_tokens", "num_nodes", "num_accepted", "num_emitted", "mode")


@dataclass(frozen=True)
class Live:
    """What a run left: its tables (`loading.load`), its budget, its members in their order, and its cost tables by version."""

    name: str
    prompts: pd.DataFrame
    steps: pd.DataFrame
    drafts: pd.DataFrame
    budget: Budget
    members: tuple[str, ...]
    tables: Sequence[CostTable] = ()
    lengths: Mapping[str, int] | None = None
    """How deep members may draft, where the run's configuration is known."""

    @property
    def first_only(self) -> bool:
        return bool(getattr(self.budget, "first_only", False))

    def costs(self) -> dict[str, CostTable]:
        """The table by which each prompt was decoded."""
        versions = zip(self.prompts["prompt_id"], self.prompts["cost_version"], strict=True)
        last = self.tables[-1] if self.tables else CostTable()
        return {str(name): last if pd.isna(version) else self._table(int(version)) for name, version in versions}

    def _table(self, version: int) -> CostTable:
        if not 0 <= version < len(self.tables):
            raise UserError(f"{self.name}: its costs.json lacks version {version}, by which a prompt was decoded")
        return self.tables[version]


def fitted_model(live: Live) -> CostModel:
    """The run's first cost table, in which everything was measured side by side, corrected by what the run's own steps took."""
    if not live.tables:
        raise UserError(f"{live.name}: has no costs.json, which tells what a step costs; run it again with trace=dense")
    return CostModel.fitted(live.tables[0], live.prompts, live.steps, live.drafts, first_only=live.first_only)


def same_steps(live: pd.DataFrame, replayed: pd.DataFrame) -> dict[str, Any]:
    """Whether replayed steps are a run's own, each in all that was counted; `first_difference` says where they part."""
    key = ["prompt_id", "step"]
    both = live[[*key, *_COMPARED]].merge(replayed[[*key, *_COMPARED]], on=key, how="outer", suffixes=("", "_replayed"))
    is_same = pd.Series(True, index=both.index)
    for name in _COMPARED:
        is_same &= both[name] == both[f"{name}_replayed"]
    first = None
    if not is_same.all():
        row = both[~is_same].iloc[0]
        pairs = ", ".join(f"{name} {row[name]} and {row[f'{name}_replayed']}" for name in _COMPARED)
        first = f"prompt {row['prompt_id']}, step {row['step']}: live and replayed {pairs}"
    return {"num_steps": len(live), "num_different": int((~is_same).sum()), "first_difference": first}


def replay_of(trace: Trace, live: Live) -> pd.DataFrame:
    """The steps of a run with some of the trace's members, by its own budget and cost tables. Where their lengths are not known,
    they are taken to draft as deep as that run let them under a budget that learns nothing, else as deep as in the trace.
    """
    lengths = dict(live.lengths or {})
    if live.lengths is None and isinstance(live.budget, FixedBudget):
        for name, rows in live.drafts.groupby("drafter", sort=False):
            planned = int(floats(rows, "num_planned").max())
            lengths |= {str(name): planned} if planned else {}
    known = live.costs()
    costs = {name: known.get(name, CostTable()) for name in trace.prompt_ids}
    try:
        return replay(trace, live.budget, costs, live.members, lengths)
    except UserError as error:
        raise UserError(f"{live.name}: {error}") from error


def compared(trace: Trace, model: CostModel, live: Live, replayed: pd.DataFrame) -> dict[str, Any]:
    """A run beside its replay, over the prompts that both have with the same text: the same steps? `error`: the model's seconds
    over the measured ones, less 1. Speedups are over plain decoding, the measured one by the run's own baseline.
    """
    texts = zip(live.prompts["prompt_id"], live.prompts["output_ids"], strict=True)
    own = {str(name): list(ids) for name, ids in texts if ids is not None}
    bounds = zip(trace.prompt_ids, trace.starts, trace.starts[1:], strict=False)
    shared = [name for name, begin, end in bounds if own.get(name) == trace.text[begin:end].tolist()]
    if not shared:
        raise UserError(f"{live.name}: has none of the trace's texts; give a run of the same target and prompts")
    steps, replayed = of_prompts(live.steps, shared), of_prompts(replayed, shared)
    plain = of_prompts(replay(trace, FixedBudget(), members=()), shared)
    baseline_s = floats(of_prompts(live.prompts, shared), "baseline_decode_s").sum()
    return {
        "run": live.name,
        "team": "+".join(live.members) or PLAIN,
        "num_prompts": len(shared),
        **same_steps(steps, replayed),
        "predicted_s": model.seconds(replayed),
        "measured_s": measured_seconds(steps),
        "error": prediction_error(model, steps, replayed),
        "measured_speedup": baseline_s / measured_seconds(steps),
        "predicted_speedup": model.seconds(plain) / model.seconds(replayed),
    }


def study(
    trace: Trace,
    live: Live,
    *,
    policy: str = "fixed",
    max_nodes: int | None = None,
    other_costs: CostTable | None = None,
    others: Sequence[Live] = (),
) -> dict[str, Any]:
    """All that the page says, as plain values.

    `policy` is what the teams are compared under, with at most `max_nodes` nodes (None: the run's own). `other_costs` is another
    machine's table, under which the teams are compared once more; `others` are other runs of the same prompts, to be compared
    with what replay says of them.
    """
    model, max_nodes = fitted_model(live), live.budget.max_nodes if max_nodes is None else max_nodes
    budget = budget_named(policy, {"max_nodes": max_nodes})
    teams = Teams.of(trace, model, budget)
    fixed = teams if policy == "fixed" else Teams.of(trace, model, budget_named("fixed", {"max_nodes": max_nodes}))
    replayed = replay_of(trace, live)
    content: dict[str, Any] = {
        "schema_version": STUDY_VERSION,
        "subject": {
            "drafters": [member.name for member in trace.members],
            "num_prompts": len(trace.prompt_ids),
            "num_failed": int(np.count_nonzero(live.prompts["error"].notna())),
            "num_tokens": trace.num_positions,
            "policy": policy,
            "run_policy": name_of(live.budget),
            "max_nodes": max_nodes,
        },
        "live": {
            **compared(trace, model, live, replayed),
            "held_out_error": held_out_error(
                live.tables[0], live.prompts, live.steps, live.drafts, replayed, first_only=live.first_only
            ),
        },
        "cost": {
            **model.table.content(),
            "ms_per_1000_tokens": model.ms_per_1000_tokens,
            "context_tokens": model.context_tokens,
        },
        **_tables(teams),
        "overlap": overlap(trace).to_dict("index"),
        "rescue": rescue(trace).to_dict("index"),
        "policies": compare(trace, model, fixed, max_nodes).to_dict("records"),
        "others": [compared(trace, model, other, replay_of(trace, other)) for other in others],
        "modelled": None,
    }
    if other_costs is not None:
        elsewhere = CostModel(other_costs)
        elsewhere.table.check(trace.members)
        content["modelled"] = {"costs": other_costs.content(), **_tables(Teams.of(trace, elsewhere, budget))}
    return content


def _tables(teams: Teams) -> Mapping[str, Any]:
    table = teams.table().sort_values("tokens_per_s", ascending=False, kind="stable")
    return {
        "teams": table.to_dict("records"),
        "members": teams.values().to_dict("records"),
        "best_by_prompt_speedup": teams.seconds[0].sum() / teams.seconds.min(axis=0).sum(),
    }
