"""experiments/06-growth/growth.py runs through on a tiny model, and its tables are whole."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from specens.bench.clock import Spent, Timed

SCRIPT = Path(__file__).parents[2] / "experiments" / "06-growth" / "growth.py"


@pytest.fixture(scope="module")
def growth() -> Any:
    spec = importlib.util.spec_from_file_location("growth", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def grown(growth, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))

    def run(what: str, *overrides: str) -> dict[str, Any]:
        small = ["--prompts=1", "--tokens=8", f"--out={tmp_path}", "bench.repeats=1"]
        base = ["model@target=tiny", "drafter=untrained", "bench.warm_up_tokens=2"]
        return growth.main([what, *small, *base, *overrides])

    return run


def test_context_and_the_lookups_alone(grown, tmp_path):
    done = grown("context", "drafter=ngram")
    both = [
        (row["context_tokens"], row["system"], row["identical"]) for row in done["growth_context"]
    ]
    assert both == [(504, "AR", "1/1"), (504, "drafted", "1/1")]  # the tiny target's context is 512
    lookups = done["growth_lookups"]
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    assert [row["context_tokens"] for row in lookups] == lengths
    assert all(row["propose_ms"] > 0 and row["drafter"] == "ngram" for row in lookups)
    with (tmp_path / "growth_context.csv").open(encoding="utf-8") as file:
        assert [line["system"] for line in csv.DictReader(file)] == ["AR", "drafted"]
    assert " 32768 |" in (tmp_path / "growth_lookups.md").read_text(encoding="utf-8")


def test_members(grown):
    rows = grown("members", "budget=fixed")["growth_members"]
    assert [row["system"] for row in rows] == ["AR", "1 (+ngram)", "2 (+quantized)"]
    assert all(row["identical"] == "1/1" for row in rows) and rows[0]["speedup"] == 1


def test_width(grown):
    rows = grown("width")["growth_width"]
    assert [row["num_nodes"] for row in rows] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert rows[0]["x_ar"] == 1
    assert all(0 < row["least_ms"] <= row["verify_ms"] <= row["most_ms"] for row in rows)


def test_output(grown):
    rows = grown("output", "drafter=ngram")["growth_output"]
    lengths = [row["output_tokens"] for row in rows if row["system"] == "AR"]
    assert lengths[:3] == [64, 128, 256] and 256 < lengths[3] < 512  # as far as the context goes
    assert all(row["identical"] == "1/1" for row in rows)


def test_a_shorter_decoding_is_the_first_steps_of_a_longer_one(growth):
    spent = (Spent(9, 9, 9), Spent(0.5, 1.0, 4), Spent(0.25, 1.0, 2))
    timed = Timed((1, 2, 3, 4, 5, 6), ((3, 10.0), (2, 12.0), (1, 14.0)), spent)
    assert growth.head(timed, 4).output_ids == (1, 2, 3, 4, 5)
    assert growth.head(timed, 3).emissions == ((3, 10.0),)
