"""The audit passes what is lossless, catches what is broken or biased, and claims nothing that it did not look at."""

from __future__ import annotations

import copy
import functools
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import Fake, door, plain_greedy
from omegaconf import OmegaConf

from specens.audit import audit, main
from specens.config import compose
from specens.decoding.budget import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.decoding.loop import Decoder
from specens.decoding.stopping import StopRules
from specens.decoding.target import LAYOUTS, Target
from specens.decoding.types import Draft, Member, Verdict
from specens.decoding.verify import Coupled, PerRow, Residual
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.errors import UserError
from specens.evidence.examine import Evidence, examine
from specens.evidence.identity import (
    Deficits,
    Fork,
    deficits_of,
    end_fault,
    identity_verdict,
    is_explained,
    more_than_control,
    noise_floor,
    noise_limit,
)
from specens.evidence.law import (
    BEST,
    FAVOURED,
    SUPPORT,
    SURPRISE,
    Stream,
    Term,
    drawn_by,
    first_proposals,
    functions,
    is_rejected,
    statistic,
    term,
    z_bound,
    z_score,
)
from specens.evidence.options import Options
from specens.evidence.texts import Text, chosen
from specens.run import run
from specens.speculator import Speculator
from specens.tiny import random_model

PROMPTS = ["one two one two one", "aaaa", "The cat sat on the mat. The cat sat", "x = 1; y = 2; x = 1; y ="]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(autouse=True)
def _cache(home, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(home / "cache"))


def words(home: Path, *more: str) -> list[str]:
    path = home / "prompts.jsonl"
    rows = [{"id": f"p{index}", "text": text} for index, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = ("model@target=tiny", "drafter=untrained", "tracker=none", "prompts=jsonl", f"prompts.path={path}")
    return [*own, "sampling.max_new_tokens=16", *more]


def audited(home: Path, folder: Path, *more: str):
    return audit(compose(words(home, "audit.sampled_tokens=0", *more), "audit"), folder)


# What is lossless passes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "how", [(), ("sampling.temperature=1",), ("sampling.temperature=1", "verifier=residual")], ids=len
)
def test_a_lossless_run_passes(home, tmp_path, how, layout):
    done = audited(home, tmp_path / "run", f"layout={layout}", *how)
    found = done.run
    assert done.is_lossless and not found.faults and not found.forks
    assert (found.num_texts, done.sampled) == (4, None)
    if "verifier=residual" in how:
        assert (found.identity, found.num_identical, found.deficits) == (None, None, None)
        assert "identity not tested" in done.verdict and "not tested" in done.page()
    else:
        assert (found.identity, found.num_identical, found.deficits) == ("identical", 4, Deficits(0.0, 0.0, 0))
    assert found.law == ("law not rejected" if how else None)
    assert 0 < found.noise_floor < 1e-3 and found.num_control_forks == 0


def test_a_run_of_one_width_is_held_to_plain_decoding_of_that_width(home, tmp_path):
    done = audited(home, tmp_path / "run", "exact_width=12", "budget.max_nodes=12")
    assert done.verdict.startswith("identical") and done.subject["exact_width"] == 12
    assert "exact_width=12 (plain decoding too" in " ".join(done.page().split())


def test_a_greedy_run_has_text_sampled_for_it_with_other_seeds(home, tmp_path):
    # As many tokens as it takes to catch the control of these tiny models.
    done = audited(home, tmp_path / "run", "audit.sampled_tokens=800", "audit.num_prompts=3")
    assert done.sampled is not None and done.run.law is None
    assert 800 <= done.sampled.num_tokens < 800 + 16 and done.sampled.num_texts >= 50
    assert (done.sampled.identity, done.sampled.law) == ("identical", "law not rejected")
    assert done.verdict == "identical, law not rejected"
    assert "3 of the run's 3 prompts" in " ".join(done.page().split())


def test_a_sampled_run_with_too_few_tokens_is_given_more_texts(home, tmp_path):
    more = ("sampling.temperature=1", "audit.num_prompts=2", "prompts.limit=null", "audit.sampled_tokens=60")
    done = audited(home, tmp_path / "run", *more)
    assert done.sampled is None and done.num_chosen == 2 and 60 <= done.run.num_tokens < 60 + 16
    assert f"2 of the run's 4 prompts token by token ({done.run.num_tokens} tokens, with" in " ".join(
        done.page().split()
    )


