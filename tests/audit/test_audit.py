"""The audit passes what is lossless, catches what is broken or biased, and states how much of it
was examined.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import run_command
from omegaconf import OmegaConf

from specens.audit.__main__ import main, with_folder
from specens.audit.audit_run import audit
from specens.audit.distribution_test import SURPRISE
from specens.audit.examine import Evidence
from specens.audit.identity import Deficits
from specens.audit.options import AuditOptions
from specens.config.compose import compose
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target
from specens.decoding.types import Verdict
from specens.decoding.verify import Coupled
from specens.errors import UserError
from specens.models.tiny import random_model
from specens.run import run

LAYOUTS = ("tree", "rows")
PROMPTS = [
    "one two one two one",
    "aaaa",
    "The cat sat on the mat. The cat sat",
    "x = 1; y = 2; x = 1; y =",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(autouse=True)
def _cache(home, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(home / "cache"))


def overrides(home: Path, *more: str) -> list[str]:
    path = home / "prompts.jsonl"
    rows = [{"id": f"p{index}", "text": text} for index, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = ["model@target=tiny", "drafter=untrained", "tracker=none", "sampling.max_new_tokens=16"]
    return [*own, "prompts=jsonl", f"prompts.path={path}", *more]


def audited(home: Path, folder: Path, *more: str):
    given = overrides(home, "audit.sampled_tokens=0", *more)
    return audit(compose(given, "audit"), folder, given)


def words_of(done) -> str:
    """The page without its line breaks."""
    return " ".join(done.page().split())


# What is lossless passes


SAMPLING = "sampling.temperature=1"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", [(), (SAMPLING,), (SAMPLING, "verifier=residual")], ids=len)
def test_a_lossless_run_passes(home, tmp_path, how, layout):
    done = audited(home, tmp_path / "run", f"layout={layout}", *how)
    found = done.run
    assert done.is_lossless and not found.faults and not found.divergences
    assert (found.num_texts, done.sampled) == (4, None)
    identity = (found.identity, found.num_identical, found.deficits)
    if "verifier=residual" in how:
        assert identity == (None, None, None)
        assert "identity not tested" in done.verdict and "not tested" in done.page()
    else:
        assert identity == ("identical", 4, Deficits(0.0, 0.0, 0))
    assert found.distribution == ("distribution not rejected" if how else None)
    assert 0 < found.noise_floor < 1e-3 and found.num_control_divergences == 0


def test_a_run_of_one_width_is_held_to_ar_decoding_of_that_width(home, tmp_path):
    done = audited(home, tmp_path / "run", "exact_width=12", "budget.max_nodes=12")
    assert done.verdict.startswith("identical") and done.subject["exact_width"] == 12
    assert "exact_width=12 (AR decoding too" in words_of(done)


@pytest.mark.slow
def test_a_greedy_run_has_outputs_sampled_for_it_with_other_seeds(home, tmp_path):
    # As many tokens as it takes to catch the control of these tiny models.
    done = audited(home, tmp_path / "run", "audit.sampled_tokens=800", "audit.num_prompts=3")
    assert done.sampled is not None and done.run.distribution is None
    assert 800 <= done.sampled.num_tokens < 800 + 16 and done.sampled.num_texts >= 50
    assert done.sampled.identity == "identical"
    assert done.verdict == "identical, distribution not rejected"
    assert "3 of the run's 3 prompts" in words_of(done)


def test_a_sampled_run_with_too_few_tokens_is_given_more_outputs(home, tmp_path):
    more = (SAMPLING, "audit.num_prompts=2", "prompts.limit=null", "audit.sampled_tokens=60")
    done = audited(home, tmp_path / "run", *more)
    num_tokens = done.run.num_tokens
    assert done.sampled is None and done.num_chosen == 2 and 60 <= num_tokens < 60 + 16
    examined = f"2 of the run's 4 prompts token by token ({num_tokens} tokens, with"
    assert examined in words_of(done)


def test_the_command_exits_with_0_and_writes_what_it_prints(home, tmp_path, monkeypatch, capsys):
    given = overrides(home, "audit.sampled_tokens=40", "hydra.run.dir=here")
    assert run_command(main, monkeypatch, tmp_path, *given) == 0
    here = tmp_path / "here"
    page = (here / "audit.txt").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert all(line.strip() in printed for line in page.splitlines())
    assert page.endswith("identical, distribution not rejected (too few tokens to show a bias)\n")
    content = json.loads((here / "audit.json").read_text(encoding="utf-8"))
    keys = {"schema_version", "folder", "subject", "options", "texts", "run", "sampled"}
    assert set(content) == keys | {"is_lossless", "verdict"}
    assert (content["schema_version"], content["is_lossless"]) == (2, True)
    assert content["run"]["num_tokens"] == 64 and content["sampled"]["num_tokens"] >= 40
    fields = set(Evidence.__dataclass_fields__) | {"z_bound", "is_caught"}
    assert set(content["run"]) == set(content["sampled"]) == fields
    assert content["sampled"]["statistics"][0]["name"] == SURPRISE
    # The folder is a run's, and can be audited again by its name alone: with the same findings.
    (here / "audit.json").unlink()
    assert run_command(main, monkeypatch, tmp_path, "run=here", "audit.sampled_tokens=40") == 0
    again = json.loads((here / "audit.json").read_text(encoding="utf-8"))
    assert again["run"] == content["run"] and again["sampled"] == content["sampled"]
    assert (here / "audit").is_dir() and not (tmp_path / "outputs").exists()


# A finished run


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory) -> Path:
    """A run with a recorded baseline."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(home / "cache"))
        config = compose(overrides(home, "drafter=ngram"))
        run(config, folder)
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    return folder


