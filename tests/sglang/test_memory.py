"""Who allocated the KV memory, and what becomes of it, and of servers, when one of them ends."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients import Client
from kvferry.clients.engine import Engine
from kvferry.clients.sglang.settings import end_server
from kvferry.protocol.errors import PoolLostError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.servers import prompt
from tests.sglang.expected import Expected
from tests.sglang.servers import Pair, running_pair

SOON_S: Final = 20.0


class Lost:
    """A pool whose memory the next daemon has not."""

    name = "lost"
    keeps_memory = False

    def come_back(self, client: Client, *, resumed: bool) -> None:  # noqa: ARG002
        """Say so."""
        raise PoolLostError("the next daemon has not adopted it")


def scheduler(runtime_dir: str, started: Connection) -> None:
    """Be a scheduler process of a server, for as long as it is let."""
    Engine("scheduler", runtime_dir, on_pool_lost=end_server).add(Lost())
    started.send_bytes(b"")
    started.recv_bytes()


def test_a_scheduler_whose_memory_is_lost_ends_and_tells_its_server() -> None:
    """One that stayed would keep SGLang waiting for a minute."""
    told: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda number, _: told.append(number))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    try:
        with kit.daemon() as daemon:
            process = spawn.Process(target=scheduler, args=(str(daemon.runtime_dir), theirs))
            process.start()
            try:
                assert ours.poll(SOON_S)
                daemon.restart()
                process.join(SOON_S)
                assert (process.exitcode, told) == (1, [signal.SIGQUIT])
            finally:
                process.kill()
                process.join()
    finally:
        signal.signal(signal.SIGQUIT, before)


@pytest.fixture
def forgetful_daemon(expected: Expected) -> Iterator[Daemon]:  # noqa: ARG001  before there are servers
    """Return a daemon that ends with its pools."""
    with kit.daemon() as daemon:
        yield daemon


@pytest.mark.long
def test_memory_of_the_engine_outlives_the_daemon(forgetful_daemon: Daemon, expected: Expected, tmp_path: Path) -> None:
    environment = {"KVFERRY_SGLANG_MEMORY": "engine"}
    with running_pair(tmp_path, forgetful_daemon.runtime_dir, environment=environment) as pair:
        for length in (64, 600):
            assert pair.generate(prompt(length)).tokens == expected.tokens(length)
        forgetful_daemon.restart()
        pair.wait_until_served(prompt(600), expected.tokens(600))
        assert pair.generate(prompt(333)).tokens == expected.tokens(333)
        pair.assert_healthy()
        assert_pools_end_with_servers(pair, forgetful_daemon)


@pytest.mark.long
def test_servers_end_whose_memory_the_daemon_has_lost(
    forgetful_daemon: Daemon, expected: Expected, tmp_path: Path
) -> None:
    with running_pair(tmp_path, forgetful_daemon.runtime_dir) as pair:
        assert pair.generate(prompt(64)).tokens == expected.tokens(64)
        forgetful_daemon.restart()
        for server in (pair.prefill, pair.decode):
            server.wait_until_ended()
            assert "POOL_LOST" in server.logged()


def assert_pools_end_with_servers(pair: Pair, daemon: Daemon) -> None:
    """End the servers in order, and check that no pool is left of them."""
    with Client.connect(daemon.runtime_dir) as client:
        assert len(client.status().pools) == 2
        pair.end_in_order()
        assert soon(lambda: not client.status().pools)
