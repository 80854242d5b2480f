"""UPGRADE: the next version takes this daemon's place, if it can go on with what there is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import closing

import structlog

from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.control.session_index import INDEX_BYTES, SessionIndex
from kvferry.daemon.process.access import check_operator
from kvferry.daemon.process.succession import Descriptors, Successor
from kvferry.daemon.services.adoption import INDEX, Adoption, check_record
from kvferry.daemon.tiers.kept_tier import check_format
from kvferry.daemon.tiers.lower_tiers import Background
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.records import UnreadableFileError
from kvferry.protocol.config.schema import Config
from kvferry.protocol.config.values import values_of
from kvferry.protocol.errors import (
    RETRY_LATER_MS,
    InternalError,
    KvferryError,
    OverloadedError,
    UpgradeRefusedError,
)
from kvferry.protocol.session_messages import Upgrade, Upgrading

log = structlog.get_logger(__name__)


class UpgradeService:
    """Answers UPGRADE.

    Attributes:
        successor: the daemon that is ready to take this one's place, which ends then.
        ready: set when there is one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tenant_of: Callable[[bytes], int | None],
        adoption: Adoption,
        config: Config,
    ) -> None:
        """``tenant_of`` returns the tenant who made a connection; the next daemon compares its ``config``."""
        self.successor: Successor | None = None
        self.ready = asyncio.Event()
        self._dispatcher = dispatcher
        self._tenant_of = tenant_of
        self._adoption = adoption
        self._config = config
        self._background = Background("an UPGRADE")
        self._in_progress = False
        dispatcher.handle_open("UPGRADE", self._upgrade)

    def __repr__(self) -> str:
        """Show the successor."""
        return f"<UpgradeService {self.successor!r}>"

    async def close(self) -> None:
        """End an upgrade that has not come so far."""
        await self._background.close()

    def _upgrade(self, call: OpenCall) -> None:
        assert isinstance(call.body, Upgrade), call.body
        tenant = self._tenant_of(call.identity)
        check_operator(tenant, "UPGRADE ends this daemon")
        if not self._adoption.outlives:
            raise UpgradeRefusedError(
                "nothing outlives this daemon",
                remedy="restart it with --keep, or under a service manager with a store of descriptors",
            )
        if self._in_progress:
            raise OverloadedError("another UPGRADE is in progress").after(RETRY_LATER_MS)
        self._in_progress = True
        self._background.spawn(self._answer(call))

    async def _answer(self, call: OpenCall) -> None:
        answer: Upgrading | KvferryError
        try:
            successor = await Successor.start(self._adoption.descriptors(), config=values_of(self._config))
        except KvferryError as error:
            log.warning("not upgraded: this daemon goes on", cause=error.detail)
            answer, self._in_progress = error, False
        except Exception as cause:
            log.exception("not upgraded: this daemon goes on", cause=str(cause))
            answer, self._in_progress = InternalError(f"UPGRADE failed: {type(cause).__name__}"), False
        else:
            log.info("upgraded: the next daemon takes over", version=successor.version, pid=successor.pid)
            answer = Upgrading(daemon_version=successor.version, pid=successor.pid)
            self.successor = successor
            self.ready.set()
        self._dispatcher.answer_open(call, answer)


def check_kept(kept: Descriptors) -> None:
    """Check that this version can go on with what the daemon before it has recorded, and open the devices of its pools.

    They take seconds the first time, and next to nothing when this process opens them again, to adopt.

    Raises:
        UpgradeRefusedError: it would lose something; names it.
    """
    for name, fds in kept.items():
        try:
            if name == INDEX:
                with closing(HostRegion(os.dup(fds[0]), INDEX_BYTES)) as region:
                    SessionIndex(region.buffer)
            elif device := check_record(name, fds[0]):
                Accelerator(device).open()
            check_format(name, fds[0])
        except (KvferryError, UnreadableFileError) as cause:
            raise UpgradeRefusedError(f"{name}: {cause}") from cause
