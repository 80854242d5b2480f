"""A line plot as an SVG file: curves over a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Labels(NamedTuple):
    """What stands above, below and beside."""

    title: str
    x: str
    y: str


def draw_lines(
    file: Path,
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    ceilings: Mapping[str, float],
    labels: Labels,
) -> None:
    """Draw curves, each with a value for every x, and named horizontal lines (``ceilings``)."""
    import matplotlib as mpl  # noqa: PLC0415  only a trace is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for name, values in curves.items():
            axes.plot(xs, values, marker="o", label=name)
        for name, value in ceilings.items():
            axes.axhline(value, linestyle="--", color="grey", label=name)
        axes.set(title=labels.title, xlabel=labels.x, ylabel=labels.y, xscale="log")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, axis="y")
        axes.legend()
        figure.savefig(file)
