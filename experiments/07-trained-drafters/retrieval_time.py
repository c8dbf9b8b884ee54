"""Time to build, open and query a datastore of 10 million tokens:

    python experiments/07-trained-drafters/retrieval_time.py

The text is made up: phrases sampled from a book of phrases, both by Zipf's law, so that there are
frequent ids and rare ones, and short matches and long ones. Contexts are new text from the same
book. Needs Linux for the resident memory.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from specens.decoding.sampling import Sampler
from specens.decoding.types import Plan, Share
from specens.drafters.retrieval.datastore import SUFFIXES, TOKENS, build
from specens.drafters.retrieval.retrieval import Retrieval

NUM_TOKENS = 10_000_000
TEXT_TOKENS = 500
VOCAB_SIZE = 49_152
NUM_PROPOSALS = 2_000


def zipf(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    """`count` numbers below `size`, number k with probability proportional to 1 / (k + 1)."""
    weights = 1 / np.arange(1, size + 1)
    return np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(count)).clip(max=size - 1)


def write_text(rng: np.random.Generator, book: list[np.ndarray], count: int) -> np.ndarray:
    """About `count` ids, whole phrases."""
    return np.concatenate([book[number] for number in zipf(rng, len(book), count // 6)])


def resident_mb() -> float:
    """Resident memory of this process in MB, pages of mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    rng = np.random.default_rng(0)
    words = zipf(rng, VOCAB_SIZE, 1_300_000)
    ends = np.cumsum(rng.integers(1, 12, 200_000))
    book = np.split(words[: ends[-1]], ends[:-1])
    written = write_text(rng, book, NUM_TOKENS * 5 // 4)[:NUM_TOKENS]
    texts = np.array_split(written, len(written) // TEXT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="specens-") as work:
        folder = Path(work) / "datastore"
        begin = time.perf_counter()
        name = "made up"
        header = build(texts, folder, fingerprint=name, vocab_size=VOCAB_SIZE, source=name)
        count, took = header.num_tokens, time.perf_counter() - begin
        speed = f"{count / took / 1e6:.2f} million tokens/s"
        print(f"build: {count} tokens in {took:.1f} s, {speed}")
        query(folder, write_text(rng, book, 20_000).tolist())


def query(folder: Path, text: list[int]) -> None:
    """Open the datastore and propose at `NUM_PROPOSALS` places of a text."""
    size_mb = sum((folder / name).stat().st_size for name in (TOKENS, SUFFIXES)) / 1e6
    before = resident_mb()
    drafter = Retrieval(folder)
    model = SimpleNamespace(generation_config=None)
    target = SimpleNamespace(tokenizer=None, vocab_size=VOCAB_SIZE, model=model)
    begin = time.perf_counter()
    drafter.bind(target)  # pyright: ignore[reportArgumentType]
    print(f"open: {1e3 * (time.perf_counter() - begin):.1f} ms")
    opened, plan, sampler = resident_mb(), Plan.of((Share(8, 16),)), Sampler()
    proposer = drafter.begin(text[:1])
    times, nodes = [], []
    for end in np.linspace(100, len(text), NUM_PROPOSALS).astype(int).tolist():
        context = text[:end]
        begin = time.perf_counter()
        nodes.append(len(proposer.propose(context, plan, sampler)))
        times.append(1e6 * (time.perf_counter() - begin))
    median, late = np.percentile(times, [50, 99])
    times_us = f"median {median:.0f} us, 99th percentile {late:.0f} us"
    print(f"propose: {times_us}, {np.mean(nodes):.1f} nodes on average")
    memory = f"{before:.0f} MB before, {opened:.0f} MB opened, {resident_mb():.0f} MB after"
    print(f"resident: {memory}; files {size_mb:.0f} MB")


if __name__ == "__main__":
    main()
