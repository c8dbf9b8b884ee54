"""The definitions of the numbers, on values that can be checked by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specens.analysis.bootstrap import bootstrap, pooled_ratio
from specens.analysis.metrics import METRICS, Metric, check_metrics, metrics_of
from specens.analysis.summary import DRAFTER_COLUMNS, drafter_table, summarise
from specens.errors import UserError
from specens.records.credit import credit

Frames = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]


def frames(
    steps: Sequence[dict],
    *,
    names: Sequence[str] = ("a", "b"),
    prompts: dict[str, dict] | None = None,
) -> Frames:
    """Tables from steps such as {"prompt": "p", "m": (2, 0), "drafted": (3, 3)}; everything else
    follows from them.

    `m` and `drafted` are per member. Optional: `accepted` (default: the longest agreement),
    `emitted` (default: one more), `verified` (default: as drafted), `tested` (default: one more
    than m where the draft is deeper than m).
    """
    step_rows, draft_rows = [], []
    emitted_of: dict[str, int] = {}
    for number, step in enumerate(steps):
        prompt, matched, drafted = step.get("prompt", "p"), step["m"], step["drafted"]
        accepted = step.get("accepted", max(matched, default=0))
        emitted = step.get("emitted", accepted + 1)
        verified = step.get("verified", drafted)
        tested = step.get("tested", [min(m + 1, k) for m, k in zip(matched, drafted, strict=True)])
        where = {"prompt_id": prompt, "step": number}
        counts = {"num_nodes": sum(verified), "num_accepted": accepted, "num_emitted": emitted}
        step_rows.append({**where, **counts, "draft_ms": 2.0, "verify_ms": 7.0, "host_ms": 1.0})
        emitted_of[prompt] = emitted_of.get(prompt, 0) + emitted
        members = zip(names, matched, drafted, verified, tested, strict=True)
        for (name, m, k, v, t), own in zip(members, credit(matched, accepted), strict=True):
            counts = {"num_drafted": k, "num_verified": v, "num_matched": m, "num_tested": t}
            draft = {**where, "drafter": name, **counts, "draft_ms": 1.0}
            draft_rows.append(draft | asdict(own))
    known = prompts or {}
    common = {"category": "chat", "decode_s": 1.0, "error": None}
    prompt_rows = [
        {"prompt_id": prompt, **common, "output_ids": [7] * count} | known.get(prompt, {})
        for prompt, count in (dict.fromkeys(known, 0) | emitted_of).items()
    ]
    return pd.DataFrame(prompt_rows), pd.DataFrame(step_rows), pd.DataFrame(draft_rows)


def random_steps(seed: int, num_members: int, num_steps: int = 60) -> list[dict]:
    rng = np.random.default_rng(seed)
    steps = []
    for number in range(num_steps):
        drafted = rng.integers(0, 6, num_members)
        matched = [int(rng.integers(0, k + 1)) for k in drafted]
        counts = [int(k) for k in drafted]
        steps.append({"prompt": f"p{number % 5}", "m": matched, "drafted": counts})
    return steps


# credit


@pytest.mark.parametrize("seed", range(20))
def test_wins_sum_to_one_and_token_shares_to_the_accepted_tokens(seed: int) -> None:
    matched = np.random.default_rng(seed).integers(0, 6, size=1 + seed % 4).tolist()
    credits = credit(matched, max(matched))
    assert sum(c.win for c in credits) == pytest.approx(1 if max(matched) else 0, abs=1e-12)
    assert sum(c.token_share for c in credits) == pytest.approx(max(matched), abs=1e-12)


@pytest.mark.parametrize("matched", [(3, 1, 2), (2, 2, 0), (4, 4, 4), (0, 0, 1), (5, 2, 2)])
def test_token_share_is_the_shapley_value_of_the_longest_agreement(
    matched: tuple[int, ...],
) -> None:
    orders = list(itertools.permutations(range(len(matched))))
    shapley = np.zeros(len(matched))
    for order in orders:
        best = 0
        for member in order:
            shapley[member] += max(best, matched[member]) - best
            best = max(best, matched[member])
    assert [c.token_share for c in credit(matched, max(matched))] == pytest.approx(
        shapley / len(orders)
    )


def test_ties_split_the_win_and_have_no_sole_winner() -> None:
    first, second, third = credit([2, 2, 1], 2)
    assert (first.win, second.win, third.win) == (0.5, 0.5, 0.0)
    assert (first.is_win, second.is_win, third.is_win) == (True, True, False)
    assert not first.is_sole_win
    assert first.marginal == 0
    assert first.token_share == pytest.approx(1 / 3 + 1 / 2)
    assert third.token_share == pytest.approx(1 / 3)


def test_marginal_is_what_the_step_loses_without_the_member() -> None:
    assert [c.marginal for c in credit([4, 1, 0], 4)] == [3, 0, 0]
    assert [c.marginal for c in credit([4], 4)] == [4]


def test_a_pruned_proposal_that_agrees_beyond_the_accepted_run_wins_no_more_than_it() -> None:
    pruned, verified = credit([3, 2], 2)
    assert pruned == verified
    assert pruned.win == 0.5
    only_pruned, without_draft = credit([1, 0], 0)
    assert not only_pruned.is_win
    assert only_pruned.token_share == 0
    assert only_pruned.marginal == 0
    assert without_draft == only_pruned


@pytest.mark.parametrize(("matched", "accepted"), [([1, 0], 2), ([], 1), ([-1], 0), ([0], -1)])
def test_contradicting_counts_are_refused(matched: list[int], accepted: int) -> None:
    with pytest.raises(ValueError, match=r"matched|negative"):
        credit(matched, accepted)


# the run's numbers


def test_only_the_leading_run_counts_as_accepted() -> None:
    """Agreement per position [[1, 0, 1], [1, 1, 1]]: the last hit of the first draft lies behind a
    miss.
    """
    steps = [{"m": (1,), "drafted": (3,)}, {"m": (3,), "drafted": (3,)}]
    summary = summarise(*frames(steps, names=["a"]))
    drafter = summary["drafters"]["a"]
    assert (summary["num_accepted"], summary["num_verified"], summary["num_emitted"]) == (4, 6, 6)
    assert drafter["acceptance_rate"] == summary["acceptance_rate"] == pytest.approx(2 / 3)
    assert drafter["acceptance_by_depth"] == [1.0, 0.5, 1.0]
    assert drafter["wasted_nodes"] == 2


def test_published_counts_give_the_published_rates() -> None:
    """87 drafts, 259 tokens, 70 / 55 / 42 of them accepted at depth 1 / 2 / 3; 129 drafts of 3 with
    150 accepted.
    """
    lengths = [0] * 17 + [1] * 15 + [2] * 13 + [3] * 42
    drafted = [3] * 15 + [2] * 2 + [3] * 70  # two drafts were a token short, wrong from the start
    steps = [{"m": (m,), "drafted": (k,)} for m, k in zip(lengths, drafted, strict=True)]
    summary = summarise(*frames(steps, names=["a"]))
    drafter = summary["drafters"]["a"]
    assert drafter["num_verified"] == 259
    assert drafter["num_accepted"] == 167
    assert drafter["acceptance_rate"] == pytest.approx(0.6448, abs=1e-4)
    assert summary["acceptance_length"] == pytest.approx(2.92, abs=5e-3)
    assert drafter["solo_acceptance_length"] == pytest.approx(summary["acceptance_length"])
    by_depth = np.cumprod(drafter["acceptance_by_depth"])
    assert by_depth == pytest.approx([0.805, 0.632, 0.483], abs=1e-3)

    lengths = [3] * 50 + [0] * 79
    summary = summarise(*frames([{"m": (m,), "drafted": (3,)} for m in lengths], names=["a"]))
    assert summary["acceptance_rate"] == pytest.approx(0.388, abs=1e-3)
    assert summary["acceptance_length"] == pytest.approx(2.16, abs=5e-3)


def test_short_dropped_and_missing_drafts_have_their_own_counts() -> None:
    pruned = {"m": (2,), "drafted": (4,), "verified": (2,), "accepted": 2, "tested": (3,)}
    steps = [
        {"m": (0,), "drafted": (0,)},  # no draft
        pruned,  # half of it
        {"m": (1,), "drafted": (1,), "emitted": 1},  # a stop rule took the target's own token
    ]
    summary = summarise(*frames(steps, names=["a"]))
    drafter = summary["drafters"]["a"]
    assert (drafter["num_drafted"], drafter["num_verified"], drafter["num_accepted"]) == (5, 3, 3)
    assert drafter["acceptance_rate"] == 1.0
    assert drafter["no_draft_rate"] == drafter["silent_rate"] == pytest.approx(1 / 3)
    assert summary["num_trimmed"] == 1
    assert summary["acceptance_length"] == pytest.approx((1 + 3 + 1) / 3)


def test_agreement_of_a_pruned_proposal_with_the_targets_own_token_is_not_accepted() -> None:
    steps = [{"m": (3,), "drafted": (4,), "verified": (2,), "accepted": 2, "tested": (3,)}]
    drafter = summarise(*frames(steps, names=["a"]))["drafters"]["a"]
    assert drafter["num_accepted"] == 2
    assert drafter["acceptance_rate"] == 1.0
    assert drafter["solo_acceptance_length"] == 4.0
    assert drafter["acceptance_by_depth"] == [1.0, 1.0, 1.0]


def test_depths_that_were_not_drafted_are_censored() -> None:
    steps = [{"m": (m,), "drafted": (k,)} for m, k in ((1, 1), (1, 2), (2, 2))]
    drafter = summarise(*frames(steps, names=["a"]))["drafters"]["a"]
    assert drafter["acceptance_by_depth"] == [1.0, 0.5]


def test_nothing_drafted_gives_none_and_no_crash() -> None:
    summary = summarise(*frames([{"m": (0,), "drafted": (0,)}] * 4, names=["a"]))
    drafter = summary["drafters"]["a"]
    assert drafter["acceptance_rate"] is None
    assert drafter["token_share"] is None
    assert drafter["acceptance_by_depth"] == []
    assert drafter["win_rate"] == 0.0
    assert summary["no_win_rate"] == 1.0
    assert summary["acceptance_rate"] is None
    assert summary["acceptance_length"] == 1.0
    json.dumps(summary, allow_nan=False)


def test_empty_tables_give_none() -> None:
    summary = summarise(pd.DataFrame(), pd.DataFrame(), pd.DataFrame())
    assert summary["acceptance_length"] is summary["speedup"] is summary["no_win_rate"] is None
    assert summary["host_fraction"] is None
    assert summary["drafters"] == {}
    assert summary["num_prompts"] == 0
    json.dumps(summary, allow_nan=False)


def test_an_unmeasured_time_is_none_and_not_zero() -> None:
    prompts, steps, drafts = frames([{"m": (1,), "drafted": (2,)}], names=["a"])
    drafts["draft_ms"], steps["host_ms"] = None, np.nan
    summary = summarise(prompts, steps, drafts)
    assert summary["drafters"]["a"]["draft_ms_per_step"] is None
    assert summary["drafters"]["a"]["tokens_per_draft_s"] is None
    assert summary["host_ms_per_step"] is None
    json.dumps(summary, allow_nan=False)


def test_costs_are_per_step_and_per_token() -> None:
    steps = [{"m": (2, 0), "drafted": (3, 1)}, {"m": (0, 1), "drafted": (1, 1)}]
    summary = summarise(*frames(steps))
    assert summary["draft_ms_per_step"] == 2.0
    assert summary["verify_ms_per_step"] == 7.0
    assert summary["host_fraction"] == pytest.approx(0.1)
    assert summary["wasted_nodes_per_token"] == pytest.approx((6 - 3) / 5)
    assert summary["drafters"]["a"]["tokens_per_draft_s"] == pytest.approx(2 / 0.002)
    assert summary["drafters"]["b"]["marginal"] == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_accounting_closes_for_run_prompts_and_drafters(seed: int) -> None:
    steps = random_steps(seed, num_members=3)
    for step in steps[::7]:
        step["emitted"] = max(max(step["m"]), 1)
    prompts, step_table, drafts = frames(steps, names=["a", "b", "c"])
    for ids in [prompts["prompt_id"], *([one] for one in prompts["prompt_id"])]:
        own = [table[table["prompt_id"].isin(ids)] for table in (prompts, step_table, drafts)]
        summary = summarise(*own)
        assert summary["num_emitted"] == own[0]["output_ids"].map(len).sum()
        whole = summary["num_accepted"] + summary["num_steps"]
        assert summary["num_emitted"] == whole - summary["num_trimmed"]
        members = summary["drafters"].values()
        wins = sum(m["win_rate"] for m in members)
        assert wins + summary["no_win_rate"] == pytest.approx(1, abs=1e-12)
        assert sum(m["token_share"] for m in members) == pytest.approx(1, abs=1e-12)


def test_permuting_members_permutes_the_table_and_changes_nothing_else() -> None:
    steps = random_steps(3, num_members=3)
    order = [2, 0, 1]
    swapped = [
        {**step, **{key: [step[key][i] for i in order] for key in ("m", "drafted")}}
        for step in steps
    ]
    before = summarise(*frames(steps, names=["a", "b", "c"]))
    after = summarise(*frames(swapped, names=["c", "a", "b"]))
    assert list(after["drafters"]) == ["c", "a", "b"]
    assert after == before


def test_two_equal_drafters_share_the_wins_evenly() -> None:
    steps = [{"m": (m, m), "drafted": (4, 4)} for m in (0, 1, 4, 2)]
    drafters = summarise(*frames(steps))["drafters"]
    assert drafters["a"] == drafters["b"]
    assert drafters["a"]["win_rate"] == pytest.approx(3 / 8)
    assert drafters["a"]["sole_win_rate"] == 0
    assert drafters["a"]["token_share"] == 0.5
    assert drafters["a"]["marginal"] == 0


# prompts, baselines, categories


def timed(decode_s: float, baseline_s: float | None, num_baseline: int, **more: object) -> dict:
    ids = None if baseline_s is None else [7] * num_baseline
    return {"decode_s": decode_s, "baseline_decode_s": baseline_s, "baseline_ids": ids, **more}


def test_speedup_is_totals_over_totals_of_the_prompts_that_have_both() -> None:
    steps = [{"prompt": p, "m": (3,), "drafted": (3,)} for p in "qrs"]
    prompts = {"q": timed(1.0, 4.0, 4), "r": timed(3.0, 2.0, 4), "s": timed(100.0, None, 0)}
    summary = summarise(*frames(steps, names=["a"], prompts=prompts))
    assert summary["speedup"] == pytest.approx((8 / 4) / (8 / 6))
    assert summary["tokens_per_s"] == pytest.approx(12 / 104)
    assert summary["baseline_tokens_per_s"] == pytest.approx(8 / 6)
    low, high = summary["speedup_interval"]
    assert low == pytest.approx(2 / 3)
    assert high == pytest.approx(4)


def test_without_baseline_there_is_no_speedup_and_nothing_is_called_identical() -> None:
    summary = summarise(*frames([{"m": (1,), "drafted": (1,)}], names=["a"]))
    for name in ("speedup", "speedup_interval", "baseline_tokens_per_s", "num_identical"):
        assert summary[name] is None
    assert summary["tokens_per_s"] == 2.0


def test_failed_prompts_are_counted_and_otherwise_left_out() -> None:
    steps = [
        {"prompt": "good", "m": (2,), "drafted": (2,)},
        {"prompt": "bad", "m": (0,), "drafted": (9,)},
    ]
    prompts = {
        "good": {"is_identical": True},
        "bad": {"is_identical": None, "error": "out of memory", "decode_s": 50.0},
    }
    summary = summarise(*frames(steps, names=["a"], prompts=prompts))
    assert [summary[f"num_{what}"] for what in ("prompts", "failed", "identical")] == [2, 1, 1]
    assert summary["acceptance_length"] == 3.0
    assert summary["tokens_per_s"] == 3.0
    assert summary["drafters"]["a"]["acceptance_rate"] == 1.0
    assert summary["by_category"]["chat"]["num_prompts"] == 1


def test_categories_partition_the_prompts() -> None:
    steps = [{"prompt": p, "m": (m,), "drafted": (3,)} for p, m in (("q", 3), ("r", 0))]
    prompts = {"q": timed(1.0, 2.0, 4, category="code"), "r": timed(1.0, 0.5, 1, category="chat")}
    table = summarise(*frames(steps, names=["a"], prompts=prompts))["by_category"]
    code = {"num_prompts": 1, "acceptance_length": 4.0, "speedup": 2.0, "tokens_per_s": 4.0}
    chat = {"num_prompts": 1, "acceptance_length": 1.0, "speedup": 0.5, "tokens_per_s": 1.0}
    assert table == {
        "code": {**code, "tokens_per_step": {"a": 3.0}},
        "chat": {**chat, "tokens_per_step": {"a": 0.0}},
    }


def test_the_drafters_parts_and_the_targets_own_token_make_the_acceptance_length() -> None:
    summary = summarise(*frames(random_steps(3, 2)))
    parts = [numbers["tokens_per_step"] for numbers in summary["drafters"].values()]
    assert 1 + sum(parts) == pytest.approx(summary["acceptance_length"])
    assert [*summary["by_category"]["chat"]["tokens_per_step"].values()] == pytest.approx(parts)


def test_merged_runs_keep_prompts_of_the_same_name_apart() -> None:
    killed = {"p": {"error": "killed"}}
    first = frames([{"m": (3,), "drafted": (3,)}], names=["a"])
    second = frames([{"m": (1,), "drafted": (3,)}], names=["b"], prompts=killed)
    merged = [
        pd.concat([one.assign(run="0"), two.assign(run="1")], ignore_index=True)
        for one, two in zip(first, second, strict=True)
    ]
    summary = summarise(*merged)
    assert summary["num_prompts"] == 2
    assert summary["num_failed"] == 1
    assert summary["acceptance_length"] == 4.0
    assert list(summary["drafters"]) == ["a"]


# intervals, table, imports


def test_the_interval_holds_the_ratio_and_is_reproducible_in_any_order() -> None:
    rng = np.random.default_rng(1)
    denominator = rng.integers(5, 30, 40)
    columns = np.column_stack([denominator * rng.uniform(1, 3, 40), denominator])
    low, high = bootstrap(columns, pooled_ratio) or (0, 0)
    assert low < pooled_ratio(columns.sum(axis=0)) < high
    shuffled = columns[rng.permutation(40)]
    assert bootstrap(shuffled, pooled_ratio) == pytest.approx((low, high))
    narrow = bootstrap(columns, pooled_ratio, level=0.5) or (0, 0)
    assert low < narrow[0] < narrow[1] < high


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        steps = rng.integers(10, 30, 60)
        columns = np.column_stack([rng.poisson(2.0 * steps), steps])
        low, high = bootstrap(columns, pooled_ratio, num_resamples=300) or (0, 0)
        hits += low <= 2.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_there_is_no_interval_of_less_than_two_prompts() -> None:
    for rows in (np.array([[3.0, 1.0]]), np.zeros((0, 2)), np.array([[1.0, 0.0], [2.0, 0.0]])):
        assert bootstrap(rows, pooled_ratio) is None


def test_the_drafter_table_has_the_same_columns_for_all_and_none_for_what_is_missing() -> None:
    steps = [{"m": (2, 0), "drafted": (3, 0)}]
    table = drafter_table(summarise(*frames(steps, names=["a", "never"])))
    assert tuple(table.columns) == DRAFTER_COLUMNS
    assert table.loc[1, "drafter"] == "never"
    assert table.loc[1, "acceptance_rate"] is None
    assert table.loc[0, "acceptance_rate"] == pytest.approx(2 / 3)
    assert tuple(drafter_table({}).columns) == DRAFTER_COLUMNS


# the table of metrics


def test_every_metric_is_defined_once_and_drawn_with_a_unit() -> None:
    keys = [(metric.scope, metric.key) for metric in METRICS]
    assert len(set(keys)) == len(keys) and {scope for scope, _ in keys} == {"run", "drafter"}
    assert all(metric.meaning for metric in METRICS)
    assert all(metric.form and metric.unit for metric in METRICS if metric.title)


def own(key: str = "steps_seen", scope: str = "drafter", compute: Any = None) -> Metric:
    return Metric(
        key, "steps seen", ".0f", "steps", "rows", compute or (lambda m: len(m.rows)), scope
    )


def test_a_metric_of_ones_own_is_summarised_and_a_failing_one_is_missing() -> None:
    class Failing:
        key, title, form, unit, meaning, scope = "ratio", "ratio", ".2f", "", "none", "run"

        def __call__(self, tables: Any) -> float:
            return 1 / 0

    metrics = check_metrics([own(), Failing()])
    summary = summarise(*frames([{"m": (1, 0), "drafted": (1, 1)}]), metrics)
    assert summary["ratio"] is None
    assert [numbers["steps_seen"] for numbers in summary["drafters"].values()] == [1, 1]
    assert drafter_table(summary).columns[-1] == "steps_seen"
    assert metrics_of("drafter", "page", metrics)[-1].title == "steps seen"


@pytest.mark.parametrize(
    ("metric", "fault"),
    [
        (own("win_rate"), "key 'win_rate' of another metric"),
        (own(scope="prompt"), "a scope, run or drafter"),
        (object(), "has no key"),
    ],
)
def test_what_is_no_metric_is_refused_in_one_line(metric: Any, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as refused:
        check_metrics([metric])
    assert "\n" not in str(refused.value)


def test_analysis_needs_no_torch() -> None:
    rooms = "specens.analysis.metrics, specens.report.page, specens.replay.files"
    code = f"import sys, {rooms}; print({{'torch', 'transformers', 'hydra'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
