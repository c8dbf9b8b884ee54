"""What all commands share: Hydra's entry point, help, paths, errors in one line and exit codes.

`python -m specens.<verb>` and `specens <verb>` are the same; a command is a folder with a
`__main__.py`, whose `main` is decorated with `command`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd

from specens import __version__
from specens.cli_help import SWEPT, VERBS, help_text
from specens.config.compose import CONF_DIR, VERSION_BASE, config_name, expanded, refused
from specens.errors import DrafterError, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Call:
    """One job of a command: its configuration, the overrides it was composed from, and the folder
    that Hydra chose for it. `hydra` is Hydra's own node of the configuration; `is_sweep`: one of
    several jobs of a --multirun.
    """

    config: DictConfig
    overrides: tuple[str, ...]
    folder: Path
    hydra: DictConfig
    is_sweep: bool


def command(
    verb: str,
    *,
    interrupted: str,
    uses_models: bool = True,
    rewrite: Callable[[list[str]], list[str]] = list,
) -> Callable[[Callable[[Call], int | None]], Callable[[], None]]:
    """Make a function the main function of `python -m specens.<verb>`.

    The function gets a Call and returns None or an exit code. Relative paths are relative to the
    folder of the launch. UserError and DrafterError become one line and exit code 1, Ctrl-C the
    line `interrupted` (with {folder}) and 130. `rewrite` may change the overrides before Hydra
    reads them. HYDRA_FULL_ERROR=1 in the environment shows a traceback instead of the line.
    """

    def decorate(function: Callable[[Call], int | None]) -> Callable[[], None]:
        state = _State()

        @hydra.main(config_path=CONF_DIR, config_name=config_name(verb), version_base=VERSION_BASE)
        def enter(config: DictConfig) -> None:
            state.has_begun = True
            call = _call_of(config)
            # Of a sweep Hydra goes on with the other jobs, and raises one job's error at the end.
            passes_on = call.is_sweep or state.has_traceback
            with failing_in_one_line(interrupted.format(folder=call.folder), passes_on=passes_on):
                if uses_models:
                    quiet_libraries()
                code = function(call)
            if code:
                sys.exit(code)

        @functools.wraps(function)
        def main() -> None:
            state.has_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
            with failing_in_one_line("interrupted", passes_on=state.has_traceback):
                given, flags = split(sys.argv[1:])
                overrides = expanded(rewrite(given))
                if answer := _answer(verb, overrides, flags):
                    return show(answer)
                check_flags(verb, overrides, flags)
                # Hydra takes overrides on both sides of a flag for a mistake.
                sys.argv[1:] = [*overrides, *flags]
                try:
                    with raising_errors():
                        enter()
                except Exception as error:
                    if state.has_begun or isinstance(error, UserError):
                        raise
                    raise refused(error, verb, overrides) from error

        return main

    return decorate


@dataclass
class _State:
    """Of a command in this process: whether its work has begun, after which an error is no longer
    one of the overrides; and whether the user wants to see tracebacks.
    """

    has_begun: bool = False
    has_traceback: bool = False


def _call_of(config: DictConfig) -> Call:
    """The job that Hydra has entered; the working folder becomes that of the launch again."""
    job: Any = HydraConfig.get()  # a DictConfig, whatever its annotation says
    os.chdir(get_original_cwd())  # also with hydra.job.chdir=true
    folder, overrides = Path(job.runtime.output_dir), tuple(job.overrides.task)
    return Call(config, overrides, folder, job, job.mode == RunMode.MULTIRUN)


VALUED = (
    *("--cfg", "-c", "--package", "-p", "--config-name", "-cn", "--config-path", "-cp"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)
"""Flags of Hydra that the next word belongs to."""

FLAGS = (
    *VALUED,
    *("--help", "-h", "--version", "--hydra-help", "--multirun", "-m", "--run", "-r"),
    *("--resolve", "--info", "-i", "--shell-completion", "-sc"),
)
"""Flags of a command: ours, and Hydra's."""


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are overrides (or a prompt), and those that are flags.
    Raises UserError for a flag that there is not.
    """
    overrides, flags = [], []
    before = ""
    for word in given:
        is_value = before in VALUED
        if word.startswith("-") and not is_value and word.partition("=")[0] not in FLAGS:
            known = (flag for flag in FLAGS if flag.startswith("--"))
            raise UserError(f"there is no flag {word}; there are {', '.join(known)}")
        (flags if word.startswith("-") or is_value else overrides).append(word)
        before = word
    return overrides, flags


def _answer(verb: str, overrides: Sequence[str], flags: Sequence[str]) -> str | None:
    """What is printed in place of the command's work."""
    if "--version" in flags:
        return f"specens {__version__}"
    if "--help" in flags or "-h" in flags:
        return help_text(verb, [*overrides, *_search_path(flags)])
    return None


