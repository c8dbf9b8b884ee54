"""The target writes its own training data: stage=corpus.

A drafter must foresee what *this* target outputs, so the best text to learn from is its own. User
turns are sampled from the target's chat template (the header of a user's turn makes a chat model
write one), and it answers them, some greedily, some sampled. No data set is needed.
(Self-generated instructions: Xu et al. 2024, Magpie, arXiv 2406.08464; drafters trained on the
target's own text: Zhou et al. 2023, DistillSpec, arXiv 2310.08461.)

All texts of a batch start from one shared prefix and take one token per forward, so they always
have the same length: no padding, one prefill, and a finished text is dropped. The hidden states
that training needs are kept from these same forwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specens.cli import show
from specens.decoding.generation import eos_ids
from specens.decoding.target.target import Target
from specens.drafters.trained.weights import model_fingerprint
from specens.errors import UserError, check_count, check_list, check_number
from specens.models.load import tokenizer_fingerprint
from specens.prompts.sources import DEMO_FILE, Jsonl
from specens.records.files import write_whole
from specens.train import shards
from specens.train.shards import TextShards, check_files, check_folder, encode

MIN_FINISHED = 8
"""Finished texts leave the batch once they are over an eighth of it: that copies the cache."""


@dataclass(frozen=True)
class Template:
    """The chat template around a user's turn, as ids: what stands before it, and what follows up to
    the answer. `end` is the special token that `after` begins with, if it does: a model that writes
    a user's turn ends it with that.

    Without a chat template, a text begins with a bare beginning of sequence, and `after` is empty:
    the prompt is a sampled text.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: int | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        if not getattr(tokenizer, "chat_template", None):
            ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
            begin = next((token for token in ids if token is not None), None)
            if begin is None:
                raise UserError("the tokenizer has neither a chat template nor a BOS or EOS")
            return cls((int(begin),), ())
        mark = "SPECENS-USER-TURN"
        turn = [{"role": "user", "content": mark}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        before, after = (encode(tokenizer, part) for part in text.partition(mark)[::2])
        if not before:
            raise UserError("stage=corpus: the chat template puts nothing before a user's turn")
        special = {id for id, added in tokenizer.added_tokens_decoder.items() if added.special}
        end = after[0] if after and after[0] in special else None
        return cls(tuple(before), tuple(after), end)


@dataclass
class PartialText:
    """A text in the making. `forced` are its next tokens, whatever the model predicts; with
    `is_turn_given` they are the whole rest of the user's turn and the header of the answer.
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
    """Options of stage=corpus. Texts go to `folder` in shards; a run that was killed is resumed
    with the missing ones.

    `prompts` is a file with more user turns, in the form of prompts=jsonl, `openers` are first
    words given to half of the sampled user turns, `exclude` are jsonl files of which no 32-token
    run may occur in the corpus (texts that have one are dropped; the demo prompts always are).
    `hidden_layers` are the layers whose hidden states are kept (None: a few, spread over the depth;
    []: none). `part` "i/n" writes every n-th shard from the i-th: n processes fill one folder.
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
        check_folder("stage.folder", self.folder)
        for name in ("num_tokens", "shard_texts", "max_user_tokens", "max_answer_tokens"):
            check_count(f"stage.{name}", getattr(self, name))
        check_count("stage.seed", self.seed, 0)
        check_number("stage.greedy_share", self.greedy_share, most=1)
        for name in ("temperature", "user_temperature"):
            check_number(f"stage.{name}", getattr(self, name), above=True)
        part_of(self.part)
        check_list("stage.openers", self.openers, str, "[Why,How]")
        check_list("stage.exclude", self.exclude, str, "[question.jsonl]")
        check_files("stage.exclude", self.exclude)
        check_files("stage.prompts", [] if self.prompts is None else [self.prompts])
        if self.hidden_layers is not None:
            check_list("stage.hidden_layers", self.hidden_layers, int, "[8,16]")
            for layer in self.hidden_layers:
                check_count("stage.hidden_layers", layer, 0)

    def run(self, target: Target) -> TextShards:
        if target.tokenizer is None:
            raise UserError(f"{target.name}: stage=corpus needs the target's tokenizer")
        layers, last = self.hidden_layers, target.text_config.num_hidden_layers
        if layers is None:  # a quarter, half and three quarters of the way up, and the last
            spread = (max(round((last + 1) * quarter / 4), 1) for quarter in (1, 2, 3))
            layers = sorted({*spread, last})
        if max(layers, default=0) > last:
            raise UserError(f"stage.hidden_layers={layers}: give layers of the target, 0 to {last}")
        return replace(self, hidden_layers=layers)._run(target, target.tokenizer)

    def _run(self, target: Target, tokenizer: Any) -> TextShards:
        texts = self._open(target)
        turns = (turn for path in (DEMO_FILE, *self.exclude) for turn in texts_of_jsonl(path))
        excluded = np.unique(
            np.concatenate([shards.runs_of(encode(tokenizer, turn)) for turn in turns])
        )
        index, count = part_of(self.part)
        written = texts.num_tokens()
        for number in range(index, 10**6, count):
            if written >= self.num_tokens:
                break
            path = texts.folder / f"{number:05}.safetensors"
            if not path.exists():
                begin = time.perf_counter()
                kept = self._write(target, tokenizer, path, excluded)
                speed = f"{kept / (time.perf_counter() - begin):.0f} tokens/s"
                written = texts.num_tokens()  # other processes write too
                progress = f"{written} of {self.num_tokens}"
                show(f"shard {number}: {kept} tokens, {speed}; {progress}")
        return texts

    def _open(self, target: Target) -> TextShards:
        """The folder, begun or found; a folder begun with other options is refused."""
        folder = Path(self.folder).expanduser()
        ignored = ("folder", "num_tokens", "part")
        options = {name: value for name, value in asdict(self).items() if name not in ignored}
        model, tokenizer = model_fingerprint(target.model), tokenizer_fingerprint(target.tokenizer)
        if not (folder / shards.MANIFEST).exists():
            manifest = {"target": target.name, "model": model, "tokenizer": tokenizer}
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(
                folder, {shards.MANIFEST: json.dumps({**manifest, "options": options}, indent=1)}
            )
        texts = TextShards.open(folder, tokenizer, model)
        for name, value in options.items():
            found = texts.options.get(name)
            if found != value:
                problem = f"was begun with stage.{name}={found}, not {value}: give another folder"
                raise UserError(f"corpus {folder} {problem}")
        return texts

    def _write(self, target: Target, tokenizer: Any, path: Path, excluded: np.ndarray) -> int:
        """One shard, whole or not at all. Returns its tokens."""
        number, template = int(path.stem), Template.of(tokenizer)
        texts = self._beginnings(tokenizer, template, number)
        generator = torch.Generator(target.device).manual_seed(number + (self.seed << 20))
        hidden = write_texts(target, texts, template, self, generator)
        whole = [i for i, t in enumerate(texts) if t.num_prompt and len(t.ids) > t.num_prompt]
        if not whole:
            reached = f"got as far as an answer within {hidden.shape[1]} tokens"
            remedy = "lower stage.max_user_tokens"
            raise UserError(f"{target.name}: none of {len(texts)} texts {reached}; {remedy}")
        chosen = [i for i in whole if not shards.overlaps(texts[i].ids, excluded)]
        kept = [texts[i] for i in chosen]
        ids = [token for text in kept for token in text.ids]
        arrays = {
            "token_ids": torch.from_numpy(np.array(ids, dtype=shards.narrow(target.vocab_size))),
            "length": torch.tensor([len(text.ids) for text in kept], dtype=torch.int32),
            "prompt_length": torch.tensor([text.num_prompt for text in kept], dtype=torch.int32),
            "is_greedy": torch.tensor([text.is_greedy for text in kept], dtype=torch.bool),
        }
        files = {}
        if self.hidden_layers:
            states = [hidden[i, : len(texts[i].ids)] for i in chosen]
            columns = torch.cat([hidden[0, :0], *states]).unbind(1)
            names = (f"layer.{layer}" for layer in self.hidden_layers)
            layers = dict(zip(names, (c.contiguous() for c in columns), strict=True))
            files[path.with_suffix(".hidden.safetensors").name] = partial(save_file, layers)
        files[path.name] = partial(save_file, arrays)  # last: a shard is there when its tokens are
        write_whole(path.parent, files)
        return len(ids)

    def _beginnings(self, tokenizer: Any, template: Template, number: int) -> list[PartialText]:
        """The beginnings of a shard's texts: given user turns first, then sampled ones, half of
        them after an opener.
        """
        rng = np.random.default_rng([self.seed, number])
        given = texts_of_jsonl(self.prompts) if self.prompts else []
        given = given[number * self.shard_texts : (number + 1) * self.shard_texts]
        texts = []
        for r in range(self.shard_texts):
            turn = given[r] if r < len(given) else None
            is_opened = self.openers and rng.random() < 0.5
            opener = self.openers[rng.integers(len(self.openers))] if is_opened else ""
            forced = encode(tokenizer, opener if turn is None else turn)
            is_greedy = bool(rng.random() < self.greedy_share)
            text = PartialText(list(template.before), is_greedy, forced)
            if turn is not None:
                text.forced += template.after
                text.is_turn_given = True
                text.num_prompt = None if text.forced else len(template.before)
            texts.append(text)
        return texts


def part_of(part: str) -> tuple[int, int]:
    """ "i/n" -> (i, n)."""
    index, _, count = str(part).partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"stage.part={part}: give i/n with i from 0 to n-1, such as 0/4")
    return int(index), int(count)


