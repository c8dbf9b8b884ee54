"""The retrieval drafter: its suffix array, its files, its proposals, and the stage that makes a
datastore.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import decode, plain_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specens.decoding.drafter import close
from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Plan, Share
from specens.drafters.retrieval import datastore, retrieval
from specens.drafters.retrieval.datastore import HEADER, SUFFIXES, TOKENS, Datastore, build
from specens.drafters.retrieval.retrieval import DOUBT, NUM_MATCHES, TRUST, Retrieval
from specens.drafters.retrieval.suffix_array import SuffixIndex, id_type, is_sorted, sorted_tokens
from specens.errors import UserError
from specens.models.load import tokenizer_fingerprint
from specens.models.tiny import random_model
from specens.train.datastore import DatastoreStage

Texts = list[list[int]]


def index_of(texts: Texts, vocab_size: int) -> SuffixIndex:
    tokens = [token for text in texts for token in (*text, vocab_size)]
    return SuffixIndex.of(np.array(tokens, dtype=id_type(vocab_size)), vocab_size)


def write(folder: Path, texts, **options) -> Path:
    given = {"vocab_size": 128, "fingerprint": "theirs", "source": "a test", **options}
    build(texts, folder, **given)
    return folder


def bound(target: Target, folder: Path, **options) -> Retrieval:
    drafter = Retrieval(folder, **options)
    drafter.bind(target)
    return drafter


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def plan(depth: int = 8, nodes: int = 16) -> Plan:
    return Plan.of((Share(depth, nodes),))


def propose(drafter: Retrieval, context, depth: int = 8, nodes: int = 16) -> list[tuple[int, ...]]:
    """What it proposes in the middle of no sequence: lookups change nothing."""
    return paths(drafter.lookup(tuple(context), plan(depth, nodes)))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tiny) -> Target:
    return Target(tiny)


# Order and search


ALPHABETS = {
    "small": [0, 1, 2],
    "bytes": [0, 1, 254, 255],
    "two bytes": [0, 255, 256, 65_534],
    "above 65535": [1, 65_535, 65_536, 70_000],
    "above 2**24": [0, 65_536, 1 << 24, (1 << 24) + 256],
    "all of four bytes": [0, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 2],
}


@st.composite
def some_texts(draw) -> tuple[Texts, list[int]]:
    """Texts of few different ids, so that much repeats, and those ids."""
    alphabet = ALPHABETS[draw(st.sampled_from(sorted(ALPHABETS)))]
    text = st.lists(st.sampled_from(alphabet), min_size=1, max_size=30)
    return draw(st.lists(text, min_size=1, max_size=6)), alphabet


@settings(max_examples=150, deadline=None)
@given(some_texts())
def test_suffixes_are_in_the_order_of_the_ids(drawn):
    texts, alphabet = drawn
    index = index_of(texts, alphabet[-1] + 1)
    flat = index.tokens.tolist()
    places = (place for place in range(len(flat)) if flat[place] != index.end_id)
    assert index.suffixes.tolist() == sorted(places, key=lambda place: flat[place:])
    assert is_sorted(index.tokens, index.suffixes)


@settings(max_examples=150, deadline=None)
@given(some_texts(), st.data())
def test_all_places_of_a_pattern_are_found_and_none_across_an_end(drawn, data):
    texts, alphabet = drawn
    index = index_of(texts, alphabet[-1] + 1)
    flat = index.tokens.tolist()
    pattern = data.draw(st.lists(st.sampled_from([*alphabet, index.end_id]), max_size=20))
    found = sorted(index.suffixes[place] for place in index.find(pattern))
    inside = bool(pattern) and index.end_id not in pattern
    assert found == [
        p for p in range(len(flat)) if inside and flat[p : p + len(pattern)] == pattern
    ]


def places_of(texts: Texts, pattern: list[int]) -> list[list[int]]:
    """What follows a pattern in texts, by looking everywhere: one continuation per place, to the
    end of its text.
    """
    size = len(pattern)
    starts = ((text, i) for text in texts for i in range(len(text) - size + 1))
    return [text[i + size :] for text, i in starts if text[i : i + size] == pattern]


@settings(max_examples=150, deadline=None)
@given(some_texts(), st.data())
def test_the_longest_match_is_the_longest_and_the_next_is_shorter_with_more_places(drawn, data):
    texts, alphabet = drawn
    index = index_of(texts, alphabet[-1] + 1)
    context = data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=40))
    least, most = sorted((data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))))
    matches = index.matches(context, least, most, 3)
    tried = range(least, min(most, len(context)) + 1)
    lengths = [length for length in tried if places_of(texts, context[-length:])]
    assert [m.length for m in matches[:1]] == lengths[-1:]
    for match in matches:
        assert match.num_places == len(places_of(texts, context[-match.length :]))
    counts = [match.num_places for match in matches]
    assert counts == sorted(set(counts)) and len(counts) <= 3


def test_a_context_with_an_id_that_ends_texts_is_matched_behind_it_only():
    index = index_of([[5, 6, 7], [5, 6, 8]], 10)
    assert [m.length for m in index.matches([5, 10, 6], 1, 8, 2)] == [1]
    assert index.matches([5, 6, 10], 1, 8, 2) == []
    assert index.matches([9, 11], 1, 8, 2) == []


def naive_chances(
    texts: Texts, context: list[int], least: int, most: int, depth: int
) -> dict[tuple[int, ...], float]:
    """The probability of every path, counted over all places: the definition, written a second
    time.
    """
    tried = range(least, min(most, len(context)) + 1)
    lengths = [length for length in tried if places_of(texts, context[-length:])]
    matches: list[tuple[int, list[list[int]]]] = []
    length = max(lengths, default=0)
    while length and len(matches) < NUM_MATCHES:
        rows = places_of(texts, context[-length:])
        if not matches or len(rows) > len(matches[-1][1]):
            matches.append((length, rows))
        length = 0 if length == least else max(length // 2, least)
    chances: Counter[tuple[int, ...]] = Counter()
    left = 1.0
    for i, (length, rows) in enumerate(matches):
        witnesses = length * len(rows)
        weight = left if i == len(matches) - 1 else left * witnesses / (witnesses + TRUST)
        left -= weight
        shares = {(): weight}
        for d in range(1, depth + 1):
            for path, share in list(shares.items()):
                if len(path) == d - 1:
                    here = [row for row in rows if tuple(row[: d - 1]) == path]
                    counts = Counter(row[d - 1] for row in here if len(row) >= d)
                    part = share * length / (length * len(here) + DOUBT)
                    shares |= {(*path, token): part * count for token, count in counts.items()}
        for path, share in shares.items():
            chances[path] += share
    del chances[()]
    return chances


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_proposal_is_the_most_probable_paths_best_first(data):
    ids = st.integers(0, 3)
    texts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=25), min_size=1, max_size=5))
    context = data.draw(st.lists(ids, min_size=1, max_size=12))
    depth, nodes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    index = index_of(texts, 4)
    matches = index.matches(context, 1, 8, NUM_MATCHES)
    chances = naive_chances(texts, context, 1, 8, depth)
    if not matches:
        assert not chances
        return
    columns, counts = index.continuations(matches, depth, 10**6)
    found, at = [], 0
    for match, count in zip(matches, counts, strict=True):
        found.append((match.length, at, at + count))
        at += count
    weighed = retrieval.weigh(found)
    proposed = paths(retrieval.likeliest(columns, weighed, plan(depth, nodes), 4, ()))
    best = sorted(chances.values(), reverse=True)[:nodes]
    assert [chances[path] for path in proposed] == pytest.approx(best)
    assert len(set(proposed)) == len(proposed)


def test_a_frequent_match_is_sampled_evenly(target, tmp_path):
    texts = [[7, 20 + (i % 4 == 0) + (i % 100 == 0), i % 50] for i in range(1000)]
    drafter = bound(target, write(tmp_path / "store", texts), max_continuations=40)
    first, second = [path for path in propose(drafter, [7], nodes=60) if len(path) == 1][:2]
    assert (first, second) == ((20,), (21,))


# Files


def test_b28_ids_above_65535_and_added_tokens_come_back_as_they_were(tmp_path):
    texts = [[1, 70_000, 2], [1 << 20, 65_535, 65_536, 4464], [0]]
    store = Datastore.open(write(tmp_path / "store", texts, vocab_size=(1 << 20) + 1), "theirs")
    flat = store.index.tokens.tolist()
    ends = [i for i, token in enumerate(flat) if token == store.header.vocab_size]
    begins = [0, *(end + 1 for end in ends)]
    assert [flat[a:b] for a, b in zip(begins, ends, strict=False)] == texts
    header = store.header
    assert (header.id_bytes, header.num_tokens, header.num_texts) == (4, 8, 3)
    assert len(store.index.find([70_000, 2])) == 1 and not store.index.find([4464, 2])
    columns, _ = store.index.continuations(store.index.matches([1], 1, 8, 1), 2, 8)
    assert columns == [[70_000], [2]]


@pytest.mark.parametrize(("vocab_size", "id_bytes"), [(65_535, 2), (65_536, 4), (65_537, 4)])
def test_the_width_of_an_id_leaves_room_for_the_end_of_a_text(tmp_path, vocab_size, id_bytes):
    last = vocab_size - 1
    folder = write(tmp_path / "store", [[last, 0], [last, 5]], vocab_size=vocab_size)
    store = Datastore.open(folder, None)
    assert store.header.id_bytes == id_bytes
    assert store.index.tokens.tolist() == [last, 0, vocab_size, last, 5, vocab_size]


def test_an_open_datastore_is_mapped_and_read_only(tmp_path):
    rng = np.random.default_rng(0)
    folder = write(tmp_path / "store", [rng.integers(0, 128, 1000) for _ in range(50)])
    whole = Datastore.open(folder, None)
    made = Datastore.open(without_suffixes(folder), None, tmp_path / "made")
    for index in (whole.index, made.index):
        for array in (index.tokens, index.suffixes):
            assert isinstance(array, np.memmap) and array.mode == "r" and array.offset == 0
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def without_suffixes(folder: Path) -> Path:
    (folder / SUFFIXES).unlink()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def holding(content: bytes):
    return lambda path: path.write_bytes(content)


DAMAGES = {
    "tokens cut": (TOKENS, cut, TOKENS),
    "tokens empty": (TOKENS, empty, TOKENS),
    "tokens gone": (TOKENS, Path.unlink, TOKENS),
    "tokens changed": (TOKENS, change, TOKENS),
    "suffixes cut": (SUFFIXES, cut, SUFFIXES),
    "suffixes empty": (SUFFIXES, empty, SUFFIXES),
    "suffixes foreign": (SUFFIXES, lambda p: p.write_bytes(p.read_bytes()[::-1]), SUFFIXES),
    "suffixes out of range": (
        SUFFIXES,
        lambda p: p.write_bytes(b"\xff" * p.stat().st_size),
        SUFFIXES,
    ),
    "header gone": (HEADER, Path.unlink, HEADER),
    "header garbage": (HEADER, holding(b"\x80\x00garbage"), HEADER),
    "header of another kind": (HEADER, holding(b'{"a": 1}'), HEADER),
    "header no object": (HEADER, holding(b"[1]"), HEADER),
    "header of a later format": (
        HEADER,
        lambda path: edit(path, format="specens datastore 9"),
        "specens datastore 1",
    ),
    "header with another width": (HEADER, lambda path: edit(path, id_bytes=4), "id_bytes"),
    "header with another count": (HEADER, lambda path: edit(path, num_tokens=77), TOKENS),
    "header with no count": (HEADER, lambda path: edit(path, num_texts=True), "num_texts"),
    "header with a negative count": (HEADER, lambda path: edit(path, num_tokens=-5), "num_tokens"),
    "header with one entry more": (HEADER, lambda path: edit(path, colour="red"), "colour"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_b28_a_damaged_file_is_refused_with_its_path_in_one_line(tmp_path, target, damage):
    folder = write(tmp_path / "store", [[5, 6, 7, 8], [9, 9, 9, 5, 6]])
    name, spoil, word = DAMAGES[damage]
    spoil(folder / name)
    for attempt in (lambda: Datastore.open(folder, "theirs"), lambda: bound(target, folder)):
        with pytest.raises(UserError) as error:
            attempt()
        line = str(error.value)
        assert str(folder) in line and word in line and "\n" not in line


def test_b28_another_tokenizer_an_empty_folder_and_none_at_all_are_refused(tmp_path):
    folder = write(tmp_path / "store", [[5, 6]])
    with pytest.raises(UserError, match=rf"{folder}.*theirs.*ours"):
        Datastore.open(folder, "ours")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", folder / HEADER):
        with pytest.raises(UserError, match=rf"{path}.*stage=datastore"):
            Datastore.open(path, "ours")


def test_a_large_file_is_hashed_only_when_asked(tmp_path, monkeypatch):
    folder = write(tmp_path / "store", [[5, 6, 7, 8]])
    monkeypatch.setattr(datastore, "HASHED_BYTES", 4)
    change(folder / TOKENS)
    assert Datastore.open(folder, None).index.tokens[0] == 4
    with pytest.raises(UserError, match=TOKENS):
        Datastore.open(folder, None, verify=True)


def test_the_suffix_array_is_made_once_and_kept_by_the_hash_of_the_tokens(tmp_path, monkeypatch):
    folder = write(tmp_path / "store", [[5, 6, 7, 5, 6, 8], [5, 6]], with_suffixes=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted([HEADER, TOKENS])
    cache = tmp_path / "made"
    first = Datastore.open(folder, None, cache)
    monkeypatch.setattr(datastore, "sorted_tokens", None)  # making it again would fail
    again = Datastore.open(folder, None, cache)
    for store in (first, again):
        assert store.index.suffixes.tolist() == [0, 3, 7, 1, 4, 8, 2, 5]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [first.header.checksum]
    cut(cache / first.header.checksum / SUFFIXES)
    with pytest.raises(UserError, match=str(cache)):
        Datastore.open(folder, None, cache)


def test_without_a_cache_folder_the_suffix_array_is_kept_in_memory(tmp_path):
    folder = write(tmp_path / "store", [[5, 6, 7]], with_suffixes=False)
    assert Datastore.open(folder, None).index.suffixes.tolist() == [0, 1, 2]
    assert not (folder / SUFFIXES).exists()


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    folder = write(tmp_path / "store", [[5, 6, 7]], with_suffixes=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        Datastore.open(folder, None, tmp_path / "file")


SCRIPT = """
import sys, time
from pathlib import Path
from specens.drafters.retrieval import datastore
made = 0
def counting(tokens, end_id, make=datastore.sorted_tokens):
    global made
    made += 1
    time.sleep(1)
    return make(tokens, end_id)
