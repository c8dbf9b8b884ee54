"""Figures say what they show: a title, axes with units, every drafter by name, the values of the table."""

from __future__ import annotations

import math
import sys
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from specens.analysis import canvas, plots, team_plots
from specens.decoding.costs import CostTable
from specens.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("ngram", "heads", "silent")


def drafter(win: float | None, **changes: Any) -> dict[str, Any]:
    numbers = {"win_rate": win, "sole_win_rate": win and win / 2, "token_share": win, "draft_ms_per_step": 2.0}
    return {**numbers, "acceptance_by_depth": [0.5, None, 0.25], **changes}


SUMMARY: dict[str, Any] = {
    "no_win_rate": 0.25,
    "drafters": {
        "ngram": drafter(0.5, draft_ms_per_step=0.03),
        "heads": drafter(0.25),
        "silent": drafter(None, token_share=0.0, draft_ms_per_step=0.0, acceptance_by_depth=[]),
    },
    "by_category": {
        "chat": {"speedup": 1.5, "tokens_per_s": 30.0, "acceptance_length": 2.0},
        "qa": {"speedup": None, "tokens_per_s": 10.0, "acceptance_length": None},
    },
}


def team_table(fastest: str = "ngram") -> pd.DataFrame:
    """Every team of `NAMES`: 10 tokens/s more with `fastest`, 1 fewer per member."""
    teams = [team for size in range(len(NAMES) + 1) for team in combinations(NAMES, size)]
    speeds = [20.0 + 10 * (fastest in team) - len(team) for team in teams]
    return pd.DataFrame(
        {
            "team": ["+".join(team) or "plain" for team in teams],
            "num_members": [len(team) for team in teams],
            "tokens_per_s": speeds,
            "speedup": np.array(speeds) / 20,
        }
    )


def sweep_table() -> pd.DataFrame:
    rows = [(layout, nodes) for layout in ("rows", "tree") for nodes in (4, 16)]
    table = pd.DataFrame(rows, columns=["layout", "budget.max_nodes"])
    return table.assign(acceptance_length=2.0, tokens_per_s=[10.0, 20, 30, 40], baseline_tokens_per_s=25.0)


def sweep_drafters() -> pd.DataFrame:
    rows = [(nodes, name, 0.1 * nodes) for nodes in (2, 4) for name in NAMES]
    return pd.DataFrame(rows, columns=["budget.max_nodes", "drafter", "token_share"])


def member_values() -> pd.DataFrame:
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
    return pd.concat([team_table().assign(width_price=price) for price in (1.0, 0.5, 0.0)], ignore_index=True)


SQUARE = pd.DataFrame([[0.5, 0.125], [math.nan, 1.0]], index=["ngram", "heads"], columns=["ngram", "heads"])

COSTS = CostTable(verify_ms=((0, 10.0), (64, 40.0)), draft_ms={"ngram": ((1, 0.1),)}, host_ms=1.0)

