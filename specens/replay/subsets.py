"""Which members earn their place: every subset of a trace's members replayed whole, and what each
member contributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import factorial

import numpy as np
import pandas as pd

from specens.analysis.bootstrap import bootstrap
from specens.decoding.budgets.base import Budget
from specens.decoding.budgets.fixed import FixedBudget
from specens.errors import UserError
from specens.replay.all_subsets import MergedDrafts
from specens.replay.cost_model import CostModel
from specens.replay.simulate import replay
from specens.replay.trace import Trace

MAX_MEMBERS = 10
"""2**10 subsets are replayed in seconds; every member more doubles that."""

AR = "AR"
"""The subset without members: AR decoding."""

COUNTS = ("calls", "num_emitted", "num_accepted", "num_nodes")
SECONDS = ("draft_s", "verify_s", "host_s")
TOTALS = (*COUNTS, *SECONDS)
"""Of one subset and one prompt. `calls` are target forwards."""


@dataclass(frozen=True, eq=False)
class Subsets:
    """What every subset takes for every prompt: `totals` is
    `[2 ** num_members, num_prompts, len(TOTALS)]`, where bit i of a subset's number means that
    `names[i]` is in it.
    """

    names: tuple[str, ...]
    totals: np.ndarray

    @classmethod
    def of(
        cls,
        trace: Trace,
        model: CostModel,
        budget: Budget | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> Subsets:
        """Replay them all under a budget, by default one that verifies everything. UserError for
        more than `MAX_MEMBERS`.
        """
        names = tuple(member.name for member in trace.members)
        if len(names) > MAX_MEMBERS:
            raise UserError(
                f"{len(names)} members make {2 ** len(names)} subsets: at most {MAX_MEMBERS} "
                "members can be compared; trace fewer"
            )
        budget = budget or FixedBudget(sum(member.num_draft_nodes for member in trace.members))
        merged = MergedDrafts.of(trace, lengths)
        totals = []
        for number in range(2 ** len(names)):
            own = _members(names, number)
            # Without members there is nothing to plan, which a budget need not expect.
            under = budget if own else FixedBudget()
            steps = replay(trace, under, model.table, own, lengths, merged)
            totals.append(prompt_totals(steps, model))
        return cls(names, np.stack(totals))

    @property
    def seconds(self) -> np.ndarray:
        """`[2 ** num_members, num_prompts]`"""
        return self.totals[:, :, len(COUNTS) :].sum(axis=2)

    @property
    def calls(self) -> np.ndarray:
        """`[2 ** num_members, num_prompts]`"""
        return self.totals[:, :, TOTALS.index("calls")]

    def table(self) -> pd.DataFrame:
        """One row per subset, AR decoding first; totals over all prompts. `acceptance_length`:
        tokens per call; `seconds`: by the cost model; `speedup`: AR decoding's seconds over the
        subset's.
        """
        sums = pd.DataFrame(self.totals.sum(axis=1), columns=list(TOTALS))
        sums[list(COUNTS)] = sums[list(COUNTS)].round().astype(int)
        seconds = self.seconds.sum(axis=1)
        numbers = range(len(sums))
        return pd.DataFrame(
            {
                "subset": ["+".join(_members(self.names, number)) or AR for number in numbers],
                "num_members": [number.bit_count() for number in numbers],
                "calls": sums["calls"],
                "acceptance_length": sums["num_emitted"] / sums["calls"],
                **{name: sums[name] for name in ("num_accepted", "num_nodes", *SECONDS)},
                "seconds": seconds,
                "tokens_per_s": sums["num_emitted"] / seconds,
                "speedup": seconds[0] / seconds,
            }
        )

    def contributions(self) -> pd.DataFrame:
        """One row per member: what it saves in target calls (`_calls`) and in seconds (`_s`), each
        with its 95% bootstrap interval over prompts (`_low`, `_high`; none with fewer than two
        prompts). Below 0 it costs more than it gains.

        `leave_one_out`: what all would lose without it. `shapley`: the mean of what it adds to the
        members before it, over all orders in which they could come (Shapley 1953); the members' sum
        is what all of them save over AR decoding.
        """
        rows = []
        for place, name in enumerate(self.names):
            row: dict[str, object] = {"member": name}
            for unit, taken in (("calls", self.calls), ("s", self.seconds)):
                saved = taken[0] - taken
                for kind, share in (("leave_one_out", _last), ("shapley", _shapley)):
                    values = share(saved, place)
                    interval = bootstrap(values[:, None], lambda totals: totals[:, 0])
                    low, high = interval or (np.nan, np.nan)
                    key = f"{kind}_{unit}"
                    row |= {key: values.sum(), f"{key}_low": low, f"{key}_high": high}
            rows.append(row)
        return pd.DataFrame(rows)

    def regret(self, seconds: np.ndarray) -> dict[str, float]:
        """What was lost by not knowing before: `seconds` `[num_prompts]` over those of the one
        subset that is best for all prompts, and over those of each prompt's own best subset, less 1
        each.
        """
        total = seconds.sum()
        return {
            "regret": float(total / self.seconds.sum(axis=1).min() - 1),
            "regret_by_prompt": float(total / self.seconds.min(axis=0).sum() - 1),
        }


def prompt_totals(steps: pd.DataFrame, model: CostModel) -> np.ndarray:
    """`TOTALS` of replayed steps by prompt, `[num_prompts, len(TOTALS)]`, in the steps' order."""
    counts = steps[["num_emitted", "num_accepted", "num_nodes"]].to_numpy(float)
    columns = np.hstack([np.ones((len(steps), 1)), counts, model.priced(steps).to_numpy()])
    return np.add.reduceat(columns, np.flatnonzero(steps["step"] == 0), axis=0)


