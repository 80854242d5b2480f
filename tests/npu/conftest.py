"""The harness of the NPU tests: a daemon for each module, with ``POOLS`` on the device where the module names some.

``POOLS`` are specs by name; ``CONFIG`` and ``TUNING`` are the daemon's, as in all tests.
"""

from __future__ import annotations

from typing import Final

import pytest

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

OPENING_S: Final = 120.0  # the daemon imports torch_npu first


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, daemon: Daemon) -> Daemon:
    """Return the module's daemon with its pools; this process has opened its device as well."""
    DEVICE.accelerator  # noqa: B018
    with Client.connect(daemon.runtime_dir, name="first") as client:
        for name, spec in getattr(request.module, "POOLS", {}).items():
            client.create_pool(name, spec, device=DEVICE.name, deadline_s=OPENING_S).close()
    return daemon
