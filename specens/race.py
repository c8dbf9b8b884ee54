"""python -m specens.race "Why is the sky blue?" <the words of specens.run>: drafters against plain decoding, side by side.

Both decode the same prompt with the same target and take turns, step by step, by their own clocks: each runs at its own speed.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import hydra
import hydra.utils
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from specens.config import CONF_DIR, VERSION_BASE
from specens.errors import DrafterError, UserError
from specens.run import failing_in_one_line, job_of, quiet_libraries

if TYPE_CHECKING:
    from specens.job import Job

HYDRA_WORD = re.compile(r"(\+\+?|~)?[\w$][\w$.@:/-]*=|~[\w$][\w$.@:/-]*$")
"""How a word for Hydra begins: a name and =, or ~ and a name. Any other is the prompt."""


def take_prompt(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The prompt among the words of the command line, and the words without it."""
    given = get_args_parser().parse_args(list(words)).overrides  # Hydra's own: what is no flag and belongs to none
    prompts = [word for word in given if not HYDRA_WORD.match(word)]
    if len(prompts) > 1:
        raise UserError(f"{prompts[1]!r} after the prompt {prompts[0]!r}: put a prompt of several words in quotes")
    rest = list(words)
    for prompt in prompts:
        rest.remove(prompt)
    return (prompts[0] if prompts else None), rest


def job_with(config: DictConfig, prompt: str | None) -> Job:
    """What is to be raced, checked before any model is loaded."""
    from specens.prompts import Inline
    from specens.trackers import NoTracker

    job = job_of(config)
    no_texts = isinstance(job.prompts, Inline) and not job.prompts.texts
    if prompt is not None:
        if not no_texts:
            raise UserError(f"the prompt {prompt!r}, and other prompts by prompts=: leave one of them out")
        job = replace(job, prompts=replace(job.prompts, texts=(prompt,)))
    elif no_texts:
        raise UserError('there is no prompt: python -m specens.race "Why is the sky blue?"')
    if not job.drafter.members:
        raise UserError("the drafter has no members: plain decoding would race against itself")
    if not job.baseline or job.trace != "steps" or not isinstance(job.tracker, NoTracker):
        raise UserError(
            "a race is against plain decoding and leaves no records: leave out baseline=, trace= and tracker="
        )
    return job


def race(job: Job, console: Console | None = None) -> None:
    """Race on every prompt of the job, on the terminal."""
    from specens.racing.contest import Contest
    from specens.racing.view import View
    from specens.screen import Screen

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    view = View(console, [member.name for member in job.drafter.members])
    try:
        Contest(job, view, Screen()).run()
    except DrafterError as error:
        raise UserError(str(error)) from error


def main() -> None:
    try:
        prompt, sys.argv[1:] = take_prompt(sys.argv[1:])
    except UserError as error:
        print(f"specens: {error}", file=sys.stderr)
        sys.exit(1)

    @hydra.main(config_path=CONF_DIR, config_name="race", version_base=VERSION_BASE)
    def enter(config: DictConfig) -> None:
        os.chdir(hydra.utils.get_original_cwd())  # paths are relative to where the command was given
        with failing_in_one_line(HydraConfig.get().mode, "interrupted"):
            quiet_libraries()
            race(job_with(config, prompt))

    enter()


if __name__ == "__main__":
    main()
