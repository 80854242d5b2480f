"""A plot is well-formed, and its curves are where the numbers say."""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree as ET

from benchmarks.plot import Labels, Point, line_plot

SVG: Final = "{http://www.w3.org/2000/svg}"


def curves_of(text: str) -> list[list[Point]]:
    root = ET.fromstring(text)  # noqa: S314  our own
    found = [one.attrib["points"].split() for one in root.iter(f"{SVG}polyline")]
    return [[Point(*(float(part) for part in point.split(","))) for point in points] for points in found]


def test_curves_rise_with_their_values_and_steps_of_one_factor_are_as_wide() -> None:
    drawn = {"low": [Point(10, 0), Point(100, 20), Point(1000, 40)], "high": [Point(10, 40), Point(1000, 50)]}
    low, high = curves_of(line_plot(drawn, Labels("a < b", "x", "y"), {"limit": 60}))
    assert low[0].y > low[1].y > low[2].y == high[0].y > high[1].y
    assert low[1].x - low[0].x == low[2].x - low[1].x > 0


def test_names_are_in_it_as_text() -> None:
    text = line_plot({"a & b": [Point(1, 1)]}, Labels("T", "X", "Y"), {"limit": 2})
    shown = {one.text for one in ET.fromstring(text).iter(f"{SVG}text")}  # noqa: S314  our own
    assert {"a & b", "T", "X", "Y", "limit"} <= shown