def overlap(trace: Trace) -> pd.DataFrame:
    """Share of the positions at which both members propose the token that comes next; the diagonal
    is each alone. Over all positions of the texts at which a step may draft.
    """
    is_right = _is_right(trace)
    with np.errstate(invalid="ignore"):  # no position at all
        return _square(trace, is_right.T @ is_right / np.float64(len(is_right)))


def rescue(trace: Trace) -> pd.DataFrame:
    """How often the row's member proposes the next token where the column's does not; NaN if that
    one is never wrong.
    """
    is_right = _is_right(trace)
    num_wrong = (1 - is_right).sum(axis=0)
    shares = np.full((len(num_wrong),) * 2, np.nan)
    np.divide(is_right.T @ (1 - is_right), num_wrong, where=num_wrong > 0, out=shares)
    return _square(trace, shares)


def _is_right(trace: Trace) -> np.ndarray:
    """`[num_positions, num_members]`, 0 or 1."""
    return (MergedDrafts.of(trace).matched[trace.tokens_wanted > 1] > 0).astype(float)


def _square(trace: Trace, values: np.ndarray) -> pd.DataFrame:
    names = [member.name for member in trace.members]
    return pd.DataFrame(values, index=names, columns=names)


def _members(names: tuple[str, ...], number: int) -> list[str]:
    """The members of a subset by its number."""
    return [name for place, name in enumerate(names) if number >> place & 1]


def _last(saved: np.ndarray, place: int) -> np.ndarray:
    """What the member adds to all others, by prompt."""
    return saved[-1] - saved[len(saved) - 1 - (1 << place)]


def _shapley(saved: np.ndarray, place: int) -> np.ndarray:
    """The member's Shapley value, by prompt, when `saved` `[num_subsets, num_prompts]` is what each
    subset saves.
    """
    num_members = len(saved).bit_length() - 1
    value = np.zeros(saved.shape[1])
    for before in range(len(saved)):
        if not before >> place & 1:
            size = before.bit_count()
            weight = factorial(size) * factorial(num_members - size - 1) / factorial(num_members)
            value += weight * (saved[before | 1 << place] - saved[before])
    return value
