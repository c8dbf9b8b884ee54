"""Does sampled text have the target's law? The stream test: no enumeration, any vocabulary, a text of any drafters.

For a function f of (prefix, token), the sum over the emitted tokens of f(c, y) - E_p f(c, .) is a martingale if y is drawn from
p, the target's law after c, so that over the square root of the summed variances it is about a normal number. Texts that end by
a stop rule only stop the martingale. Every emitted token counts, wherever in a step it stood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch

from specens.decoding.budget import PlanContext, draft_limit
from specens.decoding.drafter import Drafter, condition, hidden_layers
from specens.decoding.merge import merge
from specens.decoding.sampling import Sampler, TreeAnswers
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan, TokenTree
from specens.decoding.verify import PerRow, Verifier
from specens.evidence.walk import Place

ALPHA = 1e-4
"""How often a lossless run may be called not lossless: shared by all statistics and both signs (Bonferroni)."""

LAW_FLOOR = math.exp(-20)
"""Least probability that a drafter's law is read at: what it excludes would be infinitely surprising."""
OWN_FLOOR = math.exp(-60)
BEST = "is the target's best token"
SURPRISE = "-log p"
FAVOURED = "a drafter finds it likelier"
SUPPORT = "drafters that favour it"
OWN_LAW = "log q of "


def drawn_by(name: str) -> str:
    return f"is what {name} draws there"


@dataclass(frozen=True)
class Term:
    """One statistic at one position: f of the emitted token, and mean and variance of f under the target's law."""

    value: float
    mean: float
    variance: float


@dataclass(frozen=True)
class Statistic:
    """One statistic over a text of `num_tokens` positions (those at which it is defined): the sums of f, of its mean and of its
    variance, and `z`.
    """

    name: str
    num_tokens: int
    observed: float
    expected: float
    variance: float
    z: float


def z_score(observed: float, expected: float, variance: float, scale: float) -> float:
    """(sum f - sum E_p f) / sqrt(sum Var_p f + scale |sum f - sum E_p f|): Bernstein's correction, without which a few rare
    events would look like many standard deviations. `scale`: 1/3 of the largest step for events (so 1/3), 1 for counts of
    drafters (most often three at most) and for logarithms of probabilities, whose tail under the law is exponential. For
    many tokens it is the ordinary z.
    """
    excess = observed - expected
    if abs(excess) < 1e-9:
        return 0.0
    return excess / math.sqrt(variance + scale * abs(excess))


def statistic(name: str, terms: Sequence[Term]) -> Statistic:
    observed, expected = math.fsum(t.value for t in terms), math.fsum(t.mean for t in terms)
    variance = math.fsum(t.variance for t in terms)
    scale = 1.0 if name == SUPPORT or name.startswith((SURPRISE, OWN_LAW)) else 1 / 3
    return Statistic(name, len(terms), observed, expected, variance, z_score(observed, expected, variance, scale))


