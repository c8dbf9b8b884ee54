"""The W&B tracker offline: one run per job, tables as given, and no failure or question that stops
a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specens.analysis.summary import DRAFTER_COLUMNS
from specens.config.build import named
from specens.config.compose import compose, group_names
from specens.errors import UserError
from specens.records.reader import load
from specens.replay.files import read_trace
from specens.run import run as run_it
from specens.run.tracker import NoTracker, WandbTracker
from specens.run.tracker_tables import PROMPT_COLUMNS, flatten, progress_scalars, table_rows

SUMMARY = {
    "acceptance_length": 2.5,
    "speedup": None,
    "by_category": {"chat": {"num_prompts": 2, "speedup": None, "tokens_per_s": 8.5}},
    "drafters": {
        "ngram": {"win_rate": 0.25, "acceptance_by_depth": [0.5, math.nan, 0.125]},
        "idle": {"win_rate": 0.0, "acceptance_rate": None},
    },
}
DRAFTERS = [
    {"drafter": "ngram", "win_rate": 0.25, "acceptance_rate": 0.5},
    {"drafter": "idle", "win_rate": 0, "acceptance_rate": math.nan, "note": "never drafted"},
]
PROMPTS = [
    {"prompt_id": i, "category": None, "text": f'{i}: "${{x}}"', "num_steps": 3} for i in range(10)
]

START_AND_FINISH = """
import sys
from pathlib import Path
from specens.run.tracker import WandbTracker
tracker = WandbTracker(mode="online")
tracker.start(Path(sys.argv[1]), {"a": 1})
tracker.prompt_done({"acceptance_length": 2.0}, 1)
tracker.finish({}, [], [], "finished")
print("the run went on")
"""


@pytest.fixture(autouse=True)
def clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No test sees the user's W&B account, settings or mode, nor writes into the home folder."""
    for name in list(os.environ):
        if name.startswith("WANDB_") and name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    home = tmp_path_factory.getbasetemp()
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(home))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own messages: pytest also captures what wandb logs to its own files."""
    ours = [record for record in caplog.records if record.name == "specens"]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def run_folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


def wandb_records(path: Path) -> Iterator[Any]:
    """What W&B wrote so far: its log has 7 bytes, then 32 KiB blocks of (crc, length, kind, bytes)
    chunks.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, message = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (rest := 32768 - position % 32768) < 7:
            position += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7 + length
        if position > len(data):
            return
        message += data[position - length : position]
        if kind in (1, 4):  # a whole message, or the last chunk of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def logged(folder: Path, timeout_s: float = 60.0) -> dict[str, Any]:
    """Config, summary, history (list of dicts) and exit code of a closed run on disk.

    W&B's service writes the last records a moment after `finish` returns, so this waits for the
    exit record.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for path in folder.glob("*.wandb"):
            found = read_run(path)
            if "exit_code" in found:
                return found
        time.sleep(0.05)
    raise AssertionError(f"the run in {folder} was not closed within {timeout_s} s")


def read_run(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "config": {},
        "summary": {},
        "history": [],
        "axes": {},
        "artifacts": [],
    }
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["config"] |= values_of(record.run.config.update)
        elif kind == "summary":
            found["summary"] |= values_of(record.summary.update)
        elif kind == "history":
            found["history"].append(values_of(record.history.item))
        elif kind == "metric":
            found["axes"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact":
            found["artifacts"].append(record.artifact)
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


def values_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def table_on_disk(folder: Path, key: str) -> dict[str, Any]:
    (path,) = (folder / "files/media/table").glob(f"{key}_*.table.json")
    return json.loads(path.read_text())


def test_b51_every_job_of_a_process_has_its_own_run_even_if_one_fails(tmp_path, caplog) -> None:
    for job in range(3):
        tracker, status = WandbTracker(mode="offline", tags=["a"]), "failed"
        try:
            tracker.start(tmp_path / str(job), {"job": job, "nested": {"k": [1, None]}})
            if job == 1:
                raise RuntimeError("this job fails")
            status = "finished"
        except RuntimeError:
            pass
        finally:
            tracker.finish({"job": job}, [], [], status)
    runs = [logged(folder) for job in range(3) for folder in run_folders(tmp_path / str(job))]
    assert [run["config"]["job"] for run in runs] == [0, 1, 2]
    assert [run["summary"]["job"] for run in runs] == [0, 1, 2]
    assert [run["summary"]["status"] for run in runs] == ["finished", "failed", "finished"]
    assert [run["exit_code"] for run in runs] == [0, 1, 0]
    assert runs[0]["config"]["nested"] == {"k": [1, None]}
    assert warnings_in(caplog) == []


def test_b53_what_is_logged_is_what_was_passed(tmp_path, caplog) -> None:
    tracker = WandbTracker(mode="offline")
    tracker.start(tmp_path, {})
    for step in (1, 2):
        tracker.prompt_done(
            {"acceptance_length": float(step), "drafters": {"ngram": {"win_rate": 0.5 * step}}},
            step,
        )
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "failed")  # a second call does nothing
    (folder,) = run_folders(tmp_path)
    run = logged(folder)

    table = table_on_disk(folder, "prompts")
    assert table["columns"][: len(PROMPT_COLUMNS)] == list(PROMPT_COLUMNS)
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert [{key: row[key] for key in PROMPTS[0]} for row in rows] == PROMPTS
    table = table_on_disk(folder, "drafters")
    assert [cells[table["columns"].index("acceptance_rate")] for cells in table["data"]] == [
        0.5,
        None,
    ]
    assert table_on_disk(folder, "win_rates")["data"] == [["ngram", 0.25], ["idle", 0.0]]

    progress = [
        (row["_step"], row["acceptance_length"], row["win_rate/ngram"])
        for row in run["history"][:2]
    ]
    assert progress == [(1, 1.0, 0.5), (2, 2.0, 1.0)]
    assert run["summary"]["acceptance_length"] == 2.5
    assert run["summary"]["drafters/ngram/win_rate"] == 0.25
    assert run["exit_code"] == 0
    assert warnings_in(caplog) == []


def test_what_a_summary_has_by_category_and_by_depth_is_logged_as_well(tmp_path, caplog) -> None:
    """The depths at which nothing was measured are gaps; the drafters' curves are one chart."""
    tracker = WandbTracker(mode="offline")
    tracker.start(tmp_path, {})
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    (folder,) = run_folders(tmp_path)
    logged(folder)
    table = table_on_disk(folder, "categories")
    assert table["columns"] == ["category", "num_prompts", "speedup", "tokens_per_s"]
    assert table["data"] == [["chat", 2, None, 8.5]]
    table = table_on_disk(folder, "acceptance_by_depth")
    assert table["columns"] == ["drafter", "depth", "acceptance_rate"]
    assert table["data"] == [["ngram", 1, 0.5], ["ngram", 3, 0.125]]
    assert warnings_in(caplog) == []


