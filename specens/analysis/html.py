"""`report.html`: one run as a page that needs nothing else: texts coloured by the winning drafter, win rates, costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

PALETTE = ("0072b2", "e69f00", "009e73", "d55e00", "56b4e9", "cc79a7", "f0e442", "8c564b")
"""Colours of the drafters, in member order: Okabe and Ito's set, which colour-blind readers can tell apart, and a brown.
A ninth drafter gets the first again; the names beside the bars and in the hover text still tell the two apart."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #667; --line: #d8dce2; --soft: #f3f5f8;
  --alarm: #b42318 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #14171b; --faint: #9aa4b0; --line: #343a42; --soft: #1d2127; --alarm: #ff9b8e } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { margin: .4rem 0 } .faint { color: var(--faint) } .alarm { color: var(--alarm); font-weight: 600 }
.banner { border: 2px solid var(--alarm); border-radius: .4rem; padding: .5rem .8rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem }
.card { background: var(--soft); border-radius: .4rem; padding: .6rem .8rem }
.card b { display: block; font-size: 1.5rem; line-height: 1.3 } .card span { color: var(--faint); font-size: .85rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
th { font-weight: 600; vertical-align: bottom } td { white-space: nowrap } td:first-child, th:first-child { text-align: left }
.bars { display: grid; grid-template-columns: fit-content(40%) 1fr 4rem; gap: .3rem .7rem; align-items: center }
.bars > span { overflow-wrap: anywhere } .track { background: var(--soft); border-radius: .2rem }
.bar { height: 1.1rem; border-radius: .2rem; min-width: 1px } .nobody { background: var(--faint) }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .4rem 0 .6rem }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer; overflow-wrap: anywhere }
pre, .text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; font: 14px/1.7 ui-monospace, monospace }
.many { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px }
"""


def report(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    summary: Mapping[str, Any],
    *,
    title: str,
    pieces: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The page for one run: its tables and its summary (`metrics.summarise`, plus `lossy` and `environment` where known).

    `pieces[prompt_id]` is the output's text cut into one piece per token of `output_ids`. A prompt without pieces, or
    with another number of them, shows its whole text uncoloured.
    """
    names = list(summary.get("drafters") or {})
    body = [
        f"<h1>{escape(title)}</h1>",
        _notices(summary),
        _cards(summary),
        "<h2>Who wins</h2>",
        _win_bars(summary, names),
        "<h2>Drafters</h2>",
        _drafter_table(summary, names),
        _depth_table(summary, names),
        _category_table(summary),
        _failures(prompts),
        "<h2>Texts</h2>",
        _legend(names),
        *_texts(prompts, steps, drafts, names, pieces or {}),
        _environment(summary),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_drafter_styles(len(names))}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _drafter_styles(num_drafters: int) -> str:
    """Classes `c<i>`, the full colour for bars, and `t<i>`, a tint of it behind text in either colour scheme."""
    colours = [PALETTE[index % len(PALETTE)] for index in range(num_drafters)]
    return "".join(
        f".c{index} {{ background: #{colour} }} .t{index} {{ background: #{colour}55 }}\n"
        for index, colour in enumerate(colours)
    )


def _notices(summary: Mapping[str, Any]) -> str:
    """What a reader must not miss: a lossy verifier, outputs that differ from the baseline's, an unfinished run."""
    notices: list[str] = []
    if summary.get("lossy"):
        notices.append(
            f"This run used a lossy verifier ({summary.get('verifier')}): its texts need not be what the target alone "
            "would have written."
        )
    num_done = (summary.get("num_prompts") or 0) - (summary.get("num_failed") or 0)
    identical = summary.get("num_identical")
    if identical is not None and identical < num_done:
        notices.append(f"{num_done - identical} of {num_done} outputs differ from the baseline's.")
    return "".join(f'<p class="banner">{escape(notice)}</p>' for notice in notices)


