"""A step's draft, looked at: is it one that can be verified, and how far did each member agree?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specens.decoding.types import ROOT, Commit, Draft, Member, MemberRecord, Plan, TokenTree
from specens.errors import DrafterError


def check_draft(draft: Draft, members: Sequence[Member], vocab_size: int) -> None:
    """Name the drafter whose proposal could not even be verified. Raises DrafterError."""
    if not isinstance(draft, Draft):
        names = ", ".join(member.name for member in members)
        raise DrafterError(f"drafter {names}: proposed {type(draft).__name__}, not a Draft")
    wrong_owner = any(not 0 <= owner < len(members) for owner in draft.owners)
    lengths = {len(draft.seconds), len(draft.scheduled)}
    if wrong_owner or not lengths <= {0, len(members)}:
        raise DrafterError(
            f"a draft of {len(members)} members has owners {draft.owners}, seconds {draft.seconds} "
            f"and scheduled {draft.scheduled}"
        )
    for node, token in enumerate(draft.token_ids):
        if not 0 <= token < vocab_size:
            name = members[draft.owner(node)].name
            raise DrafterError(
                f"drafter {name}: proposed token {token}, the target has the ids "
                f"0..{vocab_size - 1}"
            )
    for node, confidence in enumerate(draft.confidences):
        if confidence is not None and not 0 <= confidence <= 1:  # NaN is neither
            name = members[draft.owner(node)].name
            raise DrafterError(
                f"drafter {name}: the confidence {confidence} of its token {draft.token_ids[node]} "
                "is no probability: give a number from 0 to 1, or None"
            )
    for node, probs in enumerate(draft.draft_probs):
        token = draft.token_ids[node]
        if probs is not None and not _can_have_sampled(probs, token, vocab_size):
            name = members[draft.owner(node)].name
            raise DrafterError(
                f"drafter {name}: the draft_probs of its token {token} are no distribution: give "
                f"probabilities [{vocab_size}] that sum to 1 and can have sampled it"
            )


def _can_have_sampled(probs: Any, token: int, vocab_size: int) -> bool:
    """Whether the token could be a sample. That it really is one, nobody can see from outside."""
    if tuple(probs.shape) != (vocab_size,):
        return False
    return bool(probs[token] > 0 and probs.min() >= 0 and abs(float(probs.sum()) - 1) < 1e-3)


def score_member(
    member: Member,
    index: int,
    plan: Plan,
    draft: Draft,
    tree: TokenTree,
    commit: Commit,
    draft_ms: float,
) -> MemberRecord:
    """Compare a member's whole proposal, pruned nodes included, with the emitted tokens."""
    own = [node for node in range(len(draft)) if draft.owner(node) == index]
    num_matched = num_tested = 0
    reached = {ROOT}  # several nodes when siblings carry the same token
    for token in commit.token_ids:
        children = [node for node in own if draft.parents[node] in reached]
        reached = {node for node in children if draft.token_ids[node] == token}
        num_tested += bool(children)
        num_matched += bool(reached)
        if not reached:
            break
    num_planned = plan.shares[index].num_tokens
    return MemberRecord(
        drafter=member.name,
        num_drafted=len(own),
        num_verified=sum(owners >> index & 1 for owners in tree.owners),
        num_matched=num_matched,
        num_tested=num_tested,
        draft_ms=draft_ms,
        num_planned=num_planned,
        was_scheduled=draft.scheduled[index] if draft.scheduled else num_planned > 0,
    )