def test_win_rates_are_charted_over_steps(tmp_path, caplog) -> None:
    """Over target forwards, that is, of which every prompt takes another number."""
    tracker = WandbTracker(mode="offline")
    tracker.start(tmp_path, {})
    for step, rate in ((1, 0.5), (2, 0.25)):
        numbers = {"win_rate": rate, "token_share": 2 * rate}
        tracker.prompt_done({"num_steps": 40 * step, "drafters": {"ngram": numbers}}, step)
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    (folder,) = run_folders(tmp_path)
    run = logged(folder)
    assert {name: run["axes"][name] for name in ("win_rate/*", "token_share/*")} == {
        "win_rate/*": "num_steps",
        "token_share/*": "num_steps",
    }
    points = [
        [row[key] for key in ("num_steps", "win_rate/ngram", "token_share/ngram")]
        for row in run["history"][:2]
    ]
    assert points == [[40, 0.5, 1.0], [80, 0.25, 0.5]]
    assert warnings_in(caplog) == []


REPLAY = {
    "subsets": [
        {"subset": "", "num_members": 0, "calls": 128, "speedup": 1.0},
        {"subset": "ngram", "num_members": 1, "calls": 64, "speedup": 1.75},
    ],
    "members": [{"member": "ngram", "shapley_s": 0.5, "shapley_s_interval": [0.25, 0.75]}],
    "policies": [{"policy": "fixed", "calls": 64}],
    "overlap": {"ngram": {"ngram": 1.0}},
}
FILES_OF_A_DENSE_RUN = (
    "dense.parquet",
    "prompts.parquet",
    "steps.parquet",
    "drafts.parquet",
    "costs.json",
)


