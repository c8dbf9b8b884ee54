"""What was found, as one page of plain text and as JSON. Every number comes with how much was
examined for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specens.analysis.formats import markdown_table, number
from specens.audit.distribution_test import ALPHA, is_rejected, z_bound
from specens.audit.examine import LOST, Evidence
from specens.audit.identity import BUG, CONTROL_ALPHA, IDENTICAL, RESCORING, ROUNDING, Divergence
from specens.audit.options import AuditOptions
from specens.audit.outputs import RunOutputs

AUDIT_VERSION = 2
"""Of `audit.json`."""
MAX_LISTED = 8
"""Divergences listed on the page; all are in audit.json."""
WIDTH = 100
INDENT = 16


@dataclass(frozen=True)
class Audit:
    """All that one audit found. `run` is about `num_chosen` of the run's outputs (with more of
    other seeds if a sampled run has too few tokens), `sampled` about outputs that were decoded for
    the distribution test.
    """

    folder: str
    subject: Mapping[str, Any]
    options: AuditOptions
    recorded: RunOutputs
    num_chosen: int
    run: Evidence
    sampled: Evidence | None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return (self.run,) if self.sampled is None else (self.run, self.sampled)

    @property
    def is_lossless(self) -> bool:
        """Nothing was found, and no output was sampled by a lossy verifier."""
        is_sampled = any(entry.is_sampled for entry in self.evidence)
        is_lossy = self.subject["lossy"] and is_sampled
        return all(entry.is_lossless for entry in self.evidence) and not is_lossy

    @property
    def verdict(self) -> str:
        """One line: identity and distribution, the worst of each, and what was not tested."""
        identities = {entry.identity for entry in self.evidence}
        if any(entry.faults or not entry.is_noise for entry in self.evidence):
            identities.add(BUG)
        worst_first = (BUG, ROUNDING, IDENTICAL)
        identity = next((word for word in worst_first if word in identities), "identity not tested")
        tested = [entry.distribution for entry in self.evidence if entry.distribution]
        weak = any(
            entry.control and entry.num_contested and not is_rejected(entry.control)
            for entry in self.evidence
        )
        if not tested:
            distribution = "distribution not tested (no sampled output)"
        elif LOST in tested:
            distribution = LOST
        else:
            distribution = tested[0] + (" (too few tokens to show a bias)" if weak else "")
        lossy = ", LOSSY verifier" if self.subject["lossy"] else ""
        return f"{identity}, {distribution}{lossy}"

    def content(self) -> dict[str, Any]:
        """Every number, for `audit.json`."""
        recorded = self.recorded
        return {
            "schema_version": AUDIT_VERSION,
            "folder": self.folder,
            "subject": dict(self.subject),
            "options": asdict(self.options),
            "texts": {
                "num_texts": len(recorded.outputs),
                "num_chosen": self.num_chosen,
                "num_failed": recorded.num_failed,
                "num_baselines": recorded.num_baselines,
                "num_baseline_identical": recorded.num_baseline_identical,
            },
            "run": _content(self.run),
            "sampled": None if self.sampled is None else _content(self.sampled),
            "is_lossless": self.is_lossless,
            "verdict": self.verdict,
        }

    def page(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        subject, recorded = self.subject, self.recorded
        yield f"Audit of {self.folder}"
        where = f"{subject['dtype']} on {subject['device']}"
        yield from _entry("target", f"{subject['target']}, {where}")
        yield from _entry("drafter", ", ".join(subject["drafters"]) or "none")
        lossy = " (LOSSY: need not be the target's own text)" if subject["lossy"] else ""
        how = f"verifier={subject['verifier']}{lossy}, layout={subject['layout']}, {subject['how']}"
        if subject["exact_width"] is not None:
            width = subject["exact_width"]
            how += f", exact_width={width} (AR decoding too is in forwards of that one width)"
        yield from _entry("decoding", how)
        yield from _entry("examined", self._examined())
        if recorded.num_baselines:
            same = f"{recorded.num_baseline_identical} of {recorded.num_baselines}"
            text = f"{same} outputs are identical to the same run's AR decoding"
            yield from _entry("recorded", text)
        for entry in self.evidence:
            yield ""
            what = f"The run's own output ({'sampled' if entry.is_sampled else 'greedy'})"
            if entry is self.sampled:
                what = f"Sampled at temperature {self.options.temperature:g}"
            yield f"{what}: {entry.num_tokens} tokens"
            yield from _identity_lines(entry, self.options)
            if entry.is_sampled:
                yield from _distribution_lines(entry)
        yield ""
        if self.run.distribution is None and self.sampled is None:
            text = "not tested: greedy output has none, and audit.sampled_tokens=0 samples no other"
            yield from _entry("distribution", text)
        yield from _entry("verdict", self.verdict)

    def _examined(self) -> str:
        num_more = self.run.num_texts - self.num_chosen
        more = f", with {num_more} more texts from other seeds" if num_more else ""
        own = f"{self.num_chosen} of the run's {len(self.recorded.outputs)} prompts token by token"
        text = f"{own} ({self.run.num_tokens} tokens{more})"
        if self.sampled is not None:
            text += f"; and {self.sampled.num_tokens} tokens sampled for the distribution test"
        if self.subject["status"] != "finished":
            text += f"; the run is not finished (status: {self.subject['status']})"
        if self.recorded.num_failed:
            text += f"; {self.recorded.num_failed} prompts FAILED in the run and are not examined"
        return text + ". All that follows is about these."


def _content(entry: Evidence) -> dict[str, Any]:
    bound = z_bound(len(entry.statistics)) if entry.statistics else None
    is_caught = is_rejected(entry.control) if entry.control else None
    return {**asdict(entry), "z_bound": bound, "is_caught": is_caught}


def _entry(name: str, text: str) -> list[str]:
    first, others = f"  {name:<{INDENT - 2}}", " " * INDENT
    wrapper = textwrap.TextWrapper(WIDTH, first, others, break_on_hyphens=False)
    return wrapper.wrap(text)


def _identity_lines(entry: Evidence, options: AuditOptions) -> Iterator[str]:
    yield from _entry("identical", _identical(entry))
    for fault in entry.faults:
        yield from _entry("BUG", f"a wrong end: {fault}")
    for one in entry.divergences[:MAX_LISTED]:
        name = "divergence" if one.is_explained else "BUG"
        yield from _entry(name, _divergence(one))
    if len(entry.divergences) > MAX_LISTED:
        yield from _entry("", f"and {len(entry.divergences) - MAX_LISTED} more in audit.json")
    if entry.divergences:
        yield from _entry("reference", f"{entry.reference}")
    floor = number(entry.noise_floor, ".2g")
    what = f"p99.9 of how far the two best scores move when {options.width} nodes share a forward"
    yield from _entry("noise floor", f"{floor}: {what}")
    if not entry.is_noise:
        limit = number(entry.noise_limit, ".2g")
        what = "scores depend on what else is scored"
        yield from _entry("BUG", f"that is no rounding (at most {limit}): {what}")
    if entry.is_keyed:
        changed = f"{entry.num_control_divergences} of {entry.num_tokens} choices change"
        text = f"{changed} when AR decoding is scored that way, without a drafter"
        text += f"; in the run: {entry.num_divergences}"
        if entry.is_more_than_control:
            text += f", more than rounding explains (level {CONTROL_ALPHA:g}): BUG"
        yield from _entry("control", text)
    if entry.deficits is not None:
        share, largest = number(entry.deficits.share, ".2%"), number(entry.deficits.largest, ".2g")
        text = f"{share} of tokens are behind the target's best one, by {largest} at most"
        text += f"; {entry.deficits.num_beyond} by more than twice the noise floor"
        yield from _entry("deficit", text)


def _identical(entry: Evidence) -> str:
    if not entry.is_keyed:
        return "not tested: for a seed, this verifier outputs another sample than AR decoding"
    diverging, n = entry.num_divergences, entry.num_tokens
    where = f"at all but {diverging} of the {n} positions" if diverging else "at every position"
    text = f"{entry.num_identical} of {entry.num_texts} texts: {where} the target's choice, one"
    text += " token per forward pass, equals the output token"
    return text if entry.faults else f"{text}, and all end where AR decoding ends"


def _divergence(one: Divergence) -> str:
    against = "AR decoding" if one.source == RESCORING else "the recorded baseline"
    gap, reference_gap = number(one.logit_gap, ".2g"), number(one.reference_gap, ".2g")
    reason = "rounding" if one.is_explained else "not explained by rounding"
    return (
        f"divergence in {one.prompt_id}, token {one.position}: {one.output_token}, "
        f"{against} has {one.ar_token}, logit gap {gap}; reference: ranks {one.output_rank} and "
        f"{one.ar_rank}, top-2 logit gap {reference_gap}; {reason}"
    )


def _distribution_lines(entry: Evidence) -> Iterator[str]:
    bound = z_bound(len(entry.statistics))
    text = "z-scores, approximately N(0, 1) if every token is sampled from the target distribution"
    yield from _entry("distribution", text)
    heads = ("statistic", "tokens", "observed", "expected", "z", "result")
    rows = []
    for row in entry.statistics:
        sums = (number(value, ".1f") for value in (row.observed, row.expected))
        verdict = "REJECTED" if abs(row.z) > bound else "ok"
        rows.append((row.name, str(row.num_tokens), *sums, number(row.z, ".2f"), verdict))
    yield from (f"    {line}" for line in markdown_table(heads, rows))
    for token in entry.impossible[:MAX_LISTED]:
        yield from _entry("BUG", f"{token} has target probability 0")
    limit = f"|z| has to stay below {number(bound, '.2f')} (false alarm in {ALPHA:g} of audits)"
    yield from _entry("", f"{entry.distribution}: {limit}")
    yield from _entry("bias control", _control(entry, bound))


def _control(entry: Evidence, bound: float) -> str:
    most = max(entry.control, key=lambda row: abs(row.z), default=None)
    if most is None or entry.num_contested == 0:
        return "not possible: it takes two members that propose at one position"
    z = f"z = {number(most.z, '.2f')} ({most.name})"
    sampled = f"every token sampled by verifier=per_row from the same proposals gives {z}"
    more = "raise audit.sampled_tokens"
    if abs(most.z) > bound:
        return f"caught: {sampled}. For a bias in part of the tokens, {more}"
    return f"not caught: {sampled}, too few tokens to show such a bias: {more}"
