"""The bench: all systems are timed alike, in turns, on the same prompts; no output passes
unchecked; nothing measured is lost.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_command
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from specens.bench import flashspec
from specens.bench.__main__ import main
from specens.bench.bench import Bench, bench, bench_job
from specens.bench.clock import Clock, Spent, Timed, peak_memory
from specens.bench.figure import draw
from specens.bench.flashspec import FlashSpec
from specens.bench.options import BenchOptions, described
from specens.bench.page import page_of
from specens.bench.rows import COLUMNS, Row, csv_of
from specens.bench.summary import accounting, speedup, summarise, system_summary, versus
from specens.bench.systems import BenchSetup, Parts, shuffled
from specens.bench.transformers_generate import TransformersGenerate
from specens.compat import attention_name
from specens.config.compose import CONF_DIR, VERSION_BASE, compose
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.decoding.target.attention import GROUPED
from specens.decoding.verify import Coupled
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.none import NoDrafter
from specens.errors import UserError
from specens.models.cpu_linear import packing, unpack
from specens.models.load import ModelSpec
from specens.models.tiny import TinyModel
from specens.prompts.chat import Prompt
from specens.prompts.sources import Jsonl
from specens.run.job import Job
from specens.run.session import load_session
from specens.run.terminal import Terminal
from specens.run.tracker import NoTracker

TEXTS = ["one two one two one", "aaaa", "The cat sat on the mat. The cat sat"]
OURS = "_target_: specens.bench.systems.SpecensSystem"
OLD = "_target_: specens.benchmark.systems.Ours"
SOURCE = "{_target_: specens.models.tiny.TinyModel, seed: 1}"
TINY = f"{{_target_: specens.models.load.ModelSpec, device: cpu, source: {SOURCE}}}"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(autouse=True)
def _cache(home, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(home / "cache"))


def questions(home: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    path = home / ("prompts.jsonl" if rows is None else "others.jsonl")
    rows = rows or [
        {"id": f"p{i}", "text": text, "category": f"c{i % 2}"} for i, text in enumerate(TEXTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def given(home: Path, *more: str) -> list[str]:
    """Overrides of a small bench."""
    own = ["model@target=tiny", "drafter=untrained", "prompts=jsonl", "bench.warm_up_tokens=2"]
    return [*own, f"prompts.path={questions(home)}", "sampling.max_new_tokens=12", *more]


def benched(home: Path, folder: Path, *more: str) -> dict[str, Any]:
    overrides = given(home, *more)
    return bench(compose(overrides, "bench"), folder, overrides)


def composed(home: Path, names: list[str] | None, *more: str) -> dict[str, Any]:
    """The systems of a small bench, built."""
    config = compose(given(home, *more), "bench")
    return described(config, bench_job(config), names)


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


def parts(*drafters: Any, adversarial: bool = False) -> Parts:
    named = {drafter.members[0].name: drafter for drafter in drafters}
    return Parts(named, FixedBudget(), Coupled(), "tree", adversarial)


@dataclass
class Other:
    """A system that is not ours: it outputs `output(prompt, AR decoding's ids)`."""

    output: Callable[[Prompt, list[int]], Sequence[int]]
    cuda_only: bool = False

    def check(self) -> str | None:
        return None

    def load(self, setup: Any) -> Other:
        self.greedy = TransformersGenerate().load(setup)
        return self

    def decode(self, prompt: Prompt, max_new_tokens: int | None = None) -> Timed:
        ids = list(self.greedy.decode(prompt, max_new_tokens).output_ids)
        output = ids if max_new_tokens is not None else self.output(prompt, ids)
        return Timed(tuple(output), tuple((1, 0.5 + index) for index in range(len(output))))

    def facts(self) -> dict[str, Any]:
        return {}


def measured(path: Path, folder: Path, systems: dict[str, Any], **sampling: Any) -> Bench:
    folder.mkdir(exist_ok=True)
    options = BenchOptions(repeats=2, warm_up_tokens=2)
    session = load_session(job(path, **sampling), Terminal())
    return Bench(session, {"AR": parts(), **systems}, options, folder, {}, Terminal())


# The command

SYSTEMS = ["AR", "transformers", "prompt_lookup", "helped"]
SYSTEMS += ["ngram", "quantized", "fixed", "priority", "bad"]


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """One bench of everything that needs no training and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(home / "cache"))
        folder = tmp_path_factory.mktemp("whole")
        generate = "_target_: specens.bench.transformers_generate.TransformersGenerate"
        done = benched(
            home,
            folder,
            f"bench.systems=[{','.join(SYSTEMS)}]",
            "+budget@systems.bad.budget=fixed",
            "+drafter@systems.bad.drafter=ngram",
            f"+systems.bad={{{OURS}, adversarial: true}}",
            f"+systems.helped={{{generate}, assistant: {TINY}}}",
            "bench.repeats=2",
        )
    return done, folder


