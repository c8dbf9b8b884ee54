"""Does joint verification of a path or a tree accept more? Residual verification against block and
traversal verification on the drafts of a real run: in each step, the expected number of accepted
tokens under each rule, given the step's own drafts.

    python experiments/08-proof/block.py [number of prompts] [overrides of specens.run]

Block verification: Sun et al., arXiv 2403.10444 (one chain). Traversal verification: Weng et al.,
arXiv 2505.12398 (a tree; on a chain the two are one); here on the members' unmerged forests,
sampled tokens before deterministic ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch

from specens.config.build import build
from specens.config.compose import compose
from specens.decoding import loop
from specens.decoding.loop import Decoder
from specens.decoding.speculator import Speculator
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT
from specens.decoding.verify import Residual
from specens.prompts.chat import next_prompt

NUM_TRIALS = 48
"""Random trials of each step and rule."""

OVERRIDES = (
    *("budget=fixed", "drafter=ensemble", "drafter.members.quantized.num_draft_tokens=4"),
    *("verifier=residual", "sampling.temperature=1"),
)


class RandomScores:
    """The target's scores with randomness of another generator; its distributions are read once."""

    def __init__(self, scores, generator):
        self.scores, self.generator, self.known = scores, generator, {}

    def target_probs(self, node):
        if node not in self.known:
            self.known[node] = self.scores.target_probs(node)
        return self.known[node]

    def flip(self, node, probability, turn):
        return self.generator.random() < probability

    def sample(self, node, probs):
        sums = probs.cumsum(0).numpy()
        return min(int(np.searchsorted(sums, self.generator.random())), len(probs) - 1)


def block(ratios, sums) -> float:
    """Expected accepted tokens of one chain: `ratios` target_probs / draft_probs of its tokens,
    `sums(i, a)` = sum of (a target_probs - draft_probs)+ after i tokens.
    """
    a, chances = 1.0, []
    for i, ratio in enumerate(ratios, start=1):
        a = min(1.0, a * ratio)
        s = sums(i, a)
        chances.append(a if i == len(ratios) else (s / (s + 1 - a) if s + 1 - a > 0 else 1.0))
    stays = np.cumprod([1 - h for h in chances[::-1]])[::-1]
    return float((1 - stays).sum())


def traversal(children, draft, place, scores) -> int:
    """Accepted tokens in one trial. `children` of the unmerged forest, `place` of its nodes in the
    scored tree.
    """

    def visit(node: int, a: float, depth: int) -> int | None:
        wanted = scores.target_probs(ROOT if node == ROOT else place[node])
        for child in children[node]:
            token, probs = draft.token_ids[child], draft.draft_probs[child]
            sampled = 1.0 if probs is None else float(probs[token])
            found = visit(child, min(1.0, a * float(wanted[token]) / sampled), depth + 1)
            if found is not None:
                return found
            left = a * wanted
            if probs is None:
                less = max(float(left[token]) - 1, 0.0)
                left = left.index_fill(0, torch.tensor(token), less)
            else:
                left = (left - probs).clamp_min(0)
            total = float(left.sum())
            a = total / (total + 1 - a) if total + 1 - a > 0 else 1.0
            wanted = left / total if total > 0 else wanted
        return depth if node == ROOT or scores.generator.random() < a else None

    return visit(ROOT, 1.0, 0) or 0


def compare(tree, draft, scores, names, counts) -> None:
    """Expected accepted tokens in this step: of every member's sampled chain alone, and of all
    drafts together.
    """
    index = {(tree.parents[n], tree.token_ids[n]): n for n in range(len(tree))}
    place, children = {}, defaultdict(list)
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        above = ROOT if parent == ROOT else place.get(parent)
        if above is not None and (above, token) in index:
            place[node] = index[above, token]
            children[parent].append(node)
    draft_probs = draft.draft_probs
    for owner, name in enumerate(names):
        row = [n for n in place if draft.owner(n) == owner and draft_probs[n] is not None]
        if row:
            path = [ROOT, *(place[n] for n in row)]
            wanted = [scores.target_probs(node) for node in path]
            compare_chain(row, wanted, draft, counts, name)
    for siblings in children.values():
        siblings.sort(key=lambda n: draft_probs[n] is None)
    alone = [len(Residual()(tree, scores).path) for _ in range(NUM_TRIALS)]
    counts["ensemble", "residual"].append(np.mean(alone))
    together = [traversal(children, draft, place, scores) for _ in range(NUM_TRIALS)]
    counts["ensemble", "joint"].append(np.mean(together))


def compare_chain(row, wanted, draft, counts, name) -> None:
    """One sampled chain: its nodes `row`, and the target's distribution after each token, the
    root's first.
    """
    tokens = [draft.token_ids[n] for n in row]
    probs = [draft.draft_probs[n] for n in row]
    ratios = [float(wanted[i][token] / probs[i][token]) for i, token in enumerate(tokens)]
    counts[name, "residual"].append(float(np.cumprod(np.minimum(ratios, 1)).sum()))

    def after(i, a):
        return float((a * wanted[i] - probs[i]).clamp_min(0).sum()) if i < len(row) else 0.0

    counts[name, "joint"].append(block(ratios, after))


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    config = compose([*OVERRIDES, *sys.argv[2:]])
    generator, counts, drafts = np.random.default_rng(0), defaultdict(list), []
    merge = loop.merge

    def remember(draft, plan, eos_ids=()):
        drafts[:] = [draft]
        return merge(draft, plan, eos_ids)

    loop.merge = remember

    class Watched(Residual):
        def __call__(self, tree, scores):
            if tree.samples:
                compare(tree, drafts[0], RandomScores(scores, generator), names, counts)
            return super().__call__(tree, scores)

    loaded = build(config.target).load()
    target = Target(loaded.model, loaded.tokenizer, origin=build(config.target))
    drafter = build(config.drafter)
    speculator = Speculator(Decoder(target, drafter, build(config.budget), Watched()))
    names = [member.name for member in drafter.members]
    options = build(config.sampling).generation_config(target)
    for question in build(config.prompts).questions()[:num]:
        prompt = next_prompt(question, [], loaded.tokenizer, None)
        speculator.complete(prompt.token_ids, options, seed=0, prompt_key=prompt.id)
    for name in sorted({key[0] for key in counts}):
        residual, joint = (np.array(counts[name, rule]) for rule in ("residual", "joint"))
        mean, gain = residual.mean(), joint.mean() / residual.mean() - 1
        error = (joint - residual).std() / len(residual) ** 0.5 / mean
        print(
            f"{name}: {len(residual)} steps, accepted tokens per step: residual {mean:.3f}, "
            f"joint {joint.mean():.3f} ({gain:+.1%}, standard error {error:.1%})"
        )


if __name__ == "__main__":
    main()
