"""Packed linear layers: the same model in another order in memory; what copies, moves or stores it;
models that load with it.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import decode, guesser_weights, plain_greedy
from torch import nn
from transformers import AutoModelForCausalLM

import specens
from specens.decoding.dense import FinishedText, full_plans
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.supported import LAYOUTS
from specens.decoding.target.target import Target
from specens.decoding.types import Commit
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.drafters.trained.non_autoregressive import NonAutoregressive
from specens.errors import UserError
from specens.models.cpu_linear import (
    KINDS,
    MOST_ROWS,
    PackedLinear,
    pack,
    packed_bytes,
    packed_linear,
    packing,
    unpack,
)
from specens.models.load import ModelSpec, TargetCopy, int8_packed
from specens.models.tiny import TinyModel, byte_tokenizer, random_model

PROMPT = [5, 17, 99, 3, 42, 7, 64, 21, 5, 17, 99]
SHAPES = [(48, 72), (33, 50), (576, 192)]
"""(in, out) of layers: a multiple of the kernels' blocks, an odd one, one as wide as a real model.
"""

CLOSE = {"float32": 1e-5, "float16": 1e-5, "int8": 0.03}
"""How near a packed product is to that of the weights it stands for, in its largest number."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))


def layer_of(num_in: int, num_out: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)


def rows_of(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def packed(layer: nn.Module, kind: str) -> PackedLinear:
    """A packed copy."""
    holder = nn.Sequential(copy.deepcopy(layer))
    pack(holder, kind)
    assert isinstance(holder[0], PackedLinear) and holder[0].kind == kind
    return holder[0]


def is_unpacked(layer: nn.Module) -> bool:
    """Whether it computes as a plain linear layer, and keeps nothing packed."""
    return isinstance(layer, nn.Linear) and packing(layer) is None and layer._packed is None


def size_of_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def rounded(layer: nn.Linear, kind: str) -> nn.Linear:
    """The plain layer whose product a packed one computes."""
    twin = copy.deepcopy(layer)
    if kind == "float16":
        twin.weight.copy_(twin.weight.half().float())
    return twin


def tiny(**config: Any) -> TinyModel:
    return TinyModel(config={"hidden_size": 64, "vocab_size": 259, **config})


def linear_kinds(model: nn.Module) -> set[type]:
    return {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)}


# A layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_product_is_that_of_the_weights_it_stands_for(kind, shape, bias):
    layer = layer_of(*shape, bias=bias)
    twin, plain = packed(layer, kind), rounded(layer, kind)
    for count in (1, 2, 7, 16, 64, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS):
        rows = rows_of(count, shape[0])
        assert size_of_error(twin(rows), plain(rows)) < CLOSE[kind], count
    assert (twin.bias is not None) == bias
    if bias:  # and the bias is part of it
        nothing = torch.zeros(1, shape[0])
        assert size_of_error(twin(nothing), layer.bias[None]) < 1e-5


def test_float16_rounds_the_weights_and_int8_more_so():
    """That the kinds differ at all: the limits above would let a plain product pass for any of
    them.
    """
    layer, rows = layer_of(576, 192), rows_of(5, 576)
    errors = {kind: size_of_error(packed(layer, kind)(rows), layer(rows)) for kind in KINDS}
    assert errors["float32"] < 1e-6 < 1e-5 < errors["float16"] < 1e-3 < errors["int8"]
    many = rows_of(3 * MOST_ROWS, 576)
    assert size_of_error(packed(layer, "int8")(many), layer(many)) > 1e-3, (
        "int8 computes alike, also for prompts"
    )