datastore.sorted_tokens = counting
Path(sys.argv[1] + "-ready-" + sys.argv[3]).touch()
while len(list(Path(sys.argv[1]).parent.glob("*-ready-*"))) < 2:
    time.sleep(0.01)
store = datastore.Datastore.open(sys.argv[1], "theirs", Path(sys.argv[2]))
print(made, list(store.index.find([5, 6])))
"""


def test_two_processes_open_one_datastore_at_once_and_one_makes_the_suffix_array(tmp_path):
    folder = write(tmp_path / "store", [[5, 6, 7, 5, 6, 8], [5, 6]], with_suffixes=False)
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "made")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(i)], **pipes) for i in (0, 1)]
    printed = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert sorted(out.strip() for out, _ in printed) == ["0 [0, 1, 2]", "1 [0, 1, 2]"]


def test_a_build_that_stops_midway_leaves_nothing(tmp_path, monkeypatch):
    def texts():
        yield [5, 6, 7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", texts())
    failing = lambda tokens, end_id: os.fspath(None)  # noqa: E731  # pyright: ignore
    monkeypatch.setattr(datastore, "sorted_tokens", failing)
    with pytest.raises(TypeError):
        write(tmp_path / "store", [[5, 6, 7]])
    assert not list(tmp_path.glob("*store*")) and not list(tmp_path.glob(".*"))


def test_a_folder_is_never_overwritten_and_the_same_texts_need_no_second_build(
    tmp_path, monkeypatch
):
    folder = write(tmp_path / "store", [[5, 6, 7]])
    before = (folder / TOKENS).stat().st_mtime_ns
    monkeypatch.setattr(datastore, "sorted_tokens", None)
    write(folder, [[5, 6, 7]])
    with pytest.raises(UserError, match=rf"{folder}.*other texts"):
        write(folder, [[5, 6, 8]])
    with pytest.raises(UserError, match=rf"{folder}.*other texts"):
        write(folder, [[5, 6, 7]], fingerprint="ours")
    assert (folder / TOKENS).stat().st_mtime_ns == before
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"mine.*no datastore"):
        write(tmp_path / "mine", [[5, 6, 7]])


@pytest.mark.parametrize("texts", [[], [[], []], [[1, 128]], [[-1]], [[1.5]], [["a"]]])
def test_texts_without_ids_or_with_ids_that_the_vocabulary_lacks_are_refused(tmp_path, texts):
    with pytest.raises(UserError, match="datastore: "):
        write(tmp_path / "store", texts)
    assert not (tmp_path / "store").exists()


# Proposals


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """200 random texts over 128 ids."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 128, 300) for _ in range(200)]
    return write(tmp_path_factory.mktemp("library") / "store", texts)


