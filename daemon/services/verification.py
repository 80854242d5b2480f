"""VERIFY: compares the books of pages, tiers and index with everything that holds a part of them, in bounded steps.

Each structure checks itself (``problems`` and the like) against what the holders say: requests under way, operations,
snapshots, leases. A walk through a large one is paused, so that other requests get their turn, and is begun anew where
the structure changed meanwhile; after ``ATTEMPTS`` it is taken in one go. What is found wrong counts only if it is
found twice, a moment apart: some holders let go a moment after they have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog

from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.process.access import check_operator
from kvferry.daemon.services.adoption import Adoption
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.pools import PoolService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.tiers.lower_tiers import Background
from kvferry.daemon.transfer.registry import Endpoints
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.pools.allocator import HeldPages, PageAllocator
from kvferry.pools.integrity import RESTART, Check, Problem, Walk
from kvferry.pools.pool import Pool
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    RETRY_LATER_MS,
    DeadlineError,
    InternalError,
    KvferryError,
    OverloadedError,
)
from kvferry.protocol.session_messages import Finding, Verified, Verify

SLICE_S: Final = 0.5e-3
"""For how long a walk goes on before others get their turn."""

ATTEMPTS: Final = 4
"""How often a walk is begun that is overtaken by changes; the last time it is not paused."""

AGAIN_S: Final = 0.1
"""After so long a part in which something was wrong is checked again."""

MARGIN_S: Final = 0.5
"""So long before the request's deadline the reading of files ends."""

MAX_FINDINGS: Final = 256
FILES: Final = "the disk tier's files"
FILES_REMEDY: Final = (
    "a damaged or missing file is a miss, an unknown one is adopted at the next start: nothing is lost; where it "
    "happens again, check the disk (dmesg, smartctl)"
)


log = structlog.get_logger(__name__)


