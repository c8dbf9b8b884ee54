"""python -m specens.train: the stages in turn, their data, what they learn, kills, options."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import guesser_weights
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specens.compat import attention_name
from specens.config.build import build
from specens.config.compose import compose, group_names, resolved
from specens.decoding.target.attention import GROUPED, use_grouped_attention
from specens.decoding.target.target import Target
from specens.drafters.trained.distilled import Distilled
from specens.drafters.trained.networks import Context, Places
from specens.drafters.trained.non_autoregressive import KIND, NonAutoregressive
from specens.drafters.trained.weights import Trained, model_fingerprint
from specens.errors import UserError
from specens.models.load import ModelSpec
from specens.models.tiny import byte_tokenizer, random_model
from specens.records.reader import load
from specens.run import run
from specens.train.__main__ import train
from specens.train.corpus import Corpus
from specens.train.distill import Distill, DistillLearner
from specens.train.loss import Loss, Teacher
from specens.train.non_autoregressive import Guess, MultiTokenLearner, begin_from_target, gain
from specens.train.packing import PackedRows, before_answers, kept_ids, pack, split
from specens.train.pipeline import All
from specens.train.shards import Shard, TextShards
from specens.train.trainer import RowTrainer, Schedule, last_checkpoint, training_arguments

SHORT = Schedule(num_steps=6, rows_per_step=2, warmup_steps=2, evaluate_every=3, save_every=2)


def target_of(family: str = "llama", **config: Any) -> Target:
    return Target(random_model(family, **{"seed": 3, **config}), byte_tokenizer())


def corpus_of(target: Target, folder: Path, **changed: Any) -> TextShards:
    sizes: dict[str, Any] = {"num_tokens": 900, "shard_texts": 8}
    sizes |= {"max_user_tokens": 10, "max_answer_tokens": 30}
    return Corpus(str(folder), **{**sizes, **changed}).run(target)


def rows_of(texts: TextShards, row_tokens: int, layers: Sequence[int]) -> PackedRows:
    return PackedRows(list(texts.shards()), row_tokens, layers)


@pytest.fixture(scope="module")
def target():
    return target_of()


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    return corpus_of(target, tmp_path_factory.mktemp("texts") / "corpus")


def distill(texts: TextShards, folder, **changed: Any) -> Distill:
    given = {"layers": [0], "num_output_ids": 200, "row_tokens": 128, "schedule": SHORT, **changed}
    return Distill(str(texts.folder), str(folder), **given)


def guess(texts: TextShards, folder, **changed: Any) -> Guess:
    sizes = {"num_output_ids": 200, "row_tokens": 128, "anchors_per_row": 32, "schedule": SHORT}
    given = {"architecture": "block", **sizes, **changed}
    return Guess(str(texts.folder), str(folder), **given)


def curves_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]


def curve(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in curves_of(folder) if name in entry]


# The whole way


STAGES = {
    "corpus": "num_tokens=900 shard_texts=8 max_user_tokens=10 max_answer_tokens=30",
    "training": "num_output_ids=200 row_tokens=128 schedule.num_steps=4 schedule.rows_per_step=2 "
    "schedule.evaluate_every=2 schedule.save_every=2",
}


def sizes_of(kind: str, where: str = "stage") -> list[str]:
    return [f"{where}.{option}" for option in STAGES[kind].split()]


def test_every_stage_in_turn_makes_drafters_that_change_no_output(tmp_path, monkeypatch):
    """The commands of the README, in this process."""
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    base = ["model@target=tiny", "folder=made"]
    train(compose(["stage=corpus", *base, *sizes_of("corpus")], "train"))
    train(compose(["stage=distilled", *base, *sizes_of("training")], "train"))
    for architecture in ("heads", "block"):
        stage = ["stage=non_autoregressive", f"stage.architecture={architecture}"]
        train(compose([*stage, *base, *sizes_of("training")], "train"))
    files = {"distilled": "distilled", "heads": f"{KIND}-heads", "block": f"{KIND}-block"}
    for name in files.values():
        assert Path("made", f"{name}.safetensors").stat().st_size > 10_000
        card = Path("made", f"{name}.md").read_text()
        assert "4 steps of 2 rows of 128 tokens" in card and "| loss |" in card
        assert "Parameters" in card and "python -m specens.train" in card
    kinds = {"distilled": "distilled", "heads": KIND, "block": KIND}
    members = [f"+drafter@drafter.members.{name}={kind}" for name, kind in kinds.items()]
    members += ["~drafter@drafter.members.quantized"]
    for name in files:
        model = ".model" if name == "distilled" else ""
        path = f"made/{files[name]}.safetensors"
        members.append(f"drafter.members.{name}{model}.weights={path}")
    common = ["model@target=tiny", "drafter=untrained", "budget=fixed", "tracker=none"]
    common += ["prompts.limit=2", "sampling.max_new_tokens=12"]
    for i, overrides in enumerate([[], ["sampling.temperature=1", "layout=rows"]]):
        summary = run(compose([*common, *members, *overrides]), tmp_path / f"run{i}")
        assert (summary["num_identical"], summary["num_failed"]) == (2, 0)
        rates = {name: row["no_draft_rate"] for name, row in summary["drafters"].items()}
        assert {name for name, rate in rates.items() if rate < 0.5} >= set(files)
        drafts = load(tmp_path / f"run{i}").drafts
        assert drafts[drafts["drafter"] == "distilled"]["num_matched"].sum() > 0


@pytest.mark.slow
def test_stage_all_is_one_command_and_does_nothing_twice(tmp_path):
    sizes = sizes_of("corpus", "stage.stages.corpus")
    for name in ("distilled", "non_autoregressive"):
        sizes += sizes_of("training", f"stage.stages.{name}")
    command = [sys.executable, "-m", "specens.train", "stage=all", "model@target=tiny"]
    command += [f"folder={tmp_path}/made", *sizes]
    environment = {**os.environ, "SPECENS_CACHE": str(tmp_path / "cache")}
    run_it = partial(subprocess.run, capture_output=True, text=True, env=environment)
    first = run_it(command)
    assert first.returncode == 0, first.stderr
    assert [line for line in first.stdout.splitlines() if line.startswith("stage ")] == [
        *("stage corpus", "stage datastore", "stage distilled", "stage non_autoregressive")
    ]
    second = run_it(command)
    assert second.returncode == 0 and "shard" not in second.stdout
    wrong = run_it([*command, "stage.stages.distilled.layers=[9]"])
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert "stage.stages.distilled: stage.layers=[9]" in wrong.stderr
    assert "stage corpus" not in wrong.stdout, "refused before the corpus takes its time"


def test_all_runs_its_stages_in_their_order(capsys):
    class Stage:
        def __init__(self, name):
            self.name = name

        def run(self, target):
            print(self.name, target)

    All({"b": Stage("one"), "a": Stage("two")}).run("target")  # pyright: ignore
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["stage b", "one target", "stage a", "two target"]


GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen2": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, **GEMMA},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_get_drafters_too(family, tmp_path):
    other = target_of(family, **FAMILIES[family])
    texts = corpus_of(other, tmp_path / "corpus", num_tokens=500)
    once = replace(SHORT, num_steps=2)
    path = distill(texts, tmp_path, schedule=once, layers=[0, 1]).run(other)
    assert Distilled(str(path)).load_for(other).model.config.model_type == family
    for architecture in ("heads", "block"):
        path = guess(texts, tmp_path, schedule=once, architecture=architecture).run(other)
        NonAutoregressive(str(path)).bind(other)


def test_a_target_without_positions_is_refused_for_distilling_by_name(tmp_path):
    other = target_of("bloom", n_head=4, n_layer=2)
    texts = corpus_of(other, tmp_path / "corpus", num_tokens=500)
    with pytest.raises(UserError, match="position_ids"):
        distill(texts, tmp_path).run(other)


# What is learned from


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_packing_keeps_every_text_once_and_overfills_no_row(lengths, row_tokens):
    rows = pack(np.array(lengths, dtype=np.int32), row_tokens)
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    filled = [sum(min(lengths[text], row_tokens) for text in row) for row in rows]
    assert all(0 < size <= row_tokens for size in filled)
    assert sum(size <= row_tokens / 2 for size in filled) <= 1, "two half-empty rows would be one"


def shard_of(tmp_path: Path, token_ids: list[int], **arrays: Any) -> Shard:
    one = {"length": [len(token_ids)], "prompt_length": [1], "is_greedy": [True], **arrays}
    own = [np.array(values) for values in one.values()]
    return Shard(tmp_path / "00000.safetensors", np.array(token_ids), *own)


class FakeShards:
    def __init__(self, *shards):
        self._shards = shards

    def shards(self):
        return iter(self._shards)


def test_the_kept_ids_are_the_most_frequent_ties_go_to_the_lower_id(tmp_path):
    texts: Any = FakeShards(shard_of(tmp_path, [7, 7, 7, 3, 3, 9]), shard_of(tmp_path, [9, 9, 5]))
    for num_ids, expected, coverage in (
        (1, [7], 3 / 9),
        (2, [7, 9], 6 / 9),
        (3, [3, 7, 9], 8 / 9),
        (4, [3, 5, 7, 9], 1),
        (6, [0, 1, 3, 5, 7, 9], 1),
        (12, list(range(12)), 1),
        (99, list(range(12)), 1),
    ):
        kept, covered = kept_ids(texts, num_ids, 12)
        assert kept.tolist() == expected and covered == pytest.approx(coverage)
    kept, covered = kept_ids(texts, 2, 12, always=[11])
    assert kept.tolist() == [7, 11] and covered == pytest.approx(3 / 9)


def hidden_states(shard: Shard, layers: Sequence[int]) -> torch.Tensor:
    tensors = load_file(shard.hidden_path)
    return torch.stack([tensors[f"layer.{layer}"] for layer in layers], dim=1)


def test_a_row_lines_up_with_its_shard(texts):
    rows = rows_of(texts, 100, [1, 2])
    shards = list(texts.shards())
    seen = []
    for number in range(len(rows)):
        (shard, packed), row = rows._rows[number], rows[number]
        at = 0
        for text in packed:
            begin, length = int(shard.begins[text]), int(shard.length[text])
            here, there = slice(at, at + length), slice(begin, begin + length)
            assert row["token_ids"][here].tolist() == shard.token_ids[there].tolist()
            assert row["positions"][here].tolist() == list(range(length))
            assert set(row["begins"][here].tolist()) == {at}
            assert set(row["ends"][here].tolist()) == {at + length}
            prompt = int(shard.prompt_length[text])
            assert row["is_answer"][here].tolist() == [False] * prompt + [True] * (length - prompt)
            features = row["features"][here]
            assert torch.equal(features, hidden_states(shard, [1, 2])[there])
            expected = [i + 1 < length and i + 1 >= prompt for i in range(length)]
            assert before_answers(row)[here].tolist() == expected
            seen.append((shard.path, text))
            at += length
        padding = slice(at, 100)
        assert not row["is_answer"][padding].any() and not row["features"][padding].any()
        assert row["begins"][padding].tolist() == list(range(at, 100))
        assert (row["ends"][padding] - row["begins"][padding] == 1).all()
        assert not before_answers(row)[padding].any()
    everything = [(shard.path, text) for shard in shards for text in range(len(shard.length))]
    assert sorted(seen) == everything
    assert rows.num_tokens() == texts.num_tokens()


def test_a_text_longer_than_a_row_is_cut(texts):
    rows = rows_of(texts, 30, [2])
    for row in (rows[i] for i in range(len(rows))):
        assert len(row["token_ids"]) == len(row["features"]) == 30
    cut = rows[0]
    assert cut["ends"][0] == 30 and cut["positions"].tolist() == list(range(30))
    assert before_answers(cut)[-1] == False  # noqa: E712  (what would follow was cut off)


def test_the_last_shards_only_measure_and_something_must_be_left_to_learn_from(texts, tmp_path):
    rows, held_out = split(texts, 128, [2], 1)
    shards = list(texts.shards())
    assert rows.num_tokens() == sum(len(shard.token_ids) for shard in shards[:-1])
    assert held_out.num_tokens() == len(shards[-1].token_ids)
    count = len(shards)
    with pytest.raises(UserError, match=rf"{count} shards, and stage\.num_held_out={count}"):
        split(texts, 128, [2], len(shards))
    with pytest.raises(UserError, match="layer 0 were not kept"):
        split(texts, 128, [0, 2], 1)
    folder = tmp_path / "corpus"
    shutil.copytree(texts.folder, folder)
    hidden, name = folder / "00001.hidden.safetensors", r"00001\.hidden\.safetensors"
    whole = hidden.read_bytes()
    hidden.unlink()
    with pytest.raises(UserError, match=f"{name}: they are missing; delete them"):
        split(TextShards.open(folder), 128, [2], 1)
    hidden.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{name}: .*run stage=corpus again"):
        split(TextShards.open(folder), 128, [2], 1)
    hidden.write_bytes((folder / "00000.hidden.safetensors").read_bytes())
    with pytest.raises(UserError, match=f"{name}: they belong to other texts"):
        split(TextShards.open(folder), 128, [2], 1)


def test_rows_too_short_for_any_answer_are_refused(texts):
    with pytest.raises(UserError, match=r"stage\.row_tokens=2: no row reaches as far as an answer"):
        split(texts, 2, [2], 1)


def test_another_targets_corpus_is_refused(texts, tmp_path):
    for stage in (distill(texts, tmp_path), guess(texts, tmp_path)):
        with pytest.raises(UserError, match="written by another target"):
            stage.run(target_of(seed=4))
    with pytest.raises(UserError, match=r"no readable corpus\.json.*stage=corpus"):
        Distill(str(tmp_path / "nowhere"), str(tmp_path)).run(target_of())


# The losses


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("kl", "rejection"), [(1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
def test_the_loss_is_the_divergence_and_the_chance_of_rejection(kl, rejection):
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(5, 9)) * 3, rng.normal(size=(5, 9)) * 3
    q, p = softmax(ours), softmax(theirs)
    expected = kl * (p * np.log(p / q)).sum(-1) + rejection * np.maximum(p - q, 0).sum(-1)
    loss = Loss(kl, rejection)
    found = loss(torch.tensor(ours), torch.tensor(theirs))
    assert np.allclose(found.numpy(), expected, atol=1e-5) and found.shape == (5,)
    assert loss(torch.tensor(ours), torch.tensor(ours)).abs().max() < 1e-6


def test_an_id_that_the_target_rules_out_gives_no_nan():
    ours = torch.zeros(1, 3, requires_grad=True)
    loss = Loss()(ours, torch.tensor([[0.0, 200.0, -200.0]])).sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(ours.grad).all()


ALL_IDS = torch.arange(259)


def distill_learner(target: Target, layers: list[int], kept=ALL_IDS) -> DistillLearner:
    return DistillLearner(Teacher(target, kept), layers, Loss())


def test_a_distilled_model_of_all_the_targets_layers_matches_it_everywhere(target, texts):
    """Texts that share a row, positions, features and the target's logits: all of it must line up
    for this.
    """
    learner = distill_learner(target, [0, 1]).eval()
    sums: dict[str, float] = {}
    rows = rows_of(texts, 128, [2])
    with torch.no_grad():
        for row in (rows[i] for i in range(len(rows))):
            for name, value in learner.measure([row]).items():
                sums[name] = sums.get(name, 0.0) + value
    shards = texts.shards()
    num_answer_tokens = sum(int((s.length - s.prompt_length).sum()) for s in shards)
    assert sums["count"] == num_answer_tokens
    # Hidden states are kept in bfloat16, which moves a near tie.
    assert sums["match"] / sums["count"] > 0.995
    assert sums["acceptance"] / sums["count"] > 0.99 and sums["loss"] / sums["count"] < 0.02


def test_a_small_model_is_trained_with_the_librarys_attention(texts):
    """Whatever the target attends with: weights do not depend on how specens loads it."""
    target = target_of()
    use_grouped_attention(target.model)
    assert attention_name(target.model) == GROUPED
    learner = distill_learner(target, [0])
    assert attention_name(learner.small) == "sdpa" and attention_name(target.model) == GROUPED


def test_trained_further_it_still_matches(target, texts, tmp_path):
    gently = replace(SHORT, learning_rate=1e-6)
    stage = distill(texts, tmp_path, layers=[0, 1], num_output_ids=259, schedule=gently)
    stage.run(target)
    evaluations = curve(tmp_path / "checkpoints", "eval_match")
    assert len(evaluations) == 2 and min(evaluations) > 0.995


def multi_token_learner(
    target: Target, architecture: str, anchors_per_row: int = 1000
) -> tuple[MultiTokenLearner, Trained]:
    weights = guesser_weights(target.model, architecture, kept=range(259))
    teacher, network = Teacher(target, ALL_IDS), bound(weights, target).network
    return MultiTokenLearner(teacher, network, Loss(), anchors_per_row, 0.8).eval(), weights


def bound(weights: Trained | str, target: Target) -> NonAutoregressive:
    drafter = NonAutoregressive(weights, 4, 16)
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("architecture", ["heads", "block"])
def test_predictions_are_compared_with_the_targets_at_that_depth(target, texts, architecture):
    """And they are those that the drafter makes when it decodes: the same logits, from hidden
    states of a live forward.
    """
    learner, weights = multi_token_learner(target, architecture)
    row = rows_of(texts, 128, [1, 2])[0]
    anchors = learner.anchors(row)
    answers = before_answers(row)
    assert anchors.tolist() == [i for i in range(128) if answers[i] and i > row["begins"][i]]
    with torch.no_grad():
        ours, theirs, depths = learner._logits(row, anchors)
    places = [(int(a), d) for a in anchors for d in range(4) if a + d + 1 < row["ends"][a]]
    assert [d for _, d in places] == depths.tolist()
    drafter = bound(weights, target)
    for number in range(0, len(places), 5):
        anchor, depth = places[number]
        begin = int(row["begins"][anchor])
        ids = row["token_ids"][begin : int(row["ends"][anchor])]
        with torch.no_grad():
            logits = target.model(ids[None]).logits[0]
        expected = logits[anchor + depth - begin]
        assert torch.allclose(theirs[number], expected, atol=0.15 * float(expected.std()))
        prompt = ids[: anchor + 1 - begin].tolist()
        proposer = drafter.begin(prompt)
        with target.prefill(prompt, drafter.hidden_layers) as cache, torch.no_grad():
            proposer.condition(cache.hidden)
            last = target.model.get_input_embeddings().weight[prompt[-1]]  # pyright: ignore
            assert proposer._context is not None
            guesses = drafter.network.propose(proposer._context, last)
            live = drafter.head.logits(guesses)[depth]
        assert torch.allclose(ours[number], live, atol=0.15 * float(live.std()))


@pytest.mark.parametrize("architecture", ["heads", "block"])
def test_the_guessing_loss_weighs_depths_and_counts_every_guess_once(target, texts, architecture):
    learner, _ = multi_token_learner(target, architecture)
    rows = [rows_of(texts, 128, [1, 2])[i] for i in range(2)]
    total = count = 0.0
    with torch.no_grad():
        for row in rows:
            ours, theirs, depths = learner._logits(row, learner.anchors(row))
            for loss, depth in zip(Loss()(ours, theirs), depths, strict=True):
                total += 0.8 ** int(depth) * float(loss)
                count += 0.8 ** int(depth)
        assert float(learner(rows)["loss"]) == pytest.approx(total / count, rel=1e-4)


def test_anchors_are_random_in_training_and_evenly_spread_in_measuring(target, texts):
    learner, _ = multi_token_learner(target, "heads", anchors_per_row=10)
    row = rows_of(texts, 128, [1, 2])[0]
    everything = multi_token_learner(target, "heads")[0].anchors(row).tolist()
    spread = learner.anchors(row).tolist()
    assert len(spread) == 10 and spread == learner.anchors(row).tolist()
    assert set(spread) <= set(everything)
    steps = np.diff([everything.index(anchor) for anchor in spread])
    assert max(steps) <= len(everything) // 10 + 1
    learner.train()
    sampled = [tuple(learner.anchors(row).tolist()) for _ in range(5)]
    assert len(set(sampled)) > 1
    assert all(len(set(anchors)) == 10 and set(anchors) <= set(everything) for anchors in sampled)


@pytest.mark.parametrize("architecture", ["heads", "block"])
def test_rows_without_an_answer_give_no_nan(target, texts, architecture):
    """A row shorter than every prompt."""
    row = rows_of(texts, 12, [1, 2])[0]
    assert not before_answers(row).any()
    learner, _ = multi_token_learner(target, architecture)
    small = distill_learner(target, [0])
    for each in (learner, small):
        loss = each([row])["loss"]
        loss.backward()
        assert float(loss.detach()) == 0
        assert all(p.grad is None or not p.grad.any() for p in each.parameters())
        with torch.no_grad():
            sums = each.measure([row])
        assert all(value == 0 for value in sums.values())


def test_the_measure_of_guesses_is_a_rate_at_each_depth(target, texts):
    """An all-knowing network is always right, also where texts end and deep predictions are few."""

    class Knowing(MultiTokenLearner):
        def _logits(self, row, anchors):
            _, theirs, depths = super()._logits(row, anchors)
            return theirs.clone(), theirs, depths

    learner, _ = multi_token_learner(target, "heads")
    learner.__class__ = Knowing
    sums = learner.measure([rows_of(texts, 128, [1, 2])[i] for i in range(2)])
    count = sums.pop("count")
    assert count > 20 and sums.pop("loss") == pytest.approx(0, abs=1e-3)
    assert sorted(sums) == [f"top{k}_at_{d}" for k in (1, 3) for d in range(1, 5)]
    assert all(value / count == pytest.approx(1) for value in sums.values())


# Learning


def test_distilling_lowers_the_loss_clearly(target, texts, tmp_path):
    schedule = replace(SHORT, num_steps=40, learning_rate=3e-3, evaluate_every=5, save_every=100)
    distill(texts, tmp_path, layers=[0], schedule=schedule).run(target)
    losses, held_out = (curve(tmp_path / "checkpoints", name) for name in ("loss", "eval_loss"))
    assert losses[-1] < 0.8 * losses[0] and held_out[-1] < held_out[0]


@pytest.mark.parametrize("architecture", ["heads", "block"])
def test_guessing_lowers_the_loss_clearly(target, texts, tmp_path, architecture):
    schedule = replace(SHORT, num_steps=40, learning_rate=3e-3, evaluate_every=5, save_every=100)
    guess(texts, tmp_path, architecture=architecture, schedule=schedule).run(target)
    losses = curve(tmp_path / f"checkpoints-{architecture}", "loss")
    assert losses[-1] < 0.8 * losses[0]


def test_training_touches_nothing_of_the_target(texts, tmp_path):
    target = target_of()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    distill(texts, tmp_path).run(target)
    guess(texts, tmp_path).run(target)
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert not target.model.training and all(p.grad is None for p in target.model.parameters())


def test_in_mixed_precision_and_with_a_process_that_reads_ahead_it_learns_too(
    target, texts, tmp_path
):
    schedule = replace(SHORT, bfloat16=True, num_loaders=1, num_steps=4)
    for stage, folder in (
        (distill(texts, tmp_path, schedule=schedule), "checkpoints"),
        (guess(texts, tmp_path, schedule=schedule), "checkpoints-block"),
    ):
        stage.run(target)
        assert curves_of(tmp_path / folder)[-1]["step"] == 4
        assert np.isfinite(curve(tmp_path / folder, "eval_loss")).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_stored_in_the_dtype_that_was_asked_for(target, texts, tmp_path, dtype):
    path = distill(texts, tmp_path, dtype=dtype, schedule=replace(SHORT, num_steps=1)).run(target)
    loaded = Distilled(str(path)).load_for(target)
    assert loaded.model.dtype == torch.float32, "the target's own"
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        dtypes = {str(file.get_tensor(name).dtype) for name in names - {"kept_ids"}}
        assert dtypes == {f"torch.{dtype}"} and len(file.get_tensor("kept_ids")) == 200
        described = json.loads(file.metadata()["training"])
    assert described["options"]["schedule"]["num_steps"] == 1
    assert described["corpus_tokens"] > 500 and described["held_out"]["eval_loss"] > 0


def test_a_block_begins_with_the_targets_own_keys_and_values(target):
    weights = guesser_weights(target.model, num_layers=1)
    network: Any = bound(weights, target).network
    torch.manual_seed(0)
    begin_from_target(network, target, [1])
    layer = target.model.model.layers[1]
    assert torch.equal(network.layers[0].self_attn["q_proj"].weight, layer.self_attn.q_proj.weight)
    assert torch.allclose(network.norm.weight, target.model.model.norm.weight, atol=1e-5)
    features = torch.randn(6, 2, 32)
    with torch.no_grad():
        joined = network.join_norm(network.join(features.flatten(1)))
        ours = network.layers[0].self_attn["v_proj"](joined)
        # hidden_states[1] is what layer 1 reads
        theirs = layer.self_attn.v_proj(layer.input_layernorm(features[:, 0]))
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_norms_gain_is_what_it_multiplies_with(family):
    """Gemma stores its gain less one."""
    target = target_of(family, **FAMILIES.get(family, {}))
    norm: Any = target.model.base_model.ln_f if family == "gpt2" else target.model.base_model.norm
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(3, 32)
        x = (x - x.mean(-1, keepdim=True)) if family == "gpt2" else x
        expected = x / x.pow(2).mean(-1, keepdim=True).sqrt() * gain(norm)
        assert torch.allclose(norm(x), expected, atol=1e-2)


# Kills


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import test_training as t
from pathlib import Path
from specens.train.shards import TextShards
from specens.train.trainer import RowTrainer
step, done = RowTrainer.training_step, []
def step_then_die(self, *args, **kwargs):
    done.append(1)
    if len(done) > 5:  # in step 6: checkpoint 4 is the last
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)
RowTrainer.training_step = step_then_die
t.guess(TextShards.open({corpus!r}), {folder!r}, schedule=t.BROKEN).run(t.target_of())
"""

