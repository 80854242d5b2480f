"""What a reader of metrics does: one request for a page, and the samples that it says."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvferry.protocol.settings import METRICS_SOCKET

PATIENCE_S: Final = 20.0


class Said(NamedTuple):
    """An answer: its status, and its body as text."""

    status: int
    text: str


class Scrape:
    """The samples of one answer."""

    def __init__(self, text: str) -> None:
        self.families = {one.name: one for one in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def of(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric with at least these labels; counters' names end in ``_total``."""
        return [one.value for one in self._samples if one.name == name and labels.items() <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Return the only value of a metric with at least these labels."""
        (value,) = self.of(name, **labels)
        return value

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values with at least these labels."""
        return sum(self.of(name, **labels))

    def since(self, before: Scrape, name: str, **labels: str) -> float:
        """Return by how much that sum has grown since an earlier scrape."""
        return self.sum(name, **labels) - before.sum(name, **labels)

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the labels of a metric's values."""
        return [dict(one.labels) for one in self._samples if one.name == name]


def get(at: Path | tuple[str, int], page: str = "/metrics", request: bytes = b"") -> Said:
    """Ask a daemon of this runtime directory, or at a TCP address, for a page; ``request`` is said instead."""
    family, address = (socket.AF_UNIX, str(at / METRICS_SOCKET)) if isinstance(at, Path) else (socket.AF_INET, at)
    with socket.socket(family, socket.SOCK_STREAM) as channel:
        channel.settimeout(PATIENCE_S)
        channel.connect(address)
        channel.sendall(request or f"GET {page} HTTP/1.1\r\nHost: kvferry\r\n\r\n".encode())
        said = b"".join(iter(lambda: channel.recv(1 << 16), b""))
    head, _, body = said.decode().partition("\r\n\r\n")
    assert f"Content-Length: {len(body.encode())}" in head, head
    return Said(int(head.split()[1]), body)


def scrape(at: Path | tuple[str, int]) -> Scrape:
    """Return the samples of a daemon."""
    said = get(at)
    assert said.status == 200, said
    return Scrape(said.text)


def scrape_until(at: Path, holds: Callable[[Scrape], bool]) -> Scrape:
    """Return the first samples of which something holds, or the last ones: a text is given again for a moment."""
    ends_at = time.monotonic() + PATIENCE_S
    while not holds(found := scrape(at)) and time.monotonic() < ends_at:
        pass
    return found
