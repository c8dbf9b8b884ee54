"""stage=datastore: texts become a folder that drafter=retrieval searches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specens.decoding.target import Target
from specens.drafters.datastore import Header, build
from specens.errors import UserError
from specens.models import tokenizer_fingerprint
from specens.prompts import Jsonl
from specens.training.texts import Texts


@dataclass(frozen=True)
class DatastoreStage:
    """Options of stage=datastore. The texts are those of a `corpus` folder (written by stage=corpus) and of `files`: a .jsonl
    file is read as prompts=jsonl does, each turn a text; any other file is one text in UTF-8. Nothing is added to a text. With
    `answers_only` a corpus's prompts are left out, which saves space: it is answers that are drafted.

    `with_suffixes` False leaves out the suffix array, which is half of the size or more and is then made when the datastore is
    first opened. A folder that holds these very texts is left as it is; one with others is refused.
    """

    folder: str
    corpus: str | None = None
    files: list[str] = field(default_factory=list)
    answers_only: bool = False
    with_suffixes: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str) or not self.folder:
            raise UserError(f"stage.folder={self.folder!r}: give the folder to write")
        for name in ("answers_only", "with_suffixes"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"stage.{name}={getattr(self, name)!r}: give true or false")
        if isinstance(self.files, str) or not isinstance(self.files, Sequence):
            raise UserError(f"stage.files={self.files!r}: give a list of files, stage.files=[notes.txt,more.jsonl]")
        if not self.corpus and not self.files:
            raise UserError("stage.corpus and stage.files are both empty: give a folder of stage=corpus, or files")
        for path in self.files:
            if not Path(path).expanduser().is_file():
                raise UserError(f"stage.files: {path} does not exist")

    def run(self, target: Target) -> Header:
        """Write the datastore, say how large it is and what it took."""
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
        seconds = time.perf_counter() - begin
        print(
            f"datastore {self.folder}: {header.num_tokens} tokens, {header.num_texts} texts, {seconds:.1f} s",
            flush=True,
        )
        return header

    def _source(self) -> str:
        """Names without folders: a datastore may be given away."""
        names = [Path(path).name for path in self.files]
        return ", ".join([f"corpus {Path(self.corpus).name}", *names] if self.corpus else names)

    def _texts(self, tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> Iterator[Sequence[int]]:
        if self.corpus:
            for shard in Texts.open(self.corpus, fingerprint).shards():
                skipped = shard.prompt_length if self.answers_only else 0
                for begin, end in zip(shard.begins + skipped, shard.begins + shard.length, strict=True):
                    yield shard.token_ids[begin:end]  # pyright: ignore[reportReturnType]
        for path in self.files:
            yield from texts_of_file(Path(path).expanduser(), tokenizer)


def texts_of_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence[int]]:
    """Ids of a file's texts. Raises UserError when it cannot be read as text."""
    if path.suffix == ".jsonl":
        for _, question in Jsonl(path=str(path)).read():
            if question.token_ids:
                yield question.token_ids
            yield from (ids_of(text, tokenizer) for text in question.turns)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
        raise UserError(f"{path}: cannot be read ({reason}); give a text file in UTF-8 or a .jsonl file") from error
    yield ids_of(text, tokenizer)


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The text's own ids, no special ones added; however long it is."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
