"""The target writes its own training data: stage=corpus.

A drafter must foresee what *this* target says, so the best text to learn from is its own. User turns are sampled from the
target's chat template (the header of a user's turn makes a chat model write one), and it answers them, some greedily, some
sampled. No data set is needed. (Self-generated instructions: Xu et al. 2024, Magpie, arXiv 2406.08464; drafters trained on
the target's own text: Zhou et al. 2023, DistillSpec, arXiv 2310.08461.)

All rows of a batch start from one shared prefix and take one token per forward, so that they always have the same length: no
padding, one prefill, and a finished row is dropped. The hidden states that training needs are kept from these same forwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from specens.decoding.generation import eos_ids
from specens.decoding.target import Target
from specens.errors import UserError, check_count
from specens.models import tokenizer_fingerprint
from specens.prompts import DEMO_FILE, Jsonl
from specens.training.texts import MANIFEST, Texts, narrow, overlaps, runs_of

MIN_FINISHED = 8
"""Finished rows are dropped from the batch once they are more than an eighth of it: dropping copies the cache."""


@dataclass(frozen=True)
class Template:
    """The chat template around a user's turn, as ids: what stands before it, and what follows up to the answer.

    Without a chat template the text is one answer to a bare beginning of sequence (`after` is empty).
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        if not getattr(tokenizer, "chat_template", None):
            ids: Any = [tokenizer.bos_token_id, tokenizer.eos_token_id]
            begin = next((token for token in ids if token is not None), None)
            if begin is None:
                raise UserError("the tokenizer has neither a chat template nor a token to begin a text with")
            return cls((int(begin),), ())
        mark = "SPECENS-USER-TURN"
        messages = [{"role": "user", "content": mark}]
        text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, _, after = text.partition(mark)
        ids = [tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
        return cls(tuple(ids[0]), tuple(ids[1]))


@dataclass
class Row:
    """One text in the making. `forced` are tokens it takes without asking the model; with `is_turn_given` they are the whole
    rest of the user's turn and the header of the answer.
    """

    ids: list[int]
    is_greedy: bool
    forced: list[int]
    is_turn_given: bool = False
    num_prompt: int | None = None
    num_new: int = 0
    is_done: bool = False


@dataclass(frozen=True)
class Corpus:
    """Options of stage=corpus. Texts go to `folder` in shards; a run that was killed goes on with the missing ones.

    `prompts` is a file with more user turns, in the form of prompts=jsonl, `openers` are first words given to half of the
    sampled user turns, `exclude` are jsonl files of which no 32-token run may come into the corpus (texts that have one are
    dropped; the demo prompts always are). `hidden_layers` are the layers whose hidden states are kept (None: a few, spread
    over the depth; []: none). `part` "i/n" writes every n-th shard from the i-th: n processes fill one folder.
    """

    folder: str
    num_tokens: int = 1_000_000
    shard_texts: int = 192
    max_user_tokens: int = 128
    max_answer_tokens: int = 256
    greedy_share: float = 0.5
    temperature: float = 0.8
    user_temperature: float = 1.0
    openers: list[str] = field(default_factory=list)
    prompts: str | None = None
    exclude: list[str] = field(default_factory=list)
    hidden_layers: list[int] | None = None
    part: str = "0/1"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "shard_texts", "max_user_tokens", "max_answer_tokens"):
            check_count(f"stage.{name}", getattr(self, name))
        if not 0 <= self.greedy_share <= 1:
            raise UserError(f"stage.greedy_share={self.greedy_share}: give a number from 0 to 1")
        for name in ("temperature", "user_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"stage.{name}={getattr(self, name)}: give a number above 0")
        part_of(self.part)
        for path in (*self.exclude, *([self.prompts] if self.prompts else [])):
            if not Path(path).expanduser().is_file():
                raise UserError(f"stage: {path} does not exist")

    def run(self, target: Target) -> Texts:
        if target.tokenizer is None:
            raise UserError(f"{target.name}: stage=corpus needs the target's tokenizer")
        layers = default_hidden_layers(target) if self.hidden_layers is None else self.hidden_layers
        return replace(self, hidden_layers=layers)._run(target)

    def _run(self, target: Target) -> Texts:
        assert target.tokenizer is not None
        texts = self._open(target)
        excluded = np.unique(np.concatenate([runs_of(ids) for ids in self._excluded(target.tokenizer)]))
        index, count = part_of(self.part)
        written = texts.num_tokens()
        for number in range(index, 10**6, count):
            if written >= self.num_tokens:
                break
            path = texts.folder / f"{number:05}.safetensors"
            if not path.exists():
                begin = time.perf_counter()
                kept = self._write(target, path, number, excluded)
                written = texts.num_tokens()  # other processes write too
                speed = kept / (time.perf_counter() - begin)
                print(
                    f"shard {number}: {kept} tokens, {speed:.0f} tokens/s; {written} of {self.num_tokens}", flush=True
                )
        return texts

    def _open(self, target: Target) -> Texts:
        """The folder, begun or found; a folder begun with other options is refused."""
        folder = Path(self.folder).expanduser()
        ignored = ("folder", "num_tokens", "part")
        options = {name: value for name, value in asdict(self).items() if name not in ignored}
        manifest = {"target": target.name, "tokenizer": tokenizer_fingerprint(target.tokenizer), "options": options}
        path = folder / MANIFEST
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(manifest, indent=1))
            os.replace(partial, path)
        texts = Texts.open(folder, manifest["tokenizer"])
        for name, value in options.items():
            found = texts.manifest.get("options", {}).get(name)
            if found != value:
                raise UserError(
                    f"corpus {folder} was begun with stage.{name}={found}, not {value}: give another folder"
                )
        return texts

    def _excluded(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        for path in (DEMO_FILE, *self.exclude):
            for text in texts_of_jsonl(path):
                yield tokenizer.encode(text, add_special_tokens=False)

    def _write(self, target: Target, path: Path, number: int, excluded: np.ndarray) -> int:
        """One shard, whole or not at all. Returns its tokens."""
        assert target.tokenizer is not None
        rows = self._rows(target.tokenizer, number)
        hidden = write_texts(
            target, rows, Template.of(target.tokenizer), self, torch.Generator().manual_seed(number + (self.seed << 20))
        )
        kept = [r for r, row in enumerate(rows) if row.num_prompt is not None and not overlaps(row.ids, excluded)]
        ids = [token for r in kept for token in rows[r].ids]
        arrays = {
            "token_ids": torch.from_numpy(np.array(ids, dtype=narrow(target.vocab_size))),
            "length": torch.tensor([len(rows[r].ids) for r in kept], dtype=torch.int32),
            "prompt_length": torch.tensor([rows[r].num_prompt for r in kept], dtype=torch.int32),
            "is_greedy": torch.tensor([rows[r].is_greedy for r in kept]),
        }
        if self.hidden_layers:
            states = torch.cat([hidden[r, : len(rows[r].ids)] for r in kept])
            layers = {f"layer.{layer}": states[:, i].contiguous() for i, layer in enumerate(self.hidden_layers)}
            save_whole(layers, path.with_suffix(".hidden.safetensors"))
        save_whole(arrays, path)  # last: a shard is there when its tokens are
        return len(ids)

    def _rows(self, tokenizer: Any, number: int) -> list[Row]:
        """The beginnings of a shard's texts: given user turns first, then sampled ones, half of them after an opener."""
        template, draw = Template.of(tokenizer), np.random.default_rng([self.seed, number])
        given = texts_of_jsonl(self.prompts) if self.prompts else []
        given = given[number * self.shard_texts : (number + 1) * self.shard_texts]
        rows = []
        for r in range(self.shard_texts):
            turn = given[r] if r < len(given) else None
            opener = self.openers[draw.integers(len(self.openers))] if self.openers and draw.random() < 0.5 else ""
            forced = tokenizer.encode(opener if turn is None else turn, add_special_tokens=False)
            rows.append(Row(list(template.before), bool(draw.random() < self.greedy_share), forced))
            if not template.after:  # no chat: the whole text is the answer
                rows[-1].num_prompt = len(template.before)
            if turn is not None:
                rows[-1].forced += template.after
                rows[-1].is_turn_given = True
        return rows


def default_hidden_layers(target: Target) -> list[int]:
    """A quarter, half and three quarters of the way up, and the last, which the output projection reads."""
    last = target.model.config.get_text_config(decoder=True).num_hidden_layers
    return sorted({*(max(round((last + 1) * quarter / 4), 1) for quarter in (1, 2, 3)), last})


def part_of(part: str) -> tuple[int, int]:
    """ "i/n" -> (i, n)."""
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"stage.part={part}: give i/n with i from 0 to n-1, such as 0/4")
    return int(index), int(count)


