"""The GPU scripts run on a CPU: a measurement there should not become a debugging session."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specens.decoding.budgets.costs import CostTable

FOLDER = Path(__file__).parent.parent / "experiments" / "gpu"


TINY = ("--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--contexts", "40", "70")


def cost_table(path: Path, *given: str) -> Any:
    spec = importlib.util.spec_from_file_location("cost_table", FOLDER / "cost_table.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTHS, module.REPEATS = (1, 2, 4), 2
    module.main((*TINY, "--out", str(path), *given))
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_cost_table_is_complete_and_readable(tmp_path):
    path = tmp_path / "new" / "tiny.json"
    written = cost_table(path, "--compiled", "true", "--quantization", "none")
    assert set(written["contexts"]) == {"40", "70"}
    for entry in written["contexts"].values():
        assert entry["compiled"] is True and entry["reason"] is None
        assert [nodes for nodes, _ in entry["verify_ms"]] == [0, 1, 3]
        assert CostTable.of(entry).verify(3) > 0
    assert set(written["reads"]["reads"]) == {2}
    assert written["left_out"] == ["quantized"]


def test_what_there_was_no_time_for_is_named(tmp_path):
    written = cost_table(tmp_path / "tiny.json", "--seconds", "0")
    assert written["contexts"] == {}
    assert written["left_out"] == ["context 40", "context 70", "reads", "quantized"]


@pytest.mark.parametrize("script", ["bench.sh", "train_drafters.sh"])
def test_scripts_are_well_formed(script):
    assert subprocess.run(["bash", "-n", str(FOLDER / script)]).returncode == 0
