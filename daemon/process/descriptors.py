"""The descriptors that this process may open: how many each tenant has, and a reserve.

Without a free descriptor some libraries end the process. So descriptors that engines and unauthenticated clients make
the daemon open are counted here before they are kept. Of the limit, apart from those open at the start:

- a *reserve* is for the daemon itself: files of the disk tier, memory in transit, libraries.
- four *shares* are for what has no session: connections to the control socket, connections of other daemons, those to
  the session socket that have not opened one, and links to other daemons. New ones replace the oldest.
- the *room* is for sessions, pools, rings and tables. One tenant may have three quarters of it, and its share of what
  the others leave; and half of it for pools, so that pools do not keep sessions out; in any case what is kept for it.
  What does not fit is refused; root and the daemon's own user may open a few sessions more.

Counts are of what is promised: a session has its control connection from its first moment on.
"""

from __future__ import annotations

import os
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Literal

import structlog

from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.process.shares import Shares
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import ConfigError, OutOfDescriptorsError
from kvferry.protocol.session_messages import DescriptorsStatus

LEAST: Final = 128
MOST: Final = 1 << 20
"""More is not asked for: some libraries walk over all that there could be."""

PER_REGION: Final = 2
"""A region of host memory: its descriptor, and the one that Python's mmap keeps of it."""
PER_POOL: Final = 2 * PER_REGION
"""Its memory, and the record from which the next daemon adopts it."""
PER_SESSION: Final = 3
"""Its socket, the process's pidfd, and its control connection."""
OPERATORS: Final = 4
"""Sessions, out of the reserve, that root and the daemon's own user may have beyond the bounds: commands need one."""
PER_RING: Final = PER_REGION + 1
"""With the eventfd."""
PER_LINK: Final = 6
"""A link to another daemon: libzmq's DEALER and its monitor have a mailbox each, and there is the connection."""

Kind = Literal["sessions", "pools"]
log = structlog.get_logger(__name__)


