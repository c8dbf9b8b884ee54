"""The library: `specens.attach` takes transformers' arguments and gives transformers' output."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from helpers import plain_greedy
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer

import specens
from specens.analysis.summary import DRAFTER_COLUMNS
from specens.compat import attention_name
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.types import Member
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.drafters.retrieval.datastore import build as build_datastore
from specens.drafters.retrieval.retrieval import Retrieval
from specens.errors import UserError
from specens.models.cpu_linear import packing
from specens.models.load import tokenizer_fingerprint
from specens.models.tiny import byte_tokenizer, random_model

TEXT = "abcabdabcabeabcab"
MEMBERS = ("ngram", "twin", "stranger")


@pytest.fixture(scope="module")
def model() -> Any:
    """Repeats itself, so that n-grams are accepted now and then. No end token of its own."""
    made = random_model(initializer_range=0.2)
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 2
    return made


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.tensor([byte_tokenizer().encode(TEXT, add_special_tokens=False)])


@pytest.fixture(scope="module")
def spec(model: Any) -> Any:
    """Three drafters: n-grams, the target's own weights, and other weights."""
    twin, stranger = copy.deepcopy(model), random_model(seed=5)
    drafters = dict(zip(MEMBERS, ("ngram", twin, stranger), strict=True))
    return specens.attach(model, byte_tokenizer(), drafters, budget="fixed")