def z_bound(num_statistics: int) -> float:
    """|z| beyond which a law is rejected: two-sided, ALPHA over all statistics together (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALPHA / (2 * max(num_statistics, 1)))


def strongest(statistics: Sequence[Statistic]) -> Statistic | None:
    return max(statistics, key=lambda entry: abs(entry.z), default=None)


def is_rejected(statistics: Sequence[Statistic]) -> bool:
    bound = z_bound(len(statistics))
    return any(abs(entry.z) > bound for entry in statistics)


def functions(probs: torch.Tensor, draft: Draft, members: Sequence[Member]) -> dict[str, torch.Tensor]:
    """The statistics at one prefix, each as f `[vocab]` (float64), from the target's law and what the members propose first: the
    text's own surprise; whether it is the target's best token; whether some member's law gives it more than the target does; how
    many members do so or are certain of it; the logarithm of each member's law; whether it is what the member draws there (a draw
    does not lie, even if its law does); and whether a member is certain of it. What members favour is what biased verifiers
    take too often.
    """
    found = {SURPRISE: -probs.clamp_min(OWN_FLOOR).log(), BEST: torch.zeros_like(probs)}
    found[BEST][probs.argmax()] = 1.0
    laws, drawn, certain = first_proposals(draft)
    events: dict[int, torch.Tensor] = {}
    for owner, tokens in certain.items():
        events[owner] = torch.zeros_like(probs)
        events[owner][tokens] = 1.0
    likelier = {owner: (law >= probs).double() for owner, law in laws.items()}
    if likelier:
        found[FAVOURED] = torch.stack(list(likelier.values())).amax(0)
    if len(members) > 1 and (laws or certain):
        nobody = torch.zeros_like(probs)
        both = [torch.maximum(likelier.get(d, nobody), events.get(d, nobody)) for d in {*laws, *certain}]
        found[SUPPORT] = torch.stack(both).sum(0)
    for owner, law in laws.items():
        found[f"{OWN_LAW}{members[owner].name}"] = law.clamp_min(LAW_FLOOR).log()
        found[drawn_by(members[owner].name)] = torch.zeros_like(probs)
        found[drawn_by(members[owner].name)][drawn[owner]] = 1.0
    for owner, event in events.items():
        found[f"{members[owner].name} is certain of it"] = event
    return found


def first_proposals(draft: Draft) -> tuple[dict[int, torch.Tensor], dict[int, int], dict[int, list[int]]]:
    """Of the tokens that hang on the root: owner -> the law of its first draw, the draw, and its tokens that tell no law."""
    laws: dict[int, torch.Tensor] = {}
    drawn: dict[int, int] = {}
    certain: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        law = draft.laws[node] if draft.laws else None
        if parent != ROOT:
            continue
        if law is None:
            certain.setdefault(draft.owner(node), []).append(token)
        elif draft.owner(node) not in laws:
            laws[draft.owner(node)], drawn[draft.owner(node)] = law, token
    return laws, drawn, certain


def term(f: torch.Tensor, probs: torch.Tensor, token: int) -> Term:
    mean = (probs * f).sum()
    return Term(float(f[token]), float(mean), float((probs * (f - mean) ** 2).sum()))


@dataclass
class Stream:
    """Gathers the statistics along texts that a drafter's members are asked about, in step with the text, through the drafter
    protocol itself: their draws have noise of their own, so that they tell their laws, and the others are certain tokens.

    At every prefix it also draws one token with `control`, a biased verifier, from the same proposals: the same statistics
    have to reject that, if there are tokens enough.
    """

    drafter: Drafter
    control: Verifier = field(default_factory=PerRow)
    _terms: dict[str, list[Term]] = field(default_factory=dict)
    _control: dict[str, list[Term]] = field(default_factory=dict)
    impossible: list[str] = field(default_factory=list)
    """Tokens that the law excludes, and that no rounding lets in: one of them is proof enough."""
    num_tokens: int = 0
    num_contested: int = 0
    """Prefixes at which two members or more proposed, without which the control has no bias."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return hidden_layers(self.drafter)

    def start(self, prompt_ids: Sequence[int], hidden: Mapping[int, torch.Tensor]) -> None:
        self.drafter.start(tuple(prompt_ids))
        condition(self.drafter, hidden)

    def add(self, place: Place, sampler: Sampler) -> None:
        """One position. `sampler` has the processors of the text and noise that the text was not drawn with."""
        members = self.drafter.members
        plan = _first_only_plan(members, len(place.ids))
        draft = self.drafter.propose(place.ids, plan, sampler.fork("proposals")) if plan.num_tokens else Draft()
        probs = sampler.probs(place.ids, place.logits)
        token = _controlled(self.control, merge(draft, plan), place, sampler.fork("control"))
        # The control saw these very draws, so that it says them more often than others, however fair it is.
        seen = {drawn_by(member.name) for member in members}
        for name, f in functions(probs, draft, members).items():
            said = term(f, probs, place.said)
            self._terms.setdefault(name, []).append(said)
            if name not in seen:
                self._control.setdefault(name, []).append(Term(float(f[token]), said.mean, said.variance))
        if not probs[place.said] and is_impossible(place, sampler):
            self.impossible.append(f"token {place.said} at position {len(place.ids)}")
        self.num_tokens += 1
        proposing = {draft.owner(node) for node, parent in enumerate(draft.parents) if parent == ROOT}
        self.num_contested += len(proposing) > 1
        condition(self.drafter, place.hidden)
        self.drafter.observe(Commit((), (place.said,)))

    def statistics(self) -> tuple[Statistic, ...]:
        return tuple(statistic(name, terms) for name, terms in self._terms.items())

    def control_statistics(self) -> tuple[Statistic, ...]:
        return tuple(statistic(name, terms) for name, terms in self._control.items())


def is_impossible(place: Place, sampler: Sampler) -> bool:
    """Whether the law excludes the token also if its score were as much higher as rounding could make it: a token may lie at the
    very edge of top-k or top-p.
    """
    size = float(place.logits[torch.isfinite(place.logits)].abs().max())
    raised = place.logits.clone()
    raised[place.said] += size * math.sqrt(torch.finfo(place.logits.dtype).eps)
    return not sampler.probs(place.ids, raised)[place.said]


def _first_only_plan(members: Sequence[Member], num_committed: int) -> Plan:
    """Every member's first tokens, within its own context."""
    context = PlanContext(tuple(members), num_committed, tokens_wanted=2)
    depths = [draft_limit(member, context) for member in members]
    shares = tuple(
        Plan(depth, member.num_draft_nodes if depth else 0) for member, depth in zip(members, depths, strict=True)
    )
    return Plan(max(depths, default=0), sum(share.num_nodes for share in shares), shares)


def _controlled(control: Verifier, tree: TokenTree, place: Place, sampler: Sampler) -> int:
    """The first token that `control` emits. What it asks below the root is answered as at the root, and is not used."""
    logits = place.logits.expand(len(tree) + 1, -1)
    verdict = control(tree, TreeAnswers(sampler, place.ids, tree, logits))
    return tree.token_ids[verdict.path[0]] if verdict.path else verdict.target_token
