"""README and docs work as shown: all their commands and code are executed, in the order of a page.

The default target and every model of a hub are replaced by a tiny random one, whose trained
drafters are made first; all else is what a reader does.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, run_command

from specens.analysis.metrics import METRICS
from specens.cli import main as specens_main
from specens.drafters.retrieval import retrieval
from specens.drafters.trained import weights
from specens.models.load import ModelSpec
from specens.models.tiny import TinyModel
from specens.models.wheel import WheelFile
from specens.run import tracker

PAGES = sorted([*REPOSITORY.glob("README*.md"), *(REPOSITORY / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r"^(python3 -m venv|pip install) ")
TINY_DRAFTERS = (
    *("stage=all", "model@target=tiny", "folder=tiny", "stage.stages.corpus.num_tokens=4000"),
    *("stage.stages.corpus.shard_texts=16", "stage.stages.corpus.max_answer_tokens=64"),
    *("stage.stages.corpus.max_user_tokens=32", "stage.stages.distilled.layers=[0]"),
    *("stage.stages.distilled.schedule.num_steps=2",),
    *("stage.stages.non_autoregressive.schedule.num_steps=2",),
)


class Untracked(tracker.NoTracker):
    """Instead of an offline W&B run for every command."""

    __module__ = tracker.__name__

    def __init__(
        self, project="", entity=None, name=None, group=None, tags=(), mode=None
    ) -> None: ...


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with a cache, and trained drafters of the tiny model where the package's lie."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(folder / "cache"))
        train = importlib.import_module("specens.train.__main__").main
        assert run_command(train, patch, folder, *TINY_DRAFTERS) == 0
    return folder


@pytest.fixture
def reader(shelf, tmp_path, monkeypatch):
    """A machine on which every model that is named is the tiny one."""
    monkeypatch.setenv("SPECENS_CACHE", str(shelf / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    tiny = TinyModel().folder()
    monkeypatch.setattr(WheelFile, "folder", lambda self: tiny)
    monkeypatch.setattr(tracker, "WandbTracker", Untracked)
    ordinary = ModelSpec._location

    def location(self: ModelSpec) -> tuple[str, str | None]:
        is_of_a_hub = isinstance(self.source, str) and not Path(self.source).exists()
        return (str(tiny), None) if is_of_a_hub else ordinary(self)

    monkeypatch.setattr(ModelSpec, "_location", location)
    for module in (weights, retrieval):
        monkeypatch.setattr(module, "SHIPPED", shelf)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_blocks_of_a_page_run(page, reader, monkeypatch):
    for language, body in blocks(page):
        first = body.partition("\n")[0]
        if re.fullmatch(r"# [\w/]+\.(py|yaml)", first):
            path = reader / first[2:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
            importlib.invalidate_caches()
        elif language == "python":
            monkeypatch.chdir(reader)
            exec(compile(body, page.name, "exec"), {"__name__": "__main__"})
        elif language == "bash":
            for line in body.replace("\\\n", " ").splitlines():
                execute(line, reader, monkeypatch)
        else:
            assert language == "", f"{page.name}: what is done with a block of {language}?"


def test_no_page_writes_into_the_run_folder_of_another():
    """A reader runs them all in one folder, where a second run into a folder is refused."""
    written = [
        folder
        for page in PAGES
        if "zh-CN" not in page.name  # the same commands as README.md
        for language, body in blocks(page)
        if language == "bash"
        for folder in re.findall(r"hydra\.run\.dir=(\S+)", body)
    ]
    assert len(written) > 5 and len(set(written)) == len(written), written


def execute(line: str, folder: Path, monkeypatch) -> None:
    words = shlex.split(line, comments=True)
    if not words or INSTALL.match(line):
        return
    if words[:2] == ["python", "-m"] and words[2].startswith("specens."):
        words = ["specens", words[2].removeprefix("specens."), *words[3:]]
    if words[0] == "specens":
        verb = importlib.import_module(f"specens.{words[1]}.__main__").main
        assert run_command(verb, monkeypatch, folder, *words[2:]) == 0, line
    else:
        assert words[0] == "echo", f"no test executes this line: {line}"
        subprocess.run(line, shell=True, check=True, cwd=folder)


def test_the_install_command_is_the_one_that_the_gate_runs():
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    command = "pip install -c constraints.txt -e '.[dev]'"
    assert f"`{command}`" in lines and "python -m pytest" in lines
    gate = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert command.replace("install", "install --quiet") in gate and "python -m pytest" in gate


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_metrics_page_has_every_definition():
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    _, of_run, of_drafter = re.split(r"^## Of a \w+$", page, flags=re.MULTILINE)
    for scope, part in (("run", of_run), ("drafter", of_drafter.partition("\n## ")[0])):
        entries = re.findall(r"^- `(\w+)`: (.*?)(?=\n- |\n\n)", part, flags=re.DOTALL | re.M)
        written = {key: " ".join(text.split()) for key, text in entries}
        assert written == {m.key: m.meaning for m in METRICS if m.scope == scope}


def test_lines_have_at_most_100_columns():
    paths = [*PAGES, *REPOSITORY.glob("*.md"), *REPOSITORY.glob("*.toml")]
    folders = ("specens", "conf", "experiments", "tests")
    paths += [path for folder in folders for path in (REPOSITORY / folder).rglob("*.*")]
    paths += [REPOSITORY / ".ci" / "run", *(REPOSITORY / "notebooks").glob("*.md")]
    for path in paths:
        is_ours = "data" not in path.parts and path.is_file()  # not an old run, kept as it was
        if is_ours and path.suffix in ("", ".md", ".yaml", ".toml", ".sh", ".py"):
            wide = [line for line in path.read_text("utf-8").splitlines() if len(line) > 100]
            assert not wide, f"{path.name}: {wide[0]}"


def test_the_list_of_commands_is_in_the_readme(capsys):
    specens_main([])
    verbs = re.findall(r"^  (\w+) ", capsys.readouterr().out, flags=re.M)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert verbs and all(f"| `{verb}` |" in readme for verb in verbs)
