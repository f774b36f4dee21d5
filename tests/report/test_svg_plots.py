"""Plots as SVG: every point is there, at its place, and what cannot be drawn is left out."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from modicum.report.svg_plots import HEIGHT, WIDTH, Axis, PlottedLine, plot

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
X, Y = Axis("x"), Axis("y")


def circles(drawn: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(drawn)
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_points_are_inside_and_in_order(points: list[tuple[float, float]]) -> None:
    drawn = circles(plot([PlottedLine("a", points, 0)], X, Y))
    assert len(drawn) == len(points)
    for (x, y), (a, b) in zip(points, drawn, strict=True):
        assert 0 < a < WIDTH
        assert 0 < b < HEIGHT
        for (other_x, other_y), (c, d) in zip(points, drawn, strict=True):
            assert not (x < other_x and a > c)
            assert not (y < other_y and b < d)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    line = PlottedLine("a", [(1e-4, 1.0), (1e-3, 2.0), (1e-2, 3.0)], 0)
    left, middle, right = (x for x, _ in circles(plot([line], Axis("rate", log=True), Y)))
    assert math.isclose(middle - left, right - middle, abs_tol=0.2)


def test_what_no_axis_can_show_is_left_out() -> None:
    points = [(0.0, 1.0), (-1.0, 1.0), (1.0, math.nan), (1.0, math.inf), (2.0, 1.0)]
    drawn = plot([PlottedLine("a", points, 0)], Axis("rate", log=True), Y)
    assert len(circles(drawn)) == 1
    assert plot([PlottedLine("a", points[:4], 0)], Axis("rate", log=True), Y) == ""
    assert plot([], X, Y) == ""


def test_text_is_no_markup() -> None:
    line = PlottedLine("<b>&", [(1, 2)], 0, labels=['<script>"'], crosses=[1])
    drawn = plot([line], Axis("<x>"), Axis("&y"))
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    assert "<b>" not in drawn


def test_a_run_without_a_loss_is_a_cross_at_its_place() -> None:
    line = PlottedLine("a", [(1, 2), (3, 2)], 0, crosses=[2])
    drawn = plot([line], X, Y)
    [cross] = re.findall(r'class="cross" x="([0-9.]+)"', drawn)
    left, right = (x for x, _ in circles(drawn))
    assert math.isclose(float(cross), (left + right) / 2, abs_tol=0.2)
