"""Loading models: hub id, local folder, GGUF file; bitsandbytes; device and dtype.

The only file that knows bitsandbytes. Weights come from safetensors (or GGUF), never from pickles.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import logging
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specens.compat import attention_name
from specens.decoding.target.attention import use_grouped_attention
from specens.decoding.target.supported import takes
from specens.errors import UserError, check_choice, check_flag, one_line
from specens.models.cpu_linear import attend_exactly, pack, packed_bytes, packing, unpack

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
DEVICE_FORM = re.compile(r"(auto|cpu|cuda|mps|xpu)(:\d+)?")
QUANTIZATIONS = ("nf4", "fp4", "int8", "dynamic_int8")
DYNAMIC_INT8 = "dynamic_int8"
"""Not bitsandbytes': packed 8-bit weights for CPUs (specens.models.cpu_linear)."""
PROBE = "The quick brown fox, 1234 €; \n\tdef f(x): return x"
"""A text that tokenizers of one vocabulary, but with other rules, cut differently."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `last_logits_only` are the forward's arguments that spare it the logits
    nobody reads.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec | None = None
    last_logits_only: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        spec: ModelSpec | None = None,
    ) -> LoadedModel:
        keeps = takes(model, "logits_to_keep")
        return cls(model, tokenizer, spec, {"logits_to_keep": 1} if keeps else {})

    def facts(self) -> dict[str, Any]:
        """What a run's record says of the model: the real dtype and the bytes in memory, not what a
        file name promises.
        """
        return {
            "name": str(self.model.config.name_or_path),
            "model_type": self.model.config.model_type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "packed_weights": packing(self.model),
            "device": str(self.model.device),
            "attention": attention_name(self.model),
            "is_quantized": bool(getattr(self.model, "is_quantized", False)),
            "num_parameters": self.model.num_parameters(),
            "num_bytes": self.model.get_memory_footprint() + packed_bytes(self.model),
        }


class ModelRecipe(Protocol):
    """A model that has to be made on this machine before it can be loaded from a folder."""

    def check(self) -> None: ...

    def folder(self) -> Path: ...


@dataclass(frozen=True)
class ModelSpec:
    """What to load and how. `source` is a hub id, a folder, or a ModelRecipe; with `gguf_file`, a
    file in that folder or hub repository, which is unpacked into ordinary weights of `dtype`.

    On a CPU, weights of float32 and float16 are `packed` (specens.models.cpu_linear); with float16
    only the weights are rounded, and what is computed with them is float32.
    """

    source: str | ModelRecipe
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: Any = None
    attention: str = "sdpa"
    quantization: str | None = None
    packed: bool = True
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be known to be wrong before anything is loaded."""
        check_choice("model dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            check_quantization(self.quantization)
        check_flag("model packed", self.packed)
        check_flag("model trust_remote_code", self.trust_remote_code)
        if self.quantization == DYNAMIC_INT8 and self.torch_device() != "cpu":
            raise UserError(
                f"quantization={DYNAMIC_INT8} is for CPUs: use int8 or nf4, or device=cpu"
            )
        check_choice("model attention", self.attention, ATTENTIONS)
        if not DEVICE_FORM.fullmatch(self.device):
            raise UserError(f"model device={self.device}: give auto, cpu, cuda, cuda:1, mps or xpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"model device={self.device}: no CUDA device is available here; use device=auto or "
                "device=cpu"
            )
        if not isinstance(self.source, str):
            return self.source.check()
        path = Path(self.source).expanduser()
        if self.gguf_file is not None and path.is_dir() and not (path / self.gguf_file).is_file():
            raise UserError(f"model file {path / self.gguf_file} does not exist")
        looks_like_path = self.source.startswith((".", "/", "~")) or path.suffix == ".gguf"
        if looks_like_path and not path.exists():
            raise UserError(
                f"model path {path} does not exist; give a folder, a .gguf file or a hub id"
            )
        if path.is_dir() and self.gguf_file is None and not (path / "config.json").is_file():
            raise UserError(
                f"model folder {path} has no config.json; give a folder written by save_pretrained"
            )

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
            model = AutoModelForCausalLM.from_pretrained(
                location, **options, **self._load_options(gguf_file)
            )
            use_grouped_attention(model)
            fit_to_cpu(model)
            if self._is_on_cpu():
                model = self._with_packed(model)
        except Exception as error:  # every loader has its own exceptions; the user needs one line
            raise UserError(
                f"cannot load {self._label(location, gguf_file)}: {one_line(error)}"
            ) from error
        return LoadedModel.of(model.eval(), tokenizer, self)

    def load_for(self, target: Any) -> LoadedModel:
        """Load as a drafter of `target`."""
        return self.load()

    def _is_on_cpu(self) -> bool:
        return self.torch_device() == "cpu" and self.device_map is None

    def _with_packed(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.quantization == DYNAMIC_INT8:
            return int8_packed(model.float())
        if not self.packed or getattr(model, "is_quantized", False):
            return model
        dtype = model.dtype
        if dtype in (torch.float32, torch.float16):
            pack(model.float(), str(dtype).removeprefix("torch."))
        return model

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
        if self.quantization is not None and self.quantization != DYNAMIC_INT8:
            options["quantization_config"] = bitsandbytes_config(self.quantization)
        return options

    def _label(self, location: str, gguf_file: str | None) -> str:
        return f"{Path(location) / gguf_file}" if gguf_file else location


@dataclass(frozen=True)
class TargetCopy:
    """A quantised copy of whatever the target is, built from the target's own configuration:
    bitsandbytes' or, for CPUs, `dynamic_int8`.
    """

    quantization: str = "nf4"

    def check(self) -> None:
        check_quantization(self.quantization)

    def load_for(self, target: Any) -> LoadedModel:
        """Load the target's weights again, quantised. A target made in memory or unpacked from GGUF
        is written out first.
        """
        self.check()
        if self.quantization == DYNAMIC_INT8:
            return LoadedModel.of(_int8_copy(target, self.quantization), target.tokenizer)
        spec = target.origin
        if isinstance(spec, ModelSpec) and spec._location()[1] is None:
            return replace(spec, quantization=self.quantization).load()
        with tempfile.TemporaryDirectory(prefix="specens-") as folder:
            target.model.save_pretrained(folder)
            loaded = _load_quantized(folder, self.quantization, target.model)
        loaded.config.name_or_path = f"{target.name} ({self.quantization})"
        return LoadedModel.of(loaded, target.tokenizer)


def _int8_copy(target: Any, quantization: str) -> PreTrainedModel:
    """A model of its own over the target's weights in memory, of which only the packed 8-bit ones
    are new.
    """
    if target.device.type != "cpu" or target.dtype != torch.float32:
        raise UserError(
            f"quantization={quantization} needs a float32 or float16 target on a CPU: use int8 or "
            "nf4"
        )
    tensors = (*target.model.parameters(), *target.model.buffers())
    model = copy.deepcopy(target.model, {id(tensor): tensor for tensor in tensors})
    model.config.name_or_path = f"{target.name} ({quantization})"
    return int8_packed(model)


def int8_packed(model: PreTrainedModel) -> PreTrainedModel:
    unpack(model)
    pack(model, "int8")
    attend_exactly(model)
    # As transformers marks what bitsandbytes has quantised.
    setattr(model, "is_quantized", True)  # noqa: B010
    return model


def _load_quantized(folder: str, quantization: str, like: PreTrainedModel) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=like.dtype,
        device_map={"": like.device},
        attn_implementation=attention_name(like),
        quantization_config=bitsandbytes_config(quantization),
        use_safetensors=True,
    )
    fit_to_cpu(model)
    return model.eval()


def fit_to_cpu(model: PreTrainedModel) -> None:
    """bitsandbytes' 4-bit kernel for CPUs with avx512_bf16 works in blocks and fails on layers of
    other sizes: those take its general path.
    """
    if not getattr(model, "is_quantized", False) or model.device.type != "cpu":
        return
    from bitsandbytes.nn.modules import Linear4bit

    for layer in model.modules():
        if isinstance(layer, Linear4bit) and (layer.out_features % 32 or layer.in_features % 64):
            layer.support_avx512bf16_for_cpu = False


def check_quantization(quantization: str) -> None:
    if quantization not in QUANTIZATIONS:
        raise UserError(
            f"quantization={quantization}: choose one of {', '.join(QUANTIZATIONS)}, or null for "
            "none"
        )
    if quantization != DYNAMIC_INT8 and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"quantization={quantization} needs bitsandbytes: pip install bitsandbytes, or leave "
            "that drafter out"
        )


