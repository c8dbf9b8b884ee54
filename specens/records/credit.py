"""Who earned a step.

Notation: A accepted draft tokens; member d's proposal agrees with the emitted tokens over its first
m_d tokens (`num_matched`, pruned proposals count); n_i members have m_d >= i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Credit:
    """One member's credit for one step; see `credit` for the definitions."""

    is_win: bool
    win: float
    is_sole_win: bool
    token_share: float
    marginal: int


def credit(num_matched: Sequence[int], num_accepted: int) -> list[Credit]:
    """Credit of every member for one step, in the order of `num_matched`.

    Agreement is capped at A = `num_accepted`: a proposal cut by the budget may also agree with the
    target's own token, which is a loss to the budget and no win.

    - `is_win`: m_d = A > 0. `win`: the same, ties split evenly: 1[m_d = A > 0] / #{e: m_e = A}.
      Wins sum to 1 if A > 0.
    - `is_sole_win`: the only member with m_d = A > 0.
    - `token_share`: sum over i <= A of 1[m_d >= i] / n_i. It is the Shapley value of the game v(S)
      = max of m over S, and sums to A.
    - `marginal`: A - max of the others' m (of nobody: 0), the tokens that this step would lose
      without the member.

    Raises ValueError when a count is negative, or when A > 0 but no member's proposal reaches A.
    """
    if num_accepted < 0 or any(m < 0 for m in num_matched):
        raise ValueError(
            f"counts cannot be negative: {list(num_matched)} matched, {num_accepted} accepted"
        )
    capped = [min(m, num_accepted) for m in num_matched]
    if num_accepted > 0 and max(capped, default=0) < num_accepted:
        raise ValueError(f"{num_accepted} accepted tokens, but the members matched only {capped}")
    num_winners = capped.count(num_accepted) if num_accepted > 0 else 0
    num_reaching = [sum(m >= depth for m in capped) for depth in range(1, num_accepted + 1)]
    credits: list[Credit] = []
    for member, m in enumerate(capped):
        is_win = m == num_accepted > 0
        others = max(capped[:member] + capped[member + 1 :], default=0)
        credits.append(
            Credit(
                is_win=is_win,
                win=1 / num_winners if is_win else 0.0,
                is_sole_win=is_win and num_winners == 1,
                token_share=math.fsum(1 / count for count in num_reaching[:m]),
                marginal=num_accepted - others if is_win else 0,
            )
        )
    return credits
