"""The gate: the distribution of the emitted text, computed exactly, is the target's own, whatever
the drafts, verifier, layout or order.

Every outcome of every sample and every flip goes through the real code (see `exact`); the error is
rounding in float64. What looks right and is biased must fail the same test: test_biased.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exact import (
    Every,
    Onlooker,
    Tables,
    TinyTarget,
    Toy,
    below,
    branches,
    constant,
    decoder_distribution,
    distance,
    every_draft,
    first_draft,
    fixed,
    greedy,
    lookup,
    outcomes,
    parallel,
    sampled,
    sampled_tree,
    step_distribution,
    table,
    target_distribution,
    tiny_model,
    twice,
    without,
)
from helpers import decode_steps, guesser_weights
from transformers import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.types import Draft
from specens.decoding.verify import Block, Coupled, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.scripted import Oracle
from specens.drafters.trained.non_autoregressive import NonAutoregressive

pytestmark = pytest.mark.laws

LIMIT = 1e-12
ERRORS: list[float] = []
"""The error of every combination that was gone through."""

VERIFIERS = (Residual(), Coupled())
BUDGETS = {f"{count}": FixedBudget(count) for count in (64, 4, 3, 2, 1)} | {
    "first": FixedBudget(3, first_only=True)
}
PROMPT = (0, 1)
TARGETS: dict[str, Any] = {
    "table": Tables(table(1)),
    "zeros": Tables(without(table(2), lambda prefix: {sum(prefix) % 3})),
    "four": Tables(table(3, 4)),
    "model": TinyTarget(),
}


def member(name: str, target: Any) -> Any:
    """A toy drafter of each kind."""
    size, seed = target.vocab_size, len(name)
    q = table(100 + seed, size)
    kinds = {
        "chain": lambda: sampled(q),
        "sample": lambda: sampled(q, 1),
        "other": lambda: sampled(table(200, size), 1),
        "same": lambda: sampled(target.logits),
        "narrow": lambda: sampled(without(q, lambda prefix: {0}), 1),
        "disjoint": lambda: sampled(without(q, lambda prefix: {0, 1, 2} - {sum(prefix) % 3})),
        "parallel": lambda: parallel(q),
        "unrecorded": lambda: sampled(q, recorded=False),
        "short": lambda: sampled(q, stop=lambda token: token != 0),
        "greedy": lambda: greedy(q),
        "lookup": lambda: lookup(5, 2, size),
        "retrieval": lambda: lookup(8, 1, size),
        "bushy": lambda: fixed((0, 1, 0, 2, 1, 1), (-1, -1, 1, 2, 0, -1)),
        "branches": lambda: branches(q, 1, 2),
        "long_branches": lambda: branches(q, 2, 2),
        "all": lambda: branches(q, 1, 3),
        "sampled_tree": lambda: sampled_tree(q),
        "twice": lambda: twice(q),
        "twice_deep": lambda: twice(q, 2),
        "thrice": lambda: twice(q, 1, 3),
        "after": lambda: Onlooker(sampled(q, 1), 5, depth=2, vocab_size=size),
        "before": lambda: Onlooker(sampled(q, 1), 5, depth=2, vocab_size=size, first=True),
        "below": lambda: below(1, q),
        "idle": lambda: Toy(lambda context, plan, sampler: Draft()),
    }
    return kinds[name]()


def ensemble(names: Sequence[str], target: Any) -> Ensemble:
    return Ensemble({f"{name}{place}": member(name, target) for place, name in enumerate(names)})


ENSEMBLES = (
    *(
        "chain",
        "same",
        "disjoint",
        "parallel",
        "unrecorded",
        "branches",
        "long_branches",
        "all",
        "sampled_tree",
    ),
    *("twice", "twice_deep", "thrice", "after", "before", "below", "bushy"),
    *(
        "chain+lookup",
        "chain+greedy",
        "sample+sample",
        "sample+other",
        "same+sample",
        "chain+short",
        "long_branches+short",
        "chain+parallel",
    ),
    *(
        "branches+twice",
        "sampled_tree+sample",
        "disjoint+narrow",
        "after+sample",
        "before+other",
        "below+sample",
        "unrecorded+sample",
    ),
    *(
        "sample+other+greedy",
        "sample+branches+lookup",
        "twice+idle+sample",
        "parallel+lookup+bushy",
        "sample+sample+same",
    ),
    *(
        "before+greedy+sample",
        "short+after+retrieval",
        "narrow+disjoint+unrecorded",
        "sample+other+greedy+lookup",
    ),
    "sample+narrow+branches+retrieval",
)


def orders(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every order of up to three members, every rotation of more, forwards and backwards."""
    if len(names) <= 3:
        return sorted(set(itertools.permutations(names)))
    turned = [(*names[i:], *names[:i]) for i in range(len(names))]
    return turned + [order[::-1] for order in turned]


