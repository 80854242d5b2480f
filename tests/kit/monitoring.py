"""The Grafana board and the alert rules, and what Prometheus would make of a scrape for them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.kit.scraping import Scrape, get

FOLDER: Final = Path(__file__).parents[2] / "monitoring"
OF_TARGETS: Final = {"instance", "job"}
"""Labels that Prometheus itself adds."""

SELECTOR: Final = re.compile(r"\b((?:kvferry|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
UNLESS: Final = " unless on (job, instance) "
COMPARISON: Final = re.compile(r"(==|>) ([0-9.]+)\Z")


def board() -> dict[str, Any]:
    """Return the board."""
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    yaml: Any = importlib.import_module("yaml")  # without types
    read = yaml.safe_load((FOLDER / "kvferry.rules.yml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Return each query by the name of its alert, or of its panel and target."""
    of_board = {f"{one['title']} {t['refId']}": t["expr"] for one in board()["panels"] for t in one["targets"]}
    return of_board | {rule["alert"]: rule["expr"] for rule in rules()}


class Query(NamedTuple):
    """What an alert, or a panel with all its targets, asks for."""

    text: str

    @classmethod
    def named(cls, name: str) -> Query:
        """Return that of an alert or a panel."""
        found = [query for key, query in queries().items() if name in {key, key[:-2]}]
        assert found, f"neither an alert nor a panel: {name}"
        return cls("\n".join(found))

    def value(self, found: Scrape, **labels: str) -> float:
        """Return the sum of the samples that it selects and that have at least these labels."""
        return sum(_selected(self.text, found, labels))

    def fires(self, found: Scrape) -> bool:
        """Return whether an alert's expression holds; it is of one selector and a number, or of two with ``unless``."""
        asked, _, unless = self.text.partition(UNLESS)
        if unless:
            return bool(_selected(asked, found, {})) and not _selected(unless, found, {})
        compared = COMPARISON.search(asked)
        assert compared, self.text
        limit, selected = float(compared[2]), _selected(asked, found, {})
        return any(one == limit if compared[1] == "==" else one > limit for one in selected)


def as_prometheus(address: tuple[str, int]) -> Scrape:
    """Return what Prometheus has of a target of the job: its samples, and ``up``."""
    try:
        said, is_up = get(address).text, 1
    except ConnectionRefusedError:
        said, is_up = "", 0
    return Scrape(f'{said}up{{job="kvferry"}} {is_up}\n')


def _selected(query: str, found: Scrape, labels: dict[str, str]) -> list[float]:
    """Return the samples that the selectors of a query select, as they are."""
    return [
        value
        for name, selected in SELECTOR.findall(query)
        for its in found.labels(name)
        if labels.items() <= its.items() and _matches(its, selected)
        for value in found.of(name, **its)
    ]


def _matches(its: dict[str, str], selected: str) -> bool:
    """Return whether labels match a selector; those that Prometheus adds do."""
    for label, how, wanted in MATCHER.findall(selected):
        is_so = bool(re.fullmatch(wanted, its.get(label, ""))) if "~" in how else its.get(label, "") == wanted
        if label not in OF_TARGETS and is_so == how.startswith("!"):
            return False
    return True
