"""One daemon for all tests of the clients; tests that harm it run their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from kvferry.clients import AsyncClient, Client
from tests import kit
from tests.kit.blocking import connected
from tests.kit.daemons import Daemon

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """Return a daemon that serves."""
    with kit.daemon() as one:
        yield one


@pytest.fixture
def name() -> str:
    """Return a pool's name that no other test has."""
    return f"pool-{next(_numbers)}"


KINDS: Final = [Client, pytest.param(AsyncClient, marks=pytest.mark.full)]
"""The synchronous client's calls are made from the asynchronous one's, whose connections have tests of their own."""


@pytest.fixture(params=KINDS, ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Callable[[str], Client]]:
    """Return what connects a client of that name, of either kind; closed at the end."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(connected(request.param, daemon.runtime_dir, name=name))


@pytest.fixture
def client(connect: Callable[[str], Client]) -> Client:
    """Return a session of an engine."""
    return connect("engine")


@pytest.fixture
def other(connect: Callable[[str], Client]) -> Client:
    """Return another engine's session."""
    return connect("other")
