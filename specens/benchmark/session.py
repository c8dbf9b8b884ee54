"""A bench: every system on one loaded target, the same prompts, in turns; what was measured is on disk after every prompt."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specens.benchmark.figure import draw
from specens.benchmark.measure import Timed, memory_kind, peak_memory
from specens.benchmark.options import Options
from specens.benchmark.page import page_of, progress
from specens.benchmark.rows import Row, csv_of
from specens.benchmark.summary import PLAIN, summarise, versus
from specens.benchmark.systems import Ground, OurRunner, Parts, Peer, Runner, our_runner, shuffled
from specens.cpu import packing
from specens.errors import UserError, one_line
from specens.experiment import Session
from specens.files import plain, write_whole
from specens.prompts import Question
from specens.rendering import Prompt, next_prompt
from specens.screen import Screen
from specens.text import first_difference

SCHEMA_VERSION = 1
"""Of `bench.json`."""


Described = Mapping[str, "Parts | Peer | str"]
"""What to measure, by name; a text says why a system cannot run here."""


@dataclass
class Progress:
    """What has been measured so far. `texts`: prompt ids -> plain decoding's output ids."""

    rows: list[Row] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    texts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    num_prompts: int = 0
    num_done: int = 0
    status: str = "running"


class Bench:
    """The loaded systems of one bench."""

    def __init__(
        self,
        session: Session,
        described: Described,
        options: Options,
        folder: Path,
        config: Mapping[str, Any],
        screen: Screen,
    ) -> None:
        self._session, self._options, self._folder, self._config, self._screen = (
            session,
            options,
            folder,
            config,
            screen,
        )
        self._names = list(described)
        self._questions = session.job.prompts.questions()
        self.progress = Progress(num_prompts=sum(len(question.prompt_names) for question in self._questions))
        self.ground = Ground(session.target, session.config, session.job.sampling.seed, self._longest())
        self._environment = session.environment()
        self._runners: dict[str, Runner] = {}
        for name, system in described.items():
            self._load(name, system)
        self._is_keyed = not session.config.do_sample or all(
            parts.verifier.coupled for parts in described.values() if isinstance(parts, Parts)
        )

    def _load(self, name: str, system: Parts | Peer | str) -> None:
        """Make it ready, or note why it cannot be."""
        if isinstance(system, str):
            self.progress.unavailable[name] = system
            return self._screen.say(f"{name}: left out ({system})")
        self._screen.say(f"loading {name}")
        before = packing(self.ground.target.model)
        try:
            self._runners[name] = (
                self._our_runner(name, system) if isinstance(system, Parts) else system.load(self.ground)
            )
        except Exception as error:  # whatever a peer, or a drafter that does not fit this target, raises
            if name == PLAIN:
                raise
            self.progress.unavailable[name] = one_line(error) if isinstance(error, UserError) else describe_error(error)
            self._screen.say(f"{name}: left out ({self.progress.unavailable[name]})")
        if packing(self.ground.target.model) != before:
            raise UserError(
                f"systems.{name}: loading it has changed the target's weights, for all systems; leave it out"
            )
        return None

    def _our_runner(self, name: str, parts: Parts) -> OurRunner:
        if name == PLAIN:
            return OurRunner(self._session.plain, self.ground)
        return our_runner(parts, self.ground, self.progress.texts)

    def run(self) -> dict[str, Any]:
        """Measure everything; the content of `bench.json`. After every prompt the files on disk are complete."""
        try:
            self._warm_up_first()
            for prompt, label in self._prompts():
                self._measure(prompt, label)
                self.progress.num_done += 1
                self._write()
            self.progress.status = "finished"
        except BaseException as failure:
            self.progress.status = "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"
            raise
        finally:
            self._screen.end_prompt()
            content = self._write()
        note = draw(content, self._folder)
        if note:
            self._screen.say(note)
        return content

    def _prompts(self) -> Iterator[tuple[Prompt, str]]:
        """Every prompt, once its plain text is known: it is what a conversation's next turn goes on from, so that every system
        gets the same prompt, and what the texts are compared with. Its own time is not counted.
        """
        tokenizer, chat, number = self._session.target.tokenizer, self._session.job.prompts.chat, 0
        assert tokenizer is not None
        for question in self._questions:
            answers: list[str] = []
            for name in question.prompt_names:
                number += 1
                label = f"[{number}/{self.progress.num_prompts}] {name}"
                self._screen.begin_prompt(f"{label}  plain text")
                try:
                    prompt = next_prompt(question, answers, tokenizer, chat)
                    ids = self._runners[PLAIN].decode(prompt).output_ids
                except Exception as failure:
                    self._fail(question, name, label, failure)
                    break
                self.progress.texts[prompt.token_ids] = ids
                yield prompt, label
                answers.append(str(tokenizer.decode(list(ids), skip_special_tokens=True)))

    def _fail(self, question: Question, prompt_id: str, label: str, failure: Exception) -> None:
        """A prompt that plain decoding cannot decode is a failure of every system."""
        error = one_line(failure) if isinstance(failure, UserError) else describe_error(failure)
        self.progress.rows += [Row(prompt_id, question.category, 0, 0, name, error=error) for name in self._runners]
        self._screen.say(f"{label}  failed: {error}")
        self._write()

    def _measure(self, prompt: Prompt, label: str) -> None:
        """One prompt: all repeats of all systems, in turns."""
        if self._warms_every:
            self._warm_up(prompt, label)
        before = len(self.progress.rows)
        for repeat in range(self._options.repeats):
            for order, name in enumerate(shuffled(list(self._runners), self._options.seed, prompt.id, repeat)):
                self._screen.begin_prompt(f"{label}  repeat {repeat + 1}  {name}")
                self.progress.rows.append(self._row(prompt, repeat, order, name))
        self._screen.end_prompt()
        self._screen.say(f"{label}  {progress(self.progress.rows[before:], list(self._runners))}")

    def _row(self, prompt: Prompt, repeat: int, order: int, name: str) -> Row:
        row = {"prompt_id": prompt.id, "category": prompt.category, "repeat": repeat, "order": order, "system": name}
        try:
            with peak_memory(self.ground.target.device) as peak:
                timed = self._runners[name].decode(prompt)
        except (Exception, SystemExit) as failure:  # the other systems must go on, whatever it is
            self._log(f"prompt {prompt.id}, {name}", failure)
            return Row(**row, error=describe_error(failure))
        return Row(**row, **timed.columns(), **self._comparison(prompt, timed), peak_memory_bytes=peak.num_bytes)

    def _comparison(self, prompt: Prompt, timed: Timed) -> dict[str, Any]:
        """Is it plain decoding's text? Not asked where a verifier draws otherwise: that gives another text of the same law."""
        if not self._is_keyed:
            return {}
        fork_at = first_difference(timed.output_ids, self.progress.texts[prompt.token_ids])
        return {"is_identical": fork_at is None, "fork_at": fork_at}

    @property
    def _warms_every(self) -> bool:
        asked = self._options.warm_up_every
        return self.ground.target.device.type == "cuda" if asked is None else asked

    def _warm_up_first(self) -> None:
        """A few tokens of the first prompt that can be decoded, by every system."""
        tokenizer = self._session.target.tokenizer
        assert tokenizer is not None
        for question in self._questions:
            try:
                prompt = next_prompt(question, [], tokenizer, self._session.job.prompts.chat)
                self._runners[PLAIN].decode(prompt, self._options.warm_up_tokens)
            except Exception:  # it fails again, by name, when its turn comes
                continue
            return self._warm_up(prompt, "")

    def _warm_up(self, prompt: Prompt, label: str) -> None:
        for name, runner in self._runners.items():
            self._screen.begin_prompt(f"{label}  warming up {name}".strip())
            try:
                runner.decode(prompt, self._options.warm_up_tokens)
            except (Exception, SystemExit):  # it fails again, by name, when it is timed
                continue
        self._screen.end_prompt()

    def _longest(self) -> int:
        """Tokens of the longest text to come, at most: all turns of a question, and an answer to each."""
        tokenizer, answer = self._session.target.tokenizer, int(self._session.config.max_new_tokens or 0)
        assert tokenizer is not None
        longest = 0
        for question in self._questions:
            try:
                first = len(next_prompt(question, [], tokenizer, self._session.job.prompts.chat).token_ids)
            except UserError:  # it fails again, by name, when its turn comes
                continue
            later = sum(len(tokenizer.encode(turn)) + TURN_TOKENS for turn in question.turns[1:])
            longest = max(longest, first + later + answer * max(len(question.turns), 1))
        limit = self._session.target.context_limit
        return longest if limit is None else min(longest, limit)

    def _log(self, what: str, failure: BaseException) -> None:
        with (self._folder / "errors.log").open("a", encoding="utf-8") as file:
            file.write(f"{what}\n{''.join(traceback.format_exception(failure))}\n")

    def _write(self) -> dict[str, Any]:
        """bench.csv, bench.json and bench.md of what was measured so far; the content of bench.json."""
        device, state = self.ground.target.device, self.progress
        facts = {name: runner.facts() for name, runner in self._runners.items()}
        summaries = summarise(state.rows, self._names, state.unavailable)
        content = plain(
            {
                "schema_version": SCHEMA_VERSION,
                "status": state.status,
                "num_prompts": state.num_prompts,
                "num_prompts_done": state.num_done,
                "repeats": self._options.repeats,
                "seed": self._options.seed,
                "max_new_tokens": self._session.config.max_new_tokens,
                "sampled": bool(self._session.config.do_sample),
                "peak_memory_is": memory_kind(device),
                "systems": {name: {**facts.get(name, {}), **numbers} for name, numbers in summaries.items()},
                "versus": {} if state.status == "running" else versus(state.rows, list(self._runners)),
                "environment": self._environment,
                "config": self._config,
            }
        )
        text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
        files = {"bench.csv": csv_of(state.rows), "bench.json": text + "\n", "bench.md": page_of(content)}
        try:
            write_whole(self._folder, files)
        except OSError as error:
            raise UserError(f"cannot write the bench into {self._folder}: {error.strerror}") from error
        return content


TURN_TOKENS = 64
"""More than a chat template puts around a turn."""


def describe_error(failure: BaseException) -> str:
    return one_line(f"{type(failure).__name__}: {failure}")
