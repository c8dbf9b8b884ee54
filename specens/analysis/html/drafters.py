"""What the page says of the drafters: who wins, what each costs and gives, how deep it is right, in which category it helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specens.analysis.html.colours import NUM_SHADES, Cast
from specens.analysis.html.figures import Bar, Part, bars
from specens.analysis.html.markup import Html, markup, number, percent, section, table, tag

_COLUMNS: tuple[tuple[str, str, Callable[[Any], str], str], ...] = (
    ("win_rate", "win rate", percent, "steps in which its proposal was the longest accepted one; ties are split"),
    ("sole_win_rate", "alone", percent, "steps that it won and nobody else"),
    ("token_share", "token share", percent, "its part of all accepted tokens; a token is split among those who proposed it"),
    ("marginal", "marginal", lambda value: number(value, 2), "tokens per step that would be lost without it"),
    ("acceptance_rate", "accepted", percent, "of its tokens that were verified"),
    ("solo_acceptance_length", "length alone", lambda value: number(value, 2), "tokens per forward if it were the only one"),
    ("draft_ms_per_step", "ms per step", lambda value: number(value, 2), "its drafting time"),
    ("tokens_per_draft_s", "tokens per draft second", lambda value: number(value, 1), "its token share over its drafting time"),
    ("silent_rate", "silent", percent, "steps in which it proposed nothing, or was not asked"),
    ("wasted_nodes", "wasted nodes", lambda value: number(value, 0), "its verified tokens that were not accepted"),
)  # fmt: skip
"""Key in the summary, heading, how it is written, and what it means."""


def who_wins(summary: Mapping[str, Any], cast: Cast) -> Html:
    """One bar per drafter and one for nobody; together they make 100%."""
    if not cast.names:
        return section("Who wins", tag("p", "No drafter took part.", class_="faint"))
    rows: list[Bar] = []
    for index, name in enumerate(cast.names):
        numbers = summary["drafters"][name]
        win, sole = numbers.get("win_rate") or 0.0, numbers.get("sole_win_rate") or 0.0
        parts = [Part(0, sole, index), Part(sole, win, index, faint=True)]
        rows.append(Bar(cast.label(name), parts, percent(numbers.get("win_rate"))))
    nobody = summary.get("no_win_rate")
    rows.append(Bar("no drafter", [Part(0, nobody or 0.0)], percent(nobody)))
    note = "Share of steps in which the drafter's proposal was the longest accepted one. Full: alone. Pale: ties, split evenly."
    return section("Who wins", bars(rows, unit="share of the steps", form=".0%", note=note))


def cost_against_gain(summary: Mapping[str, Any], cast: Cast) -> Html:
    """A bar per drafter: tokens per step that it gave; a mark: what plain decoding writes in its drafting time."""
    plain_per_s = summary.get("baseline_tokens_per_s")
    most = max((summary["drafters"][name].get("tokens_per_step") or 0.0 for name in cast.names), default=0.0)
    rows: list[Bar] = []
    for index, name in enumerate(cast.names):
        numbers = summary["drafters"][name]
        gain, cost_ms = numbers.get("tokens_per_step"), numbers.get("draft_ms_per_step")
        if gain is None or cost_ms is None:
            continue
        alone = min(max(numbers.get("marginal") or 0.0, 0.0), gain)
        worth = None if plain_per_s is None else cost_ms / 1000 * plain_per_s
        value = f"{gain:.2f} tokens for {cost_ms:.2f} ms" + ("" if worth is None else f" (worth {worth:.2f})")
        parts = [Part(0, alone, index), Part(alone, gain, index, faint=True)]
        rows.append(Bar(cast.label(name), parts, value, goal=None if worth is None else min(worth, most)))
    if not rows:
        return Html()
    note = "Full: tokens that nobody else had. Pale: its part of those that others had too."
    if plain_per_s is not None:
        note += (
            f" The line is what its drafting time is worth: the tokens that plain decoding, at {plain_per_s:.1f} a second, "
            "writes meanwhile (at the right edge where they are more). A bar that ends before its line costs more than it "
            "gives, even if verifying were free."
        )
    unit = "accepted tokens per step, for ms of drafting per step"
    return section("Cost against gain", bars(rows, unit=unit, note=note, beside=False))


def by_category(summary: Mapping[str, Any], cast: Cast) -> Html:
    """Where the tokens of a forward come from in each category: the target's own and every drafter's part."""
    rows: list[Bar] = []
    cells: list[list[str]] = []
    for name, numbers in (summary.get("by_category") or {}).items():
        length, shares = numbers.get("acceptance_length"), numbers.get("tokens_per_step") or {}
        speedup = numbers.get("speedup")
        cells.append([name, number(numbers.get("num_prompts"), 0), number(length, 2), number(speedup, 2)])
        cells[-1].append(number(numbers.get("tokens_per_s"), 1))
        if length is None:
            continue
        end = length - sum(share or 0.0 for share in shares.values())
        parts = [Part(0, end, letter="target")]
        for index, drafter in enumerate(cast.names):
            begin, end = end, end + (shares.get(drafter) or 0.0)
            parts.append(Part(begin, end, index, cast.letters[index], faint=True))
        value = number(length, 2) + ("" if speedup is None else f" · {speedup:.2f}×")
        rows.append(Bar(tag("bdi", name), parts, value))
    header = ["category", "prompts", "tokens per forward", "speedup", "tokens per second"]
    note = "Grey: the target's own token of each forward. Then what each drafter gave, and beside it the speedup."
    chart = bars(rows, unit="tokens per target forward", note=note)
    grid = tag("details", tag("summary", "In numbers"), table(header, cells, label="Categories")) if cells else None
    return section("Categories", chart, grid)


def drafter_table(summary: Mapping[str, Any], cast: Cast) -> Html:
    rows = [
        [cast.label(name), *(form(summary["drafters"][name].get(key)) for key, _, form, _ in _COLUMNS)]
        for name in cast.names
    ]
    if not rows:
        return Html()
    meanings = [markup(tag("dt", title), tag("dd", meaning)) for _, title, _, meaning in _COLUMNS]
    definitions = tag("details", tag("summary", "What the columns mean"), tag("dl", meanings))
    header = ["drafter", *(title for _, title, _, _ in _COLUMNS)]
    return section("Drafters", table(header, rows, label="Drafters"), definitions)


def acceptance_by_depth(summary: Mapping[str, Any], cast: Cast) -> Html:
    rates = {name: summary["drafters"][name].get("acceptance_by_depth") or [] for name in cast.names}
    deepest = max(map(len, rates.values()), default=0)
    if not deepest:
        return Html()
    rows = [
        [cast.label(name), *(heat(rate, percent(rate)) for rate in [*own, *[None] * (deepest - len(own))])]
        for name, own in rates.items()
    ]
    note = "The chance that a proposal agrees at this depth, once it agreed above and goes that deep."
    header = ["drafter \\ depth", *map(str, range(1, deepest + 1))]
    return section("Acceptance by depth", table(header, rows, label="Acceptance by depth"), note=note)


def heat(share: float | None, text: str) -> Html:
    """A cell's text on a shade that grows with `share`, 0 to 1."""
    level = None if share is None else round(NUM_SHADES * min(max(share, 0.0), 1.0))
    return tag("span", text, class_=f"heat h{level}" if level else "heat")