def bitsandbytes_config(quantization: str) -> BitsAndBytesConfig:
    """nf4 and fp4: 4-bit weights (Dettmers et al. 2023, QLoRA); int8: LLM.int8 (Dettmers et al.
    2022).
    """
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # int8 would warn in every matrix product of a float32 model
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Says whether two tokenizers mean the same by every id: a hash of the vocabulary and of how a
    probe text is cut.
    """
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    probe = tokenizer.encode(PROBE, add_special_tokens=False)
    digest = hashlib.sha256(repr((vocab, sorted(tokenizer.all_special_ids), probe)).encode())
    return digest.hexdigest()[:16]


def check_same_vocabulary(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """A drafter must mean the same string by the same id. Sizes prove nothing: two tokenizers of
    one size may differ, and one tokenizer may come with embeddings padded to different sizes.
    """
    if tokenizer is None or target_tokenizer is None or tokenizer is target_tokenizer:
        return
    same = (
        tokenizer.get_vocab() == target_tokenizer.get_vocab()
        and sorted(tokenizer.all_special_ids) == sorted(target_tokenizer.all_special_ids)
        and tokenizer.encode(PROBE, add_special_tokens=False)
        == target_tokenizer.encode(PROBE, add_special_tokens=False)
    )
    if not same:
        raise UserError(
            f"drafter {name}: its tokenizer ({tokenizer.name_or_path}) differs from the target's "
            f"({target_tokenizer.name_or_path}); use a drafter model of the target's own family, "
            "or drafter=universal"
        )