def dense_run(folder: Path) -> Path:
    folder.mkdir()
    for name in FILES_OF_A_DENSE_RUN:
        (folder / name).write_bytes(name.encode() * 100)
    return folder


def track(folder: Path) -> dict[str, Any]:
    """What W&B has of an offline run whose own files lie in `folder`."""
    tracker = WandbTracker(mode="offline")
    tracker.start(folder, {})
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    (found,) = run_folders(folder)
    return {"folder": found, **logged(found)}


def test_a_dense_trace_is_an_artifact_with_all_that_a_replay_reads(tmp_path, caplog) -> None:
    run = track(dense_run(tmp_path / "run"))
    (artifact,) = (found for found in run["artifacts"] if found.type == "dense_trace")
    contents = {
        entry.path: Path(entry.local_path).read_bytes() for entry in artifact.manifest.contents
    }
    assert contents == {
        name: (tmp_path / "run" / name).read_bytes() for name in FILES_OF_A_DENSE_RUN
    }
    assert warnings_in(caplog) == []


def test_a_real_runs_artifact_can_be_replayed_and_leaves_the_run_folder_one_run(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WANDB_DATA_DIR")
    tracked = ["trace=dense", "tracker=wandb", "tracker.mode=offline"]
    run_it(compose(["experiment=smoke", "drafter=ngram", *tracked]), tmp_path / "run")
    (folder,) = run_folders(tmp_path / "run")
    (artifact,) = (found for found in logged(folder)["artifacts"] if found.type == "dense_trace")
    (tmp_path / "elsewhere").mkdir()
    for entry in artifact.manifest.contents:
        shutil.copyfile(entry.local_path, tmp_path / "elsewhere" / entry.path)
    trace, live = read_trace(tmp_path / "elsewhere")
    assert [member.name for member in trace.members] == ["ngram"]
    assert len(live.steps) == len(load(tmp_path / "run").steps) > 0
    assert len(load(tmp_path / "run").folders) == 1


def copies_of(run: dict[str, Any]) -> list[Path]:
    entries = (entry for found in run["artifacts"] for entry in found.manifest.contents)
    return [Path(entry.local_path) for entry in entries]


def test_an_offline_run_lies_whole_in_its_folder(monkeypatch, tmp_path, caplog) -> None:
    """What would be uploaded of tables and of the trace: nothing is in the home folder, which may
    be another one by then. Where the user has said where such copies go, they go there.
    """
    monkeypatch.delenv("WANDB_DATA_DIR")
    home, folder = tmp_path / "home", dense_run(tmp_path / "run")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    run = track(folder)
    copies = copies_of(run)
    kinds = {found.type for found in run["artifacts"]}
    assert kinds == {"run_table", "dense_trace"}
    assert len(copies) > len(FILES_OF_A_DENSE_RUN)
    assert all(path.is_file() and folder / "wandb" in path.parents for path in copies)
    assert "WANDB_DATA_DIR" not in os.environ
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "given"))
    copies = copies_of(track(dense_run(tmp_path / "other")))
    assert all(path.is_file() and tmp_path / "given" in path.parents for path in copies)
    assert warnings_in(caplog) == []


def test_a_run_without_a_dense_trace_has_no_artifact_of_one(tmp_path) -> None:
    assert not [found for found in track(tmp_path)["artifacts"] if found.type == "dense_trace"]


def test_a_replay_that_is_there_is_logged_as_tables(tmp_path, caplog) -> None:
    (tmp_path / "replay.json").write_text(json.dumps(REPLAY), encoding="utf-8")
    folder = track(tmp_path)["folder"]
    table = table_on_disk(folder, "replay_subsets")
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert rows == REPLAY["subsets"]
    table = table_on_disk(folder, "replay_members")
    assert table["columns"] == list(REPLAY["members"][0])
    assert table["data"] == [["ngram", 0.5, "[0.25, 0.75]"]]
    assert table_on_disk(folder, "replay_policies")["data"] == [["fixed", 64]]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("broken", ["replay.json", "dense.parquet"])