@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (2, 2, 2, 48), (0, 48), (2, 0, 48)])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_have_any_shape_and_need_not_be_contiguous(kind, shape):
    layer = layer_of(48, 72)
    twin, plain = packed(layer, kind), rounded(layer, kind)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert twin(rows).shape == plain(rows).shape
    if rows.numel():
        assert size_of_error(twin(rows), plain(rows)) < CLOSE[kind]
        apart = torch.stack([rows, rows], -1)[..., 0]
        assert apart.dim() < 2 or not apart.is_contiguous()
        assert torch.equal(twin(apart), twin(rows))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_is_the_same_bits_whatever_stands_beside_it(shape, kind, bias):
    """What makes verification in float16 equal AR decoding token for token, and replay of an 8-bit
    drafter the run.
    """
    layer = packed(layer_of(*shape, bias=bias), kind)
    rows = rows_of(16, shape[0])
    alone = torch.cat([layer(rows[i : i + 1]) for i in range(16)])
    for count in range(1, 17):
        for begin in (0, 16 - count):
            together = layer(rows[begin : begin + count])
            assert torch.equal(together, alone[begin : begin + count]), (count, begin)
    batch = layer(rows.view(4, 4, -1))
    assert torch.equal(batch.view(16, -1), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_same_objects_under_the_same_names(kind):
    layer = layer_of(48, 72)
    model = nn.Sequential(layer, nn.ReLU(), layer_of(72, 8, bias=False))
    names, weight, before = list(model.state_dict()), layer.weight, layer.weight.clone()
    pack(model, kind)
    assert linear_kinds(model) == {PackedLinear} and packing(model) == kind
    first = model[0]
    assert first.weight is layer.weight is weight and list(model.state_dict()) == names
    assert list(dict(model.named_parameters())) == names
    assert torch.equal(layer.weight, before.half().float() if kind == "float16" else before)
    count = 48 * 72 + 72 * 8
    assert packed_bytes(model) == count * {"float32": 4, "float16": 2, "int8": 1}[kind]
    unpack(model)
    assert packing(model) is None and packed_bytes(model) == 0
    assert all(is_unpacked(layer) for layer in (model[0], model[2]))
    assert first.weight is weight
    assert torch.equal(first(rows_of(3, 48)), rounded(layer, kind)(rows_of(3, 48)))


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda layer: layer.to(torch.float64),
        lambda layer: layer.half(),
        lambda layer: layer.bfloat16(),
        lambda layer: layer.to("cpu"),
        lambda layer: nn.Sequential(layer).to(torch.float64)[0],
        lambda layer: nn.Sequential(copy.deepcopy(layer)).float()[0],
    ],
    ids=["deepcopy", "to(float64)", "half", "bfloat16", "to(cpu)", "inside", "copy inside"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_copied_moved_or_converted_is_a_plain_one_that_works(kind, change):
    layer = packed(layer_of(48, 72), kind)
    expected, rows = rounded(layer, kind)(rows_of(5, 48)), rows_of(5, 48)
    other = change(layer)
    assert is_unpacked(other)
    found = other(rows.to(other.weight.dtype))
    assert found.dtype == other.weight.dtype
    is_exact = found.dtype in (torch.float32, torch.float64)
    assert size_of_error(found.float(), expected) < (1e-5 if is_exact else 0.03)
    holder = nn.Sequential(other)
    pack(holder, kind)
    assert packing(holder) == (kind if other.weight.dtype == torch.float32 else None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_weights_of_its_own_and_leaves_the_packed_layer_as_it_was(kind):
    layer = packed(layer_of(48, 72), kind)
    before = layer(rows_of(5, 48))
    other = copy.deepcopy(layer)
    other.weight.zero_()
    assert layer.kind == kind and torch.equal(layer(rows_of(5, 48)), before)
    assert torch.equal(other(rows_of(1, 48)), layer.bias[None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_layer_can_be_stored(kind):
    """Without what is packed: a file that needs no kernel to be read."""
    layer, file = packed(layer_of(48, 72), kind), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert is_unpacked(other) and layer.kind == kind
    assert torch.equal(other.weight, layer.weight) and torch.equal(other.bias, layer.bias)


def test_only_plain_float32_layers_on_a_cpu_are_packed():
    class Own(nn.Linear):
        """A layer that computes something else."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = nn.ModuleList(
        [
            Own(8, 8),
            nn.Linear(8, 8).double(),
            nn.Linear(8, 8).half(),
            nn.Linear(8, 8, device="meta"),
            nn.Embedding(8, 8),
            layer_of(8, 8),
        ]
    )
    before = copy.deepcopy(model[0].weight)
    pack(model, "float16")
    assert [type(layer) for layer in model] == [Own, *[nn.Linear] * 3, nn.Embedding, PackedLinear]
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_layer_over_weights_that_exist(kind, bias):
    layer = layer_of(48, 72, bias=bias)
    twin = packed_linear(layer.weight, layer.bias, kind)
    assert isinstance(twin, PackedLinear) and twin.weight.data_ptr() == layer.weight.data_ptr()
    assert size_of_error(twin(rows_of(3, 48)), layer(rows_of(3, 48))) < CLOSE[kind]


def test_a_layer_of_zeros_packs_to_zeros():
    """No scale of 0, and so no NaN."""
    layer = layer_of(16, 8, bias=False)
    layer.weight[3:] = 0
    assert not packed(layer, "int8")(rows_of(2, 16))[:, 3:].any()


# A model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings_stay_tied_and_a_packed_model_is_saved_like_a_plain_one(
    kind, tied, tmp_path
):
    model = random_model(tie_word_embeddings=tied, hidden_size=64)
    pack(model, kind)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, PackedLinear) and (head.weight is embeddings.weight) == tied
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert linear_kinds(again) == {nn.Linear}
    state = model.state_dict()
    assert dict.fromkeys(state, True) == {
        name: torch.equal(state[name], t) for name, t in again.state_dict().items()
    }
    if kind != "int8":
        ids = torch.tensor([PROMPT])
        assert size_of_error(model(ids).logits.detach(), again(ids).logits.detach()) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_target_decodes_like_the_plain_one(layout, kind, model_type):
    """Greedy and sampled, with a drafter that has the weights itself: a copy of a packed model."""
    plain = random_model(model_type, hidden_size=64)
    if kind == "float16":
        for layer in plain.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data.copy_(layer.weight.data.half())
    model = copy.deepcopy(plain)
    pack(model, kind)
    assert packing(model) == kind
    ensemble = Ensemble(
        {"ngram": NGram(6, num_continuations=3), "twin": LanguageModel(copy.deepcopy(model), 3)}
    )
    for seed in (None, 3):
        expected, _ = decode(plain, NoDrafter(), PROMPT, 24, seed=seed)
        found, steps = decode(model, ensemble, PROMPT, 24, seed=seed, layout=layout)
        assert found == expected and len(steps) < 10
    assert packing(model) == kind


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_text_of_a_packed_model_is_transformers_own(dtype, attention):
    loaded = ModelSpec(tiny(), dtype=dtype, device="cpu", attention=attention).load()
    model: Any = loaded.model
    assert packing(model) == dtype
    ids = torch.tensor([[*PROMPT * 14]])  # a prompt of more rows than are multiplied packed
    assert ids.shape[1] > MOST_ROWS
    for prompt in (ids, ids[:, : len(PROMPT)]):
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
        )
        for budget in ("fixed", "cost_aware"):
            spec = specens.attach(model, loaded.tokenizer, ["ngram", "quantized"], budget=budget)
            assert torch.equal(spec.generate(prompt, max_new_tokens=24, do_sample=False), expected)
    assert packing(model) == dtype


def test_attach_leaves_the_users_model_as_it_is():
    model = random_model(hidden_size=64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drafters = {"ngram": "ngram", "copy": LanguageModel(TargetCopy("dynamic_int8"), 2, name="copy")}
    spec = specens.attach(model, byte_tokenizer(), drafters)
    out = spec.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=[])
    assert packing(model) is None and linear_kinds(model) == {nn.Linear}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert out[0, len(PROMPT) :].tolist() == plain_greedy(model, PROMPT, 12)


# Loading


def test_a_float32_model_is_packed_on_a_cpu_unless_configured_otherwise():
    loaded = ModelSpec(tiny(), dtype="float32", device="cpu").load()
    plain = ModelSpec(tiny(), dtype="float32", device="cpu", packed=False).load()
    assert linear_kinds(loaded.model) == {PackedLinear} and linear_kinds(plain.model) == {nn.Linear}
    assert (loaded.facts()["packed_weights"], plain.facts()["packed_weights"]) == ("float32", None)
    assert loaded.facts()["num_bytes"] == plain.facts()["num_bytes"] + packed_bytes(loaded.model)
    assert packed_bytes(loaded.model) == 4 * sum(
        layer.weight.numel() for layer in plain.model.modules() if isinstance(layer, nn.Linear)
    )
    state = plain.model.state_dict()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items()
    )


def test_float16_on_a_cpu_is_float32_arithmetic_over_rounded_weights_and_the_facts_show_it():
    full = ModelSpec(tiny(), dtype="float32", device="cpu", packed=False).load().model
    loaded = ModelSpec(tiny(), dtype="float16", device="cpu").load()
    facts = loaded.facts()
    assert (facts["dtype"], facts["packed_weights"], facts["is_quantized"]) == (
        "float32",
        "float16",
        False,
    )
    state = full.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, state[name].half().float()), (
            name
        )
    assert any(
        not torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items()
    )
    full.load_state_dict(loaded.model.state_dict())
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits: Any = loaded.model(ids).logits
        assert logits.dtype == torch.float32 and size_of_error(logits, full(ids).logits) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_stay_plain(dtype):
    loaded = ModelSpec(tiny(), dtype=dtype, device="cpu").load()
    assert linear_kinds(loaded.model) == {nn.Linear} and loaded.model.dtype == getattr(torch, dtype)
    assert loaded.facts()["packed_weights"] is None


def test_float16_unpacked_is_float16():
    loaded = ModelSpec(tiny(), dtype="float16", device="cpu", packed=False).load()
    assert loaded.model.dtype == torch.float16 and packing(loaded.model) is None


def test_what_bitsandbytes_has_quantised_is_not_packed():
    loaded = ModelSpec(tiny(), dtype="float32", device="cpu", quantization="nf4").load()
    assert packing(loaded.model) is None and loaded.facts()["is_quantized"]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_packed_is_true_or_false(value):
    with pytest.raises(UserError, match=r"packed=.*true or false") as error:
        ModelSpec("x/y", packed=value).check()
    assert "\n" not in str(error.value)


# A copy in 8 bits


def target_of(kind: str | None, **config: Any) -> Target:
    model = random_model(hidden_size=64, **config)
    if kind is not None:
        pack(model, kind)
    return Target(model, byte_tokenizer())


@pytest.mark.parametrize("kind", [None, "float32", "float16"])
def test_a_dynamic_int8_copy_shares_the_targets_memory_and_leaves_the_target_as_it_was(kind):
    target = target_of(kind)
    with torch.inference_mode():
        before: Any = target.model(torch.tensor([PROMPT])).logits.clone()
    loaded = TargetCopy("dynamic_int8").load_for(target)
    theirs = dict(target.model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.data_ptr() == theirs[name].data_ptr(), name
    assert not {id(m) for m in loaded.model.modules()} & {id(m) for m in target.model.modules()}
    assert packing(loaded.model) == "int8" and packing(target.model) == kind
    assert (
        loaded.facts()["is_quantized"]
        and not target.is_quantized
        and "dynamic_int8" in loaded.facts()["name"]
    )
    with torch.inference_mode():
        assert torch.equal(target.model(torch.tensor([PROMPT])).logits, before)


@pytest.mark.parametrize("kind", [None, "float32", "float16"])
def test_a_dynamic_int8_copy_agrees_with_the_target_mostly(kind):
    """Random models are near a tie far more often than trained ones; a stranger would agree once in
    259 tokens.
    """
    target = target_of(kind)
    copied = TargetCopy("dynamic_int8").load_for(target).model
    ids = torch.randint(3, 259, (8, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = target.model(ids).logits, copied(ids).logits
    assert not torch.equal(ours, theirs)
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    assert agreement > 0.7, agreement
    drafter = LanguageModel(TargetCopy("dynamic_int8"), 4, name="quantized")
    out, steps = decode(target, drafter, PROMPT, 40)
    assert out == decode(target, NoDrafter(), PROMPT, 40)[0]
    assert len(steps) < 20, "most drafts are right"


def test_a_model_is_loaded_as_dynamic_int8_on_a_cpu():
    loaded = ModelSpec(tiny(), device="cpu", quantization="dynamic_int8").load()
    assert packing(loaded.model) == "int8" and loaded.facts()["packed_weights"] == "int8"
    assert loaded.facts()["is_quantized"]
    full = ModelSpec(tiny(), dtype="float32", device="cpu", packed=False).load().model
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        ours: Any = loaded.model(ids).logits
        theirs: Any = full(ids).logits
    assert 0 < float((ours - theirs).abs().mean() / theirs.std()) < 0.15


def test_packing_in_8_bits_replaces_any_other_packing():
    model = random_model(hidden_size=64)
    pack(model, "float32")
    assert packing(int8_packed(model)) == "int8"
    assert {layer.kind for layer in model.modules() if isinstance(layer, PackedLinear)} == {"int8"}


@pytest.mark.parametrize(
    "target",
    [
        SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32),
        SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.float16),
        SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16),
        SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64),
        SimpleNamespace(device=torch.device("cpu"), dtype=torch.float16),
    ],
    ids=lambda target: f"{target.device} {target.dtype}",
)
def test_dynamic_int8_is_refused_in_a_line_where_it_cannot_be(target):
    with pytest.raises(UserError) as error:
        TargetCopy("dynamic_int8").load_for(target)
    line = str(error.value)
    assert "\n" not in line and all(
        word in line for word in ("dynamic_int8", "float32", "CPU", "nf4")
    )


def test_a_bfloat16_target_refuses_it_when_the_drafter_meets_it():
    drafter = LanguageModel(TargetCopy("dynamic_int8"), 2, name="quantized")
    with pytest.raises(UserError, match="dynamic_int8"):
        specens.attach(random_model().bfloat16(), byte_tokenizer(), {"quantized": drafter})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps"])
def test_dynamic_int8_on_another_device_is_refused_before_anything_is_loaded(device):
    with pytest.raises(UserError, match="dynamic_int8 is for CPUs") as error:
        ModelSpec("x/y", device=device, quantization="dynamic_int8").check()
    assert "\n" not in str(error.value)


def test_dynamic_int8_needs_no_bitsandbytes(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "bitsandbytes" else find(name, *a),
    )
    TargetCopy("dynamic_int8").check()
    with pytest.raises(UserError, match="bitsandbytes"):
        TargetCopy("nf4").check()


# Drafters follow the target


@pytest.mark.parametrize("kind", [None, "float32", "float16"])
def test_a_trained_drafters_layers_are_packed_when_the_targets_are(kind):
    """The same network both times, so it drafts much the same; the text is the target's own."""
    model = random_model(vocab_size=128, hidden_size=64, max_position_embeddings=256)
    expected = plain_greedy(model, PROMPT, 16)
    if kind is not None:
        pack(model, kind)
    drafter = NonAutoregressive(
        guesser_weights(model, "heads"), num_draft_tokens=4, num_draft_nodes=8
    )
    out, _ = decode(model, drafter, PROMPT, 16)
    assert (out == expected) or kind == "float16"
    assert out == decode(model, NoDrafter(), PROMPT, 16)[0]
    network = drafter._network
    assert packing(network) == (None if kind is None else "float16")


def test_files_of_a_run_record_how_the_weights_are_packed(tmp_path: Path):
    """Through the configuration, as the command line does it."""
    from specens.config.build import build
    from specens.config.compose import compose

    spec = build(compose(["model@target=tiny", "target.dtype=float16", "target.device=cpu"]).target)
    assert spec.load().facts()["packed_weights"] == "float16"
    off = build(compose(["model@target=tiny", "target.device=cpu", "target.packed=false"]).target)
    assert off.load().facts()["packed_weights"] is None


def test_an_8_bit_drafter_proposes_the_same_at_many_positions_at_once_as_one_by_one():
    target = target_of("float16")
    drafter = LanguageModel(TargetCopy("dynamic_int8"), 4, name="quantized")
    output, _ = decode(target, NoDrafter(), PROMPT, 40)
    drafter.bind(target)
    text = FinishedText(PROMPT, output, {}, Sampler())
    plans = full_plans(
        drafter.members, len(PROMPT), len(output), StopRules(len(PROMPT) + 40, (), None)
    )
    at_once = drafter.propose_batch(text, plans)
    assert at_once is not None and sum(map(len, at_once)) > 100
    for jump in (1, 2, 5):  # so many tokens it reads at once, to catch up
        proposer = drafter.begin(PROMPT)
        for position in range(0, len(output), jump):
            ids, together = [*PROMPT, *output[:position]], at_once[position]
            draft = proposer.propose(ids, plans[position], Sampler())
            assert (draft.token_ids, draft.confidences) == (
                together.token_ids,
                together.confidences,
            ), position
            proposer.observe(Commit((), tuple(output[position : position + jump])))
