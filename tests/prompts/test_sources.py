"""Prompts: what is read is what is fed, every mistake is named with its place, and ids are made
exactly once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import REPOSITORY
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from specens.errors import UserError
from specens.prompts.chat import Prompt, next_prompt, render
from specens.prompts.sources import Demo, Hub, Inline, Jsonl, PromptSource, Question, SpecBench

CONF = REPOSITORY / "conf" / "prompts"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] "
    "}}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(chat_template: Any = None) -> PreTrainedTokenizerFast:
    """One token a byte, <s> = 0 put before every text, </s> = 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = token_decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = post  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def chatty() -> PreTrainedTokenizerFast:
    return byte_tokenizer(TEMPLATE)


def spell(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: tuple[int, ...],
    skip_special_tokens: bool = False,
) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines (dicts as JSON, strings as they are) to a file and returns its path."""

    def _write(*lines: Any) -> str:
        path = tmp_path / "questions.jsonl"
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return _write


def refusal(source: PromptSource) -> str:
    """The one line with which a source refuses."""
    with pytest.raises(UserError) as caught:
        source.questions()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


# Token ids


def test_a_chat_prompt_is_the_template_tokenised_once(chatty: PreTrainedTokenizerFast) -> None:
    token_ids = render(chatty, [("user", "hi")], chat=None)
    assert spell(chatty, token_ids) == "<s>[user]hi\n[assistant]"
    assert token_ids.count(0) == 1
    assert all(type(token) is int for token in token_ids)
    assert render(chatty, [("user", "hi")], chat=True) == token_ids


@pytest.mark.parametrize("text", ["hi", "<s>hi"])
def test_a_raw_prompt_has_one_bos_whether_or_not_it_was_typed(
    plain: PreTrainedTokenizerFast, text: str
) -> None:
    token_ids = render(plain, [("user", text)], chat=None)
    assert token_ids[0] == 0 and token_ids.count(0) == 1
    assert spell(plain, token_ids) == "<s>hi"


def test_special_tokens_inside_a_prompt_stay(plain: PreTrainedTokenizerFast) -> None:
    token_ids = render(plain, [("user", "a</s>b<s>c")], chat=False)
    assert spell(plain, token_ids) == "<s>a</s>b<s>c"
    assert token_ids.count(1) == 1 and token_ids.count(0) == 2


def test_chat_false_takes_raw_text_though_there_is_a_template(
    chatty: PreTrainedTokenizerFast,
) -> None:
    assert spell(chatty, render(chatty, [("user", "hi")], chat=False)) == "<s>hi"


def test_chat_true_without_a_template_names_the_tokenizer(plain: PreTrainedTokenizerFast) -> None:
    plain.name_or_path = "some/base-model"
    with pytest.raises(UserError, match=r"some/base-model.*no chat template.*prompts.chat=false"):
        render(plain, [("user", "hi")], chat=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no roles here') }}", "no roles here"),
        ({"tool_use": "x"}, "multiple chat templates"),
    ],
)
def test_a_template_that_refuses_is_one_clear_line(template: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        render(byte_tokenizer(template), [("user", "hi")], chat=None)
    assert "\n" not in str(caught.value)


# Turns


def test_later_turns_hold_the_targets_own_answers(chatty: PreTrainedTokenizerFast) -> None:
    question = Question("q", "chat", ("one", "two", "three"))
    prompts = [next_prompt(question, scores, chatty, None) for scores in ([], ["A"], ["A", "B"])]
    assert [prompt.id for prompt in prompts] == ["q/0", "q/1", "q/2"]
    assert [prompt.text for prompt in prompts] == ["one", "two", "three"]
    assert (
        spell(chatty, prompts[2].token_ids)
        == "<s>[user]one\n[assistant]A\n[user]two\n[assistant]B\n[user]three\n[assistant]"
    )
    assert all(prompt.token_ids.count(0) == 1 for prompt in prompts)


def test_raw_turns_are_one_running_text(plain: PreTrainedTokenizerFast) -> None:
    prompt = next_prompt(Question("q", "c", ("one", "two")), ["A"], plain, False)
    assert spell(plain, prompt.token_ids) == "<s>oneAtwo"


def test_a_single_turn_keeps_the_id_of_its_question(chatty: PreTrainedTokenizerFast) -> None:
    prompt = next_prompt(Question("q", "c", ("one",)), [], chatty, None)
    assert (prompt.id, prompt.category, prompt.text) == ("q", "c", "one")


def test_raw_ids_are_passed_through_unchanged(chatty: PreTrainedTokenizerFast) -> None:
    prompt = next_prompt(Question("q", "c", token_ids=(5, 0, 1, 5)), [], chatty, True)
    assert prompt == Prompt("q", "c", "", (5, 0, 1, 5))


@pytest.mark.parametrize(
    "question", [Question("q", "c", ("one",)), Question("q", "c", token_ids=(1,))]
)
def test_a_turn_that_does_not_exist_is_an_error(
    question: Question, plain: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="turn 1 does not exist"):
        next_prompt(question, ["A"], plain, None)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="'q' has no tokens"):
        next_prompt(Question("q", "c", ("one",)), [], byte_tokenizer("{# says nothing #}"), True)


# Jsonl


def test_jsonl_reads_texts_turns_and_ids(write: Write) -> None:
    path = write(
        {"text": "a", "note": "extra keys are ignored"},
        "",
        {"turns": ["b", "c"], "id": 7, "category": "chat"},
        {"prompt_ids": [3, 0], "id": "x"},
    )
    assert Jsonl(path=path).questions() == [
        Question("1", "jsonl", ("a",)),
        Question("7", "chat", ("b", "c")),
        Question("x", "jsonl", (), (3, 0)),
    ]


def test_jsonl_texts_are_never_taken_for_interpolations(
    write: Write, plain: PreTrainedTokenizerFast
) -> None:
    texts = ["cost ${x}", "price: ${", "???"]
    config = OmegaConf.load(CONF / "jsonl.yaml")
    config.path = write(*({"text": text} for text in texts))
    questions = instantiate(config).questions()
    prompts = [next_prompt(question, [], plain, None) for question in questions]
    assert [prompt.text for prompt in prompts] == texts
    assert [spell(plain, prompt.token_ids, skip_special_tokens=True) for prompt in prompts] == texts


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u0085c"}\r\n \r\n{"text": "é"}\r\n'.encode())
    assert [(q.id, q.turns[0]) for q in Jsonl(path=str(path)).questions()] == [
        ("1", "a\u2028b\u0085c"),
        ("3", "é"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'text': 'a'}", "not valid JSON"),
        ('{"text": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "a JSON list, not an object"),
        ({"txt": "a"}, "found none of them"),
        ({"text": "a", "turns": ["b"]}, 'found "text" and "turns"'),
        ({"text": 3}, '"text" is 3, not a text'),
        ({"text": ""}, '"text" is empty'),
        ('{"text": "\\ud800"}', '"text" is not valid Unicode'),
        ({"turns": "a"}, "\"turns\" is 'a'"),
        ({"turns": []}, '"turns" is []'),
        ({"turns": ["a", None]}, '"turns"[1] is None, not a text'),
        ({"turns": [[0] * 10_000]}, '"turns"[0] is [0, 0, 0,'),
        ({"prompt_ids": []}, '"prompt_ids" is []'),
        ({"prompt_ids": "1 2"}, "\"prompt_ids\" is '1 2'"),
        ({"prompt_ids": [1, -1]}, '"prompt_ids"[1] is -1'),
        ({"prompt_ids": [1.0]}, '"prompt_ids"[0] is 1.0'),
        ({"prompt_ids": [True]}, '"prompt_ids"[0] is True'),
        ({"text": "a", "id": 1.5}, '"id" is 1.5'),
        ({"text": "a", "id": True}, '"id" is True'),
        ({"text": "a", "id": ""}, '"id" is empty'),
        ({"text": "a", "category": None}, '"category" is None'),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(write: Write, line: Any, complaint: str) -> None:
    path = write({"text": "good"}, "", line, {"text": "good"})
    message = refusal(Jsonl(path=path))
    assert message.startswith(f"{path}, line 3: ")
    assert complaint in message


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert refusal(Jsonl(path=str(path))).startswith(f"{path}, line 2: not UTF-8")


def test_equal_ids_are_refused_with_both_lines(write: Write) -> None:
    path = write({"text": "a", "id": "x"}, {"text": "b"}, {"text": "c", "id": "x"})
    message = refusal(Jsonl(path=path))
    assert f"{path}, line 3: the id 'x'" in message and f"{path}, line 1" in message


def test_the_id_of_a_turn_may_not_collide_either(write: Write) -> None:
    message = refusal(
        Jsonl(path=write({"turns": ["a", "b"], "id": "x"}, {"text": "c", "id": "x/1"}))
    )
    assert "line 2: the id 'x/1'" in message


def test_a_file_without_prompts_is_refused_by_name(write: Write) -> None:
    path = write("", "  ")
    assert path in refusal(Jsonl(path=path))


@pytest.mark.parametrize("source", [Jsonl, SpecBench])
def test_a_path_that_cannot_be_read_says_what_to_set(
    source: type[Jsonl] | type[SpecBench], tmp_path: Path
) -> None:
    for missing in (None, "", "???"):
        assert "prompts.path=<file.jsonl>" in refusal(source(path=missing))
    assert "prompts.path=no/such.jsonl does not exist" in refusal(source(path="no/such.jsonl"))
    assert "is a folder" in refusal(source(path=str(tmp_path)))


def test_a_relative_path_is_relative_to_the_current_folder(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(write({"text": "a"})).parent)
    assert Jsonl(path="questions.jsonl").questions() == [Question("1", "jsonl", ("a",))]


# The other sources


def test_the_demo_covers_the_kinds_of_work_and_is_short(chatty: PreTrainedTokenizerFast) -> None:
    questions = Demo().questions()
    counts = {
        category: sum(q.category == category for q in questions)
        for category in {q.category for q in questions}
    }
    assert counts == {
        "chat": 3,
        "translation": 2,
        "summarization": 2,
        "qa": 1,
        "math_reasoning": 1,
        "rag": 2,
        "code_editing": 1,
    }
    for question in questions:
        prompt = next_prompt(question, [], chatty, None)
        assert prompt.id == question.id
        # bytes, four or so to a real token
        assert len(prompt.text.split()) < 200 and len(prompt.token_ids) < 1400


def test_inline_texts_become_questions_in_order() -> None:
    assert Inline(texts=["a", "b"]).questions() == [
        Question("1", "inline", ("a",)),
        Question("2", "inline", ("b",)),
    ]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        ([], "prompts.texts is []"),
        ("hello", "prompts.texts is 'hello'"),
        (None, "prompts.texts is None"),
        (["a", ""], "prompts.texts[1]: the text is empty"),
        ([7], "prompts.texts[0]: the text is 7, not a text"),
    ],
)
def test_inline_refuses_what_is_not_a_list_of_texts(texts: Any, complaint: str) -> None:
    assert complaint in refusal(Inline(texts=texts))


def spec_bench_lines() -> list[dict[str, Any]]:
    categories = ["writing", "qa", "writing", "qa", "writing"]
    return [
        {
            "question_id": 80 + i,
            "category": category,
            "turns": [f"first {i}", f"second {i}"],
            "reference": [],
        }
        for i, category in enumerate(categories)
    ]


def test_spec_bench_asks_the_first_turn_or_all(write: Write) -> None:
    path = write(*spec_bench_lines())
    assert SpecBench(path=path).questions()[1] == Question("81", "qa", ("first 1",))
    assert SpecBench(path=path, turns="all").questions()[1] == Question(
        "81", "qa", ("first 1", "second 1")
    )


def test_per_category_keeps_the_first_of_each_in_file_order_and_limit_comes_after(
    write: Write,
) -> None:
    path = write(*spec_bench_lines())
    assert [q.id for q in SpecBench(path=path, per_category=1).questions()] == ["80", "81"]
    assert [q.id for q in SpecBench(path=path, per_category=2).questions()] == [
        "80",
        "81",
        "82",
        "83",
    ]
    assert [q.id for q in SpecBench(path=path, per_category=2, limit=3).questions()] == [
        "80",
        "81",
        "82",
    ]


@pytest.mark.parametrize("key", ["question_id", "category", "turns"])
def test_a_spec_bench_line_without_a_key_is_named(write: Write, key: str) -> None:
    lines = spec_bench_lines()
    del lines[3][key]
    assert f'line 4: no "{key}"' in refusal(SpecBench(path=write(*lines)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("question_id", None), ("category", 1), ("turns", "text"), ("turns", []), ("turns", ["a", 2])],
)
def test_a_spec_bench_line_with_a_wrong_type_is_named(write: Write, key: str, value: Any) -> None:
    lines = spec_bench_lines()
    lines[1][key] = value
    message = refusal(SpecBench(path=write(*lines)))
    assert "line 2: " in message and f'"{key}"' in message


def test_spec_bench_options_are_checked(write: Write) -> None:
    path = write(*spec_bench_lines())
    assert "prompts.turns is 'last'" in refusal(SpecBench(path=path, turns="last"))
    assert "prompts.per_category=0" in refusal(SpecBench(path=path, per_category=0))


class Rows(dict[str, list[Any]]):
    """A loaded data set: columns by name."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