def test_what_cannot_be_logged_takes_nothing_else_along(
    broken, monkeypatch, caplog, tmp_path
) -> None:
    """One warning; summary, tables and the other of the two are there, and the run is closed."""
    folder = dense_run(tmp_path / "run")
    content = "{" if broken == "replay.json" else json.dumps(REPLAY)
    (folder / "replay.json").write_text(content, encoding="utf-8")
    if broken == "dense.parquet":

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("specens.run.tracker._trace_artifact", refuse)
    run = track(folder)
    assert run["summary"]["acceptance_length"] == 2.5
    assert table_on_disk(run["folder"], "drafters")["data"]
    assert run["exit_code"] == 0
    tables = list(run["folder"].glob("files/media/table/replay_subsets_*"))
    assert bool(tables) == (broken != "replay.json")
    traces = [found for found in run["artifacts"] if found.type == "dense_trace"]
    assert bool(traces) == (broken != "dense.parquet")
    (warning,) = warnings_in(caplog)
    assert "W&B failed to log the " in warning


def run_without_login(folder: Path, stdin: int, stderr: int, **environment: str) -> tuple[int, str]:
    """Exit code and output of a process that tracks a run online without being able to."""
    folder.mkdir()
    keep = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    own = {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = [sys.executable, "-c", START_AND_FINISH, str(folder)]
    streams = {"stdin": stdin, "stderr": stderr, "stdout": subprocess.PIPE}
    done = subprocess.run(code, env=keep | own | environment, timeout=90, **streams)
    return done.returncode, done.stdout.decode()


def test_b52_without_a_key_it_logs_offline_with_one_notice(tmp_path) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        result = run_without_login(tmp_path / "run", subprocess.DEVNULL, stderr.fileno())
    (notice,) = (tmp_path / "stderr").read_text().splitlines()
    (folder,) = run_folders(tmp_path / "run")
    assert result == (0, "the run went on\n")
    assert "no API key" in notice
    assert f"wandb sync {folder}" in notice
    assert logged(folder)["history"][0]["acceptance_length"] == 2.0


def test_b52_on_a_terminal_it_never_asks_for_a_key(tmp_path) -> None:
    terminal, terminal_end = pty.openpty()
    try:
        result = run_without_login(tmp_path / "run", terminal_end, terminal_end, TERM="xterm")
        shown = os.read(terminal, 10_000).decode()
    finally:
        os.close(terminal)
        os.close(terminal_end)
    assert result == (0, "the run went on\n")
    assert len(shown.splitlines()) == 1


def test_b52_without_the_network_it_logs_offline_with_one_notice(tmp_path) -> None:
    nowhere = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_HTTP_TIMEOUT": "2",
    }
    with (tmp_path / "stderr").open("wb") as stderr:
        result = run_without_login(tmp_path / "run", subprocess.DEVNULL, stderr.fileno(), **nowhere)
    (notice,) = (tmp_path / "stderr").read_text().splitlines()
    assert result == (0, "the run went on\n")
    assert "logging offline" in notice
    assert len(run_folders(tmp_path / "run")) == 1


def test_a_server_that_fails_after_login_means_offline(monkeypatch, caplog, tmp_path) -> None:
    import wandb

    real_init = wandb.init

    def init(mode: Any, **arguments: Any) -> Any:
        if mode == "online":
            raise wandb.Error("run initialization\ntimed out")
        return real_init(mode=mode, **arguments)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    tracker = WandbTracker(mode="online")
    tracker.start(tmp_path, {"a": 1})
    tracker.finish({}, [], [], "finished")
    (warning,) = warnings_in(caplog)
    assert "run initialization timed out; logging offline" in warning
    assert [logged(folder)["config"]["a"] for folder in run_folders(tmp_path)] == [1]


class BrokenRun:
    """A W&B run whose every call fails."""

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}
        self.num_calls = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        raise OSError("disk\nfull")

    finish = log

    def define_metric(self, *args: Any, **kwargs: Any) -> None: ...


def test_a_failure_inside_wandb_is_one_warning(monkeypatch, caplog, tmp_path) -> None:
    import wandb

    run = BrokenRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = WandbTracker(mode="offline")
    tracker.start(tmp_path, {})
    tracker.prompt_done({"acceptance_length": 1.0}, 1)
    tracker.prompt_done({"acceptance_length": 1.0}, 2)
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    (warning,) = warnings_in(caplog)
    assert "disk full" in warning
    # prompt 1, the tables, closing: the run is closed although logging broke
    assert run.num_calls == 3


