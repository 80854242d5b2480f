"""Transfers that have not begun: within a daemon, between daemons of one host, between hosts."""

from __future__ import annotations

import pytest

from tests.kit.peers import WAYS, Transfer


@pytest.fixture(params=WAYS)
def both(request: pytest.FixtureRequest) -> Transfer:
    """Return a transfer, by each way."""
    return Transfer(request.param)


@pytest.fixture(params=["ipc", "tcp"])
def apart(request: pytest.FixtureRequest) -> Transfer:
    return Transfer(request.param)


@pytest.fixture
def here() -> Transfer:
    return Transfer()


@pytest.fixture
def mapped() -> Transfer:
    return Transfer("ipc")