class Verification:
    """Answers VERIFY, one at a time; without a session, which an operator may not get where there are too many."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tenant_of: Callable[[bytes], int | None],
        registry: PoolRegistry,
        pools: PoolService,
        endpoints: Endpoints,
        tiers: Tiers,
        receiver: NetworkReceiver | None,
        adoption: Adoption,
    ) -> None:
        """``tenant_of`` returns the tenant who made a connection."""
        self._dispatcher = dispatcher
        self._tenant_of = tenant_of
        self._registry = registry
        self._pools = pools
        self._endpoints = endpoints
        self._tiers = tiers
        self._receiver = receiver
        self._adoption = adoption
        self._background = Background("a VERIFY")
        self._in_progress = False
        self._longest_s = 0.0
        dispatcher.handle_open("VERIFY", self._verify)

    def __repr__(self) -> str:
        """Show whether one is in progress."""
        return f"<Verification {len(self._background)} in progress>"

    async def close(self) -> None:
        """Cancel the one that is in progress."""
        await self._background.close()

    def _verify(self, call: OpenCall) -> None:
        assert isinstance(call.body, Verify), call.body
        tenant = self._tenant_of(call.identity)
        check_operator(tenant, "VERIFY names everybody's pools and requests")
        if self._in_progress:
            raise OverloadedError("another VERIFY is in progress").after(RETRY_LATER_MS)
        self._in_progress = True
        self._background.spawn(self._answer(call, deep=call.body.deep))

    async def _answer(self, call: OpenCall, *, deep: bool) -> None:
        until_s = asyncio.get_running_loop().time() + call.deadline_s - MARGIN_S
        answer: Verified | KvferryError
        try:
            async with asyncio.timeout(call.deadline_s):
                answer = await self._verified(deep=deep, until_s=until_s)
        except TimeoutError:
            answer = DeadlineError(f"VERIFY took longer than {call.deadline_s:g} s", remedy="allow more time")
        except Exception as cause:  # what checks for bugs may have one
            log.exception("VERIFY failed", cause=str(cause))
            answer = InternalError(f"VERIFY failed: {type(cause).__name__}")
        self._in_progress = False
        self._dispatcher.answer_open(call, answer)

    async def _verified(self, *, deep: bool, until_s: float) -> Verified:
        self._longest_s = 0.0
        findings: list[Finding] = []
        for check in list(self._checks()):
            problems = await self._walked(check)
            if problems:
                await asyncio.sleep(AGAIN_S)
                problems = await self._walked(check)
            findings += (_finding(check.where, problem, check.remedy) for problem in problems)
        files, problems = await self._tiers.examine_files(deep=deep, until_s=until_s)
        findings += (_finding(FILES, problem, FILES_REMEDY) for problem in problems)
        return Verified(
            findings=tuple(findings[:MAX_FINDINGS]),
            left_out=max(0, len(findings) - MAX_FINDINGS),
            checked=self._counts() | {"files": files},
            longest_step_us=round(self._longest_s * 1e6),
        )

    def _pools_of_all(self) -> Iterator[Pool]:
        """Yield every pool with pages: usable ones, and removed ones with pages in flight."""
        return itertools.chain(self._registry, self._pools.leaving)

    def _temporary_pools(self) -> Iterator[Pool]:
        return (one.pool for one in self._tiers.host_receives.held())

    def _held_pages(self) -> Iterator[HeldPages]:
        return itertools.chain(self._endpoints.held_pages(), self._tiers.operations.held_pages())

    def _checks(self) -> Iterator[Check]:
        for pool in self._pools_of_all():
            yield from self._checks_of(pool, owned=True)
        for pool in self._temporary_pools():
            yield from self._checks_of(pool, owned=False)  # their pages end with the transfer, whoever owns them
        now_s = time.monotonic()
        yield Check("the transfers", lambda: self._endpoints.problems(now_s), lambda: None, RESTART)
        yield Check("what the next daemon is left", self._adoption.problems, lambda: None, RESTART)
        if self._receiver is not None:
            yield Check("the bounce buffers", self._receiver.problems, lambda: None, RESTART)
        yield from self._tiers.checks()

    def _checks_of(self, pool: Pool, *, owned: bool) -> Iterator[Check]:
        for space, allocator in pool.allocators.items():
            where = f"pool {pool.name!r} of {whose(pool.tenant)}, page space {space!r}"
            walk = partial(self._page_problems, allocator, owned=owned)
            yield Check(where, walk, partial(getattr, allocator, "changes"), RESTART)

    def _page_problems(self, allocator: PageAllocator, *, owned: bool) -> Walk:
        yield from allocator.problems()
        yield from allocator.holder_problems(self._held_pages())
        if owned:
            sessions = self._dispatcher.sessions
            yield from allocator.owner_problems({one.owner_id for one in sessions})

    async def _walked(self, check: Check) -> list[Problem]:
        """Return the problems that a walk finds, all of one moment."""
        for attempt in range(ATTEMPTS):
            problems = await self._attempt(check, pausing=attempt < ATTEMPTS - 1)
            if problems is not None:
                return problems
        raise AssertionError(check)

    async def _attempt(self, check: Check, *, pausing: bool) -> list[Problem] | None:
        """Take a walk; return None where it was overtaken by a change."""
        version, problems, began_s = check.version(), [], time.perf_counter()
        for problem in check.walk():
            if problem is not None:
                problems.append(problem)
            elif pausing and time.perf_counter() - began_s > SLICE_S:
                self._longest_s = max(self._longest_s, time.perf_counter() - began_s)
                await asyncio.sleep(0)
                if check.version() != version:
                    return None
                began_s = time.perf_counter()
            if len(problems) > MAX_FINDINGS:
                break
        self._longest_s = max(self._longest_s, time.perf_counter() - began_s)
        return problems

    def _counts(self) -> dict[str, int]:
        pools = list(self._pools_of_all())
        pages = sum(one.capacity for pool in pools for one in pool.allocators.values())
        return {
            "pools": len(pools),
            "pages": pages,
            "requests": sum(1 for _ in self._endpoints),
            **self._tiers.counts(),
        }


def _finding(where: str, problem: Problem, remedy: str) -> Finding:
    what, at, total, holder = problem
    return Finding(where=where, what=what, at=at, count=total, holder=holder, remedy=remedy)
