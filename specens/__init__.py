"""specens: a laboratory for speculative decoding with several drafters at once.

Importing this package is instant; torch is loaded when `attach` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["UserError", "attach", "load", "load_model"]

if TYPE_CHECKING:
    from specens.attached import attach, load_model
    from specens.errors import UserError
    from specens.records.reader import load

_HOMES = {
    "attach": "specens.attached",
    "load_model": "specens.attached",
    "load": "specens.records.reader",
    "UserError": "specens.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
