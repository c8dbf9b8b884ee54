"""The bench: all systems are timed alike, in turns, on the same prompts; no text passes unchecked; nothing measured is lost."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import door
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from specens.bench import bench, main
from specens.benchmark import flashspec
from specens.benchmark.figure import draw
from specens.benchmark.flashspec import FlashSpec
from specens.benchmark.measure import Clock, Spent, Timed, peak_memory
from specens.benchmark.options import Options
from specens.benchmark.page import page_of
from specens.benchmark.peers import Transformers
from specens.benchmark.rows import COLUMNS, Row, csv_of
from specens.benchmark.session import Bench
from specens.benchmark.summary import accounting, speedup, summarise, system_summary, versus
from specens.benchmark.systems import Parts, bind_once, shuffled
from specens.config import CONF_DIR, VERSION_BASE, build, compose
from specens.cpu import packing, unpack
from specens.decoding.budget import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.decoding.verify import Coupled
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.errors import UserError
from specens.experiment import Session
from specens.job import Job
from specens.models import ModelSpec
from specens.prompts import Jsonl
from specens.rendering import Prompt
from specens.screen import Screen
from specens.tiny import TinyModel
from specens.trackers import NoTracker

TEXTS = ["one two one two one", "aaaa", "The cat sat on the mat. The cat sat"]
OURS = "_target_: specens.benchmark.systems.Ours"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(autouse=True)
def _cache(home, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(home / "cache"))


def questions(home: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    path = home / ("prompts.jsonl" if rows is None else "others.jsonl")
    rows = rows or [{"id": f"p{i}", "text": text, "category": f"c{i % 2}"} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def words(home: Path, *more: str) -> list[str]:
    own = ("model@target=tiny", "drafter=untrained", "prompts=jsonl", f"prompts.path={questions(home)}")
    return [*own, "sampling.max_new_tokens=12", "bench.warm_up_tokens=2", *more]


def benched(home: Path, folder: Path, *more: str) -> dict[str, Any]:
    given = words(home, *more)
    return bench(compose(given, "bench"), folder, given)


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "bench.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def job(path: Path, **sampling: Any) -> Job:
    return Job(
        target=ModelSpec(TinyModel(), dtype="float32", device="cpu"),
        drafter=NoDrafter(),
        budget=FixedBudget(),
        verifier=Coupled(),
        layout="tree",
        sampling=SamplingOptions(**{"max_new_tokens": 12, **sampling}),
        prompts=Jsonl(path=str(path)),
        tracker=NoTracker(),
        baseline=False,
    )


def parts(*drafters: Any, wrong: bool = False) -> Parts:
    named = {drafter.members[0].name: drafter for drafter in drafters}
    return Parts(named, FixedBudget(), Coupled(), "tree", wrong)


@dataclass
class Other:
    """A peer that decodes with `say(prompt, plain ids)`."""

    say: Callable[[Prompt, list[int]], Sequence[int]]
    cuda_only: bool = False

    def check(self) -> str | None:
        return None

    def load(self, ground: Any) -> Other:
        self.plain = Transformers().load(ground)
        return self

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        ids = list(self.plain.decode(prompt, max_new_tokens).output_ids)
        said = ids if max_new_tokens is not None else self.say(prompt, ids)
        return Timed(tuple(said), tuple((1, 0.5 + index) for index in range(len(said))))

    def facts(self) -> dict[str, Any]:
        return {}


def measured(path: Path, folder: Path, systems: dict[str, Any], options: Options | None = None, **sampling: Any):
    folder.mkdir(exist_ok=True)
    options = options or Options(repeats=2, warm_up_tokens=2)
    session = Session(job(path, **sampling), Screen())
    return Bench(session, {"plain": parts(), **systems}, options, folder, {}, Screen())


# The door


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """One bench of everything that needs no training and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(home / "cache"))
        folder = tmp_path_factory.mktemp("whole")
        assistant = (
            "{_target_: specens.models.ModelSpec, device: cpu, source: {_target_: specens.tiny.TinyModel, seed: 1}}"
        )
        done = benched(
            home,
            folder,
            "bench.systems=[plain,transformers,prompt_lookup,ngram,quantized,fixed,priority,bad,helped]",
            f"+systems.bad={{{OURS}, words: ['budget=fixed', 'drafter=ngram'], wrong: true}}",
            f"+systems.helped={{_target_: specens.benchmark.peers.Transformers, assistant: {assistant}}}",
            "bench.repeats=2",
        )
    return done, folder


