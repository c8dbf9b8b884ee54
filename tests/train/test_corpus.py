"""stage=corpus: texts in the chat template, answers that are the target's own, files that survive
kills, no evaluation text.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import plain_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specens.decoding.target.target import Target
from specens.errors import UserError
from specens.models.tiny import byte_tokenizer, random_model
from specens.prompts.sources import DEMO_FILE
from specens.train import corpus
from specens.train.corpus import Corpus, PartialText, Template, append, choose, texts_of_jsonl
from specens.train.shards import RUN_TOKENS, Shard, TextShards, narrow, overlaps, runs_of

EOS = 1


def target_of(family: str = "llama", *, chat: bool = True, **config: Any) -> Target:
    tokenizer = byte_tokenizer()
    if not chat:
        tokenizer.chat_template = None
    return Target(random_model(family, **{"seed": 3, **config}), tokenizer)


@pytest.fixture(scope="module")
def target():
    return target_of()


SMALL: dict[str, Any] = {
    "num_tokens": 800,
    "shard_texts": 8,
    "max_user_tokens": 12,
    "max_answer_tokens": 20,
    "openers": ["Why", "How many"],
}


def options(folder, **changed: Any) -> Corpus:
    return Corpus(str(folder), **{**SMALL, **changed})


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """A small corpus, written in one go."""
    return options(tmp_path_factory.mktemp("whole") / "corpus").run(target)


def rows_of(texts: TextShards) -> list[dict[str, Any]]:
    """Every text: its ids, prompt length, whether greedy."""
    return [
        {
            "ids": shard.token_ids[begin : begin + length].tolist(),
            "prompt": int(prompt),
            "is_greedy": bool(greedy),
        }
        for shard in texts.shards()
        for begin, length, prompt, greedy in zip(
            shard.begins, shard.length, shard.prompt_length, shard.is_greedy, strict=True
        )
    ]


def hidden_states(shard: Shard, layers: list[int]) -> torch.Tensor:
    tensors = load_file(shard.hidden_path)
    return torch.stack([tensors[f"layer.{layer}"] for layer in layers], dim=1)


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))}


def jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


# What is written


def test_texts_stand_in_the_chat_template_and_the_answer_begins_where_the_file_says(whole, target):
    tokenizer = target.tokenizer
    empty = tokenizer.apply_chat_template(
        [{"role": "user", "content": "|"}], add_generation_prompt=True, tokenize=False
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in empty.split("|"))
    rows = rows_of(whole)
    assert len(rows) >= 20 and {row["is_greedy"] for row in rows} == {True, False}
    for row in rows:
        prompt, answer = row["ids"][: row["prompt"]], row["ids"][row["prompt"] :]
        turn = prompt[len(before) : len(prompt) - len(after)]
        assert prompt == [*before, *turn, *after]
        assert 1 <= len(turn) <= 12 and EOS not in turn
        assert 1 <= len(answer) <= 20 and EOS not in answer[:-1]
        assert len(answer) == 20 or answer[-1] == EOS
    assert len({tuple(row["ids"]) for row in rows}) == len(rows)
    openers = [tokenizer.encode(text) for text in SMALL["openers"]]
    begun = [any(row["ids"][len(before) :][: len(o)] == o for o in openers) for row in rows]
    assert 0.2 < sum(begun) / len(begun) < 0.8


def test_given_user_turns_are_used_verbatim_each_once_and_first(target, tmp_path):
    turns = [f"Question {i}: what is {i} times {i + 1}, please?" for i in range(10)]
    turns += ["What does </s> mean?"]
    prompts = jsonl(tmp_path / "prompts.jsonl", turns)
    texts = options(tmp_path / "corpus", prompts=prompts, max_user_tokens=5).run(target)
    rendered = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
        )
        for turn in turns
    ]
    found = [row["ids"][: row["prompt"]] for row in rows_of(texts)]
    assert found[:11] == rendered, "re-rendered by the tokenizer, they are the same ids"
    assert all(prompt not in rendered for prompt in found[11:]) and len(found) > 12


def test_greedy_answers_are_plain_greedy_decoding_of_their_prompt(whole, target):
    same = {True: [], False: []}
    for row in rows_of(whole):
        prompt, answer = row["ids"][: row["prompt"]], row["ids"][row["prompt"] :]
        same[row["is_greedy"]].append(plain_greedy(target.model, prompt, len(answer)) == answer)
    assert all(same[True]) and len(same[True]) > 5
    assert not any(same[False])


GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
FAMILIES = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, **GEMMA},
    "bloom": {"n_head": 4, "n_layer": 2, "initializer_range": 1.0},  # no position ids
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_greedy_answers_are_those_of_one_forward_over_the_text(family, tmp_path):
    """Rows that end early leave the batch; what stays must not be mixed up."""
    target = target_of(family, **FAMILIES[family])
    sizes = {"num_tokens": 300, "shard_texts": 10, "hidden_layers": [0, 1, 2]}
    texts = options(tmp_path / "corpus", **sizes).run(target)
    shard = next(texts.shards())
    states = hidden_states(shard, [0, 1, 2])
    assert states.shape == (len(shard.token_ids), 3, 32) and states.dtype == torch.bfloat16
    for begin, length, prompt, is_greedy in zip(
        shard.begins, shard.length, shard.prompt_length, shard.is_greedy, strict=True
    ):
        ids = torch.from_numpy(shard.token_ids[begin : begin + length].astype(np.int64))[None]
        with torch.no_grad():
            output = target.model(ids, output_hidden_states=True)
        for i in range(3):
            ours, theirs = states[begin : begin + length, i].float(), output.hidden_states[i][0]
            assert torch.allclose(ours[:-1], theirs[:-1], rtol=1 / 64, atol=1e-2)
            assert not ours[-1].any(), "the last token was never read"
        if is_greedy:
            assert output.logits[0, prompt - 1 : -1].argmax(-1).tolist() == ids[0, prompt:].tolist()


def test_the_layers_kept_are_spread_over_the_depth_and_end_with_the_last(tmp_path):
    target = target_of(num_hidden_layers=8)
    texts = options(tmp_path / "a", num_tokens=100).run(target)
    assert texts.manifest["options"]["hidden_layers"] == [2, 4, 7, 8]
    bare = options(tmp_path / "b", num_tokens=100, hidden_layers=[]).run(target)
    assert not list(bare.folder.glob("*.hidden.safetensors")) and bare.num_tokens() >= 100
    for layers in ([9], [2, 100]):
        with pytest.raises(UserError, match=r"hidden_layers=.*0 to 8"):
            options(tmp_path / "c", hidden_layers=layers).run(target)


def test_a_seed_is_a_corpus(target, whole, tmp_path):
    again = options(tmp_path / "again").run(target)
    other = options(tmp_path / "other", seed=1).run(target)
    assert files_of(again.folder) == files_of(whole.folder)
    ours, theirs = ({tuple(row["ids"]) for row in rows_of(texts)} for texts in (other, whole))
    assert not ours & theirs


def test_no_text_outgrows_its_limits_nor_the_context(tmp_path):
    limited = target_of(max_position_embeddings=40)
    rows = rows_of(options(tmp_path / "corpus").run(limited))
    assert max(len(row["ids"]) for row in rows) == 40, "the limit is used, not passed"
    assert all(row["prompt"] < len(row["ids"]) for row in rows), "none without an answer"
    with pytest.raises(UserError, match=r"answer within 20 tokens.*max_user_tokens") as error:
        options(tmp_path / "short").run(target_of(max_position_embeddings=20))
    assert "\n" not in str(error.value)


def test_ids_above_65535_are_kept_whole(tmp_path):
    wide = target_of(vocab_size=70_000)
    texts = options(tmp_path / "corpus", num_tokens=200, hidden_layers=[]).run(wide)
    shard = next(texts.shards())
    assert shard.token_ids.dtype == np.uint32 and shard.token_ids.max() > 65_535
    for row in rows_of(texts)[:4]:
        if row["is_greedy"]:
            prompt, answer = row["ids"][: row["prompt"]], row["ids"][row["prompt"] :]
            assert plain_greedy(wide.model, prompt, len(answer)) == answer
    assert [narrow(size) for size in (259, 65_536, 65_537)] == [np.uint16, np.uint16, np.uint32]


# A model without a chat template


def test_without_a_chat_template_a_sampled_beginning_is_the_prompt(tmp_path):
    plain = target_of(chat=False)
    rows = rows_of(options(tmp_path / "corpus").run(plain))
    assert all(row["ids"][0] == 0 and row["prompt"] == 13 for row in rows)
    prompts = {tuple(row["ids"][: row["prompt"]]) for row in rows}
    assert len(prompts) == len(rows), "no two prompts are alike"
    for row in rows:
        prompt, answer = row["ids"][: row["prompt"]], row["ids"][row["prompt"] :]
        assert (plain_greedy(plain.model, prompt, len(answer)) == answer) == row["is_greedy"]


def test_without_a_chat_template_given_prompts_are_used_verbatim_however_long(tmp_path):
    plain = target_of(chat=False)
    turns = ["A text that is much longer than any answer may be here.", "Short."]
    prompts = jsonl(tmp_path / "prompts.jsonl", turns)
    rows = rows_of(options(tmp_path / "corpus", prompts=prompts).run(plain))
    assert plain.tokenizer is not None
    for row, turn in zip(rows, turns, strict=False):
        ids = plain.tokenizer.encode(turn, add_special_tokens=False)
        assert row["ids"][: row["prompt"]] == [0, *ids]
        assert 1 <= len(row["ids"]) - row["prompt"] <= 20


def test_a_tokenizer_without_a_beginning_is_refused(tmp_path):
    plain = target_of(chat=False)
    assert plain.tokenizer is not None
    plain.tokenizer.bos_token = plain.tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a chat template nor"):
        options(tmp_path / "corpus").run(plain)


def test_a_chat_template_without_a_beginning_is_refused(tmp_path):
    bare = target_of()
    assert bare.tokenizer is not None
    bare.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="nothing before a user's turn"):
        options(tmp_path / "corpus").run(bare)


# How a turn ends


def turn_of(tokens: list[int], template: Template, ends: set[int], **limits: Any) -> PartialText:
    row = PartialText([7], False, [])
    for token in tokens:
        append(row, token, template, Corpus("x", **limits), ends)
    return row


def test_a_sampled_turn_ends_with_the_templates_own_token_whatever_ended_it():
    template = Template((7,), (1, 50, 51), 1)
    for end in (1, 2):  # the template's own, and another end of sequence
        row = turn_of([30, 31, end, 99, 99, 40], template, {1, 2})
        assert row.ids == [7, 30, 31, 1, 50, 51, 40] and row.num_prompt == 6
    row = turn_of([30, 31, 99, 99, 99, 40], template, {1, 2}, max_user_tokens=2)
    assert row.ids == [7, 30, 31, 1, 50, 51, 40] and row.num_prompt == 6


def test_a_turn_does_not_end_before_it_began():
    """The model would output an end at once; only in the first place it must not."""
    logits = torch.zeros(3, 60)
    logits[:, [1, 2]] = 50.0
    rows = [
        PartialText([7], False, []),
        PartialText([7, 30], False, [], num_new=1),
        PartialText([7, 30, 1, 50], True, [], True, 4, num_new=3),
    ]
    generators = (torch.Generator().manual_seed(i) for i in range(5))
    chosen = [choose(logits, rows, Corpus("x"), {1, 2}, generator) for generator in generators]
    first, second, answer = map(set, zip(*chosen, strict=True))
    assert not first & {1, 2} and second <= {1, 2}
    assert answer == {1}, "a greedy answer takes the best"


def test_user_and_answer_have_temperatures_of_their_own():
    logits = torch.tensor([2.0, 0.0]).repeat(4000, 1)
    turn = PartialText([7], False, [], num_new=1)
    answer = PartialText([7, 8], False, [], True, 2, num_new=1)
    rows = [turn] * 2000 + [answer] * 2000
    options = Corpus("x", user_temperature=2.0, temperature=0.5)
    sampled = np.array(choose(logits, rows, options, (), torch.Generator().manual_seed(0)))
    for part, heat in ((sampled[:2000], 2.0), (sampled[2000:], 0.5)):
        assert abs(part.mean() - 1 / (1 + np.exp(2.0 / heat))) < 0.04


def test_a_template_with_one_token_after_the_turn_counts_no_answer_as_prompt():
    row = turn_of([30, 1, 40, 41], Template((7,), (1,), 1), {1})
    assert row.ids == [7, 30, 1, 40, 41] and row.num_prompt == 3


def test_only_a_special_token_ends_a_turn_that_the_template_goes_on_with():
    """Else a blank line would end every answer of a model whose template has one between turns."""
    tokenizer = byte_tokenizer()
    special = Template.of(tokenizer)
    assert special.end == special.after[0] == EOS
    tokenizer.chat_template = "{{ 'U: ' + messages[0]['content'] + '\n\nA:' }}"
    plain = Template.of(tokenizer)
    assert plain.end is None and plain.after[0] == tokenizer.encode("\n")[0]


def test_the_end_of_a_sampled_beginning_without_a_template_ends_the_text():
    row = turn_of([30, 1], Template((7,), ()), {1})
    assert row.is_done and row.num_prompt == len(row.ids) == 3


# Kills, parts, other options


def test_a_shard_that_is_gone_is_written_again_the_same(target, whole, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(whole.folder, folder)
    for name in ("00001.safetensors", "00002.hidden.safetensors", "00002.safetensors"):
        (folder / name).unlink()
    (folder / ".00001.safetensors.99").write_bytes(b"half a file")
    options(folder).run(target)
    assert files_of(folder) == files_of(whole.folder)


PATHS = [str(folder) for folder in Path(__file__).parents[:2]]

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import test_corpus
replace = os.replace
def replace_or_die(source, path):
    if Path(path).name == "00001.safetensors":  # its hidden states are there already
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, path)
os.replace = replace_or_die
test_corpus.options({folder!r}).run(test_corpus.target_of())
"""


