"""Texts as token ids: the piece of text that each token adds, and where two texts part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """One piece per token; together they are the decoded text. A token that ends inside a character adds nothing, and the
    token that completes the character adds all of it. Each decoding starts a few tokens back, because a tokenizer may
    treat a token at the start of a text differently.
    """
    pieces: list[str] = []
    start = shown = 0
    for end in range(1, len(token_ids) + 1):
        before = str(tokenizer.decode(list(token_ids[start:shown])))
        text = str(tokenizer.decode(list(token_ids[start:end])))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, shown = shown, end
    return pieces


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (the shorter one's end counts), None when they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
