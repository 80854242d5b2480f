"""The Grafana board and the alert rules: they load, and name only metrics and labels that there are."""

from __future__ import annotations

import json
import re
from typing import Final

import pytest

from kvferry.daemon.services.metric_catalogue import METRICS, Metric
from tests.kit.monitoring import OF_TARGETS, SELECTOR, board, queries, rules

OF_OTHERS: Final = {"up", "process_start_time_seconds", "process_cpu_seconds_total"}


def metric_of(name: str) -> Metric | None:
    """Return the metric of a series' name: a histogram has three kinds."""
    found = METRICS.get(name)
    if found is not None and found.kind != "histogram":
        return found
    base = METRICS.get(re.sub(r"_(bucket|sum|count)\Z", "", name))
    if base is None or base.kind != "histogram" or base is found:
        return None
    return base._replace(labels=(*base.labels, "le")) if name.endswith("_bucket") else base


def mistakes(query: str) -> list[str]:
    """Return what a query names that there is not."""
    wrong, labels = [], set(OF_TARGETS)
    for name, selected in SELECTOR.findall(query):
        metric = metric_of(name)
        if metric is None and name not in OF_OTHERS:
            wrong.append(name)
        its = OF_TARGETS | set(metric.labels if metric else ())
        labels |= its
        wrong += [f"{name}{{{one}}}" for one in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected) if one not in its]
    grouped = re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", query)
    return wrong + [one for group in grouped for one in re.split(r"[,\s]+", group) if one and one not in labels]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum by (state) (kvferry_pool_pages)", []),
        ("kvferry_pool_page", ["kvferry_pool_page"]),
        ("kvferry_loop_lag_seconds", ["kvferry_loop_lag_seconds"]),
        ("kvferry_loop_lag_seconds_bucket", []),
        ("kvferry_transfers_total_bucket", ["kvferry_transfers_total_bucket"]),
        ('kvferry_pools{outcome!="ok"}', ["kvferry_pools{outcome}"]),
        ("sum by (instance, code) (kvferry_pools)", ["code"]),
    ],
)
def test_mistakes_are_found(query: str, found: list[str]) -> None:
    assert mistakes(query) == found


def test_every_query_names_what_there_is() -> None:
    assert len(queries()) > 30
    assert {name: wrong for name, query in queries().items() if (wrong := mistakes(query))} == {}
    assert all(SELECTOR.search(query) for query in queries().values())


def test_the_board_is_whole() -> None:
    panels = board()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    places = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}
    assert len(places) == len(panels)
    variables = {one["name"] for one in board()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def test_each_alert_says_what_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}, rule
        assert rule["annotations"].keys() == {"summary", "description"}
        legend = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert legend <= OF_TARGETS | {label for one in METRICS.values() for label in one.labels}
