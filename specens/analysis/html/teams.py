"""What a replay found: every team of drafters on the same texts, what each member is worth, who is right together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specens.analysis.html.colours import Cast
from specens.analysis.html.drafters import heat
from specens.analysis.html.figures import Bar, Part, bars, meter
from specens.analysis.html.markup import Html, interval, markup, number, percent, section, table, tag

NUM_BEST = 10
"""Teams that are shown without unfolding."""

Rows = Sequence[Mapping[str, Any]]

_VALUES = (("calls", "target forwards saved", 0), ("s", "seconds saved", 2))
_VALUES_NOTE = (
    "Bars: the Shapley value, a member's mean saving over all orders in which a team could be put together, with its 95% "
    "interval over prompts. Lines across: what all together would lose without it. Below 0 it costs more than it gives."
)


def teams(replay: Mapping[str, Any], cast: Cast) -> Html:
    """All that the page shows of `replay.json`; what it lacks is left out."""
    subject, modelled = replay.get("subject") or {}, replay.get("modelled") or {}
    parts = [
        _fidelity(replay.get("live") or {}),
        _team_table(replay.get("teams") or [], cast),
        _by_prompt(replay.get("best_by_prompt_speedup")),
        _member_values(replay.get("members") or [], cast),
        _policies(replay.get("policies") or []),
        _matrix(
            "Right together", replay.get("overlap") or {}, cast, "Positions at which both have the next token right."
        ),
        _matrix(
            "Right where another was wrong",
            replay.get("rescue") or {},
            cast,
            "The row's, where the column's was wrong.",
        ),
        _others(replay.get("others") or []),
        _modelled(modelled, cast),
    ]
    note = (
        "Replayed from the proposals recorded at every position: drafts never change the text, so this is what each team "
        "would have done. Times are by the run's measured costs."
    )
    if "policy" in subject:
        note += f" Under budget={subject['policy']}, at most {subject.get('max_nodes')} nodes."
    if subject.get("run_policy") not in (None, subject.get("policy")):
        note += f" (The run itself had budget={subject['run_policy']}, for which see Policies.)"
    if subject.get("num_failed"):
        note += f" Failed prompts are left out: {subject['num_failed']}."
    return section("Teams", *parts, note=note)


def _fidelity(live: Mapping[str, Any]) -> Html:
    """Whether the replay of what ran is the run, and how well the cost model knows its time."""
    parts: list[Html] = []
    if live.get("num_different"):
        said = f"The replay is not the run: {live['num_different']} of {live.get('num_steps')} steps differ. Do not trust it."
        parts.append(tag("p", said, class_="banner"))
    elif "num_different" in live:
        parts.append(
            tag("p", f"The replay of what ran is the run itself, in all of its {live.get('num_steps')} steps.")
        )
    predicted, measured, error, held_out = (
        live.get(key) for key in ("predicted_s", "measured_s", "error", "held_out_error")
    )
    if predicted is not None and measured is not None and error is not None:
        said = f"For this run the cost model says {predicted:.1f} s; it took {measured:.1f} s ({100 * error:+.1f}%)."
        if held_out is not None:
            said += f" Fitted on half of the prompts, it errs by {100 * held_out:+.1f}% on the other half."
        parts.append(tag("p", said))
    return markup(*parts)


def _team_table(rows: Rows, cast: Cast) -> Html:
    """The best teams by speed, everybody and nobody; all of them behind a line to unfold."""
    if not rows:
        return Html()
    ranked = sorted(rows, key=lambda row: row.get("tokens_per_s") or 0.0, reverse=True)
    ranks = list(enumerate(ranked, start=1))
    largest = max(row.get("num_members") or 0 for row in rows)
    ends = [(rank, row) for rank, row in ranks[NUM_BEST:] if row.get("num_members") in (0, largest)]
    best = _teams_of([*ranks[:NUM_BEST], *ends], cast, "The best teams")
    if len(ranked) <= NUM_BEST + len(ends):
        return best
    return markup(best, tag("details", tag("summary", f"All {len(ranked)} teams"), _teams_of(ranks, cast, "All teams")))


def _by_prompt(speedup: float | None) -> Html:
    return (
        Html() if speedup is None else tag("p", f"Each prompt with its own best team: {speedup:.2f}× plain decoding.")
    )


def _teams_of(ranks: Sequence[tuple[int, Mapping[str, Any]]], cast: Cast, label: str) -> Html:
    most = max(row.get("tokens_per_s") or 0.0 for _, row in ranks)
    columns = (("speedup", 2), ("acceptance_length", 2), ("calls", 0), ("num_nodes", 0), ("seconds", 1))
    header = ["team", "tokens per second", "speedup", "tokens per forward", "forwards", "nodes", "seconds"]
    cells: list[list[str]] = []
    for rank, row in ranks:
        rate = row.get("tokens_per_s")
        team = markup(tag("span", f"{rank}.", class_="rank"), _members_of(row, cast))
        speed = markup(meter(rate or 0.0, most), tag("span", number(rate, 1), class_="figure"))
        cells.append([team, speed, *(number(row.get(key), digits) for key, digits in columns)])
    return table(header, cells, label=label)


def _members_of(row: Mapping[str, Any], cast: Cast) -> Html:
    """A team as the marks of its members. Every drafter has its place, so that the marks stand in columns."""
    inside = str(row["team"]).split("+") if row.get("num_members") else []
    if not set(inside) <= set(cast.names):
        return tag("bdi", str(row["team"]))
    marks = [cast.mark(name) if name in inside else tag("span", "·", class_="mark") for name in cast.names]
    return markup(marks, tag("span", " ", "+".join(inside), class_="faint spelled") if inside else " plain decoding")


def _member_values(rows: Rows, cast: Cast) -> Html:
    """What each member saves, in target forwards and in seconds."""
    charts = []
    for key, unit, digits in _VALUES:
        shown = [_value_bar(row, key, digits, cast) for row in rows if row.get(f"shapley_{key}") is not None]
        charts.append(bars(shown, unit=unit, beside=False))
    pair = markup(*charts)
    if not pair:
        return Html()
    columns = [(f"{kind}_{key}", digits) for key, _, digits in _VALUES for kind in ("shapley", "leave_one_out")]
    header = ["member", "forwards: Shapley", "forwards: without it", "seconds: Shapley", "seconds: without it"]
    cells = [[cast.label(str(row["member"])), *(_spread(row, *column) for column in columns)] for row in rows]
    return markup(
        tag("h3", "What each member is worth"),
        tag("p", _VALUES_NOTE, class_="faint"),
        tag("div", pair, class_="pair"),
        tag("details", tag("summary", "In numbers"), table(header, cells, label="What each member is worth")),
    )


def _value_bar(row: Mapping[str, Any], key: str, digits: int, cast: Cast) -> Bar:
    name, value, last = str(row["member"]), row[f"shapley_{key}"], row.get(f"leave_one_out_{key}")
    low, high = row.get(f"shapley_{key}_low"), row.get(f"shapley_{key}_high")
    part = Part(0, value, cast.names.index(name) if name in cast.names else None, faint=True)
    text = f"{_spread(row, f'shapley_{key}', digits)}; without it {number(last, digits)}"
    return Bar(cast.label(name), [part], text, goal=last, span=None if low is None or high is None else (low, high))


def _spread(row: Mapping[str, Any], key: str, digits: int) -> str:
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    return number(row.get(key), digits) + interval(None if low is None or high is None else (low, high), digits)


def _policies(rows: Rows) -> Html:
    cells = [
        [
            str(row["policy"]),
            str(row.get("note") or ""),
            number(row.get("tokens_per_s"), 1),
            number(row.get("speedup"), 2),
            number(row.get("acceptance_length"), 2),
            number(row.get("calls"), 0),
            percent(row.get("regret")),
            percent(row.get("regret_by_prompt")),
        ]
        for row in rows
    ]
    header = [
        "policy",
        "what it does",
        "tokens per second",
        "speedup",
        "tokens per forward",
        "forwards",
        "regret",
        "by prompt",
    ]
    note = (
        "All members are at hand. Regret: the time beyond that of the one team of budget=fixed that is best in hindsight, and "
        "beyond that of each prompt's own best; below 0, it was saved."
    )
    grid = table(header, cells, label="Policies", num_words=2)
    return markup(tag("h3", "Policies"), tag("p", note, class_="faint"), grid) if grid else Html()


def _matrix(title: str, values: Mapping[str, Mapping[str, float | None]], cast: Cast, note: str) -> Html:
    names = list(values)
    rows = [
        [cast.label(name), *(heat(values[name].get(other), percent(values[name].get(other))) for other in names)]
        for name in names
    ]
    grid = table(["", *names], rows, label=title)
    return markup(tag("h3", title), tag("p", note, class_="faint"), grid) if grid else Html()


def _others(rows: Rows) -> Html:
    """Runs that really had another team, beside what the replay says of them."""
    cells = [
        [
            str(row["run"]),
            str(row.get("team")),
            *(number(row.get(name), 0) for name in ("num_prompts", "num_steps", "num_different")),
            *(number(row.get(name), 1) for name in ("measured_s", "predicted_s")),
            percent(row.get("error")),
            *(number(row.get(name), 2) for name in ("measured_speedup", "predicted_speedup")),
        ]
        for row in rows
    ]
    header = [
        "run",
        "team",
        "prompts",
        "steps",
        "that differ",
        "seconds",
        "predicted",
        "error",
        "speedup",
        "predicted speedup",
    ]
    grid = table(header, cells, label="Other runs", num_words=2)
    note = "Live runs of these prompts by some of the members, beside what the replay of this trace says of them."
    return markup(tag("h3", "Other runs"), tag("p", note, class_="faint"), grid) if grid else Html()


def _modelled(content: Mapping[str, Any], cast: Cast) -> Html:
    """The same teams by another machine's cost table."""
    grid = _team_table(content.get("teams") or [], cast)
    if not grid:
        return Html()
    origin = (content.get("costs") or {}).get("origin")
    title = f"Modelled, not measured: by the cost table {origin}"
    return markup(tag("h3", title), grid, _member_values(content.get("members") or [], cast))
