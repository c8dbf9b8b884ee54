"""The only library file that knows Hydra: where conf/ lies, how to compose it, and the one function that instantiates."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specens.errors import UserError

VERSION_BASE = "1.3"

# Inside an installed wheel conf/ lies in the package, in a checkout beside it.
_HERE = Path(__file__).resolve().parent
CONF_DIR = str(_HERE / "conf" if (_HERE / "conf" / "config.yaml").is_file() else _HERE.parent / "conf")

# A run folder's name must be unique also when two runs start in the same second.
OmegaConf.register_new_resolver(
    "specens_id", lambda: f"{os.getpid()}-{uuid.uuid4().hex[:6]}", use_cache=True, replace=True
)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that `python -m specens.run <overrides>` would get."""
    with initialize_config_dir(CONF_DIR, version_base=VERSION_BASE):
        return hydra_compose("config", overrides=list(overrides))


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain containers, interpolations resolved."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {_first_line(error)}") from error
    assert isinstance(plain, dict)
    return plain  # pyright: ignore[reportReturnType]


def build(config: DictConfig) -> Any:
    """Instantiate what `_target_` names. Targets lie under `specens.`, so that a configuration cannot call anything else.
    UserError in one line when an option is missing, unknown or refused by the class.
    """
    _check_targets(resolved(config))
    try:
        return hydra.utils.instantiate(config, _convert_="all")
    except Exception as error:
        cause = error
        while not isinstance(cause, UserError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from error
        target = config.get("_target_", "configuration")
        raise UserError(f"{target}: {_first_line(cause)}") from error


def drafter_named(name: str) -> Any:
    """The drafter of a file in conf/drafter."""
    known = sorted(path.stem for path in (Path(CONF_DIR) / "drafter").glob("*.yaml"))
    if name not in known:
        raise UserError(f"drafter {name!r}: choose one of {', '.join(known)}")
    return build(compose([f"drafter={name}"]).drafter)


def _check_targets(value: Any) -> None:
    if isinstance(value, dict):
        target = value.get("_target_")
        if target is not None and not str(target).startswith("specens."):
            raise UserError(f"_target_: {target} is not allowed; name a class under specens.")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_targets(child)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
