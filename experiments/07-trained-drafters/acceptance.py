"""Acceptance length of each drafter alone, without decoding again:

    python experiments/07-trained-drafters/acceptance.py <run folder>

Greedy drafts never change the text, so the texts of one run (of any drafter, or of none) show how
every other drafter would have done on them: each proposal is compared with what follows, and the
step advances by the accepted tokens and one more. The target reads each text once, for the hidden
states. Counts are those of a live run, step for step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import specens
from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.drafter import Drafter, close, condition, hidden_layers
from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Plan, Share

CASES = (
    ("ngram",),
    ("retrieval",),
    ("non_autoregressive",),
    ("non_autoregressive", "drafter.num_draft_nodes=4"),
    ("distilled",),
    ("distilled", "drafter.num_branches=2"),
    ("distilled", "drafter.num_branches=4"),
)


def main() -> None:
    prompts = specens.load(sys.argv[1]).prompts
    spec = build(compose().target)
    loaded = spec.load()
    target = Target(loaded.model, loaded.tokenizer, origin=spec)
    texts = [
        (list(map(int, prompt)), list(map(int, output)))
        for prompt, output in zip(prompts["prompt_ids"], prompts["output_ids"], strict=True)
    ]
    for name, *overrides in CASES:
        drafter = build(compose([f"drafter={name}", *overrides]).drafter)
        drafter.bind(target)
        counts = [alone(target, drafter, prompt, output) for prompt, output in texts]
        steps, emitted = sum(counts), sum(len(output) for _, output in texts)
        what, counted = " ".join([name, *overrides]), f"{emitted} tokens in {steps} steps"
        print(f"{what}: {emitted / steps:.3f} ({counted})", flush=True)


def alone(target: Target, drafter: Drafter, prompt: list[int], output: list[int]) -> int:
    """Steps that a drafter would have taken to write `output`."""
    ids = prompt + output
    with target.prefill(ids, hidden_layers(drafter)) as cache:
        hidden = cache.hidden  # of all positions but the last
    proposer = drafter.begin(tuple(prompt))
    condition(proposer, {layer: states[: len(prompt) - 1] for layer, states in hidden.items()})
    member, at, steps = drafter.members[0], len(prompt), 0
    while at < len(ids):
        depth = min(member.num_draft_tokens, len(ids) - at - 1)
        plan, draft = Plan.of((Share(depth, member.num_draft_nodes),)), Draft()
        if depth:
            draft = proposer.propose(tuple(ids[:at]), plan, Sampler())
        end = at + agreement(draft, ids[at : at + depth]) + 1
        new = {layer: states[at - 1 : end - 1] for layer, states in hidden.items()}
        condition(proposer, new)
        proposer.observe(Commit(tuple(range(end - at - 1)), tuple(ids[at:end])))
        at, steps = end, steps + 1
    close(proposer)
    return steps


def agreement(draft: Draft, text: Sequence[int]) -> int:
    """How many tokens of `text` are a path of the draft."""
    reached, length = {ROOT}, 0
    for token in text:
        children = [node for node in range(len(draft)) if draft.parents[node] in reached]
        reached = {node for node in children if draft.token_ids[node] == token}
        if not reached:
            break
        length += 1
    return length


if __name__ == "__main__":
    main()
