"""Where the marks of charts lie, by hand."""

import pytest
from sample_episodes import BOARD

from turngym_leaderboard.pages.interval_chart import SHARES, Scale, scatter, score_scale, strip
from turngym_leaderboard.pages.render import dollars, number
from turngym_leaderboard.pages.return_chart import return_chart
from turngym_leaderboard.pages.views import BoardRow, EpisodeView, Estimate, TurnView


def row(name: str, score: Estimate | None, price: float | None) -> BoardRow:
    return BoardRow(name, name, "checkpoint", "alice", score, "", None, (), price)


def episode(*totals: float) -> EpisodeView:
    turns = tuple(TurnView(BOARD, "", (), "", 0, 0.0, total) for total in totals)
    return EpisodeView("a-1", "Episode 1", "agent", "sokoban", "", "solved", "", (), turns, None)


def test_an_interval_lies_between_the_ends_of_its_strip() -> None:
    marks = strip(Estimate(0.5, 0.25, 0.75), SHARES)
    # 8 and 192 are the ends: 8 + 184 / 4 = 54.
    assert (marks.low, marks.value, marks.high) == (54.0, 100.0, 146.0)
    assert marks.told == "0.500, 95 % interval 0.250 to 0.750"


def test_scores_are_drawn_from_floor_to_ceiling_and_as_far_beyond_as_they_reach() -> None:
    assert score_scale([None]) == Scale(0.0, 1.0, 8, 192)
    wide = score_scale([Estimate(0.0, -0.5, 0.4), None, Estimate(1.2, 0.9, 1.5)])
    assert (wide.low, wide.high) == (-0.5, 1.5)
    assert (wide.at(0.0), wide.at(1.0)) == (54.0, 146.0)


def test_what_lies_beyond_a_scale_is_drawn_at_its_end() -> None:
    assert SHARES.at(-3.0) == 8.0
    assert SHARES.at(7.0) == 192.0


def test_prices_are_logarithmic_and_rows_without_one_are_left_out() -> None:
    drawn = scatter(
        [
            row("cheap", Estimate(0.5, 0.4, 0.6), 10.0),
            row("dear", Estimate(1.0, 0.9, 1.0), 1_000.0),
            row("middle", Estimate(0.0, 0.0, 0.1), 100.0),
            row("free", Estimate(0.5, 0.4, 0.6), 0.0),
            row("unknown", Estimate(0.5, 0.4, 0.6), None),
            row("scoreless", None, 10.0),
        ]
    )
    assert drawn is not None
    assert [dot.name for dot in drawn.dots] == ["cheap", "dear", "middle"]
    cheap, dear, middle = drawn.dots
    assert (cheap.x, middle.x, dear.x) == (76.0, 342.0, 608.0)
    # From 292 at score 0 to 24 at score 1.
    assert (cheap.y, dear.y, middle.y) == (158.0, 24.0, 292.0)
    assert (cheap.right, dear.right) == (True, False)
    assert drawn.across == ((10.0, 76.0), (100.0, 342.0), (1_000.0, 608.0))
    assert [words for words, _ in drawn.up] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_a_single_price_has_room_on_both_sides() -> None:
    drawn = scatter([row("alone", Estimate(0.5, 0.4, 0.6), 1.0)])
    assert drawn is not None
    assert drawn.across == ((0.1, 76.0), (1.0, 342.0), (10.0, 608.0))


def test_without_prices_there_is_no_scatter() -> None:
    assert scatter([row("unknown", Estimate(0.5, 0.4, 0.6), None)]) is None


def test_returns_are_drawn_turn_by_turn_over_the_longer_episode() -> None:
    chart = return_chart([episode(-1.0, 1.0), episode(0.0, -1.0, -1.0, 1.0)])
    # 588 wide in 4 steps; from 6 at the highest return, 1, to 66 at the lowest, −1.
    assert (chart.left, chart.step, chart.zero) == (6, 147.0, 36.0)
    assert chart.lines == (
        "6.0,66.0 153.0,6.0 300.0,6.0",
        "6.0,36.0 153.0,66.0 300.0,66.0 447.0,6.0 594.0,6.0",
    )
    assert chart.told == "Return by turn; at the end 1 and 1"


@pytest.mark.parametrize("totals", [(), (0.0,)])
def test_a_return_that_never_moves_is_a_line_in_the_middle(totals) -> None:
    chart = return_chart([episode(*totals)])
    assert chart.zero == 36.0
    assert {point.split(",")[1] for point in chart.lines[0].split()} == {"36.0"}


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.00001, "$0.00001"), (0.0000534, "$0.000053"), (0.048, "$0.048"), (1.0, "$1"), (1234.0, "$1,200")],
)
def test_prices_are_told_to_two_digits_however_small(value, said) -> None:
    assert dollars(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(None, "–"), (0.0, "0"), (-0.001, "0"), (-0.1, "−0.1"), (1234.5, "1,234.5"), (10.0, "10")]
)
def test_numbers_have_no_more_zeros_than_they_need_and_a_true_minus(value, said) -> None:
    assert number(value) == said
