"""Negative controls of the gate in test_exact.py: what looks right and is biased must fail the very
same computation.

Each control says in its name what is wrong. Where a number is given, it is the total variation
between what comes out and the target's distribution, worked out by hand or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from exact import (
    Distribution,
    Every,
    Tables,
    Toy,
    branches,
    constant,
    decoder_distribution,
    distance,
    lookup,
    sampled,
    step_distribution,
    table,
    total_variation,
    twice,
)

from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.merge import merge
from specens.decoding.sampling import Sampler
from specens.decoding.types import ROOT, Draft, Plan, SampledNode, TokenTree, Verdict, depths_of
from specens.decoding.verify import (
    Coupled,
    NodeScores,
    PerRow,
    Residual,
    Typical,
    acceptance,
    residual,
)
from specens.drafters.ensemble import Ensemble

pytestmark = pytest.mark.laws

P, Q = constant(0.5, 0.3, 0.2), constant(0.2, 0.5, 0.3)
P4, Q4 = constant(0.1, 0.2, 0.4, 0.3), constant(0.6, 0.1, 0.1, 0.2)
Control = Callable[[], tuple[Distribution, Distribution]]
CONTROLS: dict[str, tuple[Control, float | None]] = {}


def control(total: float | None = None) -> Callable[[Control], Control]:
    """Add a control, with the total variation that it is known to have."""

    def add(run: Control) -> Control:
        CONTROLS[run.__name__] = (run, total)
        return run

    return add


def one_step(
    drafter: Any, verifier: Any = None, *, p: Any = P, **options: Any
) -> tuple[Distribution, Distribution]:
    verifier = verifier or Residual()
    distribution, wanted, _ = step_distribution(Tables(p), drafter, verifier, **options)
    return distribution, wanted


def drafting(propose: Callable[[tuple[int, ...], Sampler], Draft], nodes: int = 1) -> Toy:
    """A drafter of depth 1."""
    return Toy(lambda context, plan, sampler: propose(context, sampler), 1, nodes)


def probs_of(logits: Any) -> torch.Tensor:
    return logits(()).softmax(-1)


def beside(tokens: list[int], probs: list[torch.Tensor]) -> Draft:
    return Draft(tuple(tokens), (ROOT,) * len(tokens), draft_probs=tuple(probs))


def sample(logits: Any, context: tuple[int, ...], sampler: Sampler) -> tuple[int, torch.Tensor]:
    ((token, probs),) = sampler.sample(context, logits(context))
    assert probs is not None
    return token, probs


# Drafters that report another distribution than the one they sampled from.


@control(0.30)
def argmax_is_drafted_and_tested_with_the_softmax():
    return one_step(
        drafting(lambda context, sampler: Draft.chain([int(Q(context).argmax())], [probs_of(Q)]))
    )


@control(0.125)
def sampled_from_top_2_and_tested_with_the_raw_distribution():
    top_2 = constant(0.0, 0.625, 0.375)

    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        return Draft.chain([sample(top_2, context, sampler)[0]], [probs_of(Q)])

    return one_step(drafting(propose))


@control()
def the_second_sample_without_replacement_is_tested_with_the_first_ones_distribution():
    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        samples = sampler.sample(context, Q4(context), 2)
        return beside([token for token, _ in samples], [probs_of(Q4)] * 2)

    return one_step(drafting(propose, 2), p=P4)


@control(0.10)
def a_confidence_stop_drops_the_token_just_sampled():
    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        token, probs = sample(Q, context, sampler)
        return Draft.chain([token], [probs]) if probs[token] > 0.25 else Draft()

    return one_step(drafting(propose))


# Orders and cuts that look at what was sampled.


def two_samples(
    context: tuple[int, ...], sampler: Sampler, *each: Any
) -> list[tuple[int, torch.Tensor]]:
    return [sample(logits, context, sampler.fork(f"{place}")) for place, logits in enumerate(each)]


@control(0.15)
def the_likeliest_of_two_samples_is_kept():
    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        both = two_samples(context, sampler, Q, Q)
        token, probs = max(both, key=lambda entry: float(entry[1][entry[0]]))
        return Draft.chain([token], [probs])

    return one_step(drafting(propose))


@control(0.15)
def siblings_are_tested_in_the_order_of_their_sampled_confidence():
    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        both = two_samples(context, sampler, Q, Q)
        both.sort(key=lambda entry: -float(entry[1][entry[0]]))
        return beside([token for token, _ in both], [probs for _, probs in both])

    return one_step(drafting(propose, 2))


@control(0.11)
def a_chain_that_looked_at_a_sample_is_tested_before_it():
    """An n-gram on top of drafter 1's sample: deterministic once that is known, but drafter 1 is
    then tested with its own distribution.
    """

    def propose(context: tuple[int, ...], sampler: Sampler) -> Draft:
        token, probs = sample(Q, context, sampler)
        seen = (token + 1) % 3
        return beside([seen, token], [torch.eye(3, dtype=torch.float64)[seen], probs])

    return one_step(drafting(propose, 2))


def cut_by_tokens(draft: Draft, plan: Plan, eos_ids: Any = ()) -> TokenTree:
    """Nodes of several owners stay, and equal samples make room for others: the rule for coupled,
    but the samples stay in.
    """
    tree = merge(draft, Plan(plan.shares, 99), eos_ids)
    rank = sorted(
        range(len(tree)), key=lambda node: (tree.depths[node], -tree.owners[node].bit_count(), node)
    )
    kept = sorted(rank[: plan.num_nodes])
    place = {node: index for index, node in enumerate(kept)}
    parents = tuple(place.get(tree.parents[node], ROOT) for node in kept)
    return TokenTree(
        tuple(tree.token_ids[node] for node in kept),
        parents,
        depths_of(parents),
        tuple(tree.owners[node] for node in kept),
        tuple(
            SampledNode(place[sample.node], sample.owner, sample.draft_probs)
            for sample in tree.samples
            if sample.node in place
        ),
    )


@control()
def the_cut_prefers_tokens_that_several_members_sampled():
    members = Ensemble(
        {"a": sampled(table(2), 1), "b": sampled(table(3), 1), "c": sampled(table(3), 1)}
    )
    return one_step(members, p=table(1), budget=FixedBudget(1), merge=cut_by_tokens)


def cut_by_what_was_proposed(draft: Draft, plan: Plan, eos_ids: Any = ()) -> TokenTree:
    """Takes turns among the nodes that are there, though a chain that ended early leaves its turn
    to others.
    """
    count: dict[int, int] = {}
    turns = []
    for node in range(len(draft)):
        turns.append((count.setdefault(draft.owner(node), 0), node))
        count[draft.owner(node)] += 1
    kept = sorted(node for _, node in sorted(turns)[: plan.num_nodes])
    place = {node: index for index, node in enumerate(kept)}
    short = Draft(
        tuple(draft.token_ids[node] for node in kept),
        tuple(place.get(draft.parents[node], ROOT) for node in kept),
        tuple(draft.owner(node) for node in kept),
        draft_probs=tuple(draft.draft_probs[node] for node in kept),
    )
    return merge(short, Plan(plan.shares, 99), eos_ids)


@control()
def the_cut_gives_the_turns_of_a_chain_that_ended_early_to_others():
    members = Ensemble(
        {"a": branches(table(8)), "b": sampled(table(9), stop=lambda token: token != 0)}
    )
    return one_step(members, p=table(7), budget=FixedBudget(4), merge=cut_by_what_was_proposed)


# Verifiers.


@dataclass(frozen=True)
class OneLevel:
    """Decides about the root's children only."""

    decide: Callable[[TokenTree, NodeScores], int]
    coupled: bool = False

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        token = self.decide(tree, scores)
        child = tree.children().get(ROOT, {}).get(token)
        return (
            Verdict((), token) if child is None else Verdict((child,), scores.target_token(child))
        )