def check(target: Any, drafter: Any, verifier: Any, **options: Any) -> float:
    """Go through one combination: the mean number of accepted tokens."""
    distribution, wanted, accepted = step_distribution(
        target, drafter, verifier, prompt=PROMPT, **options
    )
    ERRORS.append(distance(distribution, wanted))
    given = {
        key: value
        for key, value in options.items()
        if key in ("budget", "layout", "processors", "eos")
    }
    assert ERRORS[-1] < LIMIT, (
        f"{[m.name for m in drafter.members]}, {type(verifier).__name__}, {given}"
    )
    return accepted


def drafts_of(
    target: Any, drafter: Any, budget: Any, verifier: Any, processors: Sequence[Any] = ()
) -> list[Any]:
    plan = budget.plan(PlanContext(drafter.members, len(PROMPT), 12))
    return every_draft(drafter, target, plan, PROMPT, processors, coupled=verifier.coupled)


def check_all(
    target: Any, names: Sequence[str], budgets: Sequence[str], layouts: Sequence[str] = ("tree",)
) -> int:
    """Go through all combinations: their number."""
    before = len(ERRORS)
    for order, verifier in itertools.product(orders(names), VERIFIERS):
        drafter = ensemble(order, target)
        # What is drafted does not depend on the tree's budget.
        drafts = drafts_of(target, drafter, BUDGETS["64"], verifier)
        for budget, layout in itertools.product(budgets, layouts):
            check(
                target,
                drafter,
                verifier,
                budget=BUDGETS[budget],
                layout=layout,
                drafts=None if BUDGETS[budget].first_only else drafts,
            )
    return len(ERRORS) - before


def num_orders(names: Sequence[str]) -> int:
    """How many different orders there are, counted in another way than they are made: no loop may
    be empty by mistake.
    """
    if len(names) > 3:
        return 2 * len(names)
    return math.factorial(len(names)) // math.prod(
        math.factorial(count) for count in Counter(names).values()
    )


@pytest.mark.parametrize("names", ENSEMBLES)
def test_a_steps_distribution_is_the_targets(names):
    count = check_all(TARGETS["table"], names.split("+"), list(BUDGETS))
    assert count == num_orders(names.split("+")) * len(VERIFIERS) * len(BUDGETS)


@pytest.mark.parametrize(
    "names",
    ["disjoint+narrow", "same+sample", "chain", "twice+lookup", "sampled_tree", "before+sample"],
)
@pytest.mark.parametrize("target", ["zeros", "four"])
def test_so_it_is_where_tokens_have_no_probability_and_with_four_tokens(target, names):
    count = check_all(TARGETS[target], names.split("+"), ["64", "3"])
    assert count == num_orders(names.split("+")) * len(VERIFIERS) * 2


@pytest.mark.parametrize(
    "names", ["chain+lookup", "sampled_tree", "sample+other+bushy", "before+sample", "twice+greedy"]
)
def test_a_real_models_distribution_in_both_layouts(names):
    """The reference is the model's own forward without a cache."""
    count = check_all(TARGETS["model"], names.split("+"), ["64", "3"], LAYOUTS)
    assert count == num_orders(names.split("+")) * len(VERIFIERS) * 2 * len(LAYOUTS)


