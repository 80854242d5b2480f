"""The asynchronous client: the same calls as ``Client``, awaited, on any asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvferry.clients import operations
from kvferry.clients.async_tiers import AsyncTiers
from kvferry.clients.connection import (
    find_runtime_dir,
    milliseconds,
)
from kvferry.clients.devices import RING_EVENTS, attached_pool, lent_arrays
from kvferry.clients.events import COUNTER_BYTES, EventRing, RingEvent
from kvferry.clients.operations import Pages
from kvferry.clients.pool import AttachedPool
from kvferry.clients.session_channel import SessionChannel
from kvferry.clients.sync_requests import DEFAULT_DEADLINE_S
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.client_core import HandOff
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DaemonLostError, DeadlineError
from kvferry.protocol.event_points import EventPoint
from kvferry.protocol.events import Finished
from kvferry.protocol.ids import HOST, MAIN
from kvferry.protocol.manifests import Manifest, PoolSpec
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.room_messages import Cancelled, Landing, LayerStep, RoomResult, Side
from kvferry.protocol.session_messages import ShareFollows, StatusReport, Welcome

if TYPE_CHECKING:
    import torch


class AsyncClient(AsyncTiers):
    """One session with the daemon of this node; see ``Client`` for what each call means and raises."""

    welcome: Welcome | None = None

    @classmethod
    async def connect(
        cls,
        runtime_dir: Path | str | None = None,
        *,
        name: str = "",
        session: bool = True,
        devices: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> AsyncClient:
        """Connect, open a session and agree on the protocol; see ``Client.connect``."""
        directory = await asyncio.to_thread(find_runtime_dir, runtime_dir)
        channel = await asyncio.to_thread(SessionChannel.open, directory, name) if session else None
        client = cls(directory, channel, devices)
        try:
            client.welcome = await client.call(operations.hello(name), deadline_s=timeout_s, margin_s=0.0)
        except DeadlineError as cause:
            client.close()
            raise DaemonLostError(f"no daemon answers at {directory} within {timeout_s:g} s") from cause
        except BaseException:
            client.close()
            raise
        return client

    async def ping(self) -> float:
        """Return the seconds of one round trip."""
        started = time.perf_counter()
        await self.call(operations.ping())
        return time.perf_counter() - started

    async def status(self) -> StatusReport:
        """Return what the daemon holds and does."""
        return await self.call(operations.status())

    async def create_pool(
        self,
        name: str,
        spec: PoolSpec,
        *,
        model: ModelIdentity | None = None,
        device: str = HOST,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> AttachedPool:
        """See ``Client.create_pool``."""
        created = await self.call(operations.create_pool(name, spec, device, model), deadline_s=deadline_s)
        return await self.attach_pool(name, created.manifest.layout_digest)

    async def attach_pool(self, name: str, layout_digest: str = "") -> AttachedPool:
        """See ``Client.attach_pool``."""
        operation = operations.attach_pool(name, layout_digest, self._devices.process_id())
        outgoing, attached = await self._round_trip(operation)
        if self._channel is None:
            raise ValueError("attaching a pool needs a session")
        if attached.device == HOST:
            return attached_pool(name, attached, outgoing.message_id, self._channel, self._devices)
        return await asyncio.to_thread(attached_pool, name, attached, outgoing.message_id, self._channel, self._devices)

    async def lend_pool(
        self,
        name: str,
        spec: PoolSpec,
        tensors: Mapping[tuple[Any, ...], torch.Tensor],
        *,
        device: str,
        model: ModelIdentity | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Manifest:
        """See ``Client.lend_pool``."""

        def said(message_id: int) -> Sequence[ShareFollows]:
            return self._devices.lend(device, list(tensors.values()), message_id)

        operation = operations.lend_pool(name, spec, device, lent_arrays(tensors), model)
        _, lent = await self._round_trip(operation, deadline_s=deadline_s, said=said)
        return lent.manifest

    async def open_events(
        self, device: str = HOST, *, events: int = RING_EVENTS, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> EventRing:
        """See ``Client.open_events``."""
        made: list[RingEvent] = []

        def said(message_id: int) -> Sequence[ShareFollows]:
            if device == HOST:
                return ()
            found, frame = self._devices.events(device, events, message_id)
            made.extend(found)
            return (frame,)

        outgoing, opened = await self._round_trip(operations.open_events(device), deadline_s=deadline_s, said=said)
        if self._channel is None:
            raise ValueError("an event ring needs a session")
        self._channel.receive()
        counters, eventfd = self._channel.take_fds(outgoing.message_id)
        return EventRing(HostRegion(counters, opened.slots * COUNTER_BYTES), eventfd, made)

    async def delete_pool(self, name: str) -> None:
        """See ``Client.delete_pool``."""
        await self.call(operations.delete_pool(name))

    async def allocate(self, pool: str, count: int, space: str = MAIN) -> PageIds:
        """See ``Client.allocate``."""
        return await self.call(operations.allocate(pool, count, space))

    async def free(self, pool: str, ids: npt.ArrayLike, space: str = MAIN, *, after: EventPoint | None = None) -> Freed:
        """See ``Client.free``."""
        return await self.call(operations.free(pool, ids, space, after))

    def send(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages],
        *,
        first_token: int | None = None,
        payload: bytes = b"",
        last: bool = True,
        destinations: int = 1,
        steps: Sequence[LayerStep] = (),
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> HandOff:
        """See ``Client.send``; await ``finished`` or ``settled``."""
        body = operations.send_body(
            pool,
            request_id,
            lists,
            last=last,
            destinations=destinations,
            first_token=first_token,
            payload=payload,
            steps=steps,
        )
        hand_off, outgoing = self._core.hand_off(body, [one.ids for one in lists], deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return hand_off

    def receive(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages],
        *,
        sources: int = 1,
        source_daemons: Sequence[str] = (),
        after: EventPoint | None = None,
        land: Landing = "pages",
        any_model: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> HandOff:
        """See ``Client.receive``; await ``finished`` or ``settled``."""
        body = operations.receive_body(
            pool, request_id, lists, sources, source_daemons, after, land, any_model=any_model
        )
        ids = [one.ids for one in lists] if land == "pages" else []
        hand_off, outgoing = self._core.hand_off(body, ids, deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return hand_off

    async def cancel(self, hand_off: HandOff, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Cancelled:
        """See ``Client.cancel``."""
        key = hand_off.key
        return await self.call(operations.cancel(key.pool, key.request_id, key.side), deadline_s=deadline_s)

    async def result(self, pool: str, request_id: str, side: Side) -> RoomResult:
        """See ``Client.result``."""
        return await self.call(operations.result(pool, request_id, side))

    async def finished(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> Finished:
        """See ``Client.wait_finished``."""
        await self._wait_until(lambda: hand_off.is_finished, timeout_s, "the outcome of the hand-off")
        return hand_off.outcome()

    async def settled(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> None:
        """See ``Client.wait_settled``."""
        await self._wait_until(lambda: hand_off.is_settled, timeout_s, "the end of the hand-off")