def install_datasets(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Rows]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_hub_reads_a_column_and_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(*args: Any, **options: Any) -> Rows:
        calls.append((args, options))
        return Rows(question=["a", "b", "c"])

    install_datasets(monkeypatch, load)
    source = Hub(name="o/d", split="test", column="question", config="main", revision="v1", limit=2)
    assert source.questions() == [Question("0", "hub", ("a",)), Question("1", "hub", ("b",))]
    assert calls == [(("o/d", "main"), {"split": "test", "revision": "v1"})]


def test_hub_refuses_a_wrong_column_an_empty_split_and_a_row_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_datasets(monkeypatch, lambda *_, **__: Rows(question=["a", 3], empty=[]))
    assert "no column 'text': set prompts.column to one of question, empty" in refusal(
        Hub(name="o/d")
    )
    assert 'o/d [train], row 1: column "question" is 3' in refusal(
        Hub(name="o/d", column="question")
    )
    assert "'o/d'" in refusal(Hub(name="o/d", column="empty"))


def test_hub_without_a_name_the_package_or_the_network_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: Any, **__: Any) -> Rows:
        raise ConnectionError("no route\nto host")

    assert "prompts.name is not set" in refusal(Hub())
    assert "prompts.split is not set" in refusal(Hub(name="o/d", split=""))
    monkeypatch.setitem(sys.modules, "datasets", None)  # pyright: ignore[reportArgumentType]
    assert "pip install datasets" in refusal(Hub(name="o/d"))
    install_datasets(monkeypatch, unreachable)
    assert "'o/d' (no route to host)" in refusal(Hub(name="o/d"))