def texts_of_jsonl(path: str | Path) -> list[str]:
    """All user turns of a jsonl file, in the form of prompts=jsonl."""
    return [turn for _, question in Jsonl(path=str(path)).read() for turn in question.turns]


def save_whole(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write under a temporary name and rename: a killed run leaves no half file under a real name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, partial)
    os.replace(partial, path)


def write_texts(
    target: Target, rows: Sequence[Row], template: Template, options: Corpus, generator: torch.Generator
) -> torch.Tensor:
    """Complete all rows in place. Returns the hidden states `[rows, tokens, layers, hidden_size]` (bfloat16;
    zero where not computed).
    """
    layers = options.hidden_layers or []
    cache = target.prefill(template.before, layers)
    first = len(template.before) - 1
    most = len(template.before) + options.max_user_tokens + len(template.after) + options.max_answer_tokens
    most = max(most, *(len(row.ids) + len(row.forced) + options.max_answer_tokens for row in rows))
    limit = min(most, target.context_limit or most)
    size = target.model.config.get_text_config(decoder=True).hidden_size
    hidden = torch.zeros(len(rows), limit, len(layers), size, dtype=torch.bfloat16)
    for i, layer in enumerate(layers):
        if first:
            hidden[:, :first, i] = cache.hidden[layer].to(hidden)
    cache.repeat_rows(len(rows))
    ends = {*eos_ids(target.model.generation_config), *template.after[:1]}  # pyright: ignore[reportArgumentType]
    active = list(range(len(rows)))
    while active:
        logits = target.extend(cache, [rows[r].ids[-1] for r in active])
        going = [place for place, r in enumerate(active) if not rows[r].is_done]
        for i, layer in enumerate(layers):
            hidden[[active[place] for place in going], cache.length - 1, i] = cache.hidden[layer][going, 0].to(hidden)
        tokens = choose(logits, [rows[r] for r in active], options, ends, generator)
        for place in going:
            append(rows[active[place]], tokens[place], template, options, ends, limit)
        going = [place for place in going if not rows[active[place]].is_done]
        if len(active) - len(going) > len(active) // MIN_FINISHED or not going:
            cache.keep_rows(going)
            active = [active[place] for place in going]
    return hidden


