"""Time of one proposal against one target forward:

    python experiments/07-trained-drafters/proposal_time.py

The default target writes an answer, and at every token, in turn, its own forward of one token and
each drafter's proposal are timed. Medians over all tokens; the ratios hold on a noisy machine.
"""

from __future__ import annotations

import statistics
import time

from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.drafter import condition, hidden_layers
from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Plan, Share, TokenTree
from specens.prompts.chat import next_prompt
from specens.prompts.sources import Demo

NAMES = ("distilled", "non_autoregressive", "retrieval", "ngram", "quantized")
NUM_TOKENS = 100


def main() -> None:
    config = compose()
    loaded = build(config.target).load()
    target = Target(loaded.model, loaded.tokenizer, origin=build(config.target))
    drafters = {name: build(compose([f"drafter={name}"]).drafter) for name in NAMES}
    for drafter in drafters.values():
        drafter.bind(target)
    assert target.tokenizer is not None
    ids = next_prompt(Demo().questions()[0], [], target.tokenizer, None).token_ids
    layers = sorted({layer for drafter in drafters.values() for layer in hidden_layers(drafter)})
    seconds: dict[str, list[float]] = {"target": []} | {name: [] for name in NAMES}
    with target.prefill(ids, layers) as cache:
        proposers = {name: drafter.begin(ids) for name, drafter in drafters.items()}
        for proposer in proposers.values():
            condition(proposer, cache.hidden)
        for _ in range(NUM_TOKENS):
            for name, proposer in proposers.items():
                member = drafters[name].members[0]
                plan = Plan.of((Share(member.num_draft_tokens, member.num_draft_nodes),))
                begin = time.perf_counter()
                proposer.propose(ids, plan, Sampler())
                seconds[name].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            logits = target.score(cache, ids[-1], TokenTree(), "tree")
            seconds["target"].append(time.perf_counter() - begin)
            cache.accept(())
            commit = Commit((), (int(logits[0].argmax()),))
            for proposer in proposers.values():
                condition(proposer, cache.hidden)
                proposer.observe(commit)
            ids += commit.token_ids
    forward = statistics.median(seconds["target"])
    print(f"target, one token: {1e3 * forward:.1f} ms")
    for name in NAMES:
        median, depth = statistics.median(seconds[name]), drafters[name].members[0].num_draft_tokens
        share = f"{median / forward:.1%} of a forward"
        print(f"{name}, {depth} tokens deep: {1e3 * median:.2f} ms, {share}")


if __name__ == "__main__":
    main()
