"""What the same drafts would do where other things are cheap: cost tables that are modelled, and say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from specens.analysis.model import CostModel
from specens.analysis.teams import Teams
from specens.analysis.trace import Trace
from specens.decoding.costs import CostTable
from specens.errors import check_number

WIDTHS = (4, 16, 64)
"""Nodes of the forwards in `prices`."""


def prices(tables: Mapping[str, CostTable]) -> pd.DataFrame:
    """One column per cost table: milliseconds of a plain forward (`plain_ms`); then, in plain forwards, what `WIDTHS` nodes more
    add to it and what each member's longest known draft takes.
    """
    columns = {}
    for label, table in tables.items():
        plain = table.verify(0)
        columns[label] = {
            "plain_ms": plain,
            **{f"{width} nodes more": table.verify(width) / plain - 1 for width in WIDTHS},
            **{f"draft of {name}": points[-1][1] / plain for name, points in table.draft_ms.items()},
        }
    return pd.DataFrame(columns)


def with_width_price(table: CostTable, price: float) -> CostTable:
    """`table` with `price` times what width adds to a forward: at 1 the table itself, at 0 verifying costs nothing.

    Raises UserError for a price that is no number from 0.
    """
    check_number("price", price)
    plain = table.verify(0)
    points = tuple((count, plain + price * (table.verify(count) - plain)) for count, _ in table.verify_ms)
    return replace(table, verify_ms=points, origin=f"modelled: {price:g} times the price of width of ({table.origin})")


def over_width_price(trace: Trace, table: CostTable, prices: Sequence[float]) -> pd.DataFrame:
    """The table of all teams (`Teams.table`) at every price of width, one below the other, with the column `width_price`."""
    tables = [Teams.of(trace, CostModel(with_width_price(table, price))).table() for price in prices]
    return pd.concat(tables, keys=prices, names=["width_price"]).reset_index("width_price").reset_index(drop=True)
