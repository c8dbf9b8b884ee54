"""Texts packed into rows of one length: what a training step reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.nn.functional import pad
from torch.utils.data import Dataset

from specens.errors import UserError, one_line
from specens.train.shards import Shard, TextShards

Row = dict[str, torch.Tensor]
"""Tensors of one row, as `PackedRows` names them."""


class PackedRows(Dataset):
    """Whole texts, several in a row of `row_tokens`, the rest of a row padded. An item is a dict of
    the row's tensors:

    `token_ids`, `positions` (from each text's beginning), `begins` (index in the row at which the
    token's text begins) and `ends` (index behind its last token) `[row_tokens]`, `is_answer` (the
    token is the target's answer, not prompt or padding), and with hidden `layers` `features`
    `[row_tokens, layers, hidden_size]`, the target's hidden states.
    """

    def __init__(self, shards: list[Shard], row_tokens: int, layers: Sequence[int] = ()) -> None:
        self._shards, self._row_tokens, self._layers = shards, row_tokens, tuple(layers)
        packed = ((shard, pack(shard.length, row_tokens)) for shard in shards)
        self._rows = [(shard, texts) for shard, rows in packed for texts in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def has_answers(self) -> bool:
        """Does any row hold a token of an answer?"""
        lengths = ((s.length.clip(max=self._row_tokens), s.prompt_length) for s in self._shards)
        return any(bool((length > prompt).any()) for length, prompt in lengths)

    def num_tokens(self) -> int:
        return sum(len(shard.token_ids) for shard in self._shards)

    def __getitem__(self, index: int) -> Row:
        (shard, texts), size = self._rows[index], self._row_tokens
        begins, names = shard.begins, ("token_ids", "positions", "begins", "ends")
        row = {name: torch.zeros(size, dtype=torch.long) for name in names}
        row["is_answer"] = torch.zeros(size, dtype=torch.bool)
        at, pieces = 0, []
        for text in texts:
            begin, length = int(begins[text]), int(min(shard.length[text], size))
            ids = shard.token_ids[begin : begin + length].astype(np.int64)
            here = slice(at, at + length)
            row["token_ids"][here] = torch.from_numpy(ids)
            row["positions"][here] = torch.arange(length)
            row["begins"][here], row["ends"][here] = at, at + length
            row["is_answer"][at + int(shard.prompt_length[text]) : at + length] = True
            pieces.append((begin, length))
            at += length
        # Padding is texts of one token each: they see nothing and nothing sees them.
        row["begins"][at:] = torch.arange(at, size)
        row["ends"][at:] = torch.arange(at, size) + 1
        if self._layers:
            row["features"] = _features(shard.hidden_path, self._layers, pieces, size)
        return row


def split(
    texts: TextShards, row_tokens: int, layers: Sequence[int], num_held_out: int
) -> tuple[PackedRows, PackedRows]:
    """Rows to learn from, and those of the last `num_held_out` shards, which are held out."""
    where, shards = f"corpus {texts.folder}", list(texts.shards())
    kept = texts.options.get("hidden_layers") or []
    if len(shards) <= num_held_out:
        count = f"{len(shards)} shards, and stage.num_held_out={num_held_out} of them are held out"
        raise UserError(f"{where}: {count}; write more with stage=corpus stage.num_tokens=...")
    if lost := sorted(set(layers) - set(kept)):
        problem = f"hidden states of layer {lost[0]} were not kept, only of {kept}"
        raise UserError(f"{where}: {problem}; write another with stage.hidden_layers=null")
    for shard in shards:
        check_hidden(shard, layers)
    rows = PackedRows(shards[:-num_held_out], row_tokens, layers)
    held_out = PackedRows(shards[-num_held_out:], row_tokens, layers)
    if not len(rows):
        raise UserError(f"{where}: no texts to learn from; write more with stage=corpus")
    if not (rows.has_answers() and held_out.has_answers()):
        problem = "no row reaches as far as an answer; give more than the prompts have"
        raise UserError(f"stage.row_tokens={row_tokens}: {problem}")
    return rows, held_out


def check_hidden(shard: Shard, layers: Sequence[int]) -> None:
    """UserError unless a shard's hidden states are there, whole, and as many as its tokens. Reads
    the file's header only.
    """
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
        remedy = f"delete them and {shard.path.name}, and run stage=corpus again"
        raise UserError(f"corpus {path.parent}: hidden states {path.name}: {problem}; {remedy}")


def before_answers(row: Row) -> torch.Tensor:
    """`[row_tokens]`: is the token after this one, in the same text, part of an answer?"""
    index = torch.arange(len(row["ends"]), device=row["ends"].device)
    return row["is_answer"].roll(-1) & (index + 1 < row["ends"])


def _features(
    path: Path, layers: Sequence[int], pieces: Sequence[tuple[int, int]], size: int
) -> torch.Tensor:
    columns = []
    with safe_open(path, framework="pt") as file:
        for layer in layers:
            states = file.get_slice(f"layer.{layer}")
            columns.append(torch.cat([states[begin : begin + length] for begin, length in pieces]))
    features = torch.stack(columns, dim=1)
    return pad(features, (0, 0, 0, 0, 0, size - len(features)))


def pack(lengths: np.ndarray, row_tokens: int) -> list[tuple[int, ...]]:
    """Texts into as few rows as possible: the longest first, each into the fullest row that still
    has room.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for text in np.argsort(-lengths, kind="stable"):
        length = min(int(lengths[text]), row_tokens)
        fitting = [r for r in range(len(rows)) if room[r] >= length]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            room.append(row_tokens)
        best = min(fitting, key=lambda r: room[r])
        rows[best].append(int(text))
        room[best] -= length
    return [tuple(row) for row in rows]


def kept_ids(
    texts: TextShards, num_ids: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[torch.Tensor, float]:
    """The ids of a trimmed vocabulary, ascending, and the share of the corpus's tokens that they
    cover: the most frequent ids. Ties, such as all that never occurred, go to the lower id, which
    tokenizers with merges made from the more frequent pair.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in texts.shards():
        counts += np.bincount(shard.token_ids, minlength=vocab_size)
    rank = counts.copy()
    rank[list(always)] = counts.max() + 1
    order = np.lexsort((np.arange(vocab_size), -rank))
    chosen = np.sort(order[: min(num_ids, vocab_size)])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / max(counts.sum(), 1))


def stack(rows: Sequence[Row]) -> dict[str, Any]:
    """Data collator: a batch is a list of rows, since their texts differ."""
    return {"rows": list(rows)}
