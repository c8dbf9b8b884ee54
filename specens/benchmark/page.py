"""`bench.md`: the tables of a bench, ready to paste, from the content of `bench.json`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specens.benchmark.rows import Row
from specens.benchmark.summary import PLAIN, rate, ratio

NOT_MEASURED = "-"


def page_of(content: Mapping[str, Any]) -> str:
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    systems: Mapping[str, Mapping[str, Any]] = content["systems"]
    yield from _subject(content)
    yield ""
    heads = [
        "system",
        "tok/s",
        "x plain",
        "worst category",
        "tokens a step",
        "limit",
        "draft / verify / host",
        "identical",
    ]
    is_cuda = str(content["peak_memory_is"]).startswith("most CUDA")
    rows = [_row(name, numbers, is_cuda=is_cuda) for name, numbers in systems.items()]
    yield from table([*heads, "memory"] if is_cuda else heads, rows)
    for name, numbers in systems.items():
        if numbers["error"] is not None:
            failed = (
                f"{numbers['num_failed']} of {numbers['num_decodings']} decodings failed: "
                if numbers["num_failed"]
                else ""
            )
            yield f"\n{name}: {failed}{numbers['error']}"
    measured = {name: numbers for name, numbers in systems.items() if numbers["speedup"] is not None and name != PLAIN}
    if measured:
        yield "\nSpeed-up by category (median of the repeats):\n"
        yield from _by_category(measured)
    accounted = {name: numbers["accounting"] for name, numbers in measured.items() if numbers["accounting"] is not None}
    if accounted:
        yield "\nWhere the time goes, in percent of each system's own (needed: plain decoding's forwards, one a step):\n"
        heads = [
            "system",
            "tokens a step",
            "nodes",
            "T(1)/T(n)",
            "limit",
            "reached",
            "needed",
            "width",
            "draft",
            "host",
        ]
        yield from table(heads, [_account(name, numbers) for name, numbers in accounted.items()])
    yield "\n" + " ".join(_footnotes(content))


def _subject(content: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, where, and how far it came."""
    if content["status"] != "finished":
        done, all_ = content["num_prompts_done"], content["num_prompts"]
        yield f"**INCOMPLETE ({content['status']}): {done} of {all_} prompts were measured whole.**\n"
    environment = content["environment"]
    target, packages = environment["target"], environment["packages"]
    packed = f" (packed as {target['packed_weights']})" if target.get("packed_weights") else ""
    how = "sampled" if content["sampled"] else "greedy"
    width = content["config"].get("exact_width")
    yield (
        f"{target['name']}, {target['dtype']}{packed} on {environment['device']}, {environment['num_threads']} threads, "
        f"{content['num_prompts_done']} prompts, {content['max_new_tokens']} tokens, {how}, {content['repeats']} repeats"
        f"{'' if width is None else f', exact_width={width}'}; torch {packages['torch']}, "
        f"transformers {packages['transformers']}."
    )


def _row(name: str, numbers: Mapping[str, Any], *, is_cuda: bool) -> list[str]:
    worst, account = numbers["worst_category"], numbers["accounting"] or {}
    parts = [numbers[f"{part}_fraction"] for part in ("draft", "verify", "host")]
    compared, memory = numbers["num_compared"], numbers["peak_memory_bytes"]
    return [
        name,
        spanned(numbers["tokens_per_s"], ".1f"),
        spanned(numbers["speedup"], ".2f"),
        NOT_MEASURED if worst is None or name == PLAIN else f"{worst['speedup']:.2f} ({worst['category']})",
        number(numbers["acceptance_length"], ".2f"),
        NOT_MEASURED if name == PLAIN else number(account.get("limit"), ".2f"),
        NOT_MEASURED if None in parts else " / ".join(f"{part:.0%}" for part in parts),
        f"{numbers['num_identical']}/{compared}" if compared else NOT_MEASURED,
        *([NOT_MEASURED if memory is None else f"{memory / 2**20:.0f} MiB"] if is_cuda else []),
    ]


def _by_category(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    kinds = [(kind, name) for kind in ("by_group", "by_category") for name in next(iter(measured.values()))[kind]]
    rows = [
        [name, *(number((numbers[kind][key] or {}).get("median"), ".2f") for kind, key in kinds)]
        for name, numbers in measured.items()
    ]
    yield from table(["system", *(key for _, key in kinds)], rows)


def _account(name: str, numbers: Mapping[str, Any]) -> list[str]:
    shares = [number(numbers[f"{part}_percent"], ".1f") for part in ("needed", "width", "draft", "host")]
    keys = (
        ("acceptance_length", ".2f"),
        ("mean_nodes", ".1f"),
        ("t1_over_tn", ".2f"),
        ("limit", ".2f"),
        ("speedup", ".2f"),
    )
    return [name, *(number(numbers[key], form) for key, form in keys), *shares]


def _footnotes(content: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Medians of the repeats (least to most). All systems decode on one model object, in turns, in an order shuffled for every"
        " prompt. The clock runs from a system's first emission to its last, so the prompt is not counted."
    )
    yield "Limit: tokens a step x T(1)/T(n), the speed-up if drafting and host cost nothing."
    if "wrong" in content["systems"]:
        yield "`wrong`: the members draft as ever, at their own cost, and every token of theirs is replaced by a wrong one."
    peaks = [numbers["peak_memory_bytes"] for numbers in content["systems"].values() if numbers["peak_memory_bytes"]]
    if peaks:
        yield f"Peak memory {max(peaks) / 2**20:.0f} MiB ({content['peak_memory_is']})."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(heads) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def number(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else format(value, form)


def spanned(span: Mapping[str, float] | None, form: str) -> str:
    """The median; least and most behind it, if there is more than one value."""
    if span is None:
        return NOT_MEASURED
    middle, least, most = (format(span[key], form) for key in ("median", "min", "max"))
    return middle if span["min"] == span["max"] else f"{middle} ({least} to {most})"


def progress(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A prompt's line: plain decoding's speed, the others against it, and how many texts are its own."""
    plain = rate([row for row in rows if row.system == PLAIN])
    parts = [f"plain {number(plain, '.1f')} tok/s"]
    for name in names:
        own = [row for row in rows if row.system == name and row.error is None]
        if name != PLAIN:
            parts.append(f"{name} {'failed' if not own else number(ratio(rate(own), plain), '.2f') + 'x'}")
    compared = [row.is_identical for row in rows if row.is_identical is not None]
    return "  ".join([*parts, f"identical {sum(compared)}/{len(compared)}"] if compared else parts)
