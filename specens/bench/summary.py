"""Rows of a bench -> its numbers. Pure, without torch. Each number has one definition, in the
docstring of what computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from specens.bench.rows import Row

AR = "AR"
"""The system that everything is measured against: our own loop without drafters."""

PARTS = ("draft", "verify", "host")
"""What a step's time goes into; host is the CPU overhead."""

GROUPS = {"extraction + summarization + rag": ("extraction", "summarization", "rag")}
"""Categories that are also looked at together: answers there repeat the prompt."""

Span = dict[str, float]
"""median, min and max over the repeats."""


def summarise(
    rows: Sequence[Row], systems: Sequence[str], unavailable: dict[str, str]
) -> dict[str, Any]:
    """Every system's numbers, by name and in order; `unavailable` are the names that never decoded,
    and why.
    """
    return {name: system_summary(rows, name, unavailable.get(name)) for name in systems}


def system_summary(
    rows: Sequence[Row], name: str, unavailable: str | None = None
) -> dict[str, Any]:
    """One system. `num_decodings` counts its rows, `num_failed` those with an error, which every
    other number leaves out; `error` is the first one, or why the system is unavailable.
    `num_identical` of `num_compared` outputs are AR decoding's. `peak_memory_bytes` is the most of
    any decoding.
    """
    categories = list(dict.fromkeys(row.category for row in rows))
    rows = [row for row in rows if row.system in (name, AR)]
    own = [row for row in rows if row.system == name]
    done = [row for row in own if row.error is None]
    by_category = {category: speedup(rows, name, categories=[category]) for category in categories}
    return {
        "num_decodings": len(own),
        "num_failed": len(own) - len(done),
        "error": unavailable or next((row.error for row in own if row.error is not None), None),
        "tokens_per_s": tokens_per_s(done),
        "speedup": speedup(rows, name),
        "by_category": by_category,
        "worst_category": worst(by_category),
        "by_group": {
            title: speedup(rows, name, categories=group)
            for title, group in GROUPS.items()
            if set(group) & set(categories)
        },
        "acceptance_length": ratio(total(done, "num_tokens"), total(done, "num_steps")),
        "prefill_s": ratio(total(done, "prefill_s"), len(done)),
        **split(done),
        "accounting": accounting(rows, name),
        "num_identical": sum(row.is_identical is True for row in done),
        "num_compared": sum(row.is_identical is not None for row in done),
        "first_divergence": _known(min, done, "divergence"),
        "peak_memory_bytes": _known(max, done, "peak_memory_bytes"),
    }


def _known(choose: Callable[..., Any], rows: Iterable[Row], column: str) -> Any:
    """The least or most of a column where it was measured."""
    values = (getattr(row, column) for row in rows)
    return choose((value for value in values if value is not None), default=None)


def tokens_per_s(done: Sequence[Row]) -> Span | None:
    """Timed tokens over seconds of decoding: totals over totals of a repeat, then median, min and
    max over the repeats.
    """
    return span(rate([row for row in done if row.repeat == n]) for n in repeats_of(done))


def speedup(
    rows: Sequence[Row], name: str, base: str = AR, categories: Sequence[str] | None = None
) -> Span | None:
    """A system's tokens per second over the base's, of one repeat on the prompts that both decoded
    (so the two are paired in time, and neither is judged on prompts that the other lacks); then
    median, min and max over the repeats.
    """
    ratios = []
    for repeat in repeats_of(rows):
        mine, theirs = shared(rows, name, base, repeat, categories)
        ratios.append(ratio(rate(mine), rate(theirs)))
    return span(ratios)


def versus(rows: Sequence[Row], systems: Sequence[str]) -> dict[str, dict[str, float]]:
    """system -> base -> median speed-up of the one over the other, where there is one."""
    table: dict[str, dict[str, float]] = {}
    for name in systems:
        found = {base: speedup(rows, name, base) for base in systems if base != name}
        table[name] = {base: numbers["median"] for base, numbers in found.items() if numbers}
    return table


