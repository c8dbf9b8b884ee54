"""Compiled forwards of fixed shapes return what the model's own return, on a CPU too: the same
program that a GPU records.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Fake, decode, guesser_weights, plain_greedy, text_drafter
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode

from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.target.compiled import (
    CannotCompileError,
    CompiledModel,
    CompileOptions,
    pack,
    static_masks,
    widths_for,
)
from specens.decoding.target.kv_cache import StaticCache, tree_masks
from specens.decoding.target.target import Target
from specens.decoding.types import Commit, Draft, Plan, Share, TokenTree, depths_of
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.drafters.scripted import Oracle
from specens.drafters.trained.non_autoregressive import NonAutoregressive
from specens.models.tiny import random_model

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [100], [9, 3] * 30, [9, 3, 9, 3, 44, 12, 9])
"""The short ones after the long one find what it left in the buffers."""

COUNT = 14
TREE = TokenTree((5, 6, 7, 8), (-1, 0, 0, -1), (1, 2, 2, 1), (1, 1, 1, 1))
LAYERS = (0, 1, 2)


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return lookup_backend("aot_eager")(graph, inputs)


def options(backend: Any = "aot_eager", **given: Any) -> CompileOptions:
    return CompileOptions(
        **{"backend": backend, "mode": None, "room": 24, "block": 32, "warm_ups": 1, **given}
    )


@functools.cache
def model_of(seed: int = 3, **config: Any):
    return random_model(vocab_size=128, max_position_embeddings=256, seed=seed, **config)


@functools.cache
def compiled_target() -> Target:
    """One for all tests: what one prompt leaves behind must not matter to the next."""
    target = Target(model_of())
    target.compile(options(), max_nodes=11, hidden_layers=LAYERS, num_tokens=60)
    return target


def bushy(context):
    last = context[-1]
    return Draft((last, last, 5, 6, 7, last, 5), (-1, -1, 0, 1, 2, -1, 5))


def right_but_late(context, whole):
    """A wrong chain first, then the right one: its nodes lie apart from the last committed token,
    and have to be moved.
    """
    tokens = whole[len(context) : len(context) + 3]
    wrong = [*tokens[:1], *((token + 1) % 128 for token in tokens[1:])]
    both = [*wrong, *tokens]
    parents = [
        -1,
        *range(len(wrong) - 1),
        *([-1] if tokens else []),
        *range(len(wrong), len(both) - 1),
    ]
    return Draft(tuple(both), tuple(parents[: len(both)]))


@functools.cache
def models(target: Target) -> Ensemble:
    """Compiled once for the target."""
    return Ensemble(
        {
            "same": LanguageModel(model_of(), 3),
            "other": LanguageModel(model_of(9), 3, num_branches=2),
        }
    )


def drafter_of(name: str, target: Target, prompt) -> Any:
    whole = [*prompt, *plain_greedy(model_of(), prompt, COUNT)]
    drafters = {
        "none": lambda: NoDrafter(),
        "branches": lambda: Ensemble(
            {"ngram": NGram(5, num_continuations=2), "bushy": Fake(bushy, "bushy")}
        ),
        "moved": lambda: Fake(lambda context: right_but_late(context, whole), "late"),
        "models": lambda: models(target),
        "wide": lambda: Fake(lambda context: Draft.chain([context[-1]] * 40), "wide", depth=30),
        "reader": lambda: NonAutoregressive(guesser_weights(model_of(), kept=range(128)), 4, 6),
        "second": lambda: Oracle(3),
    }
    return drafters[name]()


@pytest.mark.laws
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    "name", ["none", "branches", "moved", "models", "wide", "reader", "second"]
)
def test_output_and_steps_are_those_of_the_model_itself(name, seed):
    """Prompts of different lengths in a row, in the same buffers."""
    target = compiled_target()
    eager = Target(model_of())
    for prompt in PROMPTS:
        output, steps = decode(target, drafter_of(name, target, prompt), prompt, COUNT, seed=seed)
        expected, usual = decode(eager, drafter_of(name, eager, prompt), prompt, COUNT, seed=seed)
        alone, _ = decode(eager, NoDrafter(), prompt, COUNT, seed=seed)
        assert output == expected == alone
        assert [(s.num_nodes, s.num_accepted) for s in steps] == [
            (s.num_nodes, s.num_accepted) for s in usual
        ]
        if seed is None:
            assert output == plain_greedy(model_of(), prompt, COUNT)


def test_nothing_is_compiled_twice():
    """One graph for each width and one that moves positions, without a break; then none, whatever
    is decoded.
    """
    target, backend = Target(model_of()), Counting()
    target.compile(options(backend), max_nodes=6, num_tokens=60)
    assert target.compiled is not None
    assert target.compiled.widths == (1, 2, 4, 8)
    assert backend.count == len(target.compiled.widths) + 1
    for prompt in PROMPTS:
        for name in ("none", "branches", "moved"):
            decode(target, drafter_of(name, target, prompt), prompt, COUNT)
    assert backend.count == len(target.compiled.widths) + 1


def steps_of(target: Target, prompt) -> Any:
    """Trees of growing width, accepted in part: yields the cache, the committed ids and the scores
    before each accept.
    """
    trees = (
        (TREE, (0, 2)),
        (TokenTree(), ()),
        (TREE, (3,)),
        (TokenTree.chain((4, 5, 6, 7, 8)), (0, 1)),
    )
    with target.prefill(prompt, LAYERS) as cache:
        ids = list(prompt)
        for tree, path in trees:
            logits = target.score(cache, ids[-1], tree, "tree")
            yield cache, ids, tree, logits
            cache.accept(path)
            ids += [*(tree.token_ids[node] for node in path), 9]


@pytest.mark.laws
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_cache_lacks_the_last_token_only_and_its_scores_are_a_fresh_forwards(prompt):
    target, model = compiled_target(), model_of()
    for cache, ids, tree, logits in steps_of(target, prompt):
        assert isinstance(cache, StaticCache)
        assert cache.length == len(ids) + len(tree)
        for node in range(-1, len(tree)):
            path = [*ids, *(tree.token_ids[n] for n in (tree.path_to(node) if node >= 0 else ()))]
            output = model(torch.tensor([path]), use_cache=False, output_hidden_states=True)
            assert torch.allclose(logits[node + 1], output.logits[0, -1], atol=1e-4)
            for layer in LAYERS:
                assert torch.allclose(
                    cache.hidden[layer][0, node + 1], output.hidden_states[layer][0, -1], atol=1e-4
                )


def test_what_is_behind_the_context_is_never_read():
    target = compiled_target()
    clean = [logits.clone() for _, _, _, logits in steps_of(target, PROMPTS[0])]
    dirty = []
    for cache, _, _, logits in steps_of(target, PROMPTS[0]):
        dirty.append(logits.clone())
        for states in (*cache.buffers.keys, *cache.buffers.values):
            states[:, :, cache.length :] = 1e4
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    NAMES = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        if func.overloadpacket.__name__ in self.NAMES:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_while_a_tree_is_scored_and_a_path_accepted():
    target = compiled_target()
    # Modes see the operators of the same program when it is not compiled.
    with target.prefill(PROMPTS[0]) as cache, torch.compiler.set_stance("force_eager"):
        with Reads() as reads:
            target.score(cache, 6, TREE, "tree")
            cache.accept((0, 2))
        with Reads() as control:
            target.score(cache, 6, TREE, "tree").argmax().item()
            cache.accept(())
    assert reads.num_operators > 50
    assert reads.seen == []
    assert len(control.seen) == 1


@pytest.fixture
def reads_of_tensors(monkeypatch):
    """Counts calls of `tolist` and `item` on tensors."""
    calls: list[str] = []
    for name in ("tolist", "item"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, name=name, real=real: calls.append(name) or real(self)
        )
    return calls


def test_a_greedy_step_reads_once_for_the_verdict_and_once_for_each_model(reads_of_tensors):
    target = compiled_target()
    plain = Ensemble({"a": LanguageModel(model_of(), 2), "b": LanguageModel(model_of(9), 2)})
    decode(target, plain, PROMPTS[0], 3)  # compiles
    reads_of_tensors.clear()
    _, steps = decode(target, plain, PROMPTS[0], COUNT)
    num_drafts = sum(member.num_drafted > 0 for step in steps for member in step.members)
    assert num_drafts > 0
    assert len(reads_of_tensors) == len(steps) + num_drafts


def test_a_chain_drafted_on_the_device_is_the_one_drafted_token_by_token():
    """Tokens and confidences, also when it was idle, was wrong, and when a confidence is too small
    to go on.
    """
    compiled, eager = LanguageModel(model_of(9), 4), LanguageModel(model_of(9), 4)
    compiled.bind(compiled_target())
    eager.bind(Target(model_of()))
    ids = list(PROMPTS[0])
    proposers = [drafter.begin(ids) for drafter in (compiled, eager)]
    assert isinstance(proposers[0]._cache, StaticCache)
    for new in ([], [7], [8, 1, 2], [3] * 20, [4]):
        ids += new
        for least in (0.0, 0.3):
            plan = Plan.of([Share(4, 4, least)])
            ours, theirs = (proposer.propose(ids, plan, Sampler()) for proposer in proposers)
            assert ours.token_ids == theirs.token_ids
            confidences = [np.array(draft.confidences, float) for draft in (ours, theirs)]
            assert np.allclose(*confidences, atol=1e-5)
            for proposer in proposers:
                proposer.observe(Commit((), (*ours.token_ids[:1], 127)))
                held = proposer._cache.length
                assert held <= len(ids) + 1
                proposer._cache.rollback(min(held, len(ids) - 1))
    for proposer in proposers:
        proposer.close()


def test_a_text_that_outgrows_the_buffers_goes_on_in_the_models_own_forwards():
    prompt, count = [5, 6, 7], 90
    target = Target(model_of())
    target.compile(options(room=8), max_nodes=3)
    assert target.compiled is not None
    assert target.compiled.capacity == 32
    whole = plain_greedy(model_of(), prompt, count)
    drafter = text_drafter(prompt, whole, depth=3)
    assert (
        decode(target, Ensemble({"o": drafter, "m": LanguageModel(model_of(9), 2)}), prompt, count)[
            0
        ]
        == whole
    )
    assert target.compiled.capacity == 32
    longer = [9, 3] * 20  # needs more from the start
    assert decode(target, NoDrafter(), longer, 5)[0] == plain_greedy(model_of(), longer, 5)
    assert target.compiled.capacity == 64
    assert decode(target, text_drafter(prompt, whole), prompt, count)[0] == whole


def test_a_second_sequence_at_the_same_time_works_uncompiled():
    target = compiled_target()
    first = target.prefill(PROMPTS[0])
    second = target.prefill(PROMPTS[0])
    assert isinstance(first, StaticCache)
    assert not isinstance(second, StaticCache)
    a, b = (target.score(cache, 6, TREE, "tree") for cache in (first, second))
    assert torch.allclose(a, b, atol=1e-5)
    second.close()
    assert not isinstance(target.prefill(PROMPTS[0]), StaticCache), "the first still has them"
    first.close()
    with target.prefill(PROMPTS[0]) as third:
        assert isinstance(third, StaticCache)
        first.close()  # again: it is no longer the owner
        assert not third.buffers.is_free


def test_rows_and_wider_trees_work_behind_the_same_context():
    """What has no program takes the model's own forward, and programs go on from there."""
    target, eager = compiled_target(), Target(model_of())
    wide = TokenTree.chain(range(1, 30))
    caches = [each.prefill(PROMPTS[0]) for each in (target, eager)]
    steps: Any = (
        (TREE, "tree", (0, 2)),
        (wide, "tree", (0, 1, 2)),
        (TREE, "tree", (3,)),
        (TREE, "rows", (0, 2)),
        (TREE, "tree", (0,)),
    )
    for tree, layout, path in steps:
        a, b = (
            each.score(cache, 6, tree, layout)
            for each, cache in zip((target, eager), caches, strict=True)
        )
        assert torch.allclose(a, b, atol=1e-4)
        for cache in caches:
            cache.accept(path)
        assert caches[0].length == caches[1].length
    rolled = [cache.rollback(4) or cache.length for cache in caches]
    assert rolled == [4, 4]
    for cache in caches:
        cache.close()


