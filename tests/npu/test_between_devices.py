"""Pages go from one NPU to another without host memory where the driver says that they can, else through it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.clients import Client, MhaSpec, pages
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.npu.conftest import OPENING_S

SPEC = MhaSpec(layers=3, tokens=64 * 16, page_size=16, kv_heads=2, head_dim=64, dtype="float16")
COUNT = 20
REQUEST = "5a" * 16
MOVED_BYTES = COUNT * SPEC.layers * 2 * SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 2


@pytest.fixture(params=["direct", "through host memory"])
def path(request: pytest.FixtureRequest, simulator: Simulator) -> Iterator[str]:
    """Return the path of copies between devices; a new daemon asks for it."""
    with contextlib.nullcontext() if request.param == "direct" else simulator.without_peers():
        yield request.param


def test_pages_of_one_device_arrive_at_another(path: str, simulator: Simulator) -> None:
    chance = np.random.default_rng(3)
    with kit.daemon() as daemon, Client.connect(daemon.runtime_dir) as client:
        here, there = (
            client.create_pool(name, SPEC, device=name.replace("-", ":"), deadline_s=OPENING_S)
            for name in ("npu-0", "npu-1")
        )
        reached = {one.device: one.reaches for one in client.status().devices}
        is_direct = path == "direct"
        assert reached == {"npu:0": ("npu:1",) * is_direct, "npu:1": ("npu:0",) * is_direct}
        sent, received = (client.allocate(one.name, COUNT) for one in (here, there))
        given = torch.from_numpy(chance.integers(-99, 99, (2, SPEC.layers, COUNT, 16, 2, 64)).astype(np.float16))
        for role, one in zip(("k", "v"), given, strict=True):
            here.tensor("main", role)[:, torch.from_numpy(sent).to("npu:0")] = one.to("npu:0")
        torch.accelerator.synchronize(0)
        before = simulator.copied_bytes("to host")
        sending = client.send(here.name, REQUEST, [pages(sent)])
        client.wait_finished(client.receive(there.name, REQUEST, [pages(received)]))
        client.wait_settled(sending)
        through_host = simulator.copied_bytes("to host") - before
        assert through_host == (0 if is_direct else MOVED_BYTES)
        for role, one in zip(("k", "v"), given, strict=True):
            assert torch.equal(there.tensor("main", role)[:, torch.from_numpy(received).to("npu:1")].cpu(), one)
        here.close()
        there.close()
        assert path in daemon.log.read_text()
