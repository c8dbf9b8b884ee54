"""stage=datastore: texts become a folder that drafter=retrieval searches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specens.cli import show
from specens.decoding.target.target import Target
from specens.drafters.retrieval.datastore import Header, build
from specens.errors import UserError, check_flag, check_list
from specens.models.load import tokenizer_fingerprint
from specens.prompts.sources import Jsonl
from specens.train.shards import TextShards, check_files, check_folder, encode


@dataclass(frozen=True)
class DatastoreStage:
    """Options of stage=datastore. The texts are those of a `corpus` folder (written by
    stage=corpus) and of `files`: a .jsonl file is read as by prompts=jsonl, each turn a text; any
    other file is one text in UTF-8. Nothing is added to a text. With `answers_only` a corpus's
    prompts are left out, which saves space: it is answers that are drafted.

    `with_suffixes` False leaves out the suffix array, which is half of the size or more and is then
    made when the datastore is first opened. A folder that holds these very texts is left as it is;
    one with others is refused.
    """

    folder: str
    corpus: str | None = None
    files: list[str] = field(default_factory=list)
    answers_only: bool = False
    with_suffixes: bool = True

    def __post_init__(self) -> None:
        check_folder("stage.folder", self.folder)
        for name in ("answers_only", "with_suffixes"):
            check_flag(f"stage.{name}", getattr(self, name))
        check_list("stage.files", self.files, str, "[notes.txt,more.jsonl]")
        if not self.corpus and not self.files:
            raise UserError("stage.corpus and stage.files are both empty: give one of them")
        check_files("stage.files", self.files)

    def run(self, target: Target) -> Header:
        """Write the datastore; print its size and the time it took."""
        if target.tokenizer is None:
            raise UserError(f"{target.name}: stage=datastore needs the target's tokenizer")
        begin = time.perf_counter()
        fingerprint = tokenizer_fingerprint(target.tokenizer)
        header = build(
            self._texts(target.tokenizer, fingerprint),
            self.folder,
            fingerprint=fingerprint,
            vocab_size=target.vocab_size,
            source=self._source(),
            with_suffixes=self.with_suffixes,
        )
        size = f"{header.num_tokens} tokens, {header.num_texts} texts"
        seconds = time.perf_counter() - begin
        show(f"datastore {self.folder}: {size}, {seconds:.1f} s")
        return header

    def _source(self) -> str:
        """Names without folders: a datastore may be given away."""
        corpus = [f"corpus {Path(self.corpus).name}"] if self.corpus else []
        return ", ".join([*corpus, *(Path(path).name for path in self.files)])

    def _texts(self, tokenizer: Any, fingerprint: str) -> Iterator[Sequence[int]]:
        if self.corpus:
            for shard in TextShards.open(self.corpus, fingerprint).shards():
                skipped = shard.prompt_length if self.answers_only else 0
                begins, ends = shard.begins + skipped, shard.begins + shard.length
                for begin, end in zip(begins, ends, strict=True):
                    yield shard.token_ids[begin:end]  # pyright: ignore[reportReturnType]
        for path in self.files:
            yield from texts_of_file(Path(path).expanduser(), tokenizer)


def texts_of_file(path: Path, tokenizer: Any) -> Iterator[Sequence[int]]:
    """Ids of a file's texts. Raises UserError when it cannot be read as text."""
    if path.suffix == ".jsonl":
        for _, question in Jsonl(path=str(path)).read():
            if question.token_ids:
                yield question.token_ids
            yield from (encode(tokenizer, text) for text in question.turns)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        problem = f"cannot be read ({reason}); give a text file in UTF-8 or a .jsonl file"
        raise UserError(f"{path}: {problem}") from error
    yield encode(tokenizer, text)
