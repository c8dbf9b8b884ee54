"""What was found, as one page of plain text and as JSON. The page says of every number how much was examined for it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specens.evidence.examine import LOST, Evidence
from specens.evidence.identity import BUG, CONTROL_ALPHA
from specens.evidence.law import ALPHA, Statistic, is_rejected, strongest, z_bound
from specens.evidence.options import Options
from specens.evidence.texts import Written

AUDIT_VERSION = 1
"""Of `audit.json`."""
MAX_FORKS = 8
"""Forks listed on the page; all are in audit.json."""
WIDTH = 110


@dataclass(frozen=True)
class Audit:
    """All that one audit found. `run` is about `num_chosen` of the run's texts (with more of other seeds if a sampled run has too
    few tokens), `sampled` about texts that were decoded for the test of the law.
    """

    folder: str
    subject: Mapping[str, Any]
    options: Options
    written: Written
    num_chosen: int
    run: Evidence
    sampled: Evidence | None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return (self.run,) if self.sampled is None else (self.run, self.sampled)

    @property
    def is_lossless(self) -> bool:
        """Nothing was found, and the verifier does not say of itself that sampled text is another's."""
        is_sampled = any(entry.is_sampled for entry in self.evidence)
        return all(entry.is_lossless for entry in self.evidence) and not (self.subject["lossy"] and is_sampled)

    @property
    def verdict(self) -> str:
        """One line: identity and law, the worst of each, and what was not tested."""
        identities = [entry.identity for entry in self.evidence if entry.identity is not None]
        laws = [entry.law for entry in self.evidence if entry.law is not None]
        if any(entry.faults or entry.noise_floor > entry.noise_limit for entry in self.evidence):
            identities.append(BUG)
        # In this order: the first is the worst.
        identity = next((word for word in (BUG, "explained by rounding", "identical") if word in identities), None)
        law = LOST if LOST in laws else laws[0] if laws else None
        weak = any(entry.control and entry.num_contested and not is_rejected(entry.control) for entry in self.evidence)
        if weak and law not in (LOST, None):
            law = f"{law} (too few tokens to show a bias)"
        parts = [identity or "identity not tested", law or "law not tested (no sampled text)"]
        return ", ".join([*parts, *(["LOSSY verifier"] if self.subject["lossy"] else [])])

    def content(self) -> dict[str, Any]:
        """Every number, for `audit.json`."""
        texts = {
            "num_texts": len(self.written.texts),
            "num_chosen": self.num_chosen,
            "num_failed": self.written.num_failed,
        }
        baseline = {
            "num_baselines": self.written.num_baselines,
            "num_baseline_identical": self.written.num_baseline_identical,
        }
        return {
            "schema_version": AUDIT_VERSION,
            "folder": self.folder,
            "subject": dict(self.subject),
            "options": asdict(self.options),
            "texts": {**texts, **baseline},
            "run": _content(self.run),
            "sampled": None if self.sampled is None else _content(self.sampled),
            "is_lossless": self.is_lossless,
            "verdict": self.verdict,
        }

    def page(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        subject = self.subject
        yield f"Audit of {self.folder}"
        yield from _entry("target", f"{subject['target']}, {subject['dtype']} on {subject['device']}")
        yield from _entry("drafter", ", ".join(subject["drafters"]) or "none")
        lossy = " (LOSSY: need not be the target's own text)" if subject["lossy"] else ""
        how = f"verifier={subject['verifier']}{lossy}, layout={subject['layout']}, {subject['how']}"
        if subject["exact_width"] is not None:
            how += f", exact_width={subject['exact_width']} (plain decoding too is in forwards of that one width)"
        yield from _entry("decoding", how)
        yield from _entry("examined", self._examined())
        if self.written.num_baselines:
            same, all_ = self.written.num_baseline_identical, self.written.num_baselines
            yield from _entry("on file", f"{same} of {all_} prompts are equal to the same run's plain decoding")
        for entry in self.evidence:
            yield ""
            yield _title(entry, self.sampled is entry, self.options)
            yield from _identity_lines(entry, self.options)
            if entry.is_sampled:
                yield from _law_lines(entry)
        yield ""
        if self.run.law is None and self.sampled is None:
            yield from _entry("law", "not tested: greedy text has none, and audit.sampled_tokens=0 asks for no other")
        yield from _entry("verdict", self.verdict)

    def _examined(self) -> str:
        own = f"{self.num_chosen} of the run's {len(self.written.texts)} prompts token by token ({self.run.num_tokens} tokens"
        num_more = self.run.num_texts - self.num_chosen
        more = f", with {num_more} more texts from other seeds" if num_more else ""
        text = f"{own}{more})"
        if self.sampled is not None:
            text += f"; and {self.sampled.num_tokens} tokens decoded at temperature {self.options.temperature:g} for the law"
        if self.subject["status"] != "finished":
            text += f"; the run is not finished (its summary.json says: {self.subject['status']})"
        if self.written.num_failed:
            text += f"; {self.written.num_failed} prompts FAILED in the run and could not be examined"
        return text + ". What is said below is said of these."


def _content(entry: Evidence) -> dict[str, Any]:
    bound = z_bound(len(entry.statistics)) if entry.statistics else None
    return {
        **asdict(entry),
        "z_bound": bound,
        "is_caught": is_rejected(entry.control) if entry.control else None,
    }


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16, break_on_hyphens=False
    )


