"""Is sampled output distributed as the target's? z-scores that are approximately N(0, 1) under
H0 (every token sampled from the target distribution), for any vocabulary and any drafters, computed
where biased verifiers fail: at tokens with draft_prob > target_prob.

For a function f of (prefix, token), the sum over the output tokens of f(c, y) - E_p f(c, .) is a
martingale if y is sampled from p, the target distribution after c; divided by the square root of
the summed variances it is approximately normal. A stop rule only stops the martingale. Every output
token counts, wherever in a step it stood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch

from specens.audit.rescore import Position
from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.fixed import full_share
from specens.decoding.drafter import Drafter, Proposer, close, condition
from specens.decoding.merge import merge
from specens.decoding.sampling import Sampler, TreeScores
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan, TokenTree
from specens.decoding.verify import PerRow, Verifier

ALPHA = 1e-4
"""How often a lossless run may be called not lossless: shared by all statistics and both signs
(Bonferroni).
"""

PROB_FLOOR = math.exp(-20)
"""Least probability at which draft_probs are read: an excluded token would be infinitely
surprising.
"""
TARGET_PROB_FLOOR = math.exp(-60)

BEST = "is the target's best token"
SURPRISE = "-log target_prob"
FAVOURED = "some draft_prob >= target_prob"
SUPPORT = "drafters with draft_prob >= target_prob"
OWN_PROB = "log draft_prob of "


def sampled_by(name: str) -> str:
    return f"is the sample of {name}"


@dataclass(frozen=True)
class Term:
    """f of one output token, and the mean and variance of f under the target distribution."""

    value: float
    mean: float
    variance: float


@dataclass(frozen=True)
class Statistic:
    """One statistic over the `num_tokens` positions at which it is defined: the sums of f, of its
    mean and of its variance, and `z`.
    """

    name: str
    num_tokens: int
    observed: float
    expected: float
    variance: float
    z: float


def z_score(observed: float, expected: float, variance: float, scale: float) -> float:
    """(sum f - sum E_p f) / sqrt(sum Var_p f + scale |sum f - sum E_p f|): Bernstein's correction,
    without which a few rare events would look like many standard deviations. `scale`: 1/3 of the
    largest step for events (so 1/3), 1 for counts of drafters (most often three at most) and for
    logarithms of probabilities, whose tail is exponential. For many tokens it is the ordinary z.
    """
    excess = observed - expected
    if abs(excess) < 1e-9:
        return 0.0
    return excess / math.sqrt(variance + scale * abs(excess))


def statistic(name: str, terms: Sequence[Term]) -> Statistic:
    observed, expected = math.fsum(t.value for t in terms), math.fsum(t.mean for t in terms)
    variance = math.fsum(t.variance for t in terms)
    scale = 1.0 if name == SUPPORT or name.startswith((SURPRISE, OWN_PROB)) else 1 / 3
    z = z_score(observed, expected, variance, scale)
    return Statistic(name, len(terms), observed, expected, variance, z)


def z_bound(num_statistics: int) -> float:
    """|z| beyond which H0 is rejected: two-sided, ALPHA over all statistics (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALPHA / (2 * max(num_statistics, 1)))


def is_rejected(statistics: Sequence[Statistic]) -> bool:
    bound = z_bound(len(statistics))
    return any(abs(entry.z) > bound for entry in statistics)


def functions(
    target_probs: torch.Tensor, draft: Draft, members: Sequence[Member]
) -> dict[str, torch.Tensor]:
    """The statistics at one prefix, each as f `[vocab]` (float64): the output's own surprise;
    whether it is the target's best token; whether some member gives it at least the target's
    probability; how many members do so or propose it deterministically; the logarithm of each
    member's draft_prob; whether it is that member's sample (which shows a bias even if the reported
    draft_probs are false); and whether a member proposes it deterministically.
    """
    found = {
        SURPRISE: -target_probs.clamp_min(TARGET_PROB_FLOOR).log(),
        BEST: _marked(target_probs, [int(target_probs.argmax())]),
    }
    samples, deterministic = first_proposals(draft)
    proposed = {owner: _marked(target_probs, ids) for owner, ids in deterministic.items()}
    likelier = {owner: (probs >= target_probs).double() for owner, (_, probs) in samples.items()}
    if likelier:
        found[FAVOURED] = torch.stack(list(likelier.values())).amax(0)
    if len(members) > 1 and (samples or proposed):
        none = torch.zeros_like(target_probs)
        owners = {*samples, *proposed}
        both = [torch.maximum(likelier.get(d, none), proposed.get(d, none)) for d in owners]
        found[SUPPORT] = torch.stack(both).sum(0)
    for owner, (token, probs) in samples.items():
        name = members[owner].name
        found[f"{OWN_PROB}{name}"] = probs.clamp_min(PROB_FLOOR).log()
        found[sampled_by(name)] = _marked(target_probs, [token])
    for owner, event in proposed.items():
        found[f"is proposed by {members[owner].name}"] = event
    return found


