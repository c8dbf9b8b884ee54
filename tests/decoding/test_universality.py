"""Any attention-only model of transformers keeps its greedy output, in both layouts; what cannot is
refused by name.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from helpers import Fake, decode, plain_greedy, text_drafter
from transformers import T5Config, T5ForConditionalGeneration

from specens.decoding.stopping import StopRules
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.self_check import self_check
from specens.decoding.target.supported import refuse_unsupported
from specens.decoding.target.target import Target
from specens.decoding.types import Draft, TokenTree, depths_of
from specens.drafters.ensemble import Ensemble
from specens.drafters.ngram import NGram
from specens.errors import UserError
from specens.models.tiny import random_model

PROMPT = [5, 17, 99, 3, 42, 7, 64, 21, 5, 17, 99, 3, 42, 7, 64, 21, 5, 17]
WINDOW = {"sliding_window": 8}
# some models otherwise output one token for ever
VARIED = {"initializer_range": 1.0, "tie_word_embeddings": False}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_mixed": (
        "qwen2",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "mistral": ("mistral", WINDOW),
    "mixtral": ("mixtral", {**WINDOW, "num_local_experts": 4}),
    "gemma2": ("gemma2", {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, **VARIED}),
    "gemma3": (
        "gemma3_text",
        {
            **WINDOW,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            **VARIED,
            "num_hidden_layers": 4,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
        },
    ),
    "cohere2": ("cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "gpt_oss": (
        "gpt_oss",
        {**WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "modernbert": (
        "modernbert-decoder",
        {"local_attention": 8, "cls_token_id": 0, "sep_token_id": 1},
    ),
    "olmo3": ("olmo3", {**WINDOW, "num_hidden_layers": 4}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", WINDOW),
    "starcoder2": ("starcoder2", WINDOW),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "stablelm": ("stablelm", {}),
    "falcon": ("falcon", {}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "initializer_range": 1.0}),
    # no position_ids: rows only
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "initializer_range": 1.0}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, **VARIED}),
}
NO_TREE = {"bloom", "mpt"}
EXPERTS = {"qwen3_moe", "mixtral", "gpt_oss"}  # transformers multiplies experts in fp32 at most
EAGER_ONLY = {"gemma2", "gpt_oss", "bloom", "mpt"}

SDPA = [
    (name, layout, "sdpa")
    for name in MODELS
    for layout in ("tree", "rows")
    if name not in EAGER_ONLY
]
EAGER = [
    (name, layout, "eager")
    for name in ("llama", "mistral", "gemma3", "qwen2_mixed", "gpt2", *sorted(EAGER_ONLY))
    for layout in ("tree", "rows")
    if not (name in NO_TREE and layout == "tree")
]
COMBINATIONS = [pytest.param(*each, id="-".join(each)) for each in SDPA + EAGER]


@functools.cache
def model_of(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32):
    model_type, config = MODELS[name]
    config = {"vocab_size": 128, "attn_implementation": attention, **config}
    return random_model(model_type, **config).to(dtype)


@functools.cache
def greedy_of(name: str, attention: str) -> tuple[int, ...]:
    return tuple(plain_greedy(model_of(name, attention), PROMPT, 30))


def watched(target: Target) -> tuple[Target, list[KVCache]]:
    """The target and, once it is prefilled, its cache."""
    caches: list[KVCache] = []
    prefill = target.prefill
    target.prefill = lambda *given: caches.append(prefill(*given)) or caches[-1]  # pyright: ignore
    return target, caches


def check(target: Target, layout: str) -> None:
    """What a run checks before the first prompt."""
    target.check_layout(layout)  # pyright: ignore
    self_check(target, layout)  # pyright: ignore


def refusal_of(call) -> str | None:
    """The UserError's text, None when nothing is refused."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.laws