def check_flags(verb: str, overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse --multirun for a command that has none, or beside a flag that excludes it."""
    sweep = {"--multirun", "-m", "hydra.mode=MULTIRUN"} & {*overrides, *flags}
    if sweep and verb not in SWEPT:
        raise UserError(f"{verb} has no --multirun: give the command once for each")
    if sweep and any(flag.partition("=")[0] in ("--cfg", "-c") for flag in flags):
        raise UserError("--multirun and --cfg: leave one of them out")


def _search_path(flags: Sequence[str]) -> list[str]:
    """The override that does what `--config-dir` does."""
    for flag, after in zip(flags, [*flags[1:], ""], strict=True):
        name, _, folder = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            return [f"hydra.searchpath=[file://{Path(folder or after).absolute()}]"]
    return []


def show(text: str) -> None:
    """Print, also to a reader that has enough before the end, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """What is written to stdout from now on goes nowhere: its reader has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_libraries() -> None:
    """A command's own lines are what the terminal is for: no loading bars, and warnings go to the
    job's log.
    """
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    logging.captureWarnings(True)


@contextmanager
def raising_errors() -> Iterator[None]:
    """Let Hydra raise errors, which it would print in lines of its own before it exits."""
    name = "HYDRA_FULL_ERROR"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def failing_in_one_line(interrupted: str, *, passes_on: bool) -> Iterator[None]:
    """What every command does with errors: those that name what is at fault are a line and exit
    code 1 (with `passes_on`: a line of the log, and raised again), Ctrl-C 130.
    """
    try:
        yield
    except (UserError, DrafterError) as error:
        if passes_on:
            logging.getLogger("specens").error("%s", error)
            raise
        print("specens:", *str(error).splitlines(), file=sys.stderr)  # what it quotes may have more
        sys.exit(1)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)


def main(given: Sequence[str] | None = None) -> None:
    """`specens <verb> <overrides>`; alone it lists the verbs."""
    words = list(sys.argv[1:] if given is None else given)
    if not words or words[0] in ("-h", "--help", "help"):
        show(_overview())
    elif words[0] == "--version":
        print(f"specens {__version__}")
    elif words[0] in VERBS:
        _dispatch(words[0], words[1:])
    elif words[0] in ("-sc", "--shell-completion"):
        _complete(words)
    else:
        print(f"specens: no command {words[0]!r}; there are {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(1)


def _dispatch(verb: str, words: list[str]) -> None:
    sys.argv = [sys.argv[0], *words]
    import_module(f"specens.{verb}.__main__").main()


def _complete(words: list[str]) -> None:
    """Tab completion: of the verb here, of its overrides by Hydra, which is shown a command line
    without the verb.
    """
    typed = re.split(" +", os.environ.get("COMP_LINE", "").lstrip())
    if "query=bash" not in words:
        _dispatch("run", words)
    elif len(typed) > 2 and typed[1] in VERBS:
        given = [word for word in typed[2:-1] if "=" in word[1:]]  # without a race's prompt
        os.environ["COMP_LINE"] = " ".join([typed[0], *given, typed[-1]])
        _dispatch(typed[1], words)
    else:
        print(" ".join(verb for verb in VERBS if verb.startswith(typed[-1])))


def _overview() -> str:
    lines = [f"  {verb:<8} {what}" for verb, what in VERBS.items()]
    return "\n".join(
        [
            f"specens {__version__}: a laboratory for speculative decoding with several drafters",
            "",
            "usage: specens <command> [override=value ...]      (or: python -m specens.<command>)",
            "",
            *lines,
            "",
            "specens <command> --help explains its overrides, --cfg job shows its configuration.",
            'Tab completion in bash: eval "$(specens -sc install=bash)"',
        ]
    )
