"""The page of a run: complete, self-contained, safe, readable in both schemes, and true to the
tables.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pandas as pd
import pytest
from pages import EVIL, PIECES, REPLAY, Page, member, page, subset, tables

from specens.analysis.metrics import Metric
from specens.analysis.palette import PALETTE
from specens.analysis.summary import summarise
from specens.report.bars import Scale
from specens.report.markup import Html, markup, tag, visible
from specens.report.outputs import MAX_PROMPT_CHARS, MAX_TOKENS
from specens.report.page import report
from specens.report.theme import Legend

FETCHING = {
    *("src", "href", "xlink:href", "srcset", "action", "formaction", "data", "poster"),
    *("background", "ping", "style"),
}


# The texts


def test_every_token_is_shown_once_in_the_colour_of_the_steps_winner() -> None:
    steps = Page(page(*tables(), pieces={"p0": PIECES})).steps
    assert [step["text"] for step in steps] == ["Hello there", ", you!\n"]
    assert [step["mark"] for step in steps] == ["Hello", ", you"], "the target's own token is plain"
    assert [step["sole"] for step in steps] == ["lo", " you"], (
        "what no other drafter had is underlined"
    )
    assert [step["class"] for step in steps] == ["w0", "w0"]


def test_a_tie_has_the_stripes_and_letters_of_all_who_won() -> None:
    prompts, steps, drafts = tables()
    steps["token_owners"] = [[5, 5, 0], [7, 3, 0]]
    shown = Page(page(prompts, steps, drafts, pieces={"p0": PIECES}))
    assert [step["class"] for step in shown.steps] == ["w0-2", "w0-1"]
    assert [step["sole"] for step in shown.steps] == ["", ""]
    assert re.search(r"\.w0-2 \{[^}]*repeating-linear-gradient\([^}]*--t0[^}]*--t2", shown.style)
    assert '.w0-2::before { content: "A C" }' in shown.style
    assert "a tie of a, c with 2 tokens" in shown.steps[0]["tip"]


def test_a_step_shows_its_members_and_logit_gaps() -> None:
    tip = Page(page(*tables(), pieces={"p0": PIECES})).steps[1]["tip"]
    assert tip.splitlines() == [
        "step 1: won by a with 2 tokens",
        "tokens right: a 2, b 1",
        "no draft: c",
        "   3  gap  0.25  A B     ,",
        "   4  gap  4.50  A       ·you",
        "   5  gap  1.00  target  !⏎",
    ]


@pytest.mark.parametrize("gaps", [None, [None, None], [[], []]])
def test_logit_gaps_that_were_not_measured_are_not_shown(gaps: Any) -> None:
    prompts, steps, drafts = tables()
    steps = steps.drop(columns="logit_gaps") if gaps is None else steps.assign(logit_gaps=gaps)
    tip = Page(page(prompts, steps, drafts, pieces={"p0": PIECES})).steps[0]["tip"]
    assert "gap" not in tip and "   2  target  ·there" in tip


def test_a_step_that_no_drafter_won_is_the_targets() -> None:
    prompts, steps, drafts = tables(num_steps=1)
    tokens = {"token_ids": [[1]], "token_owners": [[0]], "logit_gaps": [[2.0]]}
    steps = steps.assign(num_accepted=0, num_emitted=1, **tokens)
    shown = Page(page(prompts, steps, drafts.assign(num_matched=0), pieces={"p0": ["Hel"]}))
    assert [step["mark"] for step in shown.steps] == [""]
    assert shown.steps[0]["tip"].startswith("step 0: the target alone\ntokens right: a 0, b 0\n")


def test_every_step_can_be_reached_without_a_pointer() -> None:
    shown = Page(page(*tables(num_prompts=2), pieces={"p0": PIECES, "p1": PIECES}))
    assert shown.named("class").count("step") == 4
    assert shown.attributes.count(("span", "tabindex", "0")) == 4
    assert ".step:focus::after" in shown.style


@pytest.mark.parametrize("pieces", [None, {}, {"p0": PIECES[:-1]}])
def test_without_fitting_pieces_the_whole_text_is_shown_uncoloured(
    pieces: dict[str, list[str]] | None,
) -> None:
    shown = Page(page(*tables(), pieces=pieces))
    assert "whole text" in shown.text
    assert shown.steps == []


def test_only_the_first_text_is_open() -> None:
    shown = Page(page(*tables(num_prompts=3)))
    assert [tag for tag, name, _ in shown.attributes if name == "open"] == ["details"]
    assert shown.text.count("Say something.") == 3
    assert "More texts (2)" in shown.text


def test_a_text_that_differs_from_the_baselines_says_where() -> None:
    prompts, steps, drafts = tables()
    assert "differs" not in page(prompts, steps, drafts)
    other = prompts.assign(is_identical=False, divergence=4.0)
    assert "text at token 4" in page(other, steps, drafts)


def test_a_page_holds_so_many_tokens_and_says_what_it_leaves_out() -> None:
    prompts, steps, drafts = tables(num_prompts=3)
    prompts["output_ids"] = [[1] * (MAX_TOKENS - 1), [1], [1]]
    shown = Page(page(prompts, steps, drafts))
    assert shown.text.count("Say something.") == 2
    assert "size: 1. They are in prompts.parquet" in shown.text
    long = prompts.assign(prompt_text="x" * (MAX_PROMPT_CHARS + 1234))
    assert "[and 1,234 more characters]" in page(long, steps, drafts)


def test_forty_prompts_of_128_tokens_stay_small() -> None:
    frames = tables(num_prompts=40, num_steps=43)
    pieces = {f"p{number}": [" token"] * 129 for number in range(40)}
    assert len(page(*frames, pieces=pieces).encode()) < 1_500_000


# Safety


def test_all_text_stays_text() -> None:
    prompts, steps, drafts = tables(num_prompts=2)
    for column in ("prompt_text", "text", "category"):
        prompts[column] = EVIL
    prompts["run"], steps["run"], drafts["run"] = EVIL, EVIL, EVIL
    prompts.loc[1, "error"] = EVIL
    drafts["drafter"] = drafts["drafter"].replace("a", EVIL)
    replay = {
        "subsets": [subset(EVIL, 1, 2, 51.5), subset(f"{EVIL}+b", 3, 2, 50.0)],
        "members": [member(EVIL, 3.5, 3.0, 4.0, 2.0)],
        "policies": [{"policy": EVIL, "note": EVIL}],
        "overlap": {EVIL: {EVIL: 0.5}},
        "modelled": {"costs": {"origin": EVIL}, "subsets": REPLAY["subsets"]},
    }
    runs = [{"run": EVIL, "overrides": EVIL, "status": EVIL}, {"run": "other"}]
    known = {"verifier": EVIL, "status": EVIL, "error": EVIL, "lossy": True, EVIL: 1.0}
    environment = {EVIL: EVIL, "target": {"name": EVIL, "dtype": EVIL}}
    summary = {**summarise(prompts, steps, drafts), **known, "environment": environment}
    prompts["output_pieces"] = [[EVIL, *PIECES[1:]]] * 2
    further: dict[str, Any] = {
        "runs": runs,
        "notices": [EVIL],
        "metrics": [own_metric(EVIL, "run")],
    }
    text = report(prompts, steps, drafts, summary, title=EVIL, replay=replay, **further)
    assert "\x00" not in text and "\u202e" not in text
    shown = Page(text)
    tags = {tag for tag, _, _ in shown.attributes}
    assert "img" not in tags and text.count("<script") == 1 == text.count("</script"), (
        "the page's own"
    )
    assert text.count("<style") == 1 == text.count("</style")
    assert not any(name.startswith("on") for _, name, _ in shown.attributes)
    assert shown.text.count(visible(EVIL)) >= 18
    assert visible(EVIL) in shown.steps[0]["text"] and EVIL not in shown.style


def test_what_is_not_markup_is_text_whatever_it_is_in() -> None:
    assert markup("<b>", tag("i", "<u>", title='"<'), None, ["&", Html("&amp;")]) == (
        '&lt;b&gt;<i title="&quot;&lt;">&lt;u&gt;</i>&amp;&amp;'
    )
    assert tag("input", checked=True, disabled=False, name=None) == "<input checked>"


def test_signs_that_would_be_lost_or_would_act_are_made_visible() -> None:
    assert visible("a\tb\r\nc\n") == "a\tb\nc\n"
    assert visible("\x00\x1b\x7f\r") == "\u2400\u241b\u2421\u240d"
    assert visible("\u202egpj.exe\u2069") == "[U+202E]gpj.exe[U+2069]"
    assert visible("\ud800").encode() == "\ufffd".encode()
    assert visible("ünï 漢字 🙂 \u0645\u200c\u0646") == "ünï 漢字 🙂 \u0645\u200c\u0646"


def test_the_page_needs_no_network_and_its_policy_forbids_all_but_its_own_style_and_script() -> (
    None
):
    text = page(*tables(), pieces={"p0": PIECES})
    shown = Page(text)
    assert not FETCHING & {name for _, name, _ in shown.attributes}
    for word in ("http:", "https:", "@import", "url(", "<link", "<base"):
        assert word not in text
    (policy,) = (value for value in shown.named("content") if "src" in value)
    assert text.index("Content-Security-Policy") < text.index("<style")

    def digest(content: str) -> str:
        return (
            "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"
        )

    assert policy == (
        f"default-src 'none'; style-src {digest(shown.style)}; "
        f"script-src {digest(shown.script)}; base-uri 'none'; form-action 'none'"
    )


# Colours


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance, written down once more."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]

    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    red, green, blue = map(linear, parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    a, b = luminance(first), luminance(second)
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out_in_both_schemes(scheme: int) -> None:
    prompts, steps, drafts = tables()
    names = [f"drafter {letter}" for letter in "abcdefgh"]
    drafts = pd.concat([drafts.assign(drafter=name) for name in names], ignore_index=True)
    style = Page(page(prompts, steps, drafts)).style
    found = dict(re.findall(r"--(\w+): light-dark\(#(\w{6}, #\w{6})\)", style))
    colours = {name: pair.split(", #")[scheme] for name, pair in found.items()}
    for background in ("paper", "soft"):
        for text in ("ink", "faint", "alarm"):
            assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    for behind in (*(f"t{i}" for i in range(8)), *(f"h{i}" for i in range(1, 11))):
        assert contrast(colours["ink"], colours[behind]) >= 4.5, behind
    for drawn in (*(f"c{i}" for i in range(8)), "faint"):
        assert contrast(colours[drawn], colours["paper"]) >= 3, drawn
    tints = [colours[f"t{i}"] for i in range(8)]
    assert len(set(tints)) == len(PALETTE)


def test_drafters_differ_in_their_letters_too() -> None:
    names = ["ngram", "retrieval", "non_autoregressive", "distilled", "quantized", "nucleus"]
    letters = Legend.of([*names, "small2", "漢字", "<b>", "né"]).letters
    assert letters == ("N", "R", "NA", "D", "Q", "N2", "S", "D2", "B", "N3")
    shown = Page(page(*tables()))
    marks = [value for value in shown.named("class") if value.startswith("mark ")]
    assert marks[:3] == ["mark t0", "mark t1", "mark t2"]


# The numbers


def rects(text: str, kind: str) -> list[tuple[float, float]]:
    """Begin and width, in percent, of the parts of that class."""
    found = re.findall(rf'<rect x="([\d.]+)%" width="([\d.]+)%"[^>]* class="part {kind}">', text)
    return [(float(begin), float(width)) for begin, width in found]


def test_the_bars_show_the_win_rates_alone_and_tied_and_no_drafter() -> None:
    prompts, steps, drafts = tables()
    text = page(prompts, steps, drafts)
    assert rects(text, "c0")[0] == (0.0, 100.0)
    assert rects(text, "c1")[0] == rects(text, "none")[0] == (0.0, 0.0)
    is_tied = drafts["drafter"].isin(["a", "b"]) & (drafts["step"] == 1)
    drafts.loc[is_tied, ["win", "is_sole_win"]] = [0.5, False]
    tied = page(prompts, steps, drafts)
    assert rects(tied, "c0")[0] == (0.0, 66.67), "of an axis to 75%"
    assert rects(tied, "c0 pale")[0] == (66.67, 33.33)
    assert rects(tied, "c1 pale")[0] == (0.0, 33.33)


def test_gain_is_drawn_against_what_ar_decoding_writes_in_the_drafting_time() -> None:
    """a has 0.5 + 1 tokens per step, one of them alone; AR decoding writes 6 tokens/s: 0.003 tokens
    in 0.5 ms.
    """
    text = page(*tables())
    part = text[text.index("Cost against gain") :]
    assert "1.50 tokens for 0.50 ms (AR: 0.00)" in part and "0.50 tokens for 0.50 ms" in part
    assert rects(part, "c0")[0] == (0.0, 66.67)
    assert rects(part, "c0 pale")[0] == (66.67, 33.33)
    assert 'x1="0.2%" x2="0.2%" y1="0" y2="100%" class="goal"' in part
    prompts, steps, drafts = tables()
    without = Page(page(prompts.assign(baseline_decode_s=None), steps, drafts))
    assert "goal" not in without.named("class")


def test_a_category_is_made_of_the_targets_own_tokens_and_the_drafters_parts() -> None:
    text = page(*tables())
    part = text[text.index("<h2>Categories") : text.index("<h2>Drafters")]
    widths = [rects(part, kind)[0] for kind in ("none", "c0 pale", "c1 pale", "c2 pale")]
    assert widths == [(0.0, 33.33), (33.33, 50.0), (83.33, 16.67), (100.0, 0.0)]
    assert "3.00 · 0.50×" in part


def test_an_axis_holds_all_values_and_has_ticks_at_round_numbers() -> None:
    assert Scale.over([0.93]).ticks == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert Scale.over([-3.0, 17.0]).ticks == (0.0, 5.0, 10.0, 15.0)
    assert Scale.over([-0.7, -0.1]).ticks == pytest.approx([-0.6, -0.4, -0.2, 0.0])
    assert Scale.over([0.0, 0.0]) == Scale(0.0, 1.0, (0.0, 1.0))
    assert [Scale.over([4.0]).at(value) for value in (-1, 0, 1, 4, 9)] == [0, 0, 25, 100, 100]


def test_a_run_slower_than_its_baseline_says_so() -> None:
    prompts, steps, drafts = tables()
    slow = Page(page(prompts, steps, drafts))
    assert "0.50×the speed of AR decoding, a slowdown" in slow.text
    assert ("b", "class", "alarm") in slow.attributes
    fast = Page(page(prompts.assign(baseline_decode_s=5.0), steps, drafts))
    assert "2.50×the speed of AR decoding" in fast.text
    assert "slowdown" not in fast.text
    assert ("b", "class", "alarm") not in fast.attributes
    unmeasured = dict.fromkeys(("baseline_decode_s", "baseline_ids", "is_identical"))
    none = Page(page(prompts.assign(**unmeasured), steps, drafts))
    assert "no baseline in this run" in none.text


def test_what_must_not_be_missed_is_at_the_top() -> None:
    prompts, steps, drafts = tables()
    assert 'class="banner"' not in page(prompts, steps, drafts, lossy=False, status="finished")
    assert "lossy verifier" in Page(page(prompts, steps, drafts, lossy=True)).text
    different = page(prompts.assign(is_identical=False), steps, drafts)
    assert "1 of 1 outputs differ" in Page(different).text
    uncompared = tables(num_prompts=2)
    uncompared[0]["is_identical"] = [True, None]
    assert "outputs differ" not in page(*uncompared) and "1 of 1" in page(*uncompared)
    ended = {"status": "failed", "error": "Traceback\n  line\nKeyError: 'x'\n"}
    broken = Page(page(prompts, steps, drafts, **ended)).text
    assert "This run did not finish (failed): KeyError: 'x'." in broken


def test_failed_prompts_are_listed_with_their_errors() -> None:
    prompts, steps, drafts = tables(num_prompts=2)
    prompts.loc[1, "error"] = "context of 8192 tokens exceeded"
    shown = Page(page(prompts, steps, drafts))
    assert "p1: context of 8192 tokens exceeded" in shown.text
    assert shown.text.count("Say something.") == 1


def test_the_tables_show_the_summary() -> None:
    text = Page(page(*tables())).text
    for cell in ("100.0%", "75.0%", "3.00", "2.00", "Acceptance by depth", "Categories", "chat"):
        assert cell in text
    assert "50.0%" in text


def own_metric(key: str, scope: str) -> Metric:
    return Metric(key, f"title {key}", ".2f", "tokens", f"meaning of {key}", len, scope)


def test_further_metrics_are_shown_with_their_titles_and_meanings() -> None:
    frames = tables()
    metrics = [own_metric("mine", "run"), own_metric("own", "drafter")]
    summary = {**summarise(*frames), "mine": 12.345}
    summary["drafters"]["a"]["own"] = 67.891
    text = Page(report(*frames, summary, title="A run", metrics=metrics)).text
    assert "12.35title mine" in text
    assert "67.89" in text and "title own" in text and "meaning of own" in text


def test_a_run_without_drafters_or_prompts_is_a_page_too() -> None:
    prompts, steps, drafts = tables()
    assert "No drafter took part." in Page(page(prompts, steps.iloc[:0], drafts.iloc[:0])).text
    Page(page(prompts.iloc[:0], steps.iloc[:0], drafts.iloc[:0]))


def test_merged_runs_are_named_and_kept_apart() -> None:
    parts = [[frame.assign(run=name) for frame in tables()] for name in ("0", "1")]
    frames = [pd.concat(pair, ignore_index=True) for pair in zip(*parts, strict=True)]
    frames[1].loc[frames[1]["run"] == "1", "token_owners"] = pd.Series([[2, 2, 0]] * 4)
    runs = [
        {"run": "0", "overrides": "layout=tree", "speedup": 1.25},
        {"run": "1", "overrides": "layout=rows"},
    ]
    frames[0]["output_pieces"] = [PIECES] * 2
    text = report(*frames, summarise(*frames), title="Two runs", runs=runs)
    shown = Page(text)
    assert [step["class"] for step in shown.steps] == ["w0", "w0", "w1", "w1"]
    assert (
        "all 2 runs together" in shown.text and "layout=rows" in shown.text and "1.25" in shown.text
    )
    assert "0 · p0" in shown.text and "1 · p0" in shown.text


# A replay


def replayed(replay: dict[str, Any]) -> str:
    frames = tables()
    return report(*frames, summarise(*frames), title="A run", replay=replay)


def old_names(replay: dict[str, Any]) -> dict[str, Any]:
    """replay.json as version 1 wrote it."""

    def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
        old = {"AR": "plain"}
        named = [
            {**row, "team": old.get(row["subset"], row["subset"])} for row in content["subsets"]
        ]
        return [{key: value for key, value in row.items() if key != "subset"} for row in named]

    modelled = {**replay["modelled"], "teams": rows(replay["modelled"])}
    changed = {**replay, "teams": rows(replay), "modelled": modelled}
    del changed["subsets"], modelled["subsets"]
    return changed


def test_a_replay_of_version_1_is_the_same_page() -> None:
    assert replayed(old_names(REPLAY)) == replayed(REPLAY)
    others = [{"run": "pair", "team": "a+b"}, {"run": "pair", "subset": "a+b"}]
    first, second = (replayed({"others": [row]}) for row in others)
    assert first == second and "a+b" in Page(first).text.partition("Other runs")[2]


def test_a_replay_shows_subsets_by_speed_and_what_members_contribute() -> None:
    text = Page(replayed(REPLAY)).text.partition("SubsetsReplayed")[2]
    order = [text.index(rate) for rate in ("51.5", "50.0", "20.0")]
    assert order == sorted(order) and "AR decoding" in text
    assert "in all of its 2 steps" in text
    assert "1.8 s for this run; it took 2.0 s (-10.0%)" in text and "+2.0% on" in text
    assert "own best subset: 2.75×" in text
    assert "3.50 (95%: 3.00 to 4.00); without it 2.00" in text
    assert "0.50; without it -0.25" in text
    assert "seconds saved" in text and "target forwards saved" not in text, "calls are not known"
    assert "Right where another was wrong" in text and "75.0%" in text and "12.3%" in text
    assert "Modelled, not measured: by the cost table gpu.json" in text and "7,777.0" in text


def test_a_replay_that_is_not_the_run_is_not_to_be_trusted() -> None:
    text = replayed({**REPLAY, "live": {"num_steps": 2, "num_different": 1}})
    assert '<p class="banner">The replay is not the run: 1 of 2 steps differ' in text


def test_many_subsets_are_folded_but_for_the_best_all_members_and_none() -> None:
    rows = [subset(f"m{at}", 1, 2, 99.0 - at) for at in range(30)]
    every, none = subset("a+b", 2, 2, 2.0), subset("AR", 0, 2, 1.0)
    text = Page(replayed({"subsets": [none, *rows, every]})).text
    head, _, rest = text.partition("All 32 subsets")
    assert "10.m9" in head and "m10" not in head and "a+b" in head and "AR decoding" in head
    assert "30.m29" in rest


@pytest.mark.parametrize("missing", [*REPLAY, None])
def test_what_a_replay_lacks_is_left_out(missing: str | None) -> None:
    replay = (
        {} if missing is None else {key: value for key, value in REPLAY.items() if key != missing}
    )
    titles = {
        "subject": "Under budget=",
        "live": "the run itself",
        "subsets": "51.5",
        "best_by_prompt_speedup": "own best subset",
        "members": "What each member contributes",
        "policies": "Policies",
        "overlap": "Right together",
        "rescue": "Right where",
        "modelled": "Modelled",
    }
    assert titles.get(missing or "", "Subsets") not in Page(replayed(replay)).text