def test_every_system_has_a_complete_row_for_every_prompt_and_repeat(whole):
    done, folder = whole
    rows = read(folder)
    assert tuple(rows[0]) == COLUMNS
    assert {(row["prompt_id"], row["repeat"], row["system"]) for row in rows} == {
        (f"p{i}", str(n), name) for i in range(3) for n in range(2) for name in SYSTEMS
    }
    assert len(rows) == 3 * 2 * len(SYSTEMS) and list(done["systems"]) == SYSTEMS
    for row in rows:
        assert (row["error"], row["num_tokens"]) == ("", "12")
        assert float(row["prefill_s"]) > 0 < float(row["decode_s"])
        spent = [row[f"{part}_s"] for part in ("draft", "verify", "host")]
        if row["system"] in ("transformers", "prompt_lookup", "helped"):
            assert spent == ["", "", ""]
        else:
            assert sum(map(float, spent)) == pytest.approx(float(row["decode_s"]))
        assert row["peak_memory_bytes"] == "" or int(row["peak_memory_bytes"]) > 2**20
    names = {path.name for path in folder.iterdir()}
    assert names >= {"bench.csv", "bench.json", "bench.md"}


def test_all_outputs_are_ar_decodings_transformers_too(whole):
    done, folder = whole
    assert {row["is_identical"] for row in read(folder)} == {"true"}
    systems = done["systems"]
    for numbers in systems.values():
        assert (numbers["num_identical"], numbers["num_compared"]) == (6, 6)
        assert numbers["first_divergence"] is None
    assert all(systems[n]["acceptance_length"] == 1 for n in ("AR", "transformers", "bad"))
    assert systems["helped"]["acceptance_length"] >= 1 < systems["fixed"]["acceptance_length"]


def test_the_systems_take_turns_in_another_order_each_time(whole):
    _, folder = whole
    orders: dict[tuple[str, str], list[str]] = {}
    for row in read(folder):
        orders.setdefault((row["prompt_id"], row["repeat"]), []).append(row["system"])
        assert row["order"] == str(len(orders[row["prompt_id"], row["repeat"]]) - 1)
    assert all(sorted(order) == sorted(SYSTEMS) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders) == 6
    turns = [shuffled(SYSTEMS, 0, f"p{i}", repeat) for i in range(3) for repeat in range(2)]
    assert list(orders.values()) == turns
    assert shuffled(SYSTEMS, 1, "p0", 0) != shuffled(SYSTEMS, 0, "p0", 0)


def test_the_result_says_what_was_measured_and_the_page_has_every_system(whole):
    done, folder = whole
    assert done == json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert (done["schema_version"], done["status"]) == (2, "finished")
    assert (done["repeats"], done["num_prompts_done"]) == (2, 3)
    environment, systems = done["environment"], done["systems"]
    assert environment["target"]["dtype"] == "float32" and environment["num_threads"] >= 1
    assert systems["fixed"]["drafters"] == ["ngram", "quantized"]
    assert systems["ngram"]["drafters"] == systems["bad"]["drafters"] == ["ngram"]
    budget = systems["priority"]["budget"]
    assert "FixedBudget" in budget and "first_only=True" in budget
    assert done["versus"]["fixed"]["AR"] == systems["fixed"]["speedup"]["median"]
    page = (folder / "bench.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} " in page for name in SYSTEMS)
    assert "INCOMPLETE" not in page and " c1 |" in page


def test_the_accounts_add_up(whole):
    done, _ = whole
    for name in ("ngram", "quantized", "fixed", "bad"):
        numbers = done["systems"][name]
        account = numbers["accounting"]
        shares = [account[f"{part}_percent"] for part in ("needed", "width", "draft", "host")]
        assert sum(shares) == pytest.approx(100)
        reached = account["limit"] * (shares[0] + shares[1]) / 100
        assert account["speedup"] == pytest.approx(reached)
        fractions = [numbers[f"{part}_fraction"] for part in ("draft", "verify", "host")]
        assert sum(fractions) == pytest.approx(1)
    assert done["systems"]["transformers"]["accounting"] is None


