"""The one exception for what a user can put right: it becomes one clear line and a non-zero exit."""

from __future__ import annotations

import math


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook prints instead of a traceback (IPython asks for this name)."""
        return [f"{type(self).__name__}: {self}"]


def check_count(option: str, value: object, least: int = 1) -> None:
    """UserError unless `value` is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{option}={value!r}: give a whole number, {least} or more")


def check_number(
    option: str, value: object, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> None:
    """UserError unless `value` is a finite number from `least` (with `above`: not `least` itself) to `most`."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (least <= number <= most and math.isfinite(number)) or (above and number == least):
        words = f"above {least:g}" if above else f"{least:g} or more"
        raise UserError(
            f"{option}={value!r}: give a number, {words}" + ("" if most == math.inf else f", at most {most:g}")
        )


class DrafterError(RuntimeError):
    """A drafter failed; the message names it. The prompt fails, the others go on."""


def one_line(error: object, most: int = 300) -> str:
    """An error's message on one line, of at most so many characters, or the error's kind when it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__
