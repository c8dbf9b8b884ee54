"""The command: what a run writes, what it refuses and when, and what is left when something goes
wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import (
    TEXTS,
    Fake,
    jsonl,
    plain_greedy,
    run_command,
    run_drafter,
    summary_of,
    texts_file,
)

from specens.config.compose import compose
from specens.drafters.ensemble import Ensemble
from specens.drafters.ngram import NGram
from specens.errors import UserError
from specens.models.load import ModelSpec
from specens.models.tiny import TinyModel, byte_tokenizer
from specens.records.reader import load
from specens.records.schema import SCHEMAS
from specens.run import run
from specens.run.__main__ import main

FILES = {"drafts.parquet", "prompts.parquet", "steps.parquet", "summary.json", "report.html"}
COLUMNS = {
    "steps": "prompt_id step context_tokens num_nodes num_accepted num_emitted draft_ms verify_ms "
    "host_ms layout logit_gaps margins",
    "drafts": "prompt_id step drafter num_drafted num_verified num_matched is_win win is_sole_win "
    "token_share marginal draft_ms num_planned was_scheduled",
    "prompts": "prompt_id category prompt_ids output_ids text finish_reason num_steps decode_s "
    "prefill_s baseline_decode_s baseline_ids is_identical divergence logit_gap fork_at "
    "fork_margin error",
}
SUMMARY = (
    "schema_version acceptance_length speedup tokens_per_s baseline_tokens_per_s num_prompts "
    "num_failed num_identical no_win_rate host_fraction by_category drafters environment status"
)
DRAFTER = (
    "win_rate sole_win_rate token_share marginal acceptance_rate acceptance_by_depth "
    "solo_acceptance_length draft_ms_per_step tokens_per_draft_s no_draft_rate silent_rate"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(cache))


def smoke(folder: Path, *overrides: str) -> dict:
    return run(compose(["experiment=smoke", "drafter=ngram", "budget=fixed", *overrides]), folder)


# What a run writes


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory) -> Path:
    """One ordinary run: three drafters, four prompts."""
    home = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(cache))
        members = [
            "drafter@drafter.members.quantized=oracle",
            "+drafter@drafter.members.wrong=wrong",
        ]
        prompts = ["prompts=jsonl", f"prompts.path={texts_file(home)}", "prompts.limit=null"]
        overrides = ["experiment=smoke", "sampling.max_new_tokens=24", *members, *prompts]
        run(compose(overrides), home / "run")
    return home / "run"


def test_a_run_folder_has_all_files_columns_and_keys_and_no_leftovers(finished):
    assert {path.name for path in finished.iterdir()} == FILES
    for table, columns in COLUMNS.items():
        found = pq.ParquetFile(finished / f"{table}.parquet").schema_arrow.names
        assert set(columns.split()) <= set(found)
        assert found == SCHEMAS[table].names
    summary = summary_of(finished)
    assert set(SUMMARY.split()) <= set(summary)
    assert list(summary["drafters"]) == ["ngram", "quantized", "wrong"]
    for drafter in summary["drafters"].values():
        assert set(DRAFTER.split()) <= set(drafter)
    assert (summary["status"], summary["error"], summary["lossy"]) == ("finished", None, False)
    assert (summary["num_prompts"], summary["num_failed"], summary["num_identical"]) == (4, 0, 4)
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "ngram" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "src=" not in page


def test_a_runs_environment_names_versions_device_target_and_the_ids_that_end_a_text(finished):
    environment = summary_of(finished)["environment"]
    assert {"torch", "transformers", "specens"} <= set(environment["packages"])
    assert environment["device"] == "cpu"
    assert environment["target"]["dtype"] == "float32"
    assert environment["target"]["num_bytes"] >= 4 * environment["target"]["num_parameters"]
    assert environment["eos_token_ids"] == [1]


@pytest.mark.laws
def test_law_3_the_accounts_agree_between_all_tables_and_the_summary(finished):
    """Per prompt, per step, per drafter, per run."""
    loaded, summary = load(finished), summary_of(finished)
    prompts, steps, drafts = loaded.prompts, loaded.steps, loaded.drafts
    trimmed = 0
    for row in prompts.itertuples():
        own = steps[steps.prompt_id == row.prompt_id]
        assert row.num_steps == len(own)
        assert list(own.step) == list(range(len(own)))
        assert [token for ids in own.token_ids for token in ids] == list(row.output_ids)
        assert list(own.num_emitted) == [len(ids) for ids in own.token_ids]
        contexts = [len(row.prompt_ids) + int(n) for n in own.num_emitted.cumsum()]
        assert list(own.context_tokens) == [len(row.prompt_ids), *contexts[:-1]]
        over = int((own.num_accepted + 1 - own.num_emitted).sum())
        inner = own.iloc[:-1]
        assert set(inner.num_accepted + 1 - inner.num_emitted) <= {0}, "only the last is trimmed"
        assert len(row.output_ids) == own.num_accepted.sum() + len(own) - over
        assert re.sub(r"<(s|/s|pad)>", "", "".join(row.output_pieces)) == row.text
        assert own.finish_reason[:-1].isna().all()
        assert own.finish_reason.iloc[-1] == row.finish_reason
        total_ms = (own.draft_ms + own.verify_ms + own.host_ms).sum()
        assert row.decode_s == pytest.approx(total_ms / 1e3)
        assert list(row.baseline_ids) == list(row.output_ids)
        trimmed += over
    emitted = int(steps.num_emitted.sum())
    assert summary["num_emitted"] == emitted == sum(len(ids) for ids in prompts.output_ids)
    assert summary["num_accepted"] == steps.num_accepted.sum()
    assert summary["num_trimmed"] == trimmed
    assert summary["acceptance_length"] == pytest.approx(emitted / len(steps))
    assert summary["tokens_per_s"] == pytest.approx(emitted / prompts.decode_s.sum())
    assert len(drafts) == 3 * len(steps)
    by_step = drafts.groupby(["prompt_id", "step"])
    for key, step in steps.set_index(["prompt_id", "step"]).iterrows():
        members = by_step.get_group(key)
        assert members.win.sum() == pytest.approx(float(step.num_accepted > 0))
        assert members.token_share.sum() == pytest.approx(step.num_accepted)
        assert members.num_verified.max() <= step.num_nodes <= members.num_verified.sum()
        assert (members.num_matched <= step.num_emitted).all()
        assert (members.was_scheduled == (members.num_planned > 0)).all()
        assert (members.was_scheduled | (members.num_drafted == 0)).all()
    wins = sum(drafter["win_rate"] for drafter in summary["drafters"].values())
    assert wins + summary["no_win_rate"] == pytest.approx(1)
    assert summary["drafters"]["wrong"]["win_rate"] == 0
    assert summary["drafters"]["quantized"]["acceptance_rate"] == 1.0, "the oracle is always right"
    assert summary["speedup"] is not None


def test_the_identity_with_ar_decoding_is_also_one_with_decoding_without_any_of_this(finished):
    """The baseline runs the same loop; here is an argmax without a cache."""
    loaded = ModelSpec(TinyModel(), dtype="float32", device="cpu").load()  # pyright: ignore
    for row in load(finished).prompts.itertuples():
        ids = [int(token) for token in row.prompt_ids]
        assert [int(t) for t in row.output_ids] == plain_greedy(loaded.model, ids, 24, eos=[1])


# One prompt fails, the others go on


def test_b34_a_prompt_longer_than_the_context_is_an_error_row_and_the_next_one_runs(tmp_path):
    """Both numbers in the row; one token short of the end still runs and stops at the context."""
    ids = {n: [5 + i % 90 for i in range(n)] for n in (200, 127, 128, 100)}
    rows = ({"id": f"len{n}", "prompt_ids": prompt} for n, prompt in ids.items())
    path = jsonl(tmp_path / "p.jsonl", *rows)
    prompts = ["prompts=jsonl", f"prompts.path={path}", "prompts.limit=null"]
    short = ["+target.source.config.max_position_embeddings=128", "sampling.max_new_tokens=60"]
    summary = smoke(tmp_path / "run", *prompts, *short)
    prompts = load(tmp_path / "run").prompts.set_index("prompt_id")
    for name, numbers in (("len200", ("200", "128")), ("len128", ("128",))):
        assert all(number in prompts.error[name] for number in numbers)
        assert len(prompts.output_ids[name]) == 0
        assert len(prompts.prompt_ids[name]) == int(name[3:])
    for name, length in (("len127", 1), ("len100", 28)):
        assert pd.isna(prompts.error[name])
        assert prompts.finish_reason[name] == "eos" or len(prompts.output_ids[name]) == length
        assert prompts.is_identical[name]
    assert prompts.finish_reason["len127"] in ("context", "eos")
    assert (summary["num_prompts"], summary["num_failed"]) == (4, 2)
    assert summary["status"] == "finished"


def test_when_every_prompt_fails_the_run_fails_and_says_why_and_keeps_the_rows(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", *({"id": str(n), "prompt_ids": [5] * n} for n in (600, 700)))
    with pytest.raises(UserError, match=r"no prompt succeeded.*600"):
        smoke(tmp_path / "run", "prompts=jsonl", f"prompts.path={path}")
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["num_failed"]) == ("failed", 2)
    assert "no prompt succeeded" in summary["error"]
    assert list(load(tmp_path / "run").prompts.prompt_id) == ["600", "700"]
    assert (tmp_path / "run" / "report.html").is_file()


class Raising(Fake):
    """Raises in its second step of every prompt that holds the ids of `marker`."""

    def __init__(self, error: BaseException, marker: str) -> None:
        super().__init__(self.repeat, name="raising")
        self.error, self.marker = error, byte_tokenizer().encode(marker, add_special_tokens=False)

    def begin(self, prompt_ids):
        self.prompt_ids, size = list(prompt_ids), len(self.marker)
        windows = (self.prompt_ids[i : i + size] for i in range(len(prompt_ids)))
        self.calls_left = 1 if self.marker in windows else 10**6
        return super().begin(prompt_ids)

    def repeat(self, context_ids):
        if self.calls_left == 0:
            raise self.error
        self.calls_left -= 1
        return [context_ids[-1]]


@pytest.mark.laws
@pytest.mark.parametrize("error", [RuntimeError("boom"), AssertionError(), SystemExit(0)], ids=repr)
def test_law_10_a_drafter_that_raises_in_one_prompt_costs_that_prompt_only(tmp_path, error):
    """Its row says what happened; the others are what they are without it."""
    path = texts_file(tmp_path)
    both = Ensemble({"ngram": NGram(), "raising": Raising(error, "cat")})
    summary = run_drafter(tmp_path / "run", both, path)
    clean = run_drafter(tmp_path / "clean", Ensemble({"ngram": NGram()}), path)
    prompts, alone = load(tmp_path / "run").prompts, load(tmp_path / "clean").prompts
    assert list(prompts.prompt_id) == ["p0", "p1", "p2", "p3"]
    assert prompts.error.isna().tolist() == [True, True, False, True]
    assert type(error).__name__ in prompts.error[2]
    trace = (tmp_path / "run" / "errors.log").read_text(encoding="utf-8")
    assert trace.startswith("prompt p2\n")
    assert "in repeat" in trace, "the author of a drafter needs the line"
    for row, other in zip(prompts.itertuples(), alone.itertuples(), strict=True):
        assert row.prompt_id == "p2" or list(row.output_ids) == list(other.output_ids)
    assert (summary["num_failed"], summary["num_identical"]) == (1, 3)
    assert summary["status"] == "finished"
    assert clean["num_failed"] == 0
    steps = load(tmp_path / "run").steps
    assert set(steps.prompt_id) == {"p0", "p1", "p3"}


def test_a_drafter_that_ends_the_process_in_the_first_prompt_costs_that_prompt_only(tmp_path):
    """The one that the run warms up with."""
    raising = Raising(SystemExit(0), "two")
    summary = run_drafter(tmp_path / "run", Ensemble({"raising": raising}), texts_file(tmp_path))
    assert (summary["status"], summary["num_failed"], summary["num_identical"]) == (
        "finished",
        1,
        3,
    )


@pytest.mark.laws
def test_b48_what_is_finished_when_the_run_is_stopped_in_the_third_prompt_stays(tmp_path):
    """Two rows with all their steps, the status, a page; the interrupt itself goes on to the
    caller.
    """
    both = Ensemble({"ngram": NGram(), "raising": Raising(KeyboardInterrupt(), "cat")})
    with pytest.raises(KeyboardInterrupt):
        run_drafter(tmp_path / "run", both, texts_file(tmp_path))
    loaded, summary = load(tmp_path / "run"), summary_of(tmp_path / "run")
    assert list(loaded.prompts.prompt_id) == ["p0", "p1"]
    assert set(loaded.steps.prompt_id) == {"p0", "p1"}
    assert (loaded.prompts.num_steps == loaded.steps.groupby("prompt_id").size().to_numpy()).all()
    assert summary["status"] == "interrupted"
    assert (summary["num_prompts"], summary["num_identical"]) == (2, 2)
    assert (tmp_path / "run" / "report.html").is_file()
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith(".tmp")]


# Prompts do not know of each other


def rows_of(folder: Path) -> dict[str, tuple]:
    """What a prompt's row and steps say that is not time."""
    loaded = load(folder)
    counts = ["num_nodes", "num_accepted", "num_emitted"]
    groups = loaded.steps.groupby("prompt_id")
    steps = {key: group[counts].to_numpy().tolist() for key, group in groups}
    found = {}
    for row in loaded.prompts.itertuples():
        ids = list(row.prompt_ids), list(row.output_ids)
        found[row.prompt_id] = (*ids, row.finish_reason, row.error, steps[row.prompt_id])
    return found


