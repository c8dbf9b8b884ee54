"""A dense trace in memory: what every member would have proposed at every position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.frames import list_lengths, of_prompts, rows_where
from specens.decoding.types import CONFIDENCE_DIGITS, ROOT, Draft, Member, member_of
from specens.errors import UserError
from specens.records.schema import NO_CONFIDENCE

NOT_SCHEDULED = -1
"""Depth of a member's proposal in a step in which it was not scheduled; 0: it abstained."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The texts of a run, one after another, and all proposals. Position i of P counts on from text
    to text.

    `starts` `[num_prompts + 1]` are the first positions of the texts, and P. `text` `[P]` is the
    token that was emitted there, `context_tokens` `[P]` the committed length before it,
    `tokens_wanted` `[P]` the most tokens that a step there may emit, `draft_limits`
    `[P, num_members]` how deep a member may draft. The proposal of member m at position i is row
    i * num_members + m; its nodes begin at `row_starts` `[P * num_members + 1]`. Of each node
    `[num_nodes]`: its row, `token_ids`, `parents` (counted within the row), `above` (the parent
    among all nodes, or ROOT), `depths` and `confidences`.
    """

    members: tuple[Member, ...]
    eos_ids: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    starts: np.ndarray
    text: np.ndarray
    context_tokens: np.ndarray
    tokens_wanted: np.ndarray
    draft_limits: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    above: np.ndarray
    depths: np.ndarray
    confidences: np.ndarray

    @classmethod
    def of(cls, dense: pd.DataFrame, prompts: pd.DataFrame, meta: Mapping[str, Any]) -> Trace:
        """From `reader.load_dense` and the table of prompts. Prompts that failed, or were not
        finished, are left out.

        Raises UserError when the trace is not one of these prompts, row for row.
        """
        members = _members(meta)
        is_done = np.asarray(prompts["error"].isna()) & (list_lengths(prompts, "output_ids") > 0)
        done = rows_where(prompts, is_done)
        ids = [str(name) for name in done["prompt_id"]]
        if not ids:
            raise _fault("no prompt was finished")
        if len(set(ids)) < len(ids):
            raise _fault("a prompt id occurs twice: these are the prompts of more than one run")
        starts = _starts(list_lengths(done, "output_ids").astype(np.int64))
        dense = of_prompts(dense, ids)
        order = _order(dense, ids, [member.name for member in members], starts)
        num_prompt = np.repeat(list_lengths(done, "prompt_ids").astype(np.int64), np.diff(starts))
        context = num_prompt + np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        wanted = dense["tokens_wanted"].to_numpy(np.int64)[order].reshape(-1, len(members))
        if (wanted < 1).any() or (wanted != wanted[:, :1]).any():
            raise _fault("tokens_wanted differs between members, or is below 1")
        trace = cls(
            members=members,
            eos_ids=tuple(int(token) for token in meta["eos_token_ids"]),
            prompt_ids=tuple(ids),
            starts=starts,
            text=np.fromiter(chain.from_iterable(done["output_ids"]), np.int64, starts[-1]),
            context_tokens=context,
            tokens_wanted=wanted[:, 0],
            draft_limits=_draft_limits(members, context, wanted[:, 0]),
            **_nodes(dense, order),
        )
        trace._check_proposals()
        return trace

    @property
    def num_positions(self) -> int:
        return len(self.text)

    @cached_property
    def prompt_index(self) -> np.ndarray:
        """Which text a position belongs to, `[P]`."""
        return np.repeat(np.arange(len(self.prompt_ids)), np.diff(self.starts))

    @cached_property
    def deepest(self) -> np.ndarray:
        """The depth of every proposal, `[P, num_members]`; 0: none."""
        deepest = np.zeros(self.draft_limits.size, np.int64)
        np.maximum.at(deepest, self.rows, self.depths)
        return deepest.reshape(self.draft_limits.shape)

    @cached_property
    def drafts(self) -> list[tuple[Draft, ...]]:
        """The same proposals as the loop knows them: of every position, one per member."""
        unit, width = 10**CONFIDENCE_DIGITS, len(self.members)
        known = [None if c == NO_CONFIDENCE else c / unit for c in self.confidences.tolist()]
        columns = [tuple(self.token_ids.tolist()), tuple(self.parents.tolist()), tuple(known)]
        flat = []
        for begin, end in pairwise(self.row_starts.tolist()):
            tokens, parents, confidences = (column[begin:end] for column in columns)
            flat.append(Draft(tokens, parents, confidences=confidences))
        return [tuple(flat[row : row + width]) for row in range(0, len(flat), width)]

    def _check_proposals(self) -> None:
        """Refuse what no member can have proposed: replay would then not be what a run does."""
        most = np.array([member.num_draft_nodes for member in self.members])
        num_nodes = np.diff(self.row_starts).reshape(self.draft_limits.shape)
        odd = (self.deepest > self.draft_limits) | (num_nodes > most)
        if odd.any():
            position, member = np.argwhere(odd)[0]
            prompt = self.prompt_index[position]
            raise _fault(
                f"prompt {self.prompt_ids[prompt]}, position {position - self.starts[prompt]}: the "
                f"proposal of {self.members[member].name} is larger than it can be"
            )


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of a trace's members, in an order of their own: `members[i]` is number `places[i]` of
    the trace.
    """

    places: tuple[int, ...]
    members: tuple[Member, ...]

    @classmethod
    def of(
        cls,
        trace: Trace,
        names: Sequence[str] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> Subset:
        """The members called `names`, by default all. `lengths` lets some draft less deep than they
        did.

        Of a chain that is exact. A member whose proposals branch might use the nodes that become
        free elsewhere: here its traced tree is cut at that depth. Raises UserError for names that
        are none, or twice, and for lengths beyond the traced ones.
        """
        known = {member.name: place for place, member in enumerate(trace.members)}
        names = list(known) if names is None else list(names)
        for name in (*names, *(lengths or {})):
            if name not in known:
                raise UserError(f"the trace has no member {name!r}; it has {', '.join(known)}")
        if len(set(names)) < len(names):
            raise UserError(f"members={names}: a member stands there twice")
        places = tuple(known[name] for name in names)
        members = (_shortened(trace.members[place], lengths or {}) for place in places)
        return cls(places, tuple(members))


def depth_column(name: str) -> str:
    """The column of replayed steps with the depth of a member's proposal, or NOT_SCHEDULED."""
    return f"depth_{name}"


def steps_frame(
    trace: Trace,
    subset: Subset,
    positions: np.ndarray,
    *,
    num_nodes: np.ndarray,
    num_accepted: np.ndarray,
    num_emitted: np.ndarray,
    depths: np.ndarray,
    mode: Any,
) -> pd.DataFrame:
    """The steps that begin at `positions` `[num_steps]` of a trace, in order, as replay returns
    them.
    """
    prompts = trace.prompt_index[positions]
    counts = np.bincount(prompts, minlength=len(trace.prompt_ids))
    columns = {
        "prompt_id": np.array(trace.prompt_ids, dtype=object)[prompts],
        "step": np.arange(len(positions)) - np.repeat(counts.cumsum() - counts, counts),
        "position": positions - trace.starts[prompts],
        "context_tokens": trace.context_tokens[positions],
        "num_nodes": num_nodes,
        "num_accepted": num_accepted,
        "num_emitted": num_emitted,
        "mode": mode,
    }
    names = [depth_column(member.name) for member in subset.members]
    return pd.DataFrame({**columns, **dict(zip(names, depths.T, strict=True))})


def _fault(what: str) -> UserError:
    return UserError(f"dense trace: {what}; run it again with trace=dense")


def _members(meta: Mapping[str, Any]) -> tuple[Member, ...]:
    try:
        members = tuple(map(member_of, meta["members"]))
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise _fault(f"its facts do not name the drafters ({what})") from error
    if not members:
        raise UserError("the run had no drafter: there is nothing to replay")
    return members


def _shortened(member: Member, lengths: Mapping[str, int]) -> Member:
    most = member.num_draft_tokens
    length = lengths.get(member.name, most)
    is_count = isinstance(length, int) and not isinstance(length, bool)
    if not is_count or not 1 <= length <= most:
        raise UserError(
            f"{member.name} with drafts of {length!r} tokens: the trace has whole numbers from 1 "
            f"to {most}"
        )
    num_nodes = length if member.num_draft_nodes == most else member.num_draft_nodes
    return replace(member, num_draft_tokens=length, num_draft_nodes=num_nodes)


def _order(
    dense: pd.DataFrame, ids: Sequence[str], names: Sequence[str], starts: np.ndarray
) -> np.ndarray:
    """The order of the trace's rows by prompt, position, member. Raises UserError unless each is
    there once.
    """
    prompt = pd.Index(ids).get_indexer(dense["prompt_id"])  # pyright: ignore[reportArgumentType]
    member = pd.Index(names).get_indexer(dense["drafter"])  # pyright: ignore[reportArgumentType]
    position = dense["position"].to_numpy(np.int64)
    if (member < 0).any():
        stranger = dense["drafter"].iloc[int(np.argmax(member < 0))]
        raise _fault(f"it has a drafter {stranger!r}, which is no member")
    is_outside = (position < 0) | (position >= np.diff(starts)[prompt])
    if is_outside.any():
        row = int(np.argmax(is_outside))
        raise _fault(f"prompt {ids[prompt[row]]} has no position {position[row]}")
    slots = (starts[prompt] + position) * len(names) + member
    counts = np.bincount(slots, minlength=int(starts[-1]) * len(names))
    if (counts != 1).any():
        slot = int(np.argmax(counts != 1))
        at, index = divmod(slot, len(names))
        place = int(np.searchsorted(starts, at, side="right")) - 1
        how = "missing" if counts[slot] == 0 else "there more than once"
        where = f"prompt {ids[place]}, position {at - starts[place]}"
        raise _fault(f"{where}: {names[index]} is {how}")
    return np.argsort(slots)


def _nodes(dense: pd.DataFrame, order: np.ndarray) -> dict[str, np.ndarray]:
    """All nodes of the rows in this order, as `Trace` has them."""
    names = ("token_ids", "parents", "confidences")
    lists = {name: dense[name].to_numpy(object)[order] for name in names}
    sizes, *others = [np.fromiter(map(len, rows), np.int64, len(rows)) for rows in lists.values()]
    if any((other != sizes).any() for other in others):
        raise _fault("a proposal has not as many parents or confidences as tokens")
    row_starts = _starts(sizes)
    flat = {
        name: np.fromiter(chain.from_iterable(rows), np.int64, row_starts[-1])
        for name, rows in lists.items()
    }
    rows = np.repeat(np.arange(len(order)), sizes)
    above = _above(flat["parents"], row_starts[rows])
    flat |= {"row_starts": row_starts, "rows": rows, "above": above}
    return {**flat, "depths": _depths(above)}


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of some lists begins when they stand one after another, and the end of all."""
    return np.concatenate([[0], sizes.cumsum()])


def _draft_limits(members: Sequence[Member], context: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`budgets.base.draft_limit` of every position and member, `[P, num_members]`."""
    limits = []
    for member in members:
        room = np.inf if member.context_limit is None else member.context_limit - context
        limits.append(np.minimum(np.minimum(member.num_draft_tokens, wanted - 1), room))
    return np.maximum(np.stack(limits, axis=1), 0).astype(np.int64)


def _above(parents: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The parent of every node among all nodes, or ROOT, `[num_nodes]`. `begins` is where each
    node's row begins.
    """
    if ((parents < ROOT) | (parents >= np.arange(len(parents)) - begins)).any():
        raise _fault("a node stands before its parent")
    return np.where(parents == ROOT, ROOT, begins + parents)


def _depths(above: np.ndarray) -> np.ndarray:
    """The depth of every node, `[num_nodes]`."""
    depths = np.zeros(len(above), np.int64)
    depth, is_here = 1, above == ROOT
    while is_here.any():
        depths[is_here] = depth
        is_here = (above != ROOT) & (depths[above] == depth)
        depth += 1
    return depths
