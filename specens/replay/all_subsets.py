"""Every subset's steps at once, for budgets that schedule all members and cut nothing: all
proposals merged at every position of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from specens.replay.trace import NOT_SCHEDULED, Subset, Trace, steps_frame


@dataclass(frozen=True, eq=False)
class MergedDrafts:
    """One merge of all members tells what any subset of them does: a path of a merged tree lies
    wholly inside the proposal of each of its owners. So a subset accepts as far as the best of its
    members agrees with the text, and its tree has the nodes that one of them owns.

    `position` and `owners` `[num_merged]` are of the merged nodes: where, and the bit mask of the
    members that proposed them. `matched` `[P, num_members]` is how far each member's own proposal
    agrees with the text, `depths` `[P, num_members]` how deep it goes.
    """

    trace: Trace
    position: np.ndarray
    owners: np.ndarray
    matched: np.ndarray
    depths: np.ndarray

    @classmethod
    def of(cls, trace: Trace, lengths: Mapping[str, int] | None = None) -> MergedDrafts:
        """`lengths` (member -> draft tokens) as in `Subset.of`."""
        members = Subset.of(trace, lengths=lengths).members
        most = np.array([member.num_draft_tokens for member in members])
        levels = _levels(trace, most)
        position, owners = _merge(trace, levels)
        is_scheduled = np.minimum(trace.draft_limits, most) > 0
        depths = np.where(is_scheduled, np.minimum(trace.deepest, most), NOT_SCHEDULED)
        return cls(trace, position, owners, _matched(trace, levels), depths)

    @cached_property
    def num_left(self) -> np.ndarray:
        """How many tokens of the text come from each position on, `[P]`."""
        return self.trace.starts[1:][self.trace.prompt_index] - np.arange(self.trace.num_positions)

    def num_nodes(self, subset: Subset) -> np.ndarray:
        """Nodes of the subset's merged tree at every position, `[P]`."""
        mask = sum(1 << place for place in subset.places)
        owned = self.position[(self.owners & mask) != 0]
        return np.bincount(owned, minlength=self.trace.num_positions)

    def steps(self, subset: Subset, max_nodes: int) -> pd.DataFrame | None:
        """The subset's steps, as replay returns them; None if `max_nodes` would have cut one of its
        trees.
        """
        num_nodes, places = self.num_nodes(subset), list(subset.places)
        accepted = self.matched[:, places].max(axis=1, initial=0)
        emitted = np.minimum(accepted + 1, self.num_left)
        at = _step_positions(np.arange(self.trace.num_positions) + emitted)
        if max_nodes < 1 or num_nodes[at].max() > max_nodes:
            return None
        return steps_frame(
            self.trace,
            subset,
            at,
            num_nodes=num_nodes[at],
            num_accepted=accepted[at],
            num_emitted=emitted[at],
            depths=self.depths[at][:, places],
            mode="draft",
        )


def _levels(trace: Trace, most: np.ndarray) -> list[np.ndarray]:
    """The nodes of depth 1, 2, ... that merging keeps, when members draft at most `most`
    `[num_members]` deep: as in `decoding.merge`, nothing follows an end of sequence.
    """
    is_end = np.isin(trace.token_ids, trace.eos_ids)
    is_kept = trace.depths <= most[trace.rows % len(most)]
    levels = []
    for depth in range(1, int(trace.depths.max(initial=0)) + 1):
        nodes = np.flatnonzero(is_kept & (trace.depths == depth))
        if depth > 1:
            above = trace.above[nodes]
            is_kept[nodes] = is_kept[above] & ~is_end[above]
        levels.append(nodes[is_kept[nodes]])
    return levels


def _merge(trace: Trace, levels: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Equal siblings become one node: its position and its owners, `[num_merged]` each."""
    base = int(trace.token_ids.max(initial=0)) + 1
    merged = np.zeros(len(trace.token_ids), np.int64)  # the number of each node's merged one
    positions, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for depth, nodes in enumerate(levels, start=1):
        position, member = np.divmod(trace.rows[nodes], len(trace.members))
        roots = position if depth == 1 else merged[trace.above[nodes]]
        keys = roots * base + trace.token_ids[nodes]
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        masks = np.zeros(len(first), np.int64)
        np.bitwise_or.at(masks, number, 1 << member)
        merged[nodes] = sum(map(len, owners)) + number
        positions.append(position[first])
        owners.append(masks)
    return np.concatenate(positions), np.concatenate(owners)


def _matched(trace: Trace, levels: Sequence[np.ndarray]) -> np.ndarray:
    """How far each proposal agrees with the text, `[P, num_members]`."""
    ends = trace.starts[1:][trace.prompt_index]
    is_text = np.zeros(len(trace.token_ids), bool)
    matched = np.zeros(trace.deepest.size, np.int64)
    for depth, nodes in enumerate(levels, start=1):
        rows = trace.rows[nodes]
        position = rows // len(trace.members)
        token = trace.text[np.minimum(position + depth - 1, trace.num_positions - 1)]
        agrees = (trace.token_ids[nodes] == token) & (position + depth <= ends[position])
        is_text[nodes] = agrees & is_text[trace.above[nodes]] if depth > 1 else agrees
        matched[rows[is_text[nodes]]] = depth
    return matched.reshape(trace.deepest.shape)


def _step_positions(following: np.ndarray) -> np.ndarray:
    """The positions where steps begin, when the next begins at `following`; a text's last step
    leads to the next text.
    """
    at, visited, hops = 0, [], following.tolist()
    while at < len(hops):
        visited.append(at)
        at = hops[at]
    return np.array(visited, np.int64)
