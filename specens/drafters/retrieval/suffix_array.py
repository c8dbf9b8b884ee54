"""Where does this stretch of ids occur, and what follows it? A suffix array finds it among millions
of ids in microseconds.

Texts stand one after another, each followed by an id that no text holds, so that neither a match
nor a continuation runs from one text into the next unseen. The suffix array is the index of every
token, sorted by the ids from there to the end (Manber and Myers 1990): all places that begin with
the same ids stand side by side, and two binary searches find them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

NUM_PROBES = 16
"""Places at which a suffix array's order is looked at when it comes from a file."""


def id_type(vocab_size: int) -> np.dtype:
    """The type of an id in `tokens.bin`. It must hold `vocab_size` itself, the end of a text; two
    bytes end at 65535.
    """
    return np.dtype("<u2") if vocab_size < 1 << 16 else np.dtype("<u4")


def place_type(num_ids: int) -> np.dtype:
    """The type of a place in `suffixes.bin`."""
    return np.dtype("<i4") if num_ids < 1 << 31 else np.dtype("<i8")


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Index of every token, sorted by the ids from there to the end. Ids `[n]` below 2**32 ->
    `[n]`.

    Ids are written as big-endian bytes, all of one width, and the bytes' suffixes sorted
    (libdivsufsort, Yuta Mori): big-endian bytes are ordered like the numbers, so the suffixes that
    begin at an id's first byte are in the order of the ids.
    """
    from pydivsufsort import divsufsort

    width = max(1, (int(tokens.max()).bit_length() + 7) // 8)
    as_bytes = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    places = divsufsort(np.ascontiguousarray(as_bytes).reshape(-1))
    return (places[places % width == 0] // width).astype(place_type(len(tokens)))


def sorted_tokens(tokens: np.ndarray, end_id: int) -> np.ndarray:
    """The suffix array without the ends of texts, which are the greatest ids and so stand last."""
    return suffix_array(tokens)[: len(tokens) - int(np.count_nonzero(tokens == end_id))]


def is_sorted(tokens: np.ndarray, suffixes: np.ndarray) -> bool:
    """Are the places in order where we look? Proves nothing, but finds an array made for other
    tokens.
    """
    probes = np.linspace(0, len(suffixes) - 2, min(NUM_PROBES, len(suffixes) - 1)).astype(np.int64)
    pairs = zip(suffixes[probes].tolist(), suffixes[probes + 1].tolist(), strict=True)
    for place, following in pairs:
        if not (0 <= place < len(tokens) and 0 <= following < len(tokens) and place != following):
            return False
        first, second = (tokens[begin : begin + NUM_PROBES] for begin in (place, following))
        if first.tolist() > second.tolist():
            return False
    return len(suffixes) > 1 or int(suffixes[0]) == 0


PIVOTS, PIVOT_TOKENS = 1024, 16
"""Every search begins among the same places: so many are kept in memory, with so many ids each."""


class Match(NamedTuple):
    """The last `length` ids of a context, found at `suffixes[begin:end]`."""

    length: int
    begin: int
    end: int

    @property
    def num_places(self) -> int:
        return self.end - self.begin


class SuffixIndex:
    """Searchable texts: `tokens` `[num_ids]`, where every text ends with `end_id`, and `suffixes`
    `[num_tokens]`, their suffix array without the ends of texts. Never changes, so that any number
    of readers may share it.
    """

    def __init__(self, tokens: np.ndarray, suffixes: np.ndarray, end_id: int) -> None:
        self.tokens, self.suffixes, self.end_id = tokens, suffixes, end_id
        # A number is read through a memoryview several times faster than through an array, and a
        # plain array takes slices faster than np.memmap does. Neither copies anything.
        self._ids, self._places = np.asarray(tokens).data, np.asarray(suffixes).data
        pivots = np.linspace(0, len(suffixes) - 1, PIVOTS).astype(np.int64)
        self._pivots_at = np.unique(pivots).tolist()
        self._pivots = [self._read(index, PIVOT_TOKENS) for index in self._pivots_at]

    @classmethod
    def of(cls, tokens: np.ndarray, end_id: int) -> SuffixIndex:
        """Sorts the tokens in memory."""
        return cls(tokens, sorted_tokens(tokens, end_id), end_id)

    def find(self, pattern: Sequence[int]) -> range:
        """Indices into `suffixes` of all places that begin with `pattern`; empty if there is none,
        and of an end of text.
        """
        wanted = list(pattern)
        begin = self._begin(wanted) if wanted and max(wanted) < self.end_id else None
        return range(0) if begin is None else range(begin, self._end(wanted))

    def matches(self, context_ids: Sequence[int], least: int, most: int, count: int) -> list[Match]:
        """The longest end of a context that occurs, of `least` to `most` ids, then one of half its
        length, a quarter, and so on: at most `count`, each found at more places than the one before
        (the same places would have the same continuations).
        """
        ids = list(context_ids[-most:])
        ends = [index for index, token in enumerate(ids) if token >= self.end_id]
        ids = ids[ends[-1] + 1 :] if ends else ids
        begins: dict[int, int] = {}

        def occurs(length: int) -> bool:
            begin = self._begin(ids[-length:])
            if begin is not None:
                begins[length] = begin
            return begin is not None

        found: list[Match] = []
        length = _longest(occurs, least, len(ids))
        while length >= least and len(found) < count:
            if length in begins or occurs(length):
                match = Match(length, begins[length], self._end(ids[-length:]))
                if not found or match.num_places > found[-1].num_places:
                    found.append(match)
            length = max(length // 2, least) if length > least else 0
        return found

    def continuations(
        self, matches: Sequence[Match], depth: int, most: int
    ) -> tuple[list[list[int]], list[int]]:
        """What follows matches, at no more than `most` places of each, spread evenly over all of
        its places: the columns `[depth, rows]`, in which the rows of one match stand together and
        are sorted, and the number of rows of each match. What stands after the end of a text is
        another text; after the last one its end is repeated.
        """
        counts = [min(match.num_places, most) for match in matches]
        spread = [
            m.begin + np.arange(n) * m.num_places // n for m, n in zip(matches, counts, strict=True)
        ]
        places = np.asarray(self.suffixes)[np.concatenate(spread)].astype(np.int64)
        places += np.repeat([match.length for match in matches], counts)
        columns = np.arange(depth)[:, None] + places
        return np.asarray(self.tokens).take(columns, mode="clip").tolist(), counts

    def _read(self, index: int, length: int) -> list[int]:
        """The first `length` ids from a place on (fewer at the end of everything)."""
        place = self._places[index]
        return self._ids[place : place + length].tolist()

    def _lower(self, pattern: list[int]) -> int:
        """The first index of a place whose ids are `pattern` or stand after it in the order."""
        ids, length = self._ids, len(pattern)
        low, high = 0, len(self._places)
        if length <= PIVOT_TOKENS:
            pivot = bisect_left(self._pivots, pattern)
            low = self._pivots_at[pivot - 1] + 1 if pivot else 0
            high = self._pivots_at[pivot] if pivot < len(self._pivots) else high
        return bisect_left(
            self._places, pattern, low, high, key=lambda place: ids[place : place + length].tolist()
        )

    def _begin(self, pattern: list[int]) -> int | None:
        """The first index of a place that begins with `pattern`, None if there is no such place."""
        index = self._lower(pattern)
        exists = index < len(self._places) and self._read(index, len(pattern)) == pattern
        return index if exists else None

    def _end(self, pattern: list[int]) -> int:
        """One past the last index of a place that begins with `pattern`."""
        return self._lower([*pattern[:-1], pattern[-1] + 1])


def _longest(occurs: Callable[[int], bool], least: int, most: int) -> int:
    """The greatest length from `least` to `most` that occurs, `least - 1` if none does. An end of a
    context occurs wherever a longer one does, so doubling and halving finds it; most are short.
    """
    length, missing = least - 1, most + 1
    while length + 1 < missing:
        longer = min(max(2 * length, least), most) if missing > most else (length + missing) // 2
        if occurs(longer):
            length = longer
        else:
            missing = longer
    return length
