"""One daemon for all identity tests, and a client for each side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon


@pytest.fixture(scope="session")
def identity_daemon() -> Iterator[Daemon]:
    """Run a daemon."""
    with kit.daemon() as daemon:
        yield daemon


@pytest.fixture
def prefill(identity_daemon: Daemon) -> Iterator[Client]:
    """Connect the prefill side."""
    with Client.connect(identity_daemon.runtime_dir, name="prefill") as client:
        yield client


@pytest.fixture
def decode(identity_daemon: Daemon) -> Iterator[Client]:
    """Connect the decode side."""
    with Client.connect(identity_daemon.runtime_dir, name="decode") as client:
        yield client


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the machine's other cores are the daemon's, and small products gain nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
