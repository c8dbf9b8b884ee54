"""trace=dense: what is on disk for replay. (That it is what all members would have proposed is law
6.)
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers import Fake, run_drafter, summary_of, texts_file

from specens.config.compose import compose, resolved
from specens.decoding.types import Draft
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.errors import UserError
from specens.models.tiny import random_model
from specens.records.files import DENSE_NAME
from specens.records.reader import load, load_dense
from specens.records.schema import NO_CONFIDENCE
from specens.run import run

COUNT = 12
NODE = resolved(compose(["budget=fixed"]).budget)
"""The budget's own configuration, from which replay builds it."""


def ensemble():
    """A lookup, a model that stops early, and one without confidences."""
    lookup = NGram(4, num_continuations=2)
    model = LanguageModel(random_model(seed=9), 3)
    return Ensemble(
        {
            "ngram": lookup,
            "lm": model,
            "fake": Fake(lambda context: Draft.chain(context[-1:]), "fake"),
        }
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The same run with a dense trace and without."""
    home = tmp_path_factory.mktemp("dense")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(home / "cache"))
        for trace in ("dense", "steps"):
            given = {"trace": trace, "budget_node": NODE}
            run_drafter(home / trace, ensemble(), texts_file(home / "texts"), **given)
    return home / "dense", home / "steps"


def test_every_member_has_a_proposal_at_every_position_of_every_text(folders):
    dense, facts = load_dense(folders[0])
    prompts = load(folders[0]).prompts
    assert [member["name"] for member in facts["members"]] == ["ngram", "lm", "fake"]
    assert [member["stops_early"] for member in facts["members"]] == [False, True, False]
    assert facts["budget"] == {"name": "fixed", "node": NODE}
    assert facts["layout"] == "tree"
    for prompt in prompts.itertuples():
        own = dense[dense["prompt_id"] == prompt.prompt_id]
        length = len(prompt.output_ids)  # pyright: ignore[reportArgumentType]
        assert own["position"].tolist() == [
            position for position in range(length) for _ in range(3)
        ]
        assert own["drafter"].tolist() == ["ngram", "lm", "fake"] * length
        assert (own["tokens_wanted"] + own["position"] == COUNT).all()
    last = dense[dense["tokens_wanted"] == 1]
    assert len(last) and not last["token_ids"].map(len).any(), (
        "where one token is wanted no member drafts"
    )


def test_the_trace_holds_what_the_steps_of_the_run_hold(folders):
    dense, _ = load_dense(folders[0])
    found = load(folders[0])
    steps, drafts = found.steps, found.drafts
    steps["position"] = steps.groupby("prompt_id")["num_emitted"].cumsum() - steps["num_emitted"]
    joined = drafts.merge(steps[["prompt_id", "step", "position"]]).merge(
        dense, on=["prompt_id", "position", "drafter"]
    )
    assert len(joined) == len(drafts) and joined["num_drafted"].sum() > 0
    assert (joined["token_ids"].map(len) == joined["num_drafted"]).all()


def test_a_dense_trace_changes_no_step_and_costs_the_run_nothing_that_is_counted(folders):
    counts = ["prompt_id", "step", "num_nodes", "num_accepted", "num_emitted"]
    with_trace, without = (load(folder).steps for folder in folders)
    pd.testing.assert_frame_equal(with_trace[counts], without[counts])
    assert with_trace["logit_gaps"].map(len).tolist() == with_trace["num_emitted"].tolist()
    assert min(min(gaps) for gaps in with_trace["logit_gaps"]) >= 0
    assert without["logit_gaps"].isna().all()
    assert (folders[0] / "costs.json").is_file() and not (folders[1] / "costs.json").exists()
    assert not (folders[1] / DENSE_NAME).exists()


def test_confidences_are_kept_to_their_last_digit_and_a_lack_of_them_is_recorded(folders):
    dense, _ = load_dense(folders[0])
    rows = dense.explode("confidences").dropna(subset=["confidences"])
    confidences = rows.groupby("drafter")["confidences"]
    assert set(confidences.get_group("fake")) == {NO_CONFIDENCE}
    own = confidences.get_group("lm")
    assert own.between(0, 10_000).all() and own.nunique() > 5


def test_the_run_ends_with_its_replay_and_its_page_shows_every_subset(folders):
    content = json.loads((folders[0] / "replay.json").read_text(encoding="utf-8"))
    assert (
        content["live"]["num_steps"] == len(load(folders[0]).steps)
        and content["live"]["num_different"] == 0
    )
    assert len(content["subsets"]) == 8 and content["status"] == "finished"
    pages = [(folder / "report.html").read_text(encoding="utf-8") for folder in folders]
    assert ["The best subsets" in page for page in pages] == [True, False]
    assert not (folders[1] / "replay.json").exists()


def test_a_trace_that_cannot_be_replayed_says_why_and_the_run_is_finished(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    run_drafter(
        tmp_path / "run",
        Ensemble({f"n{count}": NGram(2) for count in range(11)}),
        texts_file(tmp_path / "texts"),
        trace="dense",
        budget_node=NODE,
    )
    assert "not replayed: 11 members make 2048 subsets" in capsys.readouterr().out
    assert (
        summary_of(tmp_path / "run")["status"] == "finished"
        and (tmp_path / "run" / "report.html").is_file()
    )


def test_a_failed_prompt_leaves_no_rows_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    texts = ["abcabcabc", "x" * 5000, "xyxyxy"]  # the second is longer than the target's context
    run_drafter(tmp_path / "run", ensemble(), texts_file(tmp_path / "texts", texts), trace="dense")
    assert summary_of(tmp_path / "run")["num_failed"] == 1
    assert set(load_dense(tmp_path / "run")[0]["prompt_id"]) == {"p0", "p2"}


def test_where_drafts_decide_the_text_there_is_no_dense_trace(tmp_path):
    overrides = [
        "experiment=smoke",
        "drafter=ngram",
        "verifier=residual",
        "sampling.temperature=1",
        "trace=dense",
    ]
    with pytest.raises(UserError, match=r"trace=dense.*residual.*coupled"):
        run(compose(overrides), tmp_path / "run")


def test_other_readers_pass_a_dense_trace_by_and_its_own_names_what_is_wrong(folders, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folders[0])
    with pytest.raises(UserError, match=r"no dense trace.*trace=dense"):
        load_dense(folders[1])
    (tmp_path / DENSE_NAME).write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="cannot be read"):
        load_dense(tmp_path)
    table = pq.read_table(folders[0] / DENSE_NAME)
    pq.write_table(
        table.replace_schema_metadata({b"specens_schema_version": b"5"}), tmp_path / DENSE_NAME
    )
    with pytest.raises(UserError, match="schema version 5"):
        load_dense(tmp_path)
    pq.write_table(table.drop_columns(["confidences"]), tmp_path / DENSE_NAME)
    with pytest.raises(UserError, match="lacks the columns confidences"):
        load_dense(tmp_path)
    metadata = {
        key: value for key, value in table.schema.metadata.items() if key != b"specens_trace"
    }
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / DENSE_NAME)
    with pytest.raises(UserError, match="specens_trace"):
        load_dense(tmp_path)
    assert json.loads(table.schema.metadata[b"specens_trace"])["eos_token_ids"] is not None
