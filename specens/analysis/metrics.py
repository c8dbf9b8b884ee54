"""The numbers of a run, from its three tables: METRICS has one line for each, with its definition.

The table feeds summary.json, the terminal, the report, figures, sweeps and the tracker. What was
never measured is None: neither 0 nor NaN. Notation of a step: A accepted draft tokens; member d's
own proposal agrees with the emitted tokens over its first m_d tokens. Credit (`win`, `token_share`,
`marginal`) is defined in records/credit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd

from specens.analysis.bootstrap import bootstrap, pooled_ratio
from specens.analysis.formats import number
from specens.analysis.frames import (
    complete,
    finite,
    floats,
    list_lengths,
    mean,
    num_true,
    ratio,
    total,
)
from specens.errors import UserError

PLACES = ("terminal", "page", "sweep")
"""Where a number is shown, besides summary.json and the tracker, which have all of them."""


class MetricLike(Protocol):
    """A number with its definition. One of your own is a class with these names
    (docs/extending.md).

    `key` is its name in summary.json, `title` its heading, `form` how it is written (a format
    specification such as ".1%"), `unit` the label of an axis, `meaning` one sentence. `scope` is
    "run" (then it is computed from a RunTables) or "drafter" (a MemberTable).
    """

    key: str
    title: str
    form: str
    unit: str
    meaning: str
    scope: str

    def __call__(self, tables: Any) -> Any: ...


@dataclass(frozen=True)
class Metric:
    """A metric of this package. `places`: where it is shown."""

    key: str
    title: str
    form: str
    unit: str
    meaning: str
    compute: Callable[[Any], Any]
    scope: str = "drafter"
    places: tuple[str, ...] = PLACES

    def __call__(self, tables: Any) -> Any:
        return self.compute(tables)


@dataclass(frozen=True)
class RunTables:
    """The tables of a run, or of merged ones: `done` are the prompts that did not fail, `steps` and
    `drafts` (joined with the `num_accepted` of their step) are theirs. `key` names a prompt.
    """

    prompts: pd.DataFrame
    done: pd.DataFrame
    steps: pd.DataFrame
    drafts: pd.DataFrame
    key: list[str]

    def total(self, column: str) -> float:
        return total(self.steps, column)

    def mean(self, column: str) -> float | None:
        return mean(self.steps, column)

    def ratio(self, column: str, other: str | None = None) -> float | None:
        """Totals over totals of two columns of the steps; over the number of steps without one."""
        below = len(self.steps) if other is None else total(self.steps, other)
        return ratio(total(self.steps, column), below)


@dataclass(frozen=True)
class MemberTable:
    """One member's `rows` of the drafts table, a row per step; `num_steps` and `num_accepted` are
    those of all steps.
    """

    rows: pd.DataFrame
    num_steps: int
    num_accepted: float

    def column(self, name: str) -> np.ndarray:
        return floats(self.rows, name)

    def per_step(self, column: str) -> float | None:
        return ratio(total(self.rows, column), self.num_steps)

    @property
    def accepted(self) -> int:
        """Sum of min(m_d, A)."""
        return int(np.minimum(self.column("num_matched"), self.column("num_accepted")).sum())

    @property
    def verified(self) -> int:
        return int(total(self.rows, "num_verified"))


def _run(
    key: str, title: str, form: str, unit: str, meaning: str, compute: Any, places: Any = ()
) -> Metric:
    return Metric(key, title, form, unit, meaning, compute, "run", places)


def _count(key: str, title: str, meaning: str, compute: Any, places: Any = ()) -> Metric:
    return Metric(key, title, ",.0f", title, meaning, compute, "run", places)


METRICS: tuple[Metric, ...] = (
    _run("acceptance_length", "acceptance length", ".2f", "tokens per target forward",
         "emitted tokens / target forwards, pooled", lambda t: t.ratio("num_emitted"), ("sweep",)),
    _run("acceptance_length_interval", "", "", "", "its 95% bootstrap interval over prompts",
         lambda t: bootstrap(_per_prompt(t), pooled_ratio)),
    _run("speedup", "speedup", ".2f", "x AR decoding",
         "tokens per second over the AR baseline's, on the prompts that have both; prefill apart",
         lambda t: finite(_speed_ratio(_paired(t.done).sum(axis=0))), ("sweep",)),
    _run("speedup_interval", "", "", "", "its 95% bootstrap interval over prompts",
         lambda t: bootstrap(_paired(t.done), _speed_ratio)),
    _run("tokens_per_s", "tokens per second", ".1f", "tokens per second",
         "emitted tokens / seconds of decoding, prefill apart",
         lambda t: finite(pooled_ratio(complete(_own(t.done)).sum(axis=0))), ("sweep",)),
    _run("baseline_tokens_per_s", "AR tokens per second", ".1f", "tokens per second, AR decoding",
         "the same of AR decoding in the same run",
         lambda t: finite(pooled_ratio(complete(_baseline(t.done)).sum(axis=0))), ("sweep",)),
    _run("acceptance_rate", "accepted", ".1%", "verified draft tokens accepted (%)",
         "accepted / verified draft tokens", lambda t: t.ratio("num_accepted", "num_nodes")),
    _run("no_win_rate", "no drafter", ".1%", "steps without a winner (%)",
         "steps with A = 0; with all win rates it sums to 1",
         lambda t: ratio(num_true(floats(t.steps, "num_accepted") == 0), len(t.steps))),
    _count("num_prompts", "prompts", "all prompts", lambda t: len(t.prompts), ("sweep",)),
    _count("num_failed", "failed", "prompts with an error, which every other number leaves out",
           lambda t: len(t.prompts) - len(t.done), ("sweep",)),
    _count("num_compared", "compared", "outputs with a baseline's text to compare",
           lambda t: _num_compared(t.done)),
    _count("num_identical", "identical", "outputs equal to the baseline's; None: none compared",
           lambda t: int(total(t.done, "is_identical")) if _num_compared(t.done) else None,
           ("sweep",)),
    _count("num_steps", "steps", "target forwards of decoding", lambda t: len(t.steps)),
    _count("num_emitted", "tokens", "emitted tokens", lambda t: int(t.total("num_emitted"))),
    _count("num_verified", "verified", "draft tokens verified",
           lambda t: int(t.total("num_nodes"))),
    _count("num_accepted", "accepted", "draft tokens accepted",
           lambda t: int(t.total("num_accepted"))),
    _count("num_trimmed", "trimmed", "accepted + steps - emitted: what the stop rules cut off",
           lambda t: int(t.total("num_accepted") + len(t.steps) - t.total("num_emitted"))),
    _run("draft_ms_per_step", "draft ms/step", ".2f", "drafting, ms per step",
         "mean drafting time of a step", lambda t: t.mean("draft_ms"), ("sweep",)),
    _run("verify_ms_per_step", "verify ms/step", ".2f", "verifying, ms per step",
         "mean time of the target's forward and the verdict", lambda t: t.mean("verify_ms"),
         ("sweep",)),
    _run("host_ms_per_step", "CPU overhead ms/step", ".2f", "CPU overhead, ms per step",
         "mean time of a step outside draft and verify", lambda t: t.mean("host_ms"), ("sweep",)),
    _run("host_fraction", "CPU overhead", ".1%", "CPU overhead (%)",
         "CPU overhead / (draft + verify + CPU overhead)", lambda t: _host_fraction(t.steps)),
    _run("wasted_nodes_per_token", "wasted nodes per token", ".2f",
         "verified nodes wasted per token",
         "verified nodes that were not accepted / emitted tokens",
         lambda t: ratio(t.total("num_nodes") - t.total("num_accepted"), t.total("num_emitted")),
         ("sweep",)),
    Metric("win_rate", "win rate", ".1%", "steps won (%)",
           "steps in which its proposal was the longest accepted one; ties are split",
           lambda m: m.per_step("win")),
    Metric("sole_win_rate", "sole wins", ".1%", "steps won alone (%)",
           "steps that it won and no other member", lambda m: m.per_step("is_sole_win")),
    Metric("token_share", "token share", ".1%", "accepted tokens (%)",
           "its part of all accepted tokens; a token is split among the members that proposed it",
           lambda m: ratio(total(m.rows, "token_share"), m.num_accepted)),
    Metric("tokens_per_step", "tokens/step", ".2f", "accepted tokens per step",
           "its token shares / all steps: its part of the acceptance length",
           lambda m: m.per_step("token_share"), places=()),
    Metric("marginal", "marginal", ".2f", "tokens per step lost without it",
           "tokens per step that would be lost without it", lambda m: mean(m.rows, "marginal"),
           places=("page",)),
    Metric("acceptance_rate", "accepted", ".1%", "its verified tokens accepted (%)",
           "of its tokens that were verified", lambda m: ratio(m.accepted, m.verified)),
    Metric("acceptance_by_depth", "", "", "", "chance to agree at a depth once it was reached",
           lambda m: acceptance_by_depth(m.column("num_matched"), m.column("num_tested")),
           places=()),
    Metric("solo_acceptance_length", "length alone", ".2f", "tokens per target forward, alone",
           "1 + mean m_d: tokens per forward if it were the only member",
           lambda m: ratio(len(m.rows) + m.column("num_matched").sum(), len(m.rows))),
    Metric("no_draft_rate", "no draft", ".1%", "steps without a draft (%)",
           "steps in which it was idle or abstained",
           lambda m: ratio(num_true(m.column("num_drafted") == 0), len(m.rows))),
    Metric("draft_ms_per_step", "draft ms/step", ".2f", "drafting, ms per step",
           "its mean drafting time", lambda m: mean(m.rows, "draft_ms")),
    Metric("tokens_per_draft_s", "tokens per draft second", ".1f", "tokens per second of drafting",
           "its token shares over its drafting time", lambda m: _per_draft_second(m.rows),
           places=("page",)),
    Metric("num_drafted", "drafted", ",.0f", "tokens drafted", "tokens that it proposed",
           lambda m: int(total(m.rows, "num_drafted")), places=()),
    Metric("num_verified", "verified", ",.0f", "tokens verified", "of them, those verified",
           lambda m: m.verified, places=()),
    Metric("num_accepted", "accepted tokens", ",.0f", "tokens accepted", "of them, those accepted",
           lambda m: m.accepted, places=()),
    Metric("wasted_nodes", "wasted nodes", ",.0f", "verified nodes not accepted",
           "its verified tokens that were not accepted", lambda m: m.verified - m.accepted,
           places=("page",)),
)  # fmt: skip

OLD_KEYS = {"no_draft_rate": "silent_rate"}
"""Keys that had another name in schema version 3; version 4 writes both."""


def metrics_of(scope: str, place: str | None = None, extra: Sequence[Any] = ()) -> list[Any]:
    """The metrics of a scope, those of `extra` after our own; with `place`, those shown there."""
    known = [metric for metric in (*METRICS, *extra) if metric.scope == scope and metric.title]
    return [m for m in known if place is None or place in getattr(m, "places", PLACES)]


DEFINITION = ("key", "title", "form", "unit", "meaning", "scope")
"""The parts of a metric that are texts."""


def definitions(metrics: Sequence[Any]) -> list[dict[str, str]]:
    """What a run records of metrics that are not METRICS."""
    return [{name: str(getattr(metric, name)) for name in DEFINITION} for metric in metrics]


def recorded_metrics(summary: Mapping[str, Any]) -> list[Metric]:
    """The metrics whose `definitions` a run recorded. Their values are in its summary: the packages
    that compute them need not be at hand.
    """
    entries = summary.get("metrics")
    described = map(_described, entries if isinstance(entries, list) else [])
    return [metric for metric in described if metric is not None]


def further_metrics(summaries: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """The metrics that any of several runs recorded, each once."""
    found = (metric for summary in summaries for metric in recorded_metrics(summary))
    return list({(metric.scope, metric.key): metric for metric in found}.values())


def _described(entry: Any) -> Metric | None:
    try:
        *texts, scope = (str(entry[name]) for name in DEFINITION)
        return Metric(*texts, compute=lambda _: None, scope=scope)
    except (KeyError, TypeError):  # whatever another program wrote
        return None


def check_metrics(metrics: Sequence[Any]) -> tuple[Any, ...]:
    """Refuse what is no metric, or has the key of another one."""
    taken = {(metric.scope, metric.key) for metric in METRICS}
    for metric in metrics:
        name, is_function = type(metric).__name__, callable(metric)
        lacking = [part for part in DEFINITION if not hasattr(metric, part)]
        if lacking or not is_function or metric.scope not in ("run", "drafter"):
            what = (
                f"has no {lacking[0]}" if lacking else "needs a scope, run or drafter, and a call"
            )
            raise UserError(f"metrics: {name} {what}; see docs/extending.md")
        if (metric.scope, metric.key) in taken:
            raise UserError(f"metrics: {name} has the key {metric.key!r} of another metric")
        try:
            number(1.0, metric.form)
        except (ValueError, AttributeError) as error:
            what = f"has the form {metric.form!r}, which is none of format(), such as '.1%'"
            raise UserError(f"metrics: {name} {what}") from error
        taken.add((metric.scope, metric.key))
    return tuple(metrics)


def acceptance_by_depth(matched: np.ndarray, tested: np.ndarray) -> list[float | None]:
    """Entry i - 1 is #{m >= i} / #{m >= i - 1 and depth i was tested}: the chance to match at depth
    i once there. Steps whose proposal ended before depth i are censored, not failures.
    """
    depths = range(1, int(tested.max(initial=0)) + 1)
    return [
        ratio(num_true(matched >= i), num_true((matched >= i - 1) & (tested >= i))) for i in depths
    ]


def _own(done: pd.DataFrame) -> np.ndarray:
    return np.stack([list_lengths(done, "output_ids"), floats(done, "decode_s")], axis=1)


def _baseline(done: pd.DataFrame) -> np.ndarray:
    lengths, seconds = list_lengths(done, "baseline_ids"), floats(done, "baseline_decode_s")
    return np.stack([lengths, seconds], axis=1)


def _paired(done: pd.DataFrame) -> np.ndarray:
    """(tokens, seconds, baseline tokens, baseline seconds) of the prompts that have all."""
    return complete(np.concatenate([_own(done), _baseline(done)], axis=1))


def _per_prompt(tables: RunTables) -> np.ndarray:
    """(emitted tokens, steps) of every prompt."""
    return tables.steps.groupby(tables.key)["num_emitted"].agg(["sum", "size"]).to_numpy(float)


def _num_compared(done: pd.DataFrame) -> int:
    return num_true(done["is_identical"].notna().to_numpy(bool))


def _host_fraction(steps: pd.DataFrame) -> float | None:
    columns = [floats(steps, name) for name in ("draft_ms", "verify_ms", "host_ms")]
    measured = complete(np.stack(columns, axis=1))
    return ratio(measured[:, 2].sum(), measured.sum())


def _per_draft_second(rows: pd.DataFrame) -> float | None:
    both = complete(np.stack([floats(rows, "token_share"), floats(rows, "draft_ms")], axis=1))
    tokens, draft_ms = both.sum(axis=0)
    return ratio(1000 * tokens, draft_ms)


def _speed_ratio(totals: np.ndarray) -> np.ndarray:
    """Totals `[..., (tokens, seconds, baseline tokens, baseline seconds)]` -> speedup; not finite
    where it has none.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return pooled_ratio(totals[..., :2]) / pooled_ratio(totals[..., 2:])
