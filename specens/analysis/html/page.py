"""The page: its order, what a reader must not miss, the headline numbers, and the policy that keeps it from the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specens.analysis.frames import rows_where
from specens.analysis.html.colours import Cast, style
from specens.analysis.html.drafters import acceptance_by_depth, by_category, cost_against_gain, drafter_table, who_wins
from specens.analysis.html.markup import Html, interval, markup, number, percent, section, table, tag
from specens.analysis.html.teams import teams
from specens.analysis.html.texts import Texts, prompt_name, texts

_HERE = Path(__file__).parent


def report(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    summary: Mapping[str, Any],
    *,
    title: str,
    pieces: Mapping[str, Sequence[str]] | None = None,
    replay: Mapping[str, Any] | None = None,
    runs: Sequence[Mapping[str, Any]] = (),
    notices: Sequence[str] = (),
) -> str:
    """The page for one run, or for merged ones: its tables (merged: with the column `run`) and its summary
    (`metrics.summarise`, plus `status`, `error`, `verifier`, `lossy` and `environment` where known).

    Of merged runs, `runs` are the single summaries: `run` is a run's name, `words` what was said on its command line.
    `replay` is the content of `replay.json`. `notices` are said at the top.
    `pieces[prompt_id]` is the output's text cut into one piece per token; None: the column `output_pieces` has them. A prompt
    without pieces, or with another number of them than tokens, shows its whole text uncoloured.
    """
    cast = Cast.of(summary.get("drafters") or {})
    told = texts(prompts, steps, drafts, cast, pieces)
    body = [
        _header(title, summary),
        [tag("p", notice, class_="banner") for notice in _notices(summary)],
        tag("ul", [tag("li", notice) for notice in notices], class_="banner") if notices else None,
        _runs(runs),
        _cards(summary),
        tag("div", who_wins(summary, cast), cost_against_gain(summary, cast), class_="pair"),
        _texts(told, cast),
        by_category(summary, cast),
        drafter_table(summary, cast),
        acceptance_by_depth(summary, cast),
        teams(replay or {}, cast),
        _failures(prompts),
        _environment(summary),
    ]
    return _document(title, markup(*body), style(cast, told.winners))


def _document(title: str, body: Html, run_style: str) -> str:
    """The whole file. Nothing but its own style and its own script may act in it, and nothing is fetched."""
    css = run_style + (_HERE / "report.css").read_text(encoding="utf-8")
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = markup(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(css)),
    )
    content = markup(tag("head", head), "\n", tag("body", tag("main", body), tag("script", Html(script))))
    return f"<!doctype html>\n{tag('html', content, lang='en')}\n"


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _header(title: str, summary: Mapping[str, Any]) -> Html:
    """What was run, on what; and a choice of the colour scheme, which the style sheet obeys and nothing remembers."""
    environment = summary.get("environment") or {}
    target = environment.get("target") or {}
    name = str(target.get("name", "")).replace("\\", "/").rstrip("/").rpartition("/")[2]
    dtype, packed = target.get("dtype"), target.get("packed_weights")
    weights = f"{dtype}, packed as {packed}" if packed and packed != dtype else dtype
    facts = [name, weights, environment.get("device"), summary.get("verifier"), summary.get("status")]
    choices = [
        tag("label", tag("input", type="radio", name="scheme", id=choice, checked=choice == "auto"), choice)
        for choice in ("auto", "light", "dark")
    ]
    return tag(
        "header",
        tag(
            "div",
            tag("h1", title, dir="auto"),
            tag("p", " · ".join(str(fact) for fact in facts if fact), class_="faint"),
        ),
        tag("fieldset", tag("legend", "colours"), choices),
    )


def _notices(summary: Mapping[str, Any]) -> list[str]:
    """What a reader must not miss: a run that did not finish, a lossy verifier, outputs unlike the baseline's."""
    notices: list[str] = []
    status, error = summary.get("status"), summary.get("error")
    if status not in (None, "finished"):
        reason = str(error or "").strip().rpartition("\n")[2]  # of a traceback, the line that says it
        why = f": {reason}" if reason else ""
        notices.append(f"This run is {status}{why}. Below are the prompts that were done.")
    if summary.get("lossy"):
        notices.append(
            f"This run used a lossy verifier ({summary.get('verifier')}): its texts need not be what the target alone "
            "would have written."
        )
    identical, compared = summary.get("num_identical"), summary.get("num_compared") or 0
    if identical is not None and identical < compared:
        notices.append(f"{compared - identical} of {compared} outputs differ from the baseline's.")
    return notices