SYSTEMS = ["plain", "transformers", "prompt_lookup", "ngram", "quantized", "fixed", "priority", "bad", "helped"]


def test_every_system_has_a_complete_row_for_every_prompt_and_repeat(whole):
    done, folder = whole
    rows = read(folder)
    assert tuple(rows[0]) == COLUMNS
    assert {(row["prompt_id"], row["repeat"], row["system"]) for row in rows} == {
        (f"p{i}", str(repeat), name) for i in range(3) for repeat in range(2) for name in SYSTEMS
    }
    assert len(rows) == 3 * 2 * len(SYSTEMS) and list(done["systems"]) == SYSTEMS
    for row in rows:
        assert row["error"] == "" and row["num_tokens"] == "12" and float(row["prefill_s"]) > 0 < float(row["decode_s"])
        is_ours = row["system"] not in ("transformers", "prompt_lookup", "helped")
        spent = [row[f"{part}_s"] for part in ("draft", "verify", "host")]
        assert (sum(map(float, spent)) == pytest.approx(float(row["decode_s"]))) if is_ours else spent == ["", "", ""]
        assert row["peak_memory_bytes"] == "" or int(row["peak_memory_bytes"]) > 2**20
    assert {path.name for path in folder.iterdir()} >= {"bench.csv", "bench.json", "bench.md"}


def test_all_texts_are_plain_decodings_own_transformers_too(whole):
    done, folder = whole
    assert {row["is_identical"] for row in read(folder)} == {"true"}
    for numbers in done["systems"].values():
        assert (numbers["num_identical"], numbers["num_compared"], numbers["first_fork"]) == (6, 6, None)
    assert [done["systems"][name]["acceptance_length"] for name in ("plain", "transformers", "bad")] == [1, 1, 1]
    assert done["systems"]["helped"]["acceptance_length"] >= 1 < done["systems"]["fixed"]["acceptance_length"]


def test_the_systems_take_turns_in_another_order_each_time(whole):
    _, folder = whole
    orders: dict[tuple[str, str], list[str]] = {}
    for row in read(folder):
        orders.setdefault((row["prompt_id"], row["repeat"]), []).append(row["system"])
        assert row["order"] == str(len(orders[row["prompt_id"], row["repeat"]]) - 1)
    assert all(sorted(order) == sorted(SYSTEMS) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders) == 6
    assert list(orders.values()) == [shuffled(SYSTEMS, 0, f"p{i}", repeat) for i in range(3) for repeat in range(2)]
    assert shuffled(SYSTEMS, 1, "p0", 0) != shuffled(SYSTEMS, 0, "p0", 0)


def test_the_result_says_what_was_measured_and_the_page_has_every_system(whole):
    done, folder = whole
    assert done == json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert (done["schema_version"], done["status"], done["repeats"], done["num_prompts_done"]) == (1, "finished", 2, 3)
    assert done["environment"]["target"]["dtype"] == "float32" and done["environment"]["num_threads"] >= 1
    assert done["systems"]["fixed"]["drafters"] == ["ngram", "quantized"] and done["systems"]["ngram"]["drafters"] == [
        "ngram"
    ]
    assert (
        "FixedBudget" in done["systems"]["priority"]["budget"]
        and "first_only=True" in done["systems"]["priority"]["budget"]
    )
    assert done["versus"]["fixed"]["plain"] == done["systems"]["fixed"]["speedup"]["median"]
    page = (folder / "bench.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} |" in page for name in SYSTEMS) and "INCOMPLETE" not in page and "| c1 |" in page


