"""The notebooks run on the run that is committed for them, answer with figures and tables, and are
committed without outputs.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pyarrow.parquet as pq
import pytest

import specens
from specens.replay.files import read_trace
from specens.replay.study import replay_of, same_steps

FOLDER = Path(__file__).parent.parent / "notebooks"
DATA = FOLDER / "data"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

MOST_BYTES = 500_000
"""Of all committed data."""


@pytest.fixture(scope="module", autouse=True)
def _font_cache():
    """matplotlib warns when it has to make one; here, and not in the first notebook."""
    importlib.import_module("matplotlib.font_manager")


def by_name(path: Path) -> str:
    return path.stem


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path: Path, num_cells: int | None = None, **options: Any) -> Any:
    """The notebook with the outputs of its cells (or of the first `num_cells`), executed as Jupyter
    does, in its own folder.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = notebook.cells[:num_cells]
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources, **options).execute()
    return notebook


def failure(path: Path) -> list[str]:
    """What a reader sees below the first code cell, which fails: lines."""
    (output,) = code_cells(executed(path, num_cells=2, allow_errors=True))[0].outputs
    return "\n".join(output.traceback).splitlines()


def test_there_are_four():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_is_committed_without_outputs_or_traces_of_who_ran_it(path: Path):
    content = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(content)
    for cell in content["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, (
                "strip it: nbstripout --keep-id notebooks/*.ipynb"
            )
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in content["metadata"]["language_info"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_every_cell_answers_with_a_figure_or_a_table(path: Path):
    for cell in code_cells(executed(path)):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert kinds & {"image/png", "text/html"}, cell.source
        streams = [output.text for output in cell.outputs if output.output_type == "stream"]
        assert not streams, "nothing is printed, and nothing warns"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_names_in_one_line_the_folder_that_it_looked_for(
    path: Path, tmp_path: Path, monkeypatch
):
    for variable in ("SPECENS_RUN", "SPECENS_SWEEP"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    (line,) = failure(path)
    assert line.startswith("UserError: ") and str(tmp_path / "nowhere") in line


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.name[:2] in ("02", "04")], ids=by_name
)
def test_a_run_without_a_dense_trace_is_named_with_the_way_to_make_one(
    path: Path, tmp_path: Path, monkeypatch
):
    shutil.copytree(DATA / "run", tmp_path / "run", ignore=shutil.ignore_patterns("dense.parquet"))
    monkeypatch.setenv("SPECENS_RUN", str(tmp_path / "run"))
    (line,) = failure(path)
    assert str(tmp_path / "run") in line and "trace=dense" in line


def committed() -> Iterator[tuple[Path, str]]:
    """Every committed data file as text."""
    for path in sorted(path for path in DATA.rglob("*") if path.is_file()):
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                yield path, json.dumps(file.read().to_pylist(), default=str)
        else:
            yield path, path.read_text(encoding="utf-8")


def test_the_committed_data_is_small_and_tells_nothing_of_the_machine():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < MOST_BYTES
    for path, text in committed():
        found = re.search(r"(?<![\w.:/<])/(home|root|tmp|work|mnt|Users|usr)/", text)
        assert found is None, f"{path}: {text[max(found.start() - 40, 0) : found.end() + 40]}"
        assert "glibc" not in text and "hostname" not in text


def test_the_committed_run_is_what_the_notebooks_describe():
    run = specens.load(DATA / "run")
    assert run.prompts["error"].isna().all() and run.prompts["is_identical"].all()
    assert len(specens.load(DATA / "sweep").summaries) == 3


def test_the_committed_trace_replays_to_the_committed_run():
    trace, live = read_trace(DATA / "run")
    assert len(trace.members) == 5
    assert same_steps(live.steps, replay_of(trace, live))["num_different"] == 0
