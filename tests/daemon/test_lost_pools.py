"""Which pools were on devices: remembered over restarts, until they are made anew, and never in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.process.access import DEVICE_POOLS_FILE
from kvferry.daemon.services.pool_registry import MAX_REMEMBERED, LostPools
from kvferry.pools.tiers.own_folder import OwnFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OwnFolder]:
    folder = OwnFolder(tmp_path, "runtime_dir")
    yield folder
    folder.close()


@pytest.mark.parametrize("was_made", [True, False], ids=["made", "registered"])
def test_what_was_lost_in_one_life_is_not_lost_again_in_the_next(folder: OwnFolder, *, was_made: bool) -> None:
    pools = LostPools(folder)
    if was_made:
        pools.made(7, "decode", "npu:0")
    pools.lose(7, "decode", "went with its device")
    assert pools.why(7, "decode") == "went with its device"
    assert LostPools(folder).why(7, "decode") is None
    pools.made(7, "decode", "npu:0")
    assert pools.why(7, "decode") is None


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"{}", b'[{"tenant": "a"}]', b"[" * 10_000, b"\xff", b'[{"tenant": 7, "name": "\xff"}]']
)
def test_a_file_that_cannot_be_read_is_as_none(folder: OwnFolder, content: bytes) -> None:
    folder.replace(DEVICE_POOLS_FILE, content)
    pools = LostPools(folder)
    assert repr(pools) == "<LostPools live=0 lost=0>"
    pools.made(7, "decode", "npu:0")
    assert LostPools(folder).why(7, "decode")


def test_what_lived_on_a_device_is_lost_with_the_daemon_until_it_is_made_anew(folder: OwnFolder) -> None:
    first = LostPools(folder)
    for tenant, name in ((7, "decode"), (8, "decode"), (7, "other")):
        first.made(tenant, name, f"npu:{tenant}")
    assert first.why(7, "decode") is None
    LostPools(folder).made(9, "other", "npu:9")
    third = LostPools(folder)  # it stays lost over further restarts
    assert third.why(7, "decode") == "was on npu:7 and was lost when the daemon restarted"
    assert third.why(8, "decode") == "was on npu:8 and was lost when the daemon restarted"
    assert third.why(9, "decode") is None
    third.made(7, "decode", "npu:0")
    assert third.why(7, "decode") is None
    for name in ("decode", "decode", "other"):
        third.deleted(7, name)
    assert [LostPools(folder).why(7, name) for name in ("decode", "other")] == [None, None], "they were deleted"


def test_where_no_file_can_be_written_they_are_lost_in_one_life_and_the_oldest_are_forgotten(folder: OwnFolder) -> None:
    folder.path.rmdir()
    for pools in (LostPools(folder), LostPools(None)):
        pools.made(7, "decode", "npu:0")
        for number in range(MAX_REMEMBERED + 3):
            pools.lose(7, f"pool-{number}", "gone")
        assert [bool(pools.why(7, f"pool-{number}")) for number in range(5)] == [False, False, False, True, True]
        assert pools.why(7, "decode") is None
