"""A daemon that is stopped: whoever was given a time ends within it, and says that the daemon does not answer."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvferry.clients import AsyncClient, Client, MhaSpec, new_request_id, pages
from kvferry.clients.cli.cache import cache
from kvferry.protocol.errors import DaemonLostError, DeadlineError, KvferryError
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import COMMAND

TIMEOUT_S: Final = 0.3
MARGIN_S: Final = 5.0
"""For what a loaded machine takes beside; ten seconds were waited for a session, whatever the time given."""
SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
COMMANDS: Final = (
    ("ping",),
    ("status",),
    ("verify",),
    ("cache", "list"),
    ("doctor",),
    ("probe", "SNAPSHOTS"),
    ("probe", "STATUS"),
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Return a daemon that may be stopped; in the end it goes on."""
    with kit.daemon() as one:
        try:
            yield one
        finally:
            one.process.send_signal(signal.SIGCONT)


def fails_in_time(action: Callable[[], object], expected: type[KvferryError]) -> str:
    started = time.monotonic()
    with pytest.raises(expected) as failed:
        action()
    assert time.monotonic() - started < TIMEOUT_S + MARGIN_S
    return str(failed.value)


@pytest.mark.parametrize("session", [True, False])
def test_connecting_takes_no_longer_than_it_may(daemon: Daemon, *, session: bool) -> None:
    daemon.process.send_signal(signal.SIGSTOP)

    def connect() -> Client:
        return Client.connect(daemon.runtime_dir, session=session, timeout_s=TIMEOUT_S)

    async def connect_later() -> AsyncClient:
        return await AsyncClient.connect(daemon.runtime_dir, session=session, timeout_s=TIMEOUT_S)

    for said in (
        fails_in_time(connect, DaemonLostError),
        fails_in_time(lambda: asyncio.run(connect_later()), DaemonLostError),
    ):
        assert f"does not answer within {TIMEOUT_S:g} s, though its sockets are there" in said
        assert "stopped or hangs" in said


def test_calls_and_the_end_of_a_client_take_no_longer(daemon: Daemon) -> None:
    client = Client.connect(daemon.runtime_dir)
    client.create_pool("pool", SPEC)
    ids = client.allocate("pool", 1)
    daemon.process.send_signal(signal.SIGSTOP)
    transfer = client.receive("pool", new_request_id(), [pages(ids)])
    fails_in_time(lambda: client.wait_finished(transfer, TIMEOUT_S), DeadlineError)
    fails_in_time(lambda: client.wait_settled(transfer, TIMEOUT_S), DeadlineError)
    fails_in_time(lambda: client.verify(timeout_s=TIMEOUT_S), DeadlineError)
    started = time.monotonic()
    assert client.poll(TIMEOUT_S) == []
    client.close()
    assert time.monotonic() - started < TIMEOUT_S + MARGIN_S


def test_a_command_of_the_cache_that_has_connected_takes_no_longer(daemon: Daemon) -> None:
    def freeze(client: Client, _: argparse.Namespace) -> int:
        daemon.process.send_signal(signal.SIGSTOP)
        return len(list(client.cached_blocks()))

    options = argparse.Namespace(action="list", act=freeze, runtime_dir=daemon.runtime_dir, timeout=2.0)
    assert "did not answer within 2 s" in fails_in_time(lambda: cache(options), DeadlineError)


def test_commands_take_no_longer(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    options = ("--runtime-dir", str(daemon.runtime_dir), "--timeout", str(TIMEOUT_S))
    running = [
        subprocess.Popen([COMMAND, *command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in COMMANDS
    ]
    for command, one in zip(COMMANDS, running, strict=True):
        out, said = one.communicate(timeout=60)
        assert one.returncode == 1, command
        assert "does not answer within 0.3 s" in out + said, command
    assert time.monotonic() - started < TIMEOUT_S + 9.0
