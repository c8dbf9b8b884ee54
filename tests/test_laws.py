"""The laws: what holds for every drafter, every layout and every budget.

Each law runs over the whole table of drafters below. A new drafter, layout or budget gets a line in
the tables, not a law of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Fake,
    decode,
    decode_steps,
    guesser_weights,
    plain_greedy,
    text_drafter,
    trained_tokenizer,
)

from specens.analysis.summary import summarise
from specens.decoding.budgets.bandit import BanditBudget
from specens.decoding.budgets.base import Budget
from specens.decoding.budgets.cost_aware import CostAwareBudget
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.dense import Recording, dense_drafts
from specens.decoding.loop import Decoder
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import Draft, TokenTree
from specens.decoding.verify import Coupled
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.drafters.retrieval.datastore import build
from specens.drafters.retrieval.retrieval import Retrieval
from specens.drafters.scripted import Fixed, Oracle, Replayed
from specens.drafters.trained.distilled import small_copy
from specens.drafters.trained.non_autoregressive import NonAutoregressive
from specens.drafters.trained.trimmed_head import TrimmedHead
from specens.drafters.universal import Universal
from specens.errors import DrafterError
from specens.models.load import TargetCopy
from specens.models.tiny import byte_tokenizer, random_model
from specens.records.schema import PromptRecord, frames_of

pytestmark = pytest.mark.laws

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [100], [9, 3, 9, 3, 9, 3, 44, 12, 9])
COUNT = 16
SEEDS = (None, 7)


@dataclass(frozen=True)
class Priced:
    """A budget that knows what steps cost."""

    budget: Any
    costs: CostTable

    @property
    def max_nodes(self) -> int:
        return self.budget.max_nodes

    @property
    def needs_costs(self) -> bool:
        return False

    def begin(self, members, costs, earlier=None):
        return self.budget.begin(members, self.costs, earlier)


@dataclass(frozen=True)
class VerifiesNothing(FixedBudget):
    """Every member drafts in every step, and nothing is verified."""

    def select(self, tree: TokenTree) -> TokenTree:
        return TokenTree()


# Nodes cost, and so do models: some members draft now and then, some trees are cut, some steps are
# AR steps.
COSTS = CostTable(
    ((0, 10.0), (4, 11.0), (8, 14.0), (16, 24.0)),
    dict.fromkeys(
        ("lm", "same", "quantized", "distilled", "universal", "block", "heads"),
        ((1, 2.0), (3, 4.0)),
    )
    | {"oracle": ((1, 5.0), (5, 25.0)), "ngram": ((1, 0.1),)},
    1.0,
)
BUDGETS: dict[str, Any] = {
    "fixed": FixedBudget(),
    "fixed3": FixedBudget(max_nodes=3),
    "fixed0": FixedBudget(max_nodes=0),
    "priority": FixedBudget(max_nodes=6, first_only=True),
    "cost_aware": CostAwareBudget(),
    "cost_aware_priced": Priced(CostAwareBudget(max_nodes=12), COSTS),
    "ucb1": Priced(BanditBudget(), COSTS),
    "thompson": Priced(BanditBudget(max_nodes=6, strategy="thompson"), COSTS),
}
LEARNING = ("cost_aware", "cost_aware_priced", "ucb1", "thompson")


@pytest.fixture(scope="module")
def model():
    # Greedy text repeats itself now and then, so that n-grams are found.
    return random_model(vocab_size=128, max_position_embeddings=256, hidden_size=64, seed=3)


@pytest.fixture(scope="module")
def other():
    return random_model(vocab_size=128, max_position_embeddings=256, seed=9)


LIBRARY: list[str] = []
"""The folder of a small datastore, while the laws are tested."""


@pytest.fixture(scope="module", autouse=True)
def _library(model, tmp_path_factory):
    """Random texts, which are wrong now and then, and one that the target will output."""
    numbers = np.random.default_rng(0)
    texts = [numbers.integers(0, 128, 200).tolist() for _ in range(60)] + [
        plain_greedy(model, PROMPTS[0], COUNT // 2)
    ]
    folder = tmp_path_factory.mktemp("library") / "datastore"
    build(texts, folder, fingerprint="none", vocab_size=128, source="random ids")
    LIBRARY.append(str(folder))
    yield
    LIBRARY.clear()


def bushy(context):
    """A tree with branches, duplicates of siblings and a repeated path."""
    last = context[-1]
    return Draft((last, last, 5, 6, 7, last, 5), (-1, -1, 0, 1, 2, -1, 5))


def twins(context):
    """Two beams that begin alike, sampled separately: the right token is under the first of two
    equal siblings or the second.
    """
    first, second = context[-2:] if len(context) > 1 else (5, 6)
    return Draft((first, second, first, first, second, second), (-1, 0, -1, 2, -1, 4))


@functools.cache
def kept_of(model) -> tuple[int, ...]:
    """A trimmed vocabulary, small enough for random guesses to be right now and then, and without
    some ids that are output.
    """
    output = {token for prompt in PROMPTS for token in plain_greedy(model, prompt, COUNT)}
    return tuple(sorted(output))[::2]


def distilled(model):
    """The target's first layer and the trimmed head, untrained."""
    small = small_copy(model, [0]).eval()
    small.set_output_embeddings(TrimmedHead(model, torch.tensor(kept_of(model))))
    return LanguageModel(small, 3, name="distilled")