def test_a_folder_belongs_to_one_bench(home, whole):
    with pytest.raises(UserError, match="already holds a bench"):
        benched(home, whole[1], "bench.systems=[AR]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bench.systems=[AR,nobody]"], "no system is called nobody; there are .*AR, transformers"),
        (
            ["bench.systems=[ngram,retrieval]"],
            "systems.retrieval: the drafter has no member retrieval; it has ngram, quantized",
        ),
        (
            ["bench.systems=[transformers]", "sampling.temperature=1"],
            "transformers samples with noise of its own",
        ),
        (["bench.systems=AR"], "bench.systems='AR': give a list"),
        (["bench.repeats=0"], "bench.repeats=0: give a whole number"),
        (["tracker=wandb"], "tracker=wandb: the bench always measures AR decoding and writes to"),
        (["baseline=true"], "baseline=true: the bench always"),
        (["+unknown=1"], "unknown option unknown"),
        (
            ["bench.systems=[x]", f"+systems.x={{{OURS}, budget: {{max_nodes: -1}}}}"],
            "systems.x: budget.max_nodes=-1",
        ),
        (
            ["bench.systems=[x]", f"+systems.x={{{OURS}, budget: {{nodes: 1}}}}"],
            "systems.x: .* has no option 'nodes'",
        ),
        (["bench.systems=[x]", f"+systems.x={{{OURS}, layout: lines}}"], "systems.x: layout=lines"),
        (["bench.systems=[x]", f"+systems.x={{{OURS}, sampling: 1}}"], "systems.x: .* no option"),
        (["drafter=retrieval", "drafter.grow=true", "bench.systems=[fixed]"], "grow=true would"),
        (
            ["bench.systems=[bandit]", "budget=cost_aware", "budget.reset=run"],
            "budget.reset=run would",
        ),
        (
            ["bench.systems=[x]", f"+systems.x={{{OLD}, words: ['sampling.seed=3']}}"],
            "systems.x: its words change sampling",
        ),
        (
            ["bench.systems=[x]", f"+systems.x={{{OLD}, words: ['budget=none']}}"],
            "systems.x: budget 'none'",
        ),
        (["bench.systems=[ngram]", "systems.AR.ar=false"], "systems.AR: has to be AR decoding"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_overrides_are_refused_in_one_line_before_a_model_loads(
    home, tmp_path, monkeypatch, overrides, message
):
    def load(self):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ModelSpec, "load", load)
    with pytest.raises(UserError, match=message) as refusal:
        benched(home, tmp_path / "bench", *overrides)
    assert "\n" not in str(refusal.value)


def test_as_a_command_with_one_repeat_and_two_systems(home, tmp_path, monkeypatch, capsys):
    own = ["prompts.limit=1", "bench.repeats=1", "bench.systems=[priority]"]
    overrides = given(home, *own, f"hydra.run.dir={tmp_path}/out")
    assert run_command(main, monkeypatch, tmp_path, *overrides) == 0
    shown, rows = capsys.readouterr().out, read(tmp_path / "out")
    assert sorted(row["system"] for row in rows) == ["AR", "priority"]  # AR is always measured
    assert "[1/1] p0  AR" in shown and "| priority |" in shown and "identical 2/2" in shown
    content = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    span = content["systems"]["priority"]["speedup"]
    assert span["median"] == span["min"] == span["max"] > 0


def test_the_command_exits_with_1_for_failed_decodings_and_unknown_systems(
    home, tmp_path, monkeypatch, capsys
):
    overrides = given(home, "bench.systems=[nobody]", f"hydra.run.dir={tmp_path}/a")
    assert run_command(main, monkeypatch, tmp_path, *overrides) == 1
    assert "no system is called nobody" in capsys.readouterr().err
    path = questions(home, [{"id": "good", "text": "abab"}, {"id": "long", "text": "x" * 600}])
    own = [f"prompts.path={path}", "bench.systems=[plain,ngram]", f"hydra.run.dir={tmp_path}/b"]
    assert run_command(main, monkeypatch, tmp_path, *given(home, *own)) == 1
    assert "2 of 8 decodings failed, the others are in" in capsys.readouterr().err
    errors = {(row["prompt_id"], row["system"]) for row in read(tmp_path / "b") if row["error"]}
    assert errors == {("long", "AR"), ("long", "ngram")}