@pytest.mark.laws
@pytest.mark.parametrize("temperature", [0, 1])
def test_law_9_b23_b29_a_prompts_rows_do_not_depend_on_the_others_their_order_or_earlier_runs(
    tmp_path, temperature
):
    """Forwards, backwards, alone, twice the same text, all in one process."""
    rows = [{"id": f"p{i}", "text": text} for i, text in enumerate(TEXTS)]
    orders = {"forwards": rows, "backwards": rows[::-1], "alone": rows[2:3], "again": rows}
    found = {}
    for name, order in orders.items():
        path = jsonl(tmp_path / f"{name}.jsonl", *order)
        prompts = ["prompts=jsonl", f"prompts.path={path}", "prompts.limit=null"]
        sampling = [f"sampling.temperature={temperature}", "sampling.seed=7"]
        smoke(tmp_path / name, "baseline=false", *prompts, *sampling)
        found[name] = rows_of(tmp_path / name)
    assert found["forwards"] == found["backwards"] == found["again"]
    assert found["alone"] == {"p2": found["forwards"]["p2"]}


def test_b29_the_same_prompt_twice_drafts_the_same_twice(tmp_path):
    """Nothing is learned from the first time."""
    path = jsonl(tmp_path / "p.jsonl", {"id": "a", "text": TEXTS[2]}, {"id": "b", "text": TEXTS[2]})
    smoke(tmp_path / "run", "prompts=jsonl", f"prompts.path={path}", "sampling.max_new_tokens=40")
    rows = rows_of(tmp_path / "run")
    assert rows["a"] == rows["b"]