def test_a_killed_run_goes_on_and_ends_with_the_files_of_an_unbroken_one(target, whole, tmp_path):
    folder = tmp_path / "corpus"
    script = KILLED.format(paths=PATHS, folder=str(folder))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = [name.removesuffix(".safetensors") for name in files_of(folder)]
    assert names == ["00000.hidden", "00000", "00001.hidden"]
    assert len(TextShards.open(folder).shard_paths()) == 1, "hidden states alone are no shard"
    options(folder).run(target)
    assert files_of(folder) == files_of(whole.folder)


def test_a_run_that_is_finished_writes_nothing_again(target, whole, monkeypatch):
    monkeypatch.setattr(corpus, "write_texts", None)
    assert options(whole.folder).run(target).num_tokens() == whole.num_tokens()


def test_parts_fill_one_folder_with_the_same_files(target, whole, tmp_path):
    folder, numbers = tmp_path / "corpus", [int(path.stem) for path in whole.shard_paths()]
    half = sum(len(shard.token_ids) for shard in whole.shards() if int(shard.path.stem) % 2 == 0)
    options(folder, part="0/2", num_tokens=half).run(target)
    assert [int(path.stem) for path in TextShards.open(folder).shard_paths()] == numbers[::2]
    options(folder, part="1/2", num_tokens=whole.num_tokens()).run(target)
    assert files_of(folder) == files_of(whole.folder)


