"""The table of a sweep: jobs named by the overrides that differ, numbers as their summaries have
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specens.analysis.sweeps import sweep_drafters, sweep_table, swept_overrides
from specens.errors import UserError
from specens.records.reader import load
from specens.records.writer import RunWriter


def job(run: str, *given: str, **numbers: Any) -> dict[str, Any]:
    overrides = dict(override.split("=") for override in given)
    return {"run": run, "overrides": overrides, "status": "finished", **numbers}


def test_overrides_that_all_jobs_share_name_none_of_them():
    jobs = [job(str(n), "layout=tree", f"budget.max_nodes={n}") for n in (8, 16)]
    assert swept_overrides(jobs) == ["budget.max_nodes"]


def test_jobs_are_sorted_by_number_and_not_as_text():
    sizes = enumerate((16, 8, 128))
    jobs = [job(str(place), f"budget.max_nodes={n}", speedup=n / 8) for place, n in sizes]
    table = sweep_table(jobs)
    assert table["budget.max_nodes"].tolist() == [8, 16, 128]
    assert table["speedup"].tolist() == [1.0, 2.0, 16.0]
    assert table["run"].tolist() == ["1", "0", "2"]


def test_values_that_are_no_numbers_stay_text_and_one_not_given_is_missing():
    table = sweep_table([job("0", "layout=rows"), job("1", "layout=tree", "budget=fixed")])
    assert table["layout"].tolist() == ["rows", "tree"]
    assert table["budget"].isna().tolist() == [True, False]


def test_a_failed_job_keeps_its_row_without_numbers():
    failed = job("0", "layout=rows") | {"status": "failed"}
    table = sweep_table([failed, job("1", "layout=tree", speedup=1.5)])
    assert table["status"].tolist() == ["failed", "finished"]
    assert table["speedup"].isna().tolist() == [True, False]


def test_a_metric_of_ones_own_is_a_column_after_ours_also_if_only_some_jobs_have_it():
    texts = {"title": "long steps", "form": ".1%", "unit": "%", "meaning": "long ones"}
    own = [
        {"key": "long_step_rate", "scope": "run", **texts},
        {"key": "first_token_rate", "scope": "drafter", **texts},
        "not a definition",
    ]
    measured = job("1", "layout=tree", long_step_rate=0.25, metrics=own)
    table = sweep_table([job("0", "layout=rows"), measured])
    assert table.columns[-1] == "long_step_rate"
    assert table["long_step_rate"].isna().tolist() == [True, False]
    assert "first_token_rate" not in table and "speedup" in table


def test_drafters_have_a_row_per_job_and_scalars_only():
    drafters = {"a": {"win_rate": 0.5, "acceptance_by_depth": [1.0, 0.5]}, "b": {"win_rate": None}}
    jobs = [job("0", "layout=rows", drafters=drafters), job("1", "layout=tree", drafters={})]
    table = sweep_drafters(jobs)
    assert list(table.columns) == ["layout", "run", "drafter", "win_rate"]
    assert table["drafter"].tolist() == ["a", "b"]
    assert table["win_rate"].isna().tolist() == [False, True]
    assert sweep_drafters([job("0", "layout=rows"), job("1", "layout=tree")]).empty


@pytest.mark.parametrize(
    ("jobs", "fault"),
    [
        ([], "no job: a sweep has at least two jobs"),
        ([job("only", "layout=tree")], "only: a sweep has at least two jobs"),
        ([job("0", "layout=tree"), job("1", "layout=tree")], "0, 1: the jobs do not differ"),
    ],
)
def test_what_is_no_sweep_is_named_in_one_line(jobs: list[dict[str, Any]], fault: str):
    with pytest.raises(UserError, match=fault):
        sweep_table(jobs)


def test_a_sweeps_folder_gives_each_job_its_overrides(tmp_path: Path):
    for index, given in enumerate(('["layout=rows", "prompts.texts=[a=b]"]', "- layout=tree")):
        RunWriter(tmp_path / str(index)).write_summary({"status": "finished"})
        hydra = tmp_path / str(index) / ".hydra"
        hydra.mkdir()
        (hydra / "overrides.yaml").write_text(given, encoding="utf-8")
    RunWriter(tmp_path / "other").write_summary({"status": "finished"})
    overrides = {summary["run"]: summary["overrides"] for summary in load(tmp_path).summaries}
    assert overrides == {
        "0": {"layout": "rows", "prompts.texts": "[a=b]"},
        "1": {"layout": "tree"},
        "other": {},
    }


@pytest.mark.parametrize("content", ["[1, 2]", "{", "7"])
def test_overrides_that_cannot_be_read_are_named(tmp_path: Path, content: str):
    for name in ("good", "bad"):
        RunWriter(tmp_path / name).write_summary(json.loads('{"status": "finished"}'))
    (tmp_path / "bad" / ".hydra").mkdir()
    (tmp_path / "bad" / ".hydra" / "overrides.yaml").write_text(content, encoding="utf-8")
    fault = r"skipped .*bad.summary.json: .*overrides.yaml is not a list of overrides"
    with pytest.warns(UserWarning, match=fault):
        assert [summary["run"] for summary in load(tmp_path).summaries] == ["good"]
