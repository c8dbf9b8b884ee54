"""The distilled drafter: a few of the target's own layers, its embeddings shared, its output
vocabulary trimmed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import decode, plain_greedy

from specens.decoding.target.target import Target
from specens.decoding.types import Draft
from specens.drafters.lm import LanguageModel
from specens.drafters.trained.distilled import (
    Distilled,
    empty_copy,
    own_tensors,
    share_embeddings,
    small_copy,
)
from specens.drafters.trained.trimmed_head import TrimmedHead
from specens.drafters.trained.weights import Trained, model_fingerprint
from specens.errors import UserError
from specens.models.load import TargetCopy
from specens.models.tiny import byte_tokenizer, random_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
KEPT = tuple(range(0, 128, 2))
IDS = torch.tensor([PROMPT])

GEMMA = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
SLIDING_THEN_FULL = ("sliding_attention", "full_attention")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "gpt2": ("gpt2", {}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "gemma2": ("gemma2", {**GEMMA, "attn_implementation": "eager"}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": [*SLIDING_THEN_FULL, *SLIDING_THEN_FULL]}),
    "cohere2": ("cohere2", {"sliding_window": 6, "logit_scale": 0.25}),
}


def model_of(family: str = "llama", **config: Any):
    name, own = FAMILIES[family]
    return random_model(name, vocab_size=128, num_hidden_layers=4, seed=3, **{**own, **config})


@pytest.fixture(scope="module")
def model():
    return model_of()


def weights_of(model, layers=(0, 2), kept=KEPT) -> Trained:
    """What a training of no steps would store."""
    tensors = own_tensors(small_copy(model, list(layers)))
    tensors |= {"kept_ids": torch.tensor(kept)}
    return Trained("distilled", model_fingerprint(model), {"layers": list(layers)}, {}, tensors)


def saved(weights: Trained, tmp_path) -> str:
    weights.save(tmp_path / "distilled.safetensors")
    return str(tmp_path / "distilled.safetensors")


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


# A small copy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_the_first_layers_computes_what_the_target_computes_there(family):
    """Its last hidden states, before its own final norm, are the target's at that depth."""
    target = model_of(family)
    small = small_copy(target, [0, 1]).eval()
    with torch.no_grad():
        ours = small(IDS, output_hidden_states=True).hidden_states
        theirs = target(IDS, output_hidden_states=True).hidden_states
    assert len(ours) == 3
    assert torch.allclose(ours[1], theirs[1], atol=1e-5)
    assert small.config.get_text_config(decoder=True).num_hidden_layers == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_all_layers_computes_what_the_target_computes(family):
    target = model_of(family)
    small = small_copy(target, [0, 1, 2, 3]).eval()
    small.set_output_embeddings(TrimmedHead(target, torch.arange(128)))
    with torch.no_grad():
        assert torch.allclose(small(IDS).logits, target(IDS).logits, atol=1e-4)


def test_layers_are_taken_in_the_order_in_which_they_are_named(model):
    small = small_copy(model, [3, 1])
    for ours, theirs in ((0, 3), (1, 1)):
        mine, its = small.model.layers[ours].state_dict(), model.model.layers[theirs].state_dict()
        assert all(torch.equal(mine[name], its[name]) for name in its)


def test_options_that_are_lists_with_an_entry_per_layer_are_cut_alike():
    """Otherwise a layer would take another's window or rotary positions."""
    mixed = model_of("gemma3")
    assert empty_copy(mixed, [1, 2]).config.layer_types == ["full_attention", "sliding_attention"]
    assert empty_copy(model_of("smollm3"), [0, 2]).config.no_rope_layers == [1, 1]
    assert mixed.config.layer_types[0] == "sliding_attention" and len(mixed.config.layer_types) == 4


