"""What a run is made of, as the configuration says it, checked before any model is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from specens.analysis.policies import name_of
from specens.decoding.budget import Budget
from specens.decoding.costs import read_costs
from specens.decoding.drafter import Drafter
from specens.decoding.generation import SamplingOptions
from specens.decoding.target import LAYOUTS, Layout
from specens.decoding.verify import Verifier
from specens.errors import UserError, check_count
from specens.models import ModelSpec
from specens.prompts import Source
from specens.speculator import check_laws
from specens.trackers import Tracker

TRACES = ("steps", "dense")


@dataclass(frozen=True)
class Job:
    """Everything a run needs, built from the configuration and checked before any model is loaded."""

    target: ModelSpec
    drafter: Drafter
    budget: Budget
    verifier: Verifier
    layout: Layout
    sampling: SamplingOptions
    prompts: Source
    tracker: Tracker
    baseline: bool = True
    trace: str = "steps"
    exact_width: int | None = None
    compiled: bool | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UserError(f"layout={self.layout}: choose one of {', '.join(LAYOUTS)}")
        if self.trace not in TRACES:
            raise UserError(f"trace={self.trace}: choose one of {', '.join(TRACES)}")
        if self.trace == "dense" and not self.verifier.coupled:
            raise UserError(
                f"trace=dense: with verifier={self.verifier.name} the text depends on who drafts, so that nothing else can be "
                "replayed from it; use verifier=coupled"
            )
        if self.trace == "dense" and not self.drafter.members:
            raise UserError("trace=dense: there is no drafter whose proposals could be traced; use trace=steps")
        if not isinstance(self.baseline, bool):
            raise UserError(f"baseline={self.baseline!r}: give true or false")
        if self.compiled not in (None, True, False):
            raise UserError(f"compiled={self.compiled!r}: give true, false or null")
        check_laws(self.verifier, self.drafter)
        if self.budget.costs is not None:
            read_costs(str(self.budget.costs)).check(self.drafter.members)
        if self.exact_width is not None:
            check_exact_width(self.exact_width, self.layout, self.budget)
        self.target.check()


def check_exact_width(exact_width: Any, layout: Layout, budget: Budget) -> None:
    """Refuse a width that steps could leave: rows have a width of their own, and a tree may have as many nodes as the budget."""
    check_count("exact_width", exact_width)
    if layout != "tree":
        raise UserError(f"exact_width={exact_width}: layout={layout} has no one width; use layout=tree")
    most = budget.max_nodes
    if most > exact_width:
        raise UserError(f"exact_width={exact_width}: a tree may have {most} nodes; give budget.max_nodes={exact_width}")


def budget_words(budget: Budget) -> dict[str, Any]:
    """A budget as it is named on the command line, with its options; one of somebody's own by its class."""
    options = asdict(budget) if is_dataclass(budget) else {}  # pyright: ignore[reportArgumentType]
    return {"name": name_of(budget), "options": options}
