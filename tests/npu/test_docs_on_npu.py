"""The code in docs/engines.md that needs a device: registering a pool."""

from __future__ import annotations

import torch

from kvferry.clients import new_request_id, pages
from tests.kit.documents import Reader
from tests.test_docs import LENDING, Other, other, reader

__all__ = ["other", "reader"]  # fixtures


def test_lending(reader: Reader, other: Other, device: str) -> None:
    reader.run(LENDING)
    reader.names["arrays"]["main", "k"][:, 3] = 7
    torch.accelerator.synchronize()
    [taken] = other.client.allocate("other", 1)
    request_id = new_request_id()
    received = other.client.receive("other", request_id, [pages([taken])])
    other.client.send("prefill", request_id, [pages([3])])
    other.client.wait_finished(received)
    assert (other.arrived()[:, taken] == 7).all()
    [registered] = [one for one in other.client.status().pools if one.pool == "prefill"]
    assert (registered.device, registered.registered_by is not None) == (device, True)
