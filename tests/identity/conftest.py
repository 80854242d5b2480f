"""One daemon for all identity tests, and a client for each side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.clients import Client
from tests.kit.daemons import DaemonProcess, running_daemon


@pytest.fixture(scope="session")
def identity_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Run a daemon."""
    with running_daemon(tmp_path_factory.mktemp("identity")) as daemon:
        yield daemon


@pytest.fixture
def prefill(identity_daemon: DaemonProcess) -> Iterator[Client]:
    """Connect the prefill side."""
    with Client.connect(identity_daemon.runtime_dir, name="prefill") as client:
        yield client


@pytest.fixture
def decode(identity_daemon: DaemonProcess) -> Iterator[Client]:
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
