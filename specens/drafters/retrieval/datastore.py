"""Many texts on disk, to be searched by their ids. Built once, opened in an instant, shared by any
number of processes.

A datastore is a folder:

- `datastore.json`: its Header.
- `tokens.bin`: the ids of all texts one after another, each text followed by `vocab_size`, an id
  that no text holds. Little endian, 2 or 4 bytes an id.
- `suffixes.bin`: their suffix array without the ends of texts. Little endian, 4 bytes a place, 8
  from 2**31 ids on. It may be absent, as it follows from `tokens.bin`: then it is made when the
  folder is first opened.

The files are only ever read as numbers; nothing in them can be executed.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from specens.drafters.retrieval.suffix_array import (
    SuffixIndex,
    id_type,
    is_sorted,
    place_type,
    sorted_tokens,
)
from specens.errors import UserError, check_count, one_line
from specens.records.files import make_once, make_whole

HEADER, TOKENS, SUFFIXES = "datastore.json", "tokens.bin", "suffixes.bin"
FORMAT = "specens datastore 1"

MAX_VOCAB_SIZE = 2**32 - 1
"""Four bytes hold every id and the end of a text."""

HASHED_BYTES = 64 << 20
"""Up to this size the content of `tokens.bin` is hashed at every opening (a fraction of a second).
"""

MAKE = "make one with python -m specens.train stage=datastore"


@dataclass(frozen=True)
class Header:
    """`tokenizer` is the fingerprint of the tokenizer that made the ids, `vocab_size` the id that
    ends every text, `id_bytes` the bytes of an id, `num_tokens` the number of the texts' own ids,
    `checksum` the SHA-256 of `tokens.bin`, `source` where the texts came from.
    """

    tokenizer: str
    vocab_size: int
    id_bytes: int
    num_tokens: int
    num_texts: int
    checksum: str
    source: str

    @property
    def num_ids(self) -> int:
        """Ids in `tokens.bin`: the texts' own and one end each."""
        return self.num_tokens + self.num_texts

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Raises UserError when there is none or it makes no sense."""
        path = folder / HEADER
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            header = cls(**content)
            header._check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"no readable {HEADER} ({one_line(error)})"
            raise UserError(f"datastore {folder}: {problem}; {MAKE}") from error
        return header

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check_count(field.name, value)
            elif not isinstance(value, str):
                raise ValueError(f"{field.name} is {value!r}")
        if self.vocab_size > MAX_VOCAB_SIZE or self.id_bytes != id_type(self.vocab_size).itemsize:
            raise ValueError(f"id_bytes is {self.id_bytes} with vocab_size {self.vocab_size}")

    def write(self, folder: Path) -> None:
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / HEADER).write_text(f"{content}\n", encoding="utf-8")


@dataclass(frozen=True)
class Datastore:
    """An open datastore: where it lies, its header, and its texts to search."""

    folder: Path
    header: Header
    index: SuffixIndex

    @classmethod
    def open(
        cls,
        folder: str | Path,
        fingerprint: str | None,
        cache: Path | None = None,
        verify: bool | None = None,
    ) -> Datastore:
        """Map a folder into memory, read-only: nothing is loaded until it is read.

        Refused with a UserError: no datastore, another tokenizer than `fingerprint` is of (None:
        any will do), files of a wrong size, tokens whose hash is not the header's, a suffix array
        that is out of order where it is probed. The hash reads every byte, so it is checked up to
        HASHED_BYTES only; `verify` True checks it always, False never. Without `suffixes.bin` the
        array is made now and kept under `cache`, named by the tokens' hash (None: in memory only).
        """
        path = Path(folder).expanduser()
        header = Header.read(path)
        if fingerprint is not None and header.tokenizer != fingerprint:
            theirs, ours = header.tokenizer, fingerprint
            raise UserError(
                f"datastore {path}: its tokenizer ({theirs}) is not the target's ({ours}); {MAKE}"
            )
        tokens = map_tokens(path, header)
        if tokens.nbytes <= HASHED_BYTES if verify is None else verify:
            check_hash(path, header)
        if (path / SUFFIXES).exists():
            where = path
        elif cache is not None:
            where = _suffixes_made_once(cache, path, header)
        else:
            return cls(path, header, SuffixIndex.of(tokens, header.vocab_size))
        suffixes = map_file(where / SUFFIXES, place_type(header.num_ids), header.num_tokens)
        if not is_sorted(tokens, suffixes):
            problem = f"not the sorted places of {path / TOKENS}; delete it"
            raise UserError(f"datastore {where / SUFFIXES}: {problem}")
        return cls(path, header, SuffixIndex(tokens, suffixes, header.vocab_size))


def map_file(path: Path, kind: np.dtype, count: int) -> np.ndarray:
    """A file of `count` numbers, memory mapped for reading. Raises UserError when it is absent or
    has another size.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == count * kind.itemsize:
            return np.memmap(path, kind, "r", shape=(count,))
    except (OSError, ValueError) as error:
        raise UserError(f"datastore {path}: cannot be read ({one_line(error)}); {MAKE}") from error
    problem = f"has {num_bytes} bytes, by its header {count * kind.itemsize}"
    raise UserError(f"datastore {path}: {problem}; {MAKE}")