def of_run(folder: Path, *more: str):
    given = [f"run={folder}", "audit.sampled_tokens=0", *more]
    return audit(compose(given, "audit"), folder / "unused", given)


def test_a_finished_run_is_audited_with_its_own_configuration(finished):
    done = of_run(finished)
    assert done.verdict == "identical, distribution not tested (no sampled output)"
    assert done.subject["drafters"] == ["ngram"] and "tiny-llama" in done.subject["target"]
    assert "4 of 4 outputs are identical to the same run's AR decoding" in done.page()
    assert not (finished / "unused").exists()


def test_only_some_prompts_are_examined_and_the_page_says_so(finished):
    done = of_run(finished, "audit.num_prompts=2")
    assert (done.run.num_texts, done.run.num_tokens) == (2, 32)
    assert "2 of the run's 4 prompts token by token (32 tokens)" in done.page()


def test_other_overrides_beside_run_are_refused_as_they_would_be_ignored(finished):
    config = compose([f"run={finished}"], "audit")
    for other in ("drafter=ngram", "sampling.temperature=1", "+audits=1", "~drafter"):
        with pytest.raises(UserError, match=r"run= takes the configuration of that run"):
            audit(config, finished / "unused", [f"run={finished}", other])


def test_the_audit_of_a_finished_run_logs_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's one" / ".hydra").mkdir(parents=True)
    given = ["audit.width=4", 'run="it\'s one"']
    assert with_folder(given) == [*given, r"hydra.run.dir='it\'s one/audit'"]
    assert compose(with_folder(given), "audit", with_hydra=True).hydra.run.dir == "it's one/audit"
    for others in (["run=nowhere"], ["drafter=ngram"], ["hydra.run.dir=x", *given]):
        assert with_folder(others) == others


def test_a_sweep_marks_what_is_not_lossless_and_goes_on(tmp_path, monkeypatch, capsys):
    seen = []

    def found(config, folder, *given):
        seen.append(config.layout)
        lossless = config.layout == "rows"
        return SimpleNamespace(is_lossless=lossless, verdict="BUG", folder=folder)

    monkeypatch.setattr("specens.audit.audit_run.audit", found)
    assert run_command(main, monkeypatch, tmp_path, "-m", "layout=tree,rows") == 1
    assert seen == ["tree", "rows"] and "specens: BUG: " in capsys.readouterr().err
    assert run_command(main, monkeypatch, tmp_path, "layout=tree") == 2


