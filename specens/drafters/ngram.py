"""n-gram lookup: what followed the last time the text looked like this? Searches the prompt and the
generated text.

The idea is prompt lookup decoding (Saxena 2023) with an index that grows by one token at a time, so
that a proposal costs the same at any context length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan
from specens.errors import UserError, check_count

MAX_MATCHES = 64
"""Matches looked at in one proposal: in a text that repeats itself, thousands of matches continue
alike.
"""

HIT_RATES = (0.2, 0.55, 0.65, 0.8, 0.85, 0.88, 0.9, 0.92)
"""How often the next token agrees too, after so many that did (the last: or more). Counted, and
rounded, on a thousand greedy answers of SmolLM2-135M-Instruct; the budget calibrates it by text.
"""


def hit_rate(matched: int) -> float:
    """How often the next token is the same after `matched` tokens that were."""
    return HIT_RATES[min(matched, len(HIT_RATES)) - 1]


class NGram:
    """Longest match first, then the newest; up to `num_continuations` different continuations, hung
    together as a tree.

    Suffixes of `max_ngram` down to `min_ngram` tokens are looked up. A continuation that reaches
    the end of the text goes on with itself, so a text with period p is continued with period p.
    """

    def __init__(
        self,
        num_draft_tokens: int = 10,
        num_continuations: int = 1,
        num_draft_nodes: int | None = None,
        max_ngram: int = 4,
        min_ngram: int = 1,
    ) -> None:
        check_count("ngram.num_draft_tokens", num_draft_tokens)
        check_count("ngram.num_continuations", num_continuations)
        check_count("ngram.min_ngram", min_ngram)
        check_count("ngram.max_ngram", max_ngram)
        if min_ngram > max_ngram:
            raise UserError(
                f"ngram.min_ngram={min_ngram} is above ngram.max_ngram={max_ngram}: give a smaller "
                "one"
            )
        if num_draft_nodes is not None:
            check_count("ngram.num_draft_nodes", num_draft_nodes)
        self.num_continuations = num_continuations
        self.lengths = range(max_ngram, min_ngram - 1, -1)
        most = num_draft_nodes or num_draft_tokens * num_continuations
        self.members = (Member("ngram", num_draft_tokens, most),)

    def bind(self, target: Target) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> NGramProposer:
        return NGramProposer(self.lengths, self.num_continuations, prompt_ids)


class NGramProposer:
    """The index of one text."""

    def __init__(self, lengths: range, num_continuations: int, prompt_ids: Sequence[int]) -> None:
        self._lengths, self._num_continuations = lengths, num_continuations
        self._ids: list[int] = []
        # n-gram -> where it ended, oldest first. An n-gram is indexed once a token follows it: it
        # then has a continuation.
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._append(prompt_ids)

    def _append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            end = len(self._ids)
            for length in self._lengths:
                if length <= end:
                    self._ends.setdefault(tuple(self._ids[end - length :]), []).append(end)
            self._ids.append(token)

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        children: dict[tuple[int, int], int] = {}
        num_continuations = 0
        for begin, matched in islice(self._matches(), MAX_MATCHES):
            if num_continuations == self._num_continuations or len(token_ids) >= plan.num_nodes:
                break
            before, node = len(token_ids), ROOT
            confidence = 1.0
            continuation = self._continuation(begin, plan.num_tokens)
            for depth, token in enumerate(continuation, start=matched):
                confidence *= hit_rate(depth)
                child = children.get((node, token))
                if child is None:
                    if len(token_ids) >= plan.num_nodes:
                        break
                    child = children[(node, token)] = len(token_ids)
                    token_ids.append(token)
                    parents.append(node)
                    confidences.append(confidence)
                node = child
            num_continuations += len(token_ids) > before
        return Draft(tuple(token_ids), tuple(parents), confidences=tuple(confidences))

    def _matches(self) -> Iterator[tuple[int, int]]:
        """Positions of the tokens that followed an earlier copy of the text's end, and the copy's
        length.
        """
        seen: set[int] = set()
        for length in self._lengths:
            if length > len(self._ids):
                continue
            for begin in reversed(self._ends.get(tuple(self._ids[-length:]), ())):
                if begin not in seen:
                    seen.add(begin)
                    yield begin, length

    def _continuation(self, begin: int, length: int) -> Iterator[int]:
        period = len(self._ids) - begin
        return (self._ids[begin + i % period] for i in range(length))

    def observe(self, commit: Commit) -> None:
        self._append(commit.token_ids)
