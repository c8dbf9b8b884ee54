"""A run's configuration, built and checked before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specens.analysis.metrics import check_metrics
from specens.config.build import build, instantiate, plugins_of, refuse_unknown
from specens.config.compose import resolved
from specens.config.folder import OBJECTS, VALUES
from specens.decoding.budgets.base import Budget
from specens.decoding.budgets.costs import read_costs
from specens.decoding.drafter import Drafter
from specens.decoding.generation import SamplingOptions
from specens.decoding.speculator import check_draft_probs
from specens.decoding.target.supported import LAYOUTS, Layout
from specens.decoding.verify import Verifier
from specens.errors import UserError, check_choice, check_count, check_flag, check_list
from specens.models.load import ModelSpec
from specens.prompts.sources import PromptSource
from specens.run.tracker import Tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

TRACES = ("steps", "dense")


@dataclass(frozen=True)
class Job:
    """Everything a run needs. Raises UserError for what can be known to be wrong. `budget_node` is
    the budget's own configuration, from which replay builds it again; `metrics` are further ones.
    """

    target: ModelSpec
    drafter: Drafter
    budget: Budget
    verifier: Verifier
    layout: Layout
    sampling: SamplingOptions
    prompts: PromptSource
    tracker: Tracker
    baseline: bool = True
    trace: str = "steps"
    exact_width: int | None = None
    compiled: bool | None = None
    metrics: tuple[Any, ...] = ()
    plugins: tuple[str, ...] = ()
    budget_node: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("trace", self.trace, TRACES)
        if self.trace == "dense" and not self.verifier.coupled:
            raise UserError(
                f"trace=dense: with verifier={self.verifier.name} the text depends on who drafts, "
                "so that nothing else can be replayed from it; use verifier=coupled"
            )
        if self.trace == "dense" and not self.drafter.members:
            raise UserError(
                "trace=dense: there is no drafter whose proposals could be traced; use trace=steps"
            )
        check_flag("baseline", self.baseline)
        check_flag("compiled", self.compiled, or_null=True)
        check_draft_probs(self.verifier, self.drafter)
        if self.budget.costs is not None:
            read_costs(str(self.budget.costs)).check(self.drafter.members)
        if self.exact_width is not None:
            check_exact_width(self.exact_width, self.layout, self.budget)
        self.target.check()

    @property
    def compares_texts(self) -> bool:
        """Whether the drafted text has to be AR decoding's own. A verifier that samples otherwise
        gives another text of the same distribution, and nothing is said of identity.
        """
        return self.verifier.coupled or self.sampling.temperature == 0


def job_of(config: DictConfig, **replaced: Any) -> Job:
    """What `config` describes, built and checked, with no model loaded; `replaced` are parts that
    take the place of the configuration's own.
    """
    plain = resolved(config)
    refuse_unknown(plain, (*OBJECTS, *VALUES))
    plugins = plugins_of(plain)
    parts = {name: build(config.get(name), plugins) for name in OBJECTS if name not in replaced}
    values = {name: plain[name] for name in VALUES if name in plain} | {"plugins": plugins}
    metrics = plain.get("metrics") or []
    check_list("metrics", metrics, dict, "[{_target_: my_package.LongestDraft}]")
    values["metrics"] = check_metrics(instantiate(metrics, plugins))
    return Job(**{"budget_node": plain["budget"], **values, **parts, **replaced})


def check_exact_width(exact_width: Any, layout: Layout, budget: Budget) -> None:
    """Refuse a width that steps could leave: rows have a width of their own, and a tree may have as
    many nodes as the budget.
    """
    check_count("exact_width", exact_width)
    if layout != "tree":
        raise UserError(
            f"exact_width={exact_width}: layout={layout} has no one width; use layout=tree"
        )
    if budget.max_nodes > exact_width:
        raise UserError(
            f"exact_width={exact_width}: a tree may have {budget.max_nodes} nodes; give "
            f"budget.max_nodes={exact_width}"
        )