# Options of every source


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_shards_are_disjoint_and_together_complete(num_shards: int) -> None:
    texts = [f"text {i}" for i in range(10)]
    parts = [
        Inline(texts=texts, limit=7, shard=f"{i}/{num_shards}").questions()
        for i in range(num_shards)
    ]
    ids = [question.id for part in parts for question in part]
    assert len(ids) == len(set(ids))
    assert sorted(ids, key=int) == [
        question.id for question in Inline(texts=texts, limit=7).questions()
    ]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_empty_shard_is_refused() -> None:
    assert "prompts.shard=2/3 is empty: there are only 2 prompts" in refusal(
        Inline(texts=["a", "b"], shard="2/3")
    )


@pytest.mark.parametrize(
    "shard", ["", "1", "1/", "/2", "2/2", "-1/2", "0/0", "1/2/3", " 0/2", "a/b", 0.5]
)
def test_a_shard_that_is_none_is_refused(shard: Any) -> None:
    assert "prompts.shard is" in refusal(Inline(texts=["a"], shard=shard))


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3", True])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    assert "prompts.limit=" in refusal(Inline(texts=["a"], limit=limit))


def test_chat_is_true_false_or_null() -> None:
    assert "prompts.chat='yes'" in refusal(Inline(texts=["a"], chat="yes"))  # pyright: ignore


