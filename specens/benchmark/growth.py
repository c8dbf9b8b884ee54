"""How speed grows: with the context, the number of members, the width of a verified tree, the length of the output."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specens.benchmark.measure import Timed, wait
from specens.benchmark.options import Options
from specens.benchmark.page import number, table
from specens.benchmark.rows import Row, csv_of
from specens.benchmark.summary import PLAIN, system_summary
from specens.benchmark.systems import Ground, OurRunner, Parts, Runner, our_runner, shuffled
from specens.decoding.drafter import Drafter
from specens.decoding.sampling import Sampler
from specens.decoding.types import Commit, Plan, TokenTree
from specens.errors import UserError
from specens.experiment import Session
from specens.files import write_whole
from specens.rendering import Prompt, next_prompt
from specens.screen import Screen
from specens.text import first_difference

CONTEXTS = (1024, 2048, 4096, 8192)
LOOKUP_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
LOOKUPS = ("ngram", "retrieval")
WIDTHS = (0, 1, 2, 4, 8, 16, 32, 64)
OUTPUTS = (64, 128, 256, 512, 1024)
TURNS = 5
"""Every width is timed so many times in a repeat."""
LOOKUP_STEPS = 64
"""Proposals timed at every length of context."""

Cells = list[dict[str, Any]]


def grow(session: Session, options: Options, subjects: Sequence[Parts], folder: Path, screen: Screen) -> dict[str, Any]:
    """One study into `growth_<what>.csv` and `.md`; for contexts also `growth_lookups`. The content, by file's stem."""
    study = Study(session, options, subjects, screen)
    parts: dict[str, Callable[[], Iterator[tuple[str, Cells]]]] = {
        "context": study.context,
        "members": study.members,
        "width": study.width,
        "output": study.output,
    }
    content: dict[str, Any] = {}
    assert options.growth is not None
    for stem, cells in parts[options.growth]():  # a growing table is on disk after every line
        content[stem] = cells
        columns = tuple(cells[0])
        rows = [[_cell(row[column]) for column in columns] for row in cells]
        page = "\n".join(table(columns, rows)) + "\n"
        write_whole(folder, {f"{stem}.csv": csv_of(cells, columns), f"{stem}.md": page})
    screen.end_prompt()
    for stem in content:
        screen.say((folder / f"{stem}.md").read_text(encoding="utf-8"))
    screen.say(f"run folder: {folder}")
    return content


def _cell(value: Any) -> str:
    return number(value, ".3g") if value is None or isinstance(value, float) else str(value)


