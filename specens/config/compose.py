"""Where conf/ lies, and how a command's configuration is composed from it and from overrides.

With `cli`, the only file that knows Hydra.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specens.errors import UserError, one_line

VERSION_BASE = "1.3"

# Inside an installed wheel conf/ lies in the package, in a checkout beside it.
_HERE = Path(__file__).resolve().parent.parent
_IN_WHEEL = (_HERE / "conf" / "config.yaml").is_file()
CONF_DIR = str(_HERE / "conf" if _IN_WHEEL else _HERE.parent / "conf")

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
    is_plain = not isinstance(item, str) or re.fullmatch(r"[\w.-]+", item)
    return str(item) if is_plain else QuotedString(item, Quote.single).with_quotes()


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