def test_a_folder_that_is_no_run_is_refused_in_one_line(finished, home, tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            of_run(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no .hydra/config.yaml" in refusal(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    (broken / ".hydra").mkdir(parents=True)
    config = broken / ".hydra" / "config.yaml"
    config.write_text("a: [", encoding="utf-8")
    assert "cannot read" in refusal(broken)
    config.write_text("- a\n", encoding="utf-8")
    assert "not the configuration of a run" in refusal(broken)
    config.write_text("stage: null\n", encoding="utf-8")
    assert "written by another specens" in refusal(broken)
    OmegaConf.save(compose(overrides(home)), config)
    assert "no run to read" in refusal(broken)
    for name in ("prompts", "steps", "drafts"):
        shutil.copy(finished / f"{name}.parquet", broken)
    (broken / "summary.json").write_text('{"schema_version": 99}', encoding="utf-8")
    assert "schema version 99" in refusal(broken)


def test_a_token_that_the_target_lacks_is_bad_input(finished):
    folder = finished.parent / "beyond"
    shutil.copytree(finished, folder)
    table = pq.read_table(folder / "prompts.parquet")
    rows = table.to_pylist()
    rows[0]["output_ids"][0] = 10**6
    pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / "prompts.parquet")
    with pytest.raises(UserError, match=r"prompt p0 has token 1000000, the target has the ids 0\."):
        of_run(folder)


def test_the_command_prints_errors_in_one_line_and_exits_with_1(tmp_path):
    command = [sys.executable, "-m", "specens.audit", "run=nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert sum("specens: run=" in line for line in done.stderr.splitlines()) == 1


BAD = ("num_prompts=0", "width=0", "sampled_tokens=-1", "temperature=0", "width=x")


@pytest.mark.parametrize("option", BAD)
def test_bad_options_are_refused(home, tmp_path, option):
    with pytest.raises(UserError, match="audit." + option.partition("=")[0]):
        audited(home, tmp_path / "run", f"audit.{option}")


def test_options_have_defaults():
    options = AuditOptions()
    assert options == AuditOptions(8, None, 1.0, 8)
    assert [options.num_sampled(is_sampled=is_sampled) for is_sampled in (False, True)] == [
        512,
        1024,
    ]
    assert AuditOptions(sampled_tokens=7).num_sampled(is_sampled=True) == 7


# What is broken is caught

HONEST = Coupled.__call__


def unseen(self, tree, scores):
    """Accepts a draft token without a look."""
    verdict = HONEST(self, tree, scores)
    return verdict if verdict.path or not len(tree) else Verdict((0,), scores.target_token(0))


def second_best(self, tree, scores):
    """Takes the target's second best token now and then."""
    verdict = HONEST(self, tree, scores)
    if verdict.path or verdict.target_token % 5:
        return verdict
    return Verdict((), int(scores._logits[0].topk(2).indices[1]))


def dropping(self, tree, scores):
    """Loses the last accepted token of a step."""
    verdict = HONEST(self, tree, scores)
    return replace(verdict, path=verdict.path[:-1])


@pytest.mark.parametrize("broken", [unseen, second_best, dropping])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broken_verifier_is_caught(home, tmp_path, monkeypatch, broken, layout):
    monkeypatch.setattr(Coupled, "__call__", broken)
    drafter = ("drafter=oracle", "drafter.num_draft_tokens=2") if broken is dropping else ()
    done = audited(home, tmp_path / "run", f"layout={layout}", *drafter)
    assert not done.is_lossless and done.verdict.startswith("BUG")
    worst = max(done.run.divergences, key=lambda one: one.logit_gap)
    assert not worst.is_explained and worst.logit_gap > 100 * done.run.noise_floor
    assert done.run.deficits.num_beyond > 0 and done.run.num_identical < 4
    page = words_of(done)
    assert "BUG divergence" in page and "not explained by rounding" in page
    assert "verdict BUG" in page


def output_ids(folder: Path) -> list[list[int]]:
    ids = pd.read_parquet(folder / "prompts.parquet")["output_ids"]
    return [list(map(int, row)) for row in ids]


def test_an_output_that_goes_on_after_its_end_is_caught(home, tmp_path, monkeypatch):
    audited(home, tmp_path / "first")
    eos = f"sampling.eos_token_ids=[{output_ids(tmp_path / 'first')[0][5]}]"
    honest = audited(home, tmp_path / "honest", eos)
    assert honest.is_lossless and len(output_ids(tmp_path / "honest")[0]) <= 6
    trim = StopRules.trim
    monkeypatch.setattr(
        StopRules, "trim", lambda self, *given: trim(replace(self, eos_ids=()), *given)
    )
    done = audited(home, tmp_path / "run", eos)
    assert not done.is_lossless and done.verdict.startswith("BUG")
    assert "p0: it goes on after token" in done.run.faults[0]
    assert "a wrong end: p0" in done.page()


def test_scores_that_depend_on_what_else_is_scored_are_no_rounding(home, tmp_path, monkeypatch):
    """A bug in scoring several tokens also widens the noise floor, and so would explain its own
    divergences.
    """
    honest, factors = Target._score_tree, torch.linspace(0.5, 1.5, 259)
    monkeypatch.setattr(Target, "_score_tree", lambda *given: honest(*given) * factors)
    monkeypatch.setattr("specens.decoding.speculator.self_check", lambda target, layout: None)
    done = audited(home, tmp_path / "run")
    assert not done.is_lossless and done.run.identity == "BUG"
    assert not done.run.is_noise and "that is no rounding" in done.page()


@pytest.mark.parametrize("verifier", [pytest.param("per_row", marks=pytest.mark.slow), "typical"])
def test_a_verifier_that_changes_the_distribution_is_caught_by_the_command(
    home, tmp_path, monkeypatch, near, tokenizer, verifier
):
    near(random_model(), 1).save_pretrained(tmp_path / "near")
    tokenizer.save_pretrained(tmp_path / "near")
    given = [f"~drafter@drafter.members.{name}" for name in ("ngram", "quantized")]
    for name in ("a", "b", "c"):
        member = f"drafter.members.{name}"
        given += [f"+drafter@{member}=lm", f"model@{member}.model=local"]
        given += [f"{member}.model.source={tmp_path / 'near'}", f"{member}.num_draft_tokens=1"]
    given += [f"verifier={verifier}", SAMPLING, "sampling.top_k=8", "sampling.max_new_tokens=60"]
    given = overrides(home, *given, "audit.sampled_tokens=400", "hydra.run.dir=here")
    assert run_command(main, monkeypatch, tmp_path, *given) == 2
    content = json.loads((tmp_path / "here" / "audit.json").read_text(encoding="utf-8"))
    found = content["run"]
    assert (content["is_lossless"], found["distribution"]) == (False, "NOT LOSSLESS")
    assert content["subject"]["lossy"] and "LOSSY" in content["verdict"]
    assert max(abs(row["z"]) for row in found["statistics"]) > found["z_bound"]
    page = (tmp_path / "here" / "audit.txt").read_text(encoding="utf-8")
    assert "REJECTED" in page and f"verifier={verifier} (LOSSY" in page


def test_a_lossy_verifier_is_never_called_lossless_where_output_was_sampled(home, tmp_path):
    few = ("audit.num_prompts=1", "sampling.max_new_tokens=2", "verifier=typical")
    greedy = audited(home, tmp_path / "greedy", *few)
    assert greedy.is_lossless and "LOSSY verifier" in greedy.verdict
    assert not audited(home, tmp_path / "sampled", *few, SAMPLING).is_lossless


def test_the_control_needs_two_members(home, tmp_path):
    done = audited(home, tmp_path / "run", "drafter=ngram", SAMPLING)
    assert done.run.num_contested == 0 and "not possible" in done.page()
    assert done.content()["run"]["is_caught"] is False


def test_half_precision_is_explained_by_rounding_and_never_called_identical(
    home, tmp_path, monkeypatch
):
    """Scores of the run move by a bfloat16 unit or two, as they do where kernels differ by the
    width of a forward.
    """
    honest = Target._score_tree

    def rounded(self, cache, last_token, tree):
        logits = honest(self, cache, last_token, tree)
        noise = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)) * 2**-7
        return (logits.float() * (1 + noise.reshape(logits.shape))).to(logits.dtype)

    monkeypatch.setattr(Target, "_score_tree", rounded)
    bfloat16 = ("target.dtype=bfloat16", "sampling.max_new_tokens=128")
    done = audited(home, tmp_path / "run", *bfloat16)
    found = done.run
    assert done.is_lossless and found.num_identical < 4
    assert found.identity == "explained by rounding"
    assert found.divergences and all(one.is_explained for one in found.divergences)
    assert found.reference == "a float32 copy of the target, in one forward"
    assert found.deficits.share > 0 and found.deficits.num_beyond == 0
    assert "identical, " not in done.verdict and "explained by rounding" in done.page()