def reference(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    """What transformers itself writes."""
    options |= {"attention_mask": torch.ones_like(ids), "tokenizer": byte_tokenizer()}
    return model.generate(ids, do_sample=False, **options)[0].tolist()


def test_attach_stays_a_function_whatever_was_imported() -> None:
    """`specens.attach` may be called again, also after other parts of the package have been
    imported, one of which makes what it returns.
    """
    import specens.attached
    import specens.run.session

    for _ in range(2):
        assert callable(specens.attach)
    from specens import attach

    assert attach is specens.attached.attach


def test_what_attach_returns_has_a_speculator_and_no_hidden_state(spec: Any, model: Any) -> None:
    assert isinstance(spec, specens.attached.Attached)
    assert spec.speculator.target.model is model
    assert [member.name for member in spec.speculator.decoder.drafter.members] == list(MEMBERS)
    assert set(specens.__all__) == {"UserError", "attach", "load", "load_model"}
    assert all(getattr(specens, name) for name in specens.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        specens.no_such  # noqa: B018


def test_generate_takes_and_returns_what_transformers_does(
    spec: Any, model: Any, ids: torch.Tensor
) -> None:
    """Ids in, `[1, seq + new]` out; the prompt untouched; the same with `inputs=`, an object if
    asked for.
    """
    out = spec.generate(ids, max_new_tokens=24)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, ids.shape[1] + 24) and out.dtype == ids.dtype
    assert out[0].tolist() == [*ids[0].tolist(), *plain_greedy(model, ids[0].tolist(), 24)]
    masked = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(spec.generate(**masked, max_new_tokens=24), out)
    whole = spec.generate(ids, max_new_tokens=24, return_dict_in_generate=True)
    assert torch.equal(whole.sequences, out)
    assert torch.equal(spec.generate(ids, max_length=ids.shape[1] + 24), out)
    assert spec.generate(ids.int(), max_new_tokens=24).dtype == torch.int32
    assert spec.generate(ids).shape == (1, ids.shape[1] + 20)  # transformers' own default length


def test_generation_configs_are_honoured(model: Any, ids: torch.Tensor) -> None:
    """The model's own config counts, a given one overrides it, options override both; none of them
    is changed.
    """
    model = copy.deepcopy(model)
    base = plain_greedy(model, ids[0].tolist(), 24)
    model.generation_config.max_new_tokens = 9
    model.generation_config.eos_token_id = [base[4], base[6]]
    spec = specens.attach(model, drafters=[NGram(), copy.deepcopy(model)])
    before = model.generation_config.to_dict()

    def new(*arguments: Any, **options: Any) -> list[int]:
        out = spec.generate(ids, *arguments, **options)[0].tolist()
        mask = torch.ones_like(ids)
        assert out == model.generate(ids, *arguments, attention_mask=mask, **options)[0].tolist()
        return out[ids.shape[1] :]

    first = min(base.index(base[4]), base.index(base[6])) + 1
    assert new() == base[:first]
    assert new(eos_token_id=258) == base[:9]
    given = GenerationConfig(max_new_tokens=12, eos_token_id=258)
    kept = given.to_dict()
    assert new(given) == base[:12]
    assert new(generation_config=given, max_new_tokens=5) == base[:5]
    assert (model.generation_config.to_dict(), given.to_dict()) == (before, kept)


REFUSED = (
    ("num_beams", {"num_beams": 4}),
    ("num_return_sequences", {"num_return_sequences": 2, "do_sample": True}),
    ("num_return_sequences", {"num_return_sequences": 2}),
    ("guidance_scale", {"guidance_scale": 1.5}),
    ("output_scores", {"output_scores": True}),
    ("output_logits", {"output_logits": True}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    ("max_time", {"max_time": 1.0}),
    ("cache_implementation", {"cache_implementation": "static"}),
    ("watermarking_config", {"watermarking_config": {"bias": 2.0}}),
    ("token_healing", {"token_healing": True}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("temperature", {"do_sample": True, "temperature": -1.0}),
    ("nonsense", {"nonsense": 1}),
    ("logits_processor", {"logits_processor": []}),
    ("stopping_criteria", {"stopping_criteria": []}),
    ("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": lambda *_: [1]}),
    ("assistant_model", {"assistant_model": None}),
)


@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    spec: Any, ids: torch.Tensor, name: str, options: dict
) -> None:
    with pytest.raises(UserError, match=name) as caught:
        spec.generate(ids, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_an_option_refused_as_an_argument_is_refused_in_a_config_too(
    model: Any, ids: torch.Tensor
) -> None:
    """Also when it stands in the given config or in the model's own."""
    model = copy.deepcopy(model)
    spec = specens.attach(model)
    with pytest.raises(UserError, match="num_beams"):
        spec.generate(ids, GenerationConfig(num_beams=3, max_new_tokens=4))
    model.generation_config.num_beams = 3
    with pytest.raises(UserError, match="num_beams"):
        spec.generate(ids, max_new_tokens=4)
    assert spec.generate(ids, max_new_tokens=4, num_beams=1).shape[1] == ids.shape[1] + 4


def test_batches_padding_and_impossible_prompts_are_refused(spec: Any, ids: torch.Tensor) -> None:
    with pytest.raises(UserError, match="one by one"):
        spec.generate(ids.repeat(2, 1), max_new_tokens=4)
    with pytest.raises(UserError, match=r"\[1, seq\]"):
        spec.generate(max_new_tokens=4)
    padded = torch.cat([torch.tensor([[2, 2]]), ids], dim=1)
    mask = torch.tensor([[0, 0] + [1] * ids.shape[1]])
    with pytest.raises(UserError, match="padding"):
        spec.generate(padded, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(UserError, match="empty"):
        spec.generate(ids[:, :0], max_new_tokens=4)
    with pytest.raises(UserError, match="258"):
        spec.generate(torch.tensor([[5, 999]]), max_new_tokens=4)
    with pytest.raises(UserError, match="max_length"):
        spec.generate(ids, max_length=ids.shape[1])
    with pytest.raises(UserError, match="tokenizer"):
        specens.attach(spec.speculator.target.model).generate(ids, stop_strings=["a"])


def _bytes_of(tokens: list[int]) -> str:
    return byte_tokenizer().decode(tokens)


def test_greedy_text_is_transformers_own_under_every_option(
    spec: Any, model: Any, ids: torch.Tensor
) -> None:
    """Options that look at the text so far see each node's own text; each changes the text, or this
    would show nothing.
    """
    num_prompt = ids.shape[1]
    free = reference(model, ids, max_new_tokens=32)
    new = free[num_prompt:]
    pairs = [_bytes_of(new[i - 1 : i + 1]) for i in range(6, 30)]
    printable = [pair for pair in pairs if pair.isascii() and len(pair) == 2]
    options: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[new[3]], new[5:7]]},
        {"eos_token_id": [new[7], new[9]]},
        {"eos_token_id": [new[0], new[4]], "min_new_tokens": 11},
        {"eos_token_id": new[1], "min_length": num_prompt + 6},
        {"suppress_tokens": new[2:6]},
        {"begin_suppress_tokens": [new[0]]},
        {"forced_eos_token_id": 77},
        {"sequence_bias": [[[new[2]], -20.0]]},
        {"eos_token_id": 77, "exponential_decay_length_penalty": (4, 2.0)},
        {"stop_strings": printable[:1]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
        | {"eos_token_id": [new[9], 77], "min_new_tokens": 3},
    )
    accepted = 0
    for option in options:
        expected = reference(model, ids, max_new_tokens=32, **option)
        assert spec.generate(ids, max_new_tokens=32, **option)[0].tolist() == expected, option
        assert expected != free, option
        steps = spec._done[-1].steps
        accepted += sum(step.num_accepted for step in steps)
        assert len(steps) < len(expected) - num_prompt, option
    assert accepted > 100


def test_a_stop_string_ends_the_text_wherever_it_lies(
    spec: Any, model: Any, ids: torch.Tensor
) -> None:
    """Every printable pair of the text as a stop string: the same end as transformers'."""
    new = reference(model, ids, max_new_tokens=24)[ids.shape[1] :]
    pairs = {_bytes_of(new[i : i + 2]) for i in range(len(new) - 1)}
    stops = sorted(pair for pair in pairs if len(pair) == 2 and pair.isascii())
    assert len(stops) >= 3
    for stop in stops:
        expected = reference(model, ids, max_new_tokens=24, stop_strings=[stop])
        assert spec.generate(ids, max_new_tokens=24, stop_strings=[stop])[0].tolist() == expected
        assert spec._done[-1].finish_reason == "stop"


def test_sampling_is_keyed_by_seed_prompt_and_nothing_else(
    spec: Any, model: Any, ids: torch.Tensor
) -> None:
    """Same call same text, whatever ran before and whatever drafts; another seed or prompt, another
    text.
    """
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True}
    options |= {"temperature": 0.9, "top_k": 40}
    first = spec.generate(ids, **options)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    spec.generate(ids[:, 2:], **options)
    assert torch.equal(spec.generate(ids, **options), first)
    assert torch.equal(torch.get_rng_state(), state)  # no global randomness is used up
    for drafters in ("none", "ngram", [], [NGram(num_continuations=3), random_model(seed=7)]):
        for layout in ("tree", "rows"):
            other = specens.attach(model, byte_tokenizer(), drafters, layout=layout)
            assert torch.equal(other.generate(ids, **options), first)
    seeds = {tuple(spec.generate(ids, seed=seed, **options)[0].tolist()) for seed in range(5)}
    assert len(seeds) == 5 and tuple(first[0].tolist()) in seeds
    by_seed = specens.attach(model, drafters="none", seed=4).generate(ids, **options)
    assert torch.equal(by_seed, spec.generate(ids, seed=4, **options))
    changed = ids.clone()
    changed[0, 0] += 1
    other = spec.generate(changed, **options)
    assert not torch.equal(other[0, ids.shape[1] :], first[0, ids.shape[1] :])


