"""What the same drafts would do where other things are cheap: cost tables that are modelled, and
named so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from specens.decoding.budgets.costs import CostTable
from specens.errors import check_number
from specens.replay.cost_model import CostModel
from specens.replay.subsets import Subsets
from specens.replay.trace import Trace

WIDTHS = (4, 16, 64)
"""Nodes of the forwards in `prices`."""


def prices(tables: Mapping[str, CostTable]) -> pd.DataFrame:
    """One column per cost table: milliseconds of an AR forward (`ar_ms`); then, in AR forwards,
    what `WIDTHS` nodes more add to it and what each member's longest known draft takes.
    """
    columns = {}
    for label, table in tables.items():
        one = table.verify(0)
        drafts = table.draft_ms.items()
        columns[label] = {
            "ar_ms": one,
            **{f"{width} nodes more": table.verify(width) / one - 1 for width in WIDTHS},
            **{f"draft of {name}": points[-1][1] / one for name, points in drafts},
        }
    return pd.DataFrame(columns)


def with_width_price(table: CostTable, price: float) -> CostTable:
    """`table` with `price` times what width adds to a forward: at 1 the table itself, at 0
    verifying costs nothing.

    Raises UserError for a price that is no number from 0.
    """
    check_number("price", price)
    one = table.verify(0)
    points = ((count, one + price * (table.verify(count) - one)) for count, _ in table.verify_ms)
    origin = f"modelled: {price:g} times the price of width of ({table.origin})"
    return replace(table, verify_ms=tuple(points), origin=origin)


def over_width_price(trace: Trace, table: CostTable, prices: Sequence[float]) -> pd.DataFrame:
    """`Subsets.table` at every price of width, one below the other, by `width_price`."""
    models = [CostModel(with_width_price(table, price)) for price in prices]
    tables = [Subsets.of(trace, model).table() for model in models]
    joined = pd.concat(tables, keys=prices, names=["width_price"])
    return joined.reset_index("width_price").reset_index(drop=True)
