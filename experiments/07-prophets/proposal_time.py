"""Time of one proposal against one target forward: python experiments/07-prophets/proposal_time.py

The default target writes an answer, and at every token, in turn, its own forward of one token and each drafter's proposal
are timed. Medians over all tokens; the ratios hold on a noisy machine.
"""

from __future__ import annotations

import statistics
import time

from specens.config import build, compose
from specens.decoding.drafter import condition, hidden_layers
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target
from specens.decoding.types import Commit, Plan, TokenTree
from specens.drafters.ensemble import Ensemble
from specens.prompts import Demo
from specens.rendering import next_prompt

NAMES = ("distilled", "non_autoregressive", "retrieval", "ngram", "quantized")
NUM_TOKENS = 100


def main() -> None:
    config = compose()
    loaded = build(config.target).load()
    target = Target(loaded.model, loaded.tokenizer, origin=build(config.target))
    drafters = {name: build(compose([f"drafter={name}"]).drafter) for name in NAMES}
    team = Ensemble(drafters)
    team.bind(target)
    assert target.tokenizer is not None
    ids = next_prompt(Demo().questions()[0], [], target.tokenizer, None).token_ids
    cache = target.prefill(ids, hidden_layers(team))
    team.start(ids)
    condition(team, cache.hidden)
    seconds: dict[str, list[float]] = {"target": []} | {name: [] for name in NAMES}
    for _ in range(NUM_TOKENS):
        for name, drafter in drafters.items():
            member = drafter.members[0]
            plan = Plan(member.num_draft_tokens, member.num_draft_nodes)
            begin = time.perf_counter()
            drafter.propose(ids, plan, Sampler())
            seconds[name].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        logits = target.score(cache, ids[-1], TokenTree(), "tree")
        seconds["target"].append(time.perf_counter() - begin)
        cache.accept(())
        token = int(logits[0].argmax())
        condition(team, cache.hidden)
        team.observe(Commit((), (token,)))
        ids += (token,)
    forward = statistics.median(seconds["target"])
    print(f"target, one token: {1e3 * forward:.1f} ms")
    for name in NAMES:
        median, member = statistics.median(seconds[name]), drafters[name].members[0]
        print(
            f"{name}, {member.num_draft_tokens} tokens deep: {1e3 * median:.2f} ms, {median / forward:.1%} of a forward"
        )


if __name__ == "__main__":
    main()
