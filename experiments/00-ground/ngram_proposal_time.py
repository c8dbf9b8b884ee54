"""Time of one n-gram proposal at several context lengths:

    python experiments/00-ground/ngram_proposal_time.py

The contexts are random ids over a small alphabet, so that matches are found at every length. The
lengths are measured in turn, many times, and medians are compared: the ratios hold on a noisy
machine.
"""

from __future__ import annotations

import random
import statistics
import time

from specens.decoding.sampling import Sampler
from specens.decoding.types import Commit, Plan, Share
from specens.drafters.ngram import NGram

LENGTHS = (1_024, 4_096, 32_768)
NUM_PROPOSALS = 2_000


def main() -> None:
    generator = random.Random(0)
    for num_continuations in (1, 4):
        drafter = NGram(10, num_continuations)
        proposers, contexts = {}, {}
        for length in LENGTHS:
            contexts[length] = [generator.randrange(200) for _ in range(length)]
            proposers[length] = drafter.begin(contexts[length])
        times: dict[int, list[float]] = {length: [] for length in LENGTHS}
        plan, sampler = Plan.of([Share(10, 10 * num_continuations)]), Sampler()
        for _ in range(NUM_PROPOSALS):
            token = generator.randrange(200)
            for length in LENGTHS:
                begin = time.perf_counter()
                proposers[length].propose(contexts[length], plan, sampler)
                proposers[length].observe(Commit((), (token,)))
                times[length].append(time.perf_counter() - begin)
        medians = {length: statistics.median(times[length]) for length in LENGTHS}
        shown = ", ".join(f"{n} tokens {1e6 * t:.1f} us" for n, t in medians.items())
        ratio = medians[LENGTHS[-1]] / medians[LENGTHS[0]]
        print(f"{num_continuations} continuations: {shown}; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