PLANS = [(1, 1), (1, 16), (8, 1), (8, 16), (3, 200), (0, 16), (8, 0), (40, 300)]


@pytest.mark.parametrize(("depth", "nodes"), PLANS)
def test_a_proposal_keeps_to_its_plan_and_is_empty_without_one(target, library, depth, nodes):
    drafter = bound(target, library)
    for last in range(0, 128, 9):
        found = propose(drafter, [3, 5, last], depth, nodes)
        assert len(found) <= nodes and max(map(len, found), default=0) <= depth
        assert bool(found) == (depth > 0 and nodes > 0)


def test_where_nothing_is_found_it_abstains(target, tmp_path):
    drafter = bound(target, write(tmp_path / "store", [[5, 6, 7]]))
    proposer = drafter.begin((1,))
    assert proposer.propose((1, 2, 3), plan(), Sampler()) == Draft()
    # Found, but at the end of its text.
    assert proposer.propose((1, 7), plan(), Sampler()) == Draft()
    shy = bound(target, tmp_path / "store", min_match=2)
    assert propose(shy, [9, 6]) == [] and propose(shy, [5, 6]) == [(7,)]


def test_no_proposal_runs_from_one_text_into_the_next(target, tmp_path):
    texts = [[5, 6], [7, 8, 9], [5, 6, 30], [31, 32]]
    drafter = bound(target, write(tmp_path / "store", texts))
    assert propose(drafter, [5]) == [(6,), (6, 30)]
    assert propose(drafter, [8]) == [(9,)]
    assert propose(drafter, [6]) == [(30,)]
    assert propose(drafter, [32]) == []


