"""Where prompts come from: a source yields `Question`s. It reads and checks everything without a
tokenizer, so bad input is refused before a model is loaded.
"""

from __future__ import annotations

import json
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specens.errors import UserError, check_count, check_flag, one_line

DEMO_FILE = Path(__file__).with_name("demo.jsonl")


@dataclass(frozen=True, slots=True)
class Question:
    """What a source yields: user turns as text, or raw `token_ids` that are fed as they are
    (nothing added).
    """

    id: str
    category: str
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """`Prompt.id` of each turn: the question's own id, or `<id>/<turn>` (0-based) if it has
        several turns.
        """
        if len(self.turns) > 1:
            return tuple(f"{self.id}/{turn}" for turn in range(len(self.turns)))
        return (self.id,)


Placed = tuple[str, Question]
"""A question and, in words, the place it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource(ABC):
    """Options of every source. `limit` keeps the first questions; then `shard` "i/n" keeps every
    n-th of those from the i-th (0-based), so the n shards are disjoint and together complete.
    `chat` is for `chat.render`.
    """

    limit: int | None = None
    shard: str | None = None
    chat: bool | None = None

    @abstractmethod
    def read(self) -> list[Placed]:
        """All questions in order with their places; raises UserError at the first that is not well
        formed.
        """

    def questions(self) -> list[Question]:
        """The checked questions of this source and shard. Raises UserError: bad option, bad input,
        or nothing left.
        """
        if self.limit is not None:
            check_count("prompts.limit", self.limit)
        check_flag("prompts.chat", self.chat, or_null=True)
        index, num_shards = _parse_shard(self.shard)
        placed = self.read()
        _check_unique(placed)
        if not placed:
            where = (
                getattr(self, "path", None) or getattr(self, "name", None) or type(self).__name__
            )
            raise UserError(f"prompts: {where!r} holds no prompts, give it at least one")
        kept = [question for _, question in placed[: self.limit]]
        if index >= len(kept):
            raise UserError(
                f"prompts.shard={self.shard} is empty: there are only {len(kept)} prompts, use "
                "fewer shards"
            )
        return kept[index::num_shards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(PromptSource):
    """Twelve short prompts that come with the package: chat, translation, summaries, questions,
    code editing.
    """

    def read(self) -> list[Placed]:
        return [
            (place, _jsonl_question(row, place, number))
            for number, place, row in _read_rows(DEMO_FILE)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inline(PromptSource):
    """Texts given in the configuration: `prompts.texts=["...","..."]`."""

    texts: Sequence[str] = ()

    def read(self) -> list[Placed]:
        if isinstance(self.texts, str) or not isinstance(self.texts, Sequence) or not self.texts:
            raise UserError(
                f"prompts.texts is {reprlib.repr(self.texts)}: give a list of texts, "
                "prompts.texts=['Hello!']"
            )
        placed: list[Placed] = []
        for index, value in enumerate(self.texts):
            place = f"prompts.texts[{index}]"
            placed.append(
                (place, Question(str(index + 1), "inline", (_text(value, place, "the text"),)))
            )
        return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(PromptSource):
    """A UTF-8 file with one JSON object a line, which holds exactly one of "text" (a string),
    "turns" (strings) and "prompt_ids" (token ids), and if wanted "id" (default: the line number)
    and "category" (default: "jsonl"). Other keys and blank lines are ignored.
    """

    path: str | None = None

    def read(self) -> list[Placed]:
        return [
            (place, _jsonl_question(row, place, number))
            for number, place, row in _read_rows(_path(self.path))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBench(PromptSource):
    """The `question.jsonl` of Spec-Bench (Xia et al. 2024, arXiv:2401.07851), a benchmark of
    speculative decoding.

    `turns` "first" asks only the first turn, "all" the whole conversation; `per_category` keeps the
    first questions of each category, in file order (before `limit` and `shard`).
    """

    path: str | None = None
    turns: str = "first"
    per_category: int | None = None

    def read(self) -> list[Placed]:
        if self.turns not in ("first", "all"):
            raise UserError(f"prompts.turns is {self.turns!r}: give first or all")
        if self.per_category is not None:
            check_count("prompts.per_category", self.per_category)
        num_seen: dict[str, int] = {}
        placed: list[Placed] = []
        for _, place, row in _read_rows(_path(self.path)):
            question = self._question(row, place)
            num_seen[question.category] = num_seen.get(question.category, 0) + 1
            if self.per_category is None or num_seen[question.category] <= self.per_category:
                placed.append((place, question))
        return placed

    def _question(self, row: Mapping[str, Any], place: str) -> Question:
        for key in ("question_id", "category", "turns"):
            if key not in row:
                raise UserError(
                    f'{place}: no "{key}"; a Spec-Bench line has "question_id", "category" and '
                    '"turns"'
                )
        turns = _turns(row["turns"], place)
        return Question(
            id=_id(row["question_id"], place, '"question_id"'),
            category=_text(row["category"], place, '"category"'),
            turns=turns[:1] if self.turns == "first" else turns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub(PromptSource):
    """A text `column` of a data set on the Hugging Face hub (or in a local folder), through the
    optional `datasets`.

    `config` is the data set's configuration name, `revision` a branch, tag or commit; a question's
    id is its row.
    """

    name: str | None = None
    split: str = "train"
    column: str = "text"
    config: str | None = None
    revision: str | None = None

    def read(self) -> list[Placed]:
        placed: list[Placed] = []
        for row, value in enumerate(self._column()):
            place = f"{self.name} [{self.split}], row {row}"
            placed.append(
                (
                    place,
                    Question(str(row), "hub", (_text(value, place, f'column "{self.column}"'),)),
                )
            )
        return placed

    def _column(self) -> Sequence[Any]:
        if not self.name or not self.split:
            option = "split" if self.name else "name"
            raise UserError(
                f"prompts.{option} is not set: prompts=hub needs a data set's name and split"
            )
        try:
            from datasets import load_dataset  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "prompts=hub needs the package datasets: pip install datasets"
            ) from error
        try:
            rows: Any = load_dataset(
                self.name, self.config, split=self.split, revision=self.revision
            )
        except (
            Exception
        ) as error:  # no network, name, split or revision: the library raises many unrelated types
            raise UserError(
                f"cannot load split {self.split!r} of data set {self.name!r} ({one_line(error)}): "
                "check prompts.name, prompts.split and the network, or use prompts=jsonl"
            ) from error
        if self.column not in rows.column_names:
            names = ", ".join(map(str, rows.column_names))
            raise UserError(
                f"{self.name!r} has no column {self.column!r}: set prompts.column to one of {names}"
            )
        return rows[self.column][: self.limit]


def _parse_shard(shard: object) -> tuple[int, int]:
    """(index, number of shards); None is the one shard that holds everything."""
    if shard is None:
        return 0, 1
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard) if isinstance(shard, str) else None
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(
            f"prompts.shard is {shard!r}: give i/n with i from 0 to n - 1, for example "
            "prompts.shard=0/8"
        )
    return int(match[1]), int(match[2])


def _check_unique(placed: Sequence[Placed]) -> None:
    """Records are keyed by prompt id, so the ids of all turns of all questions must differ."""
    places: dict[str, str] = {}
    for place, question in placed:
        for prompt_id in question.prompt_names:
            if prompt_id in places:
                raise UserError(
                    f"{place}: the id {prompt_id!r} is taken by {places[prompt_id]}; make ids "
                    "unique"
                )
            places[prompt_id] = place


def _path(path: object) -> Path:
    """A relative path is relative to the current folder; the file must exist."""
    if path is None or path in ("", "???"):
        raise UserError(
            "prompts.path is not set: name the file to read with prompts.path=<file.jsonl>"
        )
    file = Path(str(path)).expanduser()
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(
            f"prompts.path={path} {problem} (current folder: {Path.cwd()}): name a file of JSON "
            "lines"
        )
    return file


def _read_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(1-based line number, place in words, JSON object) of every line that is not blank."""
    try:
        # Bytes, so that only a newline ends a line: text mode would also need an encoding that
        # holds for all lines.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: not UTF-8 text ({error.reason}); save the file as UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{place}: not valid JSON ({one_line(error)}); write one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f'{place}: a JSON {type(row).__name__}, not an object; write {{"text": "..."}}'
            )
        yield number, place, row


