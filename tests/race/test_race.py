"""The race: whose turn it is, what a terminal shows and what a pipe gets, and what is refused."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Fake, plain_greedy, run_command, text_drafter, trained_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.color import Color
from rich.console import Console

from specens.analysis.palette import PALETTE
from specens.cli import split
from specens.config.compose import compose, resolved
from specens.decoding.types import StepRecord
from specens.drafters.ensemble import Ensemble
from specens.errors import UserError
from specens.models.detokenize import Pieces, token_pieces
from specens.models.load import ModelSpec
from specens.models.tiny import TinyModel, byte_tokenizer
from specens.prompts.sources import Inline
from specens.race.__main__ import job_with, main, quoted, race, with_prompt
from specens.race.lane import Lane, readout, standing, turns, verdict
from specens.race.view import View, style_of
from specens.report.markup import visible

PROMPT = "one two one two one"
SMOKE = ("experiment=smoke", "drafter=ngram", "sampling.max_new_tokens=24")
ESCAPE = "\x1b"


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def environment(cache, monkeypatch):
    """Terminals of a known kind, whatever this test runs on."""
    monkeypatch.setenv("SPECENS_CACHE", str(cache))
    for name in (
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "COLUMNS",
        "LINES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(
        file=Terminal(), force_terminal=True, width=width, height=height, highlight=False
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), width=100, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def step(number: int, tokens: Sequence[int], ms: float, owners: Sequence[int] = (), end=False):
    who = tuple(owners) or (0,) * len(tokens)
    times = {"draft_ms": 0.25 * ms, "verify_ms": 0.5 * ms, "host_ms": 0.25 * ms}
    reason = "length" if end else None
    counts = (number, 5 + number, 0, len(tokens) - 1)
    return StepRecord(*counts, tuple(tokens), who, **times, layout="tree", finish_reason=reason)


class Steps:
    """A decoding whose steps are given."""

    prefill_s = 0.25

    def __init__(self, steps: Iterable[StepRecord]) -> None:
        self._steps = iter(steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def close(self) -> None: ...


def lane_of(name: str, steps: Iterable[StepRecord], **options) -> Lane:
    return Lane(name, Steps(steps), Pieces(byte_tokenizer()), **options)


def lane_with(text: str, owners: int = 0, name: str = "ensemble", ms: float = 10) -> Lane:
    """A lane that has written `text` in one step, all its tokens by the same owners."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False)
    lane = lane_of(name, [step(0, ids, ms, [owners] * len(ids), end=True)])
    lane.advance()
    return lane


# Turns and clocks


def test_the_lane_whose_own_clock_is_behind_goes_next():
    """Steps of 30 ms against steps of 10 and of 50: the order follows from the sums."""
    slow = lane_of("slow", [step(i, [65], 30) for i in range(4)])
    quick = lane_of("quick", [step(i, [65, 66], ms) for i, ms in enumerate([10, 10, 50, 10])])
    order = "".join(lane.name[0] for lane in turns([slow, quick]))
    # the last turns, without a step, are those in which they say that they are done
    assert order == "sqqqssqqss"
    assert (slow.clock_s, quick.clock_s) == (pytest.approx(0.12), pytest.approx(0.08))
    assert slow.is_done and quick.is_done
    assert [len(lane.steps) for lane in (slow, quick)] == [4, 4]


def test_neither_is_ever_ahead_by_more_than_one_of_its_own_steps():
    durations = {"a": [7, 21, 3, 40, 5, 5, 5, 9], "b": [13, 13, 2, 2, 60, 1, 8]}
    steps = {name: [step(i, [65], ms) for i, ms in enumerate(t)] for name, t in durations.items()}
    lanes = [lane_of(name, own) for name, own in steps.items()]
    for moved in turns(lanes):
        (other,) = (lane for lane in lanes if lane is not moved)
        if not (moved.is_done or other.is_done):
            assert moved.clock_s - other.clock_s <= moved.steps[-1].seconds + 1e-9


def test_only_its_own_steps_and_what_they_leave_running_are_on_a_lanes_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("specens.race.lane.time.perf_counter", lambda: now[0])

    def settle() -> None:
        now[0] += 0.5

    lane = lane_of("a", [step(0, [65], 100), step(1, [66], 100)], settle=settle)
    lane.advance()
    now[0] += 1000  # the other lane, and drawing
    lane.advance()
    assert lane.clock_s == pytest.approx(2 * (0.1 + 0.5))


