"""python -m specens.bench <the words of specens.run> bench.systems=[..]: how fast, against plain decoding and the peers?

Every system on one loaded target, the same prompts, in turns; `bench.csv`, `bench.json`, `bench.md` and a figure in the run
folder. With bench.growth=context|members|width|output: how speed grows with one of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from specens.config import CONF_DIR, VERSION_BASE, build, compose, resolved, write_words
from specens.errors import UserError, one_line
from specens.run import BUILT, PLAIN, failing_in_one_line, quiet_libraries
from specens.screen import Screen

OWN = ("bench", "systems")
"""The configuration's entries that are the bench's alone."""
MAY_DIFFER = ("drafter", "budget", "verifier", "layout")
"""What a system's own words may change. All else is the same for every system."""
ENSEMBLE = "specens.drafters.ensemble.Ensemble"


def bench(config: DictConfig, folder: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Measure what `config` says, which was composed from `words`, into `folder`; the content of bench.json."""
    from specens.benchmark.growth import grow
    from specens.benchmark.session import Bench
    from specens.experiment import Session

    screen, options = Screen(), build(config.bench)
    refuse_ignored(words)
    job = _job(config)
    if options.growth is not None:
        subjects = _growing(config, options.growth)
        _take(folder, f"growth_{options.growth}.csv")
        write_words(config, folder)
        return grow(Session(job, screen), options, subjects, folder, screen)
    described = _described(config, options.systems, words, job)
    _take(folder, "bench.csv")
    write_words(config, folder)
    session = Session(job, screen)
    done = Bench(session, described, options, folder, resolved(config), screen).run()
    for line in (folder / "bench.md").read_text(encoding="utf-8").splitlines():
        screen.say(line)
    screen.say(f"run folder: {folder}")
    return done


def refuse_ignored(words: Sequence[str]) -> None:
    """Plain decoding is always measured, and results go to the run folder: no other baseline, no tracker."""
    for word in words:
        name, _, value = word.lstrip("+~").partition("=")
        if name == "baseline" or (name.partition(".")[0] == "tracker" and value != "none"):
            raise UserError(f"{word}: the bench always measures plain decoding and writes to its folder; leave it out")


def _job(config: DictConfig) -> Any:
    """What all systems have in common, checked before any model is loaded."""
    from specens.drafters.none import NoDrafter
    from specens.job import Job

    plain = resolved(config)
    unknown = sorted(set(plain) - {*BUILT, *PLAIN, *OWN})
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; there are {', '.join((*BUILT, *PLAIN, *OWN))}")
    parts: dict[str, Any] = {name: build(config.get(name)) for name in BUILT if name != "drafter"}
    parts |= {name: plain.get(name) for name in PLAIN}
    return Job(**{**parts, "drafter": NoDrafter(), "baseline": False})


def _described(config: DictConfig, names: list[str] | None, words: Sequence[str], job: Any) -> dict[str, Any]:
    """Name -> the built parts of a system of ours, a peer, or why it cannot run here."""
    from specens.benchmark.systems import Ours, bind_once, chosen

    described = {str(name): build(system) for name, system in config.systems.items() if system is not None}
    is_sampled = job.sampling.temperature > 0
    taken = chosen(described, names, is_cuda=job.target.torch_device().startswith("cuda"), sampled=is_sampled)
    members: dict[str, Any] = {}

    def member(node: DictConfig) -> Any:
        """Members that are described alike are one object, in memory once."""
        if node.get("grow"):
            raise UserError(
                "a drafter with grow=true would find a prompt's own answer when it comes again: the bench repeats"
            )
        key = json.dumps(resolved(node), sort_keys=True, default=str)
        if key not in members:
            members[key] = bind_once(build(node))
        return members[key]

    systems: dict[str, Any] = {}
    for name in taken:
        system = described[name]
        if not isinstance(system, Ours):
            systems[name] = system.check() or system
            continue
        own = _composed(name, system.words, config, words)
        nodes = {} if system.plain else dict(_members(own.drafter))
        if system.member is not None and system.member not in nodes:
            if names is None:  # not asked for by name: this drafter has no such member to compare
                continue
            raise UserError(
                f"systems.{name}: the drafter has no member {system.member}; it has {', '.join(nodes) or 'none'}"
            )
        wanted = nodes if system.member is None else {system.member: nodes[system.member]}
        drafters = {key: member(node) for key, node in wanted.items()}
        systems[name] = _parts(drafters, own, system.wrong)
    return systems


def _parts(drafters: Mapping[str, Any], config: DictConfig, wrong: bool = False) -> Any:
    """Drafters with the rules of a composed configuration: a budget of their own, which may learn."""
    from specens.benchmark.systems import Parts

    layout: Any = str(config.layout)
    budget = build(config.budget)
    if budget.reset != "prompt":
        raise UserError(
            "budget.reset=run would remember a prompt when it comes again: the bench repeats; use reset=prompt"
        )
    return Parts(drafters, budget, build(config.verifier), layout, wrong)


def _members(node: DictConfig) -> Mapping[str, DictConfig]:
    """The members of a composed drafter; one that is not an ensemble is its only member, named as its file in conf/drafter is."""
    if node.get("_target_") == ENSEMBLE:
        return {str(name): member for name, member in (node.get("members") or {}).items()}
    words = re.findall("[A-Z]+[a-z0-9]*", str(node.get("_target_")).rpartition(".")[2].replace("NGram", "Ngram"))
    name = str(node.get("name") or "_".join(words).lower())
    return {} if name == "no_drafter" else {name: node}


def _composed(name: str, own: Sequence[str], config: DictConfig, words: Sequence[str]) -> DictConfig:
    """The configuration with a system's own words, which stand in for the command line's where both choose a group; words about
    the options of a group stay, except about the members of a drafter that is not taken.
    """
    if not own:
        return config
    groups = {key for key, _, _ in (word.partition("=") for word in own) if key in MAY_DIFFER}
    kept = [word for word in words if not any(_chooses(word, group) for group in groups)]
    try:
        composed = compose([*kept, *own], "bench")
        before, after = resolved(config), resolved(composed)
    except HydraException as error:
        raise UserError(f"systems.{name}: {one_line(error)}") from error
    for key in after:
        if key not in MAY_DIFFER and after[key] != before.get(key):
            raise UserError(f"systems.{name}: its words change {key}; they may only change {', '.join(MAY_DIFFER)}")
    return composed


def _chooses(word: str, group: str) -> bool:
    """Whether a word chooses a config group, or, for the drafter, says anything of it."""
    name = word.lstrip("+~").partition("=")[0]
    place = name.partition("@")[2] or name
    return name == group or (group == "drafter" and (place == group or place.startswith("drafter.")))


def _growing(config: DictConfig, growth: str) -> list[Any]:
    """The composed drafter and budget; for growth=members one after another with the first member, the first two, ..."""
    from specens.benchmark.systems import bind_once

    drafters = {name: bind_once(build(node)) for name, node in _members(config.drafter).items()}
    counts = range(1, len(drafters) + 1) if growth == "members" else [len(drafters)]
    return [_parts({name: drafters[name] for name in list(drafters)[:count]}, config) for count in counts]


def _take(folder: Path, name: str) -> None:
    """A folder of its own for every bench."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).open("x").close()
    except FileExistsError as error:
        raise UserError(
            f"{folder} already holds a bench: give this one a folder of its own (hydra.run.dir=...)"
        ) from error
    except OSError as error:
        raise UserError(f"cannot create the run folder {folder}: {error.strerror}") from error


@hydra.main(config_path=CONF_DIR, config_name="bench", version_base=VERSION_BASE)
def main(config: DictConfig) -> None:
    facts = HydraConfig.get()
    folder = Path(facts.runtime.output_dir)
    os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
    with failing_in_one_line(facts.mode, f"interrupted; what was measured is in {folder}"):
        quiet_libraries()
        done = bench(config, folder, list(facts.overrides.task))
        failed = sum(system["num_failed"] for system in done.get("systems", {}).values())
        if failed:
            all_ = sum(system["num_decodings"] for system in done["systems"].values())
            raise UserError(f"{failed} of {all_} decodings failed, the others are in {folder}")


if __name__ == "__main__":
    main()
