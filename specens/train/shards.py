"""Tokenised texts on disk: what stage=corpus writes and every other stage reads.

A folder holds `corpus.json` (its tokenizer, its target, how it was made) and numbered shards:
`00000.safetensors` with `token_ids` `[tokens]`, `length`, `prompt_length` and `is_greedy`
`[texts]`, and, if hidden states were kept, `00000.hidden.safetensors` with one tensor
`layer.<index>` `[tokens, hidden_size]` each (zero at a text's last token, which the target never
read).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from specens.errors import UserError, one_line

RUN_TOKENS = 32
"""A run of this many tokens in common is a leak of evaluation text into training text."""

MANIFEST = "corpus.json"


def narrow(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that holds every id. Two bytes end at 65535; many vocabularies do not."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def check_folder(option: str, value: object) -> None:
    """UserError unless an option is the path of a folder, which need not exist."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{option}={value!r}: give a folder")


def check_files(option: str, paths: Iterable[str]) -> None:
    """UserError unless all of the files of an option exist."""
    for path in paths:
        if not Path(str(path)).expanduser().is_file():
            raise UserError(f"{option}: {path} does not exist")


def encode(tokenizer: Any, text: str) -> list[int]:
    """The text's own ids, no special ones added; however long it is."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


@dataclass(frozen=True)
class Shard:
    """Texts of one file, one after another. Arrays as in the module's docstring."""

    path: Path
    token_ids: np.ndarray
    length: np.ndarray
    prompt_length: np.ndarray
    is_greedy: np.ndarray

    @property
    def begins(self) -> np.ndarray:
        """Index of each text's first token."""
        return np.cumsum(self.length, dtype=np.int64) - self.length

    @property
    def hidden_path(self) -> Path:
        return self.path.with_suffix(".hidden.safetensors")


@dataclass(frozen=True)
class TextShards:
    """A folder of texts."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(
        cls, folder: str | Path, tokenizer: str | None = None, model: str | None = None
    ) -> TextShards:
        """Raises UserError when the folder is not a corpus, or was written with another tokenizer
        or by another target than these fingerprints are of.
        """
        path = Path(folder).expanduser()
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            theirs = manifest["tokenizer"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"no readable {MANIFEST} ({one_line(error)})"
            raise UserError(f"corpus {path}: {problem}; make one with stage=corpus") from error
        if tokenizer not in (None, theirs):
            problem = f"written with another tokenizer ({theirs}) than the target's ({tokenizer})"
            raise UserError(f"corpus {path}: {problem}")
        author = manifest.get("model")
        if model is not None and author not in (None, model):
            problem = f"written by another target ({author}) than this one ({model})"
            raise UserError(f"corpus {path}: {problem}")
        return cls(path, manifest)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the stage=corpus that wrote it."""
        return self.manifest.get("options", {})

    def shard_paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.safetensors") if path.stem.isdigit())

    def shards(self) -> Iterator[Shard]:
        return map(read_shard, self.shard_paths())

    def num_tokens(self) -> int:
        return sum(len(shard.token_ids) for shard in self.shards())


def read_shard(path: Path) -> Shard:
    try:
        arrays = load_file(path)
        names = ("token_ids", "length", "prompt_length", "is_greedy")
        shard = Shard(path, *(arrays[name] for name in names))
        if int(shard.length.sum()) != len(shard.token_ids):
            raise ValueError("lengths do not add up")
    except Exception as error:
        problem = f"is damaged ({one_line(error)}); delete it and run stage=corpus again"
        raise UserError(f"corpus shard {path} {problem}") from error
    return shard


_RNG = np.random.Generator(np.random.PCG64(1))
_COEFFICIENTS = _RNG.integers(0, 2**64, RUN_TOKENS, dtype=np.uint64) | np.uint64(1)


def runs_of(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """64-bit hashes of every run of RUN_TOKENS tokens."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    if len(ids) < RUN_TOKENS:
        return np.zeros(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids + np.uint64(1), RUN_TOKENS)
    return (windows * _COEFFICIENTS).sum(axis=1, dtype=np.uint64)


def overlaps(token_ids: Sequence[int] | np.ndarray, runs: np.ndarray) -> bool:
    """Does a text share a run with those hashed in `runs` (ascending)?"""
    if not len(runs):
        return False
    own = runs_of(token_ids)
    places = np.searchsorted(runs, own).clip(max=len(runs) - 1)
    return bool((runs[places] == own).any())
