"""The host tier over a restart, where devices have copied into it: what rests until the driver has let the dead go."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from kvferry.clients import pages
from kvferry.protocol.errors import OverloadedError
from tests import kit
from tests.kit.daemons import engine, soon
from tests.kit.devices import DEVICE
from tests.npu.test_kept_pools import CONFIG, SPEC, fence_ahead, mapped


def test_snapshots_come_back_at_once_and_nothing_new_comes_before_the_fence(
    require: Callable[[object, str], None],
) -> None:
    require(os.geteuid() == 0, "root: the simulator finds a keeper's memory by /proc, which it is closed to others")
    DEVICE.accelerator  # noqa: B018
    with (
        kit.daemon(CONFIG, keep=True) as life,
        engine(life, "host") as other,  # the one on the device waits for its pool
        engine(life) as client,
        mapped(client) as pool,
    ):
        other.create_pool("host", SPEC)
        mine, here = client.allocate("kept", 2), other.allocate("host", 2)
        keys = pool.tensor("main", "k")
        keys[:, mine.tolist()] = 5
        torch.accelerator.synchronize()
        out = client.offload("kept", [pages(mine)])
        client.wait_done(out)
        keys[:, mine.tolist()] = 6
        torch.accelerator.synchronize()
        life.kill()
        with fence_ahead(life):
            life.start()
            other.wait_done(other.restore("host", out.snapshot, [pages(here)]))
            with pytest.raises(OverloadedError, match="may still write"):
                other.wait_done(other.offload("host", [pages(here)]))

        def is_taken() -> bool:
            try:
                other.wait_done(other.offload("host", [pages(here)]))
            except OverloadedError:
                return False
            return True

        assert soon(is_taken)
        client.wait_done(client.restore("kept", out.snapshot, [pages(mine)]))
        assert (keys[:, mine.tolist()] == 5).all()
        assert client.verify().findings == ()