@control(0.07)
def an_equal_sample_is_skipped_after_its_twin_was_rejected():
    def decide(tree: TokenTree, scores: NodeScores) -> int:
        probs, rejected = scores.target_probs(ROOT), set()
        for turn, sample in enumerate(tree.samples):
            token = tree.token_ids[sample.node]
            if token in rejected:
                continue
            if scores.flip(ROOT, acceptance(probs, sample.draft_probs, token), turn):
                return token
            rejected.add(token)
            probs = residual(probs, sample.draft_probs)
        return scores.sample(ROOT, probs)

    return one_step(twice(Q4), OneLevel(decide), p=P4)


@control(0.30)
def a_target_only_test_counts_an_equal_sibling_twice():
    def decide(tree: TokenTree, scores: NodeScores) -> int:
        probs, left = scores.target_probs(ROOT), 1.0
        for turn, token in enumerate(tree.token_ids):
            if scores.flip(ROOT, min(float(probs[token]) / left, 1.0), turn):
                return token
            left -= float(probs[token])
        tried = torch.tensor(sorted(set(tree.token_ids)))
        return scores.sample(
            ROOT, probs.index_fill(0, tried, 0.0) / probs.index_fill(0, tried, 0.0).sum()
        )

    unmerged = TokenTree((1, 1), (ROOT, ROOT), (1, 1), (1, 1))
    drafter = drafting(lambda context, sampler: Draft((1, 1), (ROOT, ROOT)), 2)
    return one_step(drafter, OneLevel(decide), merge=lambda *_: unmerged)


@control(0.50)
def the_targets_best_token_is_accepted_if_it_was_drafted():
    def decide(tree: TokenTree, scores: NodeScores) -> int:
        best = int(scores.target_probs(ROOT).argmax())
        return best if best in tree.children()[ROOT] else scores.target_token(ROOT)

    return one_step(drafting(lambda context, sampler: Draft.chain([0])), OneLevel(decide))


