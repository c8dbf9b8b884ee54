"""The non-autoregressive drafter: its tree, its networks, its trimmed vocabulary, the hidden states
it is handed, its weights.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Fake, decode, guesser_weights, plain_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.drafter import hidden_layers
from specens.decoding.merge import merge
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import Draft, Plan, Share
from specens.drafters.ensemble import Ensemble
from specens.drafters.none import NoDrafter
from specens.drafters.trained.networks import ARCHITECTURES, Context, Network, Places
from specens.drafters.trained.non_autoregressive import NonAutoregressive, product_tree
from specens.drafters.trained.trimmed_head import TrimmedHead, check_projection
from specens.errors import UserError
from specens.models.tiny import random_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
KEPT = range(0, 128, 2)


@pytest.fixture(scope="module")
def model():
    return random_model(vocab_size=128, max_position_embeddings=256, seed=3)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


def proposals_of(drafter) -> list[Draft]:
    """All that its proposers propose from now on."""
    drafts: list[Draft] = []
    begin = drafter.begin

    def recording(prompt_ids):
        proposer = begin(prompt_ids)
        propose = proposer.propose
        proposer.propose = lambda *given: drafts.append(propose(*given)) or drafts[-1]
        return proposer

    drafter.begin = recording
    return drafts


PLAN = Plan.of((Share(4, 8),))


def bound(weights, target: Target) -> NonAutoregressive:
    drafter = NonAutoregressive(weights, 4, 8)
    drafter.bind(target)
    return drafter


def network_of(model, architecture: str) -> Network:
    return bound(guesser_weights(model, architecture), Target(model)).network


# The tree


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4).map(lambda p: sorted(p)[::-1]),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 40),
)
def test_the_product_tree_holds_the_most_probable_paths_of_all(probabilities, num_nodes):
    rows = enumerate(probabilities)
    ids = [[10 * depth + rank for rank in range(len(row))] for depth, row in rows]
    chance = {}
    for depth in range(1, len(ids) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in ids[:depth])):
            value = 1.0
            for row, rank in zip(probabilities, ranks, strict=False):
                value *= row[rank]
            chance[tuple(ids[d][rank] for d, rank in enumerate(ranks))] = value
    paths = paths_of(product_tree(probabilities, ids, num_nodes))
    assert len(set(paths)) == len(paths) == min(num_nodes, len(chance))
    best = sorted(chance.values(), reverse=True)[:num_nodes]
    assert [chance[path] for path in paths] == best, "best first"


def test_a_token_without_probability_is_no_node():
    draft = product_tree([[1.0, 0.0], [0.5, 0.5]], [[3, 4], [5, 6]], 10)
    assert sorted(paths_of(draft)) == [(3,), (3, 5), (3, 6)]


# B30: trained positions and the tree's depth


def test_b30_a_tree_deeper_than_trained_is_refused_with_both_numbers(model):
    drafter = NonAutoregressive(guesser_weights(model, num_positions=3), num_draft_tokens=5)
    with pytest.raises(UserError, match=r"num_draft_tokens=5.* 3 positions") as error:
        drafter.bind(Target(model))
    assert "\n" not in str(error.value)


def test_b30_a_shallower_tree_than_trained_is_fine_and_stays_shallow(model, architecture):
    drafter = NonAutoregressive(guesser_weights(model, architecture, num_positions=6), 2, 8)
    drafts = proposals_of(drafter)
    output, _ = decode(model, drafter, PROMPT, 12)
    assert output == plain_greedy(model, PROMPT, 12)
    assert {max(map(len, paths_of(draft))) for draft in drafts if draft} <= {1, 2}
    assert max(len(draft) for draft in drafts) == 8


def test_b30_more_nodes_than_kept_ids_are_no_error(model, architecture):
    """A tree wider than the trimmed vocabulary."""
    drafter = NonAutoregressive(guesser_weights(model, architecture, kept=(5, 6, 7)), 3, 200)
    drafts = proposals_of(drafter)
    output, _ = decode(model, drafter, PROMPT, 8)
    assert output == plain_greedy(model, PROMPT, 8)
    assert max(map(len, drafts)) == 3 + 9 + 27


# The trimmed vocabulary


def test_the_trimmed_head_is_the_models_own_projection_of_the_kept_ids(model):
    kept = torch.tensor([3, 4, 77, 127])
    head, hidden = TrimmedHead(model, kept), torch.randn(5, 32)
    with torch.no_grad():
        whole = model.lm_head(hidden)
    assert torch.allclose(head.logits(hidden), whole[:, kept], atol=1e-6)
    spread = head(hidden)
    assert spread.shape == (5, 128)
    left_out = torch.ones(128, dtype=torch.bool)
    left_out[kept] = False
    assert torch.isneginf(spread[:, left_out]).all()
    assert torch.allclose(spread[:, kept], whole[:, kept], atol=1e-6)


GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
OTHERS = {
    "gpt2": {},
    "qwen2": {},
    "gptj": {"rotary_dim": 4},  # the projection has a bias
    "gemma2": GEMMA,  # a soft cap
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_trimmed_head_also_does_what_a_model_does_to_its_logits_afterwards(name):
    """Bias, factor, divisor, soft cap."""
    other = random_model(name, vocab_size=128, **OTHERS[name])
    with torch.no_grad():
        if getattr(other.get_output_embeddings(), "bias", None) is not None:
            other.get_output_embeddings().bias.normal_()
        output = other(torch.tensor([PROMPT]), output_hidden_states=True)
    kept = torch.tensor([1, 50, 127])
    ours = TrimmedHead(other, kept).logits(output.hidden_states[-1])
    assert torch.allclose(ours, output.logits[..., kept], atol=1e-4)
    check_projection(other)


def test_a_model_whose_logits_are_more_than_a_projection_is_refused_by_name():
    other = random_model("modernbert-decoder", vocab_size=128, cls_token_id=0, sep_token_id=1)
    with pytest.raises(UserError, match=r"modernbert-decoder.*not a projection") as error:
        check_projection(other)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [None, 3])
def test_only_kept_ids_are_proposed_and_they_are_the_ones_that_were_meant(
    model, architecture, seed
):
    drafter = NonAutoregressive(guesser_weights(model, architecture, kept=KEPT), 4, 8)
    drafts = proposals_of(drafter)
    decode(model, drafter, PROMPT, 12, seed=seed)
    tokens = [token for draft in drafts for token in draft.token_ids]
    assert set(tokens) <= set(KEPT) and len(set(tokens)) > 4
    assert max(len(draft) for draft in drafts) == 8


def test_the_proposal_is_the_product_tree_of_the_full_projection(model, architecture):
    """Worked out the long way: the whole text's hidden states, every logit, all ids that were not
    kept struck out.
    """
    weights = guesser_weights(model, architecture, kept=KEPT)
    drafter = NonAutoregressive(weights, 4, 8)
    drafts = proposals_of(drafter)
    decode(model, drafter, PROMPT, 1)
    decode(model, drafter, PROMPT, 6)
    with torch.no_grad():
        states = model(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states
        context = drafter.network.extend(Context(), torch.stack([states[1][0], states[2][0]], 1))
        hidden = drafter.network.propose(context, model.get_input_embeddings().weight[PROMPT[-1]])
        logits = model.lm_head(hidden)
        struck = torch.full_like(logits, -torch.inf)
        struck[:, list(KEPT)] = logits[:, list(KEPT)]
        top = struck.softmax(-1).topk(8)
    expected = product_tree(top.values.tolist(), top.indices.tolist(), 8)
    assert (drafts[0].token_ids, drafts[0].parents) == (expected.token_ids, expected.parents)
    assert drafts[0].confidences == pytest.approx(expected.confidences, rel=1e-5)


def test_ids_beyond_the_tokenizers_do_no_harm(architecture):
    """A target with padded embeddings: 136 rows for 128 ids."""
    padded = random_model(vocab_size=136, max_position_embeddings=256, seed=3)
    for kept in (range(0, 128, 3), range(100, 136)):
        drafter = NonAutoregressive(guesser_weights(padded, architecture, kept=kept), 4, 8)
        for seed in (None, 1):
            plain, _ = decode(padded, NoDrafter(), PROMPT, 12, seed=seed)
            assert decode(padded, drafter, PROMPT, 12, seed=seed)[0] == plain


# The networks: one place at a time, as in decoding, and many at once, as in training


@pytest.mark.parametrize("chunks", [(1,) * 12, (12,), (5, 1, 1, 3, 2)])
def test_taking_in_the_context_in_any_pieces_gives_what_training_gave(model, architecture, chunks):
    """Three texts stand in a row, with other predictions all around; every place comes out as if it
    were alone.
    """
    net = network_of(model, architecture)
    lengths = (7, 12, 4)
    features, embeddings = torch.randn(sum(lengths), 2, 32), torch.randn(sum(lengths), 32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    begins = torch.repeat_interleave(torch.tensor([0, 7, 19]), torch.tensor(lengths))
    anchors = torch.tensor([i for i in range(sum(lengths)) if positions[i] > 0])
    with torch.no_grad():
        many = net(Places(features, embeddings[anchors], anchors, positions, begins))
        assert many.shape == (len(anchors), 4, 32)
        text = slice(7, 19)
        own_features, own_embeddings = features[text], embeddings[text]
        context, taken = Context(), 0
        for chunk in chunks:
            context = net.extend(context, own_features[taken : taken + chunk])
            taken += chunk
            assert context.length == taken
            if taken < 12:
                alone = net.propose(context, own_embeddings[taken])
                place = anchors.tolist().index(7 + taken)
                assert (alone - many[place]).abs().max() < 1e-5
        few = net(Places(features, embeddings[anchors[3:5]], anchors[3:5], positions, begins))
        assert (few - many[3:5]).abs().max() < 1e-5, "other places' predictions are not seen"


def test_a_block_sees_its_context_and_heads_only_the_last_of_it(model):
    """Otherwise the two would be the same network."""
    features = torch.randn(6, 2, 32)
    changed = features.clone()
    changed[0] += 1
    for name, differs in (("block", True), ("heads", False)):
        net = network_of(model, name)
        with torch.no_grad():
            contexts = [net.extend(Context(), states) for states in (features, changed)]
            ours, theirs = (net.propose(context, torch.ones(32)) for context in contexts)
        assert (not torch.allclose(ours, theirs)) == differs


# The hidden states it is handed


class Recorder(Fake):
    """Also keeps the hidden states that its proposer is handed."""

    hidden_layers = (0, 1, 2)

    def begin(self, prompt_ids):
        self.states: list[dict[int, torch.Tensor]] = []
        self.commits_before: list[int] = []
        proposer: Any = super().begin(prompt_ids)
        proposer.condition = self.condition
        return proposer

    def condition(self, hidden):
        self.states.append(dict(hidden))
        self.commits_before.append(len(self.commits))


FAMILIES = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, **GEMMA},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_text_whatever_branch_was_accepted(family, layout):
    target_model = random_model(family, vocab_size=128, seed=3, **FAMILIES[family])
    text = plain_greedy(target_model, PROMPT, 16)
    whole = [*PROMPT, *text]

    def late(context):
        """A wrong chain first, then the right one, which goes wrong at last; sometimes nothing."""
        right = whole[len(context) : len(context) + 3]
        wrong = [(token + 1) % 128 for token in right]
        flat = Draft.chain([*right[:1], *wrong[1:]])
        if len(context) in (14, 19):
            return []
        tail = Draft.chain([*right, 5])
        begin = len(flat)
        parents = (parent + begin if parent >= 0 else parent for parent in tail.parents)
        return Draft((*flat.token_ids, *tail.token_ids), (*flat.parents, *parents))

    drafter = Recorder(late, depth=4)
    ensemble = Ensemble({"a": drafter})
    assert hidden_layers(ensemble) == (0, 1, 2)
    output, steps = decode(target_model, ensemble, PROMPT, 16, layout=layout)
    assert output == text
    assert any(step.num_accepted > 1 for step in steps)
    assert any(step.num_nodes == 0 for step in steps)
    # Once after the prompt, then before each observe.
    assert drafter.commits_before == [0, *range(len(steps))]
    with torch.no_grad():
        fresh = target_model(torch.tensor([whole]), output_hidden_states=True).hidden_states
    for layer in drafter.hidden_layers:
        handed = torch.cat([states[layer] for states in drafter.states])
        assert handed.shape == (len(whole) - 1, 32)
        assert (handed - fresh[layer][0, :-1]).abs().max() < 1e-4
    counts = [len(states[0]) for states in drafter.states]
    assert counts == [len(PROMPT) - 1, *(step.num_accepted + 1 for step in steps)]


def test_the_target_keeps_no_hidden_states_that_no_member_reads(model):
    target = Target(model)
    with target.prefill(PROMPT) as cache:
        target.score(cache, PROMPT[-1], merge(Draft.chain([5, 6]), PLAN), "tree")
        cache.accept((0,))
        assert cache.hidden == {}


# In a run


def test_after_a_prompt_of_one_token_it_abstains_until_the_target_has_read_it(model, architecture):
    drafter = NonAutoregressive(guesser_weights(model, architecture), 4, 8)
    output, steps = decode(model, drafter, [100], 8)
    assert output == plain_greedy(model, [100], 8)
    assert steps[0].num_nodes == 0 and all(step.num_nodes for step in steps[1:-1])


def test_nothing_of_a_prompt_is_left_in_the_next(model, architecture):
    weights, other = guesser_weights(model, architecture), [9, 3, 9, 3, 44, 12, 9]

    def drafts_for(*prompts):
        drafter = NonAutoregressive(weights, 4, 8)
        drafts = proposals_of(drafter)
        for prompt in prompts:
            drafts.clear()
            decode(model, drafter, prompt, 10)
        return list(drafts)

    assert drafts_for(PROMPT) == drafts_for(other, PROMPT) == drafts_for([100], PROMPT)
    assert drafts_for(PROMPT) != drafts_for(other)


def test_sequences_at_once_share_nothing(model, architecture):
    """The second one is broken off with states that were never taken in."""
    target = Target(model)
    drafter = bound(guesser_weights(model, architecture), target)
    prompts = (PROMPT, [9, 3, 9, 3, 44], PROMPT)
    drafts, proposers = [], [drafter.begin(prompt) for prompt in prompts]
    for prompt, proposer in zip(prompts, proposers, strict=True):
        with target.prefill(prompt, drafter.hidden_layers) as cache:
            proposer.condition(cache.hidden)
            drafts.append(proposer.propose(prompt, PLAN, Sampler()))
            proposer.condition({layer: states[:1] for layer, states in cache.hidden.items()})
    assert drafts[0] == drafts[2] != drafts[1]


PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.7)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
    "both": [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.5)],
}


@pytest.mark.parametrize("noise", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_change_the_proposals_and_never_the_output(model, architecture, name, noise):
    weights = guesser_weights(model, architecture)

    def sampler():
        return Sampler(LogitsProcessorList(PROCESSORS[name]), KeyedNoise(4, "p") if noise else None)

    plain, _ = decode(model, NoDrafter(), PROMPT, 12, sampler=sampler())
    drafter = NonAutoregressive(weights, 4, 8)
    drafts = proposals_of(drafter)
    output, steps = decode(model, drafter, PROMPT, 12, sampler=sampler())
    assert output == plain
    assert all(token in KEPT for draft in drafts for token in draft.token_ids)
    assert sum(step.num_nodes for step in steps) > 8


@pytest.mark.parametrize("name", ["none", *PROCESSORS])
def test_under_sampling_the_first_token_is_what_the_samplers_noise_chooses(
    model, architecture, name
):
    """Drafter and target share their noise: a prediction with the right distribution is the right
    token.
    """
    target = Target(model)
    drafter = bound(guesser_weights(model, architecture), target)
    sampler = Sampler(LogitsProcessorList(PROCESSORS.get(name, [])), KeyedNoise(4, "p"))
    proposer = drafter.begin(PROMPT)
    with target.prefill(PROMPT, drafter.hidden_layers) as cache:
        proposer.condition(cache.hidden)
    draft = proposer.propose(PROMPT, PLAN, sampler)
    last = model.get_input_embeddings().weight[PROMPT[-1]]
    assert proposer._context is not None
    with torch.no_grad():
        hidden = drafter.network.propose(proposer._context, last)
    assert draft.token_ids[0] == sampler.choose(PROMPT, drafter.head(hidden[0]))
    assert proposer.propose(PROMPT, PLAN, Sampler()) != draft, "greedy"


def test_it_follows_the_targets_dtype(architecture):
    half = random_model(vocab_size=128, seed=3).to(torch.bfloat16)
    drafter = NonAutoregressive(guesser_weights(half, architecture), 4, 8)
    plain, _ = decode(half, NoDrafter(), PROMPT, 8)
    assert decode(half, drafter, PROMPT, 8)[0] == plain
    assert {parameter.dtype for parameter in drafter.network.parameters()} == {torch.bfloat16}


def test_its_facts_name_its_sizes(model, architecture):
    drafter = NonAutoregressive(guesser_weights(model, architecture))
    assert drafter.facts() == {}
    drafter.bind(Target(model))
    facts = drafter.facts()
    assert (facts["architecture"], facts["num_positions"]) == (architecture, 4)
    assert facts["num_output_ids"] == 64
    assert facts["hidden_layers"] == [1, 2] and facts["num_parameters"] > 1000


# Its file


def test_a_saved_file_proposes_what_the_weights_in_memory_propose(model, architecture, tmp_path):
    weights = guesser_weights(model, architecture)
    path = tmp_path / "made" / "w.safetensors"
    weights.save(path)
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"
    drafts = []
    for source in (weights, str(path)):
        drafter = NonAutoregressive(source, 4, 8)
        drafts.append(proposals_of(drafter))
        decode(model, drafter, PROMPT, 8)
    assert drafts[0] == drafts[1]


def refusal(model, path) -> str:
    drafter = NonAutoregressive(str(path))
    with pytest.raises(UserError) as error:
        drafter.bind(Target(model))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_targets_weights_are_refused_by_their_fingerprint(model, tmp_path):
    path = tmp_path / "w.safetensors"
    weights = guesser_weights(model)
    weights.save(path)
    other = random_model(vocab_size=128, max_position_embeddings=256, seed=4)
    line = refusal(other, path)
    assert str(path) in line and weights.target in line and "stage=non_autoregressive" in line
    NonAutoregressive(str(path)).bind(
        Target(random_model(vocab_size=128, max_position_embeddings=256, seed=3))
    )


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "cut in its header", "text", "foreign", "version", "kind", "tensors"]
)
def test_a_damaged_or_foreign_file_is_refused_with_its_path(model, tmp_path, damage):
    path, weights = tmp_path / "w.safetensors", guesser_weights(model)
    weights.save(path)
    whole = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage.startswith("cut"):
        path.write_bytes(whole[: 100 if "header" in damage else len(whole) // 2])
    elif damage == "text":
        path.write_text("not weights at all, but long enough to look like some")
    elif damage == "foreign":
        save_file({"w": torch.ones(3)}, path)
    elif damage == "version":
        metadata = {"specens": "99", "kind": weights.kind, "target": weights.target}
        save_file({"w": torch.ones(3)}, path, metadata)
    elif damage == "kind":
        replace(weights, kind="distilled").save(path)
    else:
        replace(weights, tensors={"kept_ids": weights.tensors["kept_ids"]}).save(path)
    line = refusal(model, path)
    assert str(path) in line
    assert damage != "kind" or "distilled" in line


def test_a_missing_file_is_refused_before_any_model_is_loaded(tmp_path):
    missing = tmp_path / "none.safetensors"
    for overrides in (
        ["drafter=non_autoregressive", f"drafter.weights={missing}"],
        ["drafter=distilled"],
    ):
        if overrides == ["drafter=distilled"]:
            overrides.append(f"drafter.model.weights={missing}")
        with pytest.raises(UserError, match=str(missing)):
            build(compose(overrides).drafter)


def test_without_a_file_and_without_shipped_weights_the_line_says_how_to_train_some(model):
    line = r"python -m specens\.train stage=non_autoregressive.*drafter=untrained"
    with pytest.raises(UserError, match=line):
        NonAutoregressive().bind(Target(model))