def _cards(summary: Mapping[str, Any]) -> str:
    speedup = summary.get("speedup")
    verdict = "no baseline in this run"
    if speedup is not None:
        width = summary.get("exact_width")
        verdict = "the speed of plain decoding" + (f" at exact_width={width} too" if width is not None else "")
        verdict += ", a slowdown" if speedup < 1 else ""
    length_label = "tokens per target forward" + _interval(summary, "acceptance_length_interval")
    cards = [
        (_number(speedup, 2) + ("×" if speedup is not None else ""), verdict + _interval(summary, "speedup_interval")),
        (_number(summary.get("acceptance_length"), 2), length_label),
        (_number(summary.get("tokens_per_s"), 1), _baseline_note(summary)),
        (_percent(summary.get("no_win_rate")), "of the steps won by no drafter"),
        (_identical_note(summary), "outputs identical to the baseline's"),
        (_percent(summary.get("host_fraction")), _time_note(summary)),
    ]
    cells = [f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in cards]
    if speedup is not None and speedup < 1:
        cells[0] = cells[0].replace("<b>", '<b class="alarm">')
    counts = (
        f"{_number(summary.get('num_prompts'), 0)} prompts, {_number(summary.get('num_failed'), 0)} failed; "
        f"{_number(summary.get('num_emitted'), 0)} tokens in {_number(summary.get('num_steps'), 0)} steps; "
        f"{_number(summary.get('wasted_nodes_per_token'), 2)} verified nodes wasted per token"
    )
    return f'<div class="cards">{"".join(cells)}</div><p class="faint">{escape(counts)}</p>'


def _interval(summary: Mapping[str, Any], key: str) -> str:
    interval = summary.get(key)
    return f" (95%: {_number(interval[0], 2)} to {_number(interval[1], 2)})" if interval else ""


def _baseline_note(summary: Mapping[str, Any]) -> str:
    baseline = summary.get("baseline_tokens_per_s")
    return "tokens per second" + (f"; plain decoding {_number(baseline, 1)}" if baseline is not None else "")


def _identical_note(summary: Mapping[str, Any]) -> str:
    num_done = (summary.get("num_prompts") or 0) - (summary.get("num_failed") or 0)
    identical = summary.get("num_identical")
    return "not compared" if identical is None else f"{identical} of {num_done}"


def _time_note(summary: Mapping[str, Any]) -> str:
    parts = [f"{part} {_number(summary.get(f'{part}_ms_per_step'), 1)}" for part in ("draft", "verify", "host")]
    return f"of the time on the host; ms per step: {', '.join(parts)}"