@pytest.mark.parametrize(("name", "layout", "attention"), COMBINATIONS)
def test_b12_b13_every_attention_model_keeps_its_greedy_output(name, layout, attention):
    """Right, wrong and looked-up branches in one tree, far past the window; the cache always lacks
    the last token only.
    """
    model, output = model_of(name, attention), list(greedy_of(name, attention))
    target, caches = watched(Target(model))
    lengths: list[tuple[int, int]] = []

    def right_or_late(context):
        """A tree: a chain that goes wrong at depth 3 comes first, the right one beside it later."""
        lengths.append((caches[0].length, len(context)))
        tokens = [*PROMPT, *output][len(context) : len(context) + 4]
        bad = [*tokens[:2], *((token + 1) % 128 for token in tokens[2:])]
        flat = Draft.chain(bad)
        return Draft((*flat.token_ids, *tokens), (*flat.parents, *chain_at(len(flat), len(tokens))))

    members = {
        "wrong": text_drafter(PROMPT, output, wrong=True),
        "oracle": Fake(right_or_late, depth=4),
        "ngram": NGram(num_draft_tokens=4, num_continuations=3),
    }
    out, steps = decode(target, Ensemble(members), PROMPT, 30, layout=layout)

    assert out == output
    assert len(set(output)) >= 4, "a model that outputs one token for ever shows nothing"
    assert len(steps) <= 10, "the right branch was refused"
    assert any(step.num_nodes > 8 for step in steps)
    assert all(cached == context - 1 for cached, context in lengths)
    self_check(Target(model), layout)


def chain_at(offset: int, length: int) -> tuple[int, ...]:
    """Parents of a chain from the root whose first node has the index `offset`."""
    return tuple(offset + i - 1 if i else -1 for i in range(length))


@pytest.mark.laws
@pytest.mark.parametrize(("name", "layout", "attention"), COMBINATIONS)
def test_every_node_has_the_logits_of_its_own_branch(name, layout, attention):
    """Twice in a row, the second time on a cache from which siblings of the accepted branch were
    dropped.
    """
    model = model_of(name, attention, torch.float32 if name in EXPERTS else torch.float64)
    target = Target(model)
    ids = list(PROMPT)
    cache = target.prefill(ids)
    tree = branchy((11, 22, 33, 44, 55, 66, 77))
    for path in ((1, 4, 6), (0, 2), ()):
        scores = target.score(cache, ids[-1], tree, layout)
        assert scores.shape == (len(tree) + 1, 128)
        for node in range(-1, len(tree)):
            branch = [tree.token_ids[n] for n in tree.path_to(node)]
            assert_close(
                scores[node + 1],
                fresh_logits(model, [*ids, *branch]),
                1e-4 if name in EXPERTS else 2e-6,
            )
        cache.accept(path)
        ids += [*(tree.token_ids[node] for node in path), 100]
        assert cache.length == len(ids) - 1


def branchy(token_ids: tuple[int, ...]) -> TokenTree:
    """A(C(D), .) and B(E(F, G)) with the branches' nodes between each other."""
    parents = (-1, -1, 0, 2, 1, 4, 4)
    return TokenTree(token_ids, parents, depths_of(parents), (1,) * len(parents))


def fresh_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_close(scores: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    # Nearly exact, but for the places where transformers computes in fp32 whatever the dtype:
    # norms, rotary angles, eager attention's softmax. A wrong mask or position is wrong by more
    # than a percent.
    assert float((scores - expected).abs().max() / expected.std()) < tolerance


@pytest.mark.parametrize(
    ("name", "layout"), [(n, la) for n in ("gpt2", "opt", "llama") for la in ("tree", "rows")]
)
def test_no_forward_reaches_over_the_end_of_the_context(name, layout):
    """Learned positions end with the context: one verified node too many is an index error, or a
    wrong embedding.
    """
    model_type, config = MODELS[name]
    model = random_model(model_type, vocab_size=128, **{**config, "max_position_embeddings": 40})
    target = Target(model)
    assert target.context_limit == 40
    prompt = PROMPT
    output = plain_greedy(model, prompt, 22)
    members = {
        "oracle": text_drafter(prompt, [*output, 1, 2, 3, 4, 5]),
        "ngram": NGram(num_continuations=3),
    }
    out, steps = decode(
        target, Ensemble(members), prompt, 100, layout=layout, stop=StopRules(200, (), 40)
    )
    assert (out, steps[-1].finish_reason) == (output, "context")


# What a model's attention hides from its configuration


HIDDEN_WINDOWS = {
    # its local layers apply their window inside, by cache slot
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 20},
    # has a sliding_window in its configuration and attends to everything
    "moshi": {"sliding_window": 20, "head_dim": 8},
}