def texts_of_jsonl(path: str | Path) -> list[str]:
    """All user turns of a jsonl file, in the form of prompts=jsonl."""
    return [turn for _, question in Jsonl(path=str(path)).read() for turn in question.turns]


def write_texts(
    target: Target,
    texts: Sequence[PartialText],
    template: Template,
    options: Corpus,
    generator: torch.Generator,
) -> torch.Tensor:
    """Complete all texts in place. Returns the hidden states `[texts, tokens, layers, hidden_size]`
    (bfloat16; zero where not computed).
    """
    layers = options.hidden_layers or []
    num_before = len(template.before)
    turn = num_before + options.max_user_tokens + len(template.after)
    most = max(turn, *(len(t.ids) + len(t.forced) for t in texts)) + options.max_answer_tokens
    limit = min(most, target.context_limit or most)
    size = target.text_config.hidden_size
    hidden = torch.zeros(len(texts), limit, len(layers), size, dtype=torch.bfloat16)
    ends = frozenset(eos_ids(target.model.generation_config))  # pyright: ignore[reportArgumentType]
    turn_ends = ends if template.end is None else ends | {template.end}
    with target.prefill(template.before, layers) as cache:
        for i, layer in enumerate(layers if num_before > 1 else ()):
            hidden[:, : num_before - 1, i] = cache.hidden[layer].to(hidden)
        cache.repeat_rows(len(texts))
        rows = list(range(len(texts)))  # of the batch: which text each is
        while rows:
            logits = target.extend(cache, [texts[r].ids[-1] for r in rows])
            going = [place for place, r in enumerate(rows) if not texts[r].is_done]
            for i, layer in enumerate(layers):
                states = cache.hidden[layer][going, 0].to(hidden)
                hidden[[rows[place] for place in going], cache.length - 1, i] = states
            tokens = choose(logits, [texts[r] for r in rows], options, turn_ends, generator)
            for place in going:
                text = texts[rows[place]]
                own_ends = ends if text.num_prompt is not None else turn_ends
                append(text, tokens[place], template, options, own_ends)
                text.is_done |= len(text.ids) >= limit
            going = [place for place in going if not texts[rows[place]].is_done]
            if len(rows) - len(going) > len(rows) // MIN_FINISHED or not going:
                cache.keep_rows(going)
                rows = [rows[place] for place in going]
    return hidden


