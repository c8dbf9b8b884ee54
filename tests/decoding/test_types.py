"""Forests and trees: re-indexing, and the example of `merge`."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specens.decoding.budgets.base import PlanContext
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.merge import merge, part_of, side_by_side
from specens.decoding.types import (
    IDLE,
    ROOT,
    Draft,
    Member,
    Plan,
    Share,
    TokenTree,
    depths_of,
    member_of,
    new_parents,
)

THE, CAT, DOG, SAT, RAN, DOWN, BARKS = range(7)


def test_the_example_of_new_parents_is_true():
    assert new_parents((-1, 0, 0, 2), (0, 2, 3)) == (-1, 0, 1)


def test_a_node_is_not_kept_without_its_parent():
    with pytest.raises(KeyError):
        new_parents((-1, 0, 0, 2), (0, 3))
    with pytest.raises(KeyError):
        Draft((1, 2), (-1, 0)).only([1])


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_a_forest_of_some_nodes_has_the_same_paths(count, seed):
    """Any order in which parents come before their children will do."""
    chance = random.Random(seed)
    parents = tuple(chance.randrange(-1, node) for node in range(count))
    draft = Draft(tuple(range(100, 100 + count)), parents, confidences=(0.5,) * count)
    kept: list[int] = []
    for node in chance.sample(range(count), count):
        if parents[node] == ROOT or parents[node] in kept:
            kept.append(node)
    part = draft.only(kept)

    def path(one: Draft, node: int) -> list[int]:
        above = one.parents[node]
        return [*(path(one, above) if above != ROOT else []), one.token_ids[node]]

    assert part.parents == new_parents(parents, kept)
    assert [path(part, node) for node in range(len(part))] == [path(draft, node) for node in kept]


def test_only_keeps_what_belongs_to_a_node_and_leaves_out_seconds_and_schedule():
    probs = torch.tensor([0.5, 0.5])
    draft = Draft(
        (7, 8, 9),
        (-1, 0, 0),
        owners=(1, 0, 1),
        seconds=(0.1, 0.2),
        draft_probs=(None, probs, None),
        confidences=(0.9, None, 0.3),
        scheduled=(True, True),
    )
    part = draft.only([0, 2])
    assert part == Draft((7, 9), (-1, 0), owners=(1, 1), confidences=(0.9, 0.3))
    assert draft.only([0, 1]).draft_probs == (None, probs)
    assert draft.only([]) == Draft()
    assert Draft((7, 8), (-1, 0)).only([0]) == Draft((7,), (-1,))


@pytest.mark.parametrize("num_nodes", [4, 3, 2])
def test_the_example_of_merge_is_true(num_nodes):
    """Two members after "the": the chain "cat sat down", and "cat" with two continuations."""
    chain = Draft.chain([CAT, SAT, DOWN])
    tree = Draft((CAT, SAT, RAN), (-1, 0, 0))
    plan = Plan((Share(3, 3), Share(2, 3)), num_nodes)
    merged = merge(side_by_side([chain, tree]), plan)
    nodes = [(CAT, -1, 0b11), (SAT, 0, 0b11), (DOWN, 1, 0b01), (RAN, 0, 0b10)][:num_nodes]
    assert list(zip(merged.token_ids, merged.parents, merged.owners, strict=True)) == nodes


def test_a_part_of_a_draft_is_what_the_member_proposed():
    parts = [
        Draft((CAT, DOG), (-1, -1), confidences=(0.5, 0.25)),
        Draft(),
        Draft.chain([DOG, BARKS]),
    ]
    whole = side_by_side(parts)
    assert [part_of(whole, index).token_ids for index in range(3)] == [p.token_ids for p in parts]
    assert [part_of(whole, index).parents for index in range(3)] == [p.parents for p in parts]
    assert part_of(whole, 0) == parts[0]


def test_a_plan_is_its_shares():
    shares = (Share(3, 6, 0.1), IDLE, Share(2, 2))
    plan = Plan.of(shares, 7)
    assert (plan.num_tokens, plan.num_nodes, plan.min_confidence) == (3, 7, 0.0)
    assert Plan.of(shares).num_nodes == 8 and Plan.of(()).num_tokens == 0
    part = plan.part(0, 1)
    assert part == Plan((shares[0],), 6) and part.min_confidence == 0.1
    assert Plan(shares, 7, first_only=True).part(1, 3) == Plan(shares[1:], 2, first_only=True)
    members = (Member("a", 3, 6), Member("b", 4, 4, context_limit=5), Member("c", 2, 2))
    found = FixedBudget(max_nodes=7).plan(PlanContext(members, 5, 4))
    assert found == Plan((Share(3, 6), IDLE, Share(2, 2)), 7)


def test_a_tree_of_some_nodes_has_their_depths_owners_and_confidences():
    parents = (-1, 0, 0, 2)
    confidences = (((0, 0.5),), ((1, None),), ((0, 0.2), (1, 0.3)), ((0, 0.1),))
    tree = TokenTree((THE, CAT, DOG, BARKS), parents, depths_of(parents), (1, 2, 3, 1))
    tree = TokenTree(tree.token_ids, parents, tree.depths, tree.owners, confidences=confidences)
    part = tree.only({0, 3, 2})
    assert (part.token_ids, part.parents, part.depths) == ((THE, DOG, BARKS), (-1, 0, 1), (1, 2, 3))
    assert part.owners == (1, 3, 1)
    assert part.confidences == (confidences[0], confidences[2], confidences[3])


def test_a_member_comes_back_from_plain_data_of_another_version():
    content = {"name": "a", "num_draft_tokens": 3, "num_draft_nodes": 6, "of_tomorrow": True}
    assert member_of(content) == Member("a", 3, 6)
    with pytest.raises(TypeError):
        member_of({"name": "a"})
