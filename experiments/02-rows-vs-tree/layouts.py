"""The same candidates verified in both layouts: time, memory, and how far the scores drift.

    python experiments/02-rows-vs-tree/layouts.py outputs/traced 64 1

Takes a run with a dense trace, and one position of every output (the last argument), evenly spread.
There the drafts of all members are merged into a tree of at most 64 nodes, and one forward scores
it in each layout, in turns; of three forwards the fastest counts. The reference scores every path
token by token, as AR decoding does. Then a tree of middling size is scored behind contexts of other
lengths. Prints two tables. Names of members may follow: then only their drafts are used.
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

from specens.analysis.formats import markdown_table
from specens.config.build import build
from specens.config.folder import run_config
from specens.decoding.merge import merge, side_by_side
from specens.decoding.target.kv_cache import KVCache
from specens.decoding.target.supported import LAYOUTS, Layout
from specens.decoding.target.target import Target
from specens.decoding.types import Plan, Share, TokenTree
from specens.records.reader import load
from specens.replay.files import read_trace
from specens.replay.trace import Subset

REPEATS = 3
CONTEXTS = (256, 1024, 4096)


@dataclass(frozen=True)
class Candidates:
    """A context, and the merged tree of all candidates behind it."""

    ids: tuple[int, ...]
    tree: TokenTree


def candidates(
    folder: Path, max_nodes: int, per_output: int, names: Sequence[str]
) -> list[Candidates]:
    """Those at `per_output` positions of every output, evenly spread."""
    trace, _ = read_trace(folder)
    subset = Subset.of(trace, names or None)
    plan = Plan.of([Share(64, 64)] * len(subset.places), max_nodes)
    found = []
    for index, row in enumerate(load(folder).prompts.itertuples()):
        begin, end = int(trace.starts[index]), int(trace.starts[index + 1])
        prompt_ids: Any = row.prompt_ids
        for part in range(per_output):
            position = begin + (end - begin) * (2 * part + 1) // (2 * per_output)
            output_ids = trace.text[begin:position].tolist()
            drafts = [trace.drafts[position][place] for place in subset.places]
            tree = merge(side_by_side(drafts), plan, trace.eos_ids)
            found.append(Candidates((*map(int, prompt_ids), *output_ids), tree))
    return [entry for entry in found if len(entry.tree)]


def scored(
    target: Target, cache: KVCache, entry: Candidates, layout: Layout
) -> tuple[torch.Tensor, float, float]:
    """Logits of all nodes, milliseconds of the forward, and MB of keys and values that it held."""
    keep, begin = cache.length, time.perf_counter()
    logits = target.score(cache, entry.ids[-1], entry.tree, layout)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    ms = (time.perf_counter() - begin) * 1e3
    layers: list[Any] = cache.dynamic().layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 1e6
    cache.accept(())
    cache.rollback(keep)
    return logits[1:].float(), ms, held


def rescored(target: Target, cache: KVCache, entry: Candidates) -> torch.Tensor:
    """The same logits, one token per forward."""
    keep = cache.length
    rows: dict[int, torch.Tensor] = {}
    for leaf in entry.tree.leaves():
        path, token = entry.tree.path_to(leaf), entry.ids[-1]
        for node in path:
            target.score(cache, token, TokenTree(), "tree")
            cache.accept(())
            token = entry.tree.token_ids[node]
            if node not in rows:
                rows[node] = target.score(cache, token, TokenTree(), "tree")[0]
                cache.accept(())
                cache.rollback(cache.length - 1)
        cache.rollback(keep)
    return torch.stack([rows[node] for node in range(len(entry.tree))]).float()


def measured(target: Target, entry: Candidates, *, drift: bool) -> dict[str, float]:
    """One tree in both layouts."""
    tree = entry.tree
    row: dict[str, float] = {
        "context": len(entry.ids),
        "nodes": len(tree),
        "branches": len(tree.leaves()),
        "tokens_tree": 1 + len(tree),
        "tokens_rows": len(tree.leaves()) * (1 + max(tree.depths)),
    }
    with target.prefill(entry.ids) as cache:
        reference = rescored(target, cache, entry) if drift else None
        for turn in range(1 + REPEATS):
            for layout in LAYOUTS:
                logits, ms, row[f"mb_{layout}"] = scored(target, cache, entry, layout)
                # The first turn is a warm-up.
                row[f"ms_{layout}"] = ms if turn < 2 else min(ms, row[f"ms_{layout}"])
                if reference is not None:
                    row[f"drift_{layout}"] = float((logits - reference).abs().max())
                    differs = logits.argmax(-1) != reference.argmax(-1)
                    row[f"other_{layout}"] = int(differs.sum())
    return row


def by_branches(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians by the number of branches. `drift` is the largest; `other` counts the nodes whose
    best token is not the reference's.
    """
    group = pd.cut(
        rows["branches"], [0, 1, 4, 8, 16, 64], labels=["1", "2-4", "5-8", "9-16", "17+"]
    )
    groups = rows.groupby(group, observed=True)
    names = [name for name in rows.columns if not name.startswith(("drift", "other"))]
    table = groups[names].median().round(1)
    table.insert(0, "trees", groups.size())
    ratios = (rows["ms_rows"] / rows["ms_tree"]).groupby(group, observed=True)
    table["rows/tree"] = ratios.median().round(2)
    for layout in LAYOUTS:
        table[f"drift_{layout}"] = groups[f"drift_{layout}"].max()
        table[f"other_{layout}"] = groups[f"other_{layout}"].sum()
    table["all_nodes"] = groups["nodes"].sum()
    return table


def show(rows: pd.DataFrame) -> None:
    cells = [
        [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in rows.to_numpy().tolist()
    ]
    print("\n".join(markdown_table(list(rows.columns), cells)), flush=True)


def main() -> None:
    folder, max_nodes, per_output = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    loaded = build(run_config(folder).target).load()
    target = Target(loaded.model, loaded.tokenizer)
    found = candidates(folder, max_nodes, per_output, sys.argv[4:])
    rows = pd.DataFrame([measured(target, entry, drift=True) for entry in found])
    show(by_branches(rows).rename_axis("of branches").reset_index())
    ids = tuple(token for entry in found for token in entry.ids)
    trees = sorted((entry.tree for entry in found), key=lambda tree: len(tree.leaves()))
    tree = trees[len(trees) // 2]
    cut = [Candidates(ids[:length], tree) for length in CONTEXTS]
    print()
    show(pd.DataFrame([measured(target, entry, drift=False) for entry in cut]))


if __name__ == "__main__":
    main()