def test_the_accounts_add_up(whole):
    done, _ = whole
    for name in ("ngram", "quantized", "fixed", "bad"):
        account, numbers = done["systems"][name]["accounting"], done["systems"][name]
        shares = [account[f"{part}_percent"] for part in ("needed", "width", "draft", "host")]
        assert sum(shares) == pytest.approx(100)
        assert account["speedup"] == pytest.approx(account["limit"] * (shares[0] + shares[1]) / 100)
        assert numbers["draft_fraction"] + numbers["verify_fraction"] + numbers["host_fraction"] == pytest.approx(1)
    assert done["systems"]["transformers"]["accounting"] is None


def test_a_folder_belongs_to_one_bench(home, whole):
    with pytest.raises(UserError, match="already holds a bench"):
        benched(home, whole[1], "bench.systems=[plain]")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bench.systems=[plain,nonsense]"], "no system is called nonsense; there are plain, transformers,"),
        (
            ["bench.systems=[ngram,retrieval]"],
            "systems.retrieval: the drafter has no member retrieval; it has ngram, quantized",
        ),
        (["bench.systems=[transformers]", "sampling.temperature=1"], "transformers draws with noise of its own"),
        (["bench.systems=plain"], "give a list of names"),
        (["bench.repeats=0"], "bench.repeats=0: give a whole number"),
        (["bench.growth=age"], "bench.growth=age: choose one of context, members, width, output"),
        (["bench.growth=width", "bench.systems=[plain]"], "give one of the two"),
        (["tracker=wandb"], "tracker=wandb: the bench always measures plain decoding and writes to its folder"),
        (["baseline=true"], "baseline=true: the bench always"),
        (
            ["bench.systems=[x]", f"+systems.x={{{OURS}, words: ['sampling.seed=3']}}"],
            "systems.x: its words change sampling",
        ),
        (["bench.systems=[x]", f"+systems.x={{{OURS}, words: ['budget=none']}}"], "systems.x: .*budget/none"),
        (["bench.systems=[x]", f"+systems.x={{{OURS}, words: ['budget.max_nodes=-1']}}"], "budget.max_nodes=-1"),
        (
            ["bench.systems=[ngram]", "drafter=retrieval", "drafter.grow=true", "bench.systems=[fixed]"],
            "grow=true would find",
        ),
        (
            ["bench.systems=[x]", f"+systems.x={{{OURS}, words: ['budget=bandit', 'budget.reset=run']}}"],
            "budget.reset=run would",
        ),
        (["bench.systems=[ngram]", "systems.plain.plain=false"], "systems.plain: has to be plain decoding"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_words_are_refused_in_one_line_before_a_model_loads(home, tmp_path, monkeypatch, given, message):
    def load(self):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ModelSpec, "load", load)
    with pytest.raises(UserError, match=message) as refusal:
        benched(home, tmp_path / "bench", *given)
    assert "\n" not in str(refusal.value)


def test_as_a_command_with_one_repeat_and_two_systems(home, tmp_path, monkeypatch, capsys):
    given = words(
        home, "prompts.limit=1", "bench.repeats=1", "bench.systems=[priority]", f"hydra.run.dir={tmp_path}/out"
    )
    assert door(main, monkeypatch, tmp_path, *given) == 0
    shown, rows = capsys.readouterr().out, read(tmp_path / "out")
    assert sorted(row["system"] for row in rows) == ["plain", "priority"]  # plain is always measured
    assert "[1/1] p0  plain" in shown and "| priority |" in shown and "identical 2/2" in shown
    content = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    span = content["systems"]["priority"]["speedup"]
    assert span["median"] == span["min"] == span["max"] > 0


def test_the_door_exits_with_1_for_failed_decodings_and_unknown_systems(home, tmp_path, monkeypatch, capsys):
    assert door(main, monkeypatch, tmp_path, *words(home, "bench.systems=[nobody]", f"hydra.run.dir={tmp_path}/a")) == 1
    assert "no system is called nobody" in capsys.readouterr().err
    path = questions(home, [{"id": "good", "text": "abab"}, {"id": "long", "text": "x" * 600}])
    given = [*words(home), f"prompts.path={path}", "bench.systems=[plain,ngram]", f"hydra.run.dir={tmp_path}/b"]
    assert door(main, monkeypatch, tmp_path, *given) == 1
    assert "2 of 8 decodings failed, the others are in" in capsys.readouterr().err
    errors = {(row["prompt_id"], row["system"]) for row in read(tmp_path / "b") if row["error"]}
    assert errors == {("long", "plain"), ("long", "ngram")}


