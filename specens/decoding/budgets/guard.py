"""The guard of budget=cost_aware: AR decoding while drafting loses time."""

from __future__ import annotations

from dataclasses import dataclass

from specens.decoding.budgets.tuning import TUNING


@dataclass
class Guard:
    """`balance_ms` is what drafting has saved over AR decoding in this text (below 0: lost), of
    which gains count up to `guard_credit` AR steps; `elapsed_ms` the time of all its steps.

    Drafting is paused while -balance exceeds `guard_steps` AR steps + `guard_share` of the elapsed
    time.
    """

    balance_ms: float = 0.0
    elapsed_ms: float = 0.0

    def room_ms(self, ar_step_ms: float) -> float:
        """Milliseconds that may yet be lost; below 0: pause."""
        allowed = TUNING.guard_steps * ar_step_ms
        return self.balance_ms + allowed + TUNING.guard_share * self.elapsed_ms

    def observe(self, num_emitted: int, spent_ms: float, ar_step_ms: float) -> None:
        self.elapsed_ms += spent_ms
        most = TUNING.guard_credit * ar_step_ms
        self.balance_ms = min(self.balance_ms + num_emitted * ar_step_ms - spent_ms, most)