def test_the_door_exits_with_0_and_writes_what_it_prints(home, tmp_path, monkeypatch, capsys):
    given = words(home, "audit.sampled_tokens=40", "hydra.run.dir=here")
    assert door(main, monkeypatch, tmp_path, *given) == 0
    page = (tmp_path / "here" / "audit.txt").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert all(line.strip() in printed for line in page.splitlines())
    verdict = "verdict identical, law not rejected (too few tokens to show a bias)"
    assert page.splitlines()[-1].split() == verdict.split()
    content = json.loads((tmp_path / "here" / "audit.json").read_text(encoding="utf-8"))
    assert set(content) == {
        *("schema_version", "folder", "subject", "options", "texts", "run", "sampled", "is_lossless", "verdict")
    }
    assert (content["schema_version"], content["is_lossless"]) == (1, True)
    assert content["run"]["num_tokens"] == 64 and content["sampled"]["num_tokens"] >= 40
    fields = set(Evidence.__dataclass_fields__)
    assert set(content["run"]) == set(content["sampled"]) == {*fields, "z_bound", "is_caught"}
    assert content["sampled"]["statistics"][0]["name"] == SURPRISE
    # The folder is a run's, and can be audited again by its name alone: with the same findings.
    (tmp_path / "here" / "audit.json").unlink()
    assert door(main, monkeypatch, tmp_path, "run=here", "audit.sampled_tokens=40") == 0
    again = json.loads((tmp_path / "here" / "audit.json").read_text(encoding="utf-8"))
    assert again["run"] == content["run"] and again["sampled"] == content["sampled"]
    assert (tmp_path / "here" / "audit").is_dir() and not (tmp_path / "outputs").exists()


# A finished run


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory) -> Path:
    """A run with a baseline on file."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(home / "cache"))
        config = compose(words(home, "drafter=ngram"))
        run(config, folder)
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    return folder


def of_run(folder: Path, *more: str):
    given = [f"run={folder}", "audit.sampled_tokens=0", *more]
    return audit(compose(given, "audit"), folder / "unused", given)


def test_a_finished_run_is_audited_with_its_own_configuration(finished):
    done = of_run(finished)
    assert done.verdict == "identical, law not tested (no sampled text)"
    assert done.subject["drafters"] == ["ngram"] and "tiny-llama" in done.subject["target"]
    assert "4 of 4 prompts are equal to the same run's plain decoding" in done.page()
    assert not (finished / "unused").exists()


def test_only_some_prompts_are_examined_and_the_page_says_so(finished):
    done = of_run(finished, "audit.num_prompts=2")
    assert (done.run.num_texts, done.run.num_tokens) == (2, 32)
    assert "2 of the run's 4 prompts token by token (32 tokens)" in done.page()


def test_other_words_beside_run_are_refused_as_they_would_be_ignored(finished):
    for word in ("drafter=ngram", "sampling.temperature=1", "+audits=1", "~drafter"):
        with pytest.raises(UserError, match=r"run= takes the configuration of that run"):
            audit(compose([f"run={finished}"], "audit"), finished / "unused", [f"run={finished}", word])


def test_a_folder_that_is_no_run_is_refused_in_one_line(finished, home, tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            of_run(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no .hydra/config.yaml" in refusal(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    (broken / ".hydra").mkdir(parents=True)
    (broken / ".hydra" / "config.yaml").write_text("a: [", encoding="utf-8")
    assert "cannot read" in refusal(broken)
    (broken / ".hydra" / "config.yaml").write_text("- a\n", encoding="utf-8")
    assert "not the configuration of a run" in refusal(broken)
    (broken / ".hydra" / "config.yaml").write_text("stage: null\n", encoding="utf-8")
    assert "written by another specens" in refusal(broken)
    OmegaConf.save(compose(words(home)), broken / ".hydra" / "config.yaml")
    assert "no run to read" in refusal(broken)
    for name in ("prompts", "steps", "drafts"):
        (broken / f"{name}.parquet").write_bytes((finished / f"{name}.parquet").read_bytes())
    (broken / "summary.json").write_text('{"schema_version": 99}', encoding="utf-8")
    assert "schema version 99" in refusal(broken)


def test_the_door_says_errors_in_one_line_and_exits_with_1(tmp_path):
    command = [sys.executable, "-m", "specens.audit", "run=nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert sum("specens: run=" in line for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "word", ["audit.num_prompts=0", "audit.width=0", "audit.sampled_tokens=-1", "audit.temperature=0", "audit.width=x"]
)
def test_bad_options_are_refused(home, tmp_path, word):
    with pytest.raises(UserError, match=word.partition("=")[0]):
        audited(home, tmp_path / "run", word)


# What is broken is caught

HONEST = Coupled.__call__


def unseen(self, tree, answers):
    """Accepts a draft token without a look."""
    verdict = HONEST(self, tree, answers)
    return verdict if verdict.path or not len(tree) else Verdict((0,), answers.pick(0))


def second_best(self, tree, answers):
    """Takes the target's second best token now and then."""
    verdict = HONEST(self, tree, answers)
    if verdict.path or verdict.target_token % 5:
        return verdict
    return Verdict((), int(answers._logits[0].topk(2).indices[1]))


