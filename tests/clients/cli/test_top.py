"""``kvferry top``: one frame of a full report at 80 columns, and the live screen in a terminal before a real daemon."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import pytest

from kvferry.clients import new_request_id, pages
from kvferry.clients.cli.main import main
from kvferry.clients.cli.top_screen import Console, frame, stage_of
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.session_messages import (
    EndedTransfer,
    PeerStatus,
    PoolStatus,
    SpaceStatus,
    StatusReport,
    TierStatus,
    TransferStatus,
)
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.pools import SPEC

COLUMNS: Final = 80
LINES: Final = 24
WAIT_S: Final = 30


def pool(number: int) -> PoolStatus:
    spaces = tuple(SpaceStatus(space=one, page_bytes=4096, pages=100, free=number, busy=1) for one in ("main", "swa"))
    return PoolStatus(
        pool=f"pool-{number}-of-a-model-with-a-very-long-name", tenant=1000, layout_digest="0" * 32,
        region_bytes=1 << 30, page_bytes=4096, pages=100, free=number, busy=1, spaces=spaces, device="npu:0",
    )  # fmt: skip


def side(state: str, waits_for: str, age_ms: int = 1) -> TransferStatus:
    return TransferStatus(
        request="", request_id="ab" * 16, direction="receive", pool="p", state=state, age_ms=age_ms, pages=9, arrived=1,
        waits_for=waits_for,
    )  # fmt: skip


LIVE: Final = {
    "other half": side("open", "1 of 1 sources: no SEND yet", 75_000),
    "more chunks": side("open", "a source's last SEND"),
    "layers": side("open", "copies: 1 of 9 pages there; the events of 3 layer steps"),
    "copies": side("open", "copies: 1 of 9 pages there"),
    "settling": side("finished", "copies"),
    "quarantined": side("quarantined", "copies"),
}
SLOW: Final = "slow: the last 8 writes took 412 ms a block, 120 ms would do"
BEFORE: Final = StatusReport(
    daemon_version="1.2.3", pid=4711, uptime_ms=7_200_000, draining=False, sessions=(),
    pools=tuple(pool(number) for number in range(9)),
    transfers=tuple(LIVE.values()),
    counters={"messages.received": 0, "transfers.receive.ok": 0, "transfers.receive.deadline": 4},
    tiers=(
        TierStatus(tier="host", state="ready", total_bytes=16 << 30, used_bytes=8 << 30),
        TierStatus(tier="disk", state=SLOW, total_bytes=64 << 30, used_bytes=1 << 30, write_us=412_000),
    ),
    peers=(
        PeerStatus(address="tcp://10.0.0.3:7801", state="up", announced=1, waiting=2, round_trip_us=1500),
        PeerStatus(address="tcp://10.0.0.4:7801", state="lost", announced=0, waiting=0, why="\x1b]0;evil\x07[bold]no"),
    ),
    recent=(
        EndedTransfer(request_id="1" * 32, direction="send", pool="p", tenant=1, session=1, ago_ms=1, moved_us=4000),
        EndedTransfer(
            request_id="2" * 32, direction="send", pool="p", tenant=1, session=1, ago_ms=1,
            error=ErrorInfo(code="DEADLINE", detail=""),
        ),
    ),
)  # fmt: skip
COUNTERS: Final = {
    "messages.received": 3000, "transfers.receive.ok": 200, "transfers.receive.deadline": 8,
    "transfers.moved_bytes": 4 << 30, "requests.refused.pool_full": 50, "tiers.disk.failed": 1,
    "cache.asked_blocks": 100, "cache.found.host": 75,
}  # fmt: skip
NOW: Final = msgspec.structs.replace(BEFORE, uptime_ms=7_202_000, counters=COUNTERS)


def drawn(now: StatusReport, before: StatusReport | None, height: int = LINES, lost: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=COLUMNS, height=height, color_system=None)
    with console.capture() as captured:
        console.print(frame(now, before, height, lost))
    return captured.get().splitlines()


def test_a_frame_fits_80_columns_and_24_lines() -> None:
    lines = drawn(NOW, BEFORE)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) <= LINES
    text = "\n".join(" ".join(line.split()) for line in lines)
    for said in (
        "kvferry 1.2.3 serving pid 4711 up 2 h",
        "a second: 1,500 requests, 25 refused, 100 transfers, 2.0 failed, 2,048 MiB moved",
        "transfers: 1 other half, 1 more chunks, 1 layers, 1 copies, 1 settling, 1 q",
        "the oldest, 75 s: abababab of p: 1 of 1 sources: no SEND yet",
        "ms of the last 1: planned 0.0 waited 0.0 moved 4.0 copied 0.0 settled 0.0",
        "100 0 1 ############ 100 %",
        "host 8.0/16.0 75.0 % - - ready",
        "412 ms - slow: the last 8",
        "tcp://10.0.0.4:7801",
        "requests.refused.pool_full 50 25",
        "transfers.receive.deadline 8 2.0",
    ):
        assert said in text, text
    assert "\x1b" not in text, "what others say commands no terminal"
    assert "more" in text, "of what does not fit it says how much there is"


def test_a_daemon_that_has_nothing_and_one_that_is_gone() -> None:
    empty = msgspec.structs.replace(NOW, pools=(), transfers=(), peers=(), tiers=(), recent=(), counters={})
    lines = drawn(empty, None)
    assert "transfers: none" in lines
    assert "no pools" in lines
    assert "no errors" in lines
    assert "a second: - requests, - refused, - transfers, - failed, - MiB moved" in lines
    assert "NO ANSWER: DAEMON_LOST" in drawn(empty, None, lost="DAEMON_LOST: gone")[0]
    other = msgspec.structs.replace(NOW, pid=1, uptime_ms=5)
    assert "a second: - requests" in "\n".join(drawn(other, NOW)), "rates are of one daemon's life"


def test_high_screens_show_more() -> None:
    assert len(drawn(NOW, BEFORE, height=60)) > len(drawn(NOW, BEFORE))
    assert max(map(len, drawn(NOW, BEFORE, height=4))) <= COLUMNS


@pytest.mark.parametrize("stage", LIVE)
def test_each_stage_has_its_name(stage: str) -> None:
    assert stage_of(LIVE[stage]) == stage


class Screen:
    """A terminal of 80 columns and 24 lines, and the command that draws in it."""

    def __init__(self, daemon: Daemon) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        command = [sys.executable, "-m", "kvferry.clients.cli.main", "top", "--interval", "0.1"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment = {name: value for name, value in environment.items() if name not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [*command, "--runtime-dir", str(daemon.runtime_dir)], stdin=theirs, stdout=theirs, env=environment
        )
        os.close(theirs)
        self.drawn = ""

    def until(self, text: str) -> None:
        """Read what is drawn until a text is there."""
        ends_at = time.monotonic() + WAIT_S
        before = len(self.drawn)
        while text not in self.drawn[before:]:
            assert select.select([self._fd], [], [], max(0.0, ends_at - time.monotonic()))[0], self.drawn[-2000:]
            try:
                self.drawn += os.read(self._fd, 65_536).decode(errors="replace")
            except OSError:  # it has ended
                assert text in self.drawn[before:], self.drawn[-2000:]

    def close(self) -> None:
        """End the command, if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@contextmanager
