"""`replay.md`: one page, ready to paste, from the content of `replay.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specens.analysis.formats import cells, headings, markdown_table, number
from specens.report import subsets as shared
from specens.report.subsets import SPEED, Rows

MOST_SUBSETS = 32
"""Rows of the table of subsets; all are in replay.csv."""


def page_of(content: Mapping[str, Any]) -> str:
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    subject = content["subject"]
    yield (
        f"Replay of {content['live']['run']}: {subject['num_prompts']} prompts, "
        f"{subject['num_tokens']} tokens, members {', '.join(subject['drafters'])}."
    )
    if content.get("status", "finished") != "finished":
        yield (
            f"\n**The run did not finish ({content['status']}); these are the prompts that it "
            "finished.**"
        )
    if subject["num_failed"]:
        yield f"\nPrompts that failed are left out: {subject['num_failed']}."
    yield ""
    yield from _fidelity(content["live"], content["cost"])
    policy, ran, most = subject["policy"], subject["run_policy"], subject["max_nodes"]
    own = f" (the run's own was {ran})" if ran != policy else ""
    yield f"\nSubsets under budget={policy}{own}, at most {most} nodes, by the cost model:\n"
    yield from _subsets(content)
    yield "\nWhat each member saves (95% over prompts; below 0: it costs more than it gains):\n"
    yield from _members(content["members"])
    yield "\nPositions at which both are right at the next token (diagonal: each alone):\n"
    yield from _square(content["overlap"])
    yield "\nThe row's member is right where the column's is wrong:\n"
    yield from _square(content["rescue"])
    yield "\nPolicies, all members drafting:\n"
    columns = (*SPEED, *shared.REGRET)
    rows = [[row["policy"], row["note"], *cells(row, columns)] for row in content["policies"]]
    yield from markdown_table(["policy", "what it does", *headings(columns)], rows, num_left=2)
    yield f"\n{shared.REGRET_NOTE}"
    if content["others"]:
        yield "\nOther runs of these prompts, beside their replay by this trace:\n"
        yield from _others(content["others"])
    if content["modelled"] is not None:
        origin = content["modelled"]["costs"]["origin"]
        yield f"\nMODELLED, not measured: the same subsets under the cost table {origin}\n"
        yield from _subsets(content["modelled"])
        yield ""
        yield from _members(content["modelled"]["members"])


def _fidelity(live: Mapping[str, Any], cost: Mapping[str, Any]) -> Iterator[str]:
    """Is replay the run itself, and does the model know its time?"""
    different, num_steps = live["num_different"], live["num_steps"]
    if different:
        yield (
            f"**REPLAY IS NOT THE RUN: {different} of {num_steps} steps differ**, first "
            f"{live['first_difference']}. Do not trust what follows."
        )
    else:
        yield (
            f"The replay of what ran is the run itself: {num_steps} steps, each with the same "
            "nodes and tokens."
        )
    slope = cost["ms_per_1000_tokens"]
    more = f"{slope:.1f} ms more for every 1000 tokens of context"
    error, held_out = (number(live[key], "+.1%") for key in ("error", "held_out_error"))
    yield (
        f"Cost model: {cost['origin']}; {more if slope else 'context makes no clear difference'}. "
        f"It predicts {live['predicted_s']:.1f} s for this run, which took "
        f"{live['measured_s']:.1f} s ({error}; fitted on half of the prompts, for the other half: "
        f"{held_out})."
    )


def _subsets(compared: Mapping[str, Any]) -> Iterator[str]:
    rows: Rows = compared["subsets"]
    parts = (("draft s", "draft_s", ".2f"), ("verify s", "verify_s", ".2f"))
    times = (*parts, ("CPU overhead s", "host_s", ".2f"))
    heads = ["subset", *headings(SPEED), "nodes a forward", *headings(times)]
    alone = [row for row in rows[MOST_SUBSETS:] if row["num_members"] == 0]
    shown = [
        [
            row["subset"],
            *cells(row, SPEED),
            number(row["num_nodes"] / row["calls"], ".1f"),
            *cells(row, times),
        ]
        for row in (*rows[:MOST_SUBSETS], *alone)
    ]
    yield from markdown_table(heads, shown)
    if len(rows) > len(shown):
        yield f"\nThe fastest {MOST_SUBSETS} of {len(rows)} subsets; all are in replay.csv."
    best, most = rows[0], max(rows, key=lambda row: row["num_members"])
    yield (
        f"\nBest in hindsight: {best['subset']}, {best['speedup']:.2f}x AR decoding; each prompt "
        f"with its own best subset: {compared['best_by_prompt_speedup']:.2f}x; all members "
        f"together: {most['speedup']:.2f}x."
    )


def _members(rows: Rows) -> Iterator[str]:
    shown = [
        [row["member"], *(shared.spread(row, key, form) for _, key, form in shared.CONTRIBUTIONS)]
        for row in rows
    ]
    yield from markdown_table(["member", *headings(shared.CONTRIBUTIONS)], shown)


def _square(shares: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    rows = [
        [name, *(number(share, ".1%") for share in row.values())] for name, row in shares.items()
    ]
    yield from markdown_table(["", *shares], rows)


def _others(rows: Rows) -> Iterator[str]:
    shown: Sequence[list[str]] = [
        [row["run"], row["subset"], *cells(row, shared.OTHERS)] for row in rows
    ]
    yield from markdown_table(["run", "subset", *headings(shared.OTHERS)], shown, num_left=2)
    yield "\nspeedup: over the other run's own baseline, which a busier machine disturbs alike."
    for row in rows:
        if row["num_different"]:
            yield f"\n{row['run']}: {row['first_difference']}"
