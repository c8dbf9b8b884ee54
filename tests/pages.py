"""Pages of runs made by hand, and a parser that checks them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pandas as pd

from specens.analysis.summary import summarise
from specens.records.credit import credit
from specens.report.page import report

VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes, the steps of the texts, and what a reader
    sees.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.steps: list[dict[str, str]] = []
        self.depth = 0  # of the step that is open, 0 outside of any
        self.text = self.style = self.script = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        found = {name: value or "" for name, value in attrs}
        if found.get("class") == "step":
            self.steps.append({"tip": found["data-tip"], "class": ""})
            self.steps[-1] |= {"text": "", "mark": "", "sole": ""}
            self.depth = len(self.open)
        if tag == "mark":
            self.steps[-1]["class"] = found["class"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.depth = self.depth if len(self.open) >= self.depth else 0

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        elif "script" in self.open:
            self.script += data
        else:
            self.text += data
        if self.depth:
            self.steps[-1]["text"] += data
            self.steps[-1]["mark"] += data if "mark" in self.open else ""
            self.steps[-1]["sole"] += data if "u" in self.open else ""

    def named(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def tables(
    num_prompts: int = 1, num_steps: int = 2
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Every step: members a and b match 2 and 1 tokens, c has no draft; then the target's own token
    follows.
    """
    prompts, steps, drafts = [], [], []
    for number in range(num_prompts):
        where = {"prompt_id": f"p{number}"}
        for step in range(num_steps):
            counts = {"num_nodes": 4, "num_accepted": 2, "num_emitted": 3}
            times = {"draft_ms": 1.0, "verify_ms": 5.0, "host_ms": 1.0}
            tokens = {"token_ids": [1, 2, 3], "token_owners": [3, 1, 0]}
            gaps = {"logit_gaps": [0.25, 4.5, 1.0]}
            steps.append({**where, "step": step, **counts, **times, **tokens, **gaps})
            for name, m, share in zip("abc", (2, 1, 0), credit((2, 1, 0), 2), strict=True):
                k = 0 if name == "c" else 2
                drafts.append(
                    {
                        **where,
                        "step": step,
                        "drafter": name,
                        "num_drafted": k,
                        "num_verified": k,
                        "num_matched": m,
                        "num_tested": k,
                        "draft_ms": 0.5,
                        "win": share.win,
                        "is_sole_win": share.is_sole_win,
                        "token_share": share.token_share,
                        "marginal": share.marginal,
                    }
                )
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


def page(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    pieces: dict[str, list[str]] | None = None,
    **extra: Any,
) -> str:
    """The page of these tables, with the output's pieces of some prompts."""
    if pieces is not None:
        prompts = prompts.assign(output_pieces=[pieces.get(name) for name in prompts["prompt_id"]])
    summary = {**summarise(prompts, steps, drafts), **extra}
    return report(prompts, steps, drafts, summary, title="A run")


PIECES = ["Hel", "lo", " there", ",", " you", "!\n"]


def subset(name: str, num_members: int, calls: int, tokens_per_s: float) -> dict[str, Any]:
    speeds = {"tokens_per_s": tokens_per_s, "speedup": tokens_per_s / 20}
    length = {"calls": calls, "acceptance_length": 6 / calls}
    return {"subset": name, "num_members": num_members, **length, **speeds}


def member(name: str, saved: float, low: Any, high: Any, last: float) -> dict[str, Any]:
    spread = {"shapley_s": saved, "shapley_s_low": low, "shapley_s_high": high}
    return {"member": name, **spread, "leave_one_out_s": last}


REPLAY: dict[str, Any] = {
    "subject": {"policy": "fixed", "max_nodes": 64},
    "live": {
        "num_steps": 2,
        "num_different": 0,
        "predicted_s": 1.8,
        "measured_s": 2.0,
        "error": -0.1,
        "held_out_error": 0.02,
    },
    "best_by_prompt_speedup": 2.75,
    "subsets": [subset("AR", 0, 6, 20.0), subset("a", 1, 2, 51.5), subset("a+b+c", 3, 2, 50.0)],
    "members": [member("a", 3.5, 3.0, 4.0, 2.0), member("b", 0.5, None, None, -0.25)],
    "policies": [
        {"policy": "priority", "tokens_per_s": 44.5, "regret": 0.123, "note": "the first drafts"}
    ],
    "overlap": {"a": {"a": 1.0, "b": 0.25}, "b": {"a": 0.25, "b": 0.5}},
    "rescue": {"a": {"a": None, "b": 0.75}, "b": {"a": 0.0, "b": None}},
    "modelled": {"costs": {"origin": "gpu.json"}, "subsets": [subset("b", 1, 3, 7777.0)]},
}

EVIL = (
    "<script>alert('x')</script> & \"quoted\" </style></details><img src=x onerror=1> "
    "\u202e\x00 --> ]]>"
)
