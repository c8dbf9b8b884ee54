"""What a bench measures: the `bench.*` overrides, and the configuration's `systems`, built."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specens.bench.summary import AR
from specens.bench.systems import Parts, Peer, SpecensSystem
from specens.config.build import build, instantiate
from specens.config.compose import compose, expanded, group_node, resolved
from specens.decoding.drafter import Drafter
from specens.drafters.ensemble import Ensemble
from specens.errors import UserError, check_count, check_list
from specens.run.job import Job

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("specens")

PARTS = ("drafter", "budget", "verifier", "layout")
"""What a system of ours may have of its own. All else is the same for every system."""

ALIASES = {"plain": AR, "wrong": "adversarial"}
OLD_OPTIONS = {"member", "plain", "words", "wrong"}
"""Names of systems up to 0.1, and options that they had."""


@dataclass(frozen=True)
class BenchOptions:
    """What is measured. `systems`: names of the configuration's `systems`, None for all that fit
    this machine; AR decoding is always measured. Every system decodes every prompt `repeats` times,
    in an order shuffled by `seed`. Before anything is timed each decodes `warm_up_tokens`: on CUDA
    of every prompt (a new shape costs a compilation or a capture), elsewhere of the first.
    """

    systems: list[str] | None = None
    repeats: int = 3
    seed: int = 0
    warm_up_tokens: int = 16

    def __post_init__(self) -> None:
        if self.systems is not None:
            check_list("bench.systems", self.systems, str, "[AR,ngram]", least=1)
        check_count("bench.repeats", self.repeats)
        check_count("bench.warm_up_tokens", self.warm_up_tokens)
        check_count("bench.seed", self.seed, 0)


def refuse_ignored(overrides: Sequence[str]) -> None:
    """AR decoding is always measured, and results go to the run folder: no other baseline, no
    tracker.
    """
    for word in overrides:
        name, _, value = word.lstrip("+~").partition("=")
        if name == "baseline" or (name.partition(".")[0] == "tracker" and value != "none"):
            raise UserError(
                f"{word}: the bench always measures AR decoding and writes to its folder; leave it "
                "out"
            )


def described(
    config: DictConfig, job: Job, names: Sequence[str] | None
) -> dict[str, Parts | Peer | str]:
    """What to measure, by name: the parts of a system of ours, another system, or why it cannot run
    here. The run's drafters are built once, and shared.
    """
    nodes, drafter = resolved(config), build(config.drafter, job.plugins)
    run = {"drafter": drafter, "budget": job.budget, "verifier": job.verifier, "layout": job.layout}

    def part(system: SpecensSystem, name: str) -> Any:
        own = getattr(system, name)
        if isinstance(own, dict):
            return instantiate(merged(nodes[name], own), job.plugins)
        return run[name] if own is None else own

    systems: dict[str, Any] = {}
    for name, node in config.systems.items():
        if node is not None:
            with naming(str(name)):
                plain = nodes["systems"][name]
                systems[str(name)] = _system(str(name), node, plain, job.plugins)
    is_cuda = job.target.torch_device().startswith("cuda")
    found: dict[str, Any] = {}
    for name in chosen(systems, names, is_cuda=is_cuda, is_sampled=job.sampling.temperature > 0):
        system = systems[name]
        if not isinstance(system, SpecensSystem):
            found[name] = system.check() or system
            continue
        with naming(name):
            drafters = {} if system.ar else named_drafters(part(system, "drafter"))
            if names is None and not set(system.members or ()) <= set(drafters):
                continue  # nothing named it
            drafters = _only(system.members, drafters)
            budget, verifier, layout = (part(system, name) for name in PARTS[1:])
            found[name] = Parts(drafters, budget, verifier, layout, system.adversarial)
    return found


@contextmanager
def naming(system: str) -> Iterator[None]:
    """Errors name the system."""
    try:
        yield
    except UserError as error:
        raise UserError(f"systems.{system}: {error}") from error


def chosen(
    systems: Mapping[str, Any], names: Sequence[str] | None, *, is_cuda: bool, is_sampled: bool
) -> list[str]:
    """The systems to measure: AR decoding, then those that are not ours, then ours. UserError for a
    name that is not there.
    """
    if not getattr(systems.get(AR), "ar", False):
        raise UserError(
            f"systems.{AR}: has to be AR decoding (ar: true), which all others are measured against"
        )
    ours = [name for name, system in systems.items() if isinstance(system, SpecensSystem)]
    others = [name for name in systems if name not in ours]
    if names is None:
        fitting = [name for name in others if is_cuda or not systems[name].cuda_only]
        names = [*ours, *([] if is_sampled else fitting)]
    taken = [name if name in systems else ALIASES.get(name, name) for name in names]
    for name in taken:
        if name not in systems:
            raise UserError(
                f"bench.systems: no system is called {name}; there are {', '.join(systems)}"
            )
        if is_sampled and name in others:
            raise UserError(
                f"bench.systems: {name} samples with noise of its own, so it has no text to "
                "compare; use sampling.temperature=0"
            )
    return list(dict.fromkeys([AR, *(name for name in (*others, *ours) if name in taken)]))


def named_drafters(drafter: Drafter) -> dict[str, Drafter]:
    """The drafters of an ensemble by name; any other is the only one, by its own name."""
    if isinstance(drafter, Ensemble):
        return dict(drafter.drafters)
    return {member.name: drafter for member in drafter.members[:1]}


def _only(members: list[str] | None, drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    for name in members or ():
        if name not in drafters:
            there = ", ".join(drafters) or "none"
            raise UserError(f"the drafter has no member {name}; it has {there}")
    return {name: drafters[name] for name in (drafters if members is None else members)}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `changes` in place of its own, at any depth."""
    inner = {
        key: merged(base[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **changes, **inner}


def _system(name: str, node: DictConfig, plain: Any, plugins: Sequence[str]) -> Any:
    """What an entry of `systems` describes; `plain` is the same entry in plain containers."""
    old = sorted(OLD_OPTIONS & set(plain)) if isinstance(plain, dict) else []
    if not old:
        return build(node, plugins)
    log.warning(
        "systems.%s: %s: write nodes, {_target_: specens.bench.systems.SpecensSystem, members: "
        "[ngram], budget: {max_nodes: 8}} or +budget@systems.%s.budget=fixed; the old form works "
        "until 0.3",
        *(name, ", ".join(old), name),
    )
    return instantiate(_with_nodes(plain), plugins)


def _with_nodes(node: Mapping[str, Any]) -> dict[str, Any]:
    """A system's node as it was up to 0.1, with overrides (`words`) in place of nodes."""
    new = {key: value for key, value in node.items() if key not in OLD_OPTIONS}
    new |= {"_target_": "specens.bench.systems.SpecensSystem"}
    new |= {"adversarial": node.get("wrong", False), "ar": node.get("plain", False)}
    if node.get("member") is not None:
        new["members"] = [node["member"]]
    dotted = []
    for word in expanded(node.get("words") or []):
        key, _, value = word.partition("=")
        group, _, option = key.partition(".")
        if group not in PARTS:
            raise UserError(f"its words change {group}; they may only change {', '.join(PARTS)}")
        if option:
            dotted.append(f"+parts.{word}")
        else:
            new[group] = value if group == "layout" else resolved(group_node(group, value))
    for group, options in resolved(compose(dotted)).get("parts", {}).items():
        new[group] = merged(new.get(group, {}), options)
    return new
