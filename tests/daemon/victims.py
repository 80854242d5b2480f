"""Engines that die, as processes that tests kill: ``python victims.py DEVICE SIDE RUNTIME_DIR REQUEST_ID [FLAG …]``."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import torch

from kvferry.clients import Client, MhaSpec, SharedMemory, Transfer, new_request_id, pages

SPEC = MhaSpec(layers=2, tokens=2048, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
ALL = SPEC.tokens // SPEC.page_size
PAGES = 6
SENT = 3
VALUE = 7.0


def main() -> None:
    """Send or receive SENT of PAGES pages, say so, and wait to be killed."""
    device, side, runtime_dir, request_id, *flags = sys.argv[1:]
    client = Client.connect(runtime_dir, name=side)
    if "register" in flags:
        memory = SharedMemory(1 << 22)
        shape = (SPEC.layers, ALL + 1, SPEC.page_size, SPEC.kv_heads, SPEC.head_dim)
        arrays = {("main", role): memory.array(shape, SPEC.dtype) for role in ("k", "v")}
        client.register_pool(side, SPEC, arrays, device=device)
        ids = np.arange(1, PAGES + 1)
    else:
        pool = client.create_pool(side, SPEC, device=device)
        ids = client.allocate(side, PAGES)
        for role in ("k", "v"):
            pool.tensor("main", role).fill_(VALUE)
    if device != "host":
        torch.accelerator.synchronize()
    lists = [pages(ids[:SENT])]
    if side == "send":
        wait_accepted(client, client.send(side, request_id, lists, last="last" in flags))
    else:
        wait_accepted(client, client.receive(side, request_id, lists))
    if "crowd" in flags:
        with client.batched() as step:
            crowd = [
                step.receive(side, new_request_id(), [pages([one])], deadline_s=600.0)
                for one in client.allocate(side, ALL - PAGES)
            ]
        wait_accepted(client, crowd[-1])
    if "fork" in flags and os.fork() == 0:
        signal.pause()  # keeps every socket open
    print(os.getpid(), flush=True)  # noqa: T201  the test waits for it
    signal.pause()


def wait_accepted(client: Client, transfer: Transfer) -> None:
    while transfer.accepted is None and transfer.refused is None:
        client.poll(10.0)


if __name__ == "__main__":
    main()