@pytest.mark.slow
def test_two_processes_at_once_fill_one_folder(target, whole, tmp_path):
    """Each waits for the other before it begins: on a busy machine one alone could fill it."""
    folder = tmp_path / "corpus"
    script = """
import pathlib, sys, time
sys.path[:0] = {paths!r}
import test_corpus, torch
torch.set_num_threads(1)  # as in this process: rounding depends on it
target = test_corpus.target_of()
here = pathlib.Path({here!r})
(here / "ready-{part}").touch()
while len(list(here.glob("ready-*"))) < 2:
    time.sleep(0.01)
test_corpus.options({folder!r}, part="{part}/2").run(target)
"""
    names = {"paths": PATHS, "folder": str(folder), "here": str(tmp_path)}
    commands = [script.format(part=part, **names) for part in (0, 1)]
    running = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    assert [process.wait() for process in running] == [0, 0]
    texts = TextShards.open(folder)
    assert texts.num_tokens() >= 800
    ours, theirs = files_of(folder), files_of(whole.folder)
    assert all(ours[name] == theirs[name] for name in set(ours) & set(theirs))
    assert len(set(ours) & set(theirs)) >= 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", 0.5), ("seed", 1), ("openers", ["Who"])),
        *(("hidden_layers", [2]), ("max_answer_tokens", 21)),
    ],
)
def test_a_folder_begun_with_other_options_is_refused_by_their_name(target, whole, name, value):
    line = rf"begun with stage\.{name}=.*not .*another folder"
    with pytest.raises(UserError, match=line) as error:
        options(whole.folder, **{name: value}).run(target)
    assert str(whole.folder) in str(error.value) and "\n" not in str(error.value)