def test_streamers_get_the_text_of_the_output(
    spec: Any, model: Any, ids: torch.Tensor, capsys: Any
) -> None:
    """transformers' streamers see the prompt, then the tokens one by one, and nothing behind an end
    inside a block.
    """
    tokenizer = byte_tokenizer()
    base = reference(model, ids, max_new_tokens=24)[ids.shape[1] :]
    for eos in (258, base[10]):
        options = {"max_new_tokens": 24, "eos_token_id": eos}
        capsys.readouterr()
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        out = spec.generate(ids, streamer=streamer, **options)[0, ids.shape[1] :]
        text = tokenizer.decode(out)
        assert capsys.readouterr().out == text + "\n"
        spec.generate(ids, streamer=TextStreamer(tokenizer), **options)
        assert capsys.readouterr().out == TEXT + text + "\n"
        pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        given = {"streamer": pieces, **options}
        thread = threading.Thread(target=spec.generate, args=(ids,), kwargs=given)
        thread.start()
        assert "".join(pieces) == text
        thread.join()
    assert len(out) == base.index(base[10]) + 1

    class Spy:
        def __init__(self) -> None:
            self.puts: list[torch.Tensor] = []
            self.num_ends = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts.append(value)

        def end(self) -> None:
            self.num_ends += 1

    spy = Spy()
    out = spec.generate(ids, streamer=spy, max_new_tokens=24, eos_token_id=base[10])
    assert torch.equal(spy.puts[0], ids)
    assert all(tuple(value.shape) == (1,) for value in spy.puts[1:])
    assert [int(value) for value in spy.puts[1:]] == out[0, ids.shape[1] :].tolist()
    assert spy.num_ends == 1


