"""What the page shows of the drafters: which one wins, what each costs and gives, how deep it is
right, in which category it helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specens.analysis.formats import Columns, cells, headings, number
from specens.analysis.metrics import metrics_of
from specens.report.bars import Bar, Part, bars
from specens.report.markup import Html, folded, markup, section, table, tag
from specens.report.theme import NUM_SHADES, Legend


def win_rates(summary: Mapping[str, Any], legend: Legend) -> Html:
    """One bar per drafter and one for no drafter; together they make 100%."""
    if not legend.names:
        return section("Win rates", tag("p", "No drafter took part.", class_="faint"))
    rows: list[Bar] = []
    for index, name in enumerate(legend.names):
        numbers = summary["drafters"][name]
        win, sole = numbers.get("win_rate") or 0.0, numbers.get("sole_win_rate") or 0.0
        parts = [Part(0, sole, index), Part(sole, win, index, pale=True)]
        rows.append(Bar(legend.label(name), parts, number(numbers.get("win_rate"), ".1%")))
    none = summary.get("no_win_rate")
    rows.append(Bar("no drafter", [Part(0, none or 0.0)], number(none, ".1%")))
    note = (
        "Share of steps in which the drafter's proposal was the longest accepted one. Full: alone. "
        "Pale: ties, split evenly."
    )
    return section("Win rates", bars(rows, unit="share of the steps", form=".0%", note=note))


def cost_against_gain(summary: Mapping[str, Any], legend: Legend) -> Html:
    """A bar per drafter: tokens per step that it gave; a mark: what AR decoding writes in its
    drafting time.
    """
    ar_per_s, drafters = summary.get("baseline_tokens_per_s"), summary.get("drafters") or {}
    gains = [drafters[name].get("tokens_per_step") or 0.0 for name in legend.names]
    rows: list[Bar] = []
    for index, name in enumerate(legend.names):
        numbers = drafters[name]
        gain, cost_ms = numbers.get("tokens_per_step"), numbers.get("draft_ms_per_step")
        if gain is None or cost_ms is None:
            continue
        alone = min(max(numbers.get("marginal") or 0.0, 0.0), gain)
        text, goal = f"{gain:.2f} tokens for {cost_ms:.2f} ms", None
        if ar_per_s is not None:
            price = cost_ms / 1000 * ar_per_s
            text, goal = f"{text} (AR: {price:.2f})", min(price, max(gains))
        parts = [Part(0, alone, index), Part(alone, gain, index, pale=True)]
        rows.append(Bar(legend.label(name), parts, text, goal=goal))
    if not rows:
        return Html()
    note = "Full: tokens that no other drafter had. Pale: its part of those that others had too."
    if ar_per_s is not None:
        note += (
            f" The line is the price of its drafting time: the tokens that AR decoding, at "
            f"{ar_per_s:.1f} a second, writes meanwhile (at the right edge where they are more). A "
            "bar that ends before its line costs more than it gains, even if verifying were free."
        )
    unit = "accepted tokens per step, for ms of drafting per step"
    return section("Cost against gain", bars(rows, unit=unit, note=note, beside=False))


CATEGORY_COLUMNS: Columns = (
    ("prompts", "num_prompts", ",.0f"),
    ("tokens per forward", "acceptance_length", ".2f"),
    ("speedup", "speedup", ".2f"),
    ("tokens per second", "tokens_per_s", ",.1f"),
)


def by_category(summary: Mapping[str, Any], legend: Legend) -> Html:
    """Where the tokens of a forward come from in each category: the target's own and every
    drafter's part.
    """
    rows: list[Bar] = []
    known = (summary.get("by_category") or {}).items()
    for name, numbers in known:
        length, speedup = numbers.get("acceptance_length"), numbers.get("speedup")
        if length is None:
            continue
        shares = numbers.get("tokens_per_step") or {}
        end = length - sum(share or 0.0 for share in shares.values())
        parts = [Part(0, end, letter="target")]
        for index, drafter in enumerate(legend.names):
            begin, end = end, end + (shares.get(drafter) or 0.0)
            parts.append(Part(begin, end, index, legend.letters[index], pale=True))
        value = number(length, ".2f") + ("" if speedup is None else f" · {speedup:.2f}×")
        rows.append(Bar(tag("bdi", name), parts, value))
    note = (
        "Grey: the target's own token of each forward. Then what each drafter gave, and beside it "
        "the speedup."
    )
    chart = bars(rows, unit="tokens per target forward", note=note)
    shown = [[name, *cells(numbers, CATEGORY_COLUMNS)] for name, numbers in known]
    grid = table(["category", *headings(CATEGORY_COLUMNS)], shown, label="Categories")
    return section("Categories", chart, folded("In numbers", grid) if shown else None)


def drafter_table(summary: Mapping[str, Any], legend: Legend, metrics: Sequence[Any] = ()) -> Html:
    """A column for each of the metrics that are shown on the page, `metrics` too."""
    if not legend.names:
        return Html()
    shown = metrics_of("drafter", "page", metrics)
    rows = []
    for name in legend.names:
        numbers = summary["drafters"][name]
        values = [number(numbers.get(metric.key), metric.form) for metric in shown]
        rows.append([legend.label(name), *values])
    meanings = [markup(tag("dt", m.title), tag("dd", m.meaning)) for m in shown]
    header = ["drafter", *(metric.title for metric in shown)]
    definitions = folded("What the columns mean", tag("dl", meanings))
    return section("Drafters", table(header, rows, label="Drafters"), definitions)


def acceptance_by_depth(summary: Mapping[str, Any], legend: Legend) -> Html:
    known = {name: summary["drafters"][name].get("acceptance_by_depth") for name in legend.names}
    rates = {name: own or [] for name, own in known.items()}
    deepest = max(map(len, rates.values()), default=0)
    if not deepest:
        return Html()
    rows = [
        [legend.label(name), *map(heat, [*own, *[None] * (deepest - len(own))])]
        for name, own in rates.items()
    ]
    note = (
        "The chance that a proposal agrees at this depth, once it agreed above and goes that deep."
    )
    header = ["drafter \\ depth", *map(str, range(1, deepest + 1))]
    label = "Acceptance by depth"
    return section(label, table(header, rows, label=label), note=note)


def heat(share: float | None) -> Html:
    """A share, 0 to 1, in percent, on a shade that grows with it."""
    level = None if share is None else round(NUM_SHADES * min(max(share, 0.0), 1.0))
    return tag("span", number(share, ".1%"), class_=f"heat h{level}" if level else "heat")
