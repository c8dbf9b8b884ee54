"""What can be imported without the heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import REPOSITORY

HEAVY = ("torch", "transformers", "wandb", "hydra", "bitsandbytes", "matplotlib")

PURE = """
import sys
for name in {heavy}:
    sys.modules[name] = None  # importing it now fails
import specens
assert not {{"pandas", "pyarrow", "numpy"}} & set(sys.modules), "import specens must be instant"
import specens.analysis.metrics, specens.analysis.figures.run, specens.analysis.sweeps
import specens.analysis.figures.subsets, specens.report.page, specens.replay.whatif
import specens.decoding.budgets.base, specens.decoding.types, specens.records.writer
specens.load
"""

ROOMS = """
import importlib, pkgutil, sys
room = importlib.import_module("specens.{room}")
for module in pkgutil.walk_packages(room.__path__, "specens.{room}."):
    importlib.import_module(module.name)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""


def run(code: str) -> None:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reading_and_analysing_runs_needs_no_torch_and_importing_the_package_loads_nothing():
    run(PURE.format(heavy=HEAVY))


@pytest.mark.parametrize("room", ["analysis", "records", "replay", "report"])
def test_a_whole_room_needs_no_torch(room):
    run(ROOMS.format(room=room))