@pytest.mark.parametrize(
    "names", ["chain+lookup", "sampled_tree", "after", "twice_deep", "sample+other+bushy"]
)
@pytest.mark.parametrize("eos", [(2,), (0, 1)])
def test_a_text_that_ends_inside_a_step(names, eos):
    target = TARGETS["table"]
    for order, verifier, budget in itertools.product(
        orders(names.split("+")), VERIFIERS, ("64", "3")
    ):
        accepted = check(target, ensemble(order, target), verifier, budget=BUDGETS[budget], eos=eos)
        assert 0 < accepted <= 2


PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.7)],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
    "no_repeat_ngram": [NoRepeatNGramLogitsProcessor(2)],
}


@pytest.mark.parametrize(
    "names", ["chain+greedy", "long_branches", "parallel+sample", "twice+lookup"]
)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_each_nodes_own_text(name, names):
    for verifier, target in itertools.product(VERIFIERS, (TARGETS["table"], TARGETS["model"])):
        for order, layout in itertools.product(orders(names.split("+")), LAYOUTS):
            if layout == "tree" or target is TARGETS["model"]:
                drafter = ensemble(order, target)
                options = {
                    "processors": PROCESSORS[name],
                    "layout": layout,
                    "budget": FixedBudget(4),
                }
                assert 0 < check(target, drafter, verifier, **options) <= 2


def test_members_that_propose_more_or_less_under_a_budget_that_binds():
    """With top-p the number of branches depends on what was sampled before them, and a short
    chain's length on its own tokens.
    """
    target, names = TARGETS["table"], ("long_branches", "short", "chain")
    for order, count in itertools.product(orders(names), (4, 5, 6, 7)):
        top_p = [TopPLogitsWarper(0.6)]
        assert (
            0
            < check(
                target,
                ensemble(order, target),
                Residual(),
                processors=top_p,
                budget=FixedBudget(count),
            )
            <= 2
        )


# The drafters of the package.


def real(name: str, target: Any) -> Any:
    model = target.model
    guesser = guesser_weights(
        model, kept=range(target.vocab_size), num_positions=2, hidden_layers=(1, 2)
    )
    return {
        "lm": lambda: LanguageModel(tiny_model(3, "gpt_neox", 5), 2),
        "short_lm": lambda: LanguageModel(tiny_model(3, "gpt2", 6), 1, name="short"),
        "beam": lambda: LanguageModel(tiny_model(3, "gpt2", 7), 2, name="beam", num_branches=2),
        "copy": lambda: LanguageModel(model, 1, name="copy"),
        "guesser": lambda: NonAutoregressive(guesser, 2, 4),
        "ngram": lambda: NGram(2, num_continuations=2),
        "oracle": lambda: Oracle(2),
    }[name]()


REAL_ENSEMBLES = (
    "lm",
    "beam",
    "guesser",
    "oracle",
    "lm+ngram",
    "beam+short_lm",
    "guesser+short_lm",
    "short_lm+copy+ngram",
)


@pytest.mark.parametrize("names", REAL_ENSEMBLES)
def test_the_packages_drafters(names):
    target = TARGETS["model"]
    for order in orders(names.split("+")):
        drafter = Ensemble({name: real(name, target) for name in order})
        drafts = drafts_of(target, drafter, BUDGETS["64"], Residual())
        for budget, layout in itertools.product(("64", "3"), LAYOUTS):
            accepted = check(
                target, drafter, Residual(), budget=BUDGETS[budget], layout=layout, drafts=drafts
            )
            assert accepted > 0.1
        for seed in range(2):  # coupled: drafted with keyed noise, verified with every outcome
            drafts = [(1.0, keyed_draft(target, drafter, seed))]
            for layout in LAYOUTS:
                check(target, drafter, Coupled(), layout=layout, drafts=drafts, length=3)


