"""One dense trace, looked at from all sides: the content of replay.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.frames import floats, of_prompts
from specens.decoding.budgets.base import Budget, budget_name
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.errors import UserError, check_choice
from specens.replay.cost_model import CostModel, held_out_error, measured_seconds, prediction_error
from specens.replay.oracles import compare
from specens.replay.simulate import replay
from specens.replay.subsets import AR, Subsets, overlap, rescue
from specens.replay.trace import Trace

STUDY_VERSION = 2
"""Of `replay.json`. Version 1 had the names `teams`, `team` and `plain` for `subsets`, `subset` and
`AR`; they are still written beside the new ones.
"""

COMPARED = ("context_tokens", "num_nodes", "num_accepted", "num_emitted", "mode")


@dataclass(frozen=True)
class Live:
    """What a run left: its tables (`reader.load`), its budget and the configuration of that, its
    members in their order, and its cost tables by version. `lengths`: how deep members may draft,
    where the run's configuration is known.
    """

    name: str
    prompts: pd.DataFrame
    steps: pd.DataFrame
    drafts: pd.DataFrame
    budget: Budget
    members: tuple[str, ...]
    tables: Sequence[CostTable] = ()
    lengths: Mapping[str, int] | None = None
    budget_node: Mapping[str, Any] = field(default_factory=dict)

    def costs(self) -> dict[str, CostTable]:
        """The table by which each prompt was decoded."""
        names, versions = self.prompts["prompt_id"], self.prompts["cost_version"]
        return {str(name): self._table(v) for name, v in zip(names, versions, strict=True)}

    def _table(self, version: Any) -> CostTable:
        if pd.isna(version):
            return self.tables[-1] if self.tables else CostTable()
        if not 0 <= version < len(self.tables):
            raise UserError(
                f"{self.name}: its costs.json lacks version {version:.0f}, by which a prompt was "
                "decoded"
            )
        return self.tables[int(version)]


def fitted_model(live: Live) -> CostModel:
    """The run's first cost table, in which everything was measured side by side, corrected by what
    the run's own steps took.
    """
    if not live.tables:
        raise UserError(
            f"{live.name}: has no costs.json with what a step costs; run it again with trace=dense"
        )
    return CostModel.fitted(live.tables[0], live.prompts, live.steps, live.drafts)


def same_steps(live: pd.DataFrame, replayed: pd.DataFrame) -> dict[str, Any]:
    """Whether replayed steps are a run's own, each in all that was counted; `first_difference`
    names where they part.
    """
    key = ["prompt_id", "step"]
    left, right = (frame[[*key, *COMPARED]] for frame in (live, replayed))
    both = left.merge(right, on=key, how="outer", suffixes=("", "_replayed"))
    is_same = pd.Series(True, index=both.index)
    for name in COMPARED:
        is_same &= both[name] == both[f"{name}_replayed"]
    first = None
    if not is_same.all():
        row = both[~is_same].iloc[0]
        pairs = ", ".join(f"{name} {row[name]} and {row[f'{name}_replayed']}" for name in COMPARED)
        first = f"prompt {row['prompt_id']}, step {row['step']}: live and replayed {pairs}"
    num_different = int((~is_same).sum())
    return {"num_steps": len(live), "num_different": num_different, "first_difference": first}


def replay_of(trace: Trace, live: Live) -> pd.DataFrame:
    """The steps of a run with some of the trace's members, by its own budget and cost tables. Where
    their lengths are not known, they are taken to draft as deep as that run let them under a budget
    that learns nothing, else as deep as in the trace.
    """
    lengths = dict(live.lengths or {})
    if live.lengths is None and type(live.budget) is FixedBudget:
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
    """A run beside its replay, over the prompts that both have with the same text: the same steps?
    `error`: the model's seconds over the measured ones, less 1. Speedups are over AR decoding, the
    measured one by the run's own baseline.
    """
    texts = zip(live.prompts["prompt_id"], live.prompts["output_ids"], strict=True)
    own = {str(name): list(ids) for name, ids in texts if ids is not None}
    bounds = zip(trace.prompt_ids, trace.starts, trace.starts[1:], strict=False)
    shared = [
        name for name, begin, end in bounds if own.get(name) == trace.text[begin:end].tolist()
    ]
    if not shared:
        raise UserError(
            f"{live.name}: has none of the trace's texts; give a run of the same target and prompts"
        )
    steps, replayed = of_prompts(live.steps, shared), of_prompts(replayed, shared)
    ar_steps = of_prompts(replay(trace, FixedBudget(), members=()), shared)
    baseline_s = floats(of_prompts(live.prompts, shared), "baseline_decode_s").sum()
    measured_s, predicted_s = measured_seconds(steps), model.seconds(replayed)
    row = {
        "run": live.name,
        "subset": "+".join(live.members) or AR,
        "num_prompts": len(shared),
        **same_steps(steps, replayed),
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": prediction_error(model, steps, replayed),
        "measured_speedup": baseline_s / measured_s,
        "predicted_speedup": model.seconds(ar_steps) / predicted_s,
    }
    return _with_old_name(row)


def study(
    trace: Trace,
    live: Live,
    budgets: Mapping[str, Budget],
    *,
    max_nodes: int,
    policy: str = "fixed",
    other_costs: CostTable | None = None,
    others: Sequence[Live] = (),
    notes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All that the page shows, as plain values.

    `budgets` are compared, each with at most `max_nodes` nodes; `policy` is the one of them under
    which the subsets are. `other_costs` is another machine's table, under which the subsets are
    compared once more; `others` are other runs of the same prompts, to be compared with their
    replay. `notes` describe the budgets.
    """
    check_choice("policy", policy, budgets)
    model, budget, fixed = fitted_model(live), budgets[policy], FixedBudget(max_nodes)
    subsets = Subsets.of(trace, model, budget)
    under_fixed = subsets if budget == fixed else Subsets.of(trace, model, fixed)
    replayed = replay_of(trace, live)
    held_out = held_out_error(live.tables[0], live.prompts, live.steps, live.drafts, replayed)
    policies = compare(trace, model, under_fixed, budgets, max_nodes, notes)
    content: dict[str, Any] = {
        "schema_version": STUDY_VERSION,
        "subject": {
            "drafters": [member.name for member in trace.members],
            "num_prompts": len(trace.prompt_ids),
            "num_failed": int(np.count_nonzero(live.prompts["error"].notna())),
            "num_tokens": trace.num_positions,
            "policy": policy,
            "run_policy": budget_name(live.budget),
            "max_nodes": max_nodes,
        },
        "live": {**compared(trace, model, live, replayed), "held_out_error": held_out},
        "cost": {
            **model.table.content(),
            "ms_per_1000_tokens": model.ms_per_1000_tokens,
            "context_tokens": model.context_tokens,
        },
        **_tables(subsets),
        "overlap": overlap(trace).to_dict("index"),
        "rescue": rescue(trace).to_dict("index"),
        "policies": policies.to_dict("records"),
        "others": [compared(trace, model, other, replay_of(trace, other)) for other in others],
        "modelled": None,
    }
    if other_costs is not None:
        other_costs.check(trace.members)
        modelled = _tables(Subsets.of(trace, CostModel(other_costs), budget))
        content["modelled"] = {"costs": other_costs.content(), **modelled}
    return content


def _tables(subsets: Subsets) -> dict[str, Any]:
    table = subsets.table().sort_values("tokens_per_s", ascending=False, kind="stable")
    rows = [_with_old_name(row) for row in table.to_dict("records")]
    return {
        "subsets": rows,
        "teams": rows,
        "members": subsets.contributions().to_dict("records"),
        "best_by_prompt_speedup": subsets.seconds[0].sum() / subsets.seconds.min(axis=0).sum(),
    }


def _with_old_name(row: dict[Any, Any]) -> dict[str, Any]:
    return row | {"team": "plain" if row["subset"] == AR else row["subset"]}