def _jsonl_question(row: Mapping[str, Any], place: str, number: int) -> Question:
    given = [key for key in ("text", "turns", "prompt_ids") if key in row]
    if len(given) != 1:
        found = " and ".join(f'"{key}"' for key in given) or "none of them"
        raise UserError(
            f'{place}: found {found}; give exactly one of "text", "turns" and "prompt_ids"'
        )
    name = _id(row.get("id", number), place, '"id"')
    category = _text(row.get("category", "jsonl"), place, '"category"')
    if "prompt_ids" in row:
        return Question(name, category, token_ids=_token_ids(row["prompt_ids"], place))
    turns = (_text(row["text"], place, '"text"'),) if "text" in row else _turns(row["turns"], place)
    return Question(name, category, turns)


def _text(value: object, place: str, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: {what} is {reprlib.repr(value)}, not a text; put it in quotes")
    if not value:
        raise UserError(f"{place}: {what} is empty; give it some text or leave the line out")
    try:
        value.encode("utf-8")
    except (
        UnicodeEncodeError
    ) as error:  # half of a surrogate pair: legal in JSON, impossible to tokenise or to save
        raise UserError(
            f"{place}: {what} is not valid Unicode ({error.reason}); correct the character"
        ) from error
    return value


def _id(value: object, place: str, what: str) -> str:
    return (
        str(value)
        if isinstance(value, int) and not isinstance(value, bool)
        else _text(value, place, what)
    )


def _turns(value: object, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f'{place}: "turns" is {reprlib.repr(value)}; give a list with at least one text'
        )
    return tuple(_text(turn, place, f'"turns"[{index}]') for index, turn in enumerate(value))


def _token_ids(value: object, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f'{place}: "prompt_ids" is {reprlib.repr(value)}; give a list with at least one id'
        )
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise UserError(
                f'{place}: "prompt_ids"[{index}] is {reprlib.repr(token)}; give token ids, whole '
                "numbers from 0"
            )
    return tuple(value)