def test_shards_are_merged_on_reading_to_the_unsharded_run(tmp_path):
    """Disjoint, complete, and with the same tokens and counts."""
    path = texts_file(tmp_path, [*TEXTS, "and a fifth one, so that the shards differ in size"])
    common = ["prompts=jsonl", f"prompts.path={path}", "prompts.limit=null"]
    smoke(tmp_path / "whole", *common)
    for shard in range(2):
        smoke(tmp_path / "shards" / str(shard), *common, f"prompts.shard={shard}/2")
    whole, merged = load(tmp_path / "whole"), load(tmp_path / "shards")
    assert sorted(merged.prompts.groupby("run").size()) == [2, 3]
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "shards")
    assert len(merged.steps) == len(whole.steps)
    assert len(merged.drafts) == len(whole.drafts)


def test_b49_a_folder_that_holds_a_run_refuses_a_second_one_and_keeps_the_first(tmp_path):
    """Nothing of the first run is touched. One that was refused before its first prompt has nothing
    to keep, and makes room.
    """
    smoke(tmp_path / "run", "prompts.limit=1")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match=r"already holds a run.*hydra\.run\.dir"):
        smoke(tmp_path / "run", "prompts.limit=2")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    with pytest.raises(UserError):
        smoke(tmp_path / "failed", "sampling.temperature=-1")
    assert summary_of(tmp_path / "failed")["status"] == "failed"
    assert smoke(tmp_path / "failed", "prompts.limit=1")["status"] == "finished"
    with pytest.raises(UserError, match="already holds a run"):
        smoke(tmp_path / "failed")