def test_without_names_all_that_fit_are_measured(home, tmp_path):
    every = json.dumps(
        sorted(set(compose([], "bench").systems) - {"plain", "transformers_compiled", "ngram", "retrieval"})
    )
    drop = [f"~systems.{name}" for name in json.loads(every)]
    done = benched(home, tmp_path / "bench", *drop, "prompts.limit=1", "bench.repeats=1")
    assert list(done["systems"]) == ["plain", "ngram"]  # no CUDA device, and no retrieval in drafter=untrained


def test_every_system_of_the_configuration_can_be_built():
    config = compose([], "bench")
    for name, node in config.systems.items():
        system = build(node)
        for word in getattr(system, "words", ()):
            group, _, choice = word.partition("=")
            if not (Path(CONF_DIR) / group / f"{choice}.yaml").is_file():
                pytest.skip(f"{name}: no {word} yet")
            assert group in compose([word], "bench")


@pytest.mark.parametrize("name", ["bench_cpu", "bench_gpu"])
def test_the_experiments_change_the_bench(name):
    config = compose([f"experiment={name}", "prompts.path=x"], "bench")
    assert config.prompts._target_ == "specens.prompts.SpecBench" and config.sampling.max_new_tokens == 128
    assert config.bench.repeats == {"bench_cpu": 3, "bench_gpu": 2}[name]
    assert set(config.bench.systems or ()) <= set(config.systems)


def test_the_readmes_commands_compose():
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m specens\.bench(.*)$", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert "systems" in compose(shlex.split(command, comments=True), "bench")


def test_composing_works_inside_another_hydra_application_and_leaves_it_as_it_was():
    with initialize_config_dir(CONF_DIR, version_base=VERSION_BASE):
        assert compose(["budget=priority"]).budget._target_.endswith("FixedBudget")
        assert hydra_compose("config").budget._target_.endswith("CostAwareBudget")
    assert compose([]).budget._target_.endswith("CostAwareBudget")


# What is checked, and what is kept


def test_a_system_whose_text_is_not_the_targets_is_caught(home, tmp_path):
    def lie(prompt: Prompt, ids: list[int]) -> list[int]:
        return ids if prompt.id == "p0" else [*ids[:3], ids[3] ^ 1, *ids[4:]] if prompt.id == "p1" else ids[:-2]

    done = measured(questions(home), tmp_path / "b", {"liar": Other(lie)}).run()
    forks = {
        row["prompt_id"]: (row["is_identical"], row["fork_at"])
        for row in read(tmp_path / "b")
        if row["system"] == "liar"
    }
    assert forks == {"p0": ("true", ""), "p1": ("false", "3"), "p2": ("false", "10")}
    numbers = done["systems"]["liar"]
    assert (numbers["num_identical"], numbers["num_compared"], numbers["first_fork"]) == (2, 6, 3)
    assert "| 2/6 |" in (tmp_path / "b" / "bench.md").read_text(encoding="utf-8")


def test_a_system_that_fails_gets_error_rows_and_the_others_go_on(home, tmp_path):
    def fail(prompt: Prompt, ids: list[int]) -> list[int]:
        if prompt.id == "p1":
            raise RuntimeError("it broke\nin two lines")
        return ids

    class Missing(Other):
        def load(self, ground: Any) -> Other:
            raise ImportError("no such library")

    systems = {"frail": Other(fail), "gone": Missing(fail), "absent": "not installed", "ngram": parts(NGram())}
    done = measured(questions(home), tmp_path / "b", systems).run()
    rows = [row for row in read(tmp_path / "b") if row["error"]]
    assert [(row["prompt_id"], row["repeat"], row["system"]) for row in rows] == [
        ("p1", "0", "frail"),
        ("p1", "1", "frail"),
    ]
    assert rows[0]["error"] == "RuntimeError: it broke in two lines" and rows[0]["decode_s"] == ""
    assert "it broke" in (tmp_path / "b" / "errors.log").read_text(encoding="utf-8")
    frail = done["systems"]["frail"]
    assert (frail["num_failed"], frail["num_decodings"], frail["num_compared"]) == (2, 6, 4)
    assert frail["by_category"]["c1"] is None and frail["speedup"]["median"] > 0
    assert done["systems"]["ngram"]["num_identical"] == 6
    assert (
        done["systems"]["gone"]["error"] == "ImportError: no such library"
        and done["systems"]["gone"]["speedup"] is None
    )
    page = (tmp_path / "b" / "bench.md").read_text(encoding="utf-8")
    assert "frail: 2 of 6 decodings failed: RuntimeError" in page and "\nabsent: not installed\n" in page


