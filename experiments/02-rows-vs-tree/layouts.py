"""The same candidates verified in both layouts: what do they cost, what do they hold in memory, how far do their scores drift?

    python experiments/02-rows-vs-tree/layouts.py outputs/traced 64 1

Of a run with a dense trace: one position of every text (the last argument), evenly spread. There the drafts of all its members
are merged into a tree of at most 64 nodes, and one forward scores it in each layout, in turns, the fastest of three each. The
reference for the scores walks every path token by token, as plain decoding does. Then a middling tree again, behind contexts of
other lengths. Prints two tables. Names of members may follow: only their drafts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from specens.analysis.trace import Team
from specens.audit import run_config
from specens.benchmark.page import table
from specens.config import build
from specens.decoding.cache import KVCache
from specens.decoding.merge import merge, side_by_side
from specens.decoding.target import LAYOUTS, Layout, Target
from specens.decoding.types import Plan, TokenTree
from specens.loading import load
from specens.traced import read_trace

REPEATS = 3
CONTEXTS = (256, 1024, 4096)


@dataclass(frozen=True)
class Place:
    """A context, and the merged tree of all candidates behind it."""

    ids: tuple[int, ...]
    tree: TokenTree


def places(folder: Path, max_nodes: int, per_text: int, names: Sequence[str]) -> list[Place]:
    """`per_text` positions of every text, evenly spread."""
    trace, _ = read_trace(folder)
    team = Team.of(trace, names or None)
    plan = Plan(64, max_nodes, members=tuple(Plan(64, 64) for _ in team.places))
    found = []
    for index, row in enumerate(load(folder).prompts.itertuples()):
        begin, end = int(trace.starts[index]), int(trace.starts[index + 1])
        for part in range(per_text):
            position = begin + (end - begin) * (2 * part + 1) // (2 * per_text)
            text = trace.text[begin:position].tolist()
            tree = merge(side_by_side([trace.drafts[position][place] for place in team.places]), plan, trace.eos_ids)
            found.append(Place((*map(int, row.prompt_ids), *text), tree))  # pyright: ignore[reportArgumentType]
    return [place for place in found if len(place.tree)]


def scored(target: Target, cache: KVCache, place: Place, layout: Layout) -> tuple[torch.Tensor, float, float]:
    """Logits of all nodes, milliseconds of the forward, and MB of keys and values that it held."""
    keep, begin = cache.length, time.perf_counter()
    logits = target.score(cache, place.ids[-1], place.tree, layout)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    ms = (time.perf_counter() - begin) * 1e3
    layers: list[Any] = cache.states.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 1e6
    cache.accept(())
    cache.rollback(keep)
    return logits[1:].float(), ms, held


def walked(target: Target, cache: KVCache, place: Place) -> torch.Tensor:
    """The same logits, one token a forward."""
    keep = cache.length
    rows: dict[int, torch.Tensor] = {}
    for leaf in place.tree.leaves():
        path, token = place.tree.path_to(leaf), place.ids[-1]
        for node in path:
            target.score(cache, token, TokenTree(), "tree")
            cache.accept(())
            token = place.tree.token_ids[node]
            if node not in rows:
                rows[node] = target.score(cache, token, TokenTree(), "tree")[0]
                cache.accept(())
                cache.rollback(cache.length - 1)
        cache.rollback(keep)
    return torch.stack([rows[node] for node in range(len(place.tree))]).float()


def measured(target: Target, place: Place, *, drift: bool) -> dict[str, float]:
    """One place in both layouts."""
    cache = target.prefill(place.ids)
    tree = place.tree
    row: dict[str, float] = {
        "context": len(place.ids),
        "nodes": len(tree),
        "branches": len(tree.leaves()),
        "tokens_tree": 1 + len(tree),
        "tokens_rows": len(tree.leaves()) * (1 + max(tree.depths)),
    }
    reference = walked(target, cache, place) if drift else None
    for turn in range(1 + REPEATS):
        for layout in LAYOUTS:
            logits, ms, row[f"mb_{layout}"] = scored(target, cache, place, layout)
            row[f"ms_{layout}"] = ms if turn < 2 else min(ms, row[f"ms_{layout}"])  # the first is cold
            if reference is not None:
                row[f"drift_{layout}"] = float((logits - reference).abs().max())
                row[f"other_{layout}"] = int((logits.argmax(-1) != reference.argmax(-1)).sum())
    return row


def by_branches(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians by the number of branches; drift is the largest, `other` the nodes whose best token differs from the walk's."""
    group = pd.cut(rows["branches"], [0, 1, 4, 8, 16, 64], labels=["1", "2-4", "5-8", "9-16", "17+"])
    groups = rows.groupby(group, observed=True)
    names = [name for name in rows.columns if not name.startswith(("drift", "other"))]
    table = groups[names].median().round(1)
    table.insert(0, "places", groups.size())
    table["rows/tree"] = (rows["ms_rows"] / rows["ms_tree"]).groupby(group, observed=True).median().round(2)
    for layout in LAYOUTS:
        table[f"drift_{layout}"] = groups[f"drift_{layout}"].max()
        table[f"other_{layout}"] = groups[f"other_{layout}"].sum()
    table["all_nodes"] = groups["nodes"].sum()
    return table


def show(rows: pd.DataFrame) -> None:
    cells = [
        [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows.to_numpy().tolist()
    ]
    print("\n".join(table(list(rows.columns), cells)), flush=True)


def main() -> None:
    folder, max_nodes, per_text = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    loaded = build(run_config(folder).target).load()
    target = Target(loaded.model, loaded.tokenizer)
    found = places(folder, max_nodes, per_text, sys.argv[4:])
    rows = pd.DataFrame([measured(target, place, drift=True) for place in found])
    show(by_branches(rows).rename_axis("of branches").reset_index())
    ids = [token for place in found for token in place.ids]
    tree = sorted((place.tree for place in found), key=lambda tree: len(tree.leaves()))[len(found) // 2]
    rows = pd.DataFrame([measured(target, Place(tuple(ids[:length]), tree), drift=False) for length in CONTEXTS])
    print()
    show(rows)


if __name__ == "__main__":
    main()