def test_a_lane_runs_its_steps_to_their_end():
    """What comes after the last step is done as well: a speculator learns there what steps cost."""
    concluded = []

    def coming() -> Iterator[StepRecord]:
        yield step(0, [65], 1, end=True)
        concluded.append(True)

    for _ in turns([lane_of("a", coming())]):
        pass
    assert concluded == [True]


def test_the_readout_counts_by_the_lanes_own_clock():
    lane = lane_of("a", [step(0, [65, 66, 67], 100), step(1, [68], 100)])
    assert readout(lane) == "no step yet"
    lane.advance()
    lane.advance()
    assert readout(lane) == "20.0 tok/s, 2.00 a step, 0.2 s"


def test_the_standing_says_who_is_ahead_and_then_who_has_finished():
    own, ar = lane_of("own", [step(0, [65, 66], 10)]), lane_of("AR", [step(0, [65], 10)])
    assert standing([ar, own]) == "level"
    own.advance()
    assert standing([ar, own]) == "own is 2 tokens ahead"
    ar.advance()
    assert standing([ar, own]) == "own is 1 token ahead"
    own.advance()
    assert standing([ar, own]) == "own has finished"


def test_the_verdict_is_a_ratio_of_speeds_also_when_it_is_a_defeat_or_the_texts_differ_in_length():
    own, ar = lane_with("abcd", ms=2000), lane_with("abcd", name="AR", ms=1000)
    for _ in turns([own, ar]):
        pass
    assert verdict(own, ar, "yes") == (
        "ensemble finished 4 tokens in 2.00 s, AR in 1.00 s: 0.50 times as fast; identical text: "
        "yes (prefill 0.25 s and 0.25 s)"
    )
    short = lane_with("ab", name="AR", ms=1000)
    short.advance()
    line = verdict(own, short, "no")
    assert "AR 2 tokens in 1.00 s: 1.00 times as fast; identical text: no" in line
    assert "so far" in verdict(lane_with("ab"), ar, "yes")
    assert "interrupted before" in verdict(lane_of("ensemble", []), ar, "yes")


# Pieces of text


@pytest.mark.parametrize(
    "text", ["plain words", "\u00e9\u6f22\U0001f600 after", "cut inside \u6f22"]
)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_pieces_that_come_one_by_one_are_those_of_the_whole_text(text, kind):
    tokenizer = byte_tokenizer() if kind == "bytes" else trained_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[:-1] if text.startswith("cut") else ids
    pieces = Pieces(tokenizer)
    for count, token in enumerate(ids, start=1):
        pieces.add([token])
        assert len(pieces.shown) == count
        assert "\ufffd" not in "".join(pieces.shown), "a character is shown when it is whole"
    pieces.finish()
    assert pieces.shown == token_pieces(tokenizer, ids)
    assert "".join(pieces.shown) == tokenizer.decode(ids)


def test_text_cannot_steer_a_terminal_and_stays_readable():
    nasty = "a\x1b[2J\x9b31m\x07\b\r\x7f\u202eb\u2066\u2028c\n\td [bold]\u00e9\u200d\U0001f600"
    safe = visible(nasty)
    codes = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *"\u202e\u2066\u2028"}
    assert not set(safe) & codes - {"\n", "\t"}
    assert safe.endswith("c\n\td [bold]\u00e9\u200d\U0001f600")


# What is shown


def luminance(colour: Color) -> float:
    channels = [value / 255 for value in colour.get_truecolor()]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_members_tokens_can_be_read_and_those_of_several_are_underlined():
    """Contrast of 4.5 as WCAG 2 asks for; the colours are the report's, in the order of the
    members.
    """
    for index, colour in enumerate(PALETTE):
        style = style_of(1 << index)
        assert style.bgcolor is not None and style.color is not None
        assert style.bgcolor.get_truecolor().hex == f"#{colour}"
        dark, light = sorted([luminance(style.bgcolor), luminance(style.color)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour
        assert not style.underline
    assert style_of(0b110).underline and style_of(0b110).bgcolor == style_of(0b010).bgcolor
    assert not style_of(0)


def lines_of(console: Console, renderable) -> list[str]:
    options = console.options.update(height=None)
    lines = console.render_lines(renderable, options)
    return ["".join(part.text for part in line) for line in lines]


LINES = (f"line {i} has some words, and then some more of them\n" for i in range(60))
LONG = "".join([*LINES, "the end"])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (79, 24), (40, 12), (100, 8)])
def test_a_frame_fits_the_terminal_and_shows_the_ends_of_both_texts(width, height):
    console = terminal(width, height)
    lanes = [lane_with(LONG, name="AR"), lane_with(LONG, 1)]
    view = View(console, ["ngram", "retrieval", "non_autoregressive"])
    lines = lines_of(console, view.frame(lanes))
    assert len(lines) < height
    assert all(len(line.rstrip()) <= width for line in lines)
    assert sum(line.count("the end") for line in lines) == 2
    beside = any(line.count("the end") == 2 for line in lines)
    assert beside == (width >= 80), "below 80 columns the panes stand one above the other"
    assert not any("line 0 " in line for line in lines)
    assert any("tok/s" in line and "a step" in line for line in lines)