class Study:
    """Plain decoding and the composed drafter on one target. Texts do not end before their length: no token ends them."""

    def __init__(self, session: Session, options: Options, subjects: Sequence[Parts], screen: Screen) -> None:
        self._session, self._options, self._screen = session, options, screen
        sampling = replace(session.job.sampling, eos_token_ids=[], stop=[])
        config = sampling.generation_config(session.target)
        self._ground = Ground(session.target, config, sampling.seed, max(CONTEXTS))
        self._plain = OurRunner(session.plain, self._ground)
        self._subjects = subjects
        if options.growth != "width":
            self._runners = [our_runner(parts, self._ground, {}) for parts in subjects]

    def context(self) -> Iterator[tuple[str, Cells]]:
        """Both, at every length of prompt; then the lookups alone, further than the target can read."""
        limit = self._session.target.context_limit or max(CONTEXTS)
        cells: Cells = []
        for length in dict.fromkeys(min(length, limit - self._options.growth_tokens) for length in CONTEXTS):
            prompts = [self._long_prompt(length, index) for index in range(self._options.growth_prompts)]
            systems: dict[str, Runner] = {PLAIN: self._plain, "drafted": self._runners[-1]}
            cells += self._compare("context_tokens", length, systems, prompts, self._options.growth_tokens)
            yield "growth_context", cells
        lookups = [(name, drafter) for name, drafter in self._subjects[-1].drafters.items() if name in LOOKUPS]
        lines: Cells = []
        for name, drafter in lookups:
            for length in LOOKUP_CONTEXTS:
                self._screen.begin_prompt(f"{name} alone, {length} tokens")
                lines.append({"drafter": name, "context_tokens": length, **self._lookup(drafter, length)})
                yield "growth_lookups", lines

    def members(self) -> Iterator[tuple[str, Cells]]:
        """The first member, the first two, ...: the run's own prompts."""
        names = list(self._subjects[-1].drafters)
        systems: dict[str, Runner] = {PLAIN: self._plain}
        systems |= {f"{count + 1} (+{name})": self._runners[count] for count, name in enumerate(names)}
        yield "growth_members", self._compare(None, None, systems, self._prompts(), self._options.growth_tokens)

    def output(self) -> Iterator[tuple[str, Cells]]:
        """One long decoding each; its first tokens are what a shorter one would have been."""
        prompts, cells = self._prompts(), []
        room = self._session.target.context_limit
        most = max(OUTPUTS) if room is None else min(max(OUTPUTS), room - max(len(p.token_ids) for p in prompts))
        systems: dict[str, Runner] = {PLAIN: self._plain, "drafted": self._runners[-1]}
        timed = self._decode(systems, prompts, most)
        for length in dict.fromkeys(min(length, most) for length in OUTPUTS):
            heads = {key: one.head(length) for key, one in timed.items()}
            cells += _summary("output_tokens", length, systems, prompts, heads)
        yield "growth_output", cells

    def width(self) -> Iterator[tuple[str, Cells]]:
        """Milliseconds of the target's forward over a tree of so many nodes (0: plain decoding's), medians, taken in turns."""
        target, layout = self._session.target, self._subjects[-1].layout
        seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
        (prompt, *_) = self._prompts()
        for turn in range(TURNS * self._options.repeats + 1):
            cache = target.prefill(prompt.token_ids)
            target.score(
                cache, prompt.token_ids[-1], TokenTree(), layout
            )  # so that no width is timed right after the prompt
            cache.accept(())
            for width in (int(name) for name in shuffled([str(w) for w in WIDTHS], self._options.seed, "width", turn)):
                self._screen.begin_prompt(f"{width} nodes, turn {turn}")
                tree = TokenTree.chain([prompt.token_ids[node % len(prompt.token_ids)] for node in range(width)])
                wait(target.device)
                begin = time.perf_counter()
                target.score(cache, prompt.token_ids[-1], tree, layout)
                wait(target.device)
                if turn:  # the first turn warms up
                    seconds[width].append(time.perf_counter() - begin)
                cache.accept(())
        plain = statistics.median(seconds[0])
        yield (
            "growth_width",
            [
                {
                    "num_nodes": width,
                    "verify_ms": 1e3 * statistics.median(times),
                    "least_ms": 1e3 * min(times),
                    "most_ms": 1e3 * max(times),
                    "x_plain": statistics.median(times) / plain,
                }
                for width, times in seconds.items()
            ],
        )

    def _prompts(self) -> list[Prompt]:
        """The first prompts of the run."""
        tokenizer = self._session.target.tokenizer
        assert tokenizer is not None
        questions = self._session.job.prompts.questions()[: self._options.growth_prompts]
        return [next_prompt(question, [], tokenizer, self._session.job.prompts.chat) for question in questions]

    def _long_prompt(self, length: int, index: int) -> Prompt:
        """`length` tokens of the run's prompts, one after another; the next prompt goes on where this one ends."""
        ids = self._text(length, index * length)
        return Prompt(f"{length} tokens, {index + 1}", str(length), "", ids)

    def _text(self, length: int, begin: int = 0) -> tuple[int, ...]:
        """Text of the run's prompts, begun anew where it is too short."""
        tokenizer = self._session.target.tokenizer
        assert tokenizer is not None
        if not hasattr(self, "_all_ids"):
            texts = [turn for question in self._session.job.prompts.questions() for turn in question.turns]
            self._all_ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
            if not self._all_ids:
                raise UserError("bench.growth=context needs prompts with text: give prompts=spec_bench or prompts=demo")
        return tuple(itertools.islice(itertools.cycle(self._all_ids), begin, begin + length))

    def _compare(
        self, column: str | None, value: Any, systems: dict[str, Runner], prompts: Sequence[Prompt], num_tokens: int
    ) -> Cells:
        return _summary(column, value, systems, prompts, self._decode(systems, prompts, num_tokens))

    def _decode(
        self, systems: dict[str, Runner], prompts: Sequence[Prompt], num_tokens: int
    ) -> dict[tuple[str, str, int], Timed]:
        """(system, prompt id, repeat) -> its decoding, in turns."""
        timed: dict[tuple[str, str, int], Timed] = {}
        for prompt in prompts:
            for name, runner in systems.items():  # nothing is timed cold
                self._screen.begin_prompt(f"{prompt.id}  warming up {name}")
                runner.decode(prompt, self._options.warm_up_tokens)
            for repeat in range(self._options.repeats):
                for name in shuffled(list(systems), self._options.seed, prompt.id, repeat):
                    self._screen.begin_prompt(f"{prompt.id}  repeat {repeat + 1}  {name}")
                    timed[name, prompt.id, repeat] = systems[name].decode(prompt, num_tokens)
        return timed

    def _lookup(self, drafter: Drafter, length: int) -> dict[str, Any]:
        """Milliseconds of its beginning, and of a proposal and of learning one token at that length."""
        ids = self._text(length + LOOKUP_STEPS)
        begin = time.perf_counter()
        drafter.start(ids[:length])
        start_ms = 1e3 * (time.perf_counter() - begin)
        (member,) = drafter.members
        plan = Plan(member.num_draft_tokens, member.num_draft_nodes)
        propose, observe = [], []
        for at in range(length, length + LOOKUP_STEPS):
            context, commit = ids[:at], Commit((), (ids[at],))
            first = time.perf_counter()
            drafter.propose(context, plan, Sampler())
            second = time.perf_counter()
            drafter.observe(commit)
            propose.append(second - first)
            observe.append(time.perf_counter() - second)
        middle = statistics.median
        return {"start_ms": start_ms, "propose_ms": 1e3 * middle(propose), "observe_ms": 1e3 * middle(observe)}


