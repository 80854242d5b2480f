"""One daemon for all tests of the clients; tests that harm it run their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvferry.clients import Client
from tests import kit
from tests.kit.blocking import connected, kinds
from tests.kit.daemons import Daemon

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """Return a daemon for all modules that want no configuration."""
    with kit.daemon() as one:
        yield one


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Return a daemon with the module's ``CONFIG``, or the shared one."""
    if not hasattr(request.module, "CONFIG"):
        yield request.getfixturevalue("shared_daemon")
        return
    with kit.daemon(request.module.CONFIG) as one:
        yield one


@pytest.fixture
def name() -> str:
    """Return a pool's name that no other test has."""
    return f"pool-{next(_numbers)}"


@pytest.fixture(params=kinds(Client), ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Callable[[str], Client]]:
    """Return what connects a client of that name, of either kind, closed at the end.

    The synchronous one's calls are made from the other's, and the connections of both have tests of their own.
    """
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(connected(request.param, daemon.runtime_dir, name=name))


@pytest.fixture
def client(connect: Callable[[str], Client]) -> Client:
    return connect("engine")


@pytest.fixture
def other(connect: Callable[[str], Client]) -> Client:
    return connect("other")