def keyed_draft(target: Any, drafter: Any, seed: int) -> Draft:
    plan = FixedBudget().plan(PlanContext(drafter.members, len(PROMPT), 12))
    return first_draft(drafter, target, plan, PROMPT, Sampler(noise=KeyedNoise(seed, "p")))


def test_a_drafter_with_the_targets_own_distribution_is_always_accepted():
    target = TARGETS["model"]
    for verifier_accepts in (
        check(target, Ensemble({"oracle": Oracle(2)}), Residual()),
        check(TARGETS["table"], member("same", TARGETS["table"]), Residual()),
    ):
        assert verifier_accepts == pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_of_low_precision_are_the_distribution_that_they_are(dtype):
    """What is read in half precision is computed with in float64; an equal distribution leaves no
    residual, and no NaN.
    """

    class Low(Tables):
        def _logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
            return self.logits(prefix).to(dtype)

    target = Low(lambda prefix: table(1)(prefix).to(dtype).double())
    members = {
        "same": sampled(target._logits, 1),
        "chain": sampled(lambda prefix: table(2)(prefix).to(dtype)),
    }
    for names, verifier in itertools.product(itertools.permutations(members), VERIFIERS):
        check(target, Ensemble({name: members[name] for name in names}), verifier)
    assert check(target, sampled(target._logits), Residual()) == pytest.approx(2, abs=1e-12)


# Block verification: of one member's sampled chain, and of anything else as Residual does it.

CHAINS = ("chain", "same", "disjoint", "narrow", "parallel", "short", "sample")


@pytest.mark.parametrize(
    "names",
    [
        *CHAINS,
        "below",
        "before",
        "twice_deep",
        "chain+lookup",
        "sample+sample",
        "unrecorded+sample",
    ],
)
def test_block_verification_keeps_the_targets_distribution(names):
    for target in TARGETS.values():
        for order, layout in itertools.product(orders(names.split("+")), LAYOUTS):
            if layout == "tree" or target is TARGETS["model"]:
                check(target, ensemble(order, target), Block(), layout=layout)
    target, drafter = TARGETS["table"], ensemble(names.split("+"), TARGETS["table"])
    for budget, eos in itertools.product(BUDGETS, ((), (2,), (0, 1))):
        check(target, drafter, Block(), budget=BUDGETS[budget], eos=eos)
    for processors in PROCESSORS.values():
        check(target, drafter, Block(), processors=processors)
    distribution, wanted = decoder_distribution(target, drafter, Block(), count=3, eos=(2,))
    ERRORS.append(distance(distribution, wanted))
    assert ERRORS[-1] < LIMIT


def test_block_verification_accepts_more_of_a_chain_and_never_less():
    gains = []
    for seed in range(8):
        target, drafter = Tables(table(seed)), sampled(table(50 + seed), 3)
        gains.append(check(target, drafter, Block()) - check(target, drafter, Residual()))
    assert min(gains) > -1e-12 and max(gains) > 0.01


def test_block_verification_of_the_papers_example():
    """p = (1/3, 2/3), q = (2/3, 1/3) at every place, a chain of two: 11/9 accepted where token by
    token it is 10/9.
    """
    target = Tables(lambda prefix: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log())
    drafter = sampled(lambda prefix: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log())
    assert check(target, drafter, Residual()) == pytest.approx(10 / 9)
    assert check(target, drafter, Block()) == pytest.approx(11 / 9)


# The whole loop.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", ["sample+retrieval", "sample+other", "twice", "short"])
def test_whole_texts_of_the_loop_have_the_targets_distribution(names, layout):
    """Several steps: their noise is independent, and what one leaves behind does not reach the
    next.
    """
    target = (
        TARGETS["model"] if layout == "rows" and names == "sample+retrieval" else TARGETS["table"]
    )
    for verifier in VERIFIERS:
        distribution, wanted = decoder_distribution(
            target, ensemble(names.split("+"), target), verifier, layout=layout, count=3, eos=(2,)
        )
        ERRORS.append(distance(distribution, wanted))
        assert ERRORS[-1] < LIMIT


