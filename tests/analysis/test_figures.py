"""Figures name what they show: a title, axes with units, every drafter, the values of the table."""

from __future__ import annotations

import math
import sys
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from specens.analysis.figures import canvas, run, subsets
from specens.analysis.figures.tree import token_tree
from specens.decoding.budgets.costs import CostTable
from specens.decoding.types import TokenTree, Verdict
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("ngram", "heads", "idle")


def drafter(win: float | None, **changes: Any) -> dict[str, Any]:
    wins = {"win_rate": win, "sole_win_rate": win and win / 2, "token_share": win}
    others = {"draft_ms_per_step": 2.0, "acceptance_by_depth": [0.5, None, 0.25]}
    return {**wins, **others, **changes}


SUMMARY: dict[str, Any] = {
    "no_win_rate": 0.25,
    "drafters": {
        "ngram": drafter(0.5, draft_ms_per_step=0.03),
        "heads": drafter(0.25),
        "idle": drafter(None, token_share=0.0, draft_ms_per_step=0.0, acceptance_by_depth=[]),
    },
    "by_category": {
        "chat": {"speedup": 1.5, "tokens_per_s": 30.0, "acceptance_length": 2.0},
        "qa": {"speedup": None, "tokens_per_s": 10.0, "acceptance_length": None},
    },
}


def subset_table(fastest: str = "ngram") -> pd.DataFrame:
    """Every subset of `NAMES`: 10 tokens/s more with `fastest`, 1 fewer per member."""
    known = [names for size in range(len(NAMES) + 1) for names in combinations(NAMES, size)]
    speeds = [20.0 + 10 * (fastest in names) - len(names) for names in known]
    return pd.DataFrame(
        {
            "subset": ["+".join(names) or "AR" for names in known],
            "num_members": [len(names) for names in known],
            "tokens_per_s": speeds,
            "speedup": np.array(speeds) / 20,
        }
    )


def sweep_table() -> pd.DataFrame:
    rows = [(layout, nodes) for layout in ("rows", "tree") for nodes in (4, 16)]
    table = pd.DataFrame(rows, columns=["layout", "budget.max_nodes"])
    speeds = {"tokens_per_s": [10.0, 20, 30, 40], "baseline_tokens_per_s": 25.0}
    return table.assign(acceptance_length=2.0, **speeds)


def sweep_drafters() -> pd.DataFrame:
    rows = [(nodes, name, 0.1 * nodes) for nodes in (2, 4) for name in NAMES]
    return pd.DataFrame(rows, columns=["budget.max_nodes", "drafter", "token_share"])


def contributions() -> pd.DataFrame:
    rows = []
    for name in NAMES:
        row: dict[str, Any] = {"member": name}
        for kind in ("shapley", "leave_one_out"):
            for unit, value in (("calls", 8.0), ("s", -0.5)):
                key = f"{kind}_{unit}"
                row |= {key: value, f"{key}_low": value - 1, f"{key}_high": value + 1}
        rows.append(row)
    return pd.DataFrame(rows)


def width_prices() -> pd.DataFrame:
    tables = [subset_table().assign(width_price=price) for price in (1.0, 0.5, 0.0)]
    return pd.concat(tables, ignore_index=True)


PAIR = ["ngram", "heads"]
SQUARE = pd.DataFrame([[0.5, 0.125], [math.nan, 1.0]], index=PAIR, columns=PAIR)

TABLES = {"measured": subset_table(), "modelled: GPU": subset_table("heads")}
NODES = "budget.max_nodes"

COSTS = CostTable(verify_ms=((0, 10.0), (64, 40.0)), draft_ms={"ngram": ((1, 0.1),)}, host_ms=1.0)

FIGURES = {
    "win_rates": lambda: run.win_rates(SUMMARY),
    "share_against_time": lambda: run.share_against_time(SUMMARY),
    "acceptance_by_depth": lambda: run.acceptance_by_depth(SUMMARY),
    "by_category": lambda: run.by_category(SUMMARY),
    "subsets": lambda: subsets.subsets(subset_table()),
    "contributions": lambda: subsets.contributions(contributions()),
    "over_width_price": lambda: subsets.over_width_price(width_prices()),
    "what_if": lambda: subsets.what_if(TABLES),
    "pairs": lambda: subsets.pairs(SQUARE, "Right together", rows="right", columns="also right"),
    "sweep": lambda: run.sweep(sweep_table(), NODES, ["tokens_per_s"], by=["layout"]),
    "sweep_texts": lambda: run.sweep(sweep_table(), "layout", ["acceptance_length"], by=[NODES]),
    "sweep_drafters": lambda: run.sweep_drafters(sweep_drafters(), NODES, "token_share"),
    "forward_times": lambda: subsets.forward_times({"measured": COSTS}),
}


