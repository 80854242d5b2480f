"""What being watched costs: requests a second and bytes moved, with a scrape of the metrics each second and without."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.control_messages import IN_FLIGHT, dealer, endlessly, is_success, ping_frame, throughput
from benchmarks.measure import (
    GIGABYTES_A_SECOND,
    MILLISECONDS,
    THOUSANDS_A_SECOND,
    Contender,
    Effort,
    Row,
    Target,
    Unit,
    compare,
    row_of,
)
from benchmarks.pools import Pair
from benchmarks.processes import processor_s, running_daemon
from benchmarks.transfer import TOKENS, spec
from kvferry.clients import Client, MhaSpec, calls
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.settings import METRICS_SOCKET, control_address

EACH_S: Final = 1.0
KEPT_S: Final = 0.2
"""A text is given again for less than that."""

POOLS: Final = 8
SCRAPED: Final = MhaSpec(layers=1, tokens=4000, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
PEER_IS: Final = "the same without a scrape"


class Scraper:
    """Reads a daemon's metrics each second while it is on."""

    def __init__(self, runtime_dir: Path) -> None:
        self.count = 0
        self._path = str(runtime_dir / METRICS_SOCKET)
        self._on, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def while_on(self, contender: Contender) -> Contender:
        """Return a contender that is watched."""

        def watched() -> float:
            self._on.set()
            try:
                return contender()
            finally:
                self._on.clear()

        return watched

    def close(self) -> None:
        """Read no more."""
        self._over.set()
        self._on.set()
        self._thread.join()

    def scrape(self, page: str = "/metrics") -> None:
        """Read them once, or another page."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(self._path)
            channel.sendall(f"GET {page} HTTP/1.1\r\nHost: kvferry\r\n\r\n".encode())
            said = b"".join(iter(lambda: channel.recv(1 << 16), b""))
        assert said.startswith(b"HTTP/1.1 200 "), said[:200]
        self.count += 1

    def _run(self) -> None:
        while self._on.wait() and not self._over.is_set():
            self.scrape()
            self._over.wait(EACH_S)


@contextlib.contextmanager
def _scraping(runtime_dir: Path) -> Iterator[Scraper]:
    scraper = Scraper(runtime_dir)
    try:
        scraper.scrape()  # the first one imports what writes them
        yield scraper
    finally:
        scraper.close()


def measure(effort: Effort) -> list[Row]:
    """Measure PINGs in flight, and transfers of 1000 tokens; a round takes seconds, so a scrape a second is no more."""
    rounds, pings, transfers = effort.pick(7, 2), effort.pick(200_000, 200), effort.pick(1500, 2)
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
        contextlib.closing(SessionChannel.open(runtime_dir, calls.session_open("bench-raw"))) as channel,
        dealer(control_address(runtime_dir)) as raw,
        Pair((prefill, decode), spec(TOKENS, layers=effort.pick(30, 2), kv_heads=3, head_dim=64)) as pair,
        _scraping(runtime_dir) as scraper,
    ):
        frames = [ping_frame(channel, number) for number in range(1, 1025)]
        asking = throughput(raw, endlessly(frames), is_success, pings)
        row = partial(_row, rounds, scraper)
        for number in range(POOLS):
            prefill.create_pool(f"scraped-{number}", SCRAPED).close()
        pid = prefill.status().pid
        took_ms, without_ms = (
            [_processor_ms(pid, partial(scraper.scrape, page)) for _ in range(effort.pick(20, 2))]
            for page in ("/metrics", "/healthz")
        )
        return [
            row_of(
                "overhead/scrape",
                MILLISECONDS,
                took_ms,
                without_ms,
                peer_is="a look at /healthz",
                note=f"processor time of the daemon, which has {POOLS} more pools of {SCRAPED.tokens} pages",
            ),
            row("requests", THOUSANDS_A_SECOND, asking, 0.97, f"{IN_FLIGHT} PINGs in flight"),
            row("bytes", GIGABYTES_A_SECOND, _moving(pair, transfers), 0.99, f"{transfers} transfers a round"),
        ]


def _processor_ms(pid: int, scrape: Callable[[], None]) -> float:
    """Return the processor time of one scrape, once the daemon does not give an earlier text again."""
    time.sleep(KEPT_S)
    began_s = processor_s(pid)
    scrape()
    return (processor_s(pid) - began_s) * 1e3


def _row(rounds: int, scraper: Scraper, name: str, unit: Unit, contender: Contender, least: float, note: str) -> Row:
    return compare(
        f"overhead/{name}",
        unit,
        ours=scraper.while_on(contender),
        peer=contender,
        peer_is=PEER_IS,
        rounds=rounds,
        target=Target(least),
        note=f"{note}; the metrics are read each second",
    )


def _moving(pair: Pair, count: int) -> Callable[[], float]:
    def moved() -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            pair.transfer_s()
        return count * pair.size_bytes / (time.perf_counter() - began_s) / 1e9

    return moved
