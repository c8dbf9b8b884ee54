"""The one exception for what a user can put right, and the checks of options that raise it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and what to do. A command prints it as one
    line and exits with 1.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook prints instead of a traceback (IPython asks for this name)."""
        return [f"{type(self).__name__}: {self}"]


class DrafterError(RuntimeError):
    """A drafter failed; the message names it. The prompt fails, the others go on."""


def check_count(option: str, value: object, least: int = 1) -> None:
    """UserError unless `value` is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{option}={value!r}: give a whole number, {least} or more")


def check_number(
    option: str, value: object, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> None:
    """UserError unless `value` is a finite number from `least` (with `above`: not `least` itself)
    to `most`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = value if is_number else math.nan
    inside = least <= number <= most and math.isfinite(number)  # pyright: ignore
    if not inside or (above and number == least):
        words = f"above {least:g}" if above else f"{least:g} or more"
        limit = "" if most == math.inf else f", at most {most:g}"
        raise UserError(f"{option}={value!r}: give a number, {words}{limit}")


def check_flag(option: str, value: object, *, or_null: bool = False) -> None:
    """UserError unless `value` is true or false (or, where that is allowed, null)."""
    if not (isinstance(value, bool) or (or_null and value is None)):
        known = "true, false or null" if or_null else "true or false"
        raise UserError(f"{option}={value!r}: give {known}")


def check_choice(option: str, value: object, choices: Collection[Any]) -> None:
    """UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{option}={value}: choose one of {', '.join(map(str, choices))}")


def check_list(option: str, value: object, item: type, example: str, least: int = 0) -> None:
    """UserError unless `value` is a list of `least` or more items of one type, texts not empty."""
    is_list = isinstance(value, list) and len(value) >= least
    if not is_list or not all(_is_item(entry, item) for entry in value):  # pyright: ignore
        raise UserError(f"{option}={value!r}: give a list, such as {option}={example}")


def _is_item(value: object, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) and value != ""


def one_line(error: object, most: int = 300) -> str:
    """An error's message on one line of at most so many characters, or the error's kind when it has
    none.
    """
    return " ".join(str(error).split())[:most] or type(error).__name__