WINDOWED = {
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "initializer_range": 1.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 8,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attn_implementation": "eager",
        },
    ),
    "gpt2": ("gpt2", {}),
    "bloom": (
        "bloom",
        {"n_head": 4, "n_layer": 2, "initializer_range": 1.0, "attn_implementation": "eager"},
    ),
}
CANNOT = {"bloom": "position_ids"}


@pytest.mark.laws
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_and_sinks_work_or_are_refused_with_the_reason(name):
    model_type, config = WINDOWED[name]
    model = random_model(model_type, vocab_size=128, **config)
    prompt, target = [5, 17, 99, 3, 42, 7, 64, 21, 5, 17, 99, 3], Target(model)
    if name in CANNOT:
        with pytest.raises(CannotCompileError, match=CANNOT[name]):
            target.compile(options(), max_nodes=3)
        assert target.compiled is None
        return
    target.compile(options(), max_nodes=3, num_tokens=12)
    output = plain_greedy(model, prompt, 20)
    late = Fake(lambda context: right_but_late(context, [*prompt, *output]), "late")
    found, steps = decode(target, late, prompt, 20, budget=None)
    assert found == output
    assert max(step.num_accepted for step in steps) > 0


def test_a_backend_that_fails_leaves_the_target_as_it_was():
    def fail(graph, inputs):
        raise RuntimeError("no such kernel\nmore")

    target = Target(model_of())
    with pytest.raises(CannotCompileError, match="no such kernel") as raised:
        target.compile(options(fail), max_nodes=1)
    assert "\n" not in str(raised.value)
    assert target.compiled is None
    assert decode(target, NoDrafter(), [5, 6], 4)[0] == plain_greedy(model_of(), [5, 6], 4)


