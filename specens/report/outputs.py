"""The outputs, step by step: what a drafter gave in the colour of the one that won the step, the
target's own tokens without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.formats import number
from specens.analysis.frames import rows_where
from specens.report.markup import Html, faint, folded, markup, section, tag
from specens.report.theme import Legend, winner_class

MAX_TOKENS = 20_000
"""Shown on a page, in whole texts: some megabytes. The rest is in prompts.parquet."""
MAX_PROMPT_CHARS = 2_000

Winners = tuple[int, ...]
"""Indices of the drafters whose proposals were the longest accepted ones of a step, in the order of
the page.
"""

_SIGNS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "·"})


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step of a text. `owners[i]` are the drafters that proposed token i (none: the target's
    own), `agreed` has for every member how many tokens of its proposal agree with the text (None:
    it had no draft). `logit_gaps` is empty if not measured.
    """

    number: int
    position: int
    pieces: tuple[str, ...]
    owners: tuple[Winners, ...]
    agreed: tuple[tuple[str, int | None], ...]
    logit_gaps: tuple[float, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(bool(owners) for owners in self.owners)

    @property
    def winners(self) -> Winners:
        return self.owners[self.num_accepted - 1] if self.num_accepted else ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The blocks of a page, one per prompt, the sets of winners in them, and how many prompts were
    left out.
    """

    blocks: tuple[Html, ...]
    winners: frozenset[Winners]
    num_left_out: int

    def section(self, legend: Legend) -> Html:
        """The first text, open, and the others behind one line."""
        if not self.blocks:
            return Html()
        note = (
            "In colour: accepted tokens, with the letter of the drafter whose proposal won the "
            "step (stripes and several letters: a tie). Underlined: what no other drafter had. "
            "Without colour: the target's own. Point at a step, tap it, or go there with Tab and "
            "the arrow keys: its members, and the logit gaps between the target's two best tokens."
        )
        first, others = self.blocks[0], self.blocks[1:]
        rest = folded(f"More texts ({len(others)})", others) if others else None
        left = f"Left out, for the page's size: {self.num_left_out}. They are in prompts.parquet."
        size = faint(left) if self.num_left_out else None
        return section("Texts", legend.line(), faint(note), first, rest, size)


def outputs(
    prompts: pd.DataFrame, steps: pd.DataFrame, drafts: pd.DataFrame, legend: Legend
) -> Outputs:
    """A collapsible block per prompt that did not fail; the first is open."""
    key = ["run", "prompt_id"] if "run" in prompts.columns else ["prompt_id"]
    done = rows_where(prompts, prompts["error"].isna().to_numpy(bool))
    shown, num_left_out = _that_fit(done, key)
    steps_of, drafts_of = (dict(tuple(frame.groupby(key, sort=False))) for frame in (steps, drafts))
    blocks: list[Html] = []
    winners: set[Winners] = set()
    for prompt in shown.to_dict("records"):
        where = tuple(prompt[name] for name in key)
        own = steps_of[where] if where in steps_of else steps.iloc[:0]
        proposals = drafts_of[where] if where in drafts_of else drafts.iloc[:0]
        found = list(_steps(own, proposals, legend, prompt.get("output_pieces")))
        winners.update(step.winners for step in found if step.winners)
        blocks.append(_block(prompt, own, found, legend, is_open=not blocks))
    return Outputs(tuple(blocks), frozenset(winners), num_left_out)


def _that_fit(prompts: pd.DataFrame, key: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """As many prompts as a page can hold, of merged runs the first ones of each, and the number of
    the others.
    """
    if "run" in key:
        turns = prompts.groupby("run", sort=False).cumcount()
        prompts = prompts.iloc[turns.argsort(kind="stable")]
    num_tokens = np.cumsum([_length(ids) for ids in prompts["output_ids"]])
    count = int(np.searchsorted(num_tokens, MAX_TOKENS, side="right"))
    fit = max(count, min(1, len(prompts)))
    return prompts.iloc[:fit], len(prompts) - fit


def _length(ids: Any) -> int:
    return len(ids) if hasattr(ids, "__len__") else 0


def _steps(
    steps: pd.DataFrame, drafts: pd.DataFrame, legend: Legend, pieces: Sequence[str] | None
) -> Iterator[ShownStep]:
    """The steps of one prompt; none when `pieces` do not fit the tokens."""
    if pieces is None or _length(pieces) != sum(map(_length, steps["token_ids"])):
        return
    index_of = [legend.names.index(name) for name in drafts["drafter"].unique()]
    agreed: dict[int, list[tuple[str, int | None]]] = {}
    columns = ["step", "drafter", "num_drafted", "num_matched"]
    for step, name, drafted, matched in drafts[columns].to_numpy():
        agreed.setdefault(step, []).append((name, int(matched) if drafted else None))
    gaps = steps["logit_gaps"] if "logit_gaps" in steps.columns else [None] * len(steps)
    left, position = iter(pieces), 0
    for step, masks, measured in zip(steps["step"], steps["token_owners"], gaps, strict=True):
        owners = tuple(
            tuple(sorted(index for bit, index in enumerate(index_of) if int(mask) >> bit & 1))
            for mask in masks
        )
        own = tuple(islice(left, len(owners)))
        known = tuple(map(float, measured)) if _length(measured) == len(owners) else ()
        yield ShownStep(int(step), position, own, owners, tuple(agreed.get(step, ())), known)
        position += len(owners)


def _block(
    prompt: Mapping[str, Any],
    steps: pd.DataFrame,
    shown: Sequence[ShownStep],
    legend: Legend,
    *,
    is_open: bool,
) -> Html:
    question = str(prompt["prompt_text"])
    if len(question) > MAX_PROMPT_CHARS:
        rest = len(question) - MAX_PROMPT_CHARS
        question = f"{question[:MAX_PROMPT_CHARS]} [and {rest:,} more characters]"
    answer = [_step(step, legend) for step in shown] if shown else str(prompt["text"])
    return tag(
        "details",
        tag("summary", _headline(prompt, steps)),
        tag("div", question, class_="text prompt faint", dir="auto"),
        tag("div", answer, class_="text answer", dir="auto"),
        open=is_open,
    )


def _headline(prompt: Mapping[str, Any], steps: pd.DataFrame) -> Html:
    num_emitted, num_steps = sum(steps["num_emitted"]), len(steps)
    facts = [str(prompt["category"]), f"{num_emitted} tokens in {num_steps} forwards"]
    if num_steps:
        facts.append(f"{number(num_emitted / num_steps, '.2f')} each")
    own, baseline = prompt.get("decode_s"), prompt.get("baseline_decode_s")
    if own and baseline and not pd.isna(own) and not pd.isna(baseline):
        facts.append(f"{baseline / own:.2f}× the speed of AR decoding")
    if prompt.get("is_identical") is False:
        at = prompt.get("divergence")
        where = "" if at is None or pd.isna(at) else f" at token {at:.0f}"
        facts.append(f"differs from the baseline's text{where}")
    name, rest = tag("b", prompt_name(prompt), dir="auto"), " · ".join(["", *facts])
    return markup(name, tag("span", rest, class_="faint"))


def prompt_name(prompt: Mapping[str, Any]) -> str:
    return " · ".join(str(prompt[part]) for part in ("run", "prompt_id") if part in prompt)


def _step(step: ShownStep, legend: Legend) -> Html:
    """The accepted run in the winner's colour, what no other drafter had underlined (always its
    end: a drafter that agrees to a depth agrees above it too), and the target's own token.
    """
    accepted, shared = step.num_accepted, sum(len(owners) > 1 for owners in step.owners)
    run: Html | None = None
    if accepted:
        sole = tag("u", *step.pieces[shared:accepted]) if shared < accepted else None
        run = tag("mark", *step.pieces[:shared], sole, class_=winner_class(step.winners))
    own, tip = step.pieces[accepted:], _tip(step, legend)
    return tag("span", run, *own, class_="step", tabindex=0, data_tip=tip)


def _tip(step: ShownStep, legend: Legend) -> str:
    """What is shown of a step under the pointer or the keyboard's focus."""
    names = [legend.names[index] for index in step.winners]
    tokens = f"{step.num_accepted} token{'' if step.num_accepted == 1 else 's'}"
    won = f"won by {names[0]}" if len(names) == 1 else f"a tie of {', '.join(names)}"
    right = [f"{name} {count}" for name, count in step.agreed if count is not None]
    without = [name for name, count in step.agreed if count is None]
    lines = [
        f"step {step.number}: {f'{won} with {tokens}' if names else 'the target alone'}",
        f"tokens right: {', '.join(right)}" if right else "",
        f"no draft: {', '.join(without)}" if without else "",
        *_token_lines(step, legend),
    ]
    return "\n".join(line for line in lines if line)


def _token_lines(step: ShownStep, legend: Legend) -> Iterator[str]:
    """Per token: its number in the text, its logit gap where measured, the letters of the drafters
    that proposed it, the piece.
    """
    letters = [legend.letters_of(owners) or "target" for owners in step.owners]
    width = max(map(len, letters), default=0)
    for index, (piece, by) in enumerate(zip(step.pieces, letters, strict=True)):
        gap = f"  gap {step.logit_gaps[index]:5.2f}" if step.logit_gaps else ""
        yield f"{step.position + index:4d}{gap}  {by:<{width}}  {piece.translate(_SIGNS)}"