def raise_limit() -> int:
    """Raise this process's soft limit of descriptors to its hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else soft


def count_open() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in os.scandir("/proc/self/fd")) - 1  # without the one that reads them


class _Held:
    """What a holder has; it counts until the holder is closed, given back, or gone."""

    def __init__(self, tenant: int, kind: Kind, count: int) -> None:
        self.tenant = tenant
        self.kind = kind
        self.count = count


class Descriptors:
    """The count of what is promised, for the control loop.

    Attributes:
        limit: how many the process may have open.
        unauthenticated: connections to the control socket without a session.
        peers: connections of other daemons.
        unopened: connections to the session socket that have not opened a session.
        links: links to other daemons.
        room: for sessions, pools, rings and tables.
    """

    def __init__(self, limit: int = MOST, count: Callable[[], int] = count_open, shares: Shares | None = None) -> None:
        """``count`` returns how many are open.

        Raises:
            ConfigError: the limit is too low to serve anybody.
        """
        if limit < LEAST:
            raise ConfigError(
                f"this process may open {limit} descriptors; it needs {LEAST}, and a few for each engine and pool",
                remedy="raise LimitNOFILE= in the unit, or ulimit -n",
            )
        self.limit = limit
        self._shares = shares or Shares()
        self.unauthenticated = self.peers = min(max(limit // 16, 8), 1024)
        self.unopened = min(max(limit // 32, 4), 64)
        self._reserve = min(max(limit // 8, 32), 1024)
        self._count = count
        self.links = min(max(limit // 8 // PER_LINK, 4), 1024)
        without_session = self.unauthenticated + self.peers + self.unopened + self.links * PER_LINK
        self.room = limit - self._reserve - without_session
        self._held: weakref.WeakKeyDictionary[object, _Held] = weakref.WeakKeyDictionary()
        self._is_short = False

    def __repr__(self) -> str:
        """Show how much of the room is promised."""
        return f"<Descriptors {self.promised()} of {self.room} promised, limit {self.limit}>"

    def status(self, *, listening: bool) -> DescriptorsStatus:
        """Return what STATUS shows."""
        return DescriptorsStatus(
            open=self._count(), limit=self.limit, promised=self.promised(), room=self.room, listening=listening
        )

    def most_links(self, tenant: int, used: Mapping[int, int]) -> int:
        """Return how many links transfers of a tenant may have that no daemon has proved; some are for who calls here.

        Args:
            tenant: whose transfers name the address.
            used: what each has.
        """
        return self._shares.most(tenant, self.links - max(1, self.links // 8), used)

    def begin(self) -> None:
        """Take what is open now, before anybody has connected, out of the room, except what was adopted."""
        sessions = self.promised(kind="sessions")  # a pidfd each so far
        self.room -= self._count() - self.promised(kind="pools") - sessions // PER_SESSION
        log.info("descriptors", limit=self.limit, room=self.room, of_one_user=self.room * 3 // 4, reserve=self._reserve)

    def promised(self, tenant: int | None = None, kind: Kind | None = None) -> int:
        """Return how many are promised: to a tenant, for a kind, or in all."""
        used = self.by_tenant(kind)
        return used.total() if tenant is None else used[tenant]

    def by_tenant(self, kind: Kind | None = None) -> Counter[int]:
        """Return how many are promised to each tenant, for a kind or in all."""
        used: Counter[int] = Counter()
        for holder, held in self._held.items():
            if getattr(holder, "fd", 0) >= 0 and kind in {None, held.kind}:
                used[held.tenant] += held.count
        return used

    def take(self, holder: object, tenant: int, kind: Kind, count: int) -> None:
        """Promise ``count`` descriptors to a holder: a closed region of host memory gives them back by itself.

        Raises:
            OutOfDescriptorsError: the tenant, or all together, would have too many; says whose bound it is.
        """
        self._check(tenant, kind, count)
        self.promise(holder, tenant, kind, count)

    def promise(self, holder: object, tenant: int, kind: Kind, count: int) -> None:
        """Promise ``count`` descriptors to a holder, whatever is promised already: it was adopted."""
        held = self._held.get(holder)
        if held is None:
            self._held[holder] = _Held(tenant, kind, count)
        else:
            held.count += count

    def keep(self, holder: object, count: int) -> None:
        """Record that a holder has only so many left."""
        held = self._held.get(holder)
        if held is not None:
            held.count = count

    def give(self, holder: object) -> None:
        """Take back what a holder was promised. Twice does nothing."""
        self._held.pop(holder, None)

    def _check(self, tenant: int, kind: Kind, count: int) -> None:
        used, its_own = self.by_tenant(), self._shares.kept_for(tenant, self.room)
        most = min(max(self.room * 3 // 4, its_own), self._shares.most(tenant, self.room, used))
        bounds = [
            (used[tenant], most, f"{whose(tenant)} (your bound)"),
            (used.total(), self.room, "all together (everybody's bound)"),
        ]
        if kind == "pools":
            its = self.promised(tenant, kind), max(self.room // 2, its_own)
            bounds.insert(0, (*its, f"pools of {whose(tenant)} (your bound)"))
        of_operators = OPERATORS * PER_SESSION if kind == "sessions" and may_see_all(tenant) else 0
        for promised, bound, who in bounds:
            if promised + count > bound + of_operators:
                self._refuse(f"{who} would have {promised + count} of at most {bound} descriptors")
        if 2 * bounds[-1][0] > self.room and self._count() + count > self.limit - self._reserve // 2:
            self._refuse(f"{self._count()} of {self.limit} descriptors are open")
        self._is_short = False

    def _refuse(self, why: str) -> None:
        if not self._is_short:  # once until there is room again
            log.warning("descriptors are short", cause=why, limit=self.limit, remedy=OutOfDescriptorsError.remedy)
        self._is_short = True
        raise OutOfDescriptorsError(why)  # in no variable: its traceback would keep what the callers close alive
