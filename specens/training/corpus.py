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
from specens.errors import UserError, check_count, check_number
from specens.models import tokenizer_fingerprint
from specens.prompts import DEMO_FILE, Jsonl
from specens.trained import model_fingerprint
from specens.training.texts import MANIFEST, Texts, narrow, overlaps, runs_of

MIN_FINISHED = 8
"""Finished rows are dropped from the batch once they are more than an eighth of it: dropping copies the cache."""


@dataclass(frozen=True)
class Template:
    """The chat template around a user's turn, as ids: what stands before it, and what follows up to the answer. `end` is the
    special token that `after` begins with, if it does: a model that writes a user's turn ends it with that.

    Without a chat template, a text begins with a bare beginning of sequence, and `after` is empty: the prompt is a sampled text.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: int | None = None

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
        if not ids[0]:
            raise UserError(
                "stage=corpus: the tokenizer's chat template puts nothing before a user's turn to begin with"
            )
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        return cls(tuple(ids[0]), tuple(ids[1]), ids[1][0] if ids[1] and ids[1][0] in special else None)


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
        check_count("stage.seed", self.seed, 0)
        check_number("stage.greedy_share", self.greedy_share, most=1)
        for name in ("temperature", "user_temperature"):
            check_number(f"stage.{name}", getattr(self, name), above=True)
        part_of(self.part)
        if not isinstance(self.folder, str):
            raise UserError(f"stage.folder={self.folder!r}: give a folder")
        for name in ("openers", "exclude"):
            value = getattr(self, name)
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise UserError(f"stage.{name}={value!r}: give a list of texts, such as [one,two]")
        for name, paths in (("exclude", self.exclude), ("prompts", [] if self.prompts is None else [self.prompts])):
            for path in paths:
                if not Path(str(path)).expanduser().is_file():
                    raise UserError(f"stage.{name}: {path} does not exist")
        if self.hidden_layers is not None and not isinstance(self.hidden_layers, list):
            raise UserError(f"stage.hidden_layers={self.hidden_layers!r}: give a list of layers, such as [8,16]")
        for layer in self.hidden_layers or []:
            check_count("stage.hidden_layers", layer, 0)

    def run(self, target: Target) -> Texts:
        if target.tokenizer is None:
            raise UserError(f"{target.name}: stage=corpus needs the target's tokenizer")
        layers = default_hidden_layers(target) if self.hidden_layers is None else self.hidden_layers
        last = target.model.config.get_text_config(decoder=True).num_hidden_layers
        if layers and max(layers) > last:
            raise UserError(
                f"stage.hidden_layers={layers}: the target has {last} layers; give indices from 0 to {last}"
            )
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
        manifest = {
            "target": target.name,
            "model": model_fingerprint(target.model),
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "options": options,
        }
        path = folder / MANIFEST
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(manifest, indent=1))
            os.replace(partial, path)
        texts = Texts.open(folder, manifest["tokenizer"], manifest["model"])
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
        generator = torch.Generator(target.device).manual_seed(number + (self.seed << 20))
        hidden = write_texts(target, rows, Template.of(target.tokenizer), self, generator)
        whole = [r for r, row in enumerate(rows) if row.num_prompt is not None and len(row.ids) > row.num_prompt]
        if not whole:
            raise UserError(
                f"{target.name}: none of {len(rows)} texts got as far as an answer within {hidden.shape[1]} tokens; lower "
                "stage.max_user_tokens"
            )
        kept = [r for r in whole if not overlaps(rows[r].ids, excluded)]
        ids = [token for r in kept for token in rows[r].ids]
        arrays = {
            "token_ids": torch.from_numpy(np.array(ids, dtype=narrow(target.vocab_size))),
            "length": torch.tensor([len(rows[r].ids) for r in kept], dtype=torch.int32),
            "prompt_length": torch.tensor([rows[r].num_prompt for r in kept], dtype=torch.int32),
            "is_greedy": torch.tensor([rows[r].is_greedy for r in kept], dtype=torch.bool),
        }
        if self.hidden_layers:
            states = torch.cat([hidden[0, :0], *(hidden[r, : len(rows[r].ids)] for r in kept)])
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
            if turn is not None:
                rows[-1].forced += template.after
                rows[-1].is_turn_given = True
                rows[-1].num_prompt = None if rows[-1].forced else len(template.before)
        return rows


def default_hidden_layers(target: Target) -> list[int]:
    """A quarter, half and three quarters of the way up, and the last, which the output projection reads."""
    last = target.model.config.get_text_config(decoder=True).num_hidden_layers
    return sorted({*(max(round((last + 1) * quarter / 4), 1) for quarter in (1, 2, 3)), last})


def part_of(part: str) -> tuple[int, int]:
    """ "i/n" -> (i, n)."""
    index, _, count = str(part).partition("/")
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
    ends = frozenset(eos_ids(target.model.generation_config))  # pyright: ignore[reportArgumentType]
    turn_ends = ends if template.end is None else ends | {template.end}
    active = list(range(len(rows)))
    while active:
        logits = target.extend(cache, [rows[r].ids[-1] for r in active])
        going = [place for place, r in enumerate(active) if not rows[r].is_done]
        for i, layer in enumerate(layers):
            hidden[[active[place] for place in going], cache.length - 1, i] = cache.hidden[layer][going, 0].to(hidden)
        tokens = choose(logits, [rows[r] for r in active], options, turn_ends, generator)
        for place in going:
            row = rows[active[place]]
            append(row, tokens[place], template, options, ends if row.num_prompt is not None else turn_ends)
            row.is_done |= len(row.ids) >= limit
        going = [place for place in going if not rows[active[place]].is_done]
        if len(active) - len(going) > len(active) // MIN_FINISHED or not going:
            cache.keep_rows(going)
            active = [active[place] for place in going]
    return hidden


def choose(
    logits: torch.Tensor, rows: Sequence[Row], options: Corpus, turn_ends: Collection[int], generator: torch.Generator
) -> list[int]:
    """The next token of each row, from logits `[rows, vocab]`: greedy answers take the best, all else is sampled. A user's turn
    does not end before it began.
    """
    logits = logits.to(generator.device)
    chosen = logits.argmax(-1)
    sampled = [r for r, row in enumerate(rows) if row.num_prompt is None or not row.is_greedy]
    if sampled:
        heat = [options.user_temperature if rows[r].num_prompt is None else options.temperature for r in sampled]
        scores = logits[sampled].float() / torch.tensor(heat, device=logits.device)[:, None]
        begins = [i for i, r in enumerate(sampled) if rows[r].num_new == 0]
        for i in begins if turn_ends else ():
            scores[i, sorted(turn_ends)] = -torch.inf
        noise = torch.empty_like(scores).exponential_(generator=generator)
        chosen[sampled] = (scores - noise.log()).argmax(-1)  # the exponential race: a draw from the softmax
    return chosen.tolist()


def append(row: Row, token: int, template: Template, options: Corpus, ends: Collection[int]) -> None:
    """Give a row its next token: a forced one if there is one, else the model's, which ends a turn if it is one of `ends`."""
    is_free = not row.forced
    row.ids.append(token if is_free else row.forced.pop(0))
    row.num_new += 1
    has_ended = row.ids[-1] in ends
    if row.num_prompt is not None:
        row.is_done = has_ended or len(row.ids) - row.num_prompt >= options.max_answer_tokens
        return
    if is_free and (has_ended or row.num_new >= options.max_user_tokens):  # a sampled turn is over, or long enough
        row.forced, row.is_turn_given = list(template.after), True
        if row.forced and has_ended:  # whatever ended it, the template's own token stands there
            row.ids[-1] = row.forced.pop(0)
        row.is_done = has_ended and not template.after
    if row.is_turn_given and not row.forced:
        row.num_prompt = len(row.ids)
