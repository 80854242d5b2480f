"""An engine that forks, or drops its client: ``python forking_engine.py SCENE RUNTIME_DIR POOL``; prints what it met.

A process of its own, since a child of pytest's would share all that pytest has.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvferry.clients import AsyncClient, Client, MhaSpec, new_request_id, pages
from kvferry.protocol.errors import KvferryError

SPEC = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")


def in_child(operation: Callable[[], object]) -> str:
    """Do something in a forked child that ends as a script does, and return its end: ``exit 0``, ``SIGSEGV``."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        operation()
        sys.exit(0)  # with all that Python does at its end
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return signal.Signals(-ended).name if ended < 0 else f"exit {ended}"


def code_of(call: Callable[[], object]) -> str:
    try:
        call()
    except KvferryError as error:
        return error.code
    return "no error"


def calls(runtime_dir: str, pool_name: str) -> None:
    """Let a child call everything; then the parent goes on as if nothing had been."""
    client = Client.connect(runtime_dir, name="parent")
    pool = client.create_pool(pool_name, SPEC)
    ring, tables = client.open_events(), client.create_tables("t", pool_name, max_batch=2, max_context_tokens=8)
    ids = client.allocate(pool_name, 2)
    transfer = client.receive(pool_name, new_request_id(), [pages(ids)])
    step = ring.step(0, 1)

    def child() -> None:
        for call in (
            lambda: client.poll(0),
            client.ping,
            lambda: client.allocate(pool_name, 1),
            lambda: client.send(pool_name, new_request_id(), [pages(ids)]),
            lambda: client.offload(pool_name, [pages(ids)]),
            lambda: client.wait_finished(transfer),
            lambda: client.update_tables(tables, []),
            lambda: client.attach_pool(pool_name),
            lambda: pool.tensor("main", "k"),
            pool.engine_lists,
            lambda: ring.record(step),
            ring.record_event,
            tables.host_lengths,
            lambda: tables.block_tables,
        ):
            print(code_of(call))
        print(repr(client), repr(pool), repr(ring), repr(tables), file=sys.stderr)
        for one in (client, ring, tables, pool):
            one.close()

    print(in_child(child))
    print(client.allocate(pool_name, 1).tolist(), len(client.poll(0)), client.wait(client.update_tables(tables, [])))
    ring.record(step)
    client.close()


def async_calls(runtime_dir: str, pool_name: str) -> None:
    """Let a child call an asynchronous client, with a loop of its own; then the parent goes on."""

    async def parent() -> None:
        client = await AsyncClient.connect(runtime_dir, name="parent")
        await client.create_pool(pool_name, SPEC)
        ids = await client.allocate(pool_name, 1)

        def child() -> None:
            print(code_of(lambda: client.send(pool_name, new_request_id(), [pages(ids)])))
            for step in (client.ping().send, client.poll().send):
                print(code_of(partial(step, None)))
            client.close()
            gc.collect()
            sys.stdout.flush()
            os._exit(0)  # back in the loop there would be two who read what wakes it

        print(in_child(child))
        print((await client.allocate(pool_name, 1)).tolist())
        client.close()

    asyncio.run(parent())


def touches(runtime_dir: str, pool_name: str) -> None:
    """Let a child write to a pool by a tensor that the parent had made, and another one read it."""
    with Client.connect(runtime_dir) as client:
        tensor = client.create_pool(pool_name, SPEC).tensor("main", "k")
        tensor[0, 1] = 5.0
        print(in_child(lambda: tensor[0, 1].fill_(6.0)), in_child(lambda: tensor[0, 1].sum().item()))
        print(float(tensor[0, 1, 0, 0, 0]))


def leaves(runtime_dir: str, pool_name: str) -> None:
    """Let a child map memory of its own, and give up all that it has of the parent's: its own memory stays."""
    client = Client.connect(runtime_dir)
    pool = client.create_pool(pool_name, SPEC)
    region_bytes = pool.manifest.region_bytes
    held: list[object] = [pool, pool.tensor("main", "k")]
    del pool

    def child() -> None:
        mine = [np.frombuffer(mmap.mmap(-1, region_bytes), np.uint8) for _ in range(64)]
        held.clear()
        gc.collect()
        print(sum(int(one.sum()) for one in mine))

    print(in_child(child))
    client.close()


def attaches(runtime_dir: str, pool_name: str) -> None:
    """Let a child connect for itself and write to a page of the pool, which the parent then sees."""
    with Client.connect(runtime_dir) as client:
        tensor = client.create_pool(pool_name, SPEC).tensor("main", "k")

        def child() -> None:
            with Client.connect(runtime_dir) as own:
                [page] = own.allocate(pool_name, 1)
                own.attach_pool(pool_name).tensor("main", "k")[0, page] = 3.0

        print(in_child(child))
        print(float(tensor[0, 1, 0, 0, 0]))


def holds(runtime_dir: str, pool_name: str) -> None:
    """Fork a child that keeps every descriptor until standard input ends, and close the client meanwhile."""
    client = Client.connect(runtime_dir, name="holder")
    client.create_pool(pool_name, SPEC)
    client.allocate(pool_name, 16)
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    client.close()
    print("closed", flush=True)
    os.wait()


def drops(runtime_dir: str, kind: str) -> None:
    """Drop a client that nobody closed, and see its session end."""

    async def connected() -> AsyncClient:
        return await AsyncClient.connect(runtime_dir, name="dropped")

    client: Any = Client.connect(runtime_dir, name="dropped") if kind == "sync" else asyncio.run(connected())
    client.itself = client  # as an engine whose parts know each other
    del client
    gc.collect()
    with Client.connect(runtime_dir) as other:
        while any(one.name == "dropped" for one in other.status().sessions):
            pass
    print("gone")


def drops_in_child(runtime_dir: str, name: str) -> None:
    """Let a child drop its copy of a client: the parent's session stays."""
    held: list[Any] = [Client.connect(runtime_dir, name=name)]
    held[0].itself = held[0]

    def child() -> None:
        held.clear()
        gc.collect()

    print(in_child(child), [one.name for one in held[0].status().sessions if one.name == name])


SCENES = {one.__name__: one for one in (calls, async_calls, touches, leaves, attaches, holds, drops, drops_in_child)}

if __name__ == "__main__":
    SCENES[sys.argv[1]](*sys.argv[2:])