def test_without_a_baseline_nothing_is_compared_and_nothing_is_claimed(tmp_path):
    summary = smoke(tmp_path / "run", "baseline=false")
    prompts = load(tmp_path / "run").prompts
    for name in ("speedup", "num_identical", "baseline_tokens_per_s"):
        assert summary[name] is None
    assert prompts.is_identical.isna().all()
    assert prompts.baseline_decode_s.isna().all()


def test_b42_without_drafters_a_run_is_ar_decoding_and_its_rates_are_empty(tmp_path):
    """Neither 0 nor a crash."""
    summary = smoke(tmp_path / "run", "drafter=none")
    assert summary["acceptance_length"] == 1.0
    assert summary["acceptance_rate"] is None
    assert summary["drafters"] == {}
    assert summary["num_identical"] == 2


# Verifiers that sample otherwise than AR decoding


@pytest.mark.parametrize("verifier", ["coupled", "residual", "block", "typical", "per_row"])
def test_a_run_claims_identity_only_where_it_was_tested_and_names_what_is_lossy(
    tmp_path, capsys, verifier
):
    overrides = [f"verifier={verifier}", "drafter=ngram", "baseline=true"]
    sampled = smoke(tmp_path / "sampled", *overrides, "sampling.temperature=1")
    greedy = smoke(tmp_path / "greedy", *overrides)
    is_lossy = verifier in ("typical", "per_row")
    assert greedy["num_identical"] == 2, "at temperature 0 all of them are the target's own"
    assert sampled["num_identical"] == (2 if verifier == "coupled" else None)
    assert sampled["speedup"] is not None
    text = "".join(capsys.readouterr())
    page = (tmp_path / "sampled" / "report.html").read_text(encoding="utf-8")
    for summary in (sampled, greedy):
        assert (summary["verifier"], summary["lossy"]) == (verifier, is_lossy)
    assert (f"LOSSY: verifier={verifier}" in text) == is_lossy
    assert ("not compared" in page) == (verifier != "coupled")
    assert (f"lossy verifier ({verifier})" in page) == is_lossy
    rows = load(tmp_path / "sampled").prompts
    assert rows["is_identical"].isna().all() == (verifier != "coupled")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_width_runs_both_ways_and_in_half_precision(tmp_path, capsys, dtype):
    width = ["exact_width=8", "budget.max_nodes=8"]
    summary = smoke(tmp_path / "run", *width, f"target.dtype={dtype}", "drafter=ngram")
    assert summary["num_failed"] == 0 and summary["num_identical"] == 2
    assert "x of AR decoding at exact_width=8 too (" in "".join(capsys.readouterr())


