"""How speed grows: with the context, the number of members, the width of a verified tree, the
length of the output.

    python experiments/06-growth/growth.py context prompts=spec_bench prompts.path=question.jsonl
    python experiments/06-growth/growth.py members|width|output <overrides of specens.bench>

AR decoding and the composed drafter and budget, in turns, on one target, `bench.repeats` times over
--prompts of the run's prompts, --tokens of each. growth_<what>.csv and .md, for contexts also
growth_lookups, are in the folder --out after every line; the tables are printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from specens.analysis.formats import markdown_table, number
from specens.bench.bench import bench_job
from specens.bench.clock import Timed, wait
from specens.bench.options import BenchOptions, described
from specens.bench.rows import Row
from specens.bench.summary import AR, system_summary
from specens.bench.systems import BenchSetup, Parts, Runner, SpecensRunner, shuffled
from specens.cli import quiet_libraries
from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.drafter import Drafter
from specens.decoding.sampling import Sampler
from specens.decoding.types import Commit, Plan, Share, TokenTree
from specens.errors import UserError
from specens.models.detokenize import divergence
from specens.prompts.chat import Prompt
from specens.records.files import write_whole
from specens.run.session import load_session
from specens.run.terminal import Terminal

CONTEXTS = (1024, 2048, 4096, 8192)
LOOKUP_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
LOOKUPS = ("ngram", "retrieval")
WIDTHS = (0, 1, 2, 4, 8, 16, 32, 64)
OUTPUTS = (64, 128, 256, 512, 1024)
TURNS = 5
"""Every width is timed so many times in a repeat."""
LOOKUP_STEPS = 64
"""Proposals timed at every length of context."""
OWN = "+systems.own={_target_: specens.bench.systems.SpecensSystem}"
COLUMNS = {
    "acceptance_length": "acceptance_length",
    "nodes": "mean_nodes",
    "draft_ms": "draft_ms_per_step",
    "verify_ms": "verify_ms_per_step",
    "host_ms": "host_ms_per_step",
    "prefill_s": "prefill_s",
}

Cells = list[dict[str, Any]]
Decodings = dict[tuple[str, str, int], Timed]
"""(system, prompt id, repeat) -> its decoding."""


def main(given: Sequence[str]) -> dict[str, Cells]:
    """One study into its files; their rows, by the file's stem."""
    parser = argparse.ArgumentParser(description="How speed grows.")
    parser.add_argument("what", choices=("context", "members", "width", "output"))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("outputs/growth"))
    options = parser.parse_intermixed_args(given)
    study = Study(options.overrides, options.prompts, options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Cells] = {}
    for stem, cells in getattr(study, options.what)():
        content[stem] = cells
        rows = [[_cell(value) for value in row.values()] for row in cells]
        page = "\n".join(markdown_table(list(cells[0]), rows)) + "\n"
        table = pd.DataFrame(cells).to_csv(index=False)
        write_whole(options.out, {f"{stem}.csv": table, f"{stem}.md": page})
    for stem in content:
        print((options.out / f"{stem}.md").read_text(encoding="utf-8"))
    return content