@pytest.mark.laws
@pytest.mark.parametrize("layout", ["tree", "rows"])
@pytest.mark.parametrize("model_type", HIDDEN_WINDOWS)
def test_a_window_that_the_configuration_hides_is_refused_or_harmless(model_type, layout):
    """The window is longer than self_check's text, as it is in real checkpoints."""
    model = random_model(model_type, vocab_size=128, **HIDDEN_WINDOWS[model_type]).double()
    target = Target(model)
    if refusal := refusal_of(lambda: check(target, layout)):
        assert layout == "tree"
        assert "rows" in refusal
        return
    tree = branchy((11, 22, 33, 44, 55, 66, 77))
    for num_prompt in (18, 30):
        ids = [(7 * i * i + 3) % 120 + 3 for i in range(num_prompt)]
        scores = target.score(target.prefill(ids), ids[-1], tree, layout)
        for node in range(-1, len(tree)):
            branch = [tree.token_ids[n] for n in tree.path_to(node)]
            assert_close(scores[node + 1], fresh_logits(model, [*ids, *branch]))


@pytest.mark.parametrize("name", sorted(NO_TREE))
def test_a_model_without_position_ids_is_refused_for_the_tree_and_sent_to_rows(name):
    target = Target(model_of(name, "eager"))
    target.check_layout("rows")
    with pytest.raises(
        UserError, match=r"layout=tree needs a model that takes position_ids; use layout=rows"
    ):
        target.check_layout("tree")


def test_flash_attention_is_refused_for_the_tree_by_its_name():
    model = copy.copy(model_of("llama"))
    model.config = copy.deepcopy(model.config)
    model.config._attn_implementation = "flash_attention_2"
    target = Target(model)
    with pytest.raises(UserError, match=r"flash_attention_2 takes no tree mask; use layout=rows"):
        target.check_layout("tree")
    target.check_layout("rows")


# Refusals