def _marked(like: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """1 at some tokens, 0 elsewhere."""
    return torch.zeros_like(like).index_fill_(0, torch.tensor(token_ids, device=like.device), 1.0)


def first_proposals(
    draft: Draft,
) -> tuple[dict[int, tuple[int, torch.Tensor]], dict[int, list[int]]]:
    """Of the tokens that hang on the root, by owner: its first sample with its draft_probs, and its
    deterministic tokens.
    """
    samples: dict[int, tuple[int, torch.Tensor]] = {}
    deterministic: dict[int, list[int]] = {}
    for node in [node for node, parent in enumerate(draft.parents) if parent == ROOT]:
        probs = draft.draft_probs[node] if draft.draft_probs else None
        if probs is None:
            deterministic.setdefault(draft.owner(node), []).append(draft.token_ids[node])
        else:
            samples.setdefault(draft.owner(node), (draft.token_ids[node], probs))
    return samples, deterministic


def term(f: torch.Tensor, target_probs: torch.Tensor, token: int) -> Term:
    mean = (target_probs * f).sum()
    return Term(float(f[token]), float(mean), float((target_probs * (f - mean) ** 2).sum()))


@dataclass
class DistributionTest:
    """Gathers the statistics along outputs for which a drafter's members propose, through the
    drafter protocol itself: they sample with noise of their own, and so report their draft_probs.

    At every prefix the negative control, a biased verifier, also samples one token from the same
    proposals: the same statistics have to reject those, if there are tokens enough.
    """

    drafter: Drafter
    control: Verifier = field(default_factory=PerRow)
    impossible: list[str] = field(default_factory=list)
    """Tokens of target probability 0 that no rounding lets in: one of them is proof enough."""
    num_contested: int = 0
    """Prefixes at which two members or more proposed, without which the control has no bias."""
    _terms: dict[str, list[Term]] = field(default_factory=dict)
    _control: dict[str, list[Term]] = field(default_factory=dict)

    def follow(
        self,
        prompt_ids: Sequence[int],
        hidden: Mapping[int, torch.Tensor],
        positions: Iterable[Position],
        sampler: Sampler,
    ) -> Iterator[Position]:
        """The positions of one output again, each tested as it passes. `hidden` are the prompt's
        hidden states; `sampler` has the processors of the output, and noise that the output was not
        sampled with.
        """
        proposer = self.drafter.begin(tuple(prompt_ids))
        try:
            condition(proposer, hidden)
            for position in positions:
                self._add(proposer, position, sampler)
                condition(proposer, position.hidden)
                proposer.observe(Commit((), (position.token,)))
                yield position
        finally:
            close(proposer)

    def _add(self, proposer: Proposer, position: Position, sampler: Sampler) -> None:
        members, prefix = self.drafter.members, position.prefix_ids
        context = PlanContext(members, len(prefix), tokens_wanted=2)
        plan = Plan.of([full_share(member, context) for member in members])  # their first tokens
        own = sampler.fork("proposals")
        draft = proposer.propose(prefix, plan, own) if plan.num_tokens else Draft()
        probs, tree = sampler.probs(prefix, position.logits), merge(draft, plan)
        token = _controlled(self.control, tree, position, sampler.fork("control"))
        # The control saw these very samples, so it outputs them more often, however fair it is.
        seen = {sampled_by(member.name) for member in members}
        for name, f in functions(probs, draft, members).items():
            output = term(f, probs, position.token)
            self._terms.setdefault(name, []).append(output)
            if name not in seen:
                control = Term(float(f[token]), output.mean, output.variance)
                self._control.setdefault(name, []).append(control)
        if not probs[position.token] and is_impossible(position, sampler):
            self.impossible.append(f"token {position.token} at position {len(prefix)}")
        owners = {draft.owner(node) for node, above in enumerate(draft.parents) if above == ROOT}
        self.num_contested += len(owners) > 1

    def statistics(self) -> tuple[Statistic, ...]:
        return tuple(statistic(name, terms) for name, terms in self._terms.items())

    def control_statistics(self) -> tuple[Statistic, ...]:
        return tuple(statistic(name, terms) for name, terms in self._control.items())


def is_impossible(position: Position, sampler: Sampler) -> bool:
    """Whether the token has probability 0 also if its score were as much higher as rounding could
    make it: it may lie at the very edge of top-k or top-p.
    """
    raised = position.logits.clone()
    size = float(raised[torch.isfinite(raised)].abs().max())
    raised[position.token] += size * math.sqrt(torch.finfo(raised.dtype).eps)
    return not sampler.probs(position.prefix_ids, raised)[position.token]


def _controlled(control: Verifier, tree: TokenTree, position: Position, sampler: Sampler) -> int:
    """The first token that `control` outputs. Its scores below the root are those at the root, and
    without effect.
    """
    logits = position.logits.expand(len(tree) + 1, -1)
    verdict = control(tree, TreeScores(sampler, position.prefix_ids, tree, logits))
    return tree.token_ids[verdict.path[0]] if verdict.path else verdict.target_token
