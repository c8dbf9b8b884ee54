"""A bench: every system on one loaded target, the same prompts, in turns. What was measured is on
disk after every prompt: `bench.csv`, `bench.json`, `bench.md`; at the end a figure too.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specens.bench.clock import memory_kind, peak_memory
from specens.bench.figure import draw
from specens.bench.options import BenchOptions, described, refuse_ignored
from specens.bench.page import page_of, progress
from specens.bench.rows import Row, csv_of
from specens.bench.summary import AR, summarise, versus
from specens.bench.systems import BenchSetup, Parts, Peer, Runner, SpecensRunner, shuffled
from specens.config.build import build
from specens.config.compose import resolved
from specens.config.folder import run_part, write_overrides
from specens.drafters.none import NoDrafter
from specens.errors import UserError, one_line
from specens.models.cpu_linear import packing
from specens.models.detokenize import divergence
from specens.prompts.chat import Prompt
from specens.prompts.sources import Question
from specens.records.files import plain, write_result
from specens.run.job import Job, job_of
from specens.run.session import Session, load_session
from specens.run.terminal import Terminal

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMA_VERSION = 2
"""Of `bench.json`."""

OWN = ("bench", "systems")
"""The entries of the configuration that a run does not have."""

TURN_TOKENS = 64
"""More than a chat template puts around a turn."""


def bench(
    config: DictConfig, folder: Path, overrides: Sequence[str] = (), hydra: DictConfig | None = None
) -> dict[str, Any]:
    """Measure what `config`, composed from `overrides`, describes into `folder`; the content of
    bench.json. `hydra`: as for specens.run.run.
    """
    terminal, options = Terminal(), build(config.bench)
    refuse_ignored(overrides)
    job = bench_job(config)
    systems = described(config, job, options.systems)
    _take(folder)
    if hydra is not None:
        write_overrides(config, folder, hydra)
    session = load_session(job, terminal)
    done = Bench(session, systems, options, folder, resolved(config), terminal).run()
    terminal.say((folder / "bench.md").read_text(encoding="utf-8").rstrip())
    terminal.say(f"run folder: {folder}")
    return done


def bench_job(config: DictConfig) -> Job:
    """What all systems have in common, checked before any model is loaded."""
    return job_of(run_part(config, OWN), drafter=NoDrafter(), baseline=False)


def _take(folder: Path) -> None:
    """A folder of its own for every bench."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.csv").open("x").close()
    except FileExistsError as error:
        raise UserError(
            f"{folder} already holds a bench: give this one a folder of its own (hydra.run.dir=...)"
        ) from error
    except OSError as error:
        raise UserError(f"cannot create the run folder {folder}: {error.strerror}") from error


@dataclass
class Progress:
    """What has been measured so far; `unavailable`: why a system cannot run here."""

    num_prompts: int
    num_done: int = 0
    status: str = "running"
    rows: list[Row] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