REFUSED = {
    "mamba": ({"state_size": 4}, "linear_attention"),
    "mamba2": (
        {"head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 1},
        "linear_attention",
    ),
    "rwkv": ({"attention_hidden_size": 32}, "a recurrent state"),
    "qwen3_next": (
        {
            **MOE,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "linear_attention",
    ),
    "jamba": (
        {"num_hidden_layers": 8, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "linear_attention",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "llama4_text": ({}, "chunked_attention"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_b12_a_state_that_cannot_be_rolled_back_is_refused_by_name(model_type):
    config, kind = REFUSED[model_type]
    model = random_model(model_type, vocab_size=128, **config)
    for refuse in (Target, refuse_unsupported):  # as target, and as a drafter
        with pytest.raises(UserError, match="cannot be rolled back") as refusal:
            refuse(model)
        assert model_type in str(refusal.value)
        assert kind in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_an_encoder_decoder_is_refused_by_name():
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match=r"t5.*encoder-decoder models are not supported"):
        Target(T5ForConditionalGeneration(config))  # pyright: ignore


def rope(kind: str, **config: Any):
    more = (
        {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        if kind == "longrope"
        else {"factor": 2.0}
    )
    parameters = {"rope_type": kind, "rope_theta": 1e4, **more}
    return random_model(
        "phi3" if kind == "longrope" else "llama",
        vocab_size=128,
        rope_parameters=parameters,
        **config,
    )


def test_dynamic_ntk_beyond_its_length_is_refused_with_both_numbers():
    target = Target(rope("dynamic", max_position_embeddings=32))
    target.check_prompt([1] * 10, 32)
    with pytest.raises(
        UserError, match=r"33 tokens, over the 32 at which dynamic rotary positions change"
    ):
        target.check_prompt([1] * 10, 33)


@pytest.mark.parametrize(("num_prompt", "count"), [(20, 12), (33, 12), (34, 12), (40, 12)])
def test_longrope_is_exact_or_refused_on_both_sides_of_its_boundary(num_prompt, count):
    """Its factors change for the whole forward at once, so a cache filled below the boundary must
    not be read above it; and the prefill is one token shorter than the prompt.
    """
    model = rope("longrope", max_position_embeddings=64, original_max_position_embeddings=32)
    target = Target(model)
    prompt = [(7 * i * i + 3) % 120 + 3 for i in range(num_prompt)]
    if refusal := refusal_of(lambda: target.check_prompt(prompt, num_prompt + count)):
        assert num_prompt == 33, (
            "only here would the prefill end below the boundary and the first step above it"
        )
        assert "longrope" in refusal
        return
    output = plain_greedy(model, prompt, count)
    out, steps = decode(target, text_drafter(prompt, output), prompt, count)
    assert out == output
    assert len(steps) < count


@pytest.mark.parametrize("num_prompt", [20, 31, 32])
def test_longrope_across_its_boundary_is_refused_with_both_numbers(num_prompt):
    target = Target(
        rope("longrope", max_position_embeddings=64, original_max_position_embeddings=32)
    )
    with pytest.raises(
        UserError, match=r"33 tokens, over the 32 at which longrope rotary positions change"
    ):
        target.check_prompt([1] * num_prompt, 33)


# What self_check is for


def with_forward(change):
    """A copy of a tiny Llama whose forward first changes its arguments."""
    model = random_model(vocab_size=128)
    forward = model.forward

    @functools.wraps(forward)
    def changed(*args, **kwargs):
        change(kwargs)
        return forward(*args, **kwargs)

    model.forward = changed
    return model


def drop_the_mask(kwargs):
    kwargs["attention_mask"] = None


def count_slots(kwargs):
    first, width = int(kwargs["position_ids"][0, 0]), kwargs["input_ids"].shape[1]
    kwargs["position_ids"] = torch.arange(first, first + width)[None]


def start_at_zero(kwargs):
    kwargs["position_ids"] = kwargs["position_ids"] - kwargs["position_ids"].min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", [drop_the_mask, count_slots, start_at_zero])
def test_self_check_catches_an_attention_that_ignores_mask_or_positions(fault, dtype):
    self_check(Target(with_forward(lambda kwargs: None).to(dtype)), "tree")
    with pytest.raises(UserError, match=r"layout=tree does not reproduce the model's own scores"):
        self_check(Target(with_forward(fault).to(dtype)), "tree")


def test_self_check_catches_a_cache_that_keeps_the_wrong_branch(monkeypatch):
    monkeypatch.setattr(KVCache, "_gather", lambda self, path: None)
    with pytest.raises(UserError, match="does not reproduce"):
        self_check(Target(model_of("llama")), "tree")


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_self_check_turns_a_forward_that_breaks_on_a_tree_into_one_line(layout):
    """Falcon with ALiBi takes position_ids but no tree mask; others break in other ways."""
    target = Target(random_model("falcon", vocab_size=128, alibi=True))
    if layout == "rows":
        return check(target, layout)
    with pytest.raises(UserError, match=r"Falcon.*layout=tree") as refusal:
        check(target, layout)
    assert "\n" not in str(refusal.value)
    return None
