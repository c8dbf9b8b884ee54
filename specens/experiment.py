"""Run a job: decode every prompt with the drafters and plainly, write the run folder, tell the tracker and the screen."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from specens.analysis.html import report
from specens.analysis.metrics import drafter_table, summarise
from specens.decoding.budget import FixedBudget
from specens.decoding.compiled import CannotCompileError, CompileOptions
from specens.decoding.costs import CostTable
from specens.decoding.dense import Listening
from specens.decoding.drafter import hidden_layers
from specens.decoding.generation import eos_ids, prepare
from specens.decoding.loop import Decoder
from specens.decoding.target import Target
from specens.decoding.types import StepRecord, TokenTree
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter
from specens.environment import environment
from specens.errors import DrafterError, UserError, one_line
from specens.job import Job, budget_words
from specens.kept_costs import keep, kept
from specens.prompts import Question
from specens.records import RunWriter
from specens.rendering import Prompt, next_prompt
from specens.screen import Screen
from specens.speculator import Completion, Speculator
from specens.tables import DenseDraft, PromptRecord
from specens.text import first_difference, token_pieces
from specens.traced import write_study

WARM_UP_TOKENS = 4
"""Decoded with and without drafters before anything is timed."""


def run_job(job: Job, writer: RunWriter, config: Mapping[str, Any], screen: Screen) -> dict[str, Any]:
    """Run all prompts and return the summary. Every finished prompt is on disk before the next begins, whatever happens
    later; the summary's `status` says how the run ended. Raises UserError when the input is bad or no prompt succeeds.
    """
    outcome: dict[str, Any] = {
        "status": "failed",
        "error": None,
        "verifier": job.verifier.name,
        "lossy": not job.verifier.lossless,
        "exact_width": job.exact_width,
        "environment": {},
    }
    try:
        questions = job.prompts.questions()
        job.tracker.start(writer.folder, {**config, "lossy": not job.verifier.lossless})
        session = Session(job, screen)
        outcome["environment"] = session.environment()
        session.run(questions, writer)
        outcome["status"] = "finished"
    except KeyboardInterrupt:
        outcome["status"] = "interrupted"
        raise
    except BaseException as failure:
        is_known = isinstance(failure, UserError)
        outcome["error"] = str(failure) if is_known else "".join(traceback.format_exception(failure))
        raise
    finally:
        screen.end_prompt()
        summary = _close(job, writer, outcome, screen)
    return summary


def _close(job: Job, writer: RunWriter, outcome: Mapping[str, Any], screen: Screen) -> dict[str, Any]:
    """Write summary.json and report.html, replay a dense trace, and close the tracker's run."""
    prompts, steps, drafts = writer.frames()
    summary = {**summarise(prompts, steps, drafts), **outcome}
    writer.write_summary(summary)
    title = f"specens run {writer.folder.resolve().name}"
    replay = _replayed(writer.folder, screen) if job.trace == "dense" and outcome["status"] == "finished" else None
    writer.write_page(report(prompts, steps, drafts, summary, title=title, replay=replay))
    rows = prompts.drop(columns=["prompt_ids", "output_ids", "output_pieces", "baseline_ids"]).to_dict("records")
    job.tracker.finish(summary, drafter_table(summary).to_dict("records"), rows, outcome["status"])
    return summary


def _replayed(folder: Path, screen: Screen) -> dict[str, Any] | None:
    """What every team of the drafters would have done, as python -m specens.replay says it; None, and why, when it cannot."""
    screen.say("replaying every team")
    try:
        content = write_study(folder)
    except (UserError, KeyboardInterrupt) as reason:  # the run itself is finished
        screen.say(f"not replayed: {one_line(reason)}")
        return None
    if content["live"]["num_different"]:
        screen.say(f"the replay is NOT the run itself: {content['live']['first_difference']}")
    return content


