"""The page of a run: complete, self-contained, safe, and true to the tables."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest

from specens.analysis.html import report
from specens.analysis.metrics import credit, summarise

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes, the spans of tokens, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tokens: list[dict[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        found = {name: value or "" for name, value in attrs}
        if tag == "span" and "title" in found:
            self.tokens.append({"class": found.get("class", ""), "title": found["title"], "text": ""})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self.tokens and self.open and self.open[-1] == "span":
            self.tokens[-1]["text"] += data


def tables(num_prompts: int = 1, num_steps: int = 2) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Every step: members a and b match 2 and 1 tokens, then the target's own follows."""
    prompts, steps, drafts = [], [], []
    for number in range(num_prompts):
        where = {"prompt_id": f"p{number}"}
        for step in range(num_steps):
            times = {"draft_ms": 1.0, "verify_ms": 5.0, "host_ms": 1.0}
            tokens = {"token_ids": [1, 2, 3], "token_owners": [3, 1, 0]}
            steps.append(
                {**where, "step": step, "num_nodes": 4, "num_accepted": 2, "num_emitted": 3, **times, **tokens}
            )
            for name, m, share in zip("ab", (2, 1), credit((2, 1), 2), strict=True):
                counts = {"num_drafted": 2, "num_verified": 2, "num_matched": m, "num_tested": 2, "draft_ms": 0.5}
                won = {"win": share.win, "is_sole_win": share.is_sole_win}
                credits = {"token_share": share.token_share, "marginal": share.marginal}
                drafts.append({**where, "step": step, "drafter": name, **counts, **won, **credits})
        prompts.append(
            {
                **where,
                "category": "chat",
                "prompt_text": "Say something.",
                "text": "whole text",
                "output_ids": [1, 2, 3] * num_steps,
                "decode_s": 2.0,
                "baseline_decode_s": 1.0,
                "baseline_ids": [1, 2, 3] * num_steps,
                "is_identical": True,
                "error": None,
            }
        )
    return pd.DataFrame(prompts), pd.DataFrame(steps), pd.DataFrame(drafts)


def page(*frames: pd.DataFrame, pieces: dict[str, list[str]] | None = None, **extra: Any) -> str:
    return report(*frames, {**summarise(*frames), **extra}, title="A run", pieces=pieces)


PIECES = ["Hel", "lo", " there", ",", " you", "!\n"]


def test_every_token_is_shown_once_and_coloured_by_its_winner() -> None:
    tokens = Page(page(*tables(), pieces={"p0": PIECES})).tokens
    assert "".join(token["text"] for token in tokens) == "".join(PIECES)
    assert [token["class"] for token in tokens[:3]] == ["t0 many", "t0", ""]
    assert [token["title"] for token in tokens[3:]] == [
        "step 1 · a, b · token 3",
        "step 1 · a · token 4",
        "step 1 · target · token 5",
    ]


@pytest.mark.parametrize("pieces", [None, {}, {"p0": PIECES[:-1]}])
def test_without_fitting_pieces_the_whole_text_is_shown_uncoloured(pieces: dict[str, list[str]] | None) -> None:
    shown = Page(page(*tables(), pieces=pieces))
    assert "whole text" in shown.text
    assert shown.tokens == []


def test_all_text_stays_text() -> None:
    evil = "<script>alert('x')</script> & \"quoted\" <img src=x onerror=1>"
    prompts, steps, drafts = tables()
    for column in ("prompt_text", "text", "category"):
        prompts[column] = evil
    drafts["drafter"] = drafts["drafter"].replace("a", evil)
    failed = prompts.assign(prompt_id=evil, error=evil)
    frames = (pd.concat([prompts, failed], ignore_index=True), steps, drafts)
    summary = {**summarise(*frames), "environment": {evil: evil}}
    for pieces in (None, {"p0": [evil, *PIECES[1:]]}):
        text = report(*frames, summary, title=evil, pieces=pieces)
        shown = Page(text)
        assert "<script" not in text
        assert "<img" not in text
        assert not any(name.startswith("on") or tag == "img" for tag, name, _ in shown.attributes)
        assert shown.text.count(evil) >= 5


def test_the_page_needs_no_network() -> None:
    text = page(*tables(), pieces={"p0": PIECES})
    assert not any(name in ("src", "href", "srcset", "action") for _, name, _ in Page(text).attributes)
    for word in ("http:", "https:", "@import", "url(", "<script", "<link"):
        assert word not in text


def test_the_bars_show_the_win_rates_and_nobody() -> None:
    widths = [value for _, name, value in Page(page(*tables())).attributes if name == "style"]
    assert widths == ["width:100.0%", "width:0.0%", "width:0.0%"]


def test_a_run_slower_than_its_baseline_says_so() -> None:
    prompts, steps, drafts = tables()
    slow = Page(page(prompts, steps, drafts))
    assert "0.50×the speed of plain decoding, a slowdown" in slow.text
    assert ("b", "class", "alarm") in slow.attributes
    fast = Page(page(prompts.assign(baseline_decode_s=5.0), steps, drafts))
    assert "2.50×the speed of plain decoding" in fast.text
    assert "slowdown" not in fast.text
    assert ("b", "class", "alarm") not in fast.attributes
    none = Page(page(prompts.assign(baseline_decode_s=None, baseline_ids=None, is_identical=None), steps, drafts))
    assert "no baseline in this run" in none.text


def test_a_lossy_verifier_and_differing_outputs_are_announced() -> None:
    prompts, steps, drafts = tables()
    assert 'class="banner"' not in page(prompts, steps, drafts, lossy=False)
    assert "lossy verifier" in Page(page(prompts, steps, drafts, lossy=True)).text
    assert "1 of 1 outputs differ" in Page(page(prompts.assign(is_identical=False), steps, drafts)).text


def test_failed_prompts_are_listed_with_their_errors() -> None:
    prompts, steps, drafts = tables(num_prompts=2)
    prompts.loc[1, "error"] = "context of 8192 tokens exceeded"
    shown = Page(page(prompts, steps, drafts))
    assert "p1: context of 8192 tokens exceeded" in shown.text
    assert [tag for tag, name, _ in shown.attributes if (tag, name) == ("details", "open")] == ["details"]
    assert shown.text.count("Say something.") == 1


def test_the_tables_show_the_summary() -> None:
    text = Page(page(*tables())).text
    for cell in ("100.0%", "75.0%", "3.00", "2.00", "Acceptance by depth", "Categories", "chat"):
        assert cell in text
    assert "50.0%" in text


def test_a_run_without_drafters_or_prompts_is_a_page_too() -> None:
    prompts, steps, drafts = tables()
    assert "No drafter took part." in Page(page(prompts, steps.iloc[:0], drafts.iloc[:0])).text
    Page(page(prompts.iloc[:0], steps.iloc[:0], drafts.iloc[:0]))


def test_forty_prompts_of_128_tokens_stay_small() -> None:
    frames = tables(num_prompts=40, num_steps=43)
    pieces = {f"p{number}": [" token"] * 129 for number in range(40)}
    assert len(page(*frames, pieces=pieces).encode()) < 3_000_000
