"""A copy that stalls while its transfer ends: no page is anybody else's before its last byte has moved."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvferry.clients import AsyncClient, new_request_id, pages
from kvferry.daemon.transports import local
from kvferry.pools.copy_kernel import Copies, CopyThreads, Gate
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol import errors
from tests.kit.in_process import ON_THREADS, SPEC, serving

pytestmark = pytest.mark.anyio
ALL = 16
WAIT_S = 20.0
OURS, THEIRS = 7.0, 9.0


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


class StallingThreads:
    """Copies the first half of what it is given, then stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at_half, self._gate = threading.Event(), threading.Event()
        self.go_on = self._gate.set
        monkeypatch.setattr(local, "best_copy", lambda: self)

    def stands(self) -> None:
        """Wait until one does."""
        assert self._at_half.wait(WAIT_S)

    def __call__(self, blocks: Blocks) -> None:
        """Copy."""
        halves = blocks.copy()
        halves[:, 2] //= 2
        copy_one_by_one(halves)
        self._at_half.set()
        assert self._gate.wait(WAIT_S)
        copy_one_by_one(blocks)


class StallingCopyThreads:
    """What the loop gives to the copy threads stands still in its first block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, submit = Gate(), CopyThreads.submit
        self._gate = gate
        self.go_on = gate.open
        gate.shut()

        def submit_gated(copy_threads: CopyThreads, copies: Copies, threads: int, token: object) -> None:
            with gate.giving_way(WAIT_S):
                submit(copy_threads, copies, threads, token)

        monkeypatch.setattr(CopyThreads, "submit", submit_gated)

    def stands(self) -> None:
        """Wait until one does."""
        ends_s = time.monotonic() + WAIT_S
        while not self._gate.standing:
            assert time.monotonic() < ends_s


class Stalled(NamedTuple):
    """Two engines of a daemon whose copies stall."""

    prefill: AsyncClient
    decode: AsyncClient
    copy: StallingThreads | StallingCopyThreads
    path: Path


@pytest.fixture(params=[StallingThreads, StallingCopyThreads])
async def stalled(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: object,  # noqa: ARG001
) -> AsyncIterator[Stalled]:
    """Run a daemon, and two engines."""
    copy: StallingThreads | StallingCopyThreads = request.param(monkeypatch)
    async with (
        serving(tuning=ON_THREADS) as at,
        await AsyncClient.connect(at.path) as prefill,
        await AsyncClient.connect(at.path) as decode,
    ):
        try:
            yield Stalled(prefill, decode, copy, at.path)
        finally:
            copy.go_on()


@pytest.mark.parametrize("how", ["cancelled", "late", "its engine dies", "the sender gives up"])
async def test_pages_that_a_stalled_copy_still_writes_are_nobodys(stalled: Stalled, how: str) -> None:
    prefill, decode, copy, path = stalled
    source = await prefill.create_pool("prefill", SPEC)
    sent = await prefill.allocate("prefill", ALL)
    for role in ("k", "v"):
        source.tensor("main", role)[:, sent] = OURS
    engine = await AsyncClient.connect(path) if how == "its engine dies" else decode
    target = await decode.create_pool("decode", SPEC)
    received = await engine.allocate("decode", ALL // 2)
    request_id = new_request_id()
    receiving = engine.receive("decode", request_id, [pages(received)], deadline_s=0.3 if how == "late" else None)
    sending = prefill.send("prefill", request_id, [pages(sent[: ALL // 2])])
    await asyncio.to_thread(copy.stands)
    if how == "cancelled":
        await engine.cancel(receiving, wait=False)
    elif how == "the sender gives up":
        await prefill.cancel(sending, wait=False)
    elif how == "its engine dies":
        engine.close()
    if how != "its engine dies":
        with pytest.raises(errors.KvferryError):
            await engine.wait_finished(receiving)
        assert not receiving.is_settled
        freed = await engine.free("decode", received)
        assert (freed.freed, freed.deferred) == (0, ALL // 2)
    else:
        while len((await decode.status()).sessions) > 2:
            pass
    theirs = await decode.allocate("decode", ALL // 2)
    assert not set(theirs) & set(received)
    with pytest.raises(errors.PoolFullError):
        await decode.allocate("decode", 1)
    assert (await prefill.free("prefill", sent)).deferred == ALL // 2, "they are being read"
    copy.go_on()
    await prefill.wait_settled(sending)
    theirs = np.concatenate([theirs, await decode.allocate("decode", ALL // 2)])
    assert set(theirs) >= set(received)
    tensors = [target.tensor("main", role) for role in ("k", "v")]
    for tensor in tensors:
        tensor[:, theirs] = THEIRS
    await decode.ping()
    assert all(bool((tensor[:, theirs] == THEIRS).all()) for tensor in tensors), "a late write reached a page"
