"""Configuration: where conf/ lies, how to compose it, and the one function that instantiates.

With `cli`, the only file that knows Hydra.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specens.errors import UserError, check_list, one_line

log = logging.getLogger("specens")

VERSION_BASE = "1.3"

# Inside an installed wheel conf/ lies in the package, in a checkout beside it.
_HERE = Path(__file__).resolve().parent
_IN_WHEEL = (_HERE / "conf" / "config.yaml").is_file()
CONF_DIR = str(_HERE / "conf" if _IN_WHEEL else _HERE.parent / "conf")

OBJECTS = ("target", "drafter", "budget", "verifier", "sampling", "prompts", "tracker")
VALUES = ("layout", "baseline", "trace", "exact_width", "compiled", "metrics", "plugins")
"""The entries of a run's configuration: nodes with a `_target_`, and plain values."""

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

# A run folder's name must be unique also when two runs start in the same second.
OmegaConf.register_new_resolver(
    "specens_id", lambda: f"{os.getpid()}-{uuid.uuid4().hex[:6]}", use_cache=True, replace=True
)


def compose(
    overrides: Sequence[str] = (), command: str = "run", *, with_hydra: bool = False
) -> DictConfig:
    """The configuration that `python -m specens.<command> <overrides>` would get; `with_hydra`:
    also Hydra's own node. Works inside another Hydra application too, whose global state Hydra
    would not let us share: it is put aside, and back. Raises UserError for overrides that do not
    compose.
    """
    around, outer = GlobalHydra.instance(), GlobalHydra.instance().hydra
    around.clear()
    try:
        given = expanded(overrides)
        with initialize_config_dir(CONF_DIR, version_base=VERSION_BASE):
            return hydra_compose(config_name(command), given, return_hydra_config=with_hydra)
    except UserError:
        raise
    except Exception as error:  # whatever Hydra, OmegaConf or YAML say about what was given
        raise refused(error, command, overrides) from error
    finally:
        GlobalHydra.set_instance(around)
        around.hydra = outer


def config_name(command: str) -> str:
    """The file in conf/ that a command is composed from, without its ending."""
    return "config" if command == "run" else command


def refused(error: Exception, command: str, overrides: Sequence[str]) -> UserError:
    """An error with which a command's configuration was composed, as one line on the override."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        typed = [text for text in overrides if re.match(rf"\+*{group}\b.*={name}$", text)]
        known = [option for option in error.options if not option.startswith("_")]
        return UserError(
            f"{(typed or [f'{group}={name}'])[0]}: there is no {name}; choose one of "
            f"{', '.join(known)}"
        )
    text = str(error).partition("Config search path")[0].partition("See https://hydra.cc")[0]
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override}: is no override ({one_line(text)}); quote the whole for the shell, "
            "and texts in it once more: 'prompts.texts=[\"Why?\"]'"
        )
    if found := re.match(r"Could not override '(.+?)'", text):
        reason = str(error.__cause__ or "").partition("full_key")[0] or text
        if "is not in struct" in reason:
            return UserError(
                f"{found[1]}: there is no such option; specens {command} --help lists those that "
                "there are"
            )
        return UserError(f"{found[1]}: {one_line(reason.partition('To append')[0])}")
    if isinstance(error, OSError) and error.filename:
        return UserError(
            f"{error.filename}: {error.strerror}; hydra.run.dir=<folder> chooses where results go"
        )
    is_known = isinstance(error, HydraException | OmegaConfBaseException)
    kind = "" if is_known else f"{type(error).__name__}: "
    return UserError(f"configuration: {kind}{one_line(text)}")


ADDED_MEMBER = re.compile(r"\+{1,2}drafter(?:@drafter)?\.members\.([\w-]+)(?:\._target_)?=")
"""How an override begins that adds a member to an ensemble."""


def expanded(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra takes them: `drafter=[a,b]` chooses members of the default ensemble, which
    has the members that other overrides add as well. Several lists, with commas between them, are a
    sweep. Raises UserError where lists and names are mixed.
    """
    found = map(ADDED_MEMBER.match, overrides)
    added = dict.fromkeys(match[1] for match in found if match)
    taken: list[str] = []
    for override in overrides:
        if lists := _lists_of_members(override):
            whole = ([*names, *(name for name in added if name not in names)] for names in lists)
            only = ",".join(f"[{','.join(names)}]" for names in whole)
            taken += ["drafter=ensemble", f"drafter.only={only}"]
        else:
            taken.append(override)
    return taken


