"""Modelled cost tables change what they are meant to change, and name themselves modelled."""

from __future__ import annotations

import pandas as pd
import pytest

from specens.decoding.budgets.costs import CostTable
from specens.errors import UserError
from specens.replay.cost_model import CostModel
from specens.replay.subsets import Subsets
from specens.replay.trace import Trace
from specens.replay.whatif import over_width_price, prices, with_width_price

COSTS = CostTable(
    verify_ms=((0, 10.0), (4, 20.0)),
    draft_ms={"right": ((1, 1.0),), "wrong": ((1, 2.0), (2, 5.0))},
    origin="here",
)

OUTPUT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


def trace() -> Trace:
    """One text; `right` knows its next token, `wrong` proposes two that are never in it."""
    rows = []
    for position in range(len(OUTPUT)):
        wanted = len(OUTPUT) - position
        right = OUTPUT[position : position + min(1, wanted - 1)]
        for name, tokens in {"right": right, "wrong": [1, 2][: wanted - 1]}.items():
            parents = [index - 1 for index in range(len(tokens))]
            rows.append(("p", position, wanted, name, tokens, parents, [65535] * len(tokens)))
    columns = ["prompt_id", "position", "tokens_wanted", "drafter", "token_ids", "parents"]
    members = [
        {"name": name, "num_draft_tokens": depth, "num_draft_nodes": depth}
        for name, depth in (("right", 1), ("wrong", 2))
    ]
    prompt = {"prompt_id": "p", "category": "chat", "prompt_ids": [1, 2], "output_ids": OUTPUT}
    dense = pd.DataFrame(rows, columns=[*columns, "confidences"])
    facts = {"members": members, "eos_token_ids": [0]}
    return Trace.of(dense, pd.DataFrame([{**prompt, "error": None}]), facts)


def test_the_price_of_width_scales_what_width_adds_and_nothing_else():
    half = with_width_price(COSTS, 0.5)
    assert [half.verify(count) for count in (0, 2, 4, 8)] == [10, 12.5, 15, 20]
    assert half.draft_ms == COSTS.draft_ms and half.host_ms == COSTS.host_ms
    assert with_width_price(COSTS, 0).verify(64) == 10
    assert half.origin == "modelled: 0.5 times the price of width of (here)"


@pytest.mark.parametrize("price", [-0.5, float("nan"), "half"])
def test_a_price_that_is_none_is_refused(price):
    with pytest.raises(UserError, match="price="):
        with_width_price(COSTS, price)


def test_a_wrong_drafter_loses_less_as_width_becomes_cheaper_and_ar_decoding_stays_the_same():
    table = over_width_price(trace(), COSTS, [1.0, 0.5, 0.0])
    assert table["width_price"].tolist() == [1.0] * 4 + [0.5] * 4 + [0.0] * 4
    wrong = table[table["subset"] == "wrong"]["speedup"].tolist()
    assert wrong == sorted(wrong) and wrong[0] < wrong[-1] < 1
    assert table[table["num_members"] == 0]["speedup"].tolist() == [1, 1, 1]
    measured = table[table["width_price"] == 1].drop(columns="width_price").reset_index(drop=True)
    pd.testing.assert_frame_equal(measured, Subsets.of(trace(), CostModel(COSTS)).table())


def test_prices_are_in_ar_forwards():
    table = prices({"here": COSTS, "modelled": with_width_price(COSTS, 0)})
    assert table.loc["ar_ms"].tolist() == [10, 10]
    assert table.loc["4 nodes more"].tolist() == [1, 0]
    assert table.loc["draft of wrong"].tolist() == [0.5, 0.5]