def test_the_target_is_left_as_it_was(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    small = small_copy(model, [0])
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config


@pytest.mark.parametrize("layers", [[], [4], [0, -1]])
def test_layers_that_the_target_lacks_are_refused(model, layers):
    with pytest.raises(UserError, match=r"layers=.*0 to 3"):
        empty_copy(model, layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj"])
def test_embeddings_and_output_projection_are_not_among_its_own_tensors(family):
    target = model_of(family)
    own = own_tensors(small_copy(target, [0]))
    ends = {"lm_head.weight", "lm_head.bias", "model.embed_tokens.weight", "transformer.wte.weight"}
    whole = set(small_copy(target, [0]).state_dict())
    assert own and whole - set(own) == ends & whole


# Its file


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_it_computes_the_same(family, tmp_path):
    target = Target(model_of(family))
    weights = weights_of(target.model)
    small = small_copy(target.model, [0, 2]).eval()
    small.set_output_embeddings(TrimmedHead(target.model, torch.tensor(KEPT)))
    loaded = Distilled(saved(weights, tmp_path)).load_for(target).model
    with torch.no_grad():
        ours, theirs = loaded(IDS).logits, small(IDS).logits
        hidden = loaded(IDS, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(torch.isneginf(ours), torch.isneginf(theirs))
    assert torch.allclose(ours[..., list(KEPT)], theirs[..., list(KEPT)], atol=1e-5)
    assert not loaded.training
    # The mapping: a kept id has its own row of the full projection, an id left out is impossible.
    left_out = [token for token in range(128) if token not in KEPT]
    assert ours.shape[-1] == 128 and torch.isneginf(ours[..., left_out]).all()
    full = TrimmedHead(target.model, torch.arange(128)).logits(hidden)
    assert torch.allclose(ours[..., list(KEPT)], full[..., list(KEPT)], atol=1e-5)


def test_embeddings_are_one_tensor_with_the_targets(model, tmp_path):
    target = Target(model)
    loaded = Distilled(saved(weights_of(model), tmp_path)).load_for(target).model
    assert loaded.get_input_embeddings().weight is model.get_input_embeddings().weight
    small = small_copy(model, [0])
    share_embeddings(small, model)
    assert (
        small.get_input_embeddings().weight.data_ptr()
        == model.get_input_embeddings().weight.data_ptr()
    )


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("layout", ["tree", "rows"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2"])
def test_as_a_drafter_it_changes_no_output_and_proposes_kept_ids_only(
    family, layout, seed, tmp_path
):
    target = Target(model_of(family))
    path = saved(weights_of(target.model, layers=(0, 1, 2, 3)), tmp_path)
    drafter = LanguageModel(Distilled(path), 3, name="distilled")
    plain, _ = decode(target, LanguageModel(target.model, 1), PROMPT, 12, layout=layout, seed=seed)
    drafts = proposals_of(drafter)
    output, _ = decode(target, drafter, PROMPT, 12, layout=layout, seed=seed)
    assert output == plain
    tokens = [token for draft in drafts for token in draft.token_ids]
    assert set(tokens) <= set(KEPT) and len(tokens) > 8
    if seed is None:
        assert output == plain_greedy(target.model, PROMPT, 12)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])
def test_with_all_layers_and_all_ids_it_is_the_target_and_always_right(family, tmp_path):
    """Law 8, through the file: sampling too, where wrong scales of the logits would show."""
    target = Target(model_of(family))
    path = saved(weights_of(target.model, layers=(0, 1, 2, 3), kept=tuple(range(128))), tmp_path)
    for seed in (None, 5):
        _, steps = decode(
            target, LanguageModel(Distilled(path), 3, name="distilled"), PROMPT, 16, seed=seed
        )
        assert len(steps) == 4 and all(step.num_accepted == step.num_nodes for step in steps)


def test_another_targets_weights_are_refused_by_their_fingerprint(model, tmp_path):
    path = saved(weights_of(model), tmp_path)
    other = Target(random_model(vocab_size=128, num_hidden_layers=4, seed=4))
    with pytest.raises(UserError, match=r"trained for another target.*stage=distilled") as error:
        Distilled(path).load_for(other)
    assert path in str(error.value) and "\n" not in str(error.value)


def test_the_fingerprint_is_that_of_the_weights_not_of_their_dtype_or_copy(model):
    assert model_fingerprint(model_of().to(torch.bfloat16)) == model_fingerprint(model)
    assert model_fingerprint(model_of("qwen2")) != model_fingerprint(model_of("gpt2"))
    three, four = (model_fingerprint(random_model(vocab_size=128, seed=seed)) for seed in (3, 4))
    assert three != four


def test_tensors_that_do_not_fit_the_targets_layers_are_refused_with_the_path(model, tmp_path):
    weights = weights_of(model)
    own = weights.tensors
    for tensors in (
        {name: own[name] for name in own if "layers.1" not in name},
        own | {"model.layers.7.input_layernorm.weight": torch.ones(32)},
        own | {"model.norm.weight": torch.ones(31)},
        {name: own[name] for name in own if name != "kept_ids"},
    ):
        path = saved(replace(weights, tensors=tensors), tmp_path)
        with pytest.raises(UserError, match="does not fit") as error:
            Distilled(path).load_for(Target(model))
        assert path in str(error.value)


# A quantised target


@pytest.fixture(scope="module")
def quantized():
    """An nf4 target, of sizes that its kernels take."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    plain = random_model(vocab_size=128, **sizes, seed=3)
    return plain, TargetCopy("nf4").load_for(Target(plain, byte_tokenizer())).model


def test_a_quantised_target_loads_the_weights_that_were_trained_for_the_plain_one(
    quantized, tmp_path
):
    plain, nf4 = quantized
    assert nf4.is_quantized and model_fingerprint(nf4) == model_fingerprint(plain)
    path = saved(weights_of(plain, layers=(0, 1)), tmp_path)
    target = Target(nf4)
    loaded = Distilled(path).load_for(target).model
    assert not getattr(loaded, "is_quantized", False)
    small = small_copy(plain, [0, 1]).eval()
    small.set_output_embeddings(TrimmedHead(plain, torch.tensor(KEPT)))
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits[..., 0], small(IDS).logits[..., 0], atol=1e-3)
    reference, _ = decode(nf4, LanguageModel(nf4, 1), PROMPT, 10)
    assert decode(target, LanguageModel(Distilled(path), 3), PROMPT, 10)[0] == reference


def test_a_quantised_target_is_no_beginning_for_training_and_is_refused(quantized):
    with pytest.raises(UserError, match="missing or quantised"):
        small_copy(quantized[1], [0])