def dropping(self, tree, answers):
    """Loses the last accepted token of a step."""
    verdict = HONEST(self, tree, answers)
    return replace(verdict, path=verdict.path[:-1])


@pytest.mark.parametrize("broken", [unseen, second_best, dropping])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broken_verifier_is_caught(home, tmp_path, monkeypatch, broken, layout):
    monkeypatch.setattr(Coupled, "__call__", broken)
    drafter = ("drafter=oracle", "drafter.num_draft_tokens=2") if broken is dropping else ()
    done = audited(home, tmp_path / "run", f"layout={layout}", *drafter)
    assert not done.is_lossless and done.verdict.startswith("BUG")
    worst = max(done.run.forks, key=lambda fork: fork.margin)
    assert not worst.is_explained and worst.margin > 100 * done.run.noise_floor
    assert done.run.deficits.num_beyond > 0 and done.run.num_identical < 4
    page = " ".join(done.page().split())
    assert "BUG: fork" in page and "not explained by rounding" in page and "verdict BUG" in page


def outputs(folder: Path) -> list[list[int]]:
    return [list(map(int, ids)) for ids in pd.read_parquet(folder / "prompts.parquet")["output_ids"]]


def test_a_text_that_goes_on_after_its_end_is_caught(home, tmp_path, monkeypatch):
    audited(home, tmp_path / "first")
    eos = f"sampling.eos_token_ids=[{outputs(tmp_path / 'first')[0][5]}]"
    honest = audited(home, tmp_path / "honest", eos)
    assert honest.is_lossless and len(outputs(tmp_path / "honest")[0]) <= 6
    trim = StopRules.trim
    monkeypatch.setattr(StopRules, "trim", lambda self, *given: trim(replace(self, eos_ids=()), *given))
    done = audited(home, tmp_path / "run", eos)
    assert not done.is_lossless and done.verdict.startswith("BUG")
    assert "p0: it goes on after token" in done.run.faults[0] and "a wrong end: p0" in done.page()


def test_scores_that_depend_on_what_else_is_scored_are_no_rounding(home, tmp_path, monkeypatch):
    """A bug in scoring several tokens would also widen the noise floor, and so explain its own forks."""
    honest = Target._score_tree
    monkeypatch.setattr(Target, "_score_tree", lambda *given: honest(*given) * torch.linspace(0.5, 1.5, 259))
    monkeypatch.setattr("specens.speculator.self_check", lambda target, layout: None)
    done = audited(home, tmp_path / "run")
    assert not done.is_lossless and done.run.identity == "BUG"
    assert done.run.noise_floor > done.run.noise_limit and "that is no rounding" in done.page()


