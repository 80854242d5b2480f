"""The Grafana board and the alert rules: they load, and name only metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvferry.daemon.services.metric_catalogue import METRICS, Metric
from tests.kit.monitoring import FOLDER, OF_TARGETS, SELECTOR, board, queries, rules

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


def test_prometheus_takes_the_rules_and_all_queries(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    promtool = shutil.which("promtool") or shutil.which("promtool", path=sysconfig.get_path("scripts"))
    require(promtool, "promtool, which is in Prometheus' package")

    def check(file: Path) -> str:
        done = subprocess.run([str(promtool), "check", "rules", file], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def recorded(*found: str) -> Path:
        made = [{"record": f"query_{number}", "expr": re.sub(r"\$\w+", "5m", one)} for number, one in enumerate(found)]
        file = tmp_path / "queries.json"  # YAML, too
        file.write_text(json.dumps({"groups": [{"name": "queries", "rules": made}]}))
        return file

    assert f"SUCCESS: {len(rules())} rules found" in check(FOLDER / "kvferry.rules.yml")
    assert f"SUCCESS: {len(queries())} rules found" in check(recorded(*queries().values()))
    assert "parse error" in check(recorded("sum by (state) kvferry_pool_pages)"))