def test_stats_have_one_row_per_drafter_over_all_calls(model: Any, ids: torch.Tensor) -> None:
    """Before any call the table is empty; then every call adds to it; wins and rates are those of
    the steps.
    """
    drafters = {"same": copy.deepcopy(model), "ngram": "ngram"}
    spec = specens.attach(model, drafters=drafters, budget="fixed")
    assert tuple(spec.stats.columns) == DRAFTER_COLUMNS and len(spec.stats) == 0
    spec.generate(ids, max_new_tokens=24)
    once = spec.stats
    assert tuple(once.columns) == DRAFTER_COLUMNS
    assert once.drafter.tolist() == ["same", "ngram"]
    table = once.set_index("drafter")
    assert table.acceptance_rate["same"] == 1.0
    assert table.token_share.sum() == pytest.approx(1.0)
    assert table.no_draft_rate["same"] == table.silent_rate["same"] < 0.5
    spec.generate(ids, max_new_tokens=24)
    assert spec.stats.num_drafted.tolist() == [2 * count for count in once.num_drafted]
    assert spec.stats.win_rate.tolist() == pytest.approx(once.win_rate.tolist())
    assert specens.attach(model, drafters="none").stats.empty


def test_drafters_come_in_every_form(model: Any, ids: torch.Tensor) -> None:
    """A name, a drafter, a model, a list or a mapping of them, none at all: the members are named
    as given.
    """
    small = random_model(seed=7)
    forms: tuple[tuple[Any, list[str]], ...] = (
        ("ngram", ["ngram"]),
        (NGram(), ["ngram"]),
        (small, ["lm"]),
        (["ngram", small], ["ngram", "lm"]),
        (("wrong", "oracle"), ["wrong", "oracle"]),
        (
            {"a": small, "b": LanguageModel(small, num_draft_tokens=2), "c": "ngram"},
            ["a", "b", "c"],
        ),
        ([], []),
        ("none", []),
        (NoDrafter(), []),
        (["none", "oracle"], ["oracle"]),
    )
    expected = [*ids[0].tolist(), *plain_greedy(model, ids[0].tolist(), 10)]
    for drafters, names in forms:
        spec = specens.attach(model, drafters=drafters, budget="fixed")
        assert spec.generate(ids, max_new_tokens=10)[0].tolist() == expected
        assert spec.stats.drafter.tolist() == names
        if "oracle" in names:
            assert spec.stats.set_index("drafter").win_rate["oracle"] > 0.5


class OfAnEarlierVersion:
    """A drafter as they were before 0.2: the state of a sequence was its own."""

    members = (Member("old", 2, 2),)

    def bind(self, target: Any) -> None: ...

    def start(self, prompt_ids: Any) -> None: ...

    def propose(self, context_ids: Any, plan: Any, sampler: Any) -> Any: ...

    def observe(self, commit: Any) -> None: ...