@pytest.fixture(scope="module")
def near_folder(home, tokenizer) -> Path:
    """A model near the tiny target, to load as a drafter."""
    folder = home / "near"
    like(random_model(), 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("verifier", ["per_row", "typical"])
def test_a_verifier_that_changes_the_law_is_caught_from_the_command_line(
    home, tmp_path, monkeypatch, near_folder, verifier
):
    given = words(home, f"verifier={verifier}", "sampling.temperature=1", "sampling.top_k=8", "hydra.run.dir=here")
    team = [f"~drafter@drafter.members.{name}" for name in ("ngram", "quantized")]
    for name in ("a", "b", "c"):
        member = f"drafter.members.{name}"
        team += [f"+drafter@{member}=lm", f"model@{member}.model=local", f"{member}.model.source={near_folder}"]
        team += [f"{member}.num_draft_tokens=1"]
    assert (
        door(main, monkeypatch, tmp_path, *given, *team, "sampling.max_new_tokens=60", "audit.sampled_tokens=400") == 2
    )
    content = json.loads((tmp_path / "here" / "audit.json").read_text(encoding="utf-8"))
    assert (content["is_lossless"], content["run"]["law"]) == (False, "NOT LOSSLESS")
    assert content["subject"]["lossy"] and "LOSSY" in content["verdict"]
    assert max(abs(row["z"]) for row in content["run"]["statistics"]) > content["run"]["z_bound"]
    page = (tmp_path / "here" / "audit.txt").read_text(encoding="utf-8")
    assert "REJECTED" in page and f"verifier={verifier} (LOSSY" in page


# Rounding


def test_half_precision_forks_are_explained_and_never_called_identical(home, tmp_path, monkeypatch):
    """Scores of the run move by a bfloat16 unit or two, as they do where kernels differ by the width of a forward."""
    honest = Target._score_tree

    def rounded(self, cache, last_token, tree):
        logits = honest(self, cache, last_token, tree)
        noise = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).reshape(logits.shape) * 2**-7
        return (logits.float() * (1 + noise)).to(logits.dtype)

    monkeypatch.setattr(Target, "_score_tree", rounded)
    done = audited(home, tmp_path / "run", "target.dtype=bfloat16", "sampling.max_new_tokens=128")
    assert done.is_lossless and done.run.identity == "explained by rounding" and done.run.num_identical < 4
    assert done.run.forks and all(fork.is_explained for fork in done.run.forks)
    assert done.run.reference == "a float32 copy of the target, in one forward"
    assert done.run.deficits.share > 0 and done.run.deficits.num_beyond == 0
    assert "identical, " not in done.verdict and "explained by rounding" in done.page()


def test_a_fork_is_explained_only_by_a_near_tie_of_both_tokens():
    assert is_explained(0.019, 0.02, 0.01, 0.01, same_as_control=False)
    assert not is_explained(0.021, 0.0, 0.01, 0.01, same_as_control=True)  # plain decoding is sure of its token
    assert not is_explained(
        0.0, 0.021, 0.01, 0.01, same_as_control=True
    )  # the reference has better ones than these two
    assert is_explained(0.0, 0.03, 0.01, 0.02, same_as_control=False)
    assert is_explained(math.inf, 0.0, 0.01, 0.01, same_as_control=True)  # cut off by top-p: plain decoding does so too
    assert not is_explained(math.inf, 0.0, 0.01, 0.01, same_as_control=False)


def test_the_noise_floor_is_a_percentile_with_a_least_value():
    differences = np.array([[0.0, -0.5], [0.25, np.nan]])
    assert noise_floor(differences, 10.0, 2**-23) == 0.5
    assert noise_floor(np.linspace(0, 1, 10001), 1.0, 2**-23) == pytest.approx(0.999)
    assert noise_floor(np.zeros(4), 16.0, 2**-23) == 16 * 4 * 2**-23
    assert noise_floor(np.zeros(4), 16.0, 2**-7) == 16 * 2**-7
    assert noise_floor(np.array([np.inf, np.nan]), 1.0, 0.5) == 0.5
    assert noise_limit(16.0, 2**-8) == 1.0


def test_deficits_count_those_beyond_twice_the_floor():
    assert deficits_of(np.array([0.0, 0.0, 0.2, 0.05]), 0.05) == Deficits(0.5, 0.2, 1)
    assert deficits_of(np.array([]), 0.05) == Deficits(0.0, 0.0, 0)


def a_fork(*, is_explained: bool) -> Fork:
    return Fork("p", 0, 3, 1, 2, "walk", 1.0, 1.0, 1, 2, 1.0, is_explained)


