"""Texts as token ids: the piece of text that each token adds, and where two texts part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pieces:
    """Token ids, as they come, to the piece of text that each of them adds: `shown`, whose texts
    together are the decoded text. A token that ends inside a character adds nothing, and the token
    that completes the character adds all of it. Each decoding starts a few tokens back, because a
    tokenizer may treat a token at the start of a text differently.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.shown: list[str] = []
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._known = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._ids.append(token)
            self.shown.append("")
            text = self._text()
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._show(text)

    def finish(self) -> None:
        """Nothing follows: a text that ends inside a character shows that."""
        if self._known < len(self._ids):
            self._show(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids[self._start :]))

    def _show(self, text: str) -> None:
        before = str(self._tokenizer.decode(self._ids[self._start : self._known]))
        self.shown[-1] = text[len(before) :]
        self._start, self._known = self._known, len(self._ids)


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """One piece per token of a whole text; see `Pieces`."""
    pieces = Pieces(tokenizer)
    pieces.add(token_ids)
    pieces.finish()
    return pieces.shown


def divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (the shorter one's end counts), None
    when they are equal.
    """
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