def test_nothing_is_proposed_after_an_end_of_sequence(target, tmp_path):
    assert target.model.generation_config.eos_token_id == 1
    drafter = bound(target, write(tmp_path / "store", [[5, 6, 1, 8, 9]]))
    assert propose(drafter, [5]) == [(6,), (6, 1)]
    assert propose(drafter, [1]) == [(8,), (8, 9)]  # the context may well hold one


def test_ids_that_the_target_lacks_are_never_proposed(target, tmp_path):
    """One tokenizer, embeddings padded to different sizes."""
    texts = [[5, 6, 127, 128, 9], [5, 200, 7]]
    drafter = bound(target, write(tmp_path / "store", texts, vocab_size=256))
    assert propose(drafter, [5]) == [(6,), (6, 127)]


def test_a_proposal_depends_on_the_context_alone(target, library):
    rng = np.random.default_rng(1)
    contexts = [rng.integers(0, 128, 20).tolist() for _ in range(30)]
    fresh = [propose(bound(target, library), context) for context in contexts[:5]]
    drafter = bound(target, library)
    for context in reversed(contexts):
        proposer = drafter.begin(context[:10])
        proposer.observe(Commit((), tuple(context[10:])))
        assert paths(proposer.propose(context, plan(), Sampler())) == propose(drafter, context)
    assert [propose(drafter, context) for context in contexts[:5]] == fresh
    assert all(fresh)