class Study:
    """AR decoding and the composed drafter on one target. Texts do not end before their length: no
    token ends them.
    """

    def __init__(self, overrides: Sequence[str], num_prompts: int, num_tokens: int) -> None:
        config = compose([OWN, *overrides], "bench")
        self.num_prompts, self.num_tokens = num_prompts, num_tokens
        self.options: BenchOptions = build(config.bench)
        self.terminal, job = Terminal(), bench_job(config)
        parts = described(config, job, ["own"])["own"]
        assert isinstance(parts, Parts)
        self.parts, self.session = parts, load_session(job, self.terminal)
        sampling = replace(job.sampling, eos_token_ids=[], stop=[])
        target = self.session.target
        generation = sampling.generation_config(target)
        self.setup = BenchSetup(target, generation, sampling.seed, max(CONTEXTS))
        self.baseline = SpecensRunner(self.session.baseline, self.setup)

    def context(self) -> Iterator[tuple[str, Cells]]:
        """Both, at every length of prompt; then the lookups alone, further than the target can
        read.
        """
        limit = self.session.target.context_limit or max(CONTEXTS)
        systems = {AR: self.baseline, "drafted": self.parts.load(self.setup)}
        cells: Cells = []
        for length in dict.fromkeys(min(length, limit - self.num_tokens) for length in CONTEXTS):
            texts = [self.text(length, number * length) for number in range(self.num_prompts)]
            prompts = [Prompt(f"{length} tokens, {n}", "", "", ids) for n, ids in enumerate(texts)]
            timed = self.decode(systems, prompts, self.num_tokens)
            cells += _summary(systems, timed, {"context_tokens": length})
            yield "growth_context", cells
        lines: Cells = []
        for name in LOOKUPS:
            if name not in self.parts.drafters:
                continue
            for length in LOOKUP_CONTEXTS:
                place = {"drafter": name, "context_tokens": length}
                lines.append({**place, **self.lookup(self.parts.drafters[name], length)})
                yield "growth_lookups", lines

    def members(self) -> Iterator[tuple[str, Cells]]:
        """The first member, the first two, ...: the run's own prompts."""
        drafters = list(self.parts.drafters.items())
        systems: dict[str, Runner] = {AR: self.baseline}
        for count, (name, _) in enumerate(drafters, start=1):
            parts = replace(self.parts, drafters=dict(drafters[:count]))
            systems[f"{count} (+{name})"] = parts.load(self.setup)
        timed = self.decode(systems, self.prompts(), self.num_tokens)
        yield "growth_members", _summary(systems, timed)

    def output(self) -> Iterator[tuple[str, Cells]]:
        """One long decoding each; its first tokens are what a shorter one would have been."""
        prompts, room = self.prompts(), self.session.target.context_limit
        longest = max(len(prompt.token_ids) for prompt in prompts)
        most = max(OUTPUTS) if room is None else min(max(OUTPUTS), room - longest)
        systems = {AR: self.baseline, "drafted": self.parts.load(self.setup)}
        timed, cells = self.decode(systems, prompts, most), []
        for length in dict.fromkeys(min(length, most) for length in OUTPUTS):
            heads = {key: head(one, length) for key, one in timed.items()}
            cells += _summary(systems, heads, {"output_tokens": length})
        yield "growth_output", cells

    def width(self) -> Iterator[tuple[str, Cells]]:
        """Milliseconds of the target's forward over a tree of so many nodes (0: AR decoding's),
        medians, taken in turns.
        """
        target, layout = self.session.target, self.parts.layout
        ids = self.prompts()[0].token_ids
        seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
        names = [str(width) for width in WIDTHS]
        for turn in range(TURNS * self.options.repeats + 1):
            with target.prefill(ids) as cache:
                target.score(cache, ids[-1], TokenTree(), layout)  # none right after the prompt
                cache.accept(())
                for width in map(int, shuffled(names, self.options.seed, "width", turn)):
                    tree = TokenTree.chain([ids[node % len(ids)] for node in range(width)])
                    wait(target.device)
                    begin = time.perf_counter()
                    target.score(cache, ids[-1], tree, layout)
                    wait(target.device)
                    if turn:  # the first turn warms up
                        seconds[width].append(time.perf_counter() - begin)
                    cache.accept(())
        baseline = median(seconds[0])
        cells = [
            {
                "num_nodes": width,
                "verify_ms": 1e3 * median(times),
                "least_ms": 1e3 * min(times),
                "most_ms": 1e3 * max(times),
                "x_ar": median(times) / baseline,
            }
            for width, times in seconds.items()
        ]
        yield "growth_width", cells

    def prompts(self) -> list[Prompt]:
        """The first prompts of the run."""
        questions = self.session.job.prompts.questions()[: self.num_prompts]
        return [self.session.prompt(question, []) for question in questions]

    def text(self, length: int, begin: int = 0) -> tuple[int, ...]:
        """Tokens of the run's prompts one after another, begun anew where they end."""
        tokenizer = self.session.target.tokenizer
        assert tokenizer is not None
        questions = self.session.job.prompts.questions()
        texts = "\n\n".join(turn for question in questions for turn in question.turns)
        ids = tokenizer.encode(texts, add_special_tokens=False)
        if not ids:
            raise UserError("context needs prompts with text: prompts=spec_bench or prompts=demo")
        return tuple(itertools.islice(itertools.cycle(ids), begin, begin + length))

    def decode(
        self, systems: Mapping[str, Runner], prompts: Sequence[Prompt], num_tokens: int
    ) -> Decodings:
        """Every system, in turns; nothing is timed cold."""
        timed: Decodings = {}
        for prompt in prompts:
            for runner in systems.values():
                runner.decode(prompt, self.options.warm_up_tokens)
            for repeat in range(self.options.repeats):
                for name in shuffled(list(systems), self.options.seed, prompt.id, repeat):
                    self.terminal.begin_prompt(f"{prompt.id}  repeat {repeat + 1}  {name}")
                    timed[name, prompt.id, repeat] = systems[name].decode(prompt, num_tokens)
        self.terminal.end_prompt()
        return timed

    def lookup(self, drafter: Drafter, length: int) -> dict[str, Any]:
        """Milliseconds of its beginning, and of a proposal and of learning one token at that
        length.
        """
        self.setup.bind(drafter)
        ids = self.text(length + LOOKUP_STEPS)
        begin = time.perf_counter()
        proposer = drafter.begin(ids[:length])
        start_s = time.perf_counter() - begin
        member = drafter.members[0]
        plan = Plan.of([Share(member.num_draft_tokens, member.num_draft_nodes)])
        propose, observe = [], []
        for at in range(length, length + LOOKUP_STEPS):
            context, commit = ids[:at], Commit((), (ids[at],))
            first = time.perf_counter()
            proposer.propose(context, plan, Sampler())
            second = time.perf_counter()
            proposer.observe(commit)
            propose.append(second - first)
            observe.append(time.perf_counter() - second)
        seconds = {"start": start_s, "propose": median(propose), "observe": median(observe)}
        return {f"{name}_ms": 1e3 * value for name, value in seconds.items()}