def test_a_compiled_run_has_the_same_text_and_says_that_it_was_compiled(tmp_path, capsys):
    """On a CPU nothing is compiled unless asked for."""
    texts = []
    for name, overrides in (("eager", []), ("compiled", ["compiled=true"])):
        summary = smoke(tmp_path / name, "budget.max_nodes=5", *overrides)
        assert summary["num_failed"] == 0 and summary["num_identical"] == 2
        assert summary["environment"]["compiled"] == (name == "compiled")
        assert ("compiling the target" in capsys.readouterr().out) == (name == "compiled")
        texts.append(load(tmp_path / name).prompts.text.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("layout=rows", "layout=rows"),
        ("target.dtype=float16", "torch.compile cannot take it"),  # packed weights are no tensors
    ],
    ids=["rows", "weights"],
)
def test_what_cannot_be_compiled_runs_uncompiled_and_says_why_in_a_line(
    tmp_path, capsys, override, why
):
    smoke(tmp_path / "run", "compiled=true", override)
    assert summary_of(tmp_path / "run")["environment"]["compiled"] is False
    lines = [line for line in capsys.readouterr().out.splitlines() if "goes on uncompiled" in line]
    assert len(lines) == 1
    assert why in lines[0]


# Refused before a model is loaded


def test_a_run_that_is_refused_leaves_the_overrides_of_the_finished_one(tmp_path, monkeypatch):
    few = ["prompts.limit=1", "sampling.max_new_tokens=4"]
    overrides = ["experiment=smoke", "drafter=ngram", *few, "hydra.run.dir=here"]
    assert run_command(main, monkeypatch, tmp_path, *overrides) == 0
    files = {path: path.read_bytes() for path in (tmp_path / "here" / ".hydra").iterdir()}
    assert {path.name for path in files} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "- prompts.limit=1" in (tmp_path / "here" / ".hydra" / "overrides.yaml").read_text()
    assert run_command(main, monkeypatch, tmp_path, *overrides, "layout=rows") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "here" / ".hydra").iterdir()} == files