def test_growing_learns_finished_texts_of_this_run(target, library):
    drafter = bound(target, library, grow=True)
    prompt, answer = [100, 101, 102, 100, 101, 102], [90, 91, 92, 93, 94, 95]

    def decoded(prompt_ids):
        proposer = drafter.begin(prompt_ids)
        before = paths(proposer.propose(prompt_ids, plan(), Sampler()))
        proposer.observe(Commit((), tuple(answer[:2])))
        proposer.observe(Commit((), tuple(answer[2:])))
        close(proposer)
        return before

    assert (90, 91, 92) not in decoded(prompt)
    assert (90, 91, 92) not in decoded(prompt), "a warm-up must not give the answer away"
    drafter.begin([3, 4, 5])
    assert propose(drafter, [7, *prompt])[0] == (90,)
    assert (90, 91, 92) in propose(drafter, prompt)
    assert (3,) not in propose(drafter, [94, 95]), "nor does a grown text run into the next"
    drafter.bind(target)
    assert (90, 91, 92) not in propose(drafter, prompt), "a new run begins without"
    plain = bound(target, library)
    assert (90, 91, 92) not in propose(plain, prompt)


def test_growing_learns_no_text_of_a_sequence_that_goes_on(target, library):
    """Two sequences at once: each has its own text, and what has not ended is not looked up."""
    drafter = bound(target, library, grow=True)
    prompts = [100, 101, 102, 100, 101, 102], [110, 111, 112, 110, 111, 112]
    answers = (90, 91, 92), (80, 81, 82)
    proposers = [drafter.begin(prompt) for prompt in prompts]
    for answer, proposer in zip(answers, proposers, strict=True):
        proposer.observe(Commit((), answer))
    for index, proposer in enumerate(proposers):
        assert answers[index] not in propose(drafter, prompts[index])
        close(proposer)
        drafter.begin([3, 4, 5])
        assert answers[index] in propose(drafter, prompts[index])


