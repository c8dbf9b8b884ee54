"""Retrieval: what followed in other texts where they read like this one? Asks a datastore of text
that was written before.

The idea is that of REST (He et al. 2023, arXiv 2311.08252): the longest end of the context that
occurs in the datastore is looked up, and what followed it becomes a tree. Here shorter matches have
a say too, and nodes are ranked by an estimated probability instead of a count alone.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specens.decoding.generation import eos_ids
from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan
from specens.drafters.retrieval.datastore import HEADER, MAKE, Datastore, Header
from specens.drafters.retrieval.suffix_array import SuffixIndex, id_type
from specens.drafters.trained.weights import SHIPPED
from specens.errors import UserError, check_count, check_flag
from specens.models.load import tokenizer_fingerprint
from specens.records.files import cache_dir

NUM_MATCHES = 2
"""Matches of different lengths that are mixed: the longest, and one of half its length, found at
more places.
"""

TRUST = 40.0
"""n places that match L tokens get L n / (L n + TRUST) of the weight that a longer match left.
(Without: what was seen once after a long match would decide alone.)
"""

DOUBT = 6.0
"""If n places of a match of L tokens reach a node, a child with which c of them go on has
probability L c / (L n + DOUBT). (Without: a place that stands alone would be sure of everything it
says, however deep.)
"""

GROWTH = 8
"""Texts of the run are sorted in when they are an eighth of those already in, so that sorting stays
cheap per text.
"""


class WeightedMatch(NamedTuple):
    """What one match of `length` tokens says at a node: its part of the node's probability, and
    which of the rows of its continuations agree with the path to the node, `begin` to `end`.
    """

    length: int
    weight: float
    begin: int
    end: int


class Retrieval:
    """Continuations of the context's longest match in a datastore, and of shorter matches, as a
    tree of its most probable nodes.

    `datastore` is a folder (see specens.drafters.retrieval.datastore); None is the one that comes
    with the package for the target's tokenizer. A target without a tokenizer needs the folder
    named, and the caller answers for the ids. The end of the context is looked up by its last
    `max_match` to `min_match` tokens; of each match at most `max_continuations` places are read,
    spread evenly over all. Nothing is drafted after the end of a text.

    The same context gets the same proposal whatever came before, unless `grow` is on: then the
    texts of this run, prompts and answers, are looked up too once they are finished, so results
    depend on the order of prompts. (A prompt that comes twice in a row teaches nothing the first
    time: the answer would be known beforehand. So a warm-up leaves no trace.)
    """

    def __init__(
        self,
        datastore: str | Path | None = None,
        num_draft_tokens: int = 8,
        num_draft_nodes: int = 16,
        max_match: int = 16,
        min_match: int = 1,
        max_continuations: int = 64,
        grow: bool = False,
    ) -> None:
        check_count("retrieval.num_draft_tokens", num_draft_tokens)
        check_count("retrieval.num_draft_nodes", num_draft_nodes)
        check_count("retrieval.min_match", min_match)
        check_count("retrieval.max_match", max_match)
        check_count("retrieval.max_continuations", max_continuations)
        if min_match > max_match:
            raise UserError(
                f"retrieval.min_match={min_match} is above retrieval.max_match={max_match}: give a "
                "smaller one"
            )
        check_flag("retrieval.grow", grow)
        if datastore is not None and (not isinstance(datastore, str | Path) or not str(datastore)):
            raise UserError(
                f"retrieval.datastore={datastore!r}: give a folder, or null for the one of the "
                "target's tokenizer"
            )
        self.members = (Member("retrieval", num_draft_tokens, num_draft_nodes),)
        self.grow = grow
        self._folder, self._least, self._most = datastore, min_match, max_match
        self._max_continuations = max_continuations
        self._datastore: Datastore | None = None
        self._grown = GrownTexts(0)

    def bind(self, target: Target) -> None:
        tokenizer = target.tokenizer
        fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        folder = shipped(fingerprint) if self._folder is None else self._folder
        self._datastore = Datastore.open(folder, fingerprint, cache_dir() / "datastores")
        # Padded embeddings: one tokenizer, other lengths of a logits row. Ids that the target lacks
        # are never proposed.
        self._num_ids = min(self._datastore.header.vocab_size, target.vocab_size)
        config = getattr(target.model, "generation_config", None)
        self._eos_ids = frozenset(eos_ids(config) if config is not None else ())
        self._grown = GrownTexts(target.vocab_size)

    def facts(self) -> dict[str, Any]:
        if self._datastore is None:
            return {}
        header = self._datastore.header
        return {
            "folder": str(self._datastore.folder),
            "checksum": header.checksum,
            "source": header.source,
            "num_tokens": header.num_tokens,
            "num_texts": header.num_texts,
            "grow": self.grow,
        }

    def begin(self, prompt_ids: Sequence[int]) -> RetrievalProposer:
        return RetrievalProposer(self, self._grown.begin(prompt_ids) if self.grow else None)

    def lookup(self, context_ids: Sequence[int], plan: Plan) -> Draft:
        assert self._datastore is not None, "bind comes first"
        if plan.num_tokens < 1 or plan.num_nodes < 1:
            return Draft()
        columns: list[list[int]] = []
        found: list[tuple[int, int, int]] = []  # length of a match, its rows' begin and end
        for index in (self._grown.index, self._datastore.index):
            if index is None:
                continue
            matches = index.matches(context_ids, self._least, self._most, NUM_MATCHES)
            if matches:
                most = self._max_continuations
                more, counts = index.continuations(matches, plan.num_tokens, most)
                ends = list(accumulate(counts, initial=len(columns[0]) if columns else 0))
                lengths = (match.length for match in matches)
                found += zip(lengths, ends, ends[1:], strict=False)
                joined = [old + new for old, new in zip(columns, more, strict=False)]
                columns = joined if columns else more
        return likeliest(columns, weigh(found), plan, self._num_ids, self._eos_ids)


class RetrievalProposer:
    """One sequence: nothing but the text that grows, if the run's texts are looked up too."""

    def __init__(self, drafter: Retrieval, text: GrowingText | None) -> None:
        self._drafter, self._text = drafter, text

    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        return self._drafter.lookup(context_ids, plan)

    def observe(self, commit: Commit) -> None:
        if self._text is not None:
            self._text.ids += commit.token_ids

    def close(self) -> None:
        if self._text is not None:
            self._text.is_done = True