FIGURES = {
    "win_rates": lambda: plots.win_rates(SUMMARY),
    "share_against_time": lambda: plots.share_against_time(SUMMARY),
    "acceptance_by_depth": lambda: plots.acceptance_by_depth(SUMMARY),
    "by_category": lambda: plots.by_category(SUMMARY),
    "teams": lambda: team_plots.teams(team_table()),
    "member_values": lambda: team_plots.member_values(member_values()),
    "over_width_price": lambda: team_plots.over_width_price(width_prices()),
    "what_if": lambda: team_plots.what_if({"measured": team_table(), "modelled: GPU": team_table("heads")}),
    "pairs": lambda: team_plots.pairs(SQUARE, "Right together", rows="right", columns="also right"),
    "sweep": lambda: plots.sweep(sweep_table(), "budget.max_nodes", ["tokens_per_s"], by=["layout"]),
    "sweep_words": lambda: plots.sweep(sweep_table(), "layout", ["acceptance_length"], by=["budget.max_nodes"]),
    "sweep_drafters": lambda: plots.sweep_drafters(sweep_drafters(), "budget.max_nodes", "token_share"),
    "forward_times": lambda: team_plots.forward_times({"measured": COSTS}),
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
            assert np.all(np.isnan(values) | ((low <= values) & (values <= high))), line.get_label()


@pytest.mark.parametrize(
    "name",
    [
        *("win_rates", "share_against_time", "acceptance_by_depth", "teams", "what_if"),
        *("member_values", "over_width_price", "sweep_drafters"),
    ],
)
def test_every_drafter_is_named_in_the_figure(name: str):
    said = texts(FIGURES[name]())
    assert all(drafter in said for drafter in NAMES)


def test_bars_are_the_summarys_numbers_and_what_was_not_measured_is_a_dash():
    figure = plots.win_rates(SUMMARY)
    lengths = [bar.get_width() for bar in figure.axes[0].patches]
    assert lengths[:2] == [25, 12.5] and lengths[3] == 25  # won alone; nobody
    assert lengths[4:6] == [25, 12.5] and lengths[7] == 0  # shared
    said = texts(figure).splitlines()
    assert "50%" in said and "-" in said and "nan%" not in said


def test_a_category_that_was_not_measured_keeps_its_row():
    for axes in plots.by_category(SUMMARY).axes:
        assert axes.get_ylim() == (1.5, -0.5)
        assert [text.get_text() for text in axes.texts].count("-") == 1


def test_times_are_on_a_log_axis_only_if_every_drafter_took_some():
    assert plots.share_against_time(SUMMARY).axes[0].get_xscale() == "linear"
    timed = {**SUMMARY, "drafters": {name: SUMMARY["drafters"][name] for name in ("ngram", "heads")}}
    assert plots.share_against_time(timed).axes[0].get_xscale() == "log"


def test_categories_without_a_baseline_show_tokens_per_second():
    def unmeasured(numbers: dict[str, Any]) -> dict[str, Any]:
        return {**numbers, "speedup": None}

    summary = {"by_category": {name: unmeasured(numbers) for name, numbers in SUMMARY["by_category"].items()}}
    assert plots.by_category(SUMMARY).axes[0].get_xlabel() == "x plain decoding"
    assert plots.by_category(summary).axes[0].get_xlabel() == "tokens per second"


def test_the_fastest_team_is_at_the_top_and_its_members_are_marked():
    figure = team_plots.teams(team_table(), most=3)
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


def test_a_figure_of_some_teams_does_not_claim_to_show_all():
    assert "every team" in team_plots.teams(team_table()).get_suptitle()
    assert "the 3 fastest teams" in team_plots.teams(team_table(), most=3).get_suptitle()


def test_what_if_compares_the_same_team_in_one_row():
    axes = team_plots.what_if({"measured": team_table(), "modelled: GPU": team_table("heads")}).axes[1]
    first, second = ([float(x) for x in line.get_xdata()] for line in axes.lines[:2])
    assert first == sorted(first) and first[-1] == pytest.approx(29 / 20)
    assert second[-1] == pytest.approx(19 / 20)  # ngram alone: without the heads it is the other table's loser


def test_a_members_value_is_drawn_with_its_interval_in_both_units():
    calls, seconds = FIGURES["member_values"]().axes
    assert calls.lines[0].get_xdata().tolist() == [8.0] * 3 and seconds.lines[0].get_xdata().tolist() == [-0.5] * 3
    ends = calls.collections[0].get_segments()[0][:, 0].tolist()  # pyright: ignore
    assert ends == [7.0, 9.0]


def test_what_is_modelled_is_called_so_in_the_figure():
    for name in ("what_if", "over_width_price"):
        assert FIGURES[name]().get_suptitle().startswith("Modelled")


def test_a_heat_map_says_its_numbers_and_leaves_out_what_was_not_measured():
    said = texts(FIGURES["pairs"]()).splitlines()
    assert {"50", "12", "100", "-"} <= set(said) and "nan" not in said


def test_a_sweep_draws_a_line_per_combination_of_the_other_words_and_the_baseline():
    axes = FIGURES["sweep"]().axes[0]
    assert axes.get_legend_handles_labels()[1] == ["layout=rows", "layout=tree", "plain decoding"]
    assert [list(map(float, line.get_ydata())) for line in axes.lines[:2]] == [[10, 20], [30, 40]]


def test_width_is_priced_in_plain_forwards():
    line = FIGURES["forward_times"]().axes[0].lines[0]
    assert line.get_ydata()[0] == 1 and line.get_ydata()[-1] == 4


def test_a_ninth_drafter_repeats_a_colour_and_no_marker_is_missing():
    many = {f"d{index}": drafter(0.1) for index in range(9)}
    figure = plots.acceptance_by_depth({"drafters": many})
    assert len(figure.axes[0].lines) == 9
    assert canvas.colours(many)["d8"] == canvas.colours(many)["d0"] != canvas.colours(many)["d1"]


@pytest.mark.parametrize(
    "draw", [plots.win_rates, plots.share_against_time, plots.acceptance_by_depth, plots.by_category]
)
def test_nothing_to_draw_is_one_clear_line(draw):
    with pytest.raises(UserError, match="nothing to compare"):
        draw({"drafters": {}, "no_win_rate": None, "by_category": {}})


def test_a_missing_matplotlib_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'specens\[notebooks\]'") as caught:
        plots.win_rates(SUMMARY)
    assert "\n" not in str(caught.value)
