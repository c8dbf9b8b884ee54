"""What a replay found: every subset of the drafters on the same texts, what each member
contributes, which members are right together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specens.analysis.formats import Columns, cells, headings, interval, number
from specens.report.bars import Bar, Part, bars, meter
from specens.report.drafters import heat
from specens.report.markup import Html, faint, folded, markup, section, table, tag
from specens.report.theme import Legend

NUM_BEST = 10
"""Subsets that are shown without unfolding."""

Rows = Sequence[Mapping[str, Any]]

SPEED: Columns = (
    ("tokens per second", "tokens_per_s", ",.1f"),
    ("speedup", "speedup", ".2f"),
    ("tokens per forward", "acceptance_length", ".2f"),
    ("forwards", "calls", ",.0f"),
)
REGRET: Columns = (("regret", "regret", "+.1%"), ("by prompt", "regret_by_prompt", "+.1%"))
CONTRIBUTIONS: Columns = (
    ("forwards: Shapley", "shapley_calls", ".0f"),
    ("forwards: without it", "leave_one_out_calls", ".0f"),
    ("seconds: Shapley", "shapley_s", ".2f"),
    ("seconds: without it", "leave_one_out_s", ".2f"),
)
OTHERS: Columns = (
    ("prompts", "num_prompts", ",.0f"),
    ("steps", "num_steps", ",.0f"),
    ("that differ", "num_different", ",.0f"),
    ("seconds", "measured_s", ",.1f"),
    ("predicted", "predicted_s", ",.1f"),
    ("error", "error", "+.1%"),
    ("speedup", "measured_speedup", ".2f"),
    ("predicted speedup", "predicted_speedup", ".2f"),
)
"""Of tables that replay.md has too."""

REGRET_NOTE = (
    "Regret: the time beyond that of the one subset under budget=fixed that is best in hindsight, "
    "and beyond that of each prompt's own best; below 0, it was saved."
)


def spread(row: Mapping[str, Any], key: str, form: str) -> str:
    """A contribution with its interval."""
    bounds = (row.get(f"{key}_low"), row.get(f"{key}_high"))
    return number(row.get(key), form) + interval(bounds, form)


def subsets(replay: Mapping[str, Any], legend: Legend) -> Html:
    """All that the page shows of `replay.json`; what it lacks is left out."""
    subject, modelled = replay.get("subject") or {}, replay.get("modelled") or {}
    best = replay.get("best_by_prompt_speedup")
    by_prompt = f"Each prompt with its own best subset: {best:.2f}× AR decoding." if best else ""
    overlap_note = "Positions at which both have the next token right."
    parts = [
        _fidelity(replay.get("live") or {}),
        _subset_table(replay, legend),
        tag("p", by_prompt) if by_prompt else None,
        _contributions(replay.get("members") or [], legend),
        _policies(replay.get("policies") or []),
        _matrix("Right together", replay.get("overlap") or {}, legend, overlap_note),
        _matrix(
            "Right where another was wrong",
            replay.get("rescue") or {},
            legend,
            "The row's, where the column's was wrong.",
        ),
        _others(replay.get("others") or []),
        _modelled(modelled, legend),
    ]
    note = (
        "Replayed from the proposals recorded at every position: drafts never change the text, so "
        "this is what each subset would have done. Times are by the run's measured costs."
    )
    if "policy" in subject:
        note += f" Under budget={subject['policy']}, at most {subject.get('max_nodes')} nodes."
    if subject.get("run_policy") not in (None, subject.get("policy")):
        note += f" (The run itself had budget={subject['run_policy']}, for which see Policies.)"
    if subject.get("num_failed"):
        note += f" Failed prompts are left out: {subject['num_failed']}."
    return section("Subsets", *parts, note=note)


def _fidelity(live: Mapping[str, Any]) -> Html:
    """Whether the replay of what ran is the run, and how well the cost model knows its time."""
    lines: list[Html] = []
    different, num_steps = live.get("num_different"), live.get("num_steps")
    if different:
        fault = f"The replay is not the run: {different} of {num_steps} steps differ."
        lines.append(tag("p", f"{fault} Do not trust it.", class_="banner"))
    elif different is not None:
        same = f"The replay of what ran is the run itself, in all of its {num_steps} steps."
        lines.append(tag("p", same))
    keys = ("predicted_s", "measured_s", "error", "held_out_error")
    predicted, measured, error, held_out = (live.get(key) for key in keys)
    if predicted is not None and measured is not None and error is not None:
        line = f"The cost model predicts {predicted:.1f} s for this run"
        line += f"; it took {measured:.1f} s ({number(error, '+.1%')})."
        if held_out is not None:
            errs = number(held_out, "+.1%")
            line += f" Fitted on half of the prompts, it errs by {errs} on the other half."
        lines.append(tag("p", line))
    return markup(*lines)


def _subset_table(content: Mapping[str, Any], legend: Legend) -> Html:
    """The best subsets by speed, that of all members and that of none; all of them behind a line to
    unfold. Version 1 of replay.json calls them teams.
    """
    rows: Rows = content.get("subsets") or content.get("teams") or []
    if not rows:
        return Html()
    ranked = sorted(rows, key=lambda row: row.get("tokens_per_s") or 0.0, reverse=True)
    ranks = list(enumerate(ranked, start=1))
    largest = max(row.get("num_members") or 0 for row in rows)
    ends = [entry for entry in ranks[NUM_BEST:] if entry[1].get("num_members") in (0, largest)]
    best = _ranked([*ranks[:NUM_BEST], *ends], legend, "The best subsets")
    if len(ranked) <= NUM_BEST + len(ends):
        return best
    every = _ranked(ranks, legend, "All subsets")
    return markup(best, folded(f"All {len(ranked)} subsets", every))


def _ranked(ranks: Sequence[tuple[int, Mapping[str, Any]]], legend: Legend, label: str) -> Html:
    most = max(row.get("tokens_per_s") or 0.0 for _, row in ranks)
    columns = (*SPEED, ("nodes", "num_nodes", ",.0f"), ("seconds", "seconds", ",.1f"))
    shown: list[list[str]] = []
    for rank, row in ranks:
        subset = markup(tag("span", f"{rank}.", class_="rank"), _members_of(row, legend))
        rate, *others = cells(row, columns)
        bar = meter(row.get("tokens_per_s") or 0.0, most)
        shown.append([subset, markup(bar, tag("span", rate, class_="figure")), *others])
    return table(["subset", *headings(columns)], shown, label=label)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["subset"] if "subset" in row else row["team"])


def _members_of(row: Mapping[str, Any], legend: Legend) -> Html:
    """A subset as the marks of its members. Every drafter has its place, so that the marks stand in
    columns.
    """
    inside = _name(row).split("+") if row.get("num_members") else []
    if not set(inside) <= set(legend.names):
        return tag("bdi", _name(row))
    absent = tag("span", "·", class_="mark")
    marks = [legend.mark(name) if name in inside else absent for name in legend.names]
    spelled = tag("span", " ", "+".join(inside), class_="faint spelled")
    return markup(marks, spelled if inside else " AR decoding")


def _contributions(rows: Rows, legend: Legend) -> Html:
    """What each member saves, in target forwards and in seconds."""
    charts = []
    for key, unit, form in (
        ("calls", "target forwards saved", ".0f"),
        ("s", "seconds saved", ".2f"),
    ):
        known = [row for row in rows if row.get(f"shapley_{key}") is not None]
        shown = [_contribution(row, key, form, legend) for row in known]
        charts.append(bars(shown, unit=unit, beside=False))
    pair = markup(*charts)
    if not pair:
        return Html()
    title = "What each member contributes"
    note = (
        "Bars: the Shapley value, a member's mean saving over all orders in which the members "
        "could be put together, with its 95% interval over prompts. Lines across: what all "
        "together would lose without it. Below 0 it costs more than it gains."
    )
    numbers = [
        [
            legend.label(str(row["member"])),
            *(spread(row, key, form) for _, key, form in CONTRIBUTIONS),
        ]
        for row in rows
    ]
    grid = table(["member", *headings(CONTRIBUTIONS)], numbers, label=title)
    bars_of_both, folded_grid = tag("div", pair, class_="pair"), folded("In numbers", grid)
    return markup(tag("h3", title), faint(note), bars_of_both, folded_grid)


def _contribution(row: Mapping[str, Any], key: str, form: str, legend: Legend) -> Bar:
    name, value = str(row["member"]), row[f"shapley_{key}"]
    last, low, high = (
        row.get(name)
        for name in (f"leave_one_out_{key}", f"shapley_{key}_low", f"shapley_{key}_high")
    )
    place = legend.names.index(name) if name in legend.names else None
    text = f"{spread(row, f'shapley_{key}', form)}; without it {number(last, form)}"
    span = None if low is None or high is None else (low, high)
    return Bar(legend.label(name), [Part(0, value, place, pale=True)], text, goal=last, span=span)


def _policies(rows: Rows) -> Html:
    columns = (*SPEED, *REGRET)
    shown = [[str(row["policy"]), str(row.get("note") or ""), *cells(row, columns)] for row in rows]
    header = ["policy", "what it does", *headings(columns)]
    note = f"All members take part. {REGRET_NOTE}"
    return _titled("Policies", note, table(header, shown, label="Policies", num_left=2))


def _matrix(
    title: str, values: Mapping[str, Mapping[str, float | None]], legend: Legend, note: str
) -> Html:
    names = list(values)
    rows = [
        [legend.label(one), *(heat(values[one].get(other)) for other in names)] for one in names
    ]
    return _titled(title, note, table(["", *names], rows, label=title))


def _others(rows: Rows) -> Html:
    """Runs that really had another subset, beside their replay."""
    shown = [[str(row["run"]), _name(row), *cells(row, OTHERS)] for row in rows]
    header = ["run", "subset", *headings(OTHERS)]
    note = "Live runs of these prompts by some of the members, beside their replay by this trace."
    return _titled("Other runs", note, table(header, shown, label="Other runs", num_left=2))


def _modelled(content: Mapping[str, Any], legend: Legend) -> Html:
    """The same subsets by another machine's cost table."""
    origin = (content.get("costs") or {}).get("origin")
    grid = _subset_table(content, legend)
    values = _contributions(content.get("members") or [], legend)
    title = f"Modelled, not measured: by the cost table {origin}"
    return markup(tag("h3", title), grid, values) if grid else Html()


def _titled(title: str, note: str, grid: Html) -> Html:
    return markup(tag("h3", title), faint(note), grid) if grid else Html()