def test_what_was_measured_is_on_disk_when_a_bench_is_ended(home, tmp_path):
    folder, seen = tmp_path / "b", {}

    def stop(prompt: Prompt, ids: list[int]) -> list[int]:
        if prompt.id == "p2":
            seen.update(json.loads((folder / "bench.json").read_text(encoding="utf-8")), rows=len(read(folder)))
            seen["page"] = (folder / "bench.md").read_text(encoding="utf-8")
            raise KeyboardInterrupt
        return ids

    with pytest.raises(KeyboardInterrupt):
        measured(questions(home), folder, {"stopper": Other(stop)}).run()
    # What a kill would have left:
    assert (seen["status"], seen["num_prompts_done"], seen["num_prompts"], seen["rows"]) == ("running", 2, 3, 8)
    assert "INCOMPLETE (running): 2 of 3 prompts" in seen["page"]
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert (content["status"], content["num_prompts_done"]) == ("interrupted", 2)
    assert "INCOMPLETE (interrupted)" in (folder / "bench.md").read_text(encoding="utf-8")
    assert {row["prompt_id"] for row in read(folder)} >= {"p0", "p1"} and content["systems"]["stopper"]["speedup"]


def test_every_turn_of_a_conversation_is_the_same_prompt_for_all_with_plain_decodings_answers(home, tmp_path):
    heard: dict[str, set[tuple[int, ...]]] = {}

    def hear(prompt: Prompt, ids: list[int]) -> list[int]:
        heard.setdefault(prompt.id, set()).add(prompt.token_ids)
        return [3] * len(ids)  # a liar's answers are not the history

    path = questions(home, [{"id": "q", "turns": ["one two one", "and then?"]}])
    run = measured(path, tmp_path / "b", {"liar": Other(hear)})
    run.run()
    ((first,), (second,)) = heard["q/0"], heard["q/1"]
    tokenizer = run.ground.target.tokenizer
    answer = tokenizer.decode(list(run.progress.texts[first]), skip_special_tokens=True)
    turns = [("user", "one two one"), ("assistant", answer), ("user", "and then?")]
    chat = [{"role": role, "content": text} for role, text in turns]
    assert second == tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def test_a_sampled_bench_compares_ours_and_leaves_the_peers_out(home, tmp_path):
    done = benched(
        home, tmp_path / "b", "bench.systems=[ngram]", "sampling.temperature=1", "sampling.seed=4", "bench.repeats=1"
    )
    assert done["sampled"] is True and done["systems"]["ngram"]["num_identical"] == 3


def test_wrong_drafters_draft_as_ever_and_are_never_right(home, tmp_path):
    source = ModelSpec(
        TinyModel(), dtype="float32", device="cpu"
    )  # the target's own weights: always right, if not spoiled
    run = measured(
        questions(home),
        tmp_path / "b",
        {"right": parts(LanguageModel(source)), "wrong": parts(LanguageModel(source), wrong=True)},
    )
    done = run.run()
    right, wrong = done["systems"]["right"], done["systems"]["wrong"]
    assert right["acceptance_length"] > 3 and wrong["acceptance_length"] == 1
    assert wrong["num_identical"] == 6 and wrong["mean_nodes"] > 3 and wrong["draft_ms_per_step"] > 0


def test_members_that_are_described_alike_are_bound_once():
    class Counting(NGram):
        count = 0

        def bind(self, target: Any) -> None:
            self.count += 1
            if self.count == 1:
                raise UserError("not yet")

    drafter = bind_once(Counting())
    with pytest.raises(UserError):
        drafter.bind(None)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        drafter.bind(None)  # pyright: ignore[reportArgumentType]
    assert drafter.count == 2  # pyright: ignore[reportAttributeAccessIssue]