def head(timed: Timed, num_tokens: int) -> Timed:
    """A decoding up to the step that reached `num_tokens`: what a shorter one would have been."""
    steps = emitted = 0
    while steps < len(timed.emissions) and emitted < num_tokens:
        emitted += timed.emissions[steps][0]
        steps += 1
    spent = timed.spent and timed.spent[:steps]
    return Timed(timed.output_ids[:emitted], timed.emissions[:steps], spent)


def _cell(value: Any) -> str:
    return number(value, ".3g") if value is None or isinstance(value, float) else str(value)


def _summary(
    systems: Mapping[str, Runner], timed: Decodings, place: Mapping[str, Any] | None = None
) -> Cells:
    """A line per system."""
    rows = []
    for (name, prompt_id, repeat), one in timed.items():
        base = timed[AR, prompt_id, repeat].output_ids
        at = divergence(one.output_ids, base)
        is_same = at is None or at >= min(len(one.output_ids), len(base))  # as far as both go
        columns = {**one.columns(), "is_identical": is_same, "divergence": at}
        rows.append(Row(prompt_id, "", repeat, order=0, system=name, **columns))
    lines: Cells = []
    for name in systems:
        found = system_summary(rows, name)
        medians = {key: (found[key] or {}).get("median") for key in ("tokens_per_s", "speedup")}
        others = {column: found[key] for column, key in COLUMNS.items()}
        identical = f"{found['num_identical']}/{found['num_decodings']}"
        line = {**(place or {}), "system": name, **medians, **others, "identical": identical}
        lines.append(line)
    return lines


if __name__ == "__main__":
    quiet_libraries()
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"growth: {error}")
