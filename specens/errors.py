"""The one exception for what a user can put right: it becomes one clear line and a non-zero exit."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and what to do."""


def check_count(option: str, value: object, least: int = 1) -> None:
    """UserError unless `value` is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{option}={value!r}: give a whole number, {least} or more")


class DrafterError(RuntimeError):
    """A drafter failed; the message names it. The prompt fails, the others go on."""


def one_line(error: object) -> str:
    """An error's message on one line, not too long, or the error's kind when it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
