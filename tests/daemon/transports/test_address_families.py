"""Transfers between daemons over each address family, by real daemons and Mooncake over the loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.mooncake import mooncake_works

SPEC = MhaSpec(layers=4, tokens=1024, page_size=16, kv_heads=4, head_dim=64, dtype="float32")
PATIENCE_S = 20.0
CONFIG = """
[peers]
listen = "tcp://{listen}"
[network]
transport = "mooncake"
bounce_buffers = 4
bounce_buffer_bytes = 65536
address = "{address}"
"""


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    require(mooncake_works(), "mooncake-transfer-engine-non-cuda and libibverbs1")


def free_listen(address: str) -> str:
    """Return a numeric address with a port that is free now, as in ``peers.listen``."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        return f"[{address}]:{probe.getsockname()[1]}" if ":" in address else f"{address}:{probe.getsockname()[1]}"


@contextlib.contextmanager
def daemon_at(folder: Path, listen: str, address: str, environment: dict[str, str]) -> Iterator[Daemon]:
    folder.mkdir()
    with kit.daemon(CONFIG.format(listen=listen, address=address), environment=environment) as daemon:
        yield daemon


@pytest.mark.full
@pytest.mark.parametrize(
    ("listen", "address", "environment"),
    [
        ("::1", "[::1]", {}),
        ("127.0.0.1", "127.0.0.1", {"MC_USE_IPV6": "1"}),  # the configuration decides, not what a container has set
    ],
)
def test_a_transfer_between_two_daemons(tmp_path: Path, listen: str, address: str, environment: dict[str, str]) -> None:
    places = [free_listen(listen), free_listen(listen)]
    with contextlib.ExitStack() as stack:
        clients = []
        for number, place in enumerate(places):
            daemon = stack.enter_context(daemon_at(tmp_path / str(number), place, address, environment))
            clients.append(stack.enter_context(contextlib.closing(Client.connect(daemon.runtime_dir, name="engine"))))
        source, destination = clients
        pools = [client.create_pool("kv", SPEC) for client in clients]
        sent, received = source.allocate("kv", 40), destination.allocate("kv", 40)[::-1].copy()
        for role in ("k", "v"):
            tensor = pools[0].tensor("main", role)
            noise = np.random.default_rng(7).standard_normal(tensor[:, sent].shape, np.float32)
            tensor[:, sent] = torch.from_numpy(noise)
        request = new_request_id()
        transfer = destination.receive("kv", request, [pages(received)], source_daemons=[f"tcp://{places[0]}"])
        source.send("kv", request, [pages(sent)])
        destination.wait_finished(transfer, timeout_s=PATIENCE_S)
        for role in ("k", "v"):
            arrived = pools[1].tensor("main", role)[:, received]
            assert torch.equal(arrived, pools[0].tensor("main", role)[:, sent])
