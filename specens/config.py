"""The only library file that knows Hydra: where conf/ lies, how to compose it, and the one function that instantiates."""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specens.errors import UserError, one_line

VERSION_BASE = "1.3"

# Inside an installed wheel conf/ lies in the package, in a checkout beside it.
_HERE = Path(__file__).resolve().parent
CONF_DIR = str(_HERE / "conf" if (_HERE / "conf" / "config.yaml").is_file() else _HERE.parent / "conf")

# A run folder's name must be unique also when two runs start in the same second.
OmegaConf.register_new_resolver(
    "specens_id", lambda: f"{os.getpid()}-{uuid.uuid4().hex[:6]}", use_cache=True, replace=True
)


def compose(overrides: Sequence[str] = (), door: str = "run") -> DictConfig:
    """The configuration that `python -m specens.<door> <overrides>` would get. Also inside another Hydra application."""
    around, outer = GlobalHydra.instance(), GlobalHydra.instance().hydra
    around.clear()
    try:
        with initialize_config_dir(CONF_DIR, version_base=VERSION_BASE):
            return hydra_compose("config" if door == "run" else door, overrides=list(overrides))
    finally:
        GlobalHydra.set_instance(around)
        around.hydra = outer


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain containers, interpolations resolved."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {one_line(error)} (for a literal ${{...}} write \\${{...}})") from error
    assert isinstance(plain, dict)
    return plain  # pyright: ignore[reportReturnType]


def refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """A word that was added with + and that nobody reads is a mistake."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; there are {', '.join(known)}")


def build(config: DictConfig) -> Any:
    """Instantiate what `_target_` names, depth first. Targets lie under `specens.`, so that a configuration cannot call
    anything else. UserError in one line when an option is missing, unknown or refused by the class.

    (hydra.utils.instantiate would resolve a second time, and so take a text such as "${x}" for an interpolation.)
    """
    if not isinstance(config, DictConfig):
        raise UserError(
            f"configuration: expected a mapping with a _target_, got {'null' if config is None else config}"
        )
    plain = resolved(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        hint = "the text ??? can only come from a file" if missing[0].endswith("]") else f"give {missing[0]}=..."
        raise UserError(f"{missing[0]} is not set: {hint}")
    return _instantiate(plain)


def write_words(config: DictConfig, folder: Path) -> None:
    """The three files that Hydra would write into `.hydra` of a job's folder, now that the folder is this job's own: Hydra writes
    them before anybody can say that it holds a finished run. Nothing outside of a Hydra job.
    """
    if not HydraConfig.initialized():
        return
    job = HydraConfig.get()
    own = OmegaConf.create({"hydra": OmegaConf.to_container(job, resolve=False)})
    home = folder / ".hydra"
    home.mkdir(exist_ok=True)
    for name, content in (("config", config), ("hydra", own), ("overrides", job.overrides.task)):
        (home / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def _instantiate(value: Any) -> Any:
    if isinstance(value, list):
        return [_instantiate(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _instantiate(item) for key, item in value.items() if key != "_target_"}
    if "_target_" not in value:
        return fields
    target = _locate(str(value["_target_"]))
    known = [name for name in inspect.signature(target).parameters if name != "self"]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise UserError(f"{value['_target_']} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    try:
        return target(**fields)
    except TypeError as error:  # an option that the class needs, or one of another type
        raise UserError(f"{value['_target_']}: {one_line(error)}") from error


def _locate(name: str) -> Any:
    """The class `name`, which must be defined under specens, not merely reachable from there."""
    refusal = UserError(f"_target_: {name} is not allowed; name a class under specens.")
    if not name.startswith("specens."):
        raise refusal
    try:
        found = hydra.utils.get_object(name)
    except Exception as error:
        raise UserError(f"_target_: {name} does not exist") from error
    if not isinstance(found, type) or not found.__module__.startswith("specens."):
        raise refusal
    return found


def named(group: str, name: str) -> Any:
    """What a file in conf/<group> describes, such as a drafter or a verifier."""
    known = sorted(path.stem for path in (Path(CONF_DIR) / group).glob("*.yaml"))
    if name not in known:
        raise UserError(f"{group} {name!r}: choose one of {', '.join(known)}")
    return build(compose([f"{group}={name}"])[group])
