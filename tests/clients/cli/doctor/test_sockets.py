"""Who listens, read from /proc: a laid-out one, and the real one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.host import Host
from kvferry.clients.cli.doctor.ports import Listener, listeners
from tests.clients.cli.doctor.fake_host import make_host

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000  0 {inode} 1 ffff 100 0 0 10 0\n"
ANY, ANY6 = "00000000:0000", "00000000000000000000000000000000:0000"


def test_laid_out(tmp_path: Path) -> None:
    files = {
        "/proc/net/tcp": HEAD
        + ROW.format(local="0100007F:1E79", remote=ANY, state="0A", inode=500)
        + ROW.format(local="0100007F:1E80", remote="0100007F:9999", state="01", inode=501),
        "/proc/net/tcp6": HEAD
        + ROW.format(local="B80D0120000000000000000001000000:0050", remote=ANY6, state="0A", inode=502)
        + ROW.format(local="0000000000000000FFFF00000200000A:0051", remote=ANY6, state="0A", inode=503),
        "/proc/77/comm": "mysqld\n",
        "/proc/77/fd/.keep": "",
    }  # fmt: skip
    host = make_host(tmp_path, files)
    (tmp_path / "proc/77/fd/9").symlink_to("socket:[500]")
    (tmp_path / "proc/77/fd/8").symlink_to("/dev/null")
    assert listeners(host) == [
        Listener("127.0.0.1", 7801, 77, "mysqld"),
        Listener("2001:db8::1", 80, None),
        Listener("10.0.0.2", 81, None),
    ]


def test_the_real_ones() -> None:
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
        four.bind(("127.0.0.1", 0))
        four.listen()
        six.bind(("::1", 0))
        six.listen()
        found = {(one.address, one.port): one.pid for one in listeners(Host.this_one())}
        assert found["127.0.0.1", four.getsockname()[1]] == os.getpid()
        assert found["::1", six.getsockname()[1]] == os.getpid()


@pytest.mark.parametrize(
    ("own", "other", "covers"),
    [
        ("10.0.0.3", "10.0.0.3", True),
        ("0.0.0.0", "10.0.0.3", True),  # noqa: S104  an address to compare with
        ("::", "10.0.0.3", True),
        ("127.0.0.1", "10.0.0.3", False),
    ],
)
def test_addresses_in_each_others_way(own: str, other: str, *, covers: bool) -> None:
    assert Listener(own, 1, None).covers(other) is covers