def _win_bars(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    """One bar per drafter and one for nobody; together they make 100%."""
    if not names:
        return '<p class="faint">No drafter took part.</p>'
    entries = [(name, summary["drafters"][name].get("win_rate"), f"c{index}") for index, name in enumerate(names)]
    entries.append(("no drafter", summary.get("no_win_rate"), "nobody"))
    rows = [
        f'<span>{escape(name)}</span><div class="track">'
        f'<div class="bar {colour}" style="width:{100 * (rate or 0):.1f}%"></div></div><span>{_percent(rate)}</span>'
        for name, rate, colour in entries
    ]
    note = "Share of steps in which the drafter's proposal was the longest accepted one; ties are split evenly."
    return f'<div class="bars">{"".join(rows)}</div><p class="faint">{escape(note)}</p>'


def _drafter_table(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    header = [
        "drafter",
        "win rate",
        "alone",
        "token share",
        "marginal",
        "acceptance rate",
        "solo length",
        "ms per step",
    ]
    header += ["tokens per draft second", "silent", "wasted nodes"]
    rows: list[list[str]] = []
    for name in names:
        numbers = summary["drafters"][name]
        rows.append(
            [
                name,
                *(_percent(numbers.get(key)) for key in ("win_rate", "sole_win_rate", "token_share")),
                _number(numbers.get("marginal"), 2),
                _percent(numbers.get("acceptance_rate")),
                _number(numbers.get("solo_acceptance_length"), 2),
                _number(numbers.get("draft_ms_per_step"), 2),
                _number(numbers.get("tokens_per_draft_s"), 1),
                _percent(numbers.get("silent_rate")),
                _number(numbers.get("wasted_nodes"), 0),
            ]
        )
    return _table(header, rows) if rows else ""


def _depth_table(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    rates = {name: summary["drafters"][name].get("acceptance_by_depth") or [] for name in names}
    deepest = max((len(entry) for entry in rates.values()), default=0)
    if not deepest:
        return ""
    header = ["drafter", *(str(depth) for depth in range(1, deepest + 1))]
    rows = [
        [name, *(_percent(rate) for rate in [*entry, *[None] * (deepest - len(entry))])]
        for name, entry in rates.items()
    ]
    note = "The chance that a proposal agrees at this depth, once it agreed above and goes that deep."
    return f'<h2>Acceptance by depth</h2><p class="faint">{note}</p>{_table(header, rows)}'


def _category_table(summary: Mapping[str, Any]) -> str:
    categories: Mapping[str, Mapping[str, Any]] = summary.get("by_category") or {}
    rows = [
        [
            name,
            _number(numbers.get("num_prompts"), 0),
            _number(numbers.get("acceptance_length"), 2),
            _number(numbers.get("speedup"), 2),
            _number(numbers.get("tokens_per_s"), 1),
        ]
        for name, numbers in categories.items()
    ]
    header = ["category", "prompts", "tokens per forward", "speedup", "tokens per second"]
    return f"<h2>Categories</h2>{_table(header, rows)}" if rows else ""


def _failures(prompts: pd.DataFrame) -> str:
    failed = prompts[prompts["error"].notna()]
    if failed.empty:
        return ""
    rows = [
        f"<li><b>{escape(str(prompt_id))}</b>: {escape(str(error))}</li>"
        for prompt_id, error in zip(failed["prompt_id"], failed["error"], strict=True)
    ]
    return f'<h2 class="alarm">Failed prompts</h2><ul>{"".join(rows)}</ul>'


def _legend(names: Sequence[str]) -> str:
    swatches = "".join(
        f'<span><span class="swatch c{index}"></span>{escape(name)}</span> ' for index, name in enumerate(names)
    )
    note = "Underlined: proposed by several, coloured by the first. Plain: the target's own token. Hover for the step."
    return f'<p>{swatches}</p><p class="faint">{escape(note)}</p>' if names else ""


def _texts(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    names: Sequence[str],
    pieces: Mapping[str, Sequence[str]],
) -> list[str]:
    """One collapsible block per prompt that did not fail; the first is open."""
    steps_of = dict(iter(steps.groupby("prompt_id", sort=False)))
    members_of = {key: list(group.unique()) for key, group in drafts.groupby("prompt_id", sort=False)["drafter"]}
    blocks: list[str] = []
    shown = prompts[prompts["error"].isna()]
    for prompt_id, category, prompt_text, text in shown[["prompt_id", "category", "prompt_text", "text"]].to_numpy():
        own_steps = steps_of[prompt_id] if prompt_id in steps_of else steps.iloc[:0]
        coloured = _coloured(own_steps, members_of.get(prompt_id, []), names, pieces.get(prompt_id))
        num_emitted, num_steps = sum(own_steps["num_emitted"]), len(own_steps)
        length = _number(num_emitted / num_steps if num_steps else None, 2)
        label = f"{prompt_id} · {category} · {num_emitted} tokens, {length} per forward"
        blocks.append(
            f"<details{'' if blocks else ' open'}><summary>{escape(label)}</summary>"
            f'<div class="text faint">{escape(str(prompt_text))}</div>'
            f'<div class="text">{escape(str(text)) if coloured is None else coloured}</div></details>'
        )
    return blocks


def _coloured(
    steps: pd.DataFrame, members: Sequence[str], names: Sequence[str], pieces: Sequence[str] | None
) -> str | None:
    """The text of one prompt as spans, one per token; None when `pieces` do not fit the tokens.

    `members` are the prompt's drafters in the order of the owner bits, `names` the page's in the order of colours.
    """
    if pieces is None or len(pieces) != sum(len(ids) for ids in steps["token_ids"]):
        return None
    spans: list[str] = []
    for step, owners in zip(steps["step"], steps["token_owners"], strict=True):
        for mask in map(int, owners):
            position = len(spans)
            who = [name for bit, name in enumerate(members) if mask >> bit & 1]
            colour = f"t{names.index(who[0])}" if who and who[0] in names else ""
            kind = f"{colour} many" if len(who) > 1 else colour
            hover = f"step {step} · {', '.join(who) or 'target'} · token {position}"
            style = f' class="{kind}"' if kind else ""
            spans.append(f'<span{style} title="{escape(hover)}">{escape(pieces[position])}</span>')
    return "".join(spans)


def _environment(summary: Mapping[str, Any]) -> str:
    environment = summary.get("environment")
    if not environment:
        return ""
    text = json.dumps(environment, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>Environment</summary><pre>{escape(text)}</pre></details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f}%"