def test_the_verdict_is_the_worst_of_what_was_found():
    none = Deficits(0.0, 0.0, 0)
    assert identity_verdict([], [], none, is_noise=True, is_more=False) == "identical"
    assert (
        identity_verdict([a_fork(is_explained=True)], [], none, is_noise=True, is_more=False) == "explained by rounding"
    )
    for forks, faults, deficits, is_noise, is_more in (
        ([a_fork(is_explained=True), a_fork(is_explained=False)], [], none, True, False),
        ([], ["p: it is empty"], none, True, False),
        ([], [], Deficits(0.1, 1.0, 1), True, False),
        ([], [], none, False, False),
        ([], [], none, True, True),
    ):
        assert identity_verdict(forks, faults, deficits, is_noise=is_noise, is_more=is_more) == "BUG"


def test_more_forks_than_the_control_are_told_from_chance():
    assert not more_than_control(0, 0)
    assert not more_than_control(10, 4)
    assert more_than_control(30, 0)
    assert not more_than_control(30, 15)
    assert more_than_control(300, 60)


def test_wrong_ends_are_named():
    stop = StopRules(6, (9,))

    def fault(output, reason, baseline=None):
        return end_fault(stop, Text("p", (1, 2), tuple(output), reason, 0, baseline))

    assert fault([3, 9], "eos") is None
    assert fault([3, 4, 5, 6], "length") is None
    assert fault([], None) == "it is empty"
    assert "goes on after token 2" in fault([3, 9, 4], "eos")
    assert "no stop rule does" in fault([3, 4], "eos")
    assert "ends for eos, and says length" in fault([3, 9], "length")
    assert "baseline on file 1" in fault([3, 9], "eos", (3,))


def test_a_baseline_that_differs_is_examined_and_has_to_be_explained(tiny):
    output = tuple(plain_greedy(tiny, [5, 6, 7], 8))
    other = (*output[:4], (output[4] + 1) % 128, *output[5:])
    texts = [Text(str(i), (5, 6, 7), output, "length", 0, output) for i in range(9)]
    texts[5] = replace(texts[5], baseline_ids=other)
    assert [text.prompt_id for text in chosen(texts, 3)] == ["0", "3", "5", "6"]
    assert [text.prompt_id for text in chosen(texts, 30)] == [str(i) for i in range(9)]
    decoder = decoder_of(tiny, Ensemble({}))
    found = examine(decoder, SamplingOptions(max_new_tokens=8).generation_config(decoder.target), [texts[5]], 4)
    (fork,) = found.forks
    assert (fork.source, fork.position, fork.plain, fork.said) == ("baseline", 4, other[4], output[4])
    assert not fork.is_explained and found.identity == "BUG" and not found.is_lossless


# The law


def test_z_is_excess_over_deviation_and_small_counts_are_held_back():
    assert z_score(30.0, 20.0, 25.0, 0.0) == 2.0
    assert z_score(10.0, 20.0, 25.0, 0.0) == -2.0
    assert z_score(5.0, 5.0, 0.0, 1 / 3) == 0.0
    # One event of probability 0.001: over nine deviations, and nothing to speak of.
    assert z_score(1.0, 0.001, 0.001, 0.0) > 30 and z_score(1.0, 0.001, 0.001, 1 / 3) < 2
    # A token that the target never says, said a hundred times.
    assert z_score(100.0, 0.0, 0.0, 1 / 3) > 10
    found = statistic("event", [Term(1.0, 0.5, 0.25)] * 3 + [Term(0.0, 0.5, 0.25)])
    assert (found.num_tokens, found.observed, found.expected, found.variance) == (4, 3.0, 2.0, 1.0)
    assert found.z == pytest.approx(1 / math.sqrt(1 + 1 / 3))
    assert z_bound(1) == pytest.approx(3.8906, abs=1e-4) and z_bound(8) > z_bound(2)
    assert not is_rejected(()) and is_rejected((replace(found, z=-5.0),))