def _lists_of_members(override: str) -> list[list[str]]:
    """The lists in `drafter=[a,b],[c]`, their items as they were written; none in another one."""
    if not override.startswith("drafter=") or "[" not in override:
        return []
    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException:  # Hydra says better what is wrong with it, when it composes
        return []
    choices: list[Any] = value.list if isinstance(value, ChoiceSweep) else [value]
    names = [choice for choice in choices if not isinstance(choice, list)]
    if names and len(names) < len(choices):
        raise UserError(
            f"{override}: mixes names and lists; write every choice as a list of members, such as "
            "drafter=[ngram],[ngram,quantized] ([]: AR decoding)"
        )
    return [[_as_written(item) for item in choice] for choice in choices if choice not in names]


def _as_written(item: Any) -> str:
    return item.with_quotes() if isinstance(item, QuotedString) else str(item)


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain containers, interpolations resolved."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(
            f"configuration: {one_line(error)} (for a literal ${{...}} write \\${{...}})"
        ) from error
    assert isinstance(plain, dict)
    return plain  # pyright: ignore[reportReturnType]


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


def group_node(group: str, name: str) -> DictConfig:
    """The configuration of a file in conf/<group>."""
    known = group_names(group)
    if name not in known:
        raise UserError(f"{group} {name!r}: choose one of {', '.join(known)}")
    file = OmegaConf.load(Path(CONF_DIR) / group / f"{name}.yaml")
    if isinstance(file, DictConfig) and "defaults" not in file:
        return file
    where = "model@target" if group == "model" else group
    return compose([f"{where}={name}"])[where.rpartition("@")[2]]


def group_names(group: str) -> list[str]:
    """The choices of a group. A file whose name begins with _ is a part of others, no choice."""
    return sorted(path.stem for path in (Path(CONF_DIR) / group).glob("[!_]*.yaml"))


def write_overrides(config: DictConfig, folder: Path, job: DictConfig) -> None:
    """The three files that Hydra would write into `.hydra` of a job's folder, now that the folder
    is this job's own: Hydra would write them before it is known whether the folder holds a finished
    run. `job` is Hydra's own node of the configuration.
    """
    own = OmegaConf.create({"hydra": OmegaConf.to_container(job, resolve=False)})
    home = folder / ".hydra"
    home.mkdir(exist_ok=True)
    contents = (("config", config), ("hydra", own), ("overrides", job.overrides.task))
    for name, content in contents:
        (home / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def run_config(folder: Path) -> DictConfig:
    """The configuration of a finished run, from its folder. Raises UserError when it has none."""
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"run={folder}: has no .hydra/config.yaml; give the folder of one run, as `run "
            "folder:` shows it"
        )
    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise UserError(f"run={folder}: {path} is not the configuration of a run")
        config = run_part(config)
        found = set(resolved(config))
    except UserError:
        raise
    except Exception as error:  # whatever YAML makes of a broken file
        raise UserError(f"run={folder}: cannot read {path}: {one_line(error)}") from error
    odd = sorted((found - {*OBJECTS, *VALUES}) | ({*OBJECTS, "layout"} - found))
    if odd:
        raise UserError(
            f"run={folder}: {odd[0]} is missing or unknown in {path}; it was written by another "
            "specens"
        )
    return config


def run_part(config: DictConfig, own: Collection[str] = ("run", "audit")) -> DictConfig:
    """What of a command's configuration describes a run: all but the command's `own` entries."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in own])


def launch_folder(folder: Path) -> Path | None:
    """Where the command of a finished run was given, which its relative paths are relative to;
    None for a folder that does not say, or one that was moved to another machine.
    """
    try:
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
        origin = Path(str(hydra.runtime.cwd))
    except Exception:  # the file is missing or broken: the paths may still be right
        return None
    return origin if origin.is_dir() else None
