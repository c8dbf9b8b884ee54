"""The `bench.*` words of the command line."""

from __future__ import annotations

from dataclasses import dataclass

from specens.errors import UserError, check_count

GROWTHS = ("context", "members", "width", "output")


@dataclass(frozen=True)
class Options:
    """What is measured. `systems`: names of the configuration's `systems`, None for all that fit this machine; plain decoding is
    always measured. Every system decodes every prompt `repeats` times, in an order shuffled by `seed`. Before anything is timed
    each decodes `warm_up_tokens`: on the first prompt, with `warm_up_every` on each (None: on CUDA, where every new shape costs
    a compilation or a capture).

    `growth` measures one of GROWTHS instead, with the composed drafter and budget: how speed grows with it, over `growth_prompts`
    prompts of `growth_tokens` tokens.
    """

    systems: list[str] | None = None
    repeats: int = 3
    seed: int = 0
    warm_up_tokens: int = 16
    warm_up_every: bool | None = None
    growth: str | None = None
    growth_prompts: int = 2
    growth_tokens: int = 64

    def __post_init__(self) -> None:
        names = self.systems
        if names is not None and not (
            isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        ):
            raise UserError(f"bench.systems={names!r}: give a list of names, bench.systems=[plain,ngram]")
        for option in ("repeats", "warm_up_tokens", "growth_prompts", "growth_tokens"):
            check_count(f"bench.{option}", getattr(self, option))
        check_count("bench.seed", self.seed, 0)
        if self.warm_up_every is not None and not isinstance(self.warm_up_every, bool):
            raise UserError(f"bench.warm_up_every={self.warm_up_every!r}: give true, false or null")
        if self.growth is not None and self.growth not in GROWTHS:
            raise UserError(f"bench.growth={self.growth}: choose one of {', '.join(GROWTHS)}")
        if self.growth is not None and names is not None:
            raise UserError("bench.growth measures the composed drafter, not bench.systems: give one of the two")