def test_moments_and_functions_of_a_hand_made_law():
    probs = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    law = torch.tensor([0.2, 0.8, 0.0, 0.0], dtype=torch.float64)
    draft = Draft((1, 2, 3, 0), (-1, 0, -1, -1), (0, 0, 1, 1), laws=(law, law, None, None))
    laws, drawn, certain = first_proposals(draft)
    assert set(laws) == {0} and drawn == {0: 1} and certain == {1: [3, 0]}
    found = functions(probs, draft, (Member("a", 1, 1), Member("b", 1, 1)))
    assert list(found) == [SURPRISE, BEST, FAVOURED, SUPPORT, "log q of a", drawn_by("a"), "b is certain of it"]
    assert found[drawn_by("a")].tolist() == [0, 1, 0, 0]
    assert found[BEST].tolist() == [1, 0, 0, 0]
    assert found[FAVOURED].tolist() == [0, 1, 0, 1]  # the last one is 0 under both
    assert found["b is certain of it"].tolist() == [1, 0, 0, 1]
    assert found[SUPPORT].tolist() == [1, 1, 0, 2]
    assert found["log q of a"].tolist() == pytest.approx([math.log(0.2), math.log(0.8), -20, -20])
    best = term(found[BEST], probs, 1)
    assert best == Term(0.0, 0.5, 0.25)
    surprise = term(found[SURPRISE], probs, 0)
    assert surprise.value == pytest.approx(math.log(2)) and surprise.mean == pytest.approx(1.5 * math.log(2))
    assert surprise.variance == pytest.approx(0.25 * math.log(2) ** 2)


def like(model, seed: int, noise: float = 0.05):
    """A model near `model`."""
    near = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return near


def decoder_of(model, drafter, verifier=None) -> Decoder:
    return Speculator(Decoder(Target(model), drafter, FixedBudget(), verifier or Coupled(), "tree")).decoder


def sampled(decoder: Decoder, num_texts: int, length: int, seed: int, top_k: int = 8) -> Evidence:
    config = SamplingOptions(max_new_tokens=length, temperature=1.0, top_k=top_k).generation_config(decoder.target)
    texts = []
    for number in range(num_texts):
        prompt = (3 + number % 7, 5, 8)
        done = Speculator(decoder).complete(prompt, config, seed=seed, prompt_key=str(number))
        texts.append(Text(str(number), prompt, done.output_ids, done.finish_reason, seed))
    return examine(decoder, config, texts, 4)


@pytest.fixture(scope="module")
def team(tiny):
    near = {
        f"near{number}": LanguageModel(like(tiny, 1), name=f"near{number}", num_draft_tokens=1) for number in range(3)
    }
    return Ensemble({**near, "fixed": Fake(lambda context: [context[-1]], "fixed")})


@pytest.mark.parametrize("verifier", [Coupled(), Residual()], ids=lambda verifier: verifier.name)
def test_z_of_honest_text_is_that_of_a_normal_number(tiny, team, verifier):
    decoder = decoder_of(tiny, team, verifier)
    zs = []
    for seed in range(4):
        found = sampled(decoder, 4, 25, seed)
        assert found.law == "law not rejected" and found.is_lossless
        assert {row.name for row in found.statistics} >= {
            SURPRISE,
            BEST,
            FAVOURED,
            SUPPORT,
            "log q of near2",
            "fixed is certain of it",
        }
        zs += [row.z for row in found.statistics]
    assert max(map(abs, zs)) < 4
    assert 0.3 < np.mean(np.square(zs)) < 2.5


def test_biased_text_is_rejected_and_the_control_shows_that_it_would_be(tiny, team):
    honest = sampled(decoder_of(tiny, team, Residual()), 6, 50, seed=1)
    assert honest.law == "law not rejected"
    assert is_rejected(honest.control) and honest.num_contested > 0.9 * honest.num_tokens
    biased = sampled(decoder_of(tiny, team, PerRow()), 6, 50, seed=1)
    assert biased.law == "NOT LOSSLESS" and not biased.is_lossless and biased.identity is None


class Liar(Fake):
    """Draws from a law with one peak; or takes the peak each time, and says that it was drawn from the whole law."""

    def __init__(self, *, honest: bool) -> None:
        super().__init__(lambda context: [], "liar", 1)
        self.honest = honest

    def propose(self, context_ids, plan, sampler):
        peak = (7 * context_ids[-1] + 3) % 128
        ((token, law),) = sampler.draw(context_ids, torch.zeros(128).index_fill(0, torch.tensor(peak), 3.0))
        return Draft.chain([token if self.honest else peak], [law])


