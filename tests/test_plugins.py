"""A package of the user's own: drafter, budgets, verifier, prompts, tracker and metrics, used by
overrides alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import run_command, summary_of

from specens.analysis.summary import drafter_table
from specens.config.compose import compose
from specens.errors import UserError
from specens.models.load import ModelSpec
from specens.records.reader import load
from specens.replay.__main__ import main as replay_main
from specens.report.__main__ import main as report_main
from specens.run.__main__ import main
from specens.run.job import job_of

MINE = '''
"""Everything of one's own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specens.decoding.budgets.base import draft_limit
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.types import IDLE, ROOT, Draft, Member, Plan, Share, Verdict
from specens.errors import check_count
from specens.prompts.sources import PromptSource, Question


class Repeat:
    """Proposes the last token again and again."""

    def __init__(self, num_draft_tokens=3):
        check_count("repeat.num_draft_tokens", num_draft_tokens)
        self.members = (Member("repeat", num_draft_tokens, num_draft_tokens),)

    def bind(self, target): ...

    def begin(self, prompt_ids):
        return self

    def propose(self, context_ids, plan, sampler):
        return Draft.chain([context_ids[-1]] * plan.num_tokens)

    def observe(self, commit): ...


class Half(FixedBudget):
    """Half of what a member may draft."""

    def plan(self, context):
        plan = super().plan(context)
        shares = [Share((s.num_tokens + 1) // 2, s.num_nodes) for s in plan.shares]
        return Plan.of(shares, self.max_nodes)


@dataclass(frozen=True)
class Alternate:
    """Drafts in every second step."""

    needs_costs: ClassVar[bool] = False
    max_nodes: int = 8
    reset: ClassVar[str] = "prompt"
    costs: ClassVar[None] = None
    refresh: ClassVar[bool] = False

    def begin(self, members, costs, earlier=None):
        return AlternatePolicy(self.max_nodes)


class AlternatePolicy:
    rate = None

    def __init__(self, max_nodes):
        self.max_nodes, self.num_steps, self.mode = max_nodes, 0, "draft"

    def plan(self, context):
        self.num_steps += 1
        self.mode = "draft" if self.num_steps % 2 else "plain"
        depths = [draft_limit(member, context) for member in context.members]
        drafts = self.mode == "draft"
        return Plan.of([Share(d, d) if d and drafts else IDLE for d in depths], self.max_nodes)

    def select(self, tree):
        return tree

    def observe(self, draft, tree, commit): ...


class AtMostOne:
    """Keeps one draft token of a step, if it is the target's."""

    name, lossless, coupled = "at_most_one", True, True

    def __call__(self, tree, scores):
        token = scores.target_token(ROOT)
        child = tree.children().get(ROOT, {}).get(token)
        if child is None:
            return Verdict((), token)
        return Verdict((child,), scores.target_token(child))


@dataclass(frozen=True, kw_only=True)
class Poems(PromptSource):
    verse: str = "a rose is a rose is a rose"

    def read(self):
        return [(f"verse {i}", Question(f"rose{i}", "poem", (self.verse * i,))) for i in (1, 2, 3)]


class Notes:
    """A tracker that keeps what it is given in a file."""

    def __init__(self, path):
        self.path, self.notes = Path(path), []

    def start(self, folder, config):
        self.notes.append(["start", sorted(config)])

    def prompt_done(self, row, step):
        self.notes.append(["prompt", step, row["longest_draft"]])

    def finish(self, summary, drafters, prompts, status):
        self.notes.append(["finish", status, drafters])
        self.path.write_text(json.dumps(self.notes, default=str))


class Longest:
    key, title, form, unit = "longest_draft", "longest draft", ",.0f", "tokens"
    meaning, scope = "most tokens that a member proposed in one step", "run"

    def __call__(self, tables):
        return tables.drafts.num_drafted.max()


class LongestOf:
    key, title, form, unit = "longest_of_mine", "longest", ",.0f", "tokens"
    meaning, scope = "most tokens that it proposed in one step", "drafter"

    def __call__(self, member):
        return member.column("num_drafted").max()


class OddForm(Longest):
    key, form = "odd", "lots"


class Fails:
    key, title, form, unit, meaning, scope = "fails", "never there", ".1%", "", "a mistake", "run"

    def __call__(self, tables):
        return tables.no_such_column
'''

METRICS = "metrics=[{_target_: mine.Longest},{_target_: mine.LongestOf}]"
MEMBER = "+drafter.members.mine={_target_: mine.Repeat, num_draft_tokens: 4}"
SMOKE = ("experiment=smoke", "drafter=[ngram,mine]", MEMBER, "sampling.max_new_tokens=24")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the launch, which has the package in it."""
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    package(tmp_path, "mine", MINE)
    yield tmp_path
    for name in ("mine", "mine.parts", "broken"):
        sys.modules.pop(name, None)


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code, encoding="utf-8")


def refusal(*overrides: str) -> str:
    """The line with which a configuration is refused."""
    with pytest.raises(UserError) as error:
        job_of(compose([*overrides]))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_package_of_ones_own_is_used_by_overrides_alone(folder, monkeypatch, capsys):
    """Drafter, prompts, verifier, tracker and both kinds of metric in one run."""
    parts = ["verifier._target_=mine.AtMostOne", "prompts._target_=mine.Poems"]
    tracker = ["tracker._target_=mine.Notes", "+tracker.path=notes.json"]
    given = [*SMOKE, "plugins=[mine]", METRICS, *parts, *tracker, "hydra.run.dir=run"]
    assert run_command(main, monkeypatch, folder, *given) == 0
    run, summary = load(folder / "run"), summary_of(folder / "run")
    assert run.prompts.prompt_id.tolist() == ["rose1", "rose2"], "limit=2 of the experiment"
    assert (summary["verifier"], summary["num_identical"]) == ("at_most_one", 2)
    assert run.steps.num_accepted.max() == 1
    assert list(summary["drafters"]) == ["ngram", "mine"]
    longest = run.drafts.groupby("drafter").num_drafted.max()
    assert summary["longest_draft"] == longest.max() > 0
    for name, numbers in summary["drafters"].items():
        assert numbers["longest_of_mine"] == longest[name]
    assert summary["drafters"]["mine"]["longest_of_mine"] == 4
    table = drafter_table(summary).set_index("drafter")
    assert table.longest_of_mine.to_dict() == longest.to_dict()
    out = capsys.readouterr().out
    assert f"longest draft {longest.max()}" in out and " longest  \n" in out
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "longest draft" in page and re.search(r"\blongest</", page)
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    assert [note[0] for note in notes] == ["start", "prompt", "prompt", "finish"]
    assert notes[-1][1] == "finished"
    assert [row["longest_of_mine"] for row in notes[-1][2]] == longest[["ngram", "mine"]].tolist()


def test_a_file_of_ones_own_is_a_choice_like_any_other(folder, monkeypatch, capsys):
    """Found by Hydra's --config-dir."""
    for group, target in (("drafter", "Repeat"), ("budget", "Half"), ("prompts", "Poems")):
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "own.yaml").write_text(f"_target_: mine.{target}\n")
    own = ["drafter=own", "budget=own", "prompts=own", "prompts.limit=null"]
    given = ["--config-dir", "conf", "experiment=smoke", "plugins=[mine]", *own]
    few = ["sampling.max_new_tokens=4", "hydra.run.dir=run"]
    assert run_command(main, monkeypatch, folder, *given, *few) == 0
    assert summary_of(folder / "run")["num_identical"] == 3
    assert load(folder / "run").drafts.num_planned.max() == 2


def test_the_page_that_is_written_again_has_ones_own_metrics_too(folder, monkeypatch):
    """The package need not be there any more."""
    given = [*SMOKE, "plugins=[mine]", METRICS, "hydra.run.dir=run"]
    assert run_command(main, monkeypatch, folder, *given) == 0
    path = folder / "run" / "report.html"
    before = path.read_text(encoding="utf-8")
    assert run_command(report_main, monkeypatch, folder, "run=run") == 0
    page = path.read_text(encoding="utf-8")
    assert "longest draft" in page and page == before


@pytest.mark.parametrize(
    "budget",
    [
        ["budget._target_=mine.Half"],
        ["budget._target_=mine.Alternate", "~budget.first_only", "budget.max_nodes=6"],
    ],
    ids=["a fixed one with another plan", "one from scratch"],
)
def test_the_replay_of_a_budget_of_ones_own_is_the_run_itself(folder, budget, monkeypatch, capsys):
    """It is built from its `_target_` and options in the trace, by the package that is named."""
    given = [*SMOKE, "plugins=[mine]", METRICS, *budget, "trace=dense", "hydra.run.dir=run"]
    assert run_command(main, monkeypatch, folder, *given) == 0
    replayed = json.loads((folder / "run" / "replay.json").read_text(encoding="utf-8"))
    assert replayed["live"]["num_different"] == 0
    name = budget[0].rpartition(".")[2]
    assert name in {entry["policy"] for entry in replayed["policies"]}
    drafts = load(folder / "run").drafts
    planned = drafts[drafts.drafter == "mine"].num_planned
    assert planned.max() == (2 if name == "Half" else 4)
    assert ((planned == 0).mean() > 0.4) == (name == "Alternate")
    assert drafts.was_scheduled.eq(drafts.num_planned > 0).all()
    capsys.readouterr()

    assert run_command(replay_main, monkeypatch, folder, "run=run", "plugins=[mine]") == 0
    assert name in capsys.readouterr().out
    again = json.loads((folder / "run" / "replay.json").read_text(encoding="utf-8"))
    assert again["live"]["num_different"] == 0
    assert again["subsets"] == replayed["subsets"]
    assert (
        run_command(replay_main, monkeypatch, folder, "run=run", f"policy={name}", "plugins=[mine]")
        == 0
    )
    capsys.readouterr()
    assert run_command(replay_main, monkeypatch, folder, "run=run") == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith("specens: "))
    assert f"mine.{name} is not allowed" in line and "plugins=[mine]" in line


# Refusals


@pytest.mark.parametrize(
    "override",
    [
        *(MEMBER, "budget._target_=mine.Half", "verifier._target_=mine.AtMostOne", METRICS),
        *("prompts._target_=mine.Poems", "tracker._target_=mine.Notes"),
    ],
)
def test_without_plugins_a_class_of_ones_own_is_refused_with_what_to_add(override, monkeypatch):
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("the model was loaded"))
    line = refusal("experiment=smoke", override)
    assert "_target_: mine." in line and "plugins=[mine]" in line
    assert "mine" not in sys.modules, "it is not even imported"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("plugins=[no_such]", ["plugins=[no_such]", "ModuleNotFoundError"]),
        ("plugins=[broken]", ["plugins=[broken]", "RuntimeError: no licence"]),
        ("plugins=mine", ["plugins='mine'", "give a list"]),
        ("plugins=[2]", ["plugins=[2]", "give a list"]),
        ("plugins=2", ["plugins=2", "give a list"]),
        ("metrics=mine.Longest", ["metrics='mine.Longest'", "give a list"]),
    ],
)
def test_what_is_no_list_of_packages_that_can_be_imported_is_a_line_with_the_reason(
    override, parts, folder
):
    package(folder, "broken", "raise RuntimeError('no\\nlicence')")
    line = refusal("experiment=smoke", override)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("mine.NoSuch", ["mine.NoSuch", "does not exist"]),
        ("mine.json.JSONDecoder", ["mine.json", "cannot be imported"]),
        ("mine.Path", ["mine.Path", "not a class that mine defines"]),
        ("mine.parts.Thing", ["mine.parts.Thing", "cannot be imported", "NameError"]),
        ("os.system", ["os.system", "plugins=[os]"]),
        ("mine.Repeat", ["mine.Repeat", "no option 'max_nodes'"]),
    ],
)
def test_a_target_that_is_no_class_of_the_package_is_refused_in_a_line(target, parts, folder):
    (folder / "mine" / "parts.py").write_text("no_such_name\n", encoding="utf-8")
    line = refusal("experiment=smoke", "plugins=[mine]", f"budget._target_={target}")
    assert all(part in line for part in parts), line


# Metrics


@pytest.mark.parametrize(
    ("metric", "parts"),
    [
        ("mine.Repeat", ["Repeat", "has no key"]),
        ("specens.drafters.none.NoDrafter", ["NoDrafter", "has no key"]),
        ("mine.OddForm", ["OddForm", "form 'lots'", "format()"]),
        ("mine.Longest},{_target_: mine.Longest", ["'longest_draft'", "another metric"]),
    ],
)
def test_what_is_no_metric_is_refused_in_a_line(metric, parts):
    line = refusal("experiment=smoke", "plugins=[mine]", f"metrics=[{{_target_: {metric}}}]")
    assert all(part in line for part in ["metrics: ", *parts]), line


FAULTY = """
from specens.decoding.types import Draft, Member


class Unready:
    def __init__(self):
        raise LookupError("no table")


class Deaf:
    members = (Member("deaf", 1, 1),)

    def bind(self, target): ...

    def begin(self, prompt_ids):
        return self

    def propose(self, context_ids, plan, sampler):
        return Draft.chain([1])

    def observe(self, commit):
        raise RuntimeError("one line\\nand another")


class Unbound:
    def __init__(self, num_draft_tokens=1):
        self.members = ()

    def facts(self):
        return {}

    def bind(self, target):
        raise LookupError("no layer 40")

    def begin(self, prompt_ids):
        raise AssertionError
"""


def test_a_class_that_fails_when_it_is_made_or_bound_is_named_in_a_line(
    folder, monkeypatch, capsys
):
    package(folder, "faulty", FAULTY)
    plugins = ["plugins=[faulty]", "experiment=smoke", "drafter=[ngram]"]
    line = refusal(*plugins, "+drafter.members.mine={_target_: faulty.Unready}")
    assert "faulty.Unready: LookupError: no table" in line
    unbound = "+drafter.members.mine={_target_: faulty.Unbound}"
    capsys.readouterr()
    assert run_command(main, monkeypatch, folder, *plugins, unbound) == 1
    assert capsys.readouterr().err == "specens: drafter mine: LookupError: no layer 40\n"
    deaf = "+drafter.members.mine={_target_: faulty.Deaf}"
    assert run_command(main, monkeypatch, folder, *plugins, deaf, "prompts.limit=1") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "mine: RuntimeError: one line and another" in err


def test_a_metric_that_fails_is_none_and_a_line_and_not_a_failed_run(
    folder, monkeypatch, capsys, caplog
):
    metrics = "metrics=[{_target_: mine.Fails},{_target_: mine.Longest}]"
    given = [*SMOKE, "plugins=[mine]", metrics, "hydra.run.dir=run"]
    assert run_command(main, monkeypatch, folder, *given) == 0
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["fails"]) == ("finished", None)
    assert summary["longest_draft"] > 0
    lines = [record.getMessage() for record in caplog.records if record.name == "specens"]
    assert len(lines) == 1, lines
    assert "metric fails failed (AttributeError" in lines[0] and "no_such_column" in lines[0]
