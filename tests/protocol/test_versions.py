"""Agreeing on a protocol version; identifiers; where the sockets are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.base import MAX_PAGE_LISTS
from kvferry.protocol.errors import VersionMismatchError
from kvferry.protocol.ids import new_boot_id, new_request_id, new_secret
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES, PROTOCOL_MAX, PROTOCOL_MIN, Limits, agree
from kvferry.protocol.settings import control_address, runtime_dirs


@given(st.integers(-3, 6), st.integers(-3, 6))
def test_the_highest_version_of_both(lowest: int, highest: int) -> None:
    common = set(range(lowest, highest + 1)) & set(range(PROTOCOL_MIN, PROTOCOL_MAX + 1))
    if common:
        assert agree(lowest, highest) == max(common)
        return
    with pytest.raises(VersionMismatchError, match=f"speaks {lowest}..{highest}, this side") as refused:
        agree(lowest, highest)
    assert refused.value.field == "protocol_min"


def test_identifiers_are_random_and_of_128_bits() -> None:
    for make in (new_request_id, new_boot_id):
        made = {make() for _ in range(100)}
        assert len(made) == 100
        assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(new_secret()) == 16


def test_a_message_within_the_limits_is_possible() -> None:
    limits = Limits()
    assert MAX_PAYLOAD_BYTES < limits.max_frame_bytes <= limits.max_message_bytes
    assert limits.max_frames >= 1 + MAX_PAGE_LISTS, "an envelope and as many page lists as a SEND may have"
    assert limits.max_transfers_per_session <= limits.max_transfers
    assert limits.default_deadline_ms <= limits.max_deadline_ms


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