def guesser(model, architecture: str):
    weights = guesser_weights(model, architecture, kept=kept_of(model))
    return NonAutoregressive(weights, num_draft_tokens=4, num_draft_nodes=8, name=architecture)


class Reader(Universal):
    """Reads the target's ids as bytes: the target of these laws has no tokenizer."""

    def bind(self, target):
        super().bind(Target(target.model, byte_tokenizer()))


def drafter_of(name: str, model, other):
    """One drafter of each kind, and ensembles of them."""
    single = {
        "none": lambda: NoDrafter(),
        "ngram": lambda: NGram(6, num_continuations=3),
        "lm": lambda: LanguageModel(other, 3),
        "same": lambda: LanguageModel(model, 3, name="same"),
        "quantized": lambda: LanguageModel(TargetCopy("nf4"), 2, name="quantized"),
        "distilled": lambda: distilled(model),
        "heads": lambda: guesser(model, "heads"),
        "block": lambda: guesser(model, "block"),
        "oracle": lambda: Oracle(5),
        "wrong": lambda: Oracle(5, wrong=True),
        "fixed": lambda: Fixed([5, 6, 7, 8, 5], [-1, 0, 1, -1, 3]),
        "replayed": lambda: Replayed({tuple(p): plain_greedy(model, p, COUNT) for p in PROMPTS}),
        "retrieval": lambda: Retrieval(LIBRARY[0], 6, 12),
        "growing": lambda: Retrieval(LIBRARY[0], 4, 8, grow=True),
        "universal": lambda: Reader(other, 3, tokenizer=trained_tokenizer("words")),
        "bushy": lambda: Fake(bushy, "bushy"),
        "twins": lambda: Fake(twins, "twins"),
        "greedy": lambda: Fake(lambda context: Draft.chain([context[-1]] * 40), "greedy", depth=3),
        "idle": lambda: Fake(lambda context: [], "idle"),
    }
    if name in single:
        return single[name]()
    members = {member: drafter_of(member.rstrip("2"), model, other) for member in name.split("+")}
    return Ensemble(members)


DRAFTERS = (
    "none",
    "ngram",
    "lm",
    "same",
    "quantized",
    "distilled",
    "heads",
    "block",
    "oracle",
    "wrong",
    "fixed",
    "replayed",
    "retrieval",
    "growing",
    "universal",
    "bushy",
    "idle",
    "ngram+same",
    "retrieval+ngram+growing",
    "idle+wrong+ngram+lm+oracle",
    "bushy+bushy2+ngram",
    "twins+greedy+ngram",
    "ngram+distilled+block+heads+wrong",
)


def run(target, drafter, prompt, *, layout="tree", budget="fixed", seed=None):
    return decode(target, drafter, prompt, COUNT, layout=layout, budget=BUDGETS[budget], seed=seed)