def shipped(fingerprint: str | None) -> Path:
    """The datastore that comes with the package for a tokenizer, `weights/<name>/datastore`; the
    first by name of several.
    """
    if fingerprint is None:
        raise UserError(
            "retrieval.datastore is not set and the target has no tokenizer to choose one by: give "
            "a folder"
        )
    for path in sorted(SHIPPED.glob(f"*/datastore/{HEADER}")):
        if Header.read(path.parent).tokenizer == fingerprint:
            return path.parent
    raise UserError(
        "retrieval.datastore is not set and none comes with the package for the target's tokenizer "
        f"({fingerprint}): give a folder; {MAKE}, or use drafter=untrained"
    )


def weigh(found: Sequence[tuple[int, int, int]]) -> list[WeightedMatch]:
    """Matches `(length, begin, end)` as matches, the longest first: each gets its share of what
    those before it left, the last all of it. Of two as long the first stays first.
    """
    matches: list[WeightedMatch] = []
    left = 1.0
    for place, (length, begin, end) in enumerate(
        sorted(found, key=lambda match: -match[0]), start=1
    ):
        witnesses = length * (end - begin)
        weight = left * witnesses / (witnesses + TRUST) if place < len(found) else left
        matches.append(WeightedMatch(length, weight, begin, end))
        left -= weight
    return matches