COSTS = CostTable(
    ((0, 10.0), (1, 11.0), (4, 16.0)),
    {"sample0": ((1, 1.0),), "short_lm": ((1, 1.0), (2, 2.0))},
    1.0,
)
LEARNING = {
    "cost_aware": CostAwareBudget(),
    "narrow": CostAwareBudget(max_nodes=2),
    "ucb1": BanditBudget(),
    "thompson": BanditBudget(strategy="thompson"),
}


@pytest.mark.parametrize("budget", LEARNING)
@pytest.mark.parametrize(
    "names", ["chain", "sample+retrieval", "sample+other", "short", "short_lm+ngram"]
)
def test_budgets_that_learn_keep_the_distribution(names, budget):
    """What they schedule and verify in the second step depends on what was sampled in the first: on
    its tokens, confidences and verdict.
    """
    target = TARGETS["model"] if "lm" in names else TARGETS["table"]
    members = names.split("+")
    drafter = (
        Ensemble({name: real(name, target) for name in members})
        if "lm" in names
        else ensemble(members, target)
    )
    plans = set()

    class Priced:
        """The budget with a table of costs."""

        def begin(self, members, costs, earlier=None):
            policy = LEARNING[budget].begin(members, COSTS)
            plan = policy.plan
            policy.plan = lambda context: [plans.add(made := plan(context)), made][1]
            return policy

    for verifier in VERIFIERS:
        distribution, wanted = decoder_distribution(
            target, drafter, verifier, budget=Priced(), count=3
        )
        ERRORS.append(distance(distribution, wanted))
        assert ERRORS[-1] < LIMIT
    assert len(plans) > 1, "it decided one thing and another"


def test_whole_texts_with_the_packages_drafters():
    target = TARGETS["model"]
    drafter = Ensemble({name: real(name, target) for name in ("short_lm", "ngram")})
    distribution, wanted = decoder_distribution(
        target, drafter, Residual(), processors=PROCESSORS["repetition_penalty"], count=3
    )
    ERRORS.append(distance(distribution, wanted))
    assert ERRORS[-1] < LIMIT


# Shared noise: the drafters know everything that the target is going to choose.