BROKEN = replace(SHORT, num_steps=7, save_every=2, evaluate_every=3)


def test_a_killed_training_goes_on_from_its_last_checkpoint_and_ends_with_the_same_weights(
    target, texts, tmp_path, monkeypatch
):
    paths = [str(folder) for folder in Path(__file__).parents[:2]]
    script = KILLED.format(paths=paths, corpus=str(texts.folder), folder=str(tmp_path / "broken"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    checkpoints = tmp_path / "broken" / "checkpoints-block"
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-4"
    assert not list((tmp_path / "broken").glob("*.safetensors"))
    # A later one that was not written to its end is no checkpoint.
    shutil.copytree(checkpoints / "checkpoint-4", checkpoints / "checkpoint-6")
    (checkpoints / "checkpoint-6" / "optimizer.pt").write_bytes(b"cut")
    (checkpoints / "checkpoint-6" / "trainer_state.json").unlink()

    steps = []
    step = RowTrainer.training_step
    counting = lambda self, *a, **k: steps.append(1) or step(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(RowTrainer, "training_step", counting)
    path = guess(texts, tmp_path / "broken", schedule=BROKEN).run(target)
    assert len(steps) == 3, "steps 5 to 7"
    entries = curves_of(checkpoints)
    assert [e["step"] for e in entries if "eval_loss" in e] == [3, 6, 7]
    assert entries[-1]["step"] == 7
    steps.clear()
    unbroken = guess(texts, tmp_path / "unbroken", schedule=BROKEN).run(target)
    assert len(steps) == 7
    ours, theirs = (bound(str(p), target).network.parameters() for p in (path, unbroken))
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, its, atol=1e-6)
    # The same command once more has nothing left to learn.
    steps.clear()
    before = load_file(path)
    guess(texts, tmp_path / "broken", schedule=BROKEN).run(target)
    after = load_file(path)
    assert not steps and all(torch.equal(after[name], before[name]) for name in before)


def test_checkpoints_of_other_options_are_not_gone_on_from(target, texts, tmp_path):
    once = replace(SHORT, num_steps=2)
    distill(texts, tmp_path, schedule=once).run(target)
    for changed, name in (
        ({"layers": [1]}, "layers"),
        ({"loss": Loss(kl=2.0)}, r"loss\.kl"),
        ({"schedule": replace(once, num_steps=4)}, r"schedule\.num_steps"),
        ({"schedule": replace(once, learning_rate=0.5)}, r"schedule\.learning_rate"),
    ):
        with pytest.raises(UserError, match=rf"made with stage\.{name}=.*another folder") as error:
            distill(texts, tmp_path, **{"schedule": once, **changed}).run(target)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    rhythm = replace(once, save_every=9, evaluate_every=1)
    distill(texts, tmp_path, schedule=rhythm, dtype="float32").run(target)


def test_checkpoints_of_a_corpus_that_has_grown_are_not_gone_on_from(target, texts, tmp_path):
    """The weights would be described as made from text that they never saw."""
    folder, once = tmp_path / "corpus", replace(SHORT, num_steps=2)
    shutil.copytree(texts.folder, folder)
    distill(TextShards.open(folder), tmp_path, schedule=once).run(target)
    for kind in ("", ".hidden"):
        shutil.copy(folder / f"00000{kind}.safetensors", folder / f"00099{kind}.safetensors")
    line = r"made with corpus_tokens=\d+, not \d+; give another folder"
    with pytest.raises(UserError, match=line):
        distill(TextShards.open(folder), tmp_path, schedule=once).run(target)


def test_a_training_that_diverged_replaces_nothing(target, texts, tmp_path):
    distill(texts, tmp_path, schedule=replace(SHORT, num_steps=1)).run(target)
    path = tmp_path / "distilled.safetensors"
    before = path.read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    diverging = replace(SHORT, num_steps=4, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"not written, the training diverged"):
        distill(texts, tmp_path, schedule=diverging).run(target)
    assert path.read_bytes() == before


def test_what_the_trimmed_vocabulary_leaves_out_counts_as_missed(target, texts):
    rows, _ = split(texts, 128, [2], 1)
    measured = {}
    for num_ids in (1, target.vocab_size):
        kept, coverage = kept_ids(texts, num_ids, target.vocab_size)
        learner = distill_learner(target, [0, 1], kept).eval()
        with torch.no_grad():
            sums = learner.measure([rows[0]])
        measured[num_ids] = sums["match"] / sums["count"], coverage
    assert measured[target.vocab_size][0] > 0.97, "all of the target's layers"
    assert measured[1][0] < 0.5 and measured[1][1] < 0.5


def test_last_checkpoint_counts_by_number_not_by_name(tmp_path):
    assert last_checkpoint(tmp_path / "nowhere") is None
    for step in (8, 10, 9, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"x": torch.zeros(9)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    cut = tmp_path / "checkpoint-12" / "model.safetensors"  # as a full disk leaves it
    cut.write_bytes(cut.read_bytes()[:-8])
    for step in (8, 10, 9, 12):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


# Where it runs


def test_training_stays_on_the_targets_device_and_on_one(tmp_path):
    arguments = training_arguments(tmp_path, SHORT, "none", torch.device("cpu"))
    assert arguments.device.type == "cpu" and arguments.n_gpu <= 1
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        training_arguments(tmp_path, SHORT, "none", torch.device("cuda:1"))


def elsewhere(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


@pytest.mark.parametrize("architecture", ["heads", "block"])
def test_networks_make_their_tensors_where_their_inputs_are(target, texts, architecture):
    """On the device without memory: an operation that meets a tensor of the CPU there fails as it
    would on a GPU.
    """
    learner, _ = multi_token_learner(target, architecture)
    network = learner.network.to("meta")
    row = elsewhere(rows_of(texts, 64, [1, 2])[0])
    anchors = torch.arange(3, 9, device="meta")
    last, features = torch.zeros(6, 32, device="meta"), row["features"].float()
    places = Places(features, last, anchors, row["positions"], row["begins"])
    assert network(places).device.type == "meta"
    context = network.extend(Context(), torch.zeros(5, 2, 32, device="meta"))
    context = network.extend(context, last[:, None].repeat(1, 2, 1))
    hidden = network.propose(context, last[0])
    head = learner.teacher.head.to("meta")
    assert head(hidden).device.type == "meta"
    with pytest.raises(RuntimeError):
        network.propose(context, torch.zeros(32))  # what this test relies on


def test_a_learners_masks_and_losses_are_where_its_rows_are(texts):
    mixed = target_of("gemma2", **FAMILIES["gemma2"])
    learner = distill_learner(mixed, [0, 1])
    row = elsewhere(rows_of(texts, 64, [2])[0])
    masks = learner._masks(row)
    assert {mask.device.type for mask in masks.values()} == {"meta"} and len(masks) == 2
    assert before_answers(row).device.type == "meta"
    hidden = learner.small.to("meta")(
        inputs_embeds=torch.zeros(1, 64, 32, device="meta"),
        position_ids=row["positions"][None],
        attention_mask=masks,
    ).last_hidden_state[0]
    logits = learner.teacher.head.to("meta").logits(hidden)
    assert Loss()(logits, logits).device.type == "meta"


# Options


def config_of(stage: str, *overrides: str):
    return compose([f"stage={stage}", "model@target=tiny", "folder=made", *overrides], "train")


CLASSES = {"corpus": Corpus, "distilled": Distill, "non_autoregressive": Guess}


@pytest.mark.parametrize("stage", CLASSES)
def test_a_stages_file_lists_exactly_the_options_of_its_class_with_their_defaults(stage):
    listed = resolved(config_of(stage))["stage"]
    built = build(config_of(stage).stage)
    assert isinstance(built, CLASSES[stage])
    assert set(listed) - {"_target_"} == set(CLASSES[stage].__dataclass_fields__)
    given = [name for name in ("corpus", "folder") if hasattr(built, name)]
    bare = CLASSES[stage](**{name: getattr(built, name) for name in given})
    for name in CLASSES[stage].__dataclass_fields__:
        if name != "openers":  # the class has none
            assert getattr(bare, name) == getattr(built, name), name
    for part, kind in (("schedule", Schedule), ("loss", Loss)):
        if part in listed:
            assert set(listed[part]) - {"_target_"} == set(kind.__dataclass_fields__)


def test_every_stage_has_a_file_and_they_compose():
    names = group_names("stage")
    assert names == ["all", "corpus", "datastore", "distilled", "non_autoregressive"]
    for name in names:
        assert build(config_of(name).stage) is not None
    assert list(resolved(compose([], "train"))["stage"]["stages"]) == [
        *("corpus", "datastore", "distilled", "non_autoregressive")
    ]


def test_the_options_that_two_stages_share_are_overridden_by_their_own_names():
    alone = build(config_of("distilled", "stage.schedule.num_steps=7", "stage.loss.kl=2").stage)
    assert (alone.schedule.num_steps, alone.loss.kl) == (7, 2)
    one = "stage.stages.distilled.schedule.num_steps=7"
    stages = build(config_of("all", one, "stage.stages.non_autoregressive.loss.kl=2").stage).stages
    both = stages["distilled"], stages["non_autoregressive"]
    assert [stage.schedule.num_steps for stage in both] == [7, 1000]
    assert [stage.loss.kl for stage in both] == [1, 2]


TRAINING = """
corpus=null folder=null num_output_ids=0 num_output_ids=1.5 row_tokens=0 row_tokens=long
num_held_out=0 dtype=float8 dtype=null report_to=paper loss=null schedule=null schedule=fast
loss.kl=-1 loss.kl=much loss.rejection=nan layers=2 layers=[a] layers=null layers=[1.5]
schedule.num_steps=0 schedule.rows_per_step=0 schedule.evaluate_every=0 schedule.save_every=0
schedule.warmup_steps=-1 schedule.weight_decay=-1 schedule.num_loaders=-1 schedule.seed=-1
schedule.learning_rate=0 schedule.learning_rate=fast schedule.max_gradient=0
schedule.bfloat16=maybe schedule.num_steps=1e3 schedule.seed=x
"""
GUESS = """
architecture=tower architecture=null hidden_layers=3 hidden_layers=[x] num_positions=0
anchors_per_row=0 decay=0 decay=1.5 decay=slow
"""
CORPUS = """
folder=null num_tokens=0 num_tokens=many shard_texts=0 max_user_tokens=0 max_answer_tokens=0
greedy_share=2 greedy_share=-0.1 greedy_share=half temperature=0 temperature=hot temperature=nan
user_temperature=-1 openers=Why openers=[1] prompts=none.jsonl prompts=3 exclude=[none.jsonl]
exclude=none.jsonl exclude=[2] hidden_layers=2 hidden_layers=[-1] hidden_layers=[x] part=2 part=2/2
part=a/b part=-1/2 part=null seed=-1 seed=x
"""
WRONG = [
    *(("distilled", text) for text in [*TRAINING.split(), "layers=[]", "layers=[0,1,2,3,4]"]),
    *(("non_autoregressive", text) for text in [*TRAINING.split(), *GUESS.split()]),
    *(("corpus", text) for text in CORPUS.split()),
]


@pytest.fixture(scope="module")
def configs():
    return {stage: config_of(stage) for stage in CLASSES}


@pytest.mark.parametrize(("stage", "override"), WRONG)
def test_a_wrong_value_is_refused_before_the_model_loads(configs, stage, override, monkeypatch):
    def too_late(self):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(ModelSpec, "load", too_late)
    config = configs[stage].copy()
    name, _, value = override.partition("=")
    parsed = OverridesParser.create().parse_override(override).value()
    OmegaConf.update(config, f"stage.{name}", parsed, force_add=False)
    with pytest.raises(UserError) as error:
        train(config)
    line = str(error.value)
    assert "\n" not in line and f"stage.{name}" in line, line
    assert value in ("null", "1e3", "nan") or value.strip("[]").replace(",", ", ") in line, line


def test_unknown_options_are_refused_by_name():
    with pytest.raises(UserError, match="unknown option extra"):
        train(compose(["stage=corpus", "model@target=tiny", "+extra=1"], "train"))
    with pytest.raises(UserError, match=r"'epochs'"):
        train(config_of("distilled", "+stage.schedule.epochs=3"))
    with pytest.raises(UserError, match="nothing to learn"):
        train(config_of("distilled", "stage.loss.kl=0", "stage.loss.rejection=0"))


def test_layers_that_the_target_lacks_are_refused_in_a_line(target, texts, tmp_path):
    for stage, line in (
        (distill(texts, tmp_path, layers=[2]), r"layers=\[2\]"),
        (guess(texts, tmp_path, layers=[2]), r"layers=\[2\]"),
        (guess(texts, tmp_path, hidden_layers=[1]), r"hidden_layers=\[1\]: end with 2"),
        (guess(texts, tmp_path, hidden_layers=[0, 2]), "layer 0 were not kept"),
    ):
        with pytest.raises(UserError, match=line) as error:
            stage.run(target)
        assert "\n" not in str(error.value)


def test_the_fingerprint_travels_with_the_weights(target, texts, tmp_path):
    path = distill(texts, tmp_path, schedule=replace(SHORT, num_steps=1)).run(target)
    assert model_fingerprint(target.model) in (tmp_path / "distilled.md").read_text()
    with pytest.raises(UserError, match="trained for another target"):
        Distilled(str(path)).load_for(target_of(seed=4))
