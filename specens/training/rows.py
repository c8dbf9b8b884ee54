"""Texts packed into rows of one length: what a training step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.utils.data import Dataset

from specens.errors import UserError, one_line
from specens.training.texts import Shard, Texts


@dataclass(frozen=True)
class Place:
    """One row: which texts of which shard stand in it."""

    shard: int
    texts: tuple[int, ...]


class Rows(Dataset):
    """Whole texts, several in a row of `row_tokens`, the rest of a row padded. An item is a dict of tensors of the row:

    `token_ids`, `positions` (from each text's beginning), `begins` (index in the row at which the token's text begins) and
    `ends` (index behind its last token) `[row_tokens]`, `is_answer` (the token is the target's answer, not prompt or padding),
    and with `hidden_layers` `features` `[row_tokens, layers, hidden_size]`, the target's hidden states.
    """

    def __init__(
        self, texts: Texts, row_tokens: int, hidden_layers: Sequence[int] = (), shards: slice | None = None
    ) -> None:
        self._shards = list(texts.shards())[shards or slice(None)]
        self._row_tokens, self._layers = row_tokens, tuple(hidden_layers)
        if hidden_layers:
            kept = texts.manifest.get("options", {}).get("hidden_layers") or []
            lost = sorted(set(hidden_layers) - set(kept))
            if lost:
                raise UserError(
                    f"corpus {texts.folder}: hidden states of layer {lost[0]} were not kept, only of {kept}; write "
                    "another corpus with stage.hidden_layers=null"
                )
            for shard in self._shards:
                check_hidden(shard, hidden_layers)
        self._places = [
            Place(number, row) for number, shard in enumerate(self._shards) for row in pack(shard.length, row_tokens)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def has_answers(self) -> bool:
        """Does any row hold a token of an answer?"""
        return any(
            bool((shard.length.clip(max=self._row_tokens) > shard.prompt_length).any()) for shard in self._shards
        )

    def num_tokens(self) -> int:
        return sum(len(shard.token_ids) for shard in self._shards)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = self._places[index]
        shard = self._shards[place.shard]
        begins, size = shard.begins, self._row_tokens
        row = {name: torch.zeros(size, dtype=torch.long) for name in ("token_ids", "positions", "begins", "ends")}
        row["is_answer"] = torch.zeros(size, dtype=torch.bool)
        at, pieces = 0, []
        for text in place.texts:
            begin, length = int(begins[text]), int(min(shard.length[text], size))
            here = slice(at, at + length)
            row["token_ids"][here] = torch.from_numpy(shard.token_ids[begin : begin + length].astype(np.int64))
            row["positions"][here] = torch.arange(length)
            row["begins"][here], row["ends"][here] = at, at + length
            row["is_answer"][at + int(shard.prompt_length[text]) : at + length] = True
            pieces.append((begin, length))
            at += length
        # Padding is a text of its own, one token each: it sees nothing and nothing sees it.
        row["begins"][at:] = torch.arange(at, size)
        row["ends"][at:] = torch.arange(at, size) + 1
        if self._layers:
            row["features"] = _features(shard.hidden_path, self._layers, pieces, size)
        return row


def split(texts: Texts, row_tokens: int, hidden_layers: Sequence[int], num_held_out: int) -> tuple[Rows, Rows]:
    """Rows to learn from, and those of the last `num_held_out` shards, which only measure."""
    num_shards = len(texts.shard_paths())
    if num_shards <= num_held_out:
        raise UserError(
            f"corpus {texts.folder}: {num_shards} shards, and stage.num_held_out={num_held_out} of them only measure; write "
            "more with stage=corpus stage.num_tokens=..."
        )
    parts = slice(None, -num_held_out), slice(-num_held_out, None)
    rows, held_out = (Rows(texts, row_tokens, hidden_layers, part) for part in parts)
    if not len(rows):
        raise UserError(f"corpus {texts.folder}: no texts to learn from; write more with stage=corpus")
    for part in (rows, held_out):
        if not part.has_answers():
            raise UserError(
                f"stage.row_tokens={row_tokens}: no row reaches as far as an answer; give more than the prompts have"
            )
    return rows, held_out


def check_hidden(shard: Shard, layers: Sequence[int]) -> None:
    """UserError unless a shard's hidden states are there, whole, and as many as its tokens. Reads the file's header only."""
    path = shard.hidden_path
    try:
        with safe_open(path, framework="pt") as file:
            lengths = {file.get_slice(f"layer.{layer}").get_shape()[0] for layer in layers}
        problem = None if lengths == {len(shard.token_ids)} else "they belong to other texts"
    except FileNotFoundError:
        problem = "they are missing"
    except Exception as error:  # safetensors has an exception of its own for every fault
        problem = one_line(error)
    if problem is not None:
        raise UserError(
            f"corpus {path.parent}: hidden states {path.name}: {problem}; delete them and {shard.path.name}, "
            "and run stage=corpus again"
        )


def before_answers(row: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[row_tokens]`: is the token after this one, in the same text, part of an answer?"""
    index = torch.arange(len(row["ends"]), device=row["ends"].device)
    return row["is_answer"].roll(-1) & (index + 1 < row["ends"])


def _features(path: Path, layers: Sequence[int], pieces: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
    columns = []
    with safe_open(path, framework="pt") as file:
        for layer in layers:
            states = file.get_slice(f"layer.{layer}")
            columns.append(torch.cat([states[begin : begin + length] for begin, length in pieces]))
    features = torch.stack(columns, dim=1)
    return torch.nn.functional.pad(features, (0, 0, 0, 0, 0, size - len(features)))


def pack(lengths: np.ndarray, row_tokens: int) -> list[tuple[int, ...]]:
    """Texts into as few rows as can be: the longest first, each into the fullest row that still has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for text in np.argsort(-lengths, kind="stable"):
        length = min(int(lengths[text]), row_tokens)
        fitting = [r for r in range(len(rows)) if room[r] >= length]
        if fitting:
            best = min(fitting, key=lambda r: room[r])
        else:
            best = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[best].append(int(text))
        room[best] -= length
    return [tuple(row) for row in rows]


def kept_ids(texts: Texts, num_ids: int, vocab_size: int, always: Sequence[int] = ()) -> tuple[torch.Tensor, float]:
    """The ids of a trimmed vocabulary, ascending, and the share of the corpus's tokens that they cover.

    The most frequent ids; ties, such as all that never occurred, go to the lower id, which tokenizers with merges made from the
    more frequent pair.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in texts.shards():
        counts += np.bincount(shard.token_ids, minlength=vocab_size)
    rank = counts.copy()
    rank[list(always)] = counts.max() + 1
    order = np.lexsort((np.arange(vocab_size), -rank))
    chosen = np.sort(order[: min(num_ids, vocab_size)])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / max(counts.sum(), 1))


def stack(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Data collator: a batch is a list of rows, since their texts differ."""
    return {"rows": list(rows)}