def test_more_tokens_or_another_part_are_no_other_options(target, whole, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(whole.folder, folder)
    more = options(folder, num_tokens=whole.num_tokens() + 1, part="0/1").run(target)
    assert len(more.shard_paths()) == len(whole.shard_paths()) + 1
    assert files_of(whole.folder).items() <= files_of(folder).items()


def test_another_targets_folder_is_refused(whole):
    """Same tokenizer, other weights: its hidden states would be mixed in."""
    with pytest.raises(UserError, match="written by another target"):
        options(whole.folder).run(target_of(seed=4))
    other = target_of()
    assert other.tokenizer is not None
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="written with another tokenizer"):
        options(whole.folder).run(other)


@pytest.mark.parametrize("damage", ["cut", "lengths", "manifest"])
def test_a_damaged_folder_is_refused_with_the_damaged_files_path(target, whole, tmp_path, damage):
    folder = tmp_path / "corpus"
    shutil.copytree(whole.folder, folder)
    path = folder / ("corpus.json" if damage == "manifest" else "00001.safetensors")
    if damage == "lengths":
        shard = next(TextShards.open(folder).shards())
        names = ("token_ids", "length", "prompt_length", "is_greedy")
        arrays = {name: torch.from_numpy(getattr(shard, name)) for name in names}
        save_file({**arrays, "token_ids": arrays["token_ids"][:-1]}, path)
    else:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError) as error:
        options(folder, num_tokens=10**6).run(target)
    line = str(error.value)
    assert path.name in line and str(folder) in line and "\n" not in line


