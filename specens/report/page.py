"""The page: its order, what a reader must not miss, the headline numbers, and the policy that keeps
it from the network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specens.analysis.formats import Columns, cells, headings, interval, number
from specens.analysis.frames import rows_where
from specens.analysis.metrics import further_metrics, metrics_of
from specens.report import drafters as parts
from specens.report.markup import Html, folded, markup, section, table, tag
from specens.report.outputs import outputs, prompt_name
from specens.report.subsets import subsets
from specens.report.theme import Legend, style

_HERE = Path(__file__).parent


def report(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    summary: Mapping[str, Any],
    *,
    title: str,
    replay: Mapping[str, Any] | None = None,
    runs: Sequence[Mapping[str, Any]] = (),
    notices: Sequence[str] = (),
    metrics: Sequence[Any] = (),
) -> str:
    """The page for one run, or for merged ones: its tables (merged: with the column `run`) and its
    summary (`summarise`, plus `status`, `error`, `verifier`, `lossy` and `environment` where
    known). A prompt whose `output_pieces` are not one per token shows its whole text without
    colour.

    Of merged runs, `runs` are the single summaries: `run` is a run's name, `overrides` those in
    which it differs. `replay` is the content of `replay.json`. `notices` stand at the top.
    `metrics` are further ones, whose values the summary has.
    """
    legend = Legend.of(summary.get("drafters") or {})
    shown = outputs(prompts, steps, drafts, legend)
    wins, costs = parts.win_rates(summary, legend), parts.cost_against_gain(summary, legend)
    body = [
        _header(title, summary),
        [tag("p", notice, class_="banner") for notice in _notices(summary)],
        tag("ul", [tag("li", notice) for notice in notices], class_="banner") if notices else None,
        _runs(runs),
        _cards(summary, metrics),
        tag("div", wins, costs, class_="pair"),
        shown.section(legend),
        parts.by_category(summary, legend),
        parts.drafter_table(summary, legend, metrics),
        parts.acceptance_by_depth(summary, legend),
        subsets(replay or {}, legend),
        _failures(prompts),
        _environment(summary),
    ]
    return _document(title, markup(*body), style(legend, shown.winners))


def _document(title: str, body: Html, run_style: str) -> str:
    """The whole file. Nothing but its own style and its own script may act in it, and nothing is
    fetched.
    """
    css = run_style + (_HERE / "report.css").read_text(encoding="utf-8")
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = markup(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(css)),
    )
    whole = tag("body", tag("main", body), tag("script", Html(script)))
    content = markup(tag("head", head), "\n", whole)
    return f"<!doctype html>\n{tag('html', content, lang='en')}\n"


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _header(title: str, summary: Mapping[str, Any]) -> Html:
    """What was run, on what; and a choice of the colour scheme, which the style sheet obeys and
    nothing remembers.
    """
    environment = summary.get("environment") or {}
    target = environment.get("target") or {}
    name = str(target.get("name", "")).replace("\\", "/").rstrip("/").rpartition("/")[2]
    dtype, packed = target.get("dtype"), target.get("packed_weights")
    weights = f"{dtype}, packed as {packed}" if packed and packed != dtype else dtype
    known = (summary.get("verifier"), summary.get("status"))
    facts = [str(fact) for fact in (name, weights, environment.get("device"), *known) if fact]
    choices: list[Html] = []
    for choice in ("auto", "light", "dark"):
        is_first = choice == "auto"
        button = tag("input", type="radio", name="scheme", id=choice, checked=is_first)
        choices.append(tag("label", button, choice))
    what = tag("div", tag("h1", title, dir="auto"), tag("p", " · ".join(facts), class_="faint"))
    return tag("header", what, tag("fieldset", tag("legend", "colours"), choices))


def _notices(summary: Mapping[str, Any]) -> list[str]:
    """What a reader must not miss: a run that did not finish, a lossy verifier, outputs unlike the
    baseline's.
    """
    notices: list[str] = []
    status, error = summary.get("status"), summary.get("error")
    if status not in (None, "finished"):
        reason = str(error or "").strip().rpartition("\n")[2]  # of a traceback, the last line
        why = f": {reason}" if reason else ""
        done = "Below are the prompts that were done."
        notices.append(f"This run did not finish ({status}){why}. {done}")
    if summary.get("lossy"):
        notices.append(
            f"This run used a lossy verifier ({summary.get('verifier')}): its texts need not be "
            "what the target alone would have written."
        )
    identical, compared = summary.get("num_identical"), summary.get("num_compared") or 0
    if identical is not None and identical < compared:
        notices.append(f"{compared - identical} of {compared} outputs differ from the baseline's.")
    return notices


def _cards(summary: Mapping[str, Any], metrics: Sequence[Any]) -> Html:
    """The headline numbers, and those of further metrics."""
    speedup, identical = summary.get("speedup"), summary.get("num_identical")
    baseline = summary.get("baseline_tokens_per_s")
    compared = f"{identical} of {summary.get('num_compared')}"
    same = "not compared" if identical is None else compared
    rate_note = f"; AR decoding {number(baseline, ',.1f')}" if baseline is not None else ""
    length = number(summary.get("acceptance_length"), ".2f")
    length_note = interval(summary.get("acceptance_length_interval"))
    cards = [
        (number(speedup, ",.2f") + ("×" if speedup is not None else ""), _verdict(summary)),
        (length, f"tokens per target forward{length_note}"),
        (number(summary.get("tokens_per_s"), ",.1f"), f"tokens per second{rate_note}"),
        (number(summary.get("no_win_rate"), ".1%"), "of the steps won by no drafter"),
        (same, "outputs identical to the baseline's"),
        (number(summary.get("host_fraction"), ".1%"), _time_note(summary)),
    ]
    further = metrics_of("run", "page", metrics)
    cards += [(number(summary.get(metric.key), metric.form), metric.title) for metric in further]
    shown: list[Html] = []
    for index, (value, label) in enumerate(cards):
        is_slow = not index and speedup is not None and speedup < 1
        head = tag("b", value, class_="alarm" if is_slow else None)
        shown.append(tag("div", head, tag("span", label), class_="card"))
    keys = ("num_prompts", "num_failed", "num_emitted", "num_steps")
    prompts, failed, tokens, steps = (number(summary.get(key), ",.0f") for key in keys)
    wasted = number(summary.get("wasted_nodes_per_token"), ".2f")
    counts = (
        f"{prompts} prompts, {failed} failed; {tokens} tokens in {steps} steps; {wasted} verified "
        "nodes wasted per token"
    )
    return markup(tag("div", shown, class_="cards"), tag("p", counts, class_="faint"))


def _verdict(summary: Mapping[str, Any]) -> str:
    """What the speedup is over."""
    speedup, width = summary.get("speedup"), summary.get("exact_width")
    if speedup is None:
        return "no baseline in this run"
    also = f" at exact_width={width} too" if width is not None else ""
    slow = ", a slowdown" if speedup < 1 else ""
    return f"the speed of AR decoding{also}{slow}{interval(summary.get('speedup_interval'))}"


def _time_note(summary: Mapping[str, Any]) -> str:
    named = (("draft", "draft"), ("verify", "verify"), ("CPU overhead", "host"))
    times = [f"{name} {number(summary.get(f'{key}_ms_per_step'), '.1f')}" for name, key in named]
    return f"of the time is CPU overhead; ms per step: {', '.join(times)}"


RUN_COLUMNS: Columns = (
    ("prompts", "num_prompts", ",.0f"),
    ("failed", "num_failed", ",.0f"),
    ("tokens per forward", "acceptance_length", ".2f"),
    ("tokens per second", "tokens_per_s", ",.1f"),
    ("speedup", "speedup", ".2f"),
)


def _runs(runs: Sequence[Mapping[str, Any]]) -> Html:
    """A row per run, with the numbers of further metrics that one of them recorded."""
    further = metrics_of("run", "page", further_metrics(runs))
    columns = (*RUN_COLUMNS, *((m.title, m.key, m.form) for m in further))
    rows = [
        [
            tag("bdi", str(run.get("run"))),
            *(str(run.get(key) or "") for key in ("overrides", "status")),
            *cells(run, columns),
        ]
        for run in runs
    ]
    header = ["run", "overrides", "status", *headings(columns)]
    note = f"Everything below the table is over all {len(runs)} runs together."
    return section("Runs", table(header, rows, label="Runs", num_left=3), note=note)


def _failures(prompts: pd.DataFrame) -> Html:
    failed = rows_where(prompts, prompts["error"].notna().to_numpy(bool)).to_dict("records")
    rows = [tag("li", tag("b", prompt_name(prompt)), f": {prompt['error']}") for prompt in failed]
    return section("Failed prompts", tag("ul", rows) if rows else None)


def _environment(summary: Mapping[str, Any]) -> Html:
    environment = summary.get("environment")
    if not environment:
        return Html()
    text = json.dumps(environment, indent=2, ensure_ascii=False, default=str)
    return folded("Environment", tag("pre", text))
