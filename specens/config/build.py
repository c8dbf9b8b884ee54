"""Objects from configurations: the one function that instantiates, and which classes it may."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specens.config.compose import group_node, resolved
from specens.errors import UserError, check_list, one_line

log = logging.getLogger("specens")

RENAMED = {
    "specens.benchmark.flashspec.FlashSpec": "specens.bench.flashspec.FlashSpec",
    "specens.benchmark.options.Options": "specens.bench.options.BenchOptions",
    "specens.benchmark.peers.Transformers": (
        "specens.bench.transformers_generate.TransformersGenerate"
    ),
    "specens.benchmark.systems.Ours": "specens.bench.systems.SpecensSystem",
    "specens.decoding.bandit.BanditBudget": "specens.decoding.budgets.bandit.BanditBudget",
    "specens.decoding.budget.FixedBudget": "specens.decoding.budgets.fixed.FixedBudget",
    "specens.decoding.cost_aware.CostAwareBudget": (
        "specens.decoding.budgets.cost_aware.CostAwareBudget"
    ),
    "specens.drafters.distilled.Distilled": "specens.drafters.trained.distilled.Distilled",
    "specens.drafters.non_autoregressive.NonAutoregressive": (
        "specens.drafters.trained.non_autoregressive.NonAutoregressive"
    ),
    "specens.drafters.retrieval.Retrieval": "specens.drafters.retrieval.retrieval.Retrieval",
    "specens.evidence.options.Options": "specens.audit.options.AuditOptions",
    "specens.models.ModelSpec": "specens.models.load.ModelSpec",
    "specens.models.TargetCopy": "specens.models.load.TargetCopy",
    "specens.prompts.Demo": "specens.prompts.sources.Demo",
    "specens.prompts.Hub": "specens.prompts.sources.Hub",
    "specens.prompts.Inline": "specens.prompts.sources.Inline",
    "specens.prompts.Jsonl": "specens.prompts.sources.Jsonl",
    "specens.prompts.SpecBench": "specens.prompts.sources.SpecBench",
    "specens.sources.WheelFile": "specens.models.wheel.WheelFile",
    "specens.tiny.TinyModel": "specens.models.tiny.TinyModel",
    "specens.trackers.NoTracker": "specens.run.tracker.NoTracker",
    "specens.trackers.WandbTracker": "specens.run.tracker.WandbTracker",
    "specens.training.all.All": "specens.train.pipeline.All",
    "specens.training.corpus.Corpus": "specens.train.corpus.Corpus",
    "specens.training.datastore.DatastoreStage": "specens.train.datastore.DatastoreStage",
    "specens.training.distill.Distill": "specens.train.distill.Distill",
    "specens.training.loss.Loss": "specens.train.loss.Loss",
    "specens.training.non_autoregressive.Guess": "specens.train.non_autoregressive.Guess",
    "specens.training.trainer.Schedule": "specens.train.trainer.Schedule",
}
"""Names of `_target_` up to 0.1 and what they are called now; the old ones work until 0.3."""


def refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """An override that was added with + and that nobody reads is a mistake."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; there are {', '.join(known)}")


def build(config: DictConfig, plugins: Sequence[str] = ()) -> Any:
    """Instantiate what `_target_` names, depth first. It must be a class of specens, or of one of
    the packages `plugins`, so that a configuration cannot call anything else. UserError in one
    line when an option is missing, unknown or refused by the class.

    (hydra.utils.instantiate would resolve a second time, and so take a text such as "${x}" for
    an interpolation.)
    """
    if not isinstance(config, DictConfig):
        raise UserError(
            "configuration: expected a mapping with a _target_, got "
            f"{'null' if config is None else config}"
        )
    plain = resolved(config)
    if "_target_" not in plain:
        raise UserError(
            f"configuration: the entry with {', '.join(plain) or 'no options'} has no _target_, "
            "the class that it describes"
        )
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        from_file = missing[0].endswith("]")
        hint = "the text ??? can only come from a file" if from_file else f"give {missing[0]}=..."
        raise UserError(f"{missing[0]} is not set: {hint}")
    return instantiate(plain, plugins)


def instantiate(value: Any, plugins: Sequence[str] = ()) -> Any:
    """`build` of plain containers."""
    if isinstance(value, list):
        return [instantiate(item, plugins) for item in value]
    if not isinstance(value, dict):
        return value
    given = {key: item for key, item in value.items() if key != "_target_"}
    fields = {key: instantiate(item, plugins) for key, item in given.items()}
    if "_target_" not in value:
        return fields
    target = _locate(str(value["_target_"]), plugins)
    known = [name for name in inspect.signature(target).parameters if name != "self"]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise UserError(
            f"{value['_target_']} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    try:
        return target(**fields)
    except UserError:
        raise
    except TypeError as error:  # an option that the class needs, or one of another type
        raise UserError(f"{value['_target_']}: {one_line(error)}") from error
    except Exception as error:  # whatever a class of the user's own raises
        kind = type(error).__name__
        raise UserError(f"{value['_target_']}: {kind}: {one_line(error)}") from error


def _locate(name: str, plugins: Sequence[str]) -> Any:
    """The class `name`, which must be defined in an allowed package, not merely reachable there."""
    name = _current(name)
    package = name.partition(".")[0]
    if package not in ("specens", *plugins):
        raise UserError(
            f"_target_: {name} is not allowed; name a class under specens., or list its package: "
            f"plugins=[{package}]"
        )
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute, None) if module else None
    except Exception as error:  # whatever a package of the user's own raises
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"_target_: {name} cannot be imported ({reason})") from error
    if found is None:
        raise UserError(f"_target_: {name} does not exist")
    if not isinstance(found, type) or found.__module__.partition(".")[0] != package:
        raise UserError(f"_target_: {name} is not a class that {package} defines")
    return found


@functools.cache
def _current(name: str) -> str:
    """What a class of an earlier version is called now; says so once."""
    if name in RENAMED:
        log.warning("_target_: %s is now %s; the old name works until 0.3", name, RENAMED[name])
    return RENAMED.get(name, name)


def plugins_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The packages that a configuration lists in `plugins`, imported. A package in the folder of
    the launch is found too, also by the console script.
    """
    names = config.get("plugins") or []
    check_list("plugins", names, str, "[my_package]")
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # whatever a package of the user's own raises
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"plugins=[{name}]: cannot be imported ({reason})") from error
    return tuple(names)


def named(group: str, name: str) -> Any:
    """What a file in conf/<group> describes, such as a drafter or a verifier."""
    return build(group_node(group, name))