def test_the_readout_is_whole_in_the_narrowest_panes():
    lane = lane_of("ensemble", [step(i, [65] * 12, 90) for i in range(100)])
    for _ in range(100):
        lane.advance()
    assert readout(lane) == "133.3 tok/s, 12.00 a step, 9.0 s"
    for width in (80, 40):
        console = terminal(width)
        text = "\n".join(lines_of(console, View(console, ["ngram"]).frame([lane, lane])))
        assert text.count(readout(lane)) == 2


def test_a_token_has_the_colours_of_the_first_member_that_proposed_it():
    console = terminal()
    view = View(console, ["first", "second"])
    ids = byte_tokenizer().encode("abc", add_special_tokens=False)
    lane = lane_of("ensemble", [step(0, ids, 10, [0b10, 0b11, 0])])
    lane.advance()
    text = view._text(lane)
    assert text.plain == "abc"
    styles = [text.get_style_at_offset(console, at) for at in range(3)]
    assert styles == [style_of(2), style_of(3), style_of(0)]


def test_model_output_is_neither_markup_nor_escape_codes():
    nasty = "[red]not markup[/red] \x1b[2J\x1b]0;title\x07"
    for console in (terminal(), pipe()):
        lanes = [lane_with(nasty, name="AR"), lane_with(nasty, 1)]
        View(console, ["[bold]name"]).result(lanes, "over")
        text = shown(console)
        assert without_colours(text).count("[red]not markup[/red]") == 2
        assert "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text


@pytest.mark.parametrize("kind", ["pipe", "dumb"])
def test_without_a_capable_terminal_there_are_no_escape_codes(kind, monkeypatch):
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    console = pipe() if kind == "pipe" else terminal()
    view = View(console, ["ngram"])
    lanes = [lane_with("the same text", name="AR"), lane_with("the same text", 1)]
    view.title("1: a prompt")
    with view.watching(lanes) as refresh:
        refresh()
    view.result(lanes, "the verdict")
    assert ESCAPE not in shown(console)
    assert shown(console).count("the same text") == 2
    assert "the verdict" in shown(console)


def test_colours_that_are_asked_for_in_a_pipe_move_no_cursor(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO(), width=100, highlight=False)
    view = View(console, ["ngram"])
    lanes = [lane_with("text", name="AR"), lane_with("text", 1)]
    with view.watching(lanes) as refresh:
        refresh()
    view.result(lanes, "over")
    assert ESCAPE in shown(console)
    assert ESCAPE not in re.sub(r"\x1b\[[0-9;]*m", "", shown(console))


# The command line


@pytest.mark.parametrize(
    ("before", "prompt", "behind"),
    [
        ([], "Why is the sky blue?", []),
        (["drafter=ngram"], "Solve x = 3", ["sampling.seed=1"]),
        ([], "~5 apples?", ["prompts.chat=false", "prompts.limit=1"]),
        (["+drafter@drafter.members.small=lm", "~drafter@drafter.members.quantized"], None, []),
        (["++target.dtype=float32", "~prompts.limit", "model@target=tiny"], None, []),
        ([], None, []),
    ],
    ids=str,
)
def test_the_prompt_is_what_is_no_override(before, prompt, behind):
    words, flags = split([*before, *([] if prompt is None else [prompt]), *behind])
    others = [word for word in [*before, *behind] if word not in flags]
    assert with_prompt(words) == [
        *others, *([] if prompt is None else [f'prompts.texts=["{prompt}"]']),
    ]  # fmt: skip


HARD = ["cost ${x}", "${", "\\${x}", "\\\\${oc.env:HOME}", "${x} and \\n", "$${x}", "a=b ${y}"]
HARD += ['a "quote"', '\\"', "'", "back\\slash\\", "\\", "\\\\", "a\\$b", "$", "{}", ",", "#", "1"]
HARD += ["it's [a, b] {c: d}, e", "two\nlines\tand a tab", " spaces ", "null", "\u00e9\U0001f600"]
PIECES = st.lists(st.sampled_from([*"\"'\\${}[]()=,: \n#", "${", "\\${", "oc.env:", "a b"]))
TEXT = st.one_of(st.text(), PIECES.map("".join))