def test_a_target_that_writes_what_the_datastore_holds_takes_fewer_steps(tmp_path):
    model = random_model(vocab_size=128, max_position_embeddings=256, hidden_size=64, seed=3)
    prompts = ([5, 6, 7, 8, 5, 6, 7, 8], [9, 3, 9, 3, 44])
    texts = [[*prompt, *plain_greedy(model, prompt, 24)] for prompt in prompts]
    folder = write(tmp_path / "store", texts)
    for prompt, text in zip(prompts, texts, strict=True):
        for layout in ("tree", "rows"):
            output, steps = decode(model, Retrieval(folder), prompt, 24, layout=layout)
            assert output == text[len(prompt) :]
            assert len(steps) < 12


# Finding the datastore


def test_without_a_folder_the_one_for_the_targets_tokenizer_is_taken(
    tiny, tokenizer, tmp_path, monkeypatch
):
    target, fingerprint = Target(tiny, tokenizer), tokenizer_fingerprint(tokenizer)
    monkeypatch.setattr(retrieval, "SHIPPED", tmp_path / "weights")
    line = rf"retrieval\.datastore.*{fingerprint}.*python -m specens\.train stage=datastore"
    with pytest.raises(UserError, match=line):
        Retrieval().bind(target)
    write(tmp_path / "weights" / "another" / "datastore", [[1, 2]])
    options = {"fingerprint": fingerprint, "with_suffixes": False}
    mine = write(tmp_path / "weights" / "mine" / "datastore", [[5, 6]], **options)
    drafter = Retrieval()
    assert drafter.facts() == {}
    drafter.bind(target)
    assert propose(drafter, [5]) == [(6,)]
    facts = drafter.facts()
    assert (facts["folder"], facts["num_tokens"], facts["grow"]) == (str(mine), 2, False)
    assert facts["checksum"] == Datastore.open(mine, fingerprint).header.checksum
    assert not (mine / SUFFIXES).exists()
    assert list((tmp_path / "cache" / "datastores").glob(f"*/{SUFFIXES}"))