def choose(
    logits: torch.Tensor, rows: Sequence[Row], options: Corpus, ends: Collection[int], generator: torch.Generator
) -> list[int]:
    """The next token of each row, from logits `[rows, vocab]`: greedy answers take the best, all else is sampled. A user's turn
    does not end before it began.
    """
    chosen = logits.argmax(-1)
    sampled = [r for r, row in enumerate(rows) if row.num_prompt is None or not row.is_greedy]
    if sampled:
        heat = [options.user_temperature if rows[r].num_prompt is None else options.temperature for r in sampled]
        scores = logits[sampled].float() / torch.tensor(heat, device=logits.device)[:, None]
        begins = [i for i, r in enumerate(sampled) if rows[r].num_new == 0]
        scores[torch.tensor(begins, dtype=torch.long)[:, None], torch.tensor(sorted(ends))] = -torch.inf
        noise = torch.empty(scores.shape).exponential_(generator=generator).to(scores.device)
        chosen[sampled] = (scores - noise.log()).argmax(-1)  # the exponential race: a draw from the softmax
    return chosen.tolist()


def append(row: Row, token: int, template: Template, options: Corpus, ends: Collection[int], limit: int) -> None:
    """Give a row its next token: a forced one if there is one, else the model's. Ends turns and texts."""
    is_free = not row.forced
    row.ids.append(token if is_free else row.forced.pop(0))
    row.num_new += 1
    if row.num_prompt is not None:
        num_answer = len(row.ids) - row.num_prompt
        row.is_done = row.ids[-1] in ends or num_answer >= options.max_answer_tokens
    elif row.is_turn_given:
        row.num_prompt = len(row.ids) if not row.forced else None
    elif is_free and (row.ids[-1] in ends or row.num_new >= options.max_user_tokens):
        # The token that ends the turn is the first of what stands between turn and answer.
        has_begun = row.ids[-1] == template.after[0]
        row.forced, row.is_turn_given = list(template.after[has_begun:]), True
    row.is_done |= len(row.ids) >= limit