def split(done: Sequence[Row]) -> dict[str, float | None]:
    """Shares of `decode_s` that went into drafting, the target's forwards and the rest, and
    milliseconds of each per step; `mean_nodes`: verified draft nodes per step. None for a system
    that does not report what it spends.
    """
    known = [row for row in done if row.verify_s is not None]
    seconds, steps = total(known, "decode_s"), total(known, "num_timed_steps")
    parts = {part: total(known, f"{part}_s") for part in PARTS}
    return {
        **{f"{part}_fraction": ratio(value, seconds) for part, value in parts.items()},
        **{f"{part}_ms_per_step": ratio(1e3 * value, steps) for part, value in parts.items()},
        "mean_nodes": ratio(total(known, "num_nodes"), steps),
    }


def accounting(rows: Sequence[Row], name: str) -> dict[str, float | None] | None:
    """Where the time goes that the accepted tokens have saved, over all repeats, on the prompts
    that AR decoding decoded too.

    L is the acceptance length after the first emission, T(1) the time of a whole step of AR
    decoding, T(n) the mean time of this system's target forward. `limit` = L x T(1) / T(n) is the
    speed-up if drafting and CPU overhead were free; the result is `limit` times T(n)'s share of a
    step. `*_percent` are shares of this system's time and sum to 100: `needed` for as many of AR
    decoding's forwards as it made steps, `width` for what its own forwards took beyond that (more
    nodes, padding), `draft`, and `host` for the rest (CPU overhead).

    None for systems that do not report what they spend, and where there was nothing to time.
    """
    pairs = [shared(rows, name, AR, repeat) for repeat in repeats_of(rows)]
    mine, base = ([row for pair in pairs for row in pair[side]] for side in (0, 1))
    if any(row.verify_s is None for row in (*mine, *base)):
        return None
    steps, base_steps = total(mine, "num_timed_steps"), total(base, "num_timed_steps")
    seconds, base_seconds = total(mine, "decode_s"), total(base, "decode_s")
    if not (steps and base_steps and seconds and base_seconds):
        return None
    length = total(mine, "num_timed_tokens") / steps
    draft_s, verify_s = total(mine, "draft_s"), total(mine, "verify_s")
    width_ratio = ratio(base_seconds / base_steps, verify_s / steps)
    needed_s = steps * total(base, "verify_s") / base_steps
    parts = {
        "needed": needed_s,
        "width": verify_s - needed_s,
        "draft": draft_s,
        "host": seconds - verify_s - draft_s,
    }
    return {
        "acceptance_length": length,
        "mean_nodes": total(mine, "num_nodes") / steps,
        "t1_over_tn": width_ratio,
        "limit": None if width_ratio is None else length * width_ratio,
        "speedup": ratio(rate(mine), rate(base)),
        **{f"{part}_percent": 100 * value / seconds for part, value in parts.items()},
    }


def worst(by_category: dict[str, Span | None]) -> dict[str, Any] | None:
    """The category with the lowest median."""
    known = {category: numbers["median"] for category, numbers in by_category.items() if numbers}
    name = min(known, key=lambda category: known[category], default=None)
    return None if name is None else {"category": name, "speedup": known[name]}


def shared(
    rows: Sequence[Row], name: str, base: str, repeat: int, categories: Sequence[str] | None = None
) -> tuple[list[Row], list[Row]]:
    """The rows of two systems in one repeat, on the prompts that both decoded without an error."""
    mine, theirs = (
        {
            row.prompt_id: row
            for row in rows
            if row.system == system
            and row.repeat == repeat
            and row.error is None
            and (categories is None or row.category in categories)
        }
        for system in (name, base)
    )
    both = [prompt_id for prompt_id in mine if prompt_id in theirs]
    return [mine[prompt_id] for prompt_id in both], [theirs[prompt_id] for prompt_id in both]


def repeats_of(rows: Iterable[Row]) -> list[int]:
    return sorted({row.repeat for row in rows})


def rate(rows: Sequence[Row]) -> float | None:
    """Tokens per second: totals over totals."""
    return ratio(total(rows, "num_timed_tokens"), total(rows, "decode_s"))


def total(rows: Iterable[Row], column: str) -> float:
    return float(sum(getattr(row, column) or 0 for row in rows))


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None, not 0 and not an error, where there is nothing to divide."""
    return None if numerator is None or not denominator else numerator / denominator


def span(values: Iterable[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None