def test_another_tokenizers_folder_is_refused_and_without_a_tokenizer_one_must_be_named(
    tiny, tokenizer, tmp_path
):
    folder = write(tmp_path / "store", [[5, 6]])
    with pytest.raises(UserError, match=str(folder)):
        Retrieval(folder).bind(Target(tiny, tokenizer))
    with pytest.raises(UserError, match=r"retrieval\.datastore"):
        Retrieval().bind(Target(tiny))
    Retrieval(str(folder)).bind(Target(tiny))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"num_draft_nodes": 2.5}, "num_draft_nodes"),
        ({"min_match": 0}, "min_match"),
        ({"min_match": 9, "max_match": 8}, "min_match=9 is above"),
        ({"max_continuations": "x"}, "max_continuations"),
        ({"grow": 1}, "grow"),
        ({"datastore": ""}, "datastore"),
        ({"datastore": 5}, "datastore"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(options, line):
    with pytest.raises(UserError, match=rf"retrieval\..*{line}|{line}"):
        Retrieval(**options)


# The stage


@pytest.fixture
def corpus(tmp_path, tokenizer) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    manifest = {"tokenizer": tokenizer_fingerprint(tokenizer)}
    (folder / "corpus.json").write_text(json.dumps(manifest))
    arrays = {"token_ids": [50, 51, 52, 60, 61], "length": [3, 2]}
    arrays |= {"prompt_length": [1, 1], "is_greedy": [1, 0]}
    tensors = {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}
    save_file(tensors, folder / "00000.safetensors")
    return folder


def test_the_stage_writes_a_corpus_and_files_and_prints_a_line(
    tiny, tokenizer, corpus, tmp_path, capsys
):
    (tmp_path / "notes.txt").write_text("hello é\nworld", encoding="utf-8")
    (tmp_path / "turns.jsonl").write_text('{"turns": ["one", "two"]}\n{"prompt_ids": [7, 8, 9]}\n')
    (tmp_path / "empty.txt").write_text("")
    files = [str(tmp_path / name) for name in ("notes.txt", "turns.jsonl", "empty.txt")]
    target = Target(random_model(max_position_embeddings=128), tokenizer)
    stage = DatastoreStage(str(tmp_path / "store"), str(corpus), files)
    header = stage.run(target)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1 and f"{header.num_tokens} tokens, 6 texts" in printed
    store = Datastore.open(tmp_path / "store", tokenizer_fingerprint(tokenizer))
    ids = store.index.tokens[7:].tolist()
    pieces = "".join("|" if token == 259 else tokenizer.decode([token]) for token in ids)
    assert store.index.tokens[:7].tolist() == [50, 51, 52, 259, 60, 61, 259]
    assert pieces.startswith("hello ") and "world|one|two|" in pieces
    for pattern in (tokenizer.encode(" é\nworld"), [7, 8, 9]):
        assert len(store.index.find(pattern)) == 1
    assert "corpus" in header.source and "notes.txt" in header.source
    assert str(tmp_path) not in header.source
    assert stage.run(target) == header, "a stage that is finished is not done again"


def test_the_stage_can_leave_out_the_prompts_of_a_corpus(tokenizer, corpus, tmp_path):
    target = Target(random_model(max_position_embeddings=128), tokenizer)
    DatastoreStage(str(tmp_path / "store"), str(corpus), answers_only=True).run(target)
    assert Datastore.open(tmp_path / "store", None).index.tokens.tolist() == [51, 52, 259, 61, 259]


def test_the_stage_can_leave_out_the_suffix_array(tiny, tokenizer, corpus, tmp_path):
    target = Target(random_model(max_position_embeddings=128), tokenizer)
    DatastoreStage(str(tmp_path / "store"), str(corpus), with_suffixes=False).run(target)
    assert not (tmp_path / "store" / SUFFIXES).exists()
    assert propose(bound(target, tmp_path / "store"), [50]) == [(51,), (51, 52)]


def test_the_stage_refuses_what_it_cannot_use(tiny, tokenizer, corpus, tmp_path):
    folder = str(tmp_path / "store")
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00\x80")
    image = [str(tmp_path / "image.txt")]
    bare, whole = Target(tiny), Target(tiny, tokenizer)
    refused = [
        ("stage.folder", lambda: DatastoreStage("", str(corpus))),
        ("stage.files", lambda: DatastoreStage(folder)),
        ("stage.files", lambda: DatastoreStage(folder, files="a.txt")),  # pyright: ignore
        ("nowhere.txt", lambda: DatastoreStage(folder, files=["nowhere.txt"])),
        ("with_suffixes", lambda: DatastoreStage(folder, str(corpus), with_suffixes=1)),
        ("tokenizer", lambda: DatastoreStage(folder, str(corpus)).run(bare)),
        ("corpus.json", lambda: DatastoreStage(folder, str(tmp_path)).run(whole)),
        ("image.txt", lambda: DatastoreStage(folder, files=image).run(whole)),
    ]
    for word, attempt in refused:
        with pytest.raises(UserError) as error:
            attempt()
        assert word in str(error.value) and "\n" not in str(error.value)
    assert not Path(folder).exists()


def test_the_array_is_sorted_by_no_global_state():
    """The same ids, the same array: nothing random is left in a datastore."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (5000,), generator=generator).numpy().astype(np.uint32)
    tokens[-1] = 50
    assert np.array_equal(sorted_tokens(tokens, 50), sorted_tokens(tokens.copy(), 50))
