"""Measure what a step costs on this machine, in a few seconds: see `costs.CostTable`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specens.decoding.budgets.base import PlanContext, draft_limit
from specens.decoding.budgets.costs import CostTable, Points
from specens.decoding.loop import Decoder, Prefilled
from specens.decoding.sampling import Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.types import (
    IDLE,
    ROOT,
    Commit,
    Draft,
    Plan,
    Share,
    StepRecord,
    TokenTree,
    depths_of,
)

WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Trees that are timed, up to the budget's own most."""


@dataclass(frozen=True)
class Effort:
    """Trees of up to NARROW nodes are timed in so many `rounds`, wider ones in fewer, so that a
    busy moment meets all widths alike. Of each, the time that a quarter of the timings stay below
    counts, as a busy machine only ever adds. `repeats` are the steps in which each member drafts at
    each depth.
    """

    rounds: int = 9
    wide_rounds: int = 3
    repeats: int = 5


NARROW = 16
QUICK = Effort(rounds=3, wide_rounds=1, repeats=3)
"""For a machine that was measured before."""

BRANCH = 4
"""Depth of the branches of the trees that are timed."""


MOST_CONTEXT = 512
"""Of a longer prompt only the beginning is used, so that calibration takes seconds; what a longer
context costs, the prompts' own steps say.
"""


def calibrate(
    decoder: Decoder, prompt_ids: Sequence[int], max_nodes: int, effort: Effort = Effort()
) -> CostTable:
    """Time the target over trees of growing width behind a prompt, and each member alone at depth 1
    and at its full depth.
    """
    members = decoder.drafter.members
    most = max((member.num_draft_tokens for member in members), default=0)
    needed = BRANCH + most + 2 * effort.repeats * len(members)
    room = decoder.target.context_limit or MOST_CONTEXT + needed
    prompt_ids = prompt_ids[: max(min(room - needed, MOST_CONTEXT), 1)]
    sequence = decoder.prefill(prompt_ids)
    try:
        _verify_ms(decoder, sequence, max_nodes)  # so that nothing is timed cold
        widths = [width for width in WIDTHS if width <= max_nodes]
        verify_ms = _forward_times(decoder, sequence, widths, effort)
    finally:
        sequence.close()
    steps = _solo_drafts(decoder, prompt_ids, effort)
    draft_ms = {member.name: _points(steps, index) for index, member in enumerate(members)}
    host_ms = statistics.median(step.host_ms for step in steps) if steps else 0.0
    known = {name: row for name, row in draft_ms.items() if row}
    return CostTable(verify_ms, known, host_ms, origin="calibrated")


def _forward_times(
    decoder: Decoder, sequence: Prefilled, widths: Sequence[int], effort: Effort
) -> Points:
    """Milliseconds of a forward over each width."""
    times: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(effort.rounds):
        # what is timed first must not pay for a wide one before it
        _verify_ms(decoder, sequence, 0)
        for width in widths:
            if turn < effort.wide_rounds or width <= NARROW:
                times[width].append(_verify_ms(decoder, sequence, width))
    return tuple((width, sorted(row)[len(row) // 4]) for width, row in times.items())


def _verify_ms(decoder: Decoder, sequence: Prefilled, width: int) -> float:
    """Milliseconds of one forward over `width` nodes, its best tokens read. The cache is afterwards
    what it was.
    """
    ids, cache, target = sequence.prompt_ids, sequence.cache, decoder.target
    tree = comb(ids, width)
    begin = time.perf_counter()
    target.score(cache, ids[-1], tree, decoder.layout).argmax(-1).tolist()
    took = 1e3 * (time.perf_counter() - begin)
    cache.accept(())
    cache.rollback(len(ids) - 1)
    return took


def comb(token_ids: Sequence[int], width: int) -> TokenTree:
    """Branches of BRANCH nodes side by side, `width` in all. (Siblings may carry one token: nobody
    verifies them.)
    """
    parents = tuple(ROOT if node % BRANCH == 0 else node - 1 for node in range(width))
    tokens = tuple(token_ids[node % len(token_ids)] for node in range(width))
    return TokenTree(tokens, parents, depths_of(parents), (1,) * width)


@dataclass
class _OneAtATime:
    """A policy under which one member drafts at a time, each a few steps in a row. What it drafts
    is verified, so that it has to catch up with as many tokens as in a run: some models read two
    tokens far more slowly than one.

    `turns` are (member, depth) of every step to come; `spare` drafted tokens may be accepted: a
    short context has room for fewer.
    """

    turns: list[tuple[int, int]]
    spare: int

    mode: str = "draft"
    rate: float | None = None

    def plan(self, context: PlanContext) -> Plan:
        index, depth = self.turns.pop(0)
        member = context.members[index]
        shares = [IDLE] * len(context.members)
        shares[index] = Share(min(depth, draft_limit(member, context)), member.num_draft_nodes)
        return Plan.of(shares)

    def select(self, tree: TokenTree) -> TokenTree:
        return tree if max(tree.depths, default=0) <= self.spare else TokenTree()

    def observe(self, draft: Draft, tree: TokenTree, commit: Commit) -> None:
        self.spare -= len(commit.path)


def _solo_drafts(decoder: Decoder, prompt_ids: Sequence[int], effort: Effort) -> list[StepRecord]:
    members = list(enumerate(decoder.drafter.members))
    depths = [
        (index, depth)
        for index, member in members
        for depth in sorted({1, member.num_draft_tokens})
    ]
    turns = [turn for turn in depths for _ in range(effort.repeats)]
    if not turns:
        return []
    most = max(member.num_draft_tokens for _, member in members)
    length, limit = len(prompt_ids) + len(turns) + most, decoder.target.context_limit
    spare = sum(depth for _, depth in turns)
    policy = _OneAtATime(turns, spare if limit is None else max(min(spare, limit - length), 0))
    stop = StopRules(length + policy.spare, (), limit)
    steps: list[StepRecord] = []
    sequence = decoder.prefill(prompt_ids)
    for step in decoder.decode(sequence, Sampler(), stop, policy):
        steps.append(step)
        if not policy.turns:
            break
    sequence.close()
    return steps


def _points(steps: Sequence[StepRecord], index: int) -> Points:
    """A member's milliseconds by depth: the median of the steps in which it proposed something, or
    else of those in which it was scheduled; the first of a row, in which it catches up with what it
    missed, is left out.
    """
    times: dict[int, list[tuple[bool, float]]] = {}
    for step in steps:
        member = step.members[index]
        if member.num_planned:
            row = times.setdefault(member.num_planned, [])
            row.append((member.num_drafted > 0, member.draft_ms))
    points: list[tuple[int, float]] = []
    for depth, row in sorted(times.items()):
        row = row[1:] or row
        drafted = [ms for has_drafted, ms in row if has_drafted] or [ms for _, ms in row]
        points.append((depth, max(statistics.median(drafted), points[-1][1] if points else 0.0)))
    return tuple(points)