def test_a_mistake_behind_the_limit_is_still_found(write: Write) -> None:
    assert "line 2" in refusal(Jsonl(path=write({"text": "a"}, {"text": 1}), limit=1))


@pytest.mark.parametrize("source", [Demo, Inline, Jsonl, SpecBench, Hub])
def test_the_yaml_of_a_source_lists_every_field_with_its_default(
    source: type[PromptSource],
) -> None:
    names = {Demo: "demo", Inline: "inline", Jsonl: "jsonl", SpecBench: "spec_bench", Hub: "hub"}
    config = OmegaConf.load(CONF / f"{names[source]}.yaml")
    built = instantiate(config, _convert_="all")
    assert type(built) is source
    assert {key for key in config if key != "_target_"} == set(source.__dataclass_fields__)
    default = source()
    for name in source.__dataclass_fields__:
        value = getattr(built, name)
        assert (tuple(value) if name == "texts" else value) == getattr(default, name)


def test_inline_takes_the_list_type_of_the_configuration() -> None:
    config = OmegaConf.load(CONF / "inline.yaml")
    config.texts = ["a", "b"]
    assert [question.turns for question in instantiate(config).questions()] == [("a",), ("b",)]


def test_reading_prompts_needs_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from specens.prompts.sources import Demo; assert len(Demo().questions()) == "
        "12; "
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
