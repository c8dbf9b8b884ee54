"""One prompt: decoded with the drafters and, for comparison, by the target alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specens.decoding.dense import Recording, dense_drafts
from specens.decoding.generation import prepare
from specens.decoding.speculator import Completion, Speculator
from specens.decoding.types import StepRecord, TokenTree
from specens.errors import DrafterError, UserError
from specens.models.detokenize import divergence, token_pieces
from specens.prompts.chat import Prompt
from specens.prompts.sources import Question
from specens.records.schema import DenseDraft, PromptRecord
from specens.run.session import Session

Watch = Callable[[str, Sequence[StepRecord]], object]
"""Called when a decoding begins (what it is, no steps) and after each of its steps."""


@dataclass(frozen=True)
class PromptResult:
    """A prompt's row, its steps, and its dense trace; `costs` is the table that its budget decided
    by, `trace` the traceback of an unexpected failure.
    """

    record: PromptRecord
    steps: tuple[StepRecord, ...] = ()
    dense: tuple[DenseDraft, ...] = ()
    costs: Any = None
    trace: str | None = None


def attempt(
    session: Session, question: Question, answers: Sequence[str], watch: Watch
) -> PromptResult:
    """Decode the next turn of a question, or say in its record why not."""
    turn = len(answers)
    text = question.turns[turn] if question.turns else ""
    record = PromptRecord(question.prompt_names[turn], question.category, text)
    try:
        prompt = session.prompt(question, answers)
        record = replace(record, prompt_ids=prompt.token_ids)
        return decode_prompt(session, prompt, record, watch)
    except (Exception, SystemExit) as failure:  # the other prompts must go on, whatever it is
        is_user = isinstance(failure, UserError)
        trace = None if is_user else "".join(traceback.format_exception(failure))
        is_named = isinstance(failure, UserError | DrafterError)
        error = str(failure) if is_named else f"{type(failure).__name__}: {failure}"
        return PromptResult(replace(record, error=error), trace=trace)


def decode_prompt(
    session: Session, prompt: Prompt, record: PromptRecord, watch: Watch
) -> PromptResult:
    """`record` is the prompt's row so far."""
    job = session.job
    baseline: Completion | None = None
    # the two alternate in going first, by the prompt
    if job.baseline and len(prompt.token_ids) % 2:
        baseline = complete(session, session.baseline, prompt, " AR", watch)
    recording = Recording() if job.trace == "dense" else None
    done = complete(session, session.drafted, prompt, "", watch, recording)
    dense: list[DenseDraft] = []
    if recording is not None:
        watch(" dense trace", ())
        dense = _dense(session, prompt, done, recording)
    if job.baseline and baseline is None:
        baseline = complete(session, session.baseline, prompt, " AR", watch)
    record = finished_record(session, prompt, record, done, baseline)
    return PromptResult(record, done.steps, tuple(dense), done.costs)


def complete(
    session: Session,
    speculator: Speculator,
    prompt: Prompt,
    what: str,
    watch: Watch,
    recording: Recording | None = None,
) -> Completion:
    """Decode one prompt to its end by one of the session's two speculators."""
    watch(what, ())
    steps: list[StepRecord] = []

    def on_step(step: StepRecord) -> None:
        steps.append(step)
        watch(what, steps)

    return speculator.complete(
        prompt.token_ids,
        session.config,
        seed=session.job.sampling.seed,
        prompt_key=prompt.id,
        on_step=on_step,
        recording=recording,
    )


def finished_record(
    session: Session,
    prompt: Prompt,
    record: PromptRecord,
    done: Completion,
    baseline: Completion | None,
) -> PromptRecord:
    """A prompt's row with what was decoded, and compared with the baseline if there is one."""
    tokenizer = session.target.tokenizer
    assert tokenizer is not None
    record = replace(
        record,
        output_ids=done.output_ids,
        output_pieces=token_pieces(tokenizer, done.output_ids),
        text=str(tokenizer.decode(list(done.output_ids), skip_special_tokens=True)),
        finish_reason=done.finish_reason,
        num_steps=len(done.steps),
        decode_s=done.decode_s,
        prefill_s=done.prefill_s,
    )
    if baseline is None:
        return record
    record = replace(record, baseline_decode_s=baseline.decode_s, baseline_ids=baseline.output_ids)
    if not session.job.compares_texts:
        return record
    at = divergence(done.output_ids, baseline.output_ids)
    gap = None if at is None else _logit_gap(session, prompt, baseline.output_ids[:at])
    return replace(record, is_identical=at is None, divergence=at, logit_gap=gap)


def _logit_gap(session: Session, prompt: Prompt, output_ids: Sequence[int]) -> float:
    """How near a tie the target was after the prompt and `output_ids`."""
    ids, target = [*prompt.token_ids, *output_ids], session.target
    sampler, _ = prepare(
        target,
        session.config,
        prompt.token_ids,
        seed=session.job.sampling.seed,
        prompt_key=prompt.id,
    )
    with target.prefill(ids) as cache:
        return sampler.logit_gap(ids, target.score(cache, ids[-1], TokenTree(), "tree")[0])


def _dense(
    session: Session, prompt: Prompt, done: Completion, recording: Recording
) -> list[DenseDraft]:
    """What every member would have proposed at every position of the text."""
    sampler, stop = prepare(
        session.target,
        session.config,
        prompt.token_ids,
        seed=session.job.sampling.seed,
        prompt_key=prompt.id,
    )
    drafter, num_prompt = session.job.drafter, len(prompt.token_ids)
    drafts = dense_drafts(drafter, recording, prompt.token_ids, done.output_ids, stop, sampler)
    return [
        DenseDraft(position, stop.tokens_wanted(num_prompt + position), draft)
        for position, draft in enumerate(drafts)
    ]
