"""What can be imported without the heavy packages."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
for name in ("torch", "transformers", "wandb", "hydra", "bitsandbytes", "matplotlib"):
    sys.modules[name] = None  # importing it now fails
import specens
assert not {"pandas", "pyarrow", "numpy"} & set(sys.modules), "import specens must be instant"
import specens.analysis.metrics, specens.analysis.html, specens.analysis.plots, specens.analysis.sweeps
import specens.analysis.team_plots, specens.analysis.whatif
import specens.decoding.budget, specens.decoding.types, specens.records
specens.load
"""


def test_reading_and_analysing_runs_needs_no_torch_and_importing_the_package_loads_nothing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
