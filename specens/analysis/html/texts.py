"""The texts, step by step: what a drafter gave in the colour of who won the step, the target's own tokens plain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.frames import rows_where
from specens.analysis.html.colours import Cast, winner_class
from specens.analysis.html.markup import Html, markup, number, tag

MAX_TOKENS = 20_000
"""Shown on a page, in whole texts: some megabytes. The rest is in prompts.parquet."""
MAX_PROMPT_CHARS = 2_000

Winners = tuple[int, ...]
"""Indices of those whose proposals were the longest accepted ones of a step, in the order of the page's drafters."""

_SIGNS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "·"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a text. `owners[i]` are those who proposed token i (none: the target's own), `agreed` says of every member
    how many tokens of its proposal agree with the text (None: it proposed nothing). `margins` is empty if not measured.
    """

    number: int
    position: int
    pieces: tuple[str, ...]
    owners: tuple[Winners, ...]
    agreed: tuple[tuple[str, int | None], ...]
    margins: tuple[float, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(bool(owners) for owners in self.owners)

    @property
    def winners(self) -> Winners:
        return self.owners[self.num_accepted - 1] if self.num_accepted else ()


@dataclass(frozen=True, slots=True)
class Texts:
    """The blocks of a page, one per prompt, the sets of winners in them, and how many prompts were left out."""

    blocks: tuple[Html, ...]
    winners: frozenset[Winners]
    num_left_out: int


def texts(
    prompts: pd.DataFrame,
    steps: pd.DataFrame,
    drafts: pd.DataFrame,
    cast: Cast,
    pieces: Mapping[str, Sequence[str]] | None,
) -> Texts:
    """A collapsible block per prompt that did not fail; the first is open. `pieces` as in `page.report`."""
    key = ["run", "prompt_id"] if "run" in prompts.columns else ["prompt_id"]
    shown, num_left_out = _that_fit(rows_where(prompts, prompts["error"].isna().to_numpy(bool)), key)
    steps_of, drafts_of = (dict(tuple(frame.groupby(key, sort=False))) for frame in (steps, drafts))
    blocks: list[Html] = []
    winners: set[Winners] = set()
    for prompt in shown.to_dict("records"):
        where = tuple(prompt[name] for name in key)
        own = steps_of[where] if where in steps_of else steps.iloc[:0]
        proposals = drafts_of[where] if where in drafts_of else drafts.iloc[:0]
        own_pieces = prompt.get("output_pieces") if pieces is None else pieces.get(prompt["prompt_id"])
        told = list(_steps(own, proposals, cast, own_pieces))
        winners.update(step.winners for step in told if step.winners)
        blocks.append(_block(prompt, own, told, cast, is_open=not blocks))
    return Texts(tuple(blocks), frozenset(winners), num_left_out)


def _that_fit(prompts: pd.DataFrame, key: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """As many prompts as a page can hold, of merged runs the first ones of each, and the number of the others."""
    if "run" in key:
        prompts = prompts.iloc[prompts.groupby("run", sort=False).cumcount().argsort(kind="stable")]
    num_tokens = np.cumsum([_length(ids) for ids in prompts["output_ids"]])
    fit = max(int(np.searchsorted(num_tokens, MAX_TOKENS, side="right")), min(1, len(prompts)))
    return prompts.iloc[:fit], len(prompts) - fit


def _length(ids: Any) -> int:
    return len(ids) if hasattr(ids, "__len__") else 0


def _steps(steps: pd.DataFrame, drafts: pd.DataFrame, cast: Cast, pieces: Sequence[str] | None) -> Iterator[Step]:
    """The steps of one prompt; none when `pieces` do not fit the tokens."""
    if pieces is None or len(pieces) != sum(map(_length, steps["token_ids"])):
        return
    members = list(drafts["drafter"].unique())
    index_of = [cast.names.index(name) for name in members]
    agreed: dict[int, list[tuple[str, int | None]]] = {}
    for step, name, drafted, matched in drafts[["step", "drafter", "num_drafted", "num_matched"]].to_numpy():
        agreed.setdefault(step, []).append((name, int(matched) if drafted else None))
    margins = steps["margins"] if "margins" in steps.columns else [None] * len(steps)
    left, position = iter(pieces), 0
    for step, masks, measured in zip(steps["step"], steps["token_owners"], margins, strict=True):
        owners = tuple(
            tuple(sorted(index for bit, index in enumerate(index_of) if int(mask) >> bit & 1)) for mask in masks
        )
        own = tuple(islice(left, len(owners)))
        known = tuple(map(float, measured)) if _length(measured) == len(owners) else ()
        yield Step(int(step), position, own, owners, tuple(agreed.get(step, ())), known)
        position += len(owners)


def _block(prompt: Mapping[str, Any], steps: pd.DataFrame, told: Sequence[Step], cast: Cast, *, is_open: bool) -> Html:
    question = str(prompt["prompt_text"])
    if len(question) > MAX_PROMPT_CHARS:
        rest = len(question) - MAX_PROMPT_CHARS
        question = f"{question[:MAX_PROMPT_CHARS]} [and {rest:,} more characters]"
    answer = [_step(step, cast) for step in told] if told else str(prompt["text"])
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
        facts.append(f"{number(num_emitted / num_steps, 2)} each")
    own, plain = prompt.get("decode_s"), prompt.get("baseline_decode_s")
    if own and plain and not pd.isna(own) and not pd.isna(plain):
        facts.append(f"{plain / own:.2f}× the speed of plain decoding")
    if prompt.get("is_identical") is False:
        at = prompt.get("fork_at")
        facts.append("differs from the baseline's text" + ("" if at is None or pd.isna(at) else f" at token {at:.0f}"))
    return markup(tag("b", prompt_name(prompt), dir="auto"), tag("span", " · ", " · ".join(facts), class_="faint"))


def prompt_name(prompt: Mapping[str, Any]) -> str:
    return " · ".join(str(prompt[part]) for part in ("run", "prompt_id") if part in prompt)


def _step(step: Step, cast: Cast) -> Html:
    """The accepted run in the winner's colour, what nobody else had underlined (always its end: whoever agrees to a depth
    agrees above it too), and the target's own token.
    """
    accepted, shared = step.num_accepted, sum(len(owners) > 1 for owners in step.owners)
    run: Html | None = None
    if accepted:
        sole = tag("u", *step.pieces[shared:accepted]) if shared < accepted else None
        run = tag("mark", *step.pieces[:shared], sole, class_=winner_class(step.winners))
    return tag("span", run, *step.pieces[accepted:], class_="step", tabindex=0, data_tip=_tip(step, cast))


def _tip(step: Step, cast: Cast) -> str:
    """What is shown of a step under the pointer or the keyboard's focus."""
    names = [cast.names[index] for index in step.winners]
    tokens = f"{step.num_accepted} token{'' if step.num_accepted == 1 else 's'}"
    won = f"won by {names[0]} with {tokens}" if len(names) == 1 else f"a tie of {', '.join(names)} with {tokens}"
    right = [f"{name} {count}" for name, count in step.agreed if count is not None]
    silent = [name for name, count in step.agreed if count is None]
    lines = [
        f"step {step.number}: {won if names else 'the target alone'}",
        f"tokens right: {', '.join(right)}" if right else "",
        f"silent: {', '.join(silent)}" if silent else "",
        *_token_lines(step, cast),
    ]
    return "\n".join(line for line in lines if line)


def _token_lines(step: Step, cast: Cast) -> Iterator[str]:
    """Per token: its number in the text, its margin where measured, the letters of those who proposed it, the piece."""
    letters = [cast.letters_of(owners) or "target" for owners in step.owners]
    width = max(map(len, letters), default=0)
    for index, (piece, by) in enumerate(zip(step.pieces, letters, strict=True)):
        margin = f"  margin {step.margins[index]:5.2f}" if step.margins else ""
        yield f"{step.position + index:4d}{margin}  {by:<{width}}  {piece.translate(_SIGNS)}"
