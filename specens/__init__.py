"""specens: a laboratory for speculative decoding with several drafters at once.

Importing this package is instant; torch is loaded when `attach` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["UserError", "attach", "load"]

if TYPE_CHECKING:
    from specens.errors import UserError
    from specens.loading import load
    from specens.speculator import attach

_HOMES = {"attach": "specens.speculator", "load": "specens.loading", "UserError": "specens.errors"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
