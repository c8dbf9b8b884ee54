"""The command line: what `specens`, `specens <command>` and their --help print, and completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import pytest
from helpers import REPOSITORY
from omegaconf import OmegaConf

import specens
from specens import cli
from specens.cli_help import VERBS, help_text
from specens.config import compose, group_names
from specens.errors import UserError

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "wandb", "bitsandbytes"):
    sys.modules[name] = None  # importing it now fails
from specens.cli import main
main(sys.argv[1:])
"""


def printed(capsys: Any, *words: str) -> str:
    """What `specens <words>` prints in this process."""
    cli.main(words)
    out, err = capsys.readouterr()
    assert err == ""
    return out


def python(*words: str, **environment: str) -> subprocess.CompletedProcess:
    given = {"env": {**os.environ, **environment}, "cwd": REPOSITORY, "timeout": 120}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **given)


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specens"])


# The package


def test_there_is_a_folder_with_a_main_for_every_command_and_for_nothing_else():
    folders = {path.parent.name for path in (REPOSITORY / "specens").glob("*/__main__.py")}
    assert folders == set(VERBS)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_alone_it_lists_the_commands(words, capsys):
    text = printed(capsys, *words)
    assert all(re.search(rf"^  {verb} +{what}$", text, re.M) for verb, what in VERBS.items())
    assert "--help" in text and "install=bash" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_script_and_the_package_run_the_same_function():
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert project["project"]["scripts"] == {"specens": "specens.cli:main"}
    (script,) = entry_points(group="console_scripts", name="specens")
    done = python("-m", "specens", "--version")
    assert (done.returncode, done.stdout) == (0, f"specens {specens.__version__}\n")
    assert script.name == "specens"


