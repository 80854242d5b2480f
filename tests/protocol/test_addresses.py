"""Addresses of daemons: which can be called, and are the only way to spell what they name; where the sockets are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.protocol.addresses import MAX_PATH_BYTES, is_numeric, is_v6, scheme, wrong_address, wrong_port
from kvferry.protocol.settings import control_address, runtime_dirs


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:7801", "tcp://10.1.2.3:65535", "tcp://[fd00::1]:7801", "tcp://[::1]:1",
        "ipc:///run/kvferry/peer.sock", "ipc:///" + "x" * (MAX_PATH_BYTES - 1),
    ],
)  # fmt: skip
def test_addresses_that_can_be_called(address: str) -> None:
    assert wrong_address(address) == ""
    assert is_v6(address) == ("[" in address)
    assert address.startswith(f"{scheme(address)}://")


WRONG = {
    "port": [f"tcp://127.0.0.1:{port}" for port in ("0", "65536", "07801", "\u0667", "")],
    "numeric": [
        "tcp://node-1:7801", "tcp://*:7801", "tcp://0.0.0.0:7801", "tcp://127.1:7801", "tcp://127.0.0.01:7801",
        "tcp://[127.0.0.1]:7801", "tcp://::1:7801", "tcp://[::]:7801", "tcp://[fd00:0::1]:7801", "tcp://[FD00::1]:7801",
        "tcp://[fe80::1%eth0]:7801", "tcp://1.2.3.4:5;6.7.8.9:10", "tcp://1.2.3.4\0:5",
    ],
    "108 bytes": ["ipc:///" + "x" * MAX_PATH_BYTES],
    "109 bytes": ["ipc:///" + "é" * 54],
    "unprintable": ["ipc:///a\0b"],
}  # fmt: skip


@pytest.mark.parametrize(("address", "why"), [(one, why) for why, wrong in WRONG.items() for one in wrong])
def test_addresses_that_cannot(address: str, why: str) -> None:
    assert why in wrong_address(address)


def test_an_address_to_listen_on_may_leave_the_port_to_the_system() -> None:
    assert wrong_port("tcp://127.0.0.1:0", 0) == ""
    assert is_numeric("tcp://[fd00::1]:0")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["/run/kvferry"]),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, ["/run/user/7/kvferry", "/run/kvferry"]),
        ({"XDG_RUNTIME_DIR": "/run/user/7", "KVFERRY_RUNTIME_DIR": "/tmp/k"}, ["/tmp/k"]),  # noqa: S108  no file
        ({"XDG_RUNTIME_DIR": "", "KVFERRY_RUNTIME_DIR": ""}, ["/run/kvferry"]),
    ],
)
def test_the_runtime_directory(environ: dict[str, str], expected: list[str]) -> None:
    assert [*runtime_dirs(environ)] == expected
    assert control_address(Path(expected[0])) == f"ipc://{expected[0]}/control.sock"