def _summary(
    column: str | None,
    value: Any,
    systems: dict[str, Runner],
    prompts: Sequence[Prompt],
    timed: dict[tuple[str, str, int], Timed],
) -> Cells:
    """A line per system."""
    rows = []
    for (name, prompt_id, repeat), one in timed.items():
        fork_at = first_difference(one.output_ids, timed[PLAIN, prompt_id, repeat].output_ids)
        is_same = fork_at is None or fork_at >= min(
            len(one.output_ids), len(timed[PLAIN, prompt_id, repeat].output_ids)
        )
        rows.append(Row(prompt_id, "", repeat, 0, name, **one.columns(), is_identical=is_same, fork_at=fork_at))
    lines: Cells = []
    for name in systems:
        numbers = system_summary(rows, name)
        lines.append(
            {
                **({} if column is None else {column: value}),
                "system": name,
                "tokens_per_s": (numbers["tokens_per_s"] or {}).get("median"),
                "speedup": (numbers["speedup"] or {}).get("median"),
                "tokens_a_step": numbers["acceptance_length"],
                "nodes": numbers["mean_nodes"],
                "draft_ms": numbers["draft_ms_per_step"],
                "verify_ms": numbers["verify_ms_per_step"],
                "host_ms": numbers["host_ms_per_step"],
                "prefill_s": numbers["prefill_s"],
                "identical": f"{numbers['num_identical']}/{len(prompts) * len({row.repeat for row in rows})}",
            }
        )
    return lines
