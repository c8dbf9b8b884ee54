"""The one exception for what a user can put right: it becomes one clear line and a non-zero exit."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and what to do."""