def test_growth_studies_are_a_script_now(home, tmp_path, monkeypatch, capsys):
    assert run_command(main, monkeypatch, tmp_path, "bench.growth=width") == 1
    error = capsys.readouterr().err
    assert "experiments/06-growth/growth.py" in error and error.count("\n") == 1
    assert (REPOSITORY / "experiments" / "06-growth" / "growth.py").is_file()


def test_without_names_all_that_fit_are_measured(home):
    assert list(composed(home, None)) == [
        *("AR", "transformers", "prompt_lookup", "assisted", "flashspec", "flashspec_composite"),
        *("ngram", "quantized", "fixed", "priority", "bandit", "cost_aware", "adversarial"),
    ]  # no CUDA device, and no retrieval in drafter=untrained
    assert "transformers" not in composed(home, None, "sampling.temperature=1")
    assert "transformers_compiled" in composed(home, ["transformers_compiled"])


# Systems are nodes


def test_systems_share_the_runs_drafters_and_its_rules(home):
    systems = composed(home, ["fixed", "ngram", "cost_aware", "wrong"], "verifier=per_row")
    assert list(systems) == ["AR", "ngram", "fixed", "cost_aware", "adversarial"]
    for name in ("ngram", "cost_aware", "adversarial"):
        for member, drafter in systems[name].drafters.items():
            assert drafter is systems["fixed"].drafters[member]
        assert systems[name].verifier is systems["AR"].verifier and systems[name].layout == "tree"
    assert systems["adversarial"].adversarial and not systems["fixed"].adversarial
    assert (dict(systems["AR"].drafters), list(systems["ngram"].drafters)) == ({}, ["ngram"])


def test_a_part_of_its_own_is_a_node_or_options_of_the_runs_part(home):
    systems = composed(
        home,
        ["short", "rows", "deep", "fixed"],
        "budget=priority",
        "budget.max_nodes=16",
        f"+systems.short={{{OURS}, budget: {{max_nodes: 8}}}}",
        f"+systems.rows={{{OURS}, layout: rows, members: [quantized]}}",
        f"+systems.deep={{{OURS}, drafter: {{members: {{ngram: {{num_draft_tokens: 3}}}}}}}}",
        "+verifier@systems.rows.verifier=per_row",
    )
    assert systems["short"].budget == FixedBudget(8, first_only=True)
    assert systems["rows"].layout == "rows" and systems["rows"].verifier.name == "per_row"
    assert list(systems["rows"].drafters) == ["quantized"]
    depths = [systems[n].drafters["ngram"].members[0].num_draft_tokens for n in ("deep", "fixed")]
    assert depths == [3, 10]
    # An option of the run's budget holds for the systems of conf/bench.yaml too.
    assert systems["fixed"].budget == FixedBudget(16)


def test_a_drafter_that_is_no_ensemble_is_named_by_itself(home):
    systems = composed(home, ["ngram", "fixed"], "drafter=ngram")
    assert list(systems["ngram"].drafters) == list(systems["fixed"].drafters) == ["ngram"]
    assert dict(composed(home, ["fixed"], "drafter=none")["fixed"].drafters) == {}


def test_the_old_form_with_words_becomes_nodes(home, caplog):
    with caplog.at_level(logging.WARNING, "specens"):
        systems = composed(
            home,
            ["old", "deep", "alone"],
            f"+systems.old={{{OLD}, words: ['budget=fixed', 'budget.max_nodes=8', 'layout=rows']}}",
            f"+systems.deep={{{OLD}, words: ['drafter.members.ngram.num_draft_tokens=3']}}",
            f"+systems.alone={{{OLD}, words: ['drafter=[ngram]'], member: ngram, wrong: true}}",
        )
    assert systems["old"].budget == FixedBudget(8) and systems["old"].layout == "rows"
    deep = systems["deep"].drafters
    assert list(deep) == ["ngram", "quantized"] and deep["ngram"].members[0].num_draft_tokens == 3
    assert list(systems["alone"].drafters) == ["ngram"] and systems["alone"].adversarial
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all("budget: {max_nodes: 8}" in line for line in lines)