def choose(
    logits: torch.Tensor,
    texts: Sequence[PartialText],
    options: Corpus,
    turn_ends: Collection[int],
    generator: torch.Generator,
) -> list[int]:
    """The next token of each text, from logits `[rows, vocab]`: greedy answers take the best, all
    else is sampled. A user's turn does not end before it began.
    """
    logits = logits.to(generator.device)
    chosen = logits.argmax(-1)
    sampled = [r for r, text in enumerate(texts) if text.num_prompt is None or not text.is_greedy]
    if sampled:
        user, answer = options.user_temperature, options.temperature
        heat = [user if texts[r].num_prompt is None else answer for r in sampled]
        scores = logits[sampled].float() / torch.tensor(heat, device=logits.device)[:, None]
        begins = [i for i, r in enumerate(sampled) if texts[r].num_new == 0]
        for i in begins if turn_ends else ():
            scores[i, sorted(turn_ends)] = -torch.inf
        noise = torch.empty_like(scores).exponential_(generator=generator)
        chosen[sampled] = (scores - noise.log()).argmax(-1)  # a sample of the softmax
    return chosen.tolist()


def append(
    text: PartialText, token: int, template: Template, options: Corpus, ends: Collection[int]
) -> None:
    """Give a text its next token: a forced one if there is one, else the model's, which ends a turn
    if it is one of `ends`.
    """
    is_free = not text.forced
    text.ids.append(token if is_free else text.forced.pop(0))
    text.num_new += 1
    has_ended = text.ids[-1] in ends
    if text.num_prompt is not None:
        num_answer = len(text.ids) - text.num_prompt
        text.is_done = has_ended or num_answer >= options.max_answer_tokens
        return
    if is_free and (has_ended or text.num_new >= options.max_user_tokens):
        # A sampled turn is over, or long enough.
        text.forced, text.is_turn_given = list(template.after), True
        if text.forced and has_ended:  # whatever ended it, the template's own token stands there
            text.ids[-1] = text.forced.pop(0)
        text.is_done = has_ended and not template.after
    if text.is_turn_given and not text.forced:
        text.num_prompt = len(text.ids)
