"""What the README shows works as shown: its commands compose, its drafter drafts, its three lines run."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers import decode, plain_greedy
from omegaconf import OmegaConf

import specens
from specens.config import compose
from specens.decoding.target import LAYOUTS
from specens.drafters.ensemble import Ensemble
from specens.race import take_prompt
from specens.tiny import random_model

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(door: str) -> list[list[str]]:
    lines = itertools.chain.from_iterable(block.replace("\\\n", " ").splitlines() for block in blocks("bash"))
    runs = [line.split(f"python -m specens.{door}", 1)[1] for line in lines if f"python -m specens.{door}" in line]
    return [[word for word in shlex.split(run, comments=True) if word != "--multirun"] for run in runs]


@pytest.mark.parametrize("overrides", commands("train"), ids=lambda words: " ".join(words)[:60])
def test_every_training_command_composes(overrides):
    assert "_target_" in compose(overrides, "train").stage


@pytest.mark.parametrize("overrides", commands("audit"), ids=lambda words: " ".join(words)[:60])
def test_every_audit_command_composes(overrides):
    assert "num_prompts" in compose(overrides, "audit").audit


@pytest.mark.parametrize("overrides", commands("replay"), ids=lambda words: " ".join(words)[:60])
def test_every_replay_command_composes(overrides):
    assert compose(overrides, "replay").run == "outputs/traced"


@pytest.mark.parametrize("overrides", commands("race"), ids=lambda words: " ".join(words)[:60])
def test_every_race_command_composes_and_has_a_prompt(overrides):
    prompt, words = take_prompt(overrides)
    assert prompt and compose(words, "race").prompts._target_ == "specens.prompts.Inline"


@pytest.mark.parametrize("overrides", commands("report"), ids=lambda words: " ".join(words)[:60])
def test_every_report_command_composes(overrides):
    assert compose(overrides, "report").run


@pytest.mark.parametrize("overrides", commands("run"), ids=lambda words: " ".join(words)[:60])
def test_every_command_composes(overrides):
    swept = [[f"{key}={value}" for value in values.split(",")] if "," in values and "[" not in values else [f"{key}={values}"]
             for key, _, values in (word.partition("=") for word in overrides if "=" in word)]  # fmt: skip
    others = [word for word in overrides if "=" not in word]
    for choice in itertools.product(*swept):
        if any("members.repeat" in word for word in choice):
            continue  # its YAML file is the reader's to write; the next test builds it
        assert compose([*choice, *others]).target._target_ == "specens.models.ModelSpec"


def test_the_example_drafter_drafts_and_changes_nothing():
    source = next(block for block in blocks("python") if "class Repeat" in block)
    space: dict = {}
    exec(compile(source, "README.md", "exec"), space)
    fields = OmegaConf.create(next(block for block in blocks("yaml") if "Repeat" in block))
    assert fields._target_ == "specens.drafters.repeat.Repeat"
    repeat = space["Repeat"](num_draft_tokens=fields.num_draft_tokens)
    model = random_model(vocab_size=128, tie_word_embeddings=True)  # tied weights: it likes to repeat itself
    prompt = [7, 7, 7]
    for layout in LAYOUTS:
        output, steps = decode(model, Ensemble({"repeat": repeat}), prompt, 20, layout=layout)
        assert output == plain_greedy(model, prompt, 20)
        assert steps[0].members[0].drafter == "repeat" and steps[0].num_nodes == 4


def test_the_three_lines_of_the_library_run(tokenizer):
    source = next(block for block in blocks("python") if "specens.attach" in block).replace('"quantized"', '"oracle"')
    model = random_model()
    input_ids = torch.tensor([[5, 6, 7, 8, 5, 6]])
    space = {"specens": specens, "model": model, "tokenizer": tokenizer, "input_ids": input_ids}
    exec(compile(source, "README.md", "exec"), space)
    plain = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=64, do_sample=False)
    assert torch.equal(space["out"], plain)
    assert list(space["spec"].stats["drafter"]) == ["ngram", "oracle"]