def texts(figure: Figure) -> str:
    """All the text on a figure, drawn once so that ticks and legends exist."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    return "\n".join(part.get_text() for part in figure.findobj(Text) if isinstance(part, Text))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_with_title_and_labelled_axes_at_notebook_width(name: str):
    figure = FIGURES[name]()
    assert texts(figure)  # a layout that does not fit would warn, and a warning is an error
    assert figure.get_suptitle() and figure.get_figwidth() == canvas.WIDTH
    assert any(axes.get_xlabel() for axes in figure.axes)
    for axes in figure.axes:
        assert axes.get_xlabel() or axes.get_ylabel() or axes.get_xticklabels()


@pytest.mark.parametrize("name", FIGURES)
def test_no_line_leaves_its_panel(name: str):
    for axes in FIGURES[name]().axes:
        low, high = sorted(axes.get_ylim())
        for line in (line for line in axes.lines if line.get_transform() == axes.transData):
            values = np.asarray(line.get_ydata(), float)
            inside = (low <= values) & (values <= high)
            assert np.all(np.isnan(values) | inside), line.get_label()


@pytest.mark.parametrize(
    "name",
    [
        *("win_rates", "share_against_time", "acceptance_by_depth", "subsets", "what_if"),
        *("contributions", "over_width_price", "sweep_drafters"),
    ],
)
def test_every_drafter_is_named_in_the_figure(name: str):
    shown = texts(FIGURES[name]())
    assert all(drafter in shown for drafter in NAMES)


def test_bars_are_the_summarys_numbers_and_what_was_not_measured_is_a_dash():
    figure = run.win_rates(SUMMARY)
    lengths = [bar.get_width() for bar in figure.axes[0].patches]
    assert lengths[:2] == [25, 12.5] and lengths[3] == 25  # won alone; no drafter
    assert lengths[4:6] == [25, 12.5] and lengths[7] == 0  # shared
    shown = texts(figure).splitlines()
    assert "50%" in shown and "-" in shown and "nan%" not in shown


def test_a_category_that_was_not_measured_keeps_its_row():
    for axes in run.by_category(SUMMARY).axes:
        assert axes.get_ylim() == (1.5, -0.5)
        assert [text.get_text() for text in axes.texts].count("-") == 1


def test_times_are_on_a_log_axis_only_if_every_drafter_took_some():
    assert run.share_against_time(SUMMARY).axes[0].get_xscale() == "linear"
    timed = {**SUMMARY, "drafters": {name: SUMMARY["drafters"][name] for name in PAIR}}
    assert run.share_against_time(timed).axes[0].get_xscale() == "log"


def test_categories_without_a_baseline_show_tokens_per_second():
    known = SUMMARY["by_category"].items()
    summary = {"by_category": {name: {**numbers, "speedup": None} for name, numbers in known}}
    assert run.by_category(SUMMARY).axes[0].get_xlabel() == "x AR decoding"
    assert run.by_category(summary).axes[0].get_xlabel() == "tokens per second"


def test_the_fastest_subset_is_at_the_top_and_its_members_are_marked():
    figure = subsets.subsets(subset_table(), most=3)
    matrix, dots = figure.axes
    speeds = dots.collections[-1].get_offsets()[:, 0].tolist()  # pyright: ignore
    assert speeds == [28.0, 28.0, 29.0]  # ngram alone last, at the top
    filled = {
        tuple(map(int, place))
        for group in matrix.collections
        if group.get_sizes()[0] == 60  # pyright: ignore
        for place in group.get_offsets()  # pyright: ignore
    }
    assert (0, 2) in filled and {column for column, row in filled if row == 2} == {0}


def test_a_figure_of_some_subsets_does_not_claim_to_show_all():
    assert "every subset" in subsets.subsets(subset_table()).get_suptitle()
    assert "the 3 fastest subsets" in subsets.subsets(subset_table(), most=3).get_suptitle()


def test_what_if_compares_the_same_subset_in_one_row():
    axes = subsets.what_if(TABLES).axes[1]
    first, second = ([float(x) for x in line.get_xdata()] for line in axes.lines[:2])
    assert first == sorted(first) and first[-1] == pytest.approx(29 / 20)
    assert second[-1] == pytest.approx(19 / 20)  # ngram alone, which the other table slows down


def test_a_members_value_is_drawn_with_its_interval_in_both_units():
    calls, seconds = FIGURES["contributions"]().axes
    assert calls.lines[0].get_xdata().tolist() == [8.0] * 3
    assert seconds.lines[0].get_xdata().tolist() == [-0.5] * 3
    ends = calls.collections[0].get_segments()[0][:, 0].tolist()  # pyright: ignore
    assert ends == [7.0, 9.0]


def test_what_is_modelled_is_called_so_in_the_figure():
    for name in ("what_if", "over_width_price"):
        assert FIGURES[name]().get_suptitle().startswith("Modelled")


def test_a_heat_map_shows_its_numbers_and_leaves_out_what_was_not_measured():
    shown = texts(FIGURES["pairs"]()).splitlines()
    assert {"50", "12", "100", "-"} <= set(shown) and "nan" not in shown


def test_a_sweep_draws_a_line_per_combination_of_the_other_overrides_and_the_baseline():
    axes = FIGURES["sweep"]().axes[0]
    assert axes.get_legend_handles_labels()[1] == ["layout=rows", "layout=tree", "AR decoding"]
    assert [list(map(float, line.get_ydata())) for line in axes.lines[:2]] == [[10, 20], [30, 40]]


def test_width_is_priced_in_ar_forwards():
    line = FIGURES["forward_times"]().axes[0].lines[0]
    assert line.get_ydata()[0] == 1 and line.get_ydata()[-1] == 4


def test_a_ninth_drafter_repeats_a_colour_and_no_marker_is_missing():
    many = {f"d{index}": drafter(0.1) for index in range(9)}
    figure = run.acceptance_by_depth({"drafters": many})
    assert len(figure.axes[0].lines) == 9
    assert canvas.colours(many)["d8"] == canvas.colours(many)["d0"] != canvas.colours(many)["d1"]


@pytest.mark.parametrize(
    "draw", [run.win_rates, run.share_against_time, run.acceptance_by_depth, run.by_category]
)
def test_nothing_to_draw_is_one_clear_line(draw):
    with pytest.raises(UserError, match="nothing to compare"):
        draw({"drafters": {}, "no_win_rate": None, "by_category": {}})


def test_a_missing_matplotlib_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'specens\[notebooks\]'") as caught:
        run.win_rates(SUMMARY)
    assert "\n" not in str(caught.value)


TREE = TokenTree(  # a, and then b or c; both of the root's own children, a and d
    token_ids=(1, 2, 3, 4), parents=(-1, 0, 0, -1), depths=(1, 2, 2, 1), owners=(0b11, 1, 2, 2)
)


def test_a_token_tree_shows_every_token_who_proposed_it_and_what_was_accepted():
    figure = token_tree(TREE, Verdict((0, 2), 9), list("abcd"), PAIR, "start", "end")
    boxes = {text.get_text(): text for text in figure.axes[0].texts}
    assert set(boxes) == {"a", "b", "c", "d", "start", "end"}
    columns = {text: box.get_position()[0] for text, box in boxes.items()}
    assert columns == {"start": 0, "a": 1, "d": 1, "b": 2, "c": 2, "end": 3}
    assert len({box.get_position() for box in boxes.values()}) == len(boxes)

    def frame(text: str) -> float:
        patch = boxes[text].get_bbox_patch()
        assert patch is not None
        return patch.get_linewidth()

    bold = {text for text in boxes if frame(text) == frame("start")}
    assert bold == {"start", "a", "c", "end"}
    owned = {str(dots.get_label()): dots.get_offsets() for dots in figure.axes[0].collections}
    assert {name: len(np.asarray(places)) for name, places in owned.items()} == {
        "ngram": 2,  # a, b
        "heads": 3,  # a, c, d
    }


def test_a_token_tree_of_which_nothing_was_accepted_ends_in_the_targets_token():
    figure = token_tree(TREE, Verdict((), 9), list("abcd"), PAIR, "start", "end")
    places = [text.get_position() for text in figure.axes[0].texts]
    assert len(set(places)) == len(places) == 6
