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


def errors_of(code: str) -> str:
    """What a Python of its own prints to stderr, with its exit code if that is not 0."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def test_reading_and_analysing_runs_needs_no_torch_and_importing_the_package_loads_nothing():
    assert errors_of(PURE.format(heavy=HEAVY)) == ""


@pytest.mark.parametrize("room", ["analysis", "records", "replay", "report"])
def test_a_whole_room_needs_no_torch(room):
    assert errors_of(ROOMS.format(room=room)) == ""