# What must not be in it


def windows(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + RUN_TOKENS]) for i in range(len(ids) - RUN_TOKENS + 1)}


def test_texts_that_share_a_run_with_an_excluded_file_are_dropped(target, tmp_path):
    """Two of the given prompts are in the file, one of them only in part."""
    turns = [f"This{i} is{i} a{i} question{i} that{i} nobody{i} else{i} asks{i}" for i in range(6)]
    prompts = jsonl(tmp_path / "prompts.jsonl", turns)
    hidden = ["What goes before. " + turns[2][:RUN_TOKENS], turns[4], turns[5][: RUN_TOKENS - 1]]
    excluded = jsonl(tmp_path / "excluded.jsonl", hidden)
    given = {"prompts": prompts, "exclude": [excluded], "num_tokens": 400, "shard_texts": 6}
    texts = options(tmp_path / "corpus", **given).run(target)
    written = [target.tokenizer.decode(row["ids"]) for row in rows_of(texts)]
    kept = [any(turn in text for text in written) for turn in turns]
    assert kept == [True, True, False, True, False, True]


def test_no_demo_prompt_can_be_in_it(target, tmp_path):
    demo = texts_of_jsonl(DEMO_FILE)
    assert len(demo) >= 12
    given = {"prompts": str(DEMO_FILE), "num_tokens": 1500, "max_user_tokens": 60}
    texts = options(tmp_path / "corpus", **given).run(target)
    shared = set().union(*(windows(target.tokenizer.encode(text)) for text in demo))
    rows = rows_of(texts)
    assert len(rows) > 8 and not any(windows(row["ids"]) & shared for row in rows)


def test_a_shard_of_which_everything_is_dropped_is_an_empty_one(target, tmp_path):
    turns = [f"A question that is longer than thirty-two bytes, number {i}." for i in range(4)]
    prompts = jsonl(tmp_path / "prompts.jsonl", turns)
    given = {"prompts": prompts, "exclude": [prompts], "num_tokens": 100, "shard_texts": 4}
    texts = options(tmp_path / "corpus", **given).run(target)
    first, *others = texts.shards()
    assert len(first.token_ids) == len(first.length) == 0 and len(others) >= 1
    assert hidden_states(first, [1, 2]).shape == (0, 2, 32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_overlap_is_a_common_run_of_32(data):
    ids = st.integers(0, 3)
    first = data.draw(st.lists(ids, min_size=0, max_size=60))
    second = data.draw(st.lists(ids, min_size=0, max_size=60))
    length = data.draw(st.integers(RUN_TOKENS - 2, RUN_TOKENS + 2))
    if data.draw(st.booleans()):
        second += first[:length]
    expected = bool(windows(first) & windows(second))
    assert overlaps(first, np.unique(runs_of(second))) == expected


# Options


def test_a_shard_knows_where_its_texts_begin(tmp_path):
    lengths, prompts = np.array([2, 4, 3]), np.array([1, 1, 1])
    shard = Shard(tmp_path, np.arange(9), lengths, prompts, np.array([True] * 3))
    assert shard.begins.tolist() == [0, 2, 6]
    assert replace(shard, length=np.array([], dtype=int)).begins.tolist() == []


def test_it_needs_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="tokenizer"):
        options(tmp_path).run(Target(random_model()))
