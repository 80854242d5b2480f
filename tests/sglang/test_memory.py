"""Who allocated the KV memory, and what becomes of it, and of servers, when one of them ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.clients import Client
from tests.daemons import RestartedDaemon, restarted_daemon, soon
from tests.sglang.expected import Expected
from tests.sglang.servers import Pair, prompt, running_pair

pytestmark = pytest.mark.long


@pytest.fixture
def forgetful_daemon(expected: Expected) -> Iterator[RestartedDaemon]:  # noqa: ARG001  before there are servers
    """Return a daemon that ends with its pools."""
    with restarted_daemon(keep=False) as daemon:
        yield daemon


def test_memory_of_the_engine_outlives_the_daemon(
    forgetful_daemon: RestartedDaemon, expected: Expected, tmp_path: Path
) -> None:
    environment = {"KVFERRY_SGLANG_MEMORY": "engine"}
    with running_pair(tmp_path, forgetful_daemon.runtime_dir, environment=environment) as pair:
        for length in (64, 600):
            assert pair.generate(prompt(length)).tokens == expected.tokens(length)
        forgetful_daemon.restart()
        pair.wait_until_served(prompt(600), expected.tokens(600))
        assert pair.generate(prompt(333)).tokens == expected.tokens(333)
        pair.assert_healthy()
        assert_pools_end_with_servers(pair, forgetful_daemon)


def test_servers_end_whose_memory_the_daemon_has_lost(
    forgetful_daemon: RestartedDaemon, expected: Expected, tmp_path: Path
) -> None:
    with running_pair(tmp_path, forgetful_daemon.runtime_dir) as pair:
        assert pair.generate(prompt(64)).tokens == expected.tokens(64)
        forgetful_daemon.restart()
        for server in (pair.prefill, pair.decode):
            server.wait_until_ended()
            assert "POOL_LOST" in server.logged()


def assert_pools_end_with_servers(pair: Pair, daemon: RestartedDaemon) -> None:
    """End the servers in order, and check that no pool is left of them."""
    with Client.connect(daemon.runtime_dir) as client:
        assert len(client.status().pools) == 2
        pair.end_in_order()
        assert soon(lambda: not client.status().pools)
