"""`replay.md`: one page, ready to paste, from the content of `replay.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_TEAMS = 32
"""Rows of the table of teams; all are in replay.csv."""

Rows = Sequence[Mapping[str, Any]]


def page_of(content: Mapping[str, Any]) -> str:
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    subject = content["subject"]
    yield (
        f"Replay of {content['live']['run']}: {subject['num_prompts']} prompts, {subject['num_tokens']} tokens, members "
        f"{', '.join(subject['drafters'])}."
    )
    if content.get("status", "finished") != "finished":
        yield f"\n**The run did not finish ({content['status']}); these are the prompts that it finished.**"
    if subject["num_failed"]:
        yield f"\nPrompts that failed are left out: {subject['num_failed']}."
    yield ""
    yield from _live(content)
    own = f" (the run's own was {subject['run_policy']})" if subject["run_policy"] != subject["policy"] else ""
    yield f"\nTeams under budget={subject['policy']}{own}, at most {subject['max_nodes']} nodes, by the cost model:\n"
    yield from _teams(content)
    yield "\nWhat each member saves (95% over prompts; below 0: it costs more than it gives):\n"
    yield from _members(content["members"])
    yield "\nBoth right at the next token, percent of the positions (diagonal: each alone):\n"
    yield from _square(content["overlap"])
    yield "\nThe row's member is right where the column's is wrong, percent:\n"
    yield from _square(content["rescue"])
    yield "\nPolicies, all members drafting:\n"
    yield from _policies(content["policies"])
    if content["others"]:
        yield "\nOther runs of these prompts, beside what the replay of this trace says of them:\n"
        yield from _others(content["others"])
    if content["modelled"] is not None:
        origin = content["modelled"]["costs"]["origin"]
        yield f"\nMODELLED, not measured: the same teams under the cost table {origin}\n"
        yield from _teams(content["modelled"])
        yield ""
        yield from _members(content["modelled"]["members"])


def _live(content: Mapping[str, Any]) -> Iterator[str]:
    """Is replay the run itself, and does the model know its time?"""
    live, cost = content["live"], content["cost"]
    if live["num_different"]:
        yield (
            f"**REPLAY IS NOT THE RUN: {live['num_different']} of {live['num_steps']} steps differ**, first "
            f"{live['first_difference']}. Do not trust what follows."
        )
    else:
        yield f"The replay of what ran is the run itself: {live['num_steps']} steps, each with the same nodes and tokens."
    slope = f"{cost['ms_per_1000_tokens']:.1f} ms more for every 1000 tokens of context"
    yield (
        f"Cost model: {cost['origin']}; {slope if cost['ms_per_1000_tokens'] else 'context makes no clear difference'}. It says "
        f"{live['predicted_s']:.1f} s for this run, which took {live['measured_s']:.1f} s ({_percent(live['error'])}; "
        f"fitted on half of the prompts, for the other half: {_percent(live['held_out_error'])})."
    )


def _teams(compared: Mapping[str, Any]) -> Iterator[str]:
    rows: Rows = compared["teams"]
    heads = ["team", "tok/s", "x plain", "tokens a call", "calls", "nodes a call", "draft s", "verify s", "host s"]
    plain = [row for row in rows[MOST_TEAMS:] if row["num_members"] == 0]
    yield from _table(heads, [_team(row) for row in (*rows[:MOST_TEAMS], *plain)])
    if len(rows) > MOST_TEAMS + len(plain):
        yield f"\nThe fastest {MOST_TEAMS} of {len(rows)} teams; all are in replay.csv."
    best, most = rows[0], max(rows, key=lambda row: row["num_members"])
    yield (
        f"\nBest in hindsight: {best['team']}, {best['speedup']:.2f}x plain decoding; each prompt with its own best team: "
        f"{compared['best_by_prompt_speedup']:.2f}x; all members together: {most['speedup']:.2f}x."
    )


def _team(row: Mapping[str, Any]) -> list[str]:
    return [
        row["team"],
        _number(row["tokens_per_s"], ".1f"),
        _number(row["speedup"], ".2f"),
        _number(row["acceptance_length"], ".2f"),
        str(row["calls"]),
        _number(row["num_nodes"] / row["calls"], ".1f"),
        *(_number(row[name], ".2f") for name in ("draft_s", "verify_s", "host_s")),
    ]


def _members(rows: Rows) -> Iterator[str]:
    kinds = [("leave_one_out_calls", ".0f"), ("shapley_calls", ".0f"), ("leave_one_out_s", ".2f"), ("shapley_s", ".2f")]
    heads = ["member", "calls: without it", "calls: Shapley", "seconds: without it", "seconds: Shapley"]
    yield from _table(heads, [[row["member"], *(_interval(row, *kind) for kind in kinds)] for row in rows])


def _interval(row: Mapping[str, Any], key: str, form: str) -> str:
    low, high = (_number(row[f"{key}_{end}"], form) for end in ("low", "high"))
    return _number(row[key], form) + (f" ({low} to {high})" if low != "-" else "")


def _square(shares: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    rows = [
        [name, *(_number(None if share is None else 100 * share, ".1f") for share in row.values())]
        for name, row in shares.items()
    ]
    yield from _table(["", *shares], rows)


def _policies(rows: Rows) -> Iterator[str]:
    heads = ["policy", "what it is", "tok/s", "x plain", "tokens a call", "calls", "regret", "to each prompt's best"]
    cells = [
        [
            row["policy"],
            row["note"],
            _number(row["tokens_per_s"], ".1f"),
            _number(row["speedup"], ".2f"),
            _number(row["acceptance_length"], ".2f"),
            str(row["calls"]),
            _percent(row["regret"]),
            _percent(row["regret_by_prompt"]),
        ]
        for row in rows
    ]
    yield from _table(heads, cells, num_left=2)
    yield "\nRegret: time beyond that of the one best team of budget=fixed, and of each prompt's own best team."


def _others(rows: Rows) -> Iterator[str]:
    heads = [
        "run",
        "team",
        "prompts",
        "steps",
        "different",
        "seconds",
        "predicted s",
        "error",
        "x plain",
        "predicted x",
    ]
    cells = [
        [
            row["run"],
            row["team"],
            *(str(row[name]) for name in ("num_prompts", "num_steps", "num_different")),
            *(_number(row[name], ".2f") for name in ("measured_s", "predicted_s")),
            _percent(row["error"]),
            *(_number(row[name], ".2f") for name in ("measured_speedup", "predicted_speedup")),
        ]
        for row in rows
    ]
    yield from _table(heads, cells, num_left=2)
    yield "\nx plain: against the other run's own baseline, which a busier or idler machine meets alike."
    for row in rows:
        if row["num_different"]:
            yield f"\n{row['run']}: {row['first_difference']}"


def _percent(share: float | None) -> str:
    return _number(share, "+.1%")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> Iterator[str]:
    """A table in columns that a terminal shows as such: the first `num_left` to the left, the others to the right."""
    widths = [max(4, *map(len, column)) for column in zip(heads, *rows, strict=True)]
    rules = ["-" * width if place < num_left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    for row in (heads, rules, *rows):
        padded = [
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(padded)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form.replace(".", "z.", 1))  # no -0