# Peers


def test_flashspec_is_left_out_in_one_line_when_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(flashspec.importlib.util, "find_spec", lambda name: None)
    assert FlashSpec().check() == "not installed: pip install 'specens[bench]'"


def test_a_peer_that_changes_the_shared_target_is_refused(home, tmp_path):
    class Meddler(Other):
        def load(self, ground: Any) -> Other:
            unpack(ground.target.model)
            return super().load(ground)

    with pytest.raises(UserError, match=r"systems.meddler: loading it has changed the target's weights"):
        measured(questions(home), tmp_path / "b", {"meddler": Meddler(lambda prompt, ids: ids)})


@pytest.mark.skipif(importlib.util.find_spec("flashspec") is None, reason="flashspec is not installed")
def test_flashspecs_texts_are_plain_decodings_own(home, tmp_path):
    small = ModelSpec(TinyModel(seed=1), dtype="float32", device="cpu")
    systems = {"lookup": FlashSpec(gamma=4), "composite": FlashSpec(assistant=small)}
    run = measured(questions(home), tmp_path / "b", systems)
    assert packing(run.ground.target.model) == "float32"  # it has not moved the model
    done = run.run()
    for name in systems:
        assert (done["systems"][name]["error"], done["systems"][name]["num_identical"]) == (None, 6)
        assert done["systems"][name]["acceptance_length"] >= 1
    assert "composite" in done["systems"]["composite"]["strategy"]


def test_peers_stop_where_the_targets_context_ends_and_at_stop_strings(home, tmp_path):
    path = questions(home, [{"id": "long", "text": "x" * 470}])
    done = measured(path, tmp_path / "b", {"transformers": Transformers()}, max_new_tokens=64).run()
    assert done["systems"]["transformers"]["num_identical"] == 2
    rows = read(tmp_path / "b")
    assert len({row["num_tokens"] for row in rows}) == 1 and int(rows[0]["num_tokens"]) < 64
    path = questions(home, [{"id": "stop", "text": TEXTS[0]}])
    first = measured(path, tmp_path / "c", {"transformers": Transformers()})
    first.run()
    (text,) = [first.ground.target.tokenizer.decode(ids) for ids in first.progress.texts.values()]
    done = measured(path, tmp_path / "d", {"transformers": Transformers()}, stop=[text[3:5]]).run()
    assert done["systems"]["transformers"]["num_identical"] == 2 and int(read(tmp_path / "d")[0]["num_tokens"]) < 12


# The clock


def test_the_clock_starts_with_the_first_emission_and_counts_what_comes_after():
    spent = (Spent(9, 9, 9), Spent(0.5, 1.0, 4), Spent(0.25, 1.0, 2))
    timed = Timed((1, 2, 3, 4, 5, 6), ((3, 10.0), (2, 12.0), (1, 14.0)), spent)
    assert timed.columns() == {
        "num_tokens": 6, "num_steps": 3, "num_timed_tokens": 3, "num_timed_steps": 2, "num_nodes": 6,
        "prefill_s": 10.0, "decode_s": 4.0, "draft_s": 0.75, "verify_s": 2.0, "host_s": 1.25,
    }  # fmt: skip
    assert timed.head(4).output_ids == (1, 2, 3, 4, 5) and timed.head(3).emissions == ((3, 10.0),)
    with pytest.raises(ValueError, match="6 tokens came back, 4 were seen"):
        Timed((1, 2, 3, 4, 5, 6), ((3, 1.0), (1, 2.0)))


def test_a_streamer_is_given_the_prompt_first_and_that_is_no_emission():
    clock = Clock(torch.device("cpu"))
    for tokens in ([7, 7, 7], [1], [2, 3]):
        clock.put(torch.tensor(tokens))
    timed = clock.timed([1, 2, 3])
    assert [count for count, _ in timed.emissions] == [1, 2] and timed.columns()["num_timed_tokens"] == 2
    assert timed.columns()["decode_s"] >= 0 and "draft_s" not in timed.columns()


