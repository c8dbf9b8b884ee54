"""Which members draft in a step. The one place that knows what `Plan.first_only` means: the live
ensemble and replay both call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from specens.decoding.types import Draft, Plan, Share

Part = TypeVar("Part", Plan, Share)


def propose_in_order(
    parts: Sequence[Part], first_only: bool, propose: Callable[[int, Part], Draft]
) -> list[Draft | None]:
    """Call the drafters one after another, each with its part of the plan; None for one that stays
    idle: its part is empty, or with `first_only` one before it has proposed something.
    """
    drafts: list[Draft | None] = []
    has_proposed = False
    for index, part in enumerate(parts):
        is_idle = part.num_tokens == 0 or (first_only and has_proposed)
        drafts.append(None if is_idle else propose(index, part))
        has_proposed = has_proposed or bool(drafts[-1])
    return drafts
