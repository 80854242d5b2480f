"""Line plots as SVG files, written by hand: no more than a curve over a logarithmic axis needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 44, 52
COLOURS = ("#1b6ca8", "#d1603d", "#3a7d44", "#7a5195", "#555555")
Scale = Callable[[float], float]


class Point(NamedTuple):
    """Where a curve goes through."""

    x: float
    y: float


class Labels(NamedTuple):
    """What stands above, below and beside."""

    title: str
    x: str
    y: str


def line_plot(curves: Mapping[str, Sequence[Point]], labels: Labels, ceiling: Mapping[str, float]) -> str:
    """Return an SVG of curves over a logarithmic x axis, y from 0, with named horizontal lines (``ceiling``)."""
    xs = [point.x for points in curves.values() for point in points]
    top = 1.1 * max([*ceiling.values(), *(point.y for points in curves.values() for point in points)])
    low, high = math.log(min(xs)), math.log(max(xs))
    to_x: Scale = lambda x: LEFT + (math.log(x) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)  # noqa: E731
    to_y: Scale = lambda y: HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)  # noqa: E731  two formulas
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, labels.title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, labels.x, anchor="middle"),
        _text(LEFT - 44, TOP - 8, labels.y),
        *(_x_tick(to_x(x), x) for x in sorted(set(xs))),
        *(_y_tick(to_y(y), y) for y in _round_steps(top)),
        *(_ceiling(to_y(y), name) for name, y in ceiling.items()),
        *(
            _curve([Point(to_x(x), to_y(y)) for x, y in points], name, COLOURS[number % len(COLOURS)], number)
            for number, (name, points) in enumerate(curves.items())
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curve(points: Sequence[Point], name: str, colour: str, number: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    legend_x, legend_y = WIDTH - RIGHT + 16, TOP + 18 * (number + 1)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
        f'<rect x="{legend_x}" y="{legend_y - 9}" width="14" height="4" fill="{colour}"/>'
        + _text(legend_x + 20, legend_y - 3, name)
    )


def _ceiling(y: float, name: str) -> str:
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-dasharray="5 4"/>'
    return line + _text(LEFT + 6, y - 6, name)


def _x_tick(at: float, value: float) -> str:
    y = HEIGHT - BOTTOM
    return f'<path d="M{at:.1f} {y}v5" stroke="#444"/>' + _text(at, y + 18, _short(value), anchor="middle")


def _y_tick(at: float, value: float) -> str:
    return f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>' + _text(
        LEFT - 6, at + 4, f"{value:g}", anchor="end"
    )


def _round_steps(top: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(top))
    step = next(one for one in (step / 5, step / 2, step, 2 * step) if top / one <= 8)  # noqa: PLR2004  grid lines
    return [number * step for number in range(int(top / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004  as people write it
