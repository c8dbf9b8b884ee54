"""Cost tables that were measured on this machine, in the cache folder for the runs to come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specens.decoding.budgets.costs import CostTable, read_costs
from specens.errors import UserError
from specens.records.files import cache_dir, plain, write_whole


def cached(subject: Mapping[str, Any]) -> CostTable | None:
    """The table cached for what `subject` describes: device, threads, target, drafters, layout. A
    damaged one is measured again.
    """
    path = _path(subject)
    if not path.is_file():
        return None
    try:
        return read_costs(str(path))
    except UserError:
        return None


def keep(subject: Mapping[str, Any], table: CostTable) -> None:
    path = _path(subject)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent, {path.name: json.dumps(plain(table.content()), allow_nan=False)})


def _path(subject: Mapping[str, Any]) -> Path:
    text = json.dumps(plain(subject), sort_keys=True)
    return cache_dir() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
