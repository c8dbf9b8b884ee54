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
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

import specens
from specens import cli
from specens.cli_help import SWEPT, VERBS, help_text
from specens.config.compose import compose, group_names
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
    assert ("--multirun" in text) == (verb in SWEPT) and "--cfg job" in text
    assert ("hydra.run.dir=FOLDER" in text) == (verb in ("run", "bench", "audit"))
    assert ("--config-dir FOLDER" in text) == (verb not in ("replay", "report"))


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
    part = help_text(words[0], words[1:]).partition("\nOPTIONS")[2].partition("\nFLAGS")[0]
    entries = re.findall(r"^  ([\w.]+)=(.*\n(?: {20,}.*\n)*)", part, re.M)
    bare = [key for key, text in entries if not f"  {key}={text}".replace("\n", "")[52:].strip()]
    assert bare == []


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


# Refusals


def refusal(capsys: Any, *words: str) -> str:
    """What `specens <words>` prints in one line before it exits with 1."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("specens: ") and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["drafter=nope"], ["drafter=nope", "choose one of", "ngram, non_autoregressive"]),
        (["model@target=gpt2"], ["model@target=gpt2", "smollm2-135m"]),
        (["-m", "budget=fixed,nope"], ["budget=nope", "cost_aware"]),
        (["smapling.seed=1"], ["smapling.seed", "no such option", "specens run --help"]),
        (["-m", "seed=1,2"], ["seed", "no such option"]),
        (["seed=1,2"], ["seed=1,2", "--multirun"]),
        (["sampling.seed.x=1"], ["sampling.seed.x"]),
        (["~drafter.members.nope"], ["drafter.members.nope", "does not exist"]),
        (["prompts.texts=[a"], ["prompts.texts=[a", "quote"]),
        (["drafter=ngram,[ngram,retrieval]", "-m"], ["drafter=ngram,[ngram", "as a list"]),
        (["--nonsense"], ["no flag --nonsense", "--config-dir"]),
        (["--cfg", "job", "-m"], ["--cfg", "--multirun"]),
        (["--config-dir", "nowhere"], ["nowhere", "not found"]),
        (["--config-name", "nope"], ["nope"]),
        (["--config-dir", "mine", "budget=broken"], ["broken.yaml", "line 1"]),
        (["hydra.run.dir=mine/budget/broken.yaml/run"], ["broken.yaml", "hydra.run.dir"]),
        (["hydra/launcher=nope"], ["hydra/launcher=nope", "basic"]),
        (["sampling.temperature=-1"], ["sampling.temperature=-1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_run_is_refused_in_one_line(words, parts, capsys, tmp_path, monkeypatch):
    """Ours alone: without the lines of Hydra's own, and without its exit code for a wrong flag, as
    2 means something else in audit and replay.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "budget").mkdir(parents=True)
    (tmp_path / "mine" / "budget" / "broken.yaml").write_text("max_nodes: [", encoding="utf-8")
    line = refusal(capsys, "run", *words)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("verb", sorted(set(VERBS) - set(SWEPT)))
def test_a_command_without_sweeps_says_so_and_leaves_no_folder(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in ("--multirun", "-m", "hydra.mode=MULTIRUN"):
        assert f"{verb} has no --multirun" in refusal(capsys, verb, flag)
    assert not list(tmp_path.iterdir())


def test_the_flags_are_those_of_hydra_and_ours():
    """None is refused that Hydra knows."""
    known = get_args_parser()._option_string_actions
    assert set(cli.FLAGS) == set(known)
    takes_value = {flag for flag, action in known.items() if action.nargs is None}
    assert set(cli.VALUED) == takes_value


def test_a_traceback_is_shown_to_those_who_ask_for_one():
    done = python("-m", "specens.run", "sampling.temperature=-1", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert "sampling.temperature=-1: give a number" in done.stderr


def test_a_reader_that_leaves_does_not_end_the_work():
    """As `head` does."""
    code = """
import sys
from specens.run.terminal import Terminal

terminal = Terminal()
for number in range(20000):
    terminal.say(f"line {number}")
print("done", file=sys.stderr)
"""
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as work:
        assert work.stdout is not None and work.stderr is not None
        assert work.stdout.readline() == "line 0\n"
        work.stdout.close()
        assert (work.stderr.read(), work.wait()) == ("done\n", 0)


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