class Session:
    """The loaded models of one job, with and without the drafters."""

    def __init__(self, job: Job, screen: Screen) -> None:
        self.job = job
        self._screen = screen
        screen.say("loading the target")
        loaded = job.target.load()
        self.target = Target(loaded.model, loaded.tokenizer, origin=job.target, exact_width=job.exact_width)
        self._facts = loaded.facts()
        self.config: GenerationConfig = job.sampling.generation_config(self.target)
        screen.say("loading the drafters")
        self._listening = Listening(job.drafter) if job.trace == "dense" else None
        drafter = self._listening or job.drafter
        is_dense = self._listening is not None
        decoder = Decoder(self.target, drafter, job.budget, job.verifier, job.layout, margins=is_dense)
        self.drafted = Speculator(decoder, wants_costs=is_dense)
        self.plain = Speculator(Decoder(self.target, NoDrafter(), FixedBudget(), Coupled()))
        self._compile()
        self._costs: list[CostTable] = []  # those that were in force, in order
        self._subject = self._cost_subject()
        if self.drafted.costs is None and self.drafted.wants_costs:
            self.drafted.kept_costs = kept(self._subject)

    def _compile(self) -> None:
        """Compile the target if that was asked for, or is worth it here; or say why not, and go on."""
        job, device = self.job, self.target.device
        wanted = device.type == "cuda" and job.layout == "tree" if job.compiled is None else job.compiled
        if not wanted:
            return
        self._screen.say("compiling the target (some minutes)")
        nodes = job.exact_width or job.budget.max_nodes
        options = replace(CompileOptions.of(device), room=self.config.max_new_tokens or CompileOptions.room)
        try:
            if job.layout != "tree":
                raise CannotCompileError(f"layout={job.layout} has no fixed shapes")
            self.target.compile(options, max_nodes=nodes, hidden_layers=hidden_layers(job.drafter))
        except CannotCompileError as failure:
            self._screen.say(f"the run goes on uncompiled: {failure}")

    def environment(self) -> dict[str, Any]:
        """What the numbers depend on besides the configuration."""
        return environment(self.target, self._facts, self.job.drafter, self.config)

    def _cost_subject(self) -> dict[str, Any]:
        """What a cost table depends on."""
        known = self.environment()
        names = ("packages", "device", "compiled", "num_threads", "target", "drafters", "platform")
        members = [str(member) for member in self.job.drafter.members]
        steps = {"layout": self.job.layout, "width": self.job.budget.max_nodes, "members": members}
        return {**{name: known[name] for name in names}, **steps}

    def run(self, questions: Sequence[Question], writer: RunWriter) -> None:
        """All questions, turn by turn; a failed prompt becomes a row with its error and the others go on."""
        self.warm_up(questions)
        if self._listening is not None:
            writer.begin_dense(self._dense_facts())
        num_prompts, done, errors = sum(len(question.prompt_names) for question in questions), 0, []
        for question in questions:
            answers: list[str] = []
            for name in question.prompt_names:
                done += 1
                label = f"[{done}/{num_prompts}] {name}"
                record, steps, dense = self._attempt(question, answers, label, writer)
                record = replace(record, cost_version=self._cost_version(writer))
                writer.add(record, steps, dense)
                self._screen.prompt_done(label, record, steps)
                self.job.tracker.prompt_done(summarise(*writer.frames()), done)
                if record.error is not None:
                    errors.append(record.error)
                    break
                answers.append(record.text)
        self.keep_costs()
        if errors and len(errors) == len(questions):
            raise UserError(f"no prompt succeeded; the first one failed with: {errors[0]}")

    def keep_costs(self) -> None:
        """Keep what was measured of steps for the next run on this machine."""
        if self.drafted.costs is not None and self.job.budget.costs is None:
            keep(self._subject, self.drafted.costs)

    def _cost_version(self, writer: RunWriter) -> int | None:
        """The number of the cost table by which the prompt was decoded; a table that is new is written down."""
        table = self.drafted.costs_in_force
        if table is None:
            return None
        if not self._costs or self._costs[-1] != table:
            self._costs.append(table)
            writer.write_costs(self._costs)
        return len(self._costs) - 1

    def warm_up(self, questions: Sequence[Question]) -> None:
        """Decode a few tokens both ways on the first prompt that can be decoded, so that nothing is timed cold."""
        self._screen.say("warming up")
        config = GenerationConfig(**{**self.config.to_dict(), "max_new_tokens": WARM_UP_TOKENS})
        for question in questions:
            try:
                prompt = self._prompt(question, [])
                for speculator in (self.plain, self.drafted):
                    speculator.complete(prompt.token_ids, config, seed=self.job.sampling.seed, prompt_key=prompt.id)
            except Exception:  # it fails again, by name, when its turn comes
                continue
            break
        self.drafted.forget()  # the run is what its records say, and replay begins where they do

    def _prompt(self, question: Question, answers: Sequence[str]) -> Prompt:
        assert self.target.tokenizer is not None
        return next_prompt(question, answers, self.target.tokenizer, self.job.prompts.chat)

    def _attempt(
        self, question: Question, answers: Sequence[str], label: str, writer: RunWriter
    ) -> tuple[PromptRecord, tuple[StepRecord, ...], list[DenseDraft]]:
        """Decode one prompt, or say in its record why not."""
        turn = len(answers)
        text = question.turns[turn] if question.turns else ""
        record = PromptRecord(question.prompt_names[turn], question.category, text)
        try:
            prompt = self._prompt(question, answers)
            record = replace(record, prompt_ids=prompt.token_ids)
            return self._decode(prompt, record, label)
        except (Exception, SystemExit) as failure:  # the other prompts must go on, whatever it is
            if not isinstance(failure, UserError):
                writer.add_error(record.prompt_id, "".join(traceback.format_exception(failure)))
            is_plain = isinstance(failure, UserError | DrafterError)
            return replace(record, error=str(failure) if is_plain else f"{type(failure).__name__}: {failure}"), (), []

    def _decode(
        self, prompt: Prompt, record: PromptRecord, label: str
    ) -> tuple[PromptRecord, tuple[StepRecord, ...], list[DenseDraft]]:
        baseline: Completion | None = None
        if self.job.baseline and len(prompt.token_ids) % 2:  # the two take turns in going first, by the prompt alone
            baseline = self._complete(self.plain, prompt, f"{label} plain")
        done = self._complete(self.drafted, prompt, label)
        dense = self._dense(prompt, done, label)
        if self.job.baseline and baseline is None:
            baseline = self._complete(self.plain, prompt, f"{label} plain")
        return self.finished(prompt, record, done, baseline), done.steps, dense

    def finished(
        self, prompt: Prompt, record: PromptRecord, done: Completion, baseline: Completion | None
    ) -> PromptRecord:
        """A prompt's row with what was decoded, and compared with the baseline if there is one."""
        assert self.target.tokenizer is not None
        record = replace(
            record,
            output_ids=done.output_ids,
            output_pieces=token_pieces(self.target.tokenizer, done.output_ids),
            text=str(self.target.tokenizer.decode(list(done.output_ids), skip_special_tokens=True)),
            finish_reason=done.finish_reason,
            num_steps=len(done.steps),
            decode_s=done.decode_s,
            prefill_s=done.prefill_s,
        )
        return record if baseline is None else replace(record, **self._comparison(prompt, done, baseline))

    def _dense(self, prompt: Prompt, done: Completion, label: str) -> list[DenseDraft]:
        """What every member would have proposed at every position of the text; nothing unless trace=dense."""
        if self._listening is None:
            return []
        self._screen.begin_prompt(f"{label} dense trace")
        seed = self.job.sampling.seed
        sampler, stop = prepare(self.target, self.config, prompt.token_ids, seed=seed, prompt_key=prompt.id)
        drafts = self._listening.drafts(prompt.token_ids, done.output_ids, stop, sampler)
        num_prompt = len(prompt.token_ids)
        return [
            DenseDraft(position, stop.tokens_wanted(num_prompt + position), draft)
            for position, draft in enumerate(drafts)
        ]

    def _dense_facts(self) -> dict[str, Any]:
        """What replay must know besides the drafts."""
        job = self.job
        return {
            "members": [asdict(member) for member in job.drafter.members],
            "eos_token_ids": list(eos_ids(self.config)),
            "budget": budget_words(job.budget),
            "layout": job.layout,
        }

    def _complete(self, speculator: Speculator, prompt: Prompt, label: str) -> Completion:
        self._screen.begin_prompt(label)
        steps: list[StepRecord] = []

        def on_step(step: StepRecord) -> None:
            steps.append(step)
            self._screen.step(label, steps)

        seed = self.job.sampling.seed
        return speculator.complete(prompt.token_ids, self.config, seed=seed, prompt_key=prompt.id, on_step=on_step)

    @property
    def compares_texts(self) -> bool:
        """Whether the drafted text has to be plain decoding's own. A verifier that draws otherwise gives another text of the same
        law, and nothing is said of identity.
        """
        return self.job.verifier.coupled or not self.config.do_sample

    def _comparison(self, prompt: Prompt, done: Completion, baseline: Completion) -> dict[str, Any]:
        """The baseline's columns: where the two texts fork, and how near a tie the target was there."""
        columns: dict[str, Any] = {"baseline_decode_s": baseline.decode_s, "baseline_ids": baseline.output_ids}
        if not self.compares_texts:
            return columns
        fork_at, fork_margin = first_difference(done.output_ids, baseline.output_ids), None
        if fork_at is not None:
            ids = [*prompt.token_ids, *baseline.output_ids[:fork_at]]
            sampler, _ = prepare(
                self.target, self.config, prompt.token_ids, seed=self.job.sampling.seed, prompt_key=prompt.id
            )
            logits = self.target.score(self.target.prefill(ids), ids[-1], TokenTree(), "tree")
            fork_margin = sampler.margin(ids, logits[0])
        return {**columns, "is_identical": fork_at is None, "fork_at": fork_at, "fork_margin": fork_margin}