class Chosen:
    """The target's choice after every prefix, sampled beforehand. Drafters may look at all."""

    def __init__(self, logits: Any, choices: dict[tuple[int, ...], int]) -> None:
        self.by_scores = {
            logits(prefix).double().numpy().tobytes(): token for prefix, token in choices.items()
        }

    def choice(self, scores: torch.Tensor, position: int) -> int:
        return self.by_scores[scores.double().numpy().tobytes()]

    def perturbed(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        raise AssertionError("these drafters do not rank")

    def flip(self, probability: float, position: int, turn: int) -> bool:
        raise AssertionError("coupled verification flips no coin")

    def fork(self, name: str) -> Chosen:
        raise AssertionError("shared noise is not forked")


ADVERSARIES: dict[str, Callable[[list[int]], Draft]] = {
    "right": lambda output: Draft.chain(output[:2]),
    "wrong": lambda output: Draft.chain([1 - token for token in output[:2]]),
    "right about 0": lambda output: Draft.chain([0]) if output[0] == 0 else Draft(),
    "right after 1": lambda output: (
        Draft((output[0], output[0], 0), (-1, -1, 1)) if output[0] == 1 else Draft.chain([1, 1])
    ),
    "crowded out": lambda output: Draft(
        (1 - output[0], 0, 1, output[0], output[1]), (-1, 0, 0, -1, 3)
    ),
}


@pytest.mark.parametrize(
    "names", [*itertools.combinations(ADVERSARIES, 1), *itertools.combinations(ADVERSARIES, 2)]
)
def test_with_shared_noise_the_text_is_a_function_of_the_noise_alone(names):
    """Two tokens, texts of three: all 2^7 ways to choose after every prefix, each with its
    probability. The drafts are functions of these choices, bent on changing the text.
    """
    logits, prompt, count = table(4, 2), (0,), 3
    prefixes = [
        prompt + text
        for length in range(count)
        for text in itertools.product((0, 1), repeat=length)
    ]

    def choose(noise: Every) -> dict[tuple[int, ...], int]:
        return {
            prefix: noise.choice(logits(prefix), place) for place, prefix in enumerate(prefixes)
        }

    for max_nodes in (64, 2):
        distribution: dict[tuple[int, ...], float] = {}
        for weight, choices in outcomes(choose):
            text = prompt
            while len(text) < len(prompt) + count:
                text += (choices[text],)

            def members(text: tuple[int, ...] = text) -> dict[str, Toy]:
                return {
                    name: Toy(
                        lambda context, plan, sampler, draft=ADVERSARIES[name]: draft(
                            [*text[len(context) :], 0, 0]
                        ),
                        2,
                        5,
                    )
                    for name in names
                }

            decoder = Decoder(
                Tables(logits), Ensemble(members()), FixedBudget(max_nodes), Coupled()
            )  # pyright: ignore
            sampler = Sampler(noise=Chosen(logits, choices))
            steps = decode_steps(decoder, prompt, sampler, StopRules(len(prompt) + count))
            output = tuple(token for step in steps for token in step.token_ids)
            assert prompt + output == text, "the text does not depend on the drafts"
            distribution[output] = distribution.get(output, 0.0) + weight
        ERRORS.append(distance(distribution, target_distribution(logits, prompt, count)))
        assert ERRORS[-1] < LIMIT


# The gate itself.


def test_the_enumerator_goes_through_everything_once():
    def run(noise: Every) -> tuple[int, bool, int]:
        first = noise.choice(torch.tensor([0.5, 0.0, 0.5]).log(), 0)
        return (
            first,
            noise.flip(0.25, 0, 0),
            noise.fork("x").choice(torch.tensor([0.1, 0.9]).log(), 0),
        )

    found = {outcome: weight for weight, outcome in outcomes(run)}
    assert len(found) == len(list(outcomes(run))) == 8
    assert found[2, True, 1] == pytest.approx(0.5 * 0.25 * 0.9)
    assert sum(found.values()) == pytest.approx(1)


def test_the_enumerator_refuses_noise_that_is_used_twice():
    scores = torch.zeros(3)
    with pytest.raises(AssertionError, match="used twice"):
        list(outcomes(lambda noise: (noise.choice(scores, 4), noise.choice(scores, 4))))
    with pytest.raises(AssertionError, match="flipped twice"):
        list(outcomes(lambda noise: (noise.flip(0.5, 4, 0), noise.flip(0.5, 4, 0))))


def test_the_distributions_are_those_of_the_books():
    """One token, p=(.5, .3, .2), drafted from q=(.2, .5, .3): accepted with probability sum min(p,
    q).
    """
    target = Tables(constant(0.5, 0.3, 0.2))
    q = constant(0.2, 0.5, 0.3)
    assert check(target, sampled(q, 1), Residual()) == pytest.approx(0.7)
    # noise of their own: sum p q
    assert check(target, sampled(q, 1), Coupled()) == pytest.approx(0.1 + 0.15 + 0.06)
    assert check(target, fixed((1,), (-1,)), Residual()) == pytest.approx(0.3)


def test_the_count_and_the_largest_error(capsys):
    """Last: what this file has gone through."""
    with capsys.disabled():
        print(
            f"\nexact distribution: {len(ERRORS):,} combinations of verifier x layout x order x "
            "ensemble, "
            f"largest error {max(ERRORS, default=0.0):.0e}"
        )
    assert all(error < LIMIT for error in ERRORS)