@pytest.mark.parametrize("is_installed", [True, False])
def test_if_wandb_cannot_start_the_run_goes_on(is_installed, monkeypatch, caplog, tmp_path) -> None:
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.Error("no service")

    monkeypatch.setattr(wandb, "init", refuse)
    if not is_installed:
        monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = WandbTracker(mode="offline")
    tracker.start(tmp_path, {})
    tracker.prompt_done({"acceptance_length": 1.0}, 1)
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("mode", ["tracker", "environment"])
def test_disabled_does_not_even_import_wandb(mode, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "online" if mode == "tracker" else "disabled")
    tracker = WandbTracker(mode="disabled" if mode == "tracker" else None)
    tracker.start(tmp_path, {})
    tracker.prompt_done({"acceptance_length": 1.0}, 1)
    tracker.finish(SUMMARY, DRAFTERS, PROMPTS, "finished")
    assert list(tmp_path.iterdir()) == []


def test_unusable_options_are_refused_by_name(monkeypatch, tmp_path) -> None:
    with pytest.raises(UserError, match=r"tracker\.mode is 'onlin'"):
        WandbTracker(mode="onlin")
    with pytest.raises(UserError, match=r"tracker\.tags"):
        WandbTracker(tags="baseline")
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(UserError, match="WANDB_MODE is 'of'"):
        WandbTracker().start(tmp_path, {})


def test_b54_columns_have_one_type_and_rows_one_length() -> None:
    rows = [
        {"drafter": "a", "mixed": 1, "number": 1, "flag": True, "ids": [1, 2], "nothing": None},
        {"drafter": "b", "mixed": "x", "number": 0.5, "flag": None, "ids": None, "extra": math.inf},
        {"drafter": "c", "mixed": False},
    ]
    columns, data = table_rows(rows, DRAFTER_COLUMNS)
    assert columns[: len(DRAFTER_COLUMNS)] == list(DRAFTER_COLUMNS)
    by_name = dict(zip(columns, zip(*data, strict=True), strict=True))
    assert by_name["mixed"] == ("1", "x", "false")
    assert [type(cell) for cell in by_name["number"]] == [float, float, type(None)]
    assert by_name["flag"] == (True, None, None)
    assert by_name["ids"] == ("[1, 2]", None, None)
    assert by_name["nothing"] == by_name["extra"] == by_name["win_rate"] == (None, None, None)


def test_tables_without_rows_keep_their_columns() -> None:
    assert table_rows([], PROMPT_COLUMNS) == (list(PROMPT_COLUMNS), [])


def test_missing_numbers_are_gaps_not_zeros() -> None:
    row = {
        "acceptance_length": math.nan,
        "speedup": None,
        "verifier": "coupled",
        "num_prompts": 2,
        "by": {"x": 1},
    }
    drafters = {
        "a": {"win_rate": 0.0, "token_share": None},
        "b": {"win_rate": 0.5, "draft_ms": 3.0},
    }
    assert progress_scalars({**row, "drafters": drafters}) == {
        "num_prompts": 2,
        "win_rate/a": 0.0,
        "win_rate/b": 0.5,
    }


def test_summaries_are_flat_and_keep_lists() -> None:
    assert flatten(SUMMARY) == {
        "acceptance_length": 2.5,
        "speedup": None,
        "by_category/chat/num_prompts": 2,
        "by_category/chat/speedup": None,
        "by_category/chat/tokens_per_s": 8.5,
        "drafters/ngram/win_rate": 0.25,
        "drafters/ngram/acceptance_by_depth": [0.5, None, 0.125],
        "drafters/idle/win_rate": 0.0,
        "drafters/idle/acceptance_rate": None,
    }


def test_no_tracker_leaves_nothing(tmp_path) -> None:
    tracker = NoTracker()
    tracker.start(tmp_path, {})
    tracker.prompt_done({}, 1)
    tracker.finish({}, [], [], "finished")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_module_imports_no_wandb() -> None:
    heavy = "{'wandb', 'torch', 'pandas'}"
    code = f"import sys, specens.run.tracker; sys.exit(bool({heavy} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize(("option", "kind"), [("wandb", WandbTracker), ("none", NoTracker)])
def test_every_option_of_the_command_line_builds(option, kind) -> None:
    assert isinstance(named("tracker", option), kind)
    assert group_names("tracker") == ["none", "wandb"]
