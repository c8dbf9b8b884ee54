"""`--help` of a command: every override with its choices, read from the files of conf/.

The comments in those files are the documentation: the first one of a file says what the choice is,
the one at or above a key what the key means.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specens.config.compose import CONF_DIR, compose, config_name, group_names

VERBS = {
    "run": "decode prompts with several drafters at once and credit each of them",
    "race": "watch the drafters and AR decoding side by side in the terminal",
    "bench": "measure speed against AR decoding and other implementations",
    "audit": "test whether the output is the target's own",
    "replay": "what other subsets of the drafters or other budgets would have done",
    "report": "write report.html again from the files of a run",
    "train": "train drafters for a target, from text that it writes itself",
}
"""The commands and what they do, as `specens --help` lists them."""

USAGE = {"race": '"PROMPT"', "replay": "run=FOLDER", "report": "run=FOLDER"}
"""What a command needs besides overrides that all have defaults."""

SWEPT = ("run", "bench", "audit", "train")
"""The commands that --multirun can give several times."""

WIDTH = 100
KEY_LINE = re.compile(
    r"^(?P<indent> *)(?P<key>[\w./@-]+):(?P<value>(?: [^#]*)?)(?:# (?P<note>.*))?$"
)

FIRST_SENTENCE = re.compile(r".{20,}?[^.]\.(?= |$)")


def help_text(verb: str, overrides: Sequence[str] = ()) -> str:
    """What `specens <verb> <overrides> --help` prints. Raises UserError for overrides that do not
    compose.
    """
    config = compose(overrides, verb, with_hydra=True)
    known = reversed(config.hydra.runtime.choices.items())  # outermost and earliest first
    choices = {group: choice for group, choice in known if not group.startswith("hydra/")}
    return "\n".join(
        [
            *_head(verb),
            *_groups(choices),
            *_options(verb, config, choices),
            *_flags(verb, config, choices),
        ]
    )


def _head(verb: str) -> Iterator[str]:
    yield f"specens {verb}: {VERBS[verb]}"
    yield ""
    given = f"{verb} {USAGE.get(verb, '')}".strip()
    yield f"usage: specens {given} [override=value ...]      (or: python -m specens.{verb})"


def _groups(choices: Mapping[str, str | None]) -> Iterator[str]:
    """Groups that the command has, outermost first: each with its choices and what they are."""
    shown = [group for group in choices if "." not in group]
    if shown:
        yield "\nCHOICES, each a file in conf/ (the first one is taken now)\n"
    for group in shown:
        folder, taken = group.partition("@")[0], choices[group]
        names = group_names(folder)
        yield f"  {group}="
        if taken is None:
            yield _line("    null", "none of these", 26)
        for name in sorted(names, key=lambda name: name != taken):
            yield _line(f"    {name}", about(folder, name), 26)


def about(group: str, name: str) -> str:
    """What a file in conf/<group> says that it is, in one sentence."""
    what = _comments(Path(CONF_DIR) / group / f"{name}.yaml").get("", "")
    first = FIRST_SENTENCE.match(what)
    return first[0] if first else what


def _options(verb: str, config: DictConfig, choices: Mapping[str, str | None]) -> Iterator[str]:
    """Every key of the composed configuration, with its value and its comment."""
    notes = dict(_notes(verb, choices))
    other = f"; those of another choice: specens {verb} budget=fixed --help"
    yield f"\nOPTIONS with their present values{other if 'budget' in choices else ''}\n"
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for key, value in _leaves({key: value for key, value in plain.items() if key != "hydra"}):
        yield _line(f"  {key}={_shown(value)}", _note_of(key, notes), 52)


def _note_of(key: str, notes: Mapping[str, str]) -> str:
    """The comment of a key, or of the entry that it belongs to."""
    while key not in notes and "." in key:
        key = key.rpartition(".")[0]
    return notes.get(key, "")


def _flags(verb: str, config: DictConfig, choices: Collection[str]) -> Iterator[str]:
    yield "\nFLAGS\n"
    if verb in SWEPT:
        yield _line("  --multirun, -m", "sweep: every combination of a=1,2 b=3,4 is a job", 26)
    yield _line("  --cfg job", "print the composed configuration", 26)
    if choices:
        what = "a folder with further choices of yours, such as FOLDER/budget/mine.yaml"
        yield _line("  --config-dir FOLDER", what, 26)
    yield _line("  --hydra-help", "Hydra's own options (https://hydra.cc)", 26)
    if config.hydra.run.dir != "." and "folder" not in config:
        yield _line("  hydra.run.dir=FOLDER", "where the results go", 26)
    yield '\nTab completion in bash: eval "$(specens -sc install=bash)"'


def _notes(verb: str, choices: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """(dotted key, comment) of all files that the configuration was composed from."""
    names = dict.fromkeys(
        ["config", config_name(verb)] if "drafter" in choices else [config_name(verb)]
    )
    for name in names:
        yield from _comments(Path(CONF_DIR) / f"{name}.yaml").items()
    for group, choice in choices.items():
        folder, _, package = group.partition("@")
        for path in _with_defaults(Path(CONF_DIR) / folder, str(choice)):
            for key, note in _comments(path).items():
                if key:
                    yield f"{package or folder}.{key}", note


def _with_defaults(folder: Path, choice: str) -> list[Path]:
    """A choice's file, after the files of the same group that it builds on."""
    path = folder / f"{choice}.yaml"
    if not path.is_file():
        return []
    loaded: Any = OmegaConf.load(path)
    entries = [entry for entry in loaded.get("defaults", []) if isinstance(entry, str)]
    own = [entry for entry in entries if entry != "_self_" and "@" not in entry]
    if folder.name == "model" and choice != "hub":
        own = ["hub"]  # has the options of every model
    return [*(folder / f"{entry}.yaml" for entry in own), path]


def _comments(path: Path) -> dict[str, str]:
    """Dotted key -> the comment on its line, or the one right above; "" -> the file's first one."""
    notes: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    above: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("# "):
            above.append(line.strip()[2:].strip())
            continue
        if above and "" not in notes:
            notes[""] = " ".join(entry for entry in above if not entry.startswith("@package"))
            above = []
        if found := KEY_LINE.match(line):
            indent = len(found["indent"])
            stack = [entry for entry in stack if entry[0] < indent] + [(indent, found["key"])]
            note = found["note"] or " ".join(above)
            if note and not note.startswith("see hub"):
                notes[".".join(key for _, key in stack)] = note
        if line.strip():
            above = []
    return notes


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _line(left: str, right: str, column: int) -> str:
    """Two columns; what does not fit beside the left one stands under it."""
    if not right:
        return left
    gap = " " * column
    lines = textwrap.wrap(right, WIDTH - column, break_on_hyphens=False)
    if len(left) >= column:
        return "\n".join([left, *(gap + line for line in lines)])
    return "\n".join([left.ljust(column) + lines[0], *(gap + line for line in lines[1:])])
