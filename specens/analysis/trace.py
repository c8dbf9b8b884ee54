"""A dense trace in memory: what every member would have proposed at every position of every text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd

from specens.analysis.frames import list_lengths, of_prompts, rows_where
from specens.decoding.types import CLAIM_DIGITS, ROOT, Draft, Member
from specens.errors import UserError

NO_CLAIM = 65535
"""In the trace's `claims`: the drafter claims nothing of this node."""

NOT_ASKED = -1
"""Depth of a member's proposal in a step in which it did not draft; 0 is one that was asked and had nothing to say."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The texts of a run, one after another, and all proposals. Position i of P counts on from text to text.

    `starts` `[num_prompts + 1]` are the first positions of the texts, and P. `text` `[P]` is the token that was emitted there,
    `context_tokens` `[P]` the committed length before it, `tokens_wanted` `[P]` the most tokens that a step there may emit,
    `draft_limits` `[P, num_members]` how deep a member may draft. The proposal of member m at position i is row
    i * num_members + m; its nodes begin at `row_starts` `[P * num_members + 1]`. Of each node `[num_nodes]`: its row,
    `token_ids`, `parents` (counted within the row), `above` (the parent among all nodes, or ROOT), `depths` and `claims`.
    """

    members: tuple[Member, ...]
    eos_ids: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    categories: tuple[str, ...]
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
    claims: np.ndarray

    @classmethod
    def of(cls, dense: pd.DataFrame, prompts: pd.DataFrame, meta: Mapping[str, Any]) -> Trace:
        """From `loading.load_dense` and the table of prompts. Prompts that failed, or were not finished, are left out.

        Raises UserError when the trace is not one of these prompts, row for row.
        """
        members = _members(meta)
        done = rows_where(prompts, np.asarray(prompts["error"].isna()) & (list_lengths(prompts, "output_ids") > 0))
        ids = [str(name) for name in done["prompt_id"]]
        if not ids:
            raise _fault("no prompt was finished")
        if len(set(ids)) < len(ids):
            raise _fault("a prompt id stands for several prompts: these are the prompts of more than one run")
        starts = np.concatenate([[0], list_lengths(done, "output_ids").astype(np.int64).cumsum()])
        dense = of_prompts(dense, ids)
        order = _order(dense, ids, [member.name for member in members], starts)
        num_prompt = np.repeat(list_lengths(done, "prompt_ids").astype(np.int64), np.diff(starts))
        context = num_prompt + np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        wanted = dense["tokens_wanted"].to_numpy(np.int64)[order].reshape(-1, len(members))
        if (wanted < 1).any() or (wanted != wanted[:, :1]).any():
            raise _fault("tokens_wanted differs between the members of a position, or is below 1")
        trace = cls(
            members=members,
            eos_ids=tuple(int(token) for token in meta["eos_token_ids"]),
            prompt_ids=tuple(ids),
            categories=tuple(str(name) for name in done["category"]),
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
        """The depth of every proposal, `[P, num_members]`; 0 for silence."""
        deepest = np.zeros(self.draft_limits.size, np.int64)
        np.maximum.at(deepest, self.rows, self.depths)
        return deepest.reshape(self.draft_limits.shape)

    @cached_property
    def drafts(self) -> list[tuple[Draft, ...]]:
        """The same proposals as the loop knows them: of every position, one per member."""
        unit = 10**CLAIM_DIGITS
        tokens, parents = self.token_ids.tolist(), self.parents.tolist()
        claims = [None if claim == NO_CLAIM else claim / unit for claim in self.claims.tolist()]
        bounds, width = self.row_starts.tolist(), len(self.members)
        flat = [
            Draft(tuple(tokens[begin:end]), tuple(parents[begin:end]), claims=tuple(claims[begin:end]))
            for begin, end in pairwise(bounds)
        ]
        return [tuple(flat[row : row + width]) for row in range(0, len(flat), width)]

    def _check_proposals(self) -> None:
        """Refuse what no member can have proposed: replay would then not be what a run does."""
        most = np.array([member.num_draft_nodes for member in self.members])
        num_nodes = np.diff(self.row_starts).reshape(self.draft_limits.shape)
        odd = (self.deepest > self.draft_limits) | (num_nodes > most)
        if odd.any():
            position, member = np.argwhere(odd)[0]
            where = f"position {position - self.starts[self.prompt_index[position]]}"
            raise _fault(
                f"prompt {self.prompt_ids[self.prompt_index[position]]}, {where}: the proposal of "
                f"{self.members[member].name} is larger than it can be"
            )


@dataclass(frozen=True, slots=True)
class Team:
    """Some of a trace's members, in an order of their own: `members[i]` is number `places[i]` of the trace."""

    places: tuple[int, ...]
    members: tuple[Member, ...]

    @classmethod
    def of(cls, trace: Trace, names: Sequence[str] | None = None, lengths: Mapping[str, int] | None = None) -> Team:
        """The members called `names`, by default all. `lengths` lets some draft less deep than they did.

        Of a chain that is exact. A member whose proposals branch might use the nodes that become free elsewhere: here its traced
        tree is cut at that depth. Raises UserError for names that are none, or twice, and for lengths beyond the traced ones.
        """
        known = {member.name: place for place, member in enumerate(trace.members)}
        names = list(known) if names is None else list(names)
        for name in (*names, *(lengths or {})):
            if name not in known:
                raise UserError(f"the trace has no member {name!r}; it has {', '.join(known)}")
        if len(set(names)) < len(names):
            raise UserError(f"members={names}: a member stands there twice")
        places = tuple(known[name] for name in names)
        return cls(places, tuple(_shortened(trace.members[place], lengths or {}) for place in places))


def depth_column(name: str) -> str:
    """The column of replayed steps with the depth of a member's proposal, or NOT_ASKED."""
    return f"depth_{name}"


def steps_frame(
    trace: Trace,
    team: Team,
    positions: np.ndarray,
    *,
    num_nodes: np.ndarray,
    num_accepted: np.ndarray,
    num_emitted: np.ndarray,
    depths: np.ndarray,
    mode: Any,
) -> pd.DataFrame:
    """The steps that begin at `positions` `[num_steps]` of a trace, in order, as replay returns them."""
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
    own = {depth_column(member.name): depths[:, index] for index, member in enumerate(team.members)}
    return pd.DataFrame({**columns, **own})


def _fault(what: str) -> UserError:
    return UserError(f"dense trace: {what}; run it again with trace=dense")


def _members(meta: Mapping[str, Any]) -> tuple[Member, ...]:
    known = {field.name for field in fields(Member)}
    try:
        members = tuple(
            Member(**{key: value for key, value in member.items() if key in known}) for member in meta["members"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _fault(f"its facts do not say who drafted ({type(error).__name__}: {error})") from error
    if not members:
        raise UserError("the run had no drafter: there is nothing to replay")
    return members


def _shortened(member: Member, lengths: Mapping[str, int]) -> Member:
    length = lengths.get(member.name, member.num_draft_tokens)
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= member.num_draft_tokens:
        raise UserError(
            f"{member.name} with drafts of {length!r} tokens: the trace has whole numbers from 1 to {member.num_draft_tokens}"
        )
    is_chain = member.num_draft_nodes == member.num_draft_tokens
    return replace(member, num_draft_tokens=length, num_draft_nodes=length if is_chain else member.num_draft_nodes)


def _order(dense: pd.DataFrame, ids: Sequence[str], names: Sequence[str], starts: np.ndarray) -> np.ndarray:
    """The order of the trace's rows by prompt, position, member. Raises UserError unless each is there once."""
    prompt = pd.Index(ids).get_indexer(dense["prompt_id"])  # pyright: ignore[reportArgumentType]
    member = pd.Index(names).get_indexer(dense["drafter"])  # pyright: ignore[reportArgumentType]
    position = dense["position"].to_numpy(np.int64)
    if (member < 0).any():
        raise _fault(f"it has a drafter {dense['drafter'].iloc[int(np.argmax(member < 0))]!r}, which is no member")
    is_outside = (position < 0) | (position >= np.diff(starts)[prompt])
    if is_outside.any():
        row = int(np.argmax(is_outside))
        raise _fault(f"prompt {ids[prompt[row]]} has no position {position[row]}")
    slots = (starts[prompt] + position) * len(names) + member
    counts = np.bincount(slots, minlength=int(starts[-1]) * len(names))
    if (counts != 1).any():
        slot = int(np.argmax(counts != 1))
        place = int(np.searchsorted(starts, slot // len(names), side="right")) - 1
        raise _fault(
            f"prompt {ids[place]}, position {slot // len(names) - starts[place]}: {names[slot % len(names)]} is "
            f"{'missing' if counts[slot] == 0 else 'there more than once'}"
        )
    return np.argsort(slots)


def _nodes(dense: pd.DataFrame, order: np.ndarray) -> dict[str, np.ndarray]:
    """All nodes of the rows in this order, as `Trace` has them."""
    lists = {name: dense[name].to_numpy(object)[order] for name in ("token_ids", "parents", "claims")}
    sizes = {name: np.fromiter(map(len, rows), np.int64, len(rows)) for name, rows in lists.items()}
    if any((size != sizes["token_ids"]).any() for size in sizes.values()):
        raise _fault("a proposal has not as many parents or claims as tokens")
    row_starts = np.concatenate([[0], sizes["token_ids"].cumsum()])
    flat = {name: np.fromiter(chain.from_iterable(rows), np.int64, row_starts[-1]) for name, rows in lists.items()}
    rows = np.repeat(np.arange(len(order)), sizes["token_ids"])
    above = _above(flat["parents"], row_starts[rows])
    return {"row_starts": row_starts, "rows": rows, "above": above, "depths": _depths(above), **flat}


def _draft_limits(members: Sequence[Member], context: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`budget.draft_limit` of every position and member, `[P, num_members]`."""
    limits = [
        np.minimum(
            np.minimum(member.num_draft_tokens, wanted - 1),
            np.inf if member.context_limit is None else member.context_limit - context,
        )
        for member in members
    ]
    return np.maximum(np.stack(limits, axis=1), 0).astype(np.int64)


def _above(parents: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The parent of every node among all nodes, or ROOT, `[num_nodes]`. `begins` is where each node's row begins."""
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