def test_a_drafter_that_lies_about_its_law_is_caught_by_what_it_draws(tiny):
    honest = sampled(decoder_of(tiny, Ensemble({"liar": Liar(honest=True)}), Residual()), 8, 60, seed=1, top_k=0)
    lying = sampled(decoder_of(tiny, Ensemble({"liar": Liar(honest=False)}), Residual()), 8, 60, seed=1, top_k=0)
    assert honest.law == "law not rejected"
    assert lying.law == "NOT LOSSLESS"
    shown = next(row for row in lying.statistics if row.name == drawn_by("liar"))
    assert shown.z > z_bound(len(lying.statistics))


def test_one_token_that_cannot_be_is_proof_enough(tiny):
    decoder = decoder_of(tiny, Ensemble({"liar": Liar(honest=True)}), Residual())
    config = SamplingOptions(max_new_tokens=12, temperature=1.0, top_k=4).generation_config(decoder.target)
    done = Speculator(decoder).complete((3, 5, 8), config, seed=0, prompt_key="p")
    text = Text("p", (3, 5, 8), done.output_ids, done.finish_reason, 0)
    assert examine(decoder, config, [text], 4).impossible == ()
    with torch.no_grad():
        logits = tiny(torch.tensor([[3, 5, 8, *done.output_ids[:-1]]])).logits[0, -1]
    worst = replace(text, output_ids=(*done.output_ids[:-1], int(logits.argmin())))
    found = examine(decoder, config, [worst], 4)
    assert found.impossible == (f"token {int(logits.argmin())} at position 14",)
    assert found.law == "NOT LOSSLESS" and not found.is_lossless


def test_a_lossy_verifier_is_never_called_lossless_where_text_was_sampled(home, tmp_path):
    few = ("audit.num_prompts=1", "sampling.max_new_tokens=2", "verifier=typical")
    greedy = audited(home, tmp_path / "greedy", *few)
    assert greedy.is_lossless and "LOSSY verifier" in greedy.verdict
    assert not audited(home, tmp_path / "sampled", *few, "sampling.temperature=1").is_lossless


def test_a_token_that_the_target_lacks_is_bad_input(finished):
    folder = finished.parent / "beyond"
    shutil.copytree(finished, folder)
    table = pq.read_table(folder / "prompts.parquet")
    rows = table.to_pylist()
    rows[0]["output_ids"][0] = 10**6
    pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / "prompts.parquet")
    with pytest.raises(UserError, match=r"prompt p0 has token 1000000, the target has the ids 0\.\.258"):
        audit(compose([f"run={folder}"], "audit"), folder, [f"run={folder}"])


def test_the_control_would_pass_if_it_were_fair(tiny, team, monkeypatch):
    """What rejects it is its bias, not that it sees the proposals which the statistics are made of."""
    monkeypatch.setattr("specens.evidence.examine.Stream", functools.partial(Stream, control=Residual()))
    fair = sampled(decoder_of(tiny, team, Residual()), 6, 50, seed=1)
    assert not is_rejected(fair.control)


def test_the_control_needs_two_members(home, tmp_path):
    done = audited(home, tmp_path / "run", "drafter=ngram", "sampling.temperature=1")
    assert done.run.num_contested == 0 and "not possible" in done.page()
    assert done.content()["run"]["is_caught"] is False


def test_members_are_asked_in_step_with_the_text(tiny):
    """Every drafter sees the very contexts that the text has, whoever wrote it."""
    seen: list[tuple[int, ...]] = []
    fake = Fake(lambda context: seen.append(tuple(context)) or [1], "watch")
    found = sampled(decoder_of(tiny, Ensemble({"watch": fake})), 1, 10, seed=0)
    begin = next(i for i in range(len(seen) - 9) if [len(ids) for ids in seen[i:]] == list(range(3, 13)))
    assert found.num_tokens == 10 and [len(ids) for ids in seen[begin:]] == list(range(3, 13))
    assert [commit.path for commit in fake.commits] == [()] * 10
    assert seen[-1] == (3, 5, 8, *(commit.token_ids[0] for commit in fake.commits[:-1]))


def test_options_have_defaults():
    assert Options() == Options(8, None, 1.0, 8)
    assert [Options().num_sampled(is_sampled=sampled) for sampled in (False, True)] == [512, 1024]
    assert Options(sampled_tokens=7).num_sampled(is_sampled=True) == 7
