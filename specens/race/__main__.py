"""python -m specens.race "Why is the sky blue?" <overrides of specens.run>: the drafters and AR
decoding side by side.

Both decode the same prompt with the same target and alternate, step by step, by their own clocks:
each runs at its own speed.
"""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from specens.cli import Call, command
from specens.errors import DrafterError, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specens.run.job import Job

OVERRIDE = re.compile(r"(\+\+?|~)?[\w$][\w$.@:/-]*=|~[\w$][\w$.@:/-]*$")
"""How an override begins. The one word that does not is the prompt."""


def with_prompt(given: list[str]) -> list[str]:
    """The words of the command line without flags, the prompt among them as an override."""
    prompts = [word for word in given if not OVERRIDE.match(word)]
    rest = [word for word in given if OVERRIDE.match(word)]
    if len(prompts) > 1:
        raise UserError(
            f"{prompts[1]!r} after the prompt {prompts[0]!r}: put a prompt of several words in "
            "quotes"
        )
    others = [word for word in rest if re.match(r"\+*prompts(\.texts)?=", word)]
    if prompts and others:
        raise UserError(f"the prompt {prompts[0]!r}, and {others[0]}: leave one of them out")
    return [*rest, *(f"prompts.texts=[{quoted(prompt)}]" for prompt in prompts)]


def quoted(text: str) -> str:
    """A text as Hydra's grammar and OmegaConf's interpolations take it literally."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return '"' + re.sub(r"(\\*)\$\{", r"\1\1\\${", escaped) + '"'


def job_with(config: DictConfig) -> Job:
    """What is to be raced, checked before any model is loaded."""
    from specens.prompts.sources import Inline
    from specens.run.job import job_of
    from specens.run.tracker import NoTracker

    job = job_of(config)
    if isinstance(job.prompts, Inline) and not job.prompts.texts:
        raise UserError('there is no prompt: python -m specens.race "Why is the sky blue?"')
    if not job.drafter.members:
        raise UserError("the drafter has no members: AR decoding would race against itself")
    if not job.baseline or job.trace != "steps" or not isinstance(job.tracker, NoTracker):
        raise UserError(
            "a race is against AR decoding and leaves no records: leave out baseline=, trace= and "
            "tracker="
        )
    return job


def race(job: Job, console: Console | None = None) -> None:
    """Race on every prompt of the job, on the terminal."""
    from specens.race.contest import Contest
    from specens.race.view import View
    from specens.run.terminal import Terminal

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the encoding lacks
    width = None if sys.stdout.isatty() else 100
    console = console or Console(highlight=False, width=width)
    view = View(console, [member.name for member in job.drafter.members])
    try:
        Contest(job, view, Terminal()).run()
    except DrafterError as error:
        raise UserError(str(error)) from error


@command("race", interrupted="interrupted", rewrite=with_prompt)
def main(call: Call) -> None:
    race(job_with(call.config))


if __name__ == "__main__":
    main()
