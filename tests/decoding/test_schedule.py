"""Which members draft in a step: the one place that knows `first_only`, and what is recorded."""

from __future__ import annotations

import itertools

import pytest
from helpers import Fake, decode, plain_greedy

from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.proposals import check_draft
from specens.decoding.schedule import propose_in_order
from specens.decoding.types import IDLE, Draft, Member, Plan, Share
from specens.drafters.ensemble import Ensemble
from specens.drafters.ngram import NGram
from specens.errors import DrafterError
from specens.models.tiny import random_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
FULL = Share(2, 2)
NOTHING, SOMETHING = Draft(), Draft.chain([1])


def called(parts, first_only, drafts):
    """The places that were called, in order, and what came of it."""
    calls = []

    def propose(place, part):
        assert part is parts[place]
        calls.append(place)
        return drafts[place]

    return calls, propose_in_order(parts, first_only, propose)


def test_every_member_with_a_share_is_called_in_order():
    drafts = [SOMETHING, NOTHING, Draft.chain([2, 3]), SOMETHING]
    calls, found = called([FULL, FULL, IDLE, FULL], False, drafts)
    assert calls == [0, 1, 3]
    assert found == [SOMETHING, NOTHING, None, SOMETHING], "idle is None, and to abstain is not"


def test_first_only_ends_with_the_first_that_proposes_something():
    drafts = [NOTHING, SOMETHING, SOMETHING]
    assert called([FULL] * 3, True, drafts) == ([0, 1], [NOTHING, SOMETHING, None])
    assert called([IDLE, IDLE, FULL], True, drafts) == ([2], [None, None, SOMETHING])
    assert called([FULL] * 3, True, [NOTHING] * 3) == ([0, 1, 2], [NOTHING] * 3)
    assert called([], True, []) == ([], [])


@pytest.mark.parametrize("first_only", [False, True])
def test_shares_and_plans_are_scheduled_alike(first_only):
    """Replay schedules by shares, an ensemble by the plans of its drafters."""
    for shares in itertools.product([IDLE, FULL], repeat=3):
        for drafts in itertools.product([NOTHING, SOMETHING], repeat=3):
            by_share = called(list(shares), first_only, drafts)
            plans = [Plan.of(shares).part(place, place + 1) for place in range(3)]
            assert called(plans, first_only, drafts) == by_share


@pytest.mark.parametrize(
    "entry",
    [{"owners": (0, 1)}, {"owners": (-1, 0)}, {"seconds": (0.1,) * 2}, {"scheduled": (True,) * 2}],
)
def test_a_draft_that_speaks_for_other_members_is_refused(entry):
    draft = Draft((5, 6), (-1, 0), **entry)
    with pytest.raises(DrafterError, match="a draft of 1 members has owners"):
        check_draft(draft, (Member("a", 2, 2),), 128)


def test_records_say_of_every_member_whether_it_was_called():
    """Also those of an ensemble inside, and those that have no room to draft."""
    model = random_model(vocab_size=128, max_position_embeddings=256, seed=3)
    text = plain_greedy(model, PROMPT, 24)
    whole = [*PROMPT, *text]
    sometimes = Fake(
        lambda context: whole[len(context) :][: 2 * (len(context) % 2)], "sometimes", 2
    )
    inner = Ensemble({"ngram": NGram(3), "never": Fake(lambda context: [], "never")})
    members = Ensemble({"sometimes": sometimes, "inner": inner, "last": NGram(2)})
    for first_only in (False, True):
        budget = FixedBudget(first_only=first_only)
        output, steps = decode(model, members, PROMPT, 24, budget=budget)
        assert output == text
        names = [member.drafter for member in steps[0].members]
        assert names == ["sometimes", "inner/ngram", "inner/never", "last"]
        for step in steps:
            planned = [member.num_planned > 0 for member in step.members]
            drafted = [member.num_drafted > 0 for member in step.members]
            first = drafted.index(True) if any(drafted) else len(drafted)
            is_open = [not first_only or place <= first for place in range(len(drafted))]
            scheduled = [member.was_scheduled for member in step.members]
            assert scheduled == [a and b for a, b in zip(planned, is_open, strict=True)]
            assert all(member.was_scheduled or not member.num_drafted for member in step.members)
        was_idle = any(not m.was_scheduled and m.num_planned for s in steps for m in s.members)
        assert was_idle == first_only
