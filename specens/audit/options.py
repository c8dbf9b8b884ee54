"""The `audit.*` overrides."""

from __future__ import annotations

from dataclasses import dataclass

from specens.errors import check_count, check_number


@dataclass(frozen=True)
class AuditOptions:
    """How much is examined: `num_prompts` of the run; at least `sampled_tokens` tokens of sampled
    text (0: no more than the run's own; None: 512 beside a greedy run, 1024 of a sampled one), at
    `temperature` where a greedy run has none of its own; and `width`, the nodes of the forwards in
    which the control scores the same text again.
    """

    num_prompts: int = 8
    sampled_tokens: int | None = None
    temperature: float = 1.0
    width: int = 8

    def __post_init__(self) -> None:
        check_count("audit.num_prompts", self.num_prompts)
        if self.sampled_tokens is not None:
            check_count("audit.sampled_tokens", self.sampled_tokens, 0)
        check_number("audit.temperature", self.temperature, above=True)
        check_count("audit.width", self.width)

    def num_sampled(self, *, is_sampled: bool) -> int:
        """Sampled tokens to examine, those of a sampled run among them. Of a greedy run, its own
        tokens are examined as well.
        """
        if self.sampled_tokens is not None:
            return self.sampled_tokens
        return 1024 if is_sampled else 512