def test_costs_without_a_member_are_refused_before_the_target_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("the model was loaded"))
    path = tmp_path / "costs.json"
    costs = {"verify_ms": [[0, 1.0]], "draft_ms": {"other": [[1, 0.5]]}, "host_ms": 0}
    path.write_text(json.dumps(costs))
    with pytest.raises(UserError, match=r"costs\.json.*no member ngram.*add a row"):
        smoke(tmp_path / "run", "budget=cost_aware", f"budget.costs={path}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.max_new_tokens=-1"], ["max_new_tokens", "-1"]),
        (["sampling.temperature=-1"], ["temperature", "-1"]),
        (["sampling.temperature=nan"], ["temperature", "nan"]),
        (["trace=dens"], ["trace", "steps", "dense"]),
        (["trace=off"], ["trace"]),
        (["baseline=maybe"], ["baseline", "maybe"]),
        (["budget.max_nodes=-1"], ["max_nodes", "-1"]),
        (["prompts=jsonl", "prompts.path=no/such.jsonl"], ["no/such.jsonl", "does not exist"]),
        (["prompts=jsonl"], ["prompts.path"]),
        (["prompts.limit=0"], ["prompts.limit", "0"]),
        (["prompts.shard=2/2"], ["prompts.shard", "2/2"]),
        (["drafter.num_draft_tokens=0"], ["num_draft_tokens", "0"]),
        (["target.dtype=float8"], ["dtype", "float8"]),
        (["target.quantization=int3"], ["quantization", "int3"]),
        (["+sampling.num_beams=4"], ["num_beams"]),
        (["exact_width=0"], ["exact_width", "0"]),
        (["exact_width=16"], ["exact_width=16", "64 nodes", "budget.max_nodes=16"]),
        (["exact_width=64", "layout=rows"], ["exact_width", "layout=rows", "layout=tree"]),
        (["compiled=maybe"], ["compiled", "maybe"]),
        (["verifier=typical", "verifier.epsilon=0"], ["verifier.epsilon", "0"]),
        (
            ["drafter=universal", "model@drafter.model=tiny", "verifier=residual"],
            ["universal", "verifier=coupled"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_b16_b22_a_bad_option_is_refused_in_a_line_before_the_target_is_loaded(
    tmp_path, monkeypatch, overrides, words
):
    """The run folder says that the run failed, and why."""
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("the model was loaded"))
    with pytest.raises(UserError) as error:
        smoke(tmp_path / "run", *overrides)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert str(error.value) in summary["error"]


def test_a_misspelt_layout_is_refused_with_the_possible_ones(tmp_path):
    with pytest.raises(UserError, match=r"layout=treee: choose one of tree, rows"):
        smoke(tmp_path / "run", "layout=treee")


def test_a_broken_line_of_the_prompts_file_is_refused_with_its_number_before_the_target_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("the model was loaded"))
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl, line 3"):
        smoke(tmp_path / "run", "prompts=jsonl", f"prompts.path={path}")
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_stop_strings_are_a_list_and_the_text_ends_with_one(tmp_path):
    """The same place as without drafters."""
    smoke(tmp_path / "free", "baseline=false", "prompts.limit=1")
    text = load(tmp_path / "free").prompts.text[0]
    stop = next(character for character in text if character.isascii() and character.isalnum())
    smoke(tmp_path / "stopped", "prompts.limit=1", f"sampling.stop=['{stop}']")
    row = load(tmp_path / "stopped").prompts.iloc[0]
    assert row.text == text[: text.index(stop) + len(stop)]
    assert (row.finish_reason, row.is_identical) == ("stop", True)