@pytest.fixture(scope="module")
def ar_texts(model):
    """The output of the target alone, for each prompt and seed."""
    target = Target(model)
    return {
        (tuple(p), seed): run(target, NoDrafter(), p, seed=seed)[0]
        for p in PROMPTS
        for seed in SEEDS
    }


def test_ar_decoding_is_the_models_own_greedy(model, ar_texts):
    for prompt in PROMPTS:
        assert ar_texts[tuple(prompt), None] == plain_greedy(model, prompt, COUNT)


def test_ar_sampling_depends_on_the_seed_and_follows_no_argmax(ar_texts):
    for prompt in PROMPTS:
        assert len({tuple(ar_texts[tuple(prompt), seed]) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_law_1_3_5_output_is_ar_decodings_and_every_token_is_accounted_for(
    model, other, ar_texts, name, layout, budget
):
    target, drafter = Target(model), drafter_of(name, model, other)
    results = []
    for prompt, seed in itertools.product(PROMPTS, SEEDS):
        output, steps = run(target, drafter, prompt, layout=layout, budget=budget, seed=seed)
        assert output == ar_texts[tuple(prompt), seed], f"prompt {prompt}, seed {seed}"
        assert len(output) == sum(step.num_accepted for step in steps) + len(steps), (
            "nothing is trimmed here"
        )
        assert all(step.num_nodes <= BUDGETS[budget].max_nodes for step in steps)
        results.append(
            (
                PromptRecord(f"{prompt} {seed}", output_ids=output, decode_s=1.0, prefill_s=0.0),
                steps,
            )
        )
    _accounts_balance(*frames_of(results))


def _accounts_balance(prompts, steps, drafts):
    summary = summarise(prompts, steps, drafts)
    assert (
        summary["num_emitted"]
        == summary["num_accepted"] + summary["num_steps"] - summary["num_trimmed"]
    )
    assert summary["num_emitted"] == sum(map(len, prompts["output_ids"]))
    accepted = steps.set_index(["prompt_id", "step"])["num_accepted"]
    if len(drafts):
        shares = drafts.groupby(["prompt_id", "step"])[["token_share", "win"]].sum()
        assert (shares["token_share"] - accepted).abs().max() < 1e-9
        assert (shares["win"] - (accepted > 0)).abs().max() < 1e-9
        wins = sum(numbers["win_rate"] for numbers in summary["drafters"].values())
        assert wins + summary["no_win_rate"] == pytest.approx(1)


@pytest.mark.parametrize("budget", ["fixed", "cost_aware_priced", "ucb1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_law_1_a_text_that_ends_inside_a_block_ends_like_ar_decoding(model, other, layout, budget):
    target = Target(model)
    text = plain_greedy(model, PROMPTS[0], COUNT)
    for name, place in itertools.product(("oracle", "ngram+same", "bushy"), range(8)):
        eos = text[place]
        drafter = drafter_of(name, model, other)
        output, steps = decode(
            target, drafter, PROMPTS[0], COUNT, layout=layout, eos=[eos], budget=BUDGETS[budget]
        )
        assert output == text[: text.index(eos) + 1]
        trimmed = sum(step.num_accepted + 1 - step.num_emitted for step in steps)
        assert (
            trimmed in (0, 1)
            and len(output) == sum(s.num_accepted for s in steps) + len(steps) - trimmed
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_law_1_a_drafter_cannot_write_into_the_context(model, ar_texts, seed):
    def scribble(context):
        with contextlib.suppress(AttributeError, TypeError):
            context.append(5)
        with contextlib.suppress(AttributeError, TypeError):
            context[0] = 5
        return []

    for members in (
        {"scribble": Fake(scribble)},
        {"ngram": NGram(), "scribble": Fake(scribble), "ngram2": NGram()},
    ):
        assert (
            run(Target(model), Ensemble(members), PROMPTS[0], seed=seed)[0]
            == ar_texts[tuple(PROMPTS[0]), seed]
        )


@pytest.mark.parametrize("budget", LEARNING)
def test_budgets_that_learn_do_something_in_these_laws(model, other, budget):
    """They schedule some members, not always all, and cut some trees; where nothing has a cost, AR
    steps are for want of room.
    """
    names = (
        "idle+wrong+ngram+lm+oracle",
        "ngram+distilled+block+heads+wrong",
        "bushy+bushy2+ngram",
    )
    steps = [
        step
        for name, prompt, seed in itertools.product(names, PROMPTS, SEEDS)
        for step in run(
            Target(model), drafter_of(name, model, other), prompt, budget=budget, seed=seed
        )[1]
    ]
    assert sum(step.num_accepted for step in steps) > 20
    modes = {step.mode for step in steps[:-1]}
    assert "draft" in modes and (budget == "cost_aware" or "plain" in modes)
    members = [member for step in steps for member in step.members]
    assert any(not member.num_planned for member in members) or budget == "cost_aware"
    if budget.startswith("cost_aware"):
        assert any(member.num_verified < member.num_drafted for member in members)
        assert any(len([m for m in step.members if m.num_planned]) > 1 for step in steps)


@pytest.mark.parametrize("name", ["distilled", "heads", "block"])
def test_trained_drafters_are_right_now_and_then_in_these_laws(model, other, name):
    """Laws about drafters that are never accepted would show little."""
    steps = [
        step
        for prompt, seed in itertools.product(PROMPTS, SEEDS)
        for step in run(Target(model), drafter_of(name, model, other), prompt, seed=seed)[1]
    ]
    assert sum(step.num_accepted for step in steps) > 5
    if name != "distilled":
        assert max(step.num_nodes for step in steps) == 8


def test_law_3_equal_siblings_are_one_proposal_also_for_its_credit(model):
    text = plain_greedy(model, PROMPTS[0], 3)
    wrong = (text[1] + 1) % 128
    forest = Draft((text[0], text[1], text[0], wrong), (-1, 0, -1, 2))
    drafter = Fake(lambda context: forest if len(context) == len(PROMPTS[0]) else [])
    _, steps = run(Target(model), Ensemble({"twice": drafter}), PROMPTS[0])
    first = steps[0].members[0]
    assert (steps[0].num_accepted, first.num_matched, first.num_drafted, first.num_verified) == (
        2,
        2,
        4,
        3,
    )


@pytest.mark.parametrize(
    "kind", [list, tuple, torch.tensor, np.array], ids=lambda kind: kind.__name__
)
def test_a_draft_counts_in_any_kind_of_integer(model, kind):
    text = plain_greedy(model, PROMPTS[0], COUNT)
    whole = [*PROMPTS[0], *text]
    drafter = Fake(
        lambda context: Draft.chain(kind(whole[len(context) : len(context) + 4])), depth=4
    )
    output, steps = run(Target(model), drafter, PROMPTS[0])
    assert output == text and steps[0].num_accepted == 4


@pytest.mark.parametrize("token", [128, -1, 10**6, 2**70])
def test_a_token_that_the_target_lacks_fails_by_the_drafters_name(model, token):
    members = {"ngram": NGram(), "culprit": Fake(lambda context: [token])}
    with pytest.raises(DrafterError, match=rf"drafter culprit: proposed token {token}, .*0\.\.127"):
        run(Target(model), Ensemble(members), PROMPTS[0])


@pytest.mark.parametrize("proposed", [None, [1, 2], "abc", 5.5])
def test_what_is_no_draft_fails_by_the_drafters_name(model, proposed):
    class Mute(Fake):
        def propose(self, context_ids, plan, sampler):
            return proposed

    with pytest.raises(DrafterError, match="drafter culprit: proposed"):
        run(
            Target(model),
            Ensemble({"ngram": NGram(), "culprit": Mute(lambda context: [])}),
            PROMPTS[0],
        )
    with pytest.raises(DrafterError, match="drafter fake: proposed"):
        run(Target(model), Mute(lambda context: []), PROMPTS[0])


@pytest.mark.parametrize("confidence", [math.nan, math.inf, -0.5, 1.5])
def test_a_confidence_that_is_no_probability_fails_by_the_drafters_name(model, confidence):
    """A budget that compares it would leave the drafter out without a word."""
    draft = Draft.chain([5, 6], confidences=[0.5, confidence])
    members = {"ngram": NGram(), "culprit": Fake(lambda context: draft, depth=2)}
    with pytest.raises(DrafterError, match=r"drafter culprit: the confidence .* of its token 6"):
        run(Target(model), Ensemble(members), PROMPTS[0])


def test_a_member_without_observe_or_that_fails_in_it_is_named(model):
    class Deaf:
        def propose(self, context_ids, plan, sampler):
            return Draft.chain([5])

    class Broken(Deaf):
        def observe(self, commit):
            raise LookupError("lost")

    for proposer, fault in (
        (Deaf, r"Deaf has no observe\(commit\)"),
        (Broken, "LookupError: lost"),
    ):
        culprit = Fake(lambda context: [])
        culprit.begin = lambda prompt_ids, kind=proposer: kind()
        members = {"ngram": NGram(), "culprit": culprit}
        with pytest.raises(DrafterError, match=f"drafter culprit: {fault}"):
            run(Target(model), Ensemble(members), PROMPTS[0])


def test_a_member_cannot_crowd_out_the_others_by_ignoring_its_plan(model):
    text = plain_greedy(model, PROMPTS[0], COUNT)
    greedy = Fake(lambda context: Draft(tuple(range(120)), (-1,) * 120))
    members = {"greedy": greedy, "knows": text_drafter(PROMPTS[0], text, depth=4)}
    _, steps = decode(
        model, Ensemble(members), PROMPTS[0], COUNT, budget=FixedBudget(max_nodes=200)
    )
    assert steps[0].num_accepted == 4
    assert steps[0].members[0].num_verified == 64 < steps[0].members[0].num_drafted == 120


@pytest.mark.parametrize("seed", SEEDS)
def test_law_4_other_members_never_change_the_output_and_order_only_permutes_the_table(
    model, other, ar_texts, seed
):
    target, prompt = Target(model), PROMPTS[0]
    members = ("ngram", "same", "wrong", "idle", "bushy")
    tables = {}
    for order in (members, members[::-1], members[2:] + members[:2]):
        output, steps = run(target, drafter_of("+".join(order), model, other), prompt, seed=seed)
        assert output == ar_texts[tuple(prompt), seed]
        frames = frames_of(
            [(PromptRecord("p", output_ids=output, decode_s=1.0, prefill_s=0.0), steps)]
        )
        table = summarise(*frames)["drafters"]
        tables[order] = {
            name: {
                key: value
                for key, value in table[name].items()
                if not key.endswith(("_ms_per_step", "_draft_s"))
            }
            for name in members
        }
    assert len({str(table) for table in tables.values()}) == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_law_4_other_members_and_order_never_change_the_output_whatever_the_budget(
    model, other, ar_texts, budget, seed
):
    """Which members draft may depend on the others; the output does not."""
    members = ("ngram", "same", "wrong", "idle", "bushy")
    for order in (
        members,
        members[::-1],
        members[2:] + members[:2],
        ("ngram", "ngram2", "same", "wrong"),
    ):
        output, _ = run(
            Target(model),
            drafter_of("+".join(order), model, other),
            PROMPTS[0],
            budget=budget,
            seed=seed,
        )
        assert output == ar_texts[tuple(PROMPTS[0]), seed]


def test_law_4_a_copy_of_a_drafter_halves_its_wins(model, other):
    target = Target(model)
    _, alone = run(target, drafter_of("oracle", model, other), PROMPTS[0])
    output, steps = run(target, drafter_of("oracle+oracle2", model, other), PROMPTS[0])
    assert [step.num_accepted for step in steps] == [step.num_accepted for step in alone]
    summary = summarise(
        *frames_of([(PromptRecord("p", output_ids=output, decode_s=1.0, prefill_s=0.0), steps)])
    )
    first, second = summary["drafters"].values()
    assert (
        first["win_rate"] == second["win_rate"] == pytest.approx((1 - summary["no_win_rate"]) / 2)
    )
    assert first["win_rate"] > 0 and first["sole_win_rate"] == 0


def test_a_larger_ensemble_never_takes_more_steps(model, other):
    target = Target(model)
    for prompt in PROMPTS:
        counts = [
            len(run(target, drafter_of(name, model, other), prompt)[1])
            for name in ("none", "ngram", "ngram+oracle")
        ]
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("budget", ["fixed", "cost_aware_priced", "priority"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_law_6_a_dense_trace_is_what_all_members_propose_where_nothing_is_accepted(
    model, other, name, budget
):
    """From a run that jumps ahead, the proposals of one that stops at every position, in which all
    members draft.
    """
    target, drafter = Target(model), drafter_of(name, model, other)
    drafter.bind(target)
    for prompt, seed in itertools.product(PROMPTS, SEEDS):
        stop = StopRules(len(prompt) + COUNT, (), target.context_limit)
        sampler = Sampler(noise=None if seed is None else KeyedNoise(seed, "p"))

        def recorded(budget, prompt=prompt, stop=stop, sampler=sampler):
            decoder, recording = Decoder(target, drafter, budget, Coupled()), Recording()
            steps = decode_steps(decoder, prompt, sampler, stop, recording=recording)
            return [token for step in steps for token in step.token_ids], recording

        output, recording = recorded(BUDGETS[budget])
        drafts = dense_drafts(drafter, recording, prompt, output, stop, sampler)
        same, everywhere = recorded(VerifiesNothing())
        assert same == output and len(drafts) == COUNT
        for position, draft in enumerate(drafts):
            empty = (None, Draft())
            _, live = everywhere.drafts.get(len(prompt) + position, empty)
            where = f"{prompt} {seed} {position}"
            assert (draft.token_ids, draft.parents) == (live.token_ids, live.parents), where
            owners = [[one.owner(node) for node in range(len(one))] for one in (draft, live)]
            assert owners[0] == owners[1]
            confidences = [
                [one.confidence(node) or 0 for node in range(len(one))] for one in (draft, live)
            ]
            assert confidences[0] == pytest.approx(confidences[1], abs=2e-4)


@pytest.mark.parametrize("budget", ["fixed", *LEARNING])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_law_7_the_cache_is_what_a_fresh_forward_would_make(model, other, layout, budget):
    """After every step: one position less than committed, and the next scores equal those of the
    whole text (float64).
    """
    double = random_model(
        vocab_size=128,
        max_position_embeddings=256,
        hidden_size=64,
        seed=3,
        attn_implementation="sdpa",
    )
    target = Target(double.double())
    for name in ("bushy+ngram", "idle+wrong+ngram+oracle", "oracle"):
        drafter = drafter_of(name, target.model, other)
        checked = _decode_checking_cache(target, drafter, PROMPTS[2], layout, BUDGETS[budget])
        assert checked > 2


def _decode_checking_cache(target, drafter, prompt, layout, budget: Budget) -> int:
    drafter.bind(target)
    decoder = Decoder(target, drafter, budget, Coupled(), layout)
    sequence = decoder.prefill(prompt)
    policy = budget.begin(drafter.members, CostTable())
    steps = decoder.decode(sequence, Sampler(), StopRules(len(prompt) + COUNT), policy)
    cache, ids, checked = sequence.cache, list(prompt), 0
    for step in steps:
        ids += step.token_ids
        assert cache.length == len(ids) - 1
        scores = target.score(cache, ids[-1], TokenTree(), layout)[0]
        cache.accept(())
        cache.rollback(len(ids) - 1)
        fresh = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert (scores - fresh).abs().max() < 1e-10
        checked += 1
    return checked


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_law_8_a_drafter_with_the_targets_weights_is_always_right_also_while_others_win(
    model, other, layout, seed
):
    _, steps = run(
        Target(model), drafter_of("same", model, other), PROMPTS[0], layout=layout, seed=seed
    )
    assert all(step.num_accepted == step.num_nodes for step in steps)

    longer = {"same": LanguageModel(model, 2, name="same"), "oracle": Oracle(5), "ngram": NGram(6)}
    _, steps = run(Target(model), Ensemble(longer), PROMPTS[0], layout=layout, seed=seed)
    same = [next(m for m in step.members if m.drafter == "same") for step in steps]
    assert all(m.num_matched == m.num_drafted for m in same)
    assert any(step.num_accepted > m.num_matched for step, m in zip(steps, same, strict=True)), (
        "the oracle won some"
    )


def test_law_8_also_when_it_was_idle_for_some_steps(model):
    """Under `priority` the model drafter idles while n-grams are found, and must not come back
    stale.
    """
    repeat = Fake(lambda context: [] if len(context) % 3 else [1, 2, 3], "sometimes")
    members = {"sometimes": repeat, "same": LanguageModel(model, 3, name="same")}
    _, steps = run(Target(model), Ensemble(members), PROMPTS[0], budget="priority")
    proposals = [m for step in steps for m in step.members if m.drafter == "same" and m.num_drafted]
    assert len(proposals) > 2 and len(proposals) < len(steps)
    assert all(m.num_matched == m.num_drafted for m in proposals)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", LEARNING)
def test_law_8_under_every_budget_that_learns(model, budget, seed):
    """Scheduled or not, verified or not: what it proposes is what is output."""
    members = {
        "same": LanguageModel(model, 3, name="same"),
        "wrong": Oracle(5, wrong=True),
        "ngram": NGram(6),
    }
    for prompt in PROMPTS:
        _, steps = run(Target(model), Ensemble(members), prompt, budget=budget, seed=seed)
        same = [(step, step.members[0]) for step in steps if step.members[0].num_drafted]
        assert same and all(
            member.num_matched == min(member.num_drafted, step.num_emitted) for step, member in same
        )


@pytest.mark.parametrize("budget", BUDGETS)
def test_law_9_a_prompts_output_and_counts_do_not_depend_on_what_ran_before(model, other, budget):
    target = Target(model)
    drafter = drafter_of("ngram+lm+retrieval+block+distilled+oracle", model, other)

    def counts(order):
        found = {}
        for prompt in order:
            output, steps = run(target, drafter, prompt, budget=budget, seed=1)
            found[tuple(prompt)] = (
                output,
                [(s.num_nodes, s.num_accepted, s.mode, s.rate) for s in steps],
            )
        return found

    forwards, backwards = counts(PROMPTS), counts(PROMPTS[::-1])
    alone = {tuple(p): counts([p])[tuple(p)] for p in PROMPTS}
    again = counts([PROMPTS[1], PROMPTS[1], PROMPTS[0], PROMPTS[2]])
    assert forwards == backwards == alone == again


def test_keyed_noise_is_a_function_of_seed_prompt_and_position_only():
    noise = KeyedNoise(3, "a")
    first = noise.log_exponential(10, 50).clone()
    noise.log_exponential(11, 50)
    assert torch.equal(noise.log_exponential(10, 50), first)
    assert torch.equal(KeyedNoise(3, "a").log_exponential(10, 20), first[:20]), (
        "a shorter vocabulary gets a prefix"
    )
    for different in (KeyedNoise(4, "a"), KeyedNoise(3, "b")):
        assert not torch.equal(different.log_exponential(10, 50), first)
    assert not torch.equal(noise.log_exponential(11, 50), first)


def test_keyed_noise_is_exponential_with_mean_one():
    sample = torch.cat([KeyedNoise(0, "law").log_exponential(t, 1000) for t in range(100)]).exp()
    assert abs(float(sample.mean()) - 1) < 0.015 and abs(float(sample.var()) - 1) < 0.05
    grid = torch.linspace(0.05, 5, 40, dtype=torch.float64)
    empirical = (sample[None] <= grid[:, None]).double().mean(1)
    # Kolmogorov-Smirnov at 1e-4 for 1e5 samples
    assert float((empirical - (1 - (-grid).exp())).abs().max()) < 0.007
