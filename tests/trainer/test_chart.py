"""Curves as SVG: what is drawn where."""

import re

import pytest

from turngym_trainer.chart import HEIGHT, WIDTH, Chart, Point, Series, figure, interval_bar, short, thinned, ticks


def curve(*heights, label="success"):
    return Series(label, tuple(Point(float(at), height) for at, height in enumerate(heights, 1)))


def corners(drawn, element="polyline"):
    return [
        [tuple(map(float, corner.split(","))) for corner in points.split()]
        for points in re.findall(rf'<{element} points="([^"]*)"', drawn)
    ]


def test_a_curve_goes_from_left_to_right_and_up_where_it_rises():
    ((first, second, third),) = corners(figure(Chart("Success", (curve(0.0, 1.0, 0.5),))))
    assert first[0] < second[0] < third[0] <= WIDTH
    assert 0 <= second[1] < third[1] < first[1] <= HEIGHT
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.1)


def test_a_missing_value_is_a_gap():
    assert [len(stretch) for stretch in corners(figure(Chart("Loss", (curve(1.0, 2.0, None, 3.0),))))] == [2, 1]


def test_a_chart_has_everything_within_its_frame():
    series = Series("validation", (Point(1, 0.4, 0.3, 0.5), Point(9, 0.6, 0.5, 1.0)))
    banded = Series("mean", (Point(1, 0.1, -0.2, 0.3), Point(5, 0.2, 0.1, 0.3)), intervals="band")
    chart = Chart("Success", (series, banded), rules=(("floor", 0.17), ("ceiling", 1.0)), marks=(("alarm", 12),))
    drawn = figure(chart)
    heights = [float(at) for at in re.findall(r'\by[12]?="([^"]*)"', drawn)]
    places = [float(at) for at in re.findall(r'\bx[12]?="([^"]*)"', drawn)]
    places += [x for line in corners(drawn) + corners(drawn, "polygon") for x, _ in line]
    heights += [y for line in corners(drawn) + corners(drawn, "polygon") for _, y in line]
    assert 0 <= min(heights) <= max(heights) <= HEIGHT
    assert 0 <= min(places) <= max(places) <= WIDTH
    for word in ("floor", "ceiling", "alarm", "validation 0.6", "mean 0.2"):
        assert word in drawn
    assert len(corners(drawn, "polygon")[0]) == 4


def test_powers_of_ten_are_as_far_apart():
    ((first, second, third),) = corners(figure(Chart("Norm", (curve(0.0, 1.0, 10.0, 100.0),), log=True)))
    assert first[1] - second[1] == pytest.approx(second[1] - third[1], abs=0.1)


@pytest.mark.parametrize("heights", [(2.0,), (0.0, 0.0), (1e9, 1e9), (-3.0, -3.0)])
def test_what_does_not_move_is_drawn_in_the_middle(heights):
    (points,) = corners(figure(Chart("Constant", (curve(*heights),))))
    assert all(0.3 * HEIGHT < y < 0.7 * HEIGHT for _, y in points)


@pytest.mark.parametrize("series", [(), (curve(),), (curve(None, None),)])
def test_nothing_measured_is_said(series):
    assert "Nothing was measured yet." in figure(Chart("Success", series))


def test_a_long_curve_is_thinned_and_keeps_its_spike():
    points = [Point(at, 100.0 if at == 7_777 else at % 10) for at in range(20_000)]
    kept = thinned(points)
    assert len(kept) <= 500
    assert kept == sorted(kept, key=lambda point: point.x)
    assert max(point.y for point in kept) == 100.0
    assert thinned(points[:500]) == points[:500]
    assert [point.y for point in thinned([Point(at, None) for at in range(1_000)])] == [None] * 250


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (-0.3, 1.1, (0, 0.5, 1.0)),
        (1, 100, (20, 40, 60, 80, 100)),
        (0.0011, 0.0019, (0.0012, 0.0014, 0.0016, 0.0018)),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (-2.5, "−2.5"),
        (12, "12"),
        (51_200, "51.2k"),
        (1_234_567, "1.23M"),
        (1e-5, "1e−05"),
    ],
)
def test_numbers_are_short(value, expected):
    assert short(value) == expected


def test_an_interval_bar_lies_between_0_and_1():
    drawn = interval_bar(0.5, -0.1, 0.75, rules=(0.0, 1.0))
    places = [float(at) for at in re.findall(r'\b(?:c?x[12]?)="([^"]*)"', drawn)]
    assert (min(places), max(places)) == (6.0, 214.0)
    assert 'cx="110.0"' in drawn
    assert "stroke-width" not in interval_bar(0.5, None, None)