def map_tokens(folder: Path, header: Header) -> np.ndarray:
    return map_file(folder / TOKENS, id_type(header.vocab_size), header.num_ids)


def check_hash(folder: Path, header: Header) -> None:
    """UserError unless `tokens.bin` has the header's checksum. Reads it without mapping it."""
    with (folder / TOKENS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != header.checksum:
        problem = "damaged (its hash is not the header's)"
        raise UserError(f"datastore {folder / TOKENS}: {problem}; {MAKE}")


def _suffixes_made_once(cache: Path, folder: Path, header: Header) -> Path:
    """The cache folder with the suffix array of these tokens; made by one process while others
    wait.
    """

    def make(made: Path) -> None:
        check_hash(folder, header)  # a wrong array would outlive the damaged file
        sorted_tokens(map_tokens(folder, header), header.vocab_size).tofile(made / SUFFIXES)

    try:
        return make_once(cache.expanduser() / header.checksum, make)
    except OSError as error:
        problem = f"cannot write its suffix array to {cache} ({one_line(error)})"
        raise UserError(f"datastore {folder}: {problem}") from error


def build(
    texts: Iterable[Sequence[int]],
    folder: str | Path,
    *,
    fingerprint: str,
    vocab_size: int,
    source: str,
    with_suffixes: bool = True,
) -> Header:
    """Write texts of ids below `vocab_size` as a datastore. Whole or not at all: a build that is
    killed leaves nothing under the folder's name. Empty texts are left out. A folder that holds
    these very texts already stays as it is; one that holds anything else is refused with a
    UserError.
    """
    path = Path(folder).expanduser()
    check_count("datastore vocab_size", vocab_size)
    if vocab_size > MAX_VOCAB_SIZE:
        raise UserError(f"datastore vocab_size={vocab_size}: at most {MAX_VOCAB_SIZE} ids fit")
    if path.exists() and not (path / HEADER).is_file():
        raise UserError(f"datastore {path}: exists and is no datastore; give another folder")
    there = Header.read(path) if path.exists() else None
    written: list[Header] = []

    def make(made: Path) -> bool:
        header = _write(texts, made, fingerprint, vocab_size, source)
        if there is not None:
            if replace(there, source=source) != header:
                problem = "holds other texts; delete it or give another folder"
                raise UserError(f"datastore {path}: {problem}")
            return False
        if with_suffixes:
            sorted_tokens(map_tokens(made, header), vocab_size).tofile(made / SUFFIXES)
        header.write(made)
        written.append(header)
        return True

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_whole(path, make)
    except OSError as error:
        raise UserError(f"datastore {path}: cannot be written ({one_line(error)})") from error
    return there if there is not None else written[0]


def _write(
    texts: Iterable[Sequence[int]], made: Path, fingerprint: str, vocab_size: int, source: str
) -> Header:
    kind, digest, num_tokens, num_texts = id_type(vocab_size), hashlib.sha256(), 0, 0
    with (made / TOKENS).open("wb") as file:
        for number, text in enumerate(texts):
            ids = np.asarray(text)
            if not len(ids):
                continue
            if ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < vocab_size:
                found, known = reprlib.repr(ids.tolist()), f"ids from 0 to {vocab_size - 1}"
                raise UserError(f"datastore: text {number} is {found}; give {known}")
            data = np.append(ids, vocab_size).astype(kind).tobytes()
            digest.update(data)
            file.write(data)
            num_tokens, num_texts = num_tokens + len(ids), num_texts + 1
    if not num_tokens:
        raise UserError("datastore: the texts hold no tokens; give some text")
    sizes = (vocab_size, kind.itemsize, num_tokens, num_texts)
    return Header(fingerprint, *sizes, digest.hexdigest(), source)