def _title(entry: Evidence, is_extra: bool, options: Options) -> str:
    if is_extra:
        return f"Sampled at temperature {options.temperature:g}, for the law: {entry.num_tokens} tokens"
    return f"The run's own text ({'sampled' if entry.is_sampled else 'greedy'}): {entry.num_tokens} tokens"


def _identity_lines(entry: Evidence, options: Options) -> Iterator[str]:
    n = entry.num_tokens
    if entry.is_keyed:
        forks = [fork for fork in entry.forks if fork.source == "walk"]
        where = "at every position" if not forks else f"at all but {len(forks)} of the {n} positions"
        text = f"{entry.num_identical} of {entry.num_texts} texts: {where} the target alone, one token a forward, says that token"
        yield from _entry("identical", text + ("" if entry.faults else ", and all end where plain decoding ends"))
    else:
        yield from _entry(
            "identical", "not tested: this verifier draws another text than plain decoding, of the same law if lossless"
        )
    for fault in entry.faults:
        yield from _entry("BUG", f"a wrong end: {fault}")
    for fork in entry.forks[:MAX_FORKS]:
        yield from _entry("fork" if fork.is_explained else "BUG: fork", _fork_line(fork))
    if len(entry.forks) > MAX_FORKS:
        yield from _entry("", f"and {len(entry.forks) - MAX_FORKS} more in audit.json")
    if entry.forks:
        yield from _entry("reference", f"{entry.reference}")
    floor = f"{entry.noise_floor:.2g}: p99.9 of how far two best scores move when {options.width} nodes share a forward"
    yield from _entry("noise floor", floor)
    if entry.noise_floor > entry.noise_limit:
        yield from _entry(
            "BUG", f"that is no rounding (at most {entry.noise_limit:.2g}): scores depend on what else is scored"
        )
    if entry.is_keyed:
        rate = (
            f"{entry.num_control_forks} of {n} choices change when plain decoding is scored that way, without a drafter"
        )
        ours = f"; the run: {sum(fork.source == 'walk' for fork in entry.forks)}"
        more = (
            f", which is more than rounding makes (level {CONTROL_ALPHA:g}): BUG" if entry.is_more_than_control else ""
        )
        yield from _entry("control", rate + ours + more)
    if entry.deficits is not None:
        found = entry.deficits
        text = f"{found.share:.2%} of tokens are behind the best one, by {found.largest:.2g} at most; {found.num_beyond} beyond"
        yield from _entry("deficit", f"{text} twice the noise floor")


def _fork_line(fork: Any) -> str:
    against = "plain decoding" if fork.source == "walk" else "the baseline on file"
    return (
        f"{fork.prompt_id}, token {fork.position}: {fork.said} where {against} says {fork.plain}, ahead by {fork.margin:.2g}; "
        f"reference: ranks {fork.said_rank} and {fork.plain_rank}, gap of the two best {fork.gap:.2g}; "
        + ("rounding" if fork.is_explained else "not explained by rounding")
    )


def _law_lines(entry: Evidence) -> Iterator[str]:
    bound = z_bound(len(entry.statistics))
    yield f"  {'law':<14}{'statistic':<44}{'tokens':>8}{'observed':>12}{'expected':>12}{'z':>8}"
    for row in entry.statistics:
        beyond = "  REJECTED" if abs(row.z) > bound else ""
        yield f"{'':16}{row.name[:43]:<44}{row.num_tokens:>8}{row.observed:>12.1f}{row.expected:>12.1f}{row.z:>8.2f}{beyond}"
    for token in entry.impossible[:MAX_FORKS]:
        yield from _entry("BUG", f"{token} has probability 0 under the target's law")
    yield from _entry("", f"{entry.law}: |z| has to stay below {bound:.2f} (false alarm in {ALPHA:g} of audits)")
    yield from _entry("bias control", _control_line(entry.control, entry.num_contested, bound))


def _control_line(control: tuple[Statistic, ...], num_contested: int, bound: float) -> str:
    most = strongest(control)
    if most is None or num_contested == 0:
        return "not possible: it takes two members that propose at one position"
    drawn = f"every token drawn by verifier=per_row from the same proposals gives z = {most.z:.2f} ({most.name})"
    if abs(most.z) > bound:
        return f"caught: {drawn}. A bias in part of the tokens takes more of them: audit.sampled_tokens="
    return f"not caught: {drawn}, too few tokens to show a bias of this size: audit.sampled_tokens="
