"""Would joint verification of a path or a tree pay? Residual tests against block and traversal verification on the drafts of
a real run: in each step, the expected number of accepted tokens under each rule, given the step's own drafts.

    python experiments/08-proof/block.py [number of prompts] [overrides of specens.run]

Block verification: Sun et al., arXiv 2403.10444 (one chain). Traversal verification: Weng et al., arXiv 2505.12398 (a tree; on
a chain the two are one); here on the members' unmerged forests, drawn tokens before certain ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch

from specens.config import build, compose
from specens.decoding import loop
from specens.decoding.loop import Decoder
from specens.decoding.target import Target
from specens.decoding.types import ROOT
from specens.decoding.verify import Residual
from specens.rendering import next_prompt
from specens.speculator import Speculator

COINS = 48
"""Throws of the coins for each step and rule."""


class Coins:
    """Answers with throw-away randomness; the laws are read once."""

    def __init__(self, answers, rng):
        self.answers, self.rng, self.laws = answers, rng, {}

    def probs(self, node):
        if node not in self.laws:
            self.laws[node] = self.answers.probs(node)
        return self.laws[node]

    def flip(self, node, probability, turn):
        return self.rng.random() < probability

    def choice(self, node, probs):
        return min(int(np.searchsorted(probs.cumsum(0).numpy(), self.rng.random())), len(probs) - 1)


def block(ratios, sums) -> float:
    """Expected accepted tokens of one chain: ratios p/q of its tokens, `sums(i, a)` = sum of (a p - q)+ after i tokens."""
    a, chances = 1.0, []
    for i, ratio in enumerate(ratios, start=1):
        a = min(1.0, a * ratio)
        s = sums(i, a)
        chances.append(a if i == len(ratios) else (s / (s + 1 - a) if s + 1 - a > 0 else 1.0))
    stays = np.cumprod([1 - h for h in chances[::-1]])[::-1]
    return float((1 - stays).sum())


def traversal(children, law_of, token_of, place, coins) -> int:
    """Accepted tokens in one throw. `children` of the unmerged forest, `place` of its nodes in the scored tree."""

    def visit(node: int, a: float, depth: int) -> int | None:
        wanted = coins.probs(ROOT if node == ROOT else place[node])
        for child in children[node]:
            token, law = token_of[child], law_of[child]
            drawn = 1.0 if law is None else float(law[token])
            found = visit(child, min(1.0, a * float(wanted[token]) / drawn), depth + 1)
            if found is not None:
                return found
            left = a * wanted
            if law is None:
                left = left.index_fill(0, torch.tensor(token), max(float(left[token]) - 1, 0.0))
            else:
                left = (left - law).clamp_min(0)
            total = float(left.sum())
            a = total / (total + 1 - a) if total + 1 - a > 0 else 1.0
            wanted = left / total if total > 0 else wanted
        return depth if node == ROOT or coins.rng.random() < a else None

    return visit(ROOT, 1.0, 0) or 0


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    words = [
        "drafter=ensemble",
        "drafter.members.quantized.num_draft_tokens=4",
        "verifier=residual",
        "sampling.temperature=1",
    ]
    config = compose(["budget=fixed", *words, *sys.argv[2:]])
    rng, sums, drafts = np.random.default_rng(0), defaultdict(list), []
    merge = loop.merge

    def remember(draft, plan, eos_ids=()):
        drafts[:] = [draft]
        return merge(draft, plan, eos_ids)

    loop.merge = remember

    class Watched(Residual):
        def __call__(self, tree, answers):
            if tree.draws:
                compare(tree, drafts[0], Coins(answers, rng), names, sums, self)
            return super().__call__(tree, answers)

    loaded = build(config.target).load()
    target = Target(loaded.model, loaded.tokenizer, origin=build(config.target))
    drafter = build(config.drafter)
    spec = Speculator(Decoder(target, drafter, build(config.budget), Watched()))
    names = [member.name for member in drafter.members]
    options = build(config.sampling).generation_config(target)
    for question in build(config.prompts).questions()[:num]:
        prompt = next_prompt(question, [], loaded.tokenizer, None)
        spec.complete(prompt.token_ids, options, seed=0, prompt_key=prompt.id)
    for name in sorted({key[0] for key in sums}):
        ours, theirs = (np.array(sums[name, rule]) for rule in ("residual", "joint"))
        error = (theirs - ours).std() / len(ours) ** 0.5
        print(
            f"{name}: {len(ours)} steps, accepted a step: residual {ours.mean():.3f}, joint {theirs.mean():.3f} "
            f"({theirs.mean() / ours.mean() - 1:+.1%}, standard error {error / ours.mean():.1%})"
        )


def compare(tree, draft, coins, names, sums, rule) -> None:
    """Expected accepted tokens in this step: every member's row of draws alone, and all of them together."""
    index = {(tree.parents[n], tree.token_ids[n]): n for n in range(len(tree))}
    place, children = {}, defaultdict(list)
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        above = ROOT if parent == ROOT else place.get(parent)
        if above is not None and (above, token) in index:
            place[node] = index[above, token]
            children[parent].append(node)
    laws = draft.laws or (None,) * len(draft)
    for owner, name in enumerate(names):
        row = [n for n in place if draft.owner(n) == owner and laws[n] is not None]
        if not row:
            continue
        path = [ROOT, *(place[n] for n in row)]
        ratios = [
            float(coins.probs(path[i])[draft.token_ids[n]] / laws[n][draft.token_ids[n]]) for i, n in enumerate(row)
        ]
        sums[name, "residual"].append(float(np.cumprod(np.minimum(ratios, 1)).sum()))

        def after(i, a, row=row, path=path):
            return float((a * coins.probs(path[i]) - laws[row[i]]).clamp_min(0).sum()) if i < len(row) else 0.0

        sums[name, "joint"].append(block(ratios, after))
    for siblings in children.values():
        siblings.sort(key=lambda n: laws[n] is None)
    sums["ensemble", "residual"].append(np.mean([len(Residual.__call__(rule, tree, coins).path) for _ in range(COINS)]))
    together = [traversal(children, laws, draft.token_ids, place, coins) for _ in range(COINS)]
    sums["ensemble", "joint"].append(np.mean(together))


if __name__ == "__main__":
    main()