def test_a_system_may_be_a_class_of_a_plugin(home, tmp_path, monkeypatch):
    lines = ["class Mine:", " cuda_only = False", " def check(self): return 'not today'"]
    (tmp_path / "bench_plugin.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = "+systems.mine={_target_: bench_plugin.Mine}"
    assert composed(home, ["mine"], own, "plugins=[bench_plugin]")["mine"] == "not today"
    with pytest.raises(
        UserError, match=r"systems.mine: .* list its package: plugins=\[bench_plugin"
    ):
        composed(home, ["mine"], own)


def test_every_system_of_the_configuration_can_be_built(home):
    config = compose(given(home, "drafter=ensemble"), "bench")
    names = [str(name) for name in config.systems]
    assert set(described(config, bench_job(config), names)) == set(names)


@pytest.mark.parametrize("name", ["bench_cpu", "bench_gpu"])
def test_the_experiments_change_the_bench(name):
    config = compose([f"experiment={name}", "prompts.path=x"], "bench")
    assert config.prompts._target_ == "specens.prompts.sources.SpecBench"
    assert config.sampling.max_new_tokens == 128
    assert config.bench.repeats == {"bench_cpu": 3, "bench_gpu": 2}[name]
    assert set(config.bench.systems or ()) <= set(config.systems)


def test_commands_of_the_documents_compose():
    commands = []
    for path in [REPOSITORY / "README.md", *REPOSITORY.glob("experiments/*/README.md")]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        commands += re.findall(r"^python -m specens\.bench(.*)$", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert "systems" in compose(shlex.split(command, comments=True), "bench")


def test_composing_works_inside_another_hydra_application_and_leaves_it_as_it_was():
    with initialize_config_dir(CONF_DIR, version_base=VERSION_BASE):
        assert compose(["budget=priority"]).budget._target_.endswith("FixedBudget")
        assert hydra_compose("config").budget._target_.endswith("CostAwareBudget")
    assert compose([]).budget._target_.endswith("CostAwareBudget")


# What is checked, and what is kept


def test_a_system_whose_output_is_not_the_targets_is_caught(home, tmp_path):
    def lie(prompt: Prompt, ids: list[int]) -> list[int]:
        wrong = [*ids[:3], ids[3] ^ 1, *ids[4:]]
        return {"p0": ids, "p1": wrong, "p2": ids[:-2]}[prompt.id]

    done = measured(questions(home), tmp_path / "b", {"liar": Other(lie)}).run()
    found = {
        row["prompt_id"]: (row["is_identical"], row["divergence"])
        for row in read(tmp_path / "b")
        if row["system"] == "liar"
    }
    assert found == {"p0": ("true", ""), "p1": ("false", "3"), "p2": ("false", "10")}
    numbers = done["systems"]["liar"]
    assert (numbers["num_identical"], numbers["num_compared"]) == (2, 6)
    assert numbers["first_divergence"] == 3
    assert " 2/6 |" in (tmp_path / "b" / "bench.md").read_text(encoding="utf-8")


def test_a_system_that_fails_gets_error_rows_and_the_others_go_on(home, tmp_path):
    def fail(prompt: Prompt, ids: list[int]) -> list[int]:
        if prompt.id == "p1":
            raise RuntimeError("it broke\nin two lines")
        return ids

    class Missing(Other):
        def load(self, setup: Any) -> Other:
            raise ImportError("no such library")

    systems = {"frail": Other(fail), "gone": Missing(fail)}
    systems |= {"absent": "not installed", "ngram": parts(NGram())}
    done = measured(questions(home), tmp_path / "b", systems).run()["systems"]
    rows = [row for row in read(tmp_path / "b") if row["error"]]
    found = [(row["prompt_id"], row["repeat"], row["system"]) for row in rows]
    assert found == [("p1", "0", "frail"), ("p1", "1", "frail")]
    assert rows[0]["error"] == "RuntimeError: it broke in two lines" and rows[0]["decode_s"] == ""
    assert "it broke" in (tmp_path / "b" / "errors.log").read_text(encoding="utf-8")
    frail, gone = done["frail"], done["gone"]
    assert (frail["num_failed"], frail["num_decodings"], frail["num_compared"]) == (2, 6, 4)
    assert frail["by_category"]["c1"] is None and frail["speedup"]["median"] > 0
    assert done["ngram"]["num_identical"] == 6
    assert (gone["error"], gone["speedup"]) == ("ImportError: no such library", None)
    page = (tmp_path / "b" / "bench.md").read_text(encoding="utf-8")
    assert "frail: 2 of 6 decodings failed: RuntimeError" in page
    assert "\nabsent: not installed\n" in page


def test_what_was_measured_is_on_disk_when_a_bench_is_ended(home, tmp_path):
    folder, seen = tmp_path / "b", {}

    def stop(prompt: Prompt, ids: list[int]) -> list[int]:
        if prompt.id == "p2":
            seen.update(json.loads((folder / "bench.json").read_text(encoding="utf-8")))
            seen.update(rows=len(read(folder)), page=(folder / "bench.md").read_text("utf-8"))
            raise KeyboardInterrupt
        return ids

    with pytest.raises(KeyboardInterrupt):
        measured(questions(home), folder, {"stopper": Other(stop)}).run()
    # What a kill would have left:
    assert (seen["status"], seen["num_prompts_done"], seen["num_prompts"]) == ("running", 2, 3)
    assert seen["rows"] == 8 and "INCOMPLETE (running): 2 of 3 prompts" in seen["page"]
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert (content["status"], content["num_prompts_done"]) == ("interrupted", 2)
    assert content["systems"]["stopper"]["speedup"]
    assert "INCOMPLETE (interrupted)" in (folder / "bench.md").read_text(encoding="utf-8")
    assert {row["prompt_id"] for row in read(folder)} >= {"p0", "p1"}


def test_every_turn_is_the_same_prompt_for_all_with_ar_decodings_answers(home, tmp_path):
    seen: dict[str, set[tuple[int, ...]]] = {}

    def see(prompt: Prompt, ids: list[int]) -> list[int]:
        seen.setdefault(prompt.id, set()).add(prompt.token_ids)
        return [3] * len(ids)  # a liar's answers are not the history

    path = questions(home, [{"id": "q", "turns": ["one two one", "and then?"]}])
    run = measured(path, tmp_path / "b", {"liar": Other(see)})
    run.run()
    ((first,), (second,)) = seen["q/0"], seen["q/1"]
    tokenizer = run.setup.target.tokenizer
    answer = tokenizer.decode(list(run.setup.outputs[first]), skip_special_tokens=True)
    turns = [("user", "one two one"), ("assistant", answer), ("user", "and then?")]
    chat = [{"role": role, "content": text} for role, text in turns]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert second == tuple(ids)


def test_a_sampled_bench_compares_ours_and_leaves_the_others_out(home, tmp_path):
    own = ["bench.systems=[ngram]", "sampling.temperature=1", "sampling.seed=4", "bench.repeats=1"]
    done = benched(home, tmp_path / "b", *own)
    assert done["sampled"] is True and done["systems"]["ngram"]["num_identical"] == 3


def test_adversarial_drafters_draft_as_ever_and_are_never_right(home, tmp_path):
    # the target's own weights: always right, if they are not replaced
    source = ModelSpec(TinyModel(), dtype="float32", device="cpu")
    wrong = parts(LanguageModel(source), adversarial=True)
    systems = {"right": parts(LanguageModel(source)), "adversarial": wrong}
    done = measured(questions(home), tmp_path / "b", systems).run()["systems"]
    right, wrong = done["right"], done["adversarial"]
    assert right["acceptance_length"] > 3 and wrong["acceptance_length"] == 1
    assert wrong["num_identical"] == 6 and wrong["mean_nodes"] > 3 < 3 + wrong["draft_ms_per_step"]


def test_drafters_are_bound_once_unless_that_fails():
    class Counting(NGram):
        count = 0

        def bind(self, target: Any) -> None:
            self.count += 1
            if self.count == 1:
                raise UserError("not yet")

    nothing: Any = None
    setup, drafter = BenchSetup(nothing, nothing, 0, 0), Counting()
    with pytest.raises(UserError):
        setup.bind(drafter)
    for _ in range(3):
        setup.bind(drafter)
    assert drafter.count == 2


# Systems that are not ours


def test_flashspec_is_left_out_in_one_line_when_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(flashspec.importlib.util, "find_spec", lambda name: None)
    assert FlashSpec().check() == "not installed: pip install 'specens[bench]'"


def test_a_system_that_changes_the_shared_target_is_refused(home, tmp_path):
    class Meddler(Other):
        def load(self, setup: Any) -> Other:
            unpack(setup.target.model)
            return super().load(setup)

    with pytest.raises(UserError, match=r"systems.meddler: loading it has changed the target's"):
        measured(questions(home), tmp_path / "b", {"meddler": Meddler(lambda prompt, ids: ids)})


@pytest.mark.skipif(importlib.util.find_spec("flashspec") is None, reason="no flashspec here")
def test_flashspecs_outputs_are_ar_decodings(home, tmp_path):
    small = ModelSpec(TinyModel(seed=1), dtype="float32", device="cpu")
    systems = {"lookup": FlashSpec(gamma=4), "composite": FlashSpec(assistant=small)}
    run = measured(questions(home), tmp_path / "b", systems)
    models = [run.setup.target.model, run.runners["composite"].assistant]
    assert [packing(model) for model in models] == ["float32"] * 2  # it has moved both
    done = run.run()["systems"]
    for name in systems:
        assert (done[name]["error"], done[name]["num_identical"]) == (None, 6)
        assert done[name]["acceptance_length"] >= 1
    assert "composite" in done["composite"]["strategy"]


def test_others_stop_where_the_targets_context_ends_and_at_stop_strings(home, tmp_path):
    path = questions(home, [{"id": "long", "text": "x" * 470}])
    systems = {"transformers": TransformersGenerate()}
    done = measured(path, tmp_path / "b", systems, max_new_tokens=64).run()
    assert done["systems"]["transformers"]["num_identical"] == 2
    rows = read(tmp_path / "b")
    assert len({row["num_tokens"] for row in rows}) == 1 and int(rows[0]["num_tokens"]) < 64
    path = questions(home, [{"id": "stop", "text": TEXTS[0]}])
    first = measured(path, tmp_path / "c", systems)
    first.run()
    (ids,) = first.setup.outputs.values()
    stop = [first.setup.target.tokenizer.decode(ids)[3:5]]
    done = measured(path, tmp_path / "d", systems, stop=stop).run()
    assert done["systems"]["transformers"]["num_identical"] == 2
    assert int(read(tmp_path / "d")[0]["num_tokens"]) < 12


def test_others_attend_as_transformers_does_and_ours_as_loaded(home, tmp_path):
    run = measured(questions(home), tmp_path / "b", {"transformers": TransformersGenerate()})
    model, seen = run.setup.target.model, []
    model.register_forward_pre_hook(lambda *_: seen.append(attention_name(model)))
    prompt = Prompt("p", "", "", (5, 6, 7))
    for name, attention in (("transformers", "sdpa"), ("AR", GROUPED)):
        seen.clear()
        run.runners[name].decode(prompt, 4)
        assert set(seen) == {attention} and attention_name(model) == GROUPED


# The clock


def test_the_clock_starts_with_the_first_emission_and_counts_what_comes_after():
    spent = (Spent(9, 9, 9), Spent(0.5, 1.0, 4), Spent(0.25, 1.0, 2))
    timed = Timed((1, 2, 3, 4, 5, 6), ((3, 10.0), (2, 12.0), (1, 14.0)), spent)
    assert timed.columns() == {
        "num_tokens": 6,
        "num_steps": 3,
        "num_timed_tokens": 3,
        "num_timed_steps": 2,
        "num_nodes": 6,
        "prefill_s": 10.0,
        "decode_s": 4.0,
        "draft_s": 0.75,
        "verify_s": 2.0,
        "host_s": 1.25,
    }
    with pytest.raises(ValueError, match="6 tokens came back, 4 were seen"):
        Timed((1, 2, 3, 4, 5, 6), ((3, 1.0), (1, 2.0)))


def test_a_streamer_is_given_the_prompt_first_and_that_is_no_emission():
    clock = Clock(torch.device("cpu"))
    for tokens in ([7, 7, 7], [1], [2, 3]):
        clock.put(torch.tensor(tokens))
    timed = clock.timed([1, 2, 3])
    assert [count for count, _ in timed.emissions] == [1, 2]
    columns = timed.columns()
    assert columns["num_timed_tokens"] == 2 and columns["decode_s"] >= 0
    assert "draft_s" not in columns


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
    system: str, prompt: str, repeat: int, tokens: int, seconds: float, steps: int = 0, **more: Any
) -> Row:
    """As many steps as tokens unless told otherwise."""
    steps = steps or tokens
    counts = {"num_tokens": tokens + 1, "num_steps": steps + 1}
    timed = {"num_timed_tokens": tokens, "num_timed_steps": steps, "decode_s": seconds}
    return Row(prompt, more.pop("category", "a"), repeat, 0, system, **counts, **timed, **more)


def table() -> list[Row]:
    rows = []
    seconds = (((10.0, 2.0), (4.0, 4.0)), ((12.0, 2.4), (5.0, 4.0)), ((10.0, 2.0), (3.0, 1.0)))
    for repeat, (base, fast) in enumerate(seconds):
        rows.append(row("AR", "p", repeat, 100, base[0]))
        rows.append(row("AR", "q", repeat, 20, base[1], category="b"))
        rows.append(row("fast", "p", repeat, 100, fast[0], 50))
        rows.append(row("fast", "q", repeat, 20, fast[1], 20, category="b"))
    return rows


def test_the_ratio_is_totals_over_totals_in_a_repeat_then_the_median():
    whole = {"median": 14.4 / 9, "min": 12 / 8, "max": 12 / 4}
    assert speedup(table(), "fast") == pytest.approx(whole)
    part = speedup(table(), "fast", categories=["b"])
    assert part == pytest.approx({"median": 0.6, "min": 0.5, "max": 2.0})
    assert speedup(table(), "AR") == {"median": 1, "min": 1, "max": 1}
    numbers = system_summary(table(), "fast")
    speeds = {"median": 120 / 8, "min": 120 / 9, "max": 120 / 4}
    assert numbers["tokens_per_s"] == pytest.approx(speeds)
    assert numbers["worst_category"] == {"category": "b", "speedup": pytest.approx(0.6)}
    assert numbers["acceptance_length"] == pytest.approx(366 / 216)
    assert versus(table(), ["AR", "fast"])["AR"]["fast"] == pytest.approx(9 / 14.4)


def test_a_prompt_that_one_of_the_two_lacks_counts_for_neither():
    rows = [
        replace(entry, error="broke") if (entry.system, entry.prompt_id) == ("fast", "q") else entry
        for entry in table()
    ]
    assert speedup(rows, "fast") == pytest.approx({"median": 2.5, "min": 2.4, "max": 10 / 3})
    numbers = summarise(rows, ["AR", "fast", "never"], {"never": "not installed"})
    fast, never = numbers["fast"], numbers["never"]
    assert (fast["num_failed"], fast["error"], fast["by_category"]["b"]) == (3, "broke", None)
    assert never["error"] == "not installed"
    assert [never[key] for key in ("speedup", "tokens_per_s", "accounting")] == [None] * 3


def test_nothing_that_was_timed_is_none_and_no_crash():
    nothing = row("fast", "p", 0, 0, 0.0, draft_s=0.0, verify_s=0.0, num_nodes=0)
    numbers = system_summary([row("AR", "p", 0, 0, 0.0), nothing], "fast")
    assert [numbers[key] for key in ("speedup", "tokens_per_s", "accounting")] == [None] * 3
    assert system_summary([], "fast")["acceptance_length"] is None


def test_the_limit_is_length_times_t1_over_tn_and_the_shares_sum_to_100():
    base = row("AR", "p", 0, 100, 10.0, draft_s=0.0, verify_s=9.0, num_nodes=0)
    fast = row("fast", "p", 0, 100, 8.0, 40, draft_s=1.0, verify_s=6.0, num_nodes=160)
    account = accounting([base, fast], "fast")
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
    assert accounting([base, replace(fast, verify_s=None)], "fast") is None


def test_a_file_of_rows_has_empty_cells_for_what_was_not_measured():
    text = csv_of([Row("p,1", "a", 0, 0, "AR", is_identical=True)])
    (found,) = csv.DictReader(text.splitlines())
    cells = [found[key] for key in ("prompt_id", "is_identical", "decode_s", "num_tokens")]
    assert cells == ["p,1", "true", "", "0"]


def test_a_page_without_any_measurement_is_still_a_page(whole):
    done, _ = whole
    nothing = summarise([], ["AR", "ngram"], {"ngram": "broken"})
    page = page_of({**done, "status": "failed", "num_prompts_done": 0, "systems": nothing})
    assert "INCOMPLETE (failed): 0 of 3" in page and "ngram: broken" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| ngram")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["-", "-"]


def test_the_figure_is_drawn_or_says_in_one_line_why_not(whole, tmp_path, monkeypatch):
    done, _ = whole
    if importlib.util.find_spec("matplotlib") is not None:
        assert draw(done, tmp_path) is None
        assert min((tmp_path / f"bench.{kind}").stat().st_size for kind in ("png", "svg")) > 1000
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = "no figure: matplotlib is not installed (pip install 'specens[bench]')"
    assert draw(done, tmp_path) == missing
    assert draw({"systems": {}}, tmp_path) == "no figure: nothing was measured"
