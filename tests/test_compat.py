"""Every private symbol of transformers and torch that specens uses: a version that lost one fails
here first.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.generation.logits_process import TemperatureLogitsWarper

from specens import compat
from specens.models.tiny import random_model

SYMBOLS = {
    "_prepare_generation_config": GenerationMixin,
    "_prepare_special_tokens": GenerationMixin,
    "_get_logits_processor": GenerationMixin,
    "_get_default_generation_params": GenerationConfig,
    "_is_stateful": PreTrainedModel,
    "_supports_attention_backend": PreTrainedModel,
    "_attn_implementation": PreTrainedConfig,
    "_n_gpu": TrainingArguments,
    "_dynamo": torch,
    "_reorder_linear_weight": torch.ops.mkldnn,
    "_linear_pointwise": torch.ops.mkldnn,
}
"""Name -> where it lives. (torch's `_dynamo` is a module, of which `mark_static_address` is used.)
"""


def private_names(path) -> set[str]:
    """Private attributes of others, also those whose names stand in a `getattr`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Call)
        if isinstance(node, ast.Attribute) and not (own and _is_own(node.value)):
            names.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            name = node.args[1]
            names |= {name.value} if isinstance(name, ast.Constant) else set()
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _is_own(value: ast.expr) -> bool:
    """`self`, `cls`, `super()`."""
    return getattr(value, "id", getattr(getattr(value, "func", None), "id", "")) in (
        "self",
        "cls",
        "super",
    )


@pytest.mark.parametrize("name", SYMBOLS)
def test_the_libraries_still_have(name):
    if name == "_n_gpu":  # set on the instance
        assert name in vars(TrainingArguments(use_cpu=True, report_to="none"))
        return
    assert hasattr(SYMBOLS[name], name)


def test_this_list_is_all_that_compat_uses():
    assert private_names(REPOSITORY / "specens" / "compat.py") == set(SYMBOLS)


def test_no_other_file_uses_any_of_them():
    files = [path for path in (REPOSITORY / "specens").rglob("*.py") if path.stem != "compat"]
    used = {str(path): private_names(path) & set(SYMBOLS) for path in files}
    assert not any(used.values()), {path: names for path, names in used.items() if names}


def test_generation_options_are_read_as_generate_reads_them():
    model = random_model(vocab_size=128)
    options = {"temperature": 0.5, "do_sample": True, "nonsense": 1}
    config, unknown = compat.generation_config(model, None, options)
    assert (config.temperature, config.do_sample) == (0.5, True) and set(unknown) == {"nonsense"}
    assert compat.generation_defaults()["max_length"] == 20
    config.max_length = 8
    processors = compat.logits_processors(model, config, 3, torch.device("cpu"))
    assert isinstance(processors, LogitsProcessorList)
    assert any(isinstance(processor, TemperatureLogitsWarper) for processor in processors)


def test_attention_functions_and_states_are_those_of_the_model():
    model = random_model(vocab_size=128, attn_implementation="eager")
    assert compat.attention_name(model) == "eager" and compat.takes_attention_functions(model)
    compat.set_attention_name(model, "sdpa")
    assert model.config._attn_implementation == compat.attention_name(model) == "sdpa"
    assert not compat.is_stateful(model)
    assert compat.is_stateful(random_model("mamba", vocab_size=128, state_size=4))


def test_a_reordered_linear_layer_computes_the_same():
    rows, layer = torch.randn(3, 16), torch.nn.Linear(16, 8).requires_grad_(False)
    packed = compat.reorder_linear_weight(layer.weight, 8)
    assert torch.allclose(compat.reordered_linear(rows, packed, layer.bias), layer(rows), atol=1e-5)


def test_the_trainer_uses_one_gpu_at_most():
    for count in (0, 1, 4):
        arguments = SimpleNamespace(n_gpu=count, _n_gpu=count)
        compat.use_one_gpu(arguments)
        assert arguments._n_gpu == min(count, 1)


def test_a_tensor_can_be_marked_as_one_that_does_not_move():
    tensor = torch.zeros(2)
    before = dict(vars(tensor))
    compat.mark_static_address(tensor)
    marks = {key: value for key, value in vars(tensor).items() if key not in before}
    assert "unguarded" in marks.values(), "a compiled forward takes its address for fixed"