class Bench:
    """The loaded systems of one bench. `systems`: what to measure, by name; a text says why a
    system cannot run here.
    """

    def __init__(
        self,
        session: Session,
        systems: Mapping[str, Parts | Peer | str],
        options: BenchOptions,
        folder: Path,
        config: Mapping[str, Any],
        terminal: Terminal,
    ) -> None:
        self._session, self._options, self._terminal = session, options, terminal
        self._folder, self._config, self._names = folder, config, list(systems)
        self._questions = session.job.prompts.questions()
        self.progress = Progress(sum(len(question.prompt_names) for question in self._questions))
        seed, longest = session.job.sampling.seed, self._longest()
        self.setup = BenchSetup(session.target, session.config, seed, longest)
        self._device = session.target.device
        self._environment = session.environment()
        self.runners: dict[str, Runner] = {AR: SpecensRunner(session.baseline, self.setup)}
        for name, system in systems.items():
            if name != AR:
                self._load(name, system)
        # A verifier that samples otherwise gives another text of the same distribution.
        self._compares = not session.config.do_sample or all(
            parts.verifier.coupled for parts in systems.values() if isinstance(parts, Parts)
        )

    def _load(self, name: str, system: Parts | Peer | str) -> None:
        """Make it ready, or note why it cannot be."""
        before = packing(self.setup.target.model)
        try:
            if isinstance(system, str):
                raise UserError(system)
            self._terminal.say(f"loading {name}")
            self.runners[name] = system.load(self.setup)
        except Exception as error:  # such as a drafter that does not fit this target
            self.progress.unavailable[name] = describe(error)
            self._terminal.say(f"{name}: left out ({describe(error)})")
        if packing(self.setup.target.model) != before:
            raise UserError(
                f"systems.{name}: loading it has changed the target's weights, for all systems; "
                "leave it out"
            )

    def run(self) -> dict[str, Any]:
        """Measure everything; the content of `bench.json`."""
        try:
            self._warm_up_first()
            for prompt, label in self._prompts():
                self._measure(prompt, label)
                self.progress.num_done += 1
                self._write()
            self.progress.status = "finished"
        except BaseException as failure:
            is_interrupt = isinstance(failure, KeyboardInterrupt)
            self.progress.status = "interrupted" if is_interrupt else "failed"
            raise
        finally:
            self._terminal.end_prompt()
            content = self._write()
        note = draw(content, self._folder)
        if note:
            self._terminal.say(note)
        return content

    def _prompts(self) -> Iterator[tuple[Prompt, str]]:
        """Every prompt, once AR decoding's output is known: a conversation's next turn goes on from
        it, so that every system gets the same prompt, and outputs are compared with it. Its own
        time is not counted.
        """
        tokenizer, number = self._session.target.tokenizer, 0
        assert tokenizer is not None
        for question in self._questions:
            answers: list[str] = []
            for name in question.prompt_names:
                number += 1
                label = f"[{number}/{self.progress.num_prompts}] {name}"
                self._terminal.begin_prompt(f"{label}  {AR} output")
                try:
                    prompt = self._session.prompt(question, answers)
                    ids = self.runners[AR].decode(prompt).output_ids
                except Exception as failure:
                    self._fail(question, name, label, describe(failure))
                    break
                self.setup.outputs[prompt.token_ids] = ids
                yield prompt, label
                answers.append(str(tokenizer.decode(list(ids), skip_special_tokens=True)))

    def _fail(self, question: Question, prompt_id: str, label: str, error: str) -> None:
        """A prompt that AR decoding cannot decode is a failure of every system."""
        for name in self.runners:
            self.progress.rows.append(Row(prompt_id, question.category, 0, 0, name, error=error))
        self._terminal.say(f"{label}  failed: {error}")
        self._write()

    def _measure(self, prompt: Prompt, label: str) -> None:
        """One prompt: all repeats of all systems, in turns."""
        if self._device.type == "cuda":
            self._warm_up(prompt, label)
        rows, names = self.progress.rows, list(self.runners)
        before = len(rows)
        for repeat in range(self._options.repeats):
            for order, name in enumerate(shuffled(names, self._options.seed, prompt.id, repeat)):
                self._terminal.begin_prompt(f"{label}  repeat {repeat + 1}  {name}")
                rows.append(self._row(prompt, repeat, order, name))
        self._terminal.end_prompt()
        self._terminal.say(f"{label}  {progress(rows[before:], names)}")

    def _row(self, prompt: Prompt, repeat: int, order: int, name: str) -> Row:
        own = (prompt.id, prompt.category, repeat, order, name)
        try:
            with peak_memory(self._device) as peak:
                timed = self.runners[name].decode(prompt)
        except (Exception, SystemExit) as failure:  # the other systems must go on, whatever it is
            with (self._folder / "errors.log").open("a", encoding="utf-8") as file:
                trace = "".join(traceback.format_exception(failure))
                file.write(f"prompt {prompt.id}, {name}\n{trace}\n")
            return Row(*own, error=describe(failure))
        at = divergence(timed.output_ids, self.setup.outputs[prompt.token_ids])
        found = {"is_identical": at is None, "divergence": at} if self._compares else {}
        return Row(*own, **timed.columns(), **found, peak_memory_bytes=peak.num_bytes)

    def _warm_up_first(self) -> None:
        """A few tokens of the first prompt that can be decoded, by every system."""
        for question in self._questions:
            try:
                prompt = self._session.prompt(question, [])
                self.runners[AR].decode(prompt, self._options.warm_up_tokens)
            except Exception:  # it fails again, by name, when its turn comes
                continue
            return self._warm_up(prompt, "")

    def _warm_up(self, prompt: Prompt, label: str) -> None:
        for name, runner in self.runners.items():
            self._terminal.begin_prompt(f"{label}  warming up {name}".strip())
            try:
                runner.decode(prompt, self._options.warm_up_tokens)
            except (Exception, SystemExit):  # it fails again, by name, when it is timed
                continue
        self._terminal.end_prompt()

    def _longest(self) -> int:
        """Tokens of the longest text to come, at most: all turns of a question, and an answer to
        each.
        """
        target, answer = self._session.target, int(self._session.config.max_new_tokens or 0)
        assert target.tokenizer is not None
        longest = 0
        for question in self._questions:
            try:
                first = len(self._session.prompt(question, []).token_ids)
            except UserError:  # it fails again, by name, when its turn comes
                continue
            later = sum(len(target.tokenizer.encode(t)) + TURN_TOKENS for t in question.turns[1:])
            longest = max(longest, first + later + answer * max(len(question.turns), 1))
        return longest if target.context_limit is None else min(longest, target.context_limit)

    def _write(self) -> dict[str, Any]:
        """The files of what was measured so far; the content of bench.json."""
        state, config = self.progress, self._session.config
        numbers = summarise(state.rows, self._names, state.unavailable)
        for name, runner in self.runners.items():
            numbers[name] = {**runner.facts(), **numbers[name]}
        content = plain(
            {
                "schema_version": SCHEMA_VERSION,
                "status": state.status,
                "num_prompts": state.num_prompts,
                "num_prompts_done": state.num_done,
                "repeats": self._options.repeats,
                "seed": self._options.seed,
                "max_new_tokens": config.max_new_tokens,
                "sampled": bool(config.do_sample),
                "peak_memory_is": memory_kind(self._device),
                "systems": numbers,
                "versus": (
                    {} if state.status == "running" else versus(state.rows, list(self.runners))
                ),
                "environment": self._environment,
                "config": self._config,
            }
        )
        text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        files = {"bench.csv": csv_of(state.rows), "bench.json": text, "bench.md": page_of(content)}
        write_result(self._folder, files, "the bench")
        return content


def describe(failure: BaseException) -> str:
    """An error in one line; of what kind it is, unless it is the user's own."""
    known = isinstance(failure, UserError)
    return one_line(failure if known else f"{type(failure).__name__}: {failure}")