def _cards(summary: Mapping[str, Any]) -> Html:
    speedup = summary.get("speedup")
    verdict = "no baseline in this run"
    if speedup is not None:
        width = summary.get("exact_width")
        verdict = "the speed of plain decoding" + (f" at exact_width={width} too" if width is not None else "")
        verdict += ", a slowdown" if speedup < 1 else ""
    cards = [
        (
            number(speedup, 2) + ("×" if speedup is not None else ""),
            verdict + interval(summary.get("speedup_interval")),
        ),
        (
            number(summary.get("acceptance_length"), 2),
            "tokens per target forward" + interval(summary.get("acceptance_length_interval")),
        ),
        (number(summary.get("tokens_per_s"), 1), _baseline_note(summary)),
        (percent(summary.get("no_win_rate")), "of the steps won by no drafter"),
        (_identical_note(summary), "outputs identical to the baseline's"),
        (percent(summary.get("host_fraction")), _time_note(summary)),
    ]
    is_slow = speedup is not None and speedup < 1
    cells = [
        tag(
            "div", tag("b", value, class_="alarm" if is_slow and not index else None), tag("span", label), class_="card"
        )
        for index, (value, label) in enumerate(cards)
    ]
    counts = (
        f"{number(summary.get('num_prompts'), 0)} prompts, {number(summary.get('num_failed'), 0)} failed; "
        f"{number(summary.get('num_emitted'), 0)} tokens in {number(summary.get('num_steps'), 0)} steps; "
        f"{number(summary.get('wasted_nodes_per_token'), 2)} verified nodes wasted per token"
    )
    return markup(tag("div", cells, class_="cards"), tag("p", counts, class_="faint"))


def _baseline_note(summary: Mapping[str, Any]) -> str:
    baseline = summary.get("baseline_tokens_per_s")
    return "tokens per second" + (f"; plain decoding {number(baseline, 1)}" if baseline is not None else "")


def _identical_note(summary: Mapping[str, Any]) -> str:
    identical = summary.get("num_identical")
    return "not compared" if identical is None else f"{identical} of {summary.get('num_compared')}"


def _time_note(summary: Mapping[str, Any]) -> str:
    parts = [f"{part} {number(summary.get(f'{part}_ms_per_step'), 1)}" for part in ("draft", "verify", "host")]
    return f"of the time on the host; ms per step: {', '.join(parts)}"


def _runs(runs: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        [
            tag("bdi", str(run.get("run"))),
            str(run.get("words") or ""),
            str(run.get("status") or ""),
            number(run.get("num_prompts"), 0),
            number(run.get("num_failed"), 0),
            number(run.get("acceptance_length"), 2),
            number(run.get("tokens_per_s"), 1),
            number(run.get("speedup"), 2),
        ]
        for run in runs
    ]
    header = ["run", "words", "status", "prompts", "failed", "tokens per forward", "tokens per second", "speedup"]
    note = f"Everything below the table is over all {len(runs)} runs together."
    return section("Runs", table(header, rows, label="Runs", num_words=3), note=note)


def _texts(told: Texts, cast: Cast) -> Html:
    """The first text, open, and the others behind one line."""
    note = (
        "In colour: accepted tokens, with the letter of the drafter whose proposal won the step (stripes and several "
        "letters: a tie). Underlined: what nobody else had. Plain: the target's own. Point at a step, tap it, or go there "
        "with Tab and the arrow keys: its members, and the margins, which are the gap between the target's two best scores."
    )
    first, others = told.blocks[:1], told.blocks[1:]
    rest = tag("details", tag("summary", f"More texts ({len(others)})"), others) if others else None
    left = f"Left out, for the page's size: {told.num_left_out}. They are in prompts.parquet."
    size = tag("p", left, class_="faint") if told.num_left_out else None
    return section("Texts", [cast.legend(), tag("p", note, class_="faint"), first, rest, size] if first else None)


def _failures(prompts: pd.DataFrame) -> Html:
    failed = rows_where(prompts, prompts["error"].notna().to_numpy(bool)).to_dict("records")
    rows = [tag("li", tag("b", prompt_name(prompt)), f": {prompt['error']}") for prompt in failed]
    return section("Failed prompts", tag("ul", rows) if rows else None)


def _environment(summary: Mapping[str, Any]) -> Html:
    environment = summary.get("environment")
    if not environment:
        return Html()
    text = json.dumps(environment, indent=2, ensure_ascii=False, default=str)
    return tag("details", tag("summary", "Environment"), tag("pre", text))
