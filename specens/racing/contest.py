"""A contest: the prompts of a job one after another, each raced by its drafters against plain decoding of the same target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from specens.analysis.metrics import summarise
from specens.decoding.budget import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.target import Target
from specens.decoding.types import StepRecord
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter
from specens.experiment import Session
from specens.job import Job
from specens.prompts import Question
from specens.racing.lane import Lane, turns, verdict
from specens.racing.view import View
from specens.rendering import Prompt, next_prompt
from specens.screen import Screen
from specens.speculator import Completion, Speculator
from specens.tables import PromptRecord, frames_of
from specens.text import Pieces, first_difference


class Contest:
    """The loaded models of a job, which race on its prompts."""

    def __init__(self, job: Job, view: View, screen: Screen) -> None:
        self._questions = job.prompts.questions()
        self._view, self._screen = view, screen
        self._session = Session(job, screen)
        self._session.plain = _beside(self._session)
        self._rows: list[tuple[PromptRecord, tuple[StepRecord, ...]]] = []

    def run(self) -> None:
        """Race on every prompt. What was decoded when somebody interrupts is shown as well."""
        self._session.warm_up(self._questions)
        self._screen.say("racing: the two take turns, and a clock runs only while its side makes a step")
        try:
            for question in self._questions:
                self._ask(question)
        finally:
            self._summary()
        self._session.keep_costs()

    def _ask(self, question: Question) -> None:
        """All turns of a question, with the drafted answers in between."""
        tokenizer = self._session.target.tokenizer
        assert tokenizer is not None
        answers: list[str] = []
        for name in question.prompt_names:
            prompt = next_prompt(question, answers, tokenizer, self._session.job.prompts.chat)
            self._view.title(f"{name}: {prompt.text or f'{len(prompt.token_ids)} token ids'}")
            answers.append(self._race(prompt).text)

    def _race(self, prompt: Prompt) -> PromptRecord:
        members = [member.name for member in self._session.job.drafter.members]
        plain = self._lane("plain", self._session.plain, prompt)
        own = self._lane("ensemble" if len(members) > 1 else members[0], self._session.drafted, prompt)
        lanes, record = (plain, own), PromptRecord(prompt.id, prompt.category, prompt.text, prompt.token_ids)
        try:
            with self._view.watching(lanes) as refresh:
                for _ in turns(lanes):
                    refresh()
        except KeyboardInterrupt:
            self._view.result(lanes, verdict(own, plain, self._so_far(own, plain)))
            self._rows.append((replace(record, output_ids=own.output_ids, decode_s=own.clock_s), tuple(own.steps)))
            raise
        done, baseline = (
            replace(Completion.of(lane.steps, lane.prefill_s), decode_s=lane.clock_s) for lane in (own, plain)
        )
        record = self._session.finished(prompt, record, done, baseline)
        self._view.result(lanes, verdict(own, plain, self._identity(record)))
        self._rows.append((record, done.steps))
        return record

    def _lane(self, name: str, speculator: Speculator, prompt: Prompt) -> Lane:
        session = self._session
        prefill_s, coming = speculator.begin(
            prompt.token_ids, session.config, seed=session.job.sampling.seed, prompt_key=prompt.id
        )
        assert session.target.tokenizer is not None
        pieces = Pieces(session.target.tokenizer)
        return Lane(name, coming, pieces, prefill_s=prefill_s, settle=_settling(session.target))

    def _identity(self, record: PromptRecord) -> str:
        if record.is_identical is None:
            return self._not_compared()
        if record.is_identical:
            return "yes"
        return f"no, they fork at token {record.fork_at} (margin {record.fork_margin:.2g}); see python -m specens.audit"

    def _so_far(self, own: Lane, plain: Lane) -> str:
        """Of two texts that were interrupted: as far as both go."""
        if not self._session.compares_texts:
            return self._not_compared()
        fork_at = first_difference(
            *(ids[: min(own.num_tokens, plain.num_tokens)] for ids in (own.output_ids, plain.output_ids))
        )
        return "yes, so far" if fork_at is None else f"no, they fork at token {fork_at}"

    def _not_compared(self) -> str:
        return f"not compared, verifier={self._session.job.verifier.name} draws otherwise than plain decoding"

    def _summary(self) -> None:
        """Of all prompts: who won what, and the speed-up if there are several."""
        if not self._rows:
            return
        verifier = self._session.job.verifier
        summary = summarise(*frames_of(self._rows))
        self._screen.drafters({**summary, "lossy": not verifier.lossless, "verifier": verifier.name})
        num_whole = sum(record.baseline_decode_s is not None for record, _ in self._rows)
        if num_whole > 1 and summary["speedup"] is not None:
            self._screen.say(f"{num_whole} prompts together: {summary['speedup']:.2f} times as fast")


def _beside(session: Session) -> Speculator:
    """Plain decoding that can be in the middle of a text while the drafters are. Compiled forwards hold one context at a time, so
    then it has some of its own, over the same weights.
    """
    compiled, job = session.target.compiled, session.job
    if compiled is None:
        return session.plain
    target = Target(session.target.model, session.target.tokenizer, origin=job.target, exact_width=job.exact_width)
    target.compile(compiled.options, max_nodes=job.exact_width or 0)
    return Speculator(Decoder(target, NoDrafter(), FixedBudget(), Coupled()))


def _settling(target: Target) -> Callable[[], object] | None:
    """Wait until the device has done everything; nothing to wait for on a CPU."""
    device = target.device
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