def screen(daemon: Daemon) -> Iterator[Screen]:
    one = Screen(daemon)
    try:
        yield one
    finally:
        one.close()


def test_it_is_live_before_a_daemon_and_leaves_the_terminal_as_it_was() -> None:
    with kit.daemon() as daemon, kit.engine(daemon) as client, screen(daemon) as top:
        top.until("no pools")
        assert "\x1b[?1049h" in top.drawn, "a screen of its own"
        client.create_pool("pool-of-now", SPEC)
        top.until("pool-of-now")
        client.receive("pool-of-now", new_request_id(), [pages(client.allocate("pool-of-now", 4))])
        client.ping()
        top.until("1 other half")
        daemon.kill()
        top.until("NO ANSWER")
        daemon.start()
        top.until("serving")
        top.process.send_signal(signal.SIGINT)
        top.until("\x1b[?1049l")
        assert top.process.wait(WAIT_S) in {0, 1}
        _, frames = top.drawn.split("\x1b[?1049h")
        assert "\x1b[2J" not in frames, "it draws in place: a screen that is cleared flickers"


def test_without_a_terminal_it_prints_one_frame(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--runtime-dir", str(daemon.runtime_dir)]) == 0
    out = capsys.readouterr().out
    assert "a second: " in out
    assert "\x1b" not in out
