"""docs/metrics.md has exactly the metrics that there are, each with its type and labels."""

from __future__ import annotations

import re
from typing import Final

from prometheus_client import ProcessCollector

from kvferry.daemon.services.metric_catalogue import METRICS
from tests.kit.documents import page

TEXT: Final = page("metrics.md")
NAMED: Final = re.compile(r"`((?:kvferry|process)_\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith(("| `kvferry_", "| `process_"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_each_metric_once_and_no_other() -> None:
    named = [name for cells in rows() for name in NAMED.findall(cells[0])]
    of_process = {one.name + "_total" * (one.type == "counter") for one in ProcessCollector(registry=None).collect()}
    assert len(named) == len(set(named))
    assert set(named) == METRICS.keys() | of_process
    assert {name for name in NAMED.findall(TEXT) if name not in named} == set()


def test_each_row_has_type_and_labels_as_they_are() -> None:
    for what, kind, *_ in rows():
        for name, its_kind in zip(NAMED.findall(what), _kinds(kind, len(NAMED.findall(what))), strict=True):
            metric = METRICS.get(name)
            if metric is None:
                continue  # of the process
            assert its_kind.startswith(metric.kind), name
            if "as above" not in its_kind:
                assert tuple(re.findall(r"`(\w+)`", its_kind)) == metric.labels, name


def _kinds(cell: str, count: int) -> list[str]:
    """Return the kind of each of a row's metrics: those of one row are alike, or apart by semicolons."""
    parts = [one.strip() for one in cell.split(";")]
    return parts if len(parts) == count else [cell] * count