# The command line


def command(*overrides: str) -> list[str]:
    python = [sys.executable, "-W", "ignore", "-m", "specens.run"]
    return [*python, *overrides, "experiment=smoke", "drafter=ngram"]


def call(folder: Path, *overrides: str, timeout: float = 120) -> subprocess.CompletedProcess:
    given = {"cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": timeout}
    return subprocess.run(command(*overrides), capture_output=True, text=True, **given)


def test_b45_b50_a_failing_job_of_a_sweep_is_marked_and_the_others_are_complete(tmp_path):
    """Three jobs in one process, with a prompts file named relative to the launch folder and
    hydra.job.chdir=true. The failed one is in the middle; its error is a line, on the terminal and
    in its own folder.
    """
    texts_file(tmp_path)
    prompts = ["prompts=jsonl", "prompts.path=prompts.jsonl", "prompts.limit=2"]
    folders = ["hydra.sweep.dir=sweep", "hydra.job.chdir=true"]
    done = call(tmp_path, "--multirun", "drafter.num_draft_tokens=2,0,4", *folders, *prompts)
    assert done.returncode == 1, done.stderr
    for job in ("0", "2"):
        assert {path.name for path in (tmp_path / "sweep" / job).iterdir()} >= FILES
        summary = summary_of(tmp_path / "sweep" / job)
        assert (summary["status"], summary["num_identical"]) == ("finished", 2)
    failed = summary_of(tmp_path / "sweep" / "1")
    assert failed["status"] == "failed"
    assert "num_draft_tokens=0" in failed["error"]
    assert "num_draft_tokens=0" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert len(load(tmp_path / "sweep").prompts) == 4


@pytest.mark.slow
def test_b48_an_interrupted_run_exits_with_130_and_its_finished_prompts_can_be_read(tmp_path):
    """The signal that a terminal sends, as soon as the first prompts are on disk."""
    path = texts_file(tmp_path, [f"{text} {i}" for i in range(100) for text in TEXTS])
    prompts = ["prompts=jsonl", f"prompts.path={path}", "prompts.limit=null"]
    long = command(*prompts, "sampling.max_new_tokens=200", "hydra.run.dir=run")
    pipe = subprocess.PIPE
    running = subprocess.Popen(long, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    table = tmp_path / "run" / "prompts.parquet"
    deadline = time.monotonic() + 100
    while running.poll() is None and time.monotonic() < deadline:
        is_begun = table.exists() and table.stat().st_size
        if is_begun and pq.ParquetFile(table).metadata.num_rows >= 3:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    loaded = load(tmp_path / "run")
    assert 3 <= len(loaded.prompts) < 400
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_b49_two_runs_started_at_once_have_two_folders_with_all_files(tmp_path):
    """The same command twice, in the same second."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    one = command("prompts.limit=1")
    running = [subprocess.Popen(one, cwd=tmp_path, **streams) for _ in range(2)]  # pyright: ignore
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    for process in running:
        assert process.stderr is not None
        process.stderr.close()
    folders = sorted(path.parent for path in (tmp_path / "outputs").rglob("summary.json"))
    assert len(folders) == 2
    for folder in folders:
        assert {path.name for path in folder.iterdir()} >= FILES
        assert summary_of(folder)["status"] == "finished"


@pytest.mark.slow
def test_b16_a_bad_option_on_the_command_line_is_one_line_and_a_failing_exit(tmp_path):
    done = call(tmp_path, "sampling.temperature=-1", "hydra.run.dir=run")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("specens: ")]
    assert len(lines) == 1
    assert "temperature=-1" in lines[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_prompts_id_cannot_command_the_terminal(tmp_path, capsys):
    path = jsonl(tmp_path / "prompts.jsonl", {"text": "one two", "id": "\u001b[31mred\nline"})
    smoke(tmp_path / "run", "prompts=jsonl", f"prompts.path={path}")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "red" in line]
    assert "\u001b" not in line and "line" in line


def test_a_dense_trace_needs_a_member_to_trace(tmp_path):
    with pytest.raises(UserError, match="there is no drafter"):
        smoke(tmp_path / "run", "drafter=none", "trace=dense")