def test_peak_memory_sees_what_was_allocated_inside():
    device = torch.device("cpu")
    with peak_memory(device) as small:
        pass
    with peak_memory(device) as large:
        torch.ones(64 * 2**20 // 4).sum()
    if small.num_bytes is not None and large.num_bytes is not None:
        assert large.num_bytes - small.num_bytes > 32 * 2**20


# The numbers, on tables made by hand


def row(
    system: str, prompt: str, repeat: int, tokens: int, seconds: float, steps: int | None = None, **more: Any
) -> Row:
    steps = tokens if steps is None else steps
    counts = {"num_tokens": tokens + 1, "num_steps": steps + 1, "num_timed_tokens": tokens, "num_timed_steps": steps}
    return Row(prompt, more.pop("category", "a"), repeat, 0, system, **counts, decode_s=seconds, **more)


def table() -> list[Row]:
    return [
        row("plain", "p", 0, 100, 10.0), row("plain", "q", 0, 20, 2.0, category="b"),
        row("fast", "p", 0, 100, 4.0, 50), row("fast", "q", 0, 20, 4.0, 20, category="b"),
        row("plain", "p", 1, 100, 12.0), row("plain", "q", 1, 20, 2.4, category="b"),
        row("fast", "p", 1, 100, 5.0, 50), row("fast", "q", 1, 20, 4.0, 20, category="b"),
        row("plain", "p", 2, 100, 10.0), row("plain", "q", 2, 20, 2.0, category="b"),
        row("fast", "p", 2, 100, 3.0, 50), row("fast", "q", 2, 20, 1.0, 20, category="b"),
    ]  # fmt: skip


def test_the_ratio_is_totals_over_totals_in_a_repeat_then_the_median():
    assert speedup(table(), "fast") == pytest.approx({"median": 14.4 / 9, "min": 12 / 8, "max": 12 / 4})
    assert speedup(table(), "fast", categories=["b"]) == pytest.approx({"median": 0.6, "min": 0.5, "max": 2.0})
    assert speedup(table(), "plain") == {"median": 1, "min": 1, "max": 1}
    numbers = system_summary(table(), "fast")
    assert numbers["tokens_per_s"] == pytest.approx({"median": 120 / 8, "min": 120 / 9, "max": 120 / 4})
    assert numbers["worst_category"] == {"category": "b", "speedup": pytest.approx(0.6)}
    assert numbers["acceptance_length"] == pytest.approx(366 / 216)
    assert versus(table(), ["plain", "fast"])["plain"]["fast"] == pytest.approx(9 / 14.4)


def test_a_prompt_that_one_of_the_two_lacks_counts_for_neither():
    rows = [
        entry if (entry.system, entry.prompt_id) != ("fast", "q") else replace(entry, error="broke")
        for entry in table()
    ]
    assert speedup(rows, "fast") == pytest.approx({"median": 2.5, "min": 2.4, "max": 10 / 3})
    numbers = summarise(rows, ["plain", "fast", "never"], {"never": "not installed"})
    assert (numbers["fast"]["num_failed"], numbers["fast"]["error"], numbers["fast"]["by_category"]["b"]) == (
        3,
        "broke",
        None,
    )
    never = numbers["never"]
    assert (never["error"], never["speedup"], never["tokens_per_s"], never["accounting"]) == (
        "not installed",
        None,
        None,
        None,
    )


def test_nothing_that_was_timed_is_none_and_no_crash():
    rows = [row("plain", "p", 0, 0, 0.0), row("fast", "p", 0, 0, 0.0, draft_s=0.0, verify_s=0.0, num_nodes=0)]
    numbers = system_summary(rows, "fast")
    assert (numbers["speedup"], numbers["tokens_per_s"], numbers["accounting"]) == (None, None, None)
    assert system_summary([], "fast")["acceptance_length"] is None


def test_the_limit_is_length_times_t1_over_tn_and_the_shares_sum_to_100():
    plain = row("plain", "p", 0, 100, 10.0, draft_s=0.0, verify_s=9.0, num_nodes=0)
    fast = row("fast", "p", 0, 100, 8.0, 40, draft_s=1.0, verify_s=6.0, num_nodes=160)
    account = accounting([plain, fast], "fast")
    assert account == pytest.approx(
        {
            "acceptance_length": 2.5,
            "mean_nodes": 4.0,
            "t1_over_tn": 0.1 / 0.15,
            "limit": 2.5 * 0.1 / 0.15,
            "speedup": 1.25,
            "needed_percent": 100 * 40 * 0.09 / 8,
            "width_percent": 100 * (6 - 3.6) / 8,
            "draft_percent": 12.5,
            "host_percent": 12.5,
        }
    )
    assert account is not None and account["speedup"] == pytest.approx(account["limit"] * 6 / 8)
    assert accounting([plain, replace(fast, verify_s=None)], "fast") is None


def test_a_file_of_rows_has_empty_cells_for_what_was_not_measured():
    text = csv_of([Row("p,1", "a", 0, 0, "plain", is_identical=True)])
    (found,) = csv.DictReader(text.splitlines())
    assert (found["prompt_id"], found["is_identical"], found["decode_s"], found["num_tokens"]) == (
        "p,1",
        "true",
        "",
        "0",
    )


def test_a_page_without_any_measurement_is_still_a_page(whole):
    done, _ = whole
    nothing = summarise([], ["plain", "ngram"], {"ngram": "broken"})
    page = page_of({**done, "status": "failed", "num_prompts_done": 0, "systems": nothing})
    assert "INCOMPLETE (failed): 0 of 3" in page and "| ngram | - | - |" in page and "ngram: broken" in page


def test_the_figure_is_drawn_or_says_in_one_line_why_not(whole, tmp_path, monkeypatch):
    done, _ = whole
    if importlib.util.find_spec("matplotlib") is not None:
        assert draw(done, tmp_path) is None
        assert (tmp_path / "bench.png").stat().st_size > 1000 < (tmp_path / "bench.svg").stat().st_size
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert draw(done, tmp_path) == "no figure: matplotlib is not installed (pip install 'specens[bench]')"
    assert draw({"systems": {}}, tmp_path) == "no figure: nothing was measured"


# Growth


def grown(home: Path, folder: Path, growth: str, *more: str) -> dict[str, Any]:
    small = ("bench.growth_prompts=1", "bench.growth_tokens=8", "bench.repeats=1", *more)
    return benched(home, folder, f"bench.growth={growth}", *small)


def test_growth_of_context_and_of_lookups_alone(home, tmp_path):
    done = grown(home, tmp_path / "g", "context", "drafter=ngram")
    both = [(cells["context_tokens"], cells["system"], cells["identical"]) for cells in done["growth_context"]]
    assert both == [(504, "plain", "1/1"), (504, "drafted", "1/1")]  # the tiny target's context is 512
    lookups = done["growth_lookups"]
    assert [cells["context_tokens"] for cells in lookups] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert all(cells["propose_ms"] > 0 and cells["drafter"] == "ngram" for cells in lookups)
    with (tmp_path / "g" / "growth_context.csv").open(encoding="utf-8") as file:
        assert [line["system"] for line in csv.DictReader(file)] == ["plain", "drafted"]
    assert "| 32768 |" in (tmp_path / "g" / "growth_lookups.md").read_text(encoding="utf-8")


def test_growth_of_members_width_and_output(home, tmp_path):
    members = grown(home, tmp_path / "m", "members")["growth_members"]
    assert [cells["system"] for cells in members] == ["plain", "1 (+ngram)", "2 (+quantized)"]
    assert all(cells["identical"] == "1/1" for cells in members) and members[0]["speedup"] == 1
    width = grown(home, tmp_path / "w", "width")["growth_width"]
    assert [cells["num_nodes"] for cells in width] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert width[0]["x_plain"] == 1 and all(
        0 < cells["least_ms"] <= cells["verify_ms"] <= cells["most_ms"] for cells in width
    )
    output = grown(home, tmp_path / "o", "output", "drafter=ngram")["growth_output"]
    lengths = [cells["output_tokens"] for cells in output if cells["system"] == "plain"]
    assert lengths[:3] == [64, 128, 256] and 256 < lengths[3] < 512  # as far as the context goes
    assert all(cells["identical"] == "1/1" for cells in output)