def test_wrong_scores_are_found_before_they_are_used(monkeypatch):
    """Masks that let everything be seen: the check against the model's own forward fails."""
    monkeypatch.setattr(
        "specens.decoding.target.compiled.static_masks",
        lambda packed, capacity, *rest: torch.zeros(1, 1, packed.shape[1], capacity),
    )
    with pytest.raises(CannotCompileError, match="is off by"):
        Target(model_of()).compile(options(), max_nodes=1)


def test_a_drafter_that_cannot_be_compiled_warns_and_drafts():
    bloom = random_model("bloom", vocab_size=128, n_head=4, n_layer=2, initializer_range=1.0)
    drafter = LanguageModel(bloom, 3)
    target = compiled_target()
    with pytest.warns(UserWarning, match="drafter lm: goes on uncompiled: .*position_ids"):
        output, _ = decode(target, drafter, PROMPTS[0], COUNT)
    assert output == plain_greedy(model_of(), PROMPTS[0], COUNT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        decode(target, drafter, PROMPTS[0], COUNT)


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize(("num_nodes", "width"), [(0, 1), (3, 4), (5, 8), (70, 72)])
def test_packed_trees_unfold_to_their_masks(num_nodes, width, window):
    numbers = np.random.default_rng(num_nodes)
    parents = tuple(int(numbers.integers(-1, node)) if node else -1 for node in range(num_nodes))
    base, capacity = 6, 90
    tree = TokenTree(tuple(range(num_nodes)), parents, depths_of(parents), (1,) * num_nodes)
    packed = torch.from_numpy(pack((50, *tree.token_ids), parents, base, width))
    mask = static_masks(packed, capacity, {"full_attention": window}, torch.float32)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (1, 1, width, capacity)
    kinds = {"full_attention": window}
    expected = tree_masks(tree, base, kinds, torch.float32, torch.device("cpu"))[0, 0]
    used = base + num_nodes + 1
    assert torch.equal(mask[0, 0, : num_nodes + 1, :used], expected)
    assert (mask[0, 0, : num_nodes + 1, used:] < 0).all()
    assert (mask[0, 0].max(-1).values == 0).all()  # also what is filled up sees something
    assert packed[0, : num_nodes + 1].tolist() == [50, *tree.token_ids]
    assert packed[1, : num_nodes + 1].tolist() == [base, *(base + depth for depth in tree.depths)]


@pytest.mark.parametrize(
    ("most", "widths"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 8)),
        (17, (1, 2, 4, 8, 16, 24)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_widths_are_powers_of_two_and_room_for_the_widest(most, widths):
    assert widths_for(most) == widths


def test_samples_are_the_same_whether_compiled_or_not():
    prompt, noise = PROMPTS[0], KeyedNoise(3, "p")
    texts = [
        decode(target, LanguageModel(model_of(9), 3), prompt, COUNT, sampler=Sampler(noise=noise))[
            0
        ]
        for target in (compiled_target(), Target(model_of()))
    ]
    assert texts[0] == texts[1]


def test_hidden_states_that_were_not_needed_before_are_compiled_then():
    target, backend = Target(model_of()), Counting()
    target.compile(options(backend), max_nodes=0)
    before = backend.count
    for layers in ((2,), (), (2,)):
        cache = target.prefill([5, 6, 7], layers)
        assert isinstance(cache, StaticCache)
        logits = target.score(cache, 7, TokenTree(), "tree")
        output = model_of()(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
        assert torch.allclose(logits[0], output.logits[0, -1], atol=1e-4)
        for layer in layers:
            assert torch.allclose(
                cache.hidden[layer][0], output.hidden_states[layer][0, -1:], atol=1e-4
            )
        assert backend.count == before + 2  # the mover and the one width
        cache.close()


def test_a_model_without_programs_has_no_capacity():
    compiled = CompiledModel(model_of(), options(), (1,))
    assert compiled.capacity == 0
    assert not compiled.takes(Target(model_of()).prefill([5, 6]), 1)
