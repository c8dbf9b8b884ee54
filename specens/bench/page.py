"""`bench.md`: the tables of a bench, ready to paste, from the content of `bench.json`. No torch
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specens.analysis.formats import MISSING, markdown_table, number
from specens.bench.rows import Row
from specens.bench.summary import AR, PARTS, rate, ratio

HEADS = (
    *("system", "tok/s", "x AR", "worst category", "acceptance length", "limit"),
    *("draft / verify / CPU overhead", "identical"),
)
ACCOUNT_HEADS = (
    *("system", "acceptance length", "nodes", "T(1)/T(n)", "limit", "reached"),
    *("needed", "width", "draft", "CPU overhead"),
)
ACCOUNT = {
    "acceptance_length": ".2f",
    "mean_nodes": ".1f",
    "t1_over_tn": ".2f",
    "limit": ".2f",
    "speedup": ".2f",
    **dict.fromkeys(("needed_percent", "width_percent", "draft_percent", "host_percent"), ".1f"),
}
"""What stands under the heads after the first, and how it is written."""


def page_of(content: Mapping[str, Any]) -> str:
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    systems: Mapping[str, Mapping[str, Any]] = content["systems"]
    yield from _subject(content)
    yield ""
    is_cuda = str(content["peak_memory_is"]).startswith("most CUDA")
    rows = [_row(name, numbers, is_cuda=is_cuda) for name, numbers in systems.items()]
    yield from markdown_table([*HEADS, "memory"] if is_cuda else HEADS, rows)
    for name, numbers in systems.items():
        if numbers["error"] is not None:
            failed, whole = numbers["num_failed"], numbers["num_decodings"]
            what = f"{failed} of {whole} decodings failed: " if failed else ""
            yield f"\n{name}: {what}{numbers['error']}"
    measured = {
        name: numbers
        for name, numbers in systems.items()
        if numbers["speedup"] is not None and name != AR
    }
    if measured:
        yield "\nSpeed-up by category (median of the repeats):\n"
        yield from _by_category(measured)
    accounts = [
        [name, *(number(numbers["accounting"][key], form) for key, form in ACCOUNT.items())]
        for name, numbers in measured.items()
        if numbers["accounting"] is not None
    ]
    if accounts:
        yield (
            "\nWhere the time goes, in percent of each system's own (needed: AR decoding's "
            "forwards, one a step):\n"
        )
        yield from markdown_table(ACCOUNT_HEADS, accounts)
    yield "\n" + " ".join(_footnotes(content))


def _subject(content: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, where, and how far it came."""
    done, whole = content["num_prompts_done"], content["num_prompts"]
    if content["status"] != "finished":
        yield (
            f"**INCOMPLETE ({content['status']}): {done} of {whole} prompts were measured whole.**"
        )
        yield ""
    environment = content["environment"]
    target, packages = environment["target"], environment["packages"]
    packed = f" (packed as {target['packed_weights']})" if target.get("packed_weights") else ""
    width = content["config"].get("exact_width")
    facts = [
        f"{target['name']}",
        f"{target['dtype']}{packed} on {environment['device']}",
        f"{environment['num_threads']} threads",
        f"{done} prompts",
        f"{content['max_new_tokens']} tokens",
        "sampled" if content["sampled"] else "greedy",
        f"{content['repeats']} repeats",
        *([] if width is None else [f"exact_width={width}"]),
    ]
    versions = f"torch {packages['torch']}, transformers {packages['transformers']}."
    yield f"{', '.join(facts)}; {versions}"


def _row(name: str, numbers: Mapping[str, Any], *, is_cuda: bool) -> list[str]:
    worst, account = numbers["worst_category"], numbers["accounting"] or {}
    parts = [numbers[f"{part}_fraction"] for part in PARTS]
    compared, memory = numbers["num_compared"], numbers["peak_memory_bytes"]
    is_base = name == AR
    cells = [
        name,
        spanned(numbers["tokens_per_s"], ".1f"),
        spanned(numbers["speedup"], ".2f"),
        MISSING if worst is None or is_base else f"{worst['speedup']:.2f} ({worst['category']})",
        number(numbers["acceptance_length"], ".2f"),
        MISSING if is_base else number(account.get("limit"), ".2f"),
        MISSING if None in parts else " / ".join(number(part, ".0%") for part in parts),
        f"{numbers['num_identical']}/{compared}" if compared else MISSING,
    ]
    if is_cuda:
        cells.append(MISSING if memory is None else f"{memory / 2**20:.0f} MiB")
    return cells


def _by_category(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    first = next(iter(measured.values()))
    kinds = [(kind, name) for kind in ("by_group", "by_category") for name in first[kind]]
    rows = [
        [name, *(number((numbers[kind][key] or {}).get("median"), ".2f") for kind, key in kinds)]
        for name, numbers in measured.items()
    ]
    yield from markdown_table(["system", *(key for _, key in kinds)], rows)


def _footnotes(content: Mapping[str, Any]) -> Iterator[str]:
    systems = content["systems"]
    yield (
        "Medians of the repeats (least to most). All systems decode on one model object, in turns, "
        "in an order shuffled for every prompt. The clock runs from a system's first emission to "
        "its last, so the prompt is not counted."
    )
    yield (
        "Limit: acceptance length x T(1)/T(n), the speed-up if drafting and CPU overhead cost "
        "nothing."
    )
    if "adversarial" in systems:
        yield (
            "`adversarial`: the members draft as ever, at their own cost, and every token of "
            "theirs is replaced by a wrong one."
        )
    peak = max((numbers["peak_memory_bytes"] or 0 for numbers in systems.values()), default=0)
    if peak:
        yield f"Peak memory {peak / 2**20:.0f} MiB ({content['peak_memory_is']})."


def spanned(span: Mapping[str, float] | None, form: str) -> str:
    """The median; least and most behind it, if there is more than one value."""
    if span is None:
        return MISSING
    middle, least, most = (format(span[key], form) for key in ("median", "min", "max"))
    return middle if span["min"] == span["max"] else f"{middle} ({least} to {most})"


def progress(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A prompt's line: AR decoding's speed, the others against it, and how many outputs are its
    own.
    """
    base = rate([row for row in rows if row.system == AR])
    parts = [f"{AR} {number(base, '.1f')} tok/s"]
    for name in names:
        own = [row for row in rows if row.system == name and row.error is None]
        if name != AR:
            ratio_of = number(ratio(rate(own), base), ".2f") + "x" if own else "failed"
            parts.append(f"{name} {ratio_of}")
    compared = [row.is_identical for row in rows if row.is_identical is not None]
    if compared:
        parts.append(f"identical {sum(compared)}/{len(compared)}")
    return "  ".join(parts)