@control(0.20)
def each_of_two_rows_is_tested_alone_and_the_longest_kept():
    half, sure = constant(0.5, 0.5), constant(0.9, 0.1)
    return one_step(
        Ensemble({"a": sampled(sure, 1), "b": sampled(sure, 1)}), PerRow(), p=half, strict=False
    )


@control(0.28)
def each_of_three_rows_is_tested_alone_and_the_longest_kept():
    half, sure = constant(0.5, 0.5), constant(0.9, 0.1)
    members = Ensemble({name: sampled(sure, 1) for name in "abc"})
    return one_step(members, PerRow(), p=half, strict=False)


@control()
def each_row_is_tested_alone_and_the_longest_kept_on_random_distributions():
    return one_step(
        Ensemble({"a": sampled(table(2)), "b": sampled(table(3))}),
        PerRow(),
        p=table(1),
        strict=False,
    )


@dataclass(frozen=True)
class TokenPerRow:
    """Coupled, but every row samples the target anew."""

    coupled: bool = True

    def __call__(self, tree: TokenTree, scores: NodeScores) -> Verdict:
        verdicts = []
        for leaf in tree.leaves():
            path: list[int] = []
            for node in tree.path_to(leaf):
                token = scores.target_token(path[-1] if path else ROOT)
                if token != tree.token_ids[node]:
                    verdicts.append(Verdict(tuple(path), token))
                    break
                path.append(node)
            else:
                verdicts.append(Verdict(tuple(path), scores.target_token(leaf)))
        return max(verdicts, key=lambda verdict: len(verdict.path))


@control()
def the_target_is_sampled_once_per_row_and_the_longest_kept():
    return one_step(
        Ensemble({"a": lookup(1), "b": lookup(2)}), TokenPerRow(), p=table(1, 3, 0.7), strict=False
    )


@control()
def typical_acceptance_is_lossy():
    return one_step(sampled(table(4)), Typical(), p=table(3))


# Noise that is shared where it must not be.


class Unforked(Every):
    """Forks are the same noise, in tenths: a position has one of ten outcomes, and a distribution
    takes its share of them.
    """

    def fork(self, name: str) -> Every:
        return self

    def choice(self, scores: torch.Tensor, position: int) -> int:
        if (position,) not in self.used:
            self.used[(position,)] = [self._take([0.1] * 10)]
        below = scores.double().softmax(-1).cumsum(-1)
        return int((below < (self.used[(position,)][0] + 0.5) / 10).sum())


@control()
def members_sample_with_one_noise_and_are_tested_as_independent():
    return one_step(
        Ensemble({"a": sampled(Q4, 1), "b": sampled(Q4, 1)}), p=P4, make=Unforked, strict=False
    )


@control()
def drafts_are_sampled_with_the_targets_noise_and_tested_as_independent():
    return decoder_distribution(Tables(P4), sampled(Q4, 1), Residual(), count=2, make=Unforked)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_gate_rejects(name):
    run, total = CONTROLS[name]
    distribution, wanted = run()
    print(
        f"error {distance(distribution, wanted):.4f}, total variation "
        f"{total_variation(distribution, wanted):.4f}"
    )  # shown by pytest -rP
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-9), "a distribution all the same"
    assert distance(distribution, wanted) > 1e-3
    if total is not None:
        assert total_variation(_first(distribution), _first(wanted)) == pytest.approx(
            total, abs=0.005
        )


def _first(distribution: Distribution) -> Distribution:
    """The distribution of the first token."""
    found: Distribution = {}
    for text, weight in distribution.items():
        found[text[:1]] = found.get(text[:1], 0.0) + weight
    return found


class Right(Every):
    """Unforked's tenths, but forks are independent."""

    def choice(self, scores: torch.Tensor, position: int) -> int:
        below = scores.double().softmax(-1).cumsum(-1)
        return int((below < (self._take([0.1] * 10) + 0.5) / 10).sum())


def test_the_tenths_are_not_what_is_wrong():
    distribution, wanted = decoder_distribution(
        Tables(P4), sampled(Q4, 1), Residual(), count=1, make=Right
    )
    assert distance(distribution, wanted) < 1e-12


def test_the_same_cut_passes_when_it_is_blind():
    """What the control changes is all that is wrong with it."""
    members = Ensemble(
        {"a": branches(table(8)), "b": sampled(table(9), stop=lambda token: token != 0)}
    )
    distribution, wanted = one_step(members, p=table(7), budget=FixedBudget(4))
    assert distance(distribution, wanted) < 1e-12


def test_per_row_and_coupled_are_exact_where_they_should_be():
    """One row alone needs no choice among rows; and at temperature 0 the longest row is the right
    one.
    """
    distribution, wanted = one_step(sampled(table(2)), PerRow(), p=table(1), strict=False)
    assert distance(distribution, wanted) < 1e-12
    distribution, wanted = one_step(
        Ensemble({"a": lookup(3), "b": lookup(4)}), Coupled(), p=table(1)
    )
    assert distance(distribution, wanted) < 1e-12