def test_the_version_stands_in_one_place():
    """The package says it, and what is installed reads it from there."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert "version" in project["project"]["dynamic"]
    assert "version" not in project["project"]
    path = REPOSITORY / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{specens.__version__}"' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_every_command_knows_the_version(verb, capsys):
    words = ["--version"] if verb is None else [verb, "--version"]
    assert printed(capsys, *words) == f"specens {specens.__version__}\n"


@pytest.mark.parametrize("word", ["bogus", "drafter=ngram", "--nonsense", "Run"])
def test_what_is_no_command_is_refused_in_a_line(word, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([word, "prompts=demo"])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert word in err and all(verb in err for verb in VERBS)


# Help


@pytest.mark.parametrize("verb", VERBS)
def test_every_commands_help_needs_no_torch(verb):
    done = python("-c", WITHOUT_TORCH, verb, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"specens {verb}: {VERBS[verb]}\n")


def leaves(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of what can be overridden."""
    found: list[str] = []
    for key, value in node.items():
        if key not in ("_target_", "hydra"):
            inner = isinstance(value, dict) and value
            found += leaves(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def options_in(text: str) -> list[str]:
    part = text.partition("\nOPTIONS")[2].partition("\nFLAGS")[0]
    return re.findall(r"^  ([\w.]+)=", part, re.M)


def groups_in(text: str) -> dict[str, list[str]]:
    """Group -> its choices, in the order in which the help has them."""
    part = text.partition("\nCHOICES")[2].partition("\nOPTIONS")[0]
    found: dict[str, list[str]] = {}
    for line in part.splitlines():
        if group := re.fullmatch(r"  ([\w@.]+)=", line):
            found[group[1]] = []
        elif name := re.match(r"    ([\w.-]+)(  |$)", line):
            list(found.values())[-1].append(name[1])
    return found


RUN = ["model@target", "drafter", "verifier", "budget", "prompts", "tracker", "experiment"]
GROUPS = {"run": RUN, "race": RUN, "audit": RUN, "bench": RUN, "report": []}
GROUPS |= {"train": ["model@target", "stage"]}


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_every_option_with_its_value_and_no_other_commands(verb, capsys):
    text = printed(capsys, verb, "--help")
    plain = OmegaConf.to_container(compose([], verb), resolve=False)
    assert sorted(options_in(text)) == sorted(leaves(plain))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert set(GROUPS.get(verb, groups_in(text))) == set(groups_in(text))
    assert "--multirun" in text and "--cfg job" in text


CHOSEN = [[verb] for verb in VERBS]
CHOSEN += [
    ["train" if group == "stage" else "run", f"{where}={name}"]
    for group, where in (
        *((name, name) for name in ("drafter", "budget", "verifier", "tracker", "stage")),
        *(("prompts", "prompts"), ("model", "model@target")),
    )
    for name in group_names(group)
]


@pytest.mark.parametrize("words", CHOSEN, ids=" ".join)
def test_help_explains_every_option(words):
    """But for the systems of a bench, which are examples of their own."""
    part = help_text(words[0], words[1:]).partition("\nOPTIONS")[2].partition("\nFLAGS")[0]
    entries = re.findall(r"^  ([\w.]+)=(.*\n(?: {20,}.*\n)*)", part, re.M)
    bare = [key for key, text in entries if not f"  {key}={text}".replace("\n", "")[52:].strip()]
    assert [key for key in bare if not key.startswith("systems.")] == []


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_every_choice_of_every_group_and_the_one_that_is_taken_first(verb, capsys):
    choices = compose([], verb, with_hydra=True).hydra.runtime.choices
    for group, names in groups_in(printed(capsys, verb, "--help")).items():
        assert sorted(set(names) - {"null"}) == group_names(group.partition("@")[0])
        assert names[0] == str(choices[group] or "null")


def test_help_says_what_choices_and_options_are():
    """The comments of conf/ are the text."""
    text = help_text("run")
    flat = re.sub(r"\s+", " ", text)
    assert "smoke A tiny random target and a few tokens" in flat
    assert "drafter.members.ngram.num_draft_tokens=10 depth of a continuation" in flat
    assert "target.dtype=float32 auto (the checkpoint's own)" in flat, "of the file it builds on"
    assert "sampling.temperature=0.0 0: greedy" in flat
    lm = re.search(r" lm (.*?) ngram ", flat)
    assert lm is not None and lm[1].endswith("model@drafter.members.lm.model=... (member).")


def test_overrides_given_with_help_are_composed(capsys):
    """A member's own options, a file's choice and a value."""
    text = printed(capsys, "run", "drafter=ngram", "sampling.seed=7", "budget=bandit", "--help")
    found = options_in(text)
    assert "drafter.max_ngram" in found and "budget.exploration" in found
    assert not [key for key in found if key.startswith("drafter.members")]
    assert "  sampling.seed=7 " in text
    assert groups_in(text)["drafter"][0] == "ngram"
    assert "drafter.only=['ngram']" in printed(capsys, "run", "-h", "drafter=[ngram]")
    assert "prompts.texts=['Why so?']" in printed(capsys, "race", "Why so?", "--help")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "nonsense=1", "--help"], "nonsense"),
        (["run", "drafter=nonsense", "--help"], "nonsense"),
        (["report", "drafter=ngram", "--help"], "drafter"),
        (["race", "Why", "so?", "--help"], "quotes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_help_for_overrides_that_do_not_compose_is_a_line(words, why, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("specens: ") and why in err
    with pytest.raises(UserError):
        help_text("run", ["nonsense=1"])


def test_help_and_choices_of_a_folder_of_ones_own(tmp_path, capsys):
    """What `--config-dir` adds can be chosen where the help is asked for too."""
    (tmp_path / "drafter").mkdir()
    text = "_target_: specens.drafters.ngram.NGram\nmax_ngram: 2 # short ones\n"
    (tmp_path / "drafter" / "mine.yaml").write_text(text, encoding="utf-8")
    for given in ([f"--config-dir={tmp_path}"], ["--config-dir", str(tmp_path)]):
        assert "drafter.max_ngram=2" in printed(capsys, "run", *given, "drafter=mine", "--help")


def test_flags_may_stand_anywhere_and_keep_their_values(capsys, monkeypatch):
    """Hydra itself refuses overrides on both sides of one."""
    words = ["run", "drafter=ngram", "--cfg", "job", "-m", "-p", "drafter", "drafter.max_ngram=2"]
    overrides, flags = cli.split(words[1:])
    assert overrides == ["drafter=ngram", "drafter.max_ngram=2"]
    assert flags == ["--cfg", "job", "-m", "-p", "drafter"]
    text = printed(capsys, *(word for word in words if word != "-m"))
    assert text.startswith("# @package drafter") and "max_ngram: 2" in text
    assert "texts:\n  - Why so?\n" in printed(capsys, "race", "Why so?", "--cfg", "job")


# Completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("specens ", list(VERBS)),
        ("specens re", ["replay", "report"]),
        ("specens run drafter=n", ["drafter=ngram", "drafter=non_autoregressive", "drafter=none"]),
        ("specens  run  budget.max", ["budget.max_nodes="]),
        ("specens run experiment=smoke prompts.l", ["prompts.limit="]),
        ("specens report ru", ["run="]),
        ("specens train stage=d", ["stage=datastore", "stage=distilled"]),
        ("specens race 'why me' layout=rows drafter=ng", ["drafter=ngram"]),
        ("specens bogus dra", []),
    ],
)
def test_completion_of_commands_and_their_overrides(line, expected, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert printed(capsys, "-sc", "query=bash").split() == expected


def test_the_script_for_bash_completes_specens(capsys, monkeypatch):
    monkeypatch.delenv("COMP_LINE", raising=False)
    text = printed(capsys, "-sc", "install=bash")
    assert re.search(r"complete .* specens$", text, re.M)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_commands_words_reach_it(monkeypatch):
    """`specens report run=x` is `python -m specens.report run=x`."""
    seen = []
    module = import_module("specens.report.__main__")
    monkeypatch.setattr(module, "main", lambda: seen.append(sys.argv[1:]))
    cli.main(["report", "run=x", "hydra.verbose=true"])
    assert seen == [["run=x", "hydra.verbose=true"]]
