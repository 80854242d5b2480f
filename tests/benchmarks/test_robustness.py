"""The robustness race with little of each fault, against ours alone; and what its table says of what was measured."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks.contenders import Kvferry, installed
from benchmarks.measure import MissingPeerError
from benchmarks.peers.cache_client import PAGE, Cache, content
from benchmarks.robustness import FAULTS, QUICK, Outcome, Scene, Service, meet, rows, table

SERVED: Final = Service(0.5)


def outcome(server: str, meanwhile: Service = SERVED) -> Outcome:
    return Outcome(
        fault="garbage",
        server=server,
        before_s=0.25,
        meanwhile=meanwhile,
        afterwards=SERVED,
        newcomer=SERVED,
        answer="none in 10 s",
        memory="none",
        wrong_bytes=0,
    )


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_ours_serves_on_and_loses_no_byte(fault: str) -> None:
    found, _ = meet(fault, Kvferry, QUICK)
    assert all(one.after_s is not None for one in (found.meanwhile, found.afterwards, found.newcomer)), found
    assert found.wrong_bytes == 0
    assert found.memory == "none"
    expected = {
        "a message of one frame": "MALFORMED after",
        "garbage": "MALFORMED after",
        "an unknown operation": "UNKNOWN_TYPE after",
        "a restart between two heartbeats": "4 of 4 items kept",
        "a client that is stopped in a store": "its store: done; its load: done",
        "10,000 connections": f"{QUICK.connections} open",
    }
    assert found.answer.startswith(expected.get(fault, "")), found


class Damaged(Cache):
    """Has all items but 0, each with one wrong bit."""

    def _load(self, number: int) -> bytes | None:
        stored = content(number, self.size_bytes)
        return bytes([stored[0] ^ 1]) + stored[1:] if number else None


def test_a_wrong_byte_is_counted_and_a_miss_is_none() -> None:
    cache = Damaged(PAGE)
    assert cache.do("get", 1) == 1
    assert cache.do("get", 0) is None


def test_a_server_that_stands_still_does_not_serve_and_one_that_goes_on_does(tmp_path: Path) -> None:
    with Kvferry(tmp_path, QUICK.sizes, None) as server:
        scene = Scene(server, msgspec.structs.replace(QUICK, patience_s=1.0))
        os.kill(server.pid, signal.SIGSTOP)
        stopped = scene.serve(scene.healthy)
        os.kill(server.pid, signal.SIGCONT)
        assert stopped.after_s is None
        assert stopped.error == "no answer in 1 s"
        assert Scene(server, QUICK).serve(scene.healthy).after_s is not None


def test_rows_and_table_say_what_each_server_did() -> None:
    hangs = Service(None, "RuntimeError: STORE had no answer\nand more", 10.0)
    ran = [outcome("kvferry"), outcome("LMCache", hangs)]
    (row,) = rows(ran, QUICK)
    assert (row.name, row.ours, row.peer, row.met) == ("robustness/garbage/LMCache", 500, 1e3 * QUICK.patience_s, True)
    (alone,) = rows(ran[:1], QUICK)
    assert (alone.ours, alone.peer) == (500, 250)
    text = table(ran, ["ours", "theirs", "ours"])
    assert text.count("- ours") == 1
    assert "**no**: RuntimeError: STORE had no answer after 10 s" in text
    assert text.count("garbage") == 1


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingPeerError, match="NAMES=robustness"):
        installed(tmp_path / "bin" / "python", "lmcache")
