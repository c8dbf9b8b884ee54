"""A contest: the prompts of a job one after another, each raced by its drafters against AR decoding
of the same target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from specens.analysis.summary import summarise
from specens.decoding.speculator import Completion, Speculator
from specens.decoding.target.target import Target
from specens.decoding.types import StepRecord
from specens.models.detokenize import Pieces, divergence
from specens.prompts.chat import Prompt
from specens.prompts.sources import Question
from specens.race.lane import Lane, turns, verdict
from specens.race.view import View
from specens.records.schema import PromptRecord, frames_of
from specens.run.decode_prompt import finished_record
from specens.run.job import Job
from specens.run.session import Session, ar_baseline, load_session, warm_up
from specens.run.terminal import Terminal


class Contest:
    """The loaded models of a job, which race on its prompts."""

    def __init__(self, job: Job, view: View, terminal: Terminal) -> None:
        self._questions = job.prompts.questions()
        self._view, self._terminal = view, terminal
        self._session = load_session(job, terminal)
        self._baseline = _second_baseline(self._session)
        self._rows: list[tuple[PromptRecord, tuple[StepRecord, ...]]] = []

    def run(self) -> None:
        """Race on every prompt. What was decoded until an interruption is shown as well."""
        warm_up(self._session, self._questions, self._terminal)
        self._terminal.say(
            "racing: the two alternate, and a clock runs only while its side makes a step"
        )
        try:
            for question in self._questions:
                self._race_question(question)
        finally:
            self._summary()
        self._session.keep_costs()

    def _race_question(self, question: Question) -> None:
        """All turns of a question, with the drafted answers in between."""
        answers: list[str] = []
        for name in question.prompt_names:
            prompt = self._session.prompt(question, answers)
            self._view.title(f"{name}: {prompt.text or f'{len(prompt.token_ids)} token ids'}")
            answers.append(self._race(prompt).text)

    def _race(self, prompt: Prompt) -> PromptRecord:
        members = [member.name for member in self._session.job.drafter.members]
        ar = self._lane("AR", self._baseline, prompt)
        name = "ensemble" if len(members) > 1 else members[0]
        own = self._lane(name, self._session.drafted, prompt)
        lanes = (ar, own)
        record = PromptRecord(prompt.id, prompt.category, prompt.text, prompt.token_ids)
        try:
            with self._view.watching(lanes) as refresh:
                for _ in turns(lanes):
                    refresh()
        except KeyboardInterrupt:
            self._view.result(lanes, verdict(own, ar, self._so_far(own, ar)))
            record = replace(record, output_ids=own.output_ids, decode_s=own.clock_s)
            self._rows.append((record, tuple(own.steps)))
            raise
        finally:
            for lane in lanes:
                lane.close()
        done, baseline = (
            replace(Completion.of(lane.steps, lane.prefill_s), decode_s=lane.clock_s)
            for lane in (own, ar)
        )
        record = finished_record(self._session, prompt, record, done, baseline)
        self._view.result(lanes, verdict(own, ar, self._identity(record)))
        self._rows.append((record, done.steps))
        return record

    def _lane(self, name: str, speculator: Speculator, prompt: Prompt) -> Lane:
        session, target = self._session, self._session.target
        seed = session.job.sampling.seed
        decoding = speculator.begin(
            prompt.token_ids, session.config, seed=seed, prompt_key=prompt.id
        )
        assert target.tokenizer is not None
        return Lane(name, decoding, Pieces(target.tokenizer), settle=_settling(target))

    def _identity(self, record: PromptRecord) -> str:
        if record.is_identical is None:
            return self._not_compared()
        if record.is_identical:
            return "yes"
        return (
            f"no, they diverge at token {record.divergence} (logit gap {record.logit_gap:.2g}); "
            "see python -m specens.audit"
        )

    def _so_far(self, own: Lane, ar: Lane) -> str:
        """Of two texts that were interrupted: as far as both go."""
        if not self._session.job.compares_texts:
            return self._not_compared()
        both = min(own.num_tokens, ar.num_tokens)
        at = divergence(own.output_ids[:both], ar.output_ids[:both])
        return "yes, so far" if at is None else f"no, they diverge at token {at}"

    def _not_compared(self) -> str:
        name = self._session.job.verifier.name
        return f"not compared, verifier={name} samples otherwise than AR decoding"

    def _summary(self) -> None:
        """Of all prompts: the wins, and the speed-up if there are several."""
        if not self._rows:
            return
        job = self._session.job
        summary = summarise(*frames_of(self._rows), job.metrics)
        verifier = job.verifier
        shown = {**summary, "lossy": not verifier.lossless, "verifier": verifier.name}
        self._terminal.drafters(shown, job.metrics)
        num_whole = sum(record.baseline_decode_s is not None for record, _ in self._rows)
        if num_whole > 1 and summary["speedup"] is not None:
            self._terminal.say(
                f"{num_whole} prompts together: {summary['speedup']:.2f} times as fast"
            )


def _second_baseline(session: Session) -> Speculator:
    """AR decoding that can be in the middle of a text while the drafters are. Compiled forwards
    hold one sequence at a time, so then it has some of its own, over the same weights.
    """
    compiled, job = session.target.compiled, session.job
    if compiled is None:
        return session.baseline
    model, tokenizer = session.target.model, session.target.tokenizer
    target = Target(model, tokenizer, origin=job.target, exact_width=job.exact_width)
    target.compile(compiled.options, max_nodes=job.exact_width or 0)
    return ar_baseline(target)


def _settling(target: Target) -> Callable[[], object] | None:
    """Wait until the device has done everything; nothing to wait for on a CPU."""
    device = target.device
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
