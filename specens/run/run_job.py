"""Run a job: decode every prompt, write the run folder, inform the tracker and the terminal."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specens.analysis.metrics import definitions
from specens.analysis.summary import drafter_table, summarise
from specens.decoding.budgets.base import budget_name
from specens.decoding.budgets.costs import CostTable
from specens.decoding.generation import eos_ids
from specens.errors import UserError, one_line
from specens.prompts.sources import Question
from specens.records.writer import RunWriter
from specens.replay.files import write_study
from specens.report.page import report
from specens.run.decode_prompt import PromptResult, attempt
from specens.run.job import Job
from specens.run.session import Session, load_session, warm_up
from specens.run.terminal import Terminal

HIDDEN_COLUMNS = ["prompt_ids", "output_ids", "output_pieces", "baseline_ids"]
"""Of the table of prompts, what the tracker is not given."""


def run_job(
    job: Job, writer: RunWriter, config: Mapping[str, Any], terminal: Terminal
) -> dict[str, Any]:
    """Run all prompts and return the summary. Every finished prompt is on disk before the next
    begins, whatever happens later; the summary's `status` says how the run ended. Raises UserError
    when the input is bad or no prompt succeeds.
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
        session = load_session(job, terminal)
        outcome["environment"] = session.environment()
        _decode_all(session, questions, writer, terminal)
        outcome["status"] = "finished"
    except KeyboardInterrupt:
        outcome["status"] = "interrupted"
        raise
    except BaseException as failure:
        is_known = isinstance(failure, UserError)
        trace = "".join(traceback.format_exception(failure))
        outcome["error"] = str(failure) if is_known else trace
        raise
    finally:
        terminal.end_prompt()
        summary = _close(job, writer, outcome, terminal)
    return summary


def _decode_all(
    session: Session, questions: Sequence[Question], writer: RunWriter, terminal: Terminal
) -> None:
    """All questions, turn by turn; a failed prompt becomes a row with its error, others go on."""
    job = session.job
    warm_up(session, questions, terminal)
    if job.trace == "dense":
        writer.begin_dense(_dense_facts(session))
    errors: list[str] = []
    versions: list[CostTable] = []
    num_prompts, done = sum(len(question.prompt_names) for question in questions), 0
    for question in questions:
        answers: list[str] = []
        for name in question.prompt_names:
            done += 1
            label = f"[{done}/{num_prompts}] {name}"
            result = attempt(session, question, answers, terminal.watch(label))
            _write(result, versions, writer)
            record = result.record
            terminal.prompt_done(label, record, result.steps)
            job.tracker.prompt_done(summarise(*writer.frames(), job.metrics), done)
            if record.error is not None:
                errors.append(record.error)
                break
            answers.append(record.text)
    session.keep_costs()
    if errors and len(errors) == len(questions):
        raise UserError(f"no prompt succeeded; the first one failed with: {errors[0]}")


def _write(result: PromptResult, versions: list[CostTable], writer: RunWriter) -> None:
    """One prompt to disk, with the number of its cost table; a table that is new is written too."""
    record = result.record
    if result.trace is not None:
        writer.add_error(record.prompt_id, result.trace)
    if result.costs is not None:
        if not versions or versions[-1] != result.costs:
            versions.append(result.costs)
            writer.write_costs(versions)
        record = replace(record, cost_version=len(versions) - 1)
    writer.add(record, result.steps, result.dense)


def _dense_facts(session: Session) -> dict[str, Any]:
    """What replay must know besides the drafts."""
    job = session.job
    return {
        "members": [asdict(member) for member in job.drafter.members],
        "eos_token_ids": list(eos_ids(session.config)),
        "budget": {"name": budget_name(job.budget), "node": job.budget_node},
        "layout": job.layout,
    }


def _close(
    job: Job, writer: RunWriter, outcome: Mapping[str, Any], terminal: Terminal
) -> dict[str, Any]:
    """Write summary.json and report.html, replay a dense trace, and close the tracker's run."""
    prompts, steps, drafts = writer.frames()
    summary = {**summarise(prompts, steps, drafts, job.metrics), **outcome}
    if job.metrics:
        summary["metrics"] = definitions(job.metrics)
    writer.write_summary(summary)
    title = f"specens run {writer.folder.resolve().name}"
    is_traced = job.trace == "dense" and outcome["status"] == "finished"
    replay = _replayed(job, writer.folder, terminal) if is_traced else None
    page = report(prompts, steps, drafts, summary, title=title, replay=replay, metrics=job.metrics)
    writer.write_page(page)
    rows = prompts.drop(columns=HIDDEN_COLUMNS).to_dict("records")
    drafters = drafter_table(summary).to_dict("records")
    job.tracker.finish(summary, drafters, rows, outcome["status"])
    return summary


def _replayed(job: Job, folder: Path, terminal: Terminal) -> dict[str, Any] | None:
    """What every subset of the drafters would have done, as python -m specens.replay computes it;
    None, and why, when it cannot.
    """
    terminal.say("replaying every subset of the drafters")
    try:
        content = write_study(folder, plugins=job.plugins)
    except (UserError, KeyboardInterrupt) as reason:  # the run itself is finished
        terminal.say(f"not replayed: {one_line(reason)}")
        return None
    if content["live"]["num_different"]:
        difference = content["live"]["first_difference"]
        terminal.say(f"the replay is NOT the run itself: {difference}")
    return content