@pytest.mark.parametrize(
    ("drafters", "complaint"),
    [
        (["ngram", "ngram"], "mapping"),
        ([random_model(seed=7), random_model(seed=8)], "mapping"),
        ([NGram(), "ngram"], "mapping"),
        ([42], "42"),
        (42, "42"),
        (None, "None"),
        ({"a": object()}, "a"),
        ({"a/b": "ngram"}, "a/b"),
        ("nonsense", "nonsense"),
        ([NGram], "NGram"),
        ([LanguageModel], "LanguageModel"),
        ([NoDrafter], "NoDrafter"),
        (OfAnEarlierVersion(), r"start\(\) and no begin\(\), see docs/extending.md"),
        (Ensemble, "Ensemble"),
        (["lm/../ngram"], "ngram"),
    ],
)
def test_what_is_no_drafter_is_refused_in_one_line(
    model: Any, drafters: Any, complaint: str
) -> None:
    """Twice the same name, a wrong object, a class instead of an object, a name without a file."""
    with pytest.raises(UserError, match=complaint) as caught:
        specens.attach(model, drafters=drafters)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_layouts_and_broken_budgets_are_refused_by_name(model: Any) -> None:
    with pytest.raises(UserError, match="layout=beams"):
        specens.attach(model, layout="beams")
    with pytest.raises(UserError, match="max_nodes"):
        specens.attach(model, budget=FixedBudget(max_nodes=-1))


def test_attaching_leaves_the_model_as_it_was(model: Any, ids: torch.Tensor) -> None:
    """No target is modified: same weights, same config, and its own `generate` as before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, text = model.config.to_dict(), reference(model, ids, max_new_tokens=12)
    spec = specens.attach(model, drafters=["ngram", model])
    spec.generate(ids, max_new_tokens=12, do_sample=True, temperature=0.5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert reference(model, ids, max_new_tokens=12) == text


def test_a_member_of_an_earlier_version_is_refused_with_what_to_read() -> None:
    with pytest.raises(
        UserError, match=r"members\.old: OfAnEarlierVersion has start\(\).*extending"
    ):
        Ensemble({"old": OfAnEarlierVersion()})  # pyright: ignore


def test_an_attached_model_keeps_its_own_attention(ids: torch.Tensor) -> None:
    """Before, in and after decoding; one that specens loads has attention without repeated keys."""
    model, seen = random_model(), set()
    model.register_forward_pre_hook(lambda *_: seen.add(attention_name(model)))
    specens.attach(model).generate(ids, max_new_tokens=6)
    assert seen == {"sdpa"} == {attention_name(model)}


def test_a_model_is_loaded_by_the_name_of_its_file_or_from_a_folder(
    ids: torch.Tensor, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    model, tokenizer = specens.load_model("tiny")
    assert (attention_name(model), packing(model)) == ("specens_grouped", "float32")
    expected = [*ids[0].tolist(), *plain_greedy(model, ids[0].tolist(), 12)]
    assert specens.attach(model, tokenizer).generate(ids, max_new_tokens=12)[0].tolist() == expected
    loose, _ = specens.load_model("tiny", packed=False, attention="eager")
    assert (attention_name(loose), packing(loose)) == ("eager", None)
    loose.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    again, own = specens.load_model(str(tmp_path / "model"), dtype="float64")
    assert again.dtype == torch.float64 and own.get_vocab() == tokenizer.get_vocab()
    for source, options in (("no/such", {}), ("./no", {}), ("tiny", {"dtype": "float8"})):
        with pytest.raises(UserError) as caught:
            specens.load_model(source, **options)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("budget", ["fixed", "cost_aware"])
def test_several_threads_generate_at_once_with_one_object(
    model: Any, budget: str, tmp_path: Any, monkeypatch: Any
) -> None:
    """With lookups in the text and in a datastore, every text is that of a thread alone."""
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    prompts = [tokenizer.encode(TEXT[i:] * 2, add_special_tokens=False) for i in range(4)]
    expected = [plain_greedy(model, prompt, 32) for prompt in prompts]
    facts = {"fingerprint": tokenizer_fingerprint(tokenizer), "source": "a test"}
    size = model.config.vocab_size
    build_datastore(expected, tmp_path / "store", vocab_size=size, **facts)
    drafters = ["ngram", Retrieval(tmp_path / "store")]
    spec = specens.attach(model, tokenizer, drafters, budget=budget)
    found: list[list[int]] = [[] for _ in prompts]

    def work(place: int) -> None:
        for _ in range(3):
            out = spec.generate(torch.tensor([prompts[place]]), max_new_tokens=32)
            found[place].append(out[0, len(prompts[place]) :].tolist())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[text] * 3 for text in expected]
    assert spec.stats.drafter.tolist() == ["ngram", "retrieval"]
    assert budget != "fixed" or spec.stats.num_accepted.min() > 0