def likeliest(
    columns: Sequence[list[int]],
    matches: Sequence[WeightedMatch],
    plan: Plan,
    num_ids: int,
    eos_ids: Collection[int],
) -> Draft:
    """The plan's most probable nodes, best first. A node's probability is the sum of its matches'
    weights; a child gets of each its share of the rows, less DOUBT. `columns[d]` holds the rows'
    tokens at depth d + 1; ids from `num_ids` on are ends of texts. Nothing follows an end. (Written
    for speed: this is most of the time of a proposal.)
    """
    token_ids: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    order = count()  # of two equally probable nodes the one that was found first
    heap: list[tuple[float, int, int, int, int, Sequence[WeightedMatch]]] = []

    def add_children(parent: int, depth: int, matches: Sequence[WeightedMatch]) -> None:
        chances: dict[int, float] = {}
        for length, weight, begin, end in matches:
            row_weight = weight * length / (length * (end - begin) + DOUBT)
            for token in columns[depth][begin:end]:
                chances[token] = chances.get(token, 0.0) + row_weight
        likely = [(token, chance) for token, chance in chances.items() if token < num_ids]
        if len(likely) > plan.num_nodes:  # the others cannot come in
            likely = sorted(likely, key=itemgetter(1), reverse=True)[: plan.num_nodes]
        for token, chance in likely:
            heapq.heappush(heap, (-chance, next(order), token, parent, depth, matches))

    add_children(ROOT, 0, matches)
    while heap:
        chance, _, token, parent, depth, matches = heapq.heappop(heap)
        token_ids.append(token)
        parents.append(parent)
        confidences.append(-chance)
        if len(token_ids) == plan.num_nodes:
            break
        if depth + 1 < plan.num_tokens and token not in eos_ids:
            deeper: list[WeightedMatch] = []
            # rows are sorted: those that go on with the token stand together
            for length, weight, begin, end in matches:
                low = bisect_left(columns[depth], token, begin, end)
                high = bisect_right(columns[depth], token, low, end)
                if high > low:
                    share = length * (high - low) / (length * (end - begin) + DOUBT)
                    deeper.append(WeightedMatch(length, weight * share, low, high))
            add_children(len(token_ids) - 1, depth + 1, deeper)
    return Draft(tuple(token_ids), tuple(parents), confidences=tuple(confidences))


@dataclass(eq=False)
class GrowingText:
    """A prompt and what was emitted after it so far."""

    prompt: tuple[int, ...]
    ids: list[int]
    is_done: bool = False


class GrownTexts:
    """The finished texts of this run, searchable; sorted in when the next sequence begins."""

    def __init__(self, vocab_size: int) -> None:
        self.index: SuffixIndex | None = None
        self._end_id = vocab_size
        self._sorted: list[int] = []  # ids of finished texts, each with its end
        self._waiting: list[int] = []
        self._open: list[GrowingText] = []
        self._lock = threading.Lock()

    def begin(self, prompt_ids: Sequence[int]) -> GrowingText:
        """A new sequence. The texts that have ended are finished, unless the new prompt is their
        own again, or its beginning (which is what steps are timed on when budgets want to know
        their cost).
        """
        text = GrowingText(tuple(prompt_ids), list(prompt_ids))
        with self._lock:
            done = [one for one in self._open if one.is_done]
            self._open = [one for one in self._open if not one.is_done] + [text]
            for one in done:
                is_repeated = one.prompt == text.prompt[: len(one.prompt)]
                # In a conversation the answer is in the next prompt.
                is_answered = len(one.ids) > len(one.prompt)
                is_answered = is_answered and one.ids == text.ids[: len(one.ids)]
                if is_answered or not is_repeated:
                    self._waiting += [*one.ids, self._end_id]
            if self._waiting and GROWTH * len(self._waiting) >= len(self._sorted):
                self._sorted += self._waiting
                self._waiting = []
                ids = np.array(self._sorted, dtype=id_type(self._end_id))
                self.index = SuffixIndex.of(ids, self._end_id)
        return text