@settings(max_examples=8, deadline=None)
@example(HARD)
@given(st.lists(TEXT, min_size=10))
def test_any_prompt_is_taken_as_it_is(texts):
    """What `with_prompt` quotes goes through Hydra's grammar and OmegaConf's interpolations."""
    override = f"prompts.texts=[{','.join(map(quoted, texts))}]"
    assert resolved(compose(["prompts=inline", override]))["prompts"]["texts"] == texts


def test_a_prompt_without_quotes_is_refused():
    with pytest.raises(UserError, match="quotes"):
        with_prompt(["Why", "is"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "there is no prompt"),
        (["Hello!", "prompts=demo"], "leave one of them out"),
        (["Hello!", "prompts.texts=[Hi]"], "leave one of them out"),
        (["++prompts.texts=[Hi]", "Hello!"], "leave one of them out"),
        (["Why", "not"], "quotes"),
        ([""], "prompts.texts[0]"),
        (["Hello!", "drafter=none"], "no members"),
        (["Hello!", "tracker=wandb"], "tracker="),
        (["Hello!", "baseline=false"], "baseline="),
        (["Hello!", "sampling.temperature=-1"], "temperature"),
        (["prompts=jsonl", "prompts.path=no/such.jsonl"], "no/such.jsonl"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_before_a_model_is_loaded(words, why, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("the model was loaded"))
    assert run_command(main, monkeypatch, tmp_path, *SMOKE, *words) not in (0, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert [why in line for line in lines if line.startswith("specens: ")] == [True], lines
    assert not any("Traceback" in line for line in lines)
    assert list(tmp_path.iterdir()) == [], "a race writes nothing"


# Races


def job_of_race(*given: str):
    return job_with(compose(with_prompt([*SMOKE, *given]), "race"))


def job_of_drafter(drafter, *overrides: str):
    return replace(job_of_race(PROMPT, *overrides), drafter=drafter)


def ids_of_prompt(text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    options = {"add_generation_prompt": True, "return_dict": False}
    return list(byte_tokenizer().apply_chat_template(messages, **options))  # pyright: ignore


@pytest.fixture(scope="module")
def answer(cache) -> list[int]:
    """What the tiny target answers to the prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENS_CACHE", str(cache))
        model = ModelSpec(TinyModel(), dtype="float32", device="cpu").load().model
    return plain_greedy(model, ids_of_prompt(PROMPT), 24, eos=(1,))


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_race_ends_with_both_texts_a_verdict_and_the_table_of_wins(kind, answer, capsys):
    console = terminal() if kind == "terminal" else pipe()
    oracle = text_drafter(ids_of_prompt(PROMPT), answer, name="knows", depth=4)
    both = Ensemble({"knows": oracle, "fails": text_drafter([], [], name="fails")})
    race(job_of_drafter(both), console)
    text = without_colours(shown(console))
    if kind == "pipe":
        assert ESCAPE not in shown(console)
        expected = visible(byte_tokenizer().decode(answer))
        assert text.replace("\n", "").count(expected.replace("\n", "")) == 2
        assert text.count("tok/s") == 2, "nothing is shown on the way"
    else:
        assert "\x1b[?25l" in shown(console)
        assert shown(console).rstrip().count("\x1b[?25h") == 1, "the cursor is back"
        assert "knows" in text.split("ensemble")[0], "the legend is above the panes"
    assert f"ensemble finished {len(answer)} tokens in " in text
    assert "identical text: yes" in text
    table = capsys.readouterr().out
    assert re.search(r"knows +\S+%", table) and re.search(r"fails +0\.0%", table)


@pytest.mark.slow
def test_both_sides_of_a_compiled_race_are_compiled(answer, monkeypatch):
    """Compiled forwards hold one context at a time: each side has its own."""
    from specens.decoding.target.compiled import CompiledModel

    widths: dict[int, list[int]] = {}
    forward = CompiledModel.forward

    def counted(self, cache, token_ids, parents):
        widths.setdefault(id(self), []).append(len(parents) + 1)
        return forward(self, cache, token_ids, parents)

    def race_alone(lanes):
        widths.clear()  # of compiling and warming up
        return turns(lanes)

    monkeypatch.setattr(CompiledModel, "forward", counted)
    monkeypatch.setattr("specens.race.contest.turns", race_alone)
    console = pipe()
    oracle = text_drafter(ids_of_prompt(PROMPT), answer, depth=3)
    race(job_of_drafter(oracle, "compiled=true", "budget.max_nodes=4"), console)
    assert "identical text: yes" in shown(console)
    ar, own = sorted(widths.values(), key=max)
    assert ar == [1] * len(answer)
    assert own[:2] == [4, 4] and len(own) < len(ar)


def test_several_prompts_race_one_after_another_and_are_summed_up(capsys):
    job = job_of_race("prompts.texts=[aaaa,one two one]", "sampling.max_new_tokens=8")
    console = pipe()
    race(job, console)
    assert shown(console).count("identical text: yes") == 2
    assert "2 prompts together" in capsys.readouterr().out


def test_sampled_texts_of_another_verifier_are_not_compared():
    console = pipe()
    race(job_of_race(PROMPT, "verifier=residual", "sampling.temperature=1"), console)
    assert "identical text: not compared, verifier=residual" in shown(console)


def test_a_drafter_that_fails_is_named_in_a_line():
    bad = Fake(lambda context: [10**6], name="bad")
    with pytest.raises(UserError, match="drafter bad: proposed token 1000000"):
        race(job_of_drafter(bad), pipe())


@contextmanager
def interrupted_after(count: int, monkeypatch) -> Iterator[None]:
    def some_turns(lanes: Sequence[Lane]) -> Iterator[Lane]:
        for number, lane in enumerate(turns(lanes)):
            if number == count:
                raise KeyboardInterrupt
            yield lane

    with monkeypatch.context() as patch:
        patch.setattr("specens.race.contest.turns", some_turns)
        yield


@pytest.mark.parametrize("count", [0, 7])
def test_an_interrupted_race_says_how_far_it_got_and_exits_with_130(
    count, monkeypatch, tmp_path, capsys
):
    with interrupted_after(count, monkeypatch):
        assert run_command(main, monkeypatch, tmp_path, PROMPT, *SMOKE) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "interrupted"
    if count:
        expected = r"ngram reached \d+ tokens in .* times as fast so far; identical text: yes, so"
        assert re.search(expected, out)
        assert re.search(r"ngram +\S+%", out), "the table of what there was"
    else:
        assert "interrupted before both had made a step" in out
    assert "Traceback" not in out + err


# The command, on a terminal and in a pipe


@contextmanager
def a_terminal_for_stdout(monkeypatch) -> Iterator[list[bytes]]:
    """A real terminal, 100 columns wide; afterwards the list holds what was written to it."""
    end, own = os.openpty()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(end, 65536)
            except OSError:  # the other end was closed
                return
            written.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with open(own, "w", encoding="utf-8") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        yield written
    reader.join(timeout=10)
    os.close(end)


@pytest.mark.parametrize("kind", ["colour", "no colour", "dumb"])
def test_the_command_on_a_terminal(kind, monkeypatch, tmp_path):
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if kind == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    with a_terminal_for_stdout(monkeypatch) as written:
        assert run_command(main, monkeypatch, tmp_path, PROMPT, *SMOKE) == 0
    text = b"".join(written).decode()
    assert "identical text: yes" in without_colours(text)
    assert ("\x1b[?25l" in text) == (kind != "dumb"), "panes that are drawn in place"
    colours = re.findall(r"\x1b\[[0-9;]*?[34]8;[0-9;]*m", text)
    assert bool(colours) == (kind == "colour")
    assert (ESCAPE in text) == (kind != "dumb")
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_a_pipe(monkeypatch, tmp_path, capsys):
    assert run_command(main, monkeypatch, tmp_path, PROMPT, *SMOKE) == 0
    out, _ = capsys.readouterr()
    assert ESCAPE not in out
    places = [out.index(part) for part in ("warming up", f"1: {PROMPT}", "AR, ", "ngram, ")]
    assert places == sorted(places)
    assert "identical text: yes" in out


def test_prompts_may_be_given_as_in_a_run():
    job = job_of_race("prompts.texts=[a,b]")
    assert [question.turns for question in job.prompts.questions()] == [("a",), ("b",)]
    job = job_of_race("${x} and \\n", "prompts.chat=false")
    assert isinstance(job.prompts, Inline) and job.prompts.chat is False
    assert job.prompts.questions()[0].turns == ("${x} and \\n",)
