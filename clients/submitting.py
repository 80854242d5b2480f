"""What a client asks for without waiting: the calls that a session and a batch have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar
from weakref import WeakSet

import msgspec
import numpy.typing as npt

from kvferry.clients import calls
from kvferry.clients.arguments import checked, packed_ids, sequence, wrong_kind
from kvferry.clients.calls import IDS, BlockTableEntries, Call, Pages, asked, check_ids, joined, page_lists
from kvferry.clients.core.client_core import ClientCore, Outgoing
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.daemon_socket import REPLY_MARGIN_S
from kvferry.clients.plain import is_plain
from kvferry.clients.tables import Tables, tables_name
from kvferry.protocol.base import DeviceEvent, RequestBody
from kvferry.protocol.errors import PoolLostError, UnknownTablesError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import INT64_BYTES
from kvferry.protocol.pool_messages import AttachPool, CreatePool, DeletePool, RegisterPool
from kvferry.protocol.table_messages import TablesUpdated, UpdateTables
from kvferry.protocol.tier_messages import ChainStart, Load, Offload, Restore, Store
from kvferry.protocol.transfer_messages import LayerStep, Receive, ReceiveInto, Send

T = TypeVar("T")

_MAKE_ANEW: Final = (CreatePool, AttachPool, RegisterPool, DeletePool)


class PendingReply(msgspec.Struct, Generic[T], eq=False, weakref=True):
    """A sent request whose reply has not been taken yet; see ``begin``."""

    conversation: object
    call: Call[T]
    message_id: int
    timeout_s: float
    ends_at: float
    taken: bool = False

    def __repr__(self) -> str:
        """Show what was asked for."""
        return f"<PendingReply {self.message_id} to {type(self.call.body).__name__}>"


def pending_reply(conversation: object, call: Call[T], message_id: int, timeout_s: float) -> PendingReply[T]:
    """Return what waits for a reply from now on."""
    return PendingReply(conversation, call, message_id, timeout_s, time.monotonic() + timeout_s)


class Submitting(ABC):
    """Makes requests and lets them be sent; nothing waits."""

    _core: ClientCore
    _lost_pools: set[str]
    _tables: WeakSet[Tables]
    """Those that this session has: others may have the same names."""

    def _name_of(self, tables: Tables) -> str:
        """Return the name of tables of this session.

        Raises:
            InvalidFieldError: the argument is not ``Tables``.
            UnknownTablesError: they are another session's, or are no more.
        """
        name = tables_name(tables)
        if tables not in self._tables:
            raise UnknownTablesError(
                f"{tables!r} are another session's, were deleted, or went with the daemon before this one",
                field="tables",
            )
        return name

    def _check_pool(self, body: RequestBody) -> None:
        """Check that a request does not name a pool whose memory this client has mapped, and the daemon has not.

        Raises:
            PoolLostError: it does: a pool of the same name may be there by now, with other pages.
        """
        pool = getattr(body, "pool", None)
        if pool in self._lost_pools and not isinstance(body, _MAKE_ANEW):
            raise PoolLostError(f"pool {pool!r} went with the daemon before this one", field="pool")

    @abstractmethod
    def _put(self, outgoing: Outgoing) -> None:
        """Send a request."""

    @abstractmethod
    def _deadline(self, deadline_s: float | None) -> tuple[float, int]:
        """Return a request's deadline in seconds, and in milliseconds as it travels: 0 is the daemon's default.

        Raises:
            InvalidFieldError: it is no number of seconds, or longer than the daemon takes.
        """

    def begin(self, call: Call[T], *, deadline_s: float | None = None) -> PendingReply[T]:
        """Send a request and return at once; ``wait`` takes its reply, ``is_ready`` says whether it has come."""
        deadline_ms, kept_s = self._times(call, deadline_s)
        if self._lost_pools:
            self._check_pool(call.body)
        outgoing = self._core.request(call.body, call.ids, deadline_ms=deadline_ms)
        self._put(outgoing)
        return pending_reply(self._core.token, call, outgoing.message_id, kept_s + REPLY_MARGIN_S)

    # -- transfers

    def send(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages] = (),
        *,
        first_token: int | None = None,
        payload: bytes = b"",
        last: bool = True,
        steps: Sequence[LayerStep] = (),
        checksums: bool = False,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Send filled pages to the request's receivers. Return at once; follow it with ``poll`` or ``wait_…``.

        Do not write the pages before the transfer has settled. A prompt may be sent in chunks: ``last`` is false for
        all but the last one. They are one transfer and end alike, except refused ones.

        Args:
            pool: the pool of the pages.
            request_id: the receiving side uses the same.
            lists: the pages, one list a component; see ``pages``. None for a transfer that moves no page.
            first_token: the token that prefill sampled, delivered with completion.
            payload: more to deliver with it, up to the ``max_payload_bytes`` of both pools: 64 KiB by default.
            last: whether no further chunk follows.
            steps: which layers are ready after which event, in that order; none: the pages are filled.
            checksums: whether to compare arrived bytes with checksums of these pages before they count
                (TRANSFER_FAILED); docs/engines.md has cost and coverage.
            deadline_s: for the whole transfer.
        """
        heads, ids = page_lists(lists)
        body = Send(
            request_id=request_id,
            pool=pool,
            lists=heads,
            last=last,
            first_token=first_token,
            payload=payload,
            steps=sequence(steps, "steps, as ring.step makes them", "steps"),
            checksums=checksums,
        )
        body = body if is_plain(body, known="lists") else checked(body)
        return self._begin_transfer(body, ids, deadline_s)

    def receive(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages] = (),
        *,
        sources: int | list[str] | tuple[str, ...] = 1,
        destinations: int = 1,
        source_daemons: Sequence[str] = (),
        after: DeviceEvent | None = None,
        into: ReceiveInto = "pages",
        checksums: bool = False,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Make a transfer for the request in pages of this session. Returns at once, like ``send``.

        Do not touch the pages before the transfer has finished, nor reuse them before it has settled.

        Args:
            pool: the pool of the pages.
            request_id: the sending sides use the same.
            lists: the pages to fill, one list a component; see ``pages``. None if only the first token and the payload
                are wanted: the sources' pages are skipped.
            sources: how many pools send; or their names, where others send other parts of the request: the first one's
                first token and payload count.
            destinations: how many pools of the receiving side each of them fills, this one among them; all of these
                receive under the same request id, and say the same number.
            source_daemons: the addresses of the daemons they belong to, as those daemons' ``peers.listen`` gives them;
                none for this client's own daemon only.
            after: work that still uses the pages, see ``EventRing.record_event``; nothing is written before it is done.
            into: ``host`` without pages: the bytes become a snapshot of the host tier, which ``finished.snapshot``
                names; ``pages_wanted`` makes the lists.
            checksums: as in ``send``, whatever the senders say.
            deadline_s: for the whole transfer.
        """
        in_pages = str(into) != "host"
        count, names = (len(sources), tuple(sources)) if isinstance(sources, list | tuple) else (sources, ())
        heads, ids = page_lists(lists, with_ids=in_pages)
        body = Receive(
            request_id=request_id,
            pool=pool,
            lists=heads,
            sources=count,
            destinations=destinations,
            source_daemons=sequence(source_daemons, "addresses", "source_daemons"),
            source_pools=names,
            after=after,
            into=into,
            checksums=checksums,
        )
        body = body if is_plain(body, known="lists") else checked(body)
        return self._begin_transfer(body, ids if in_pages else (), deadline_s)

    # -- graph tables

    def update_tables(
        self,
        tables: Tables,
        lengths: npt.ArrayLike,
        *,
        extra_tokens: int = 0,
        entries: BlockTableEntries | None = None,
        rows: Mapping[int, npt.ArrayLike] | None = None,
        released: npt.ArrayLike = (),
        bound: tuple[npt.ArrayLike, npt.ArrayLike] = ((), ()),
        after: DeviceEvent | int | None = None,
        deadline_s: float | None = None,
    ) -> PendingReply[TablesUpdated]:
        """Change tables for the next replay: all of it or nothing. Returns at once; then ``wait`` and ``tables.order``.

        The daemon checks that ids are in the pool's range, lengths within the tables' width, and no page twice in a
        row. It does not check that a page is allocated or whose it is: often another session allocates.

        Args:
            tables: which.
            lengths: ``(batch,)`` tokens of each row; rows from ``batch`` on are no longer in use.
            extra_tokens: added to every length by this step: the draft tokens, to verify.
            entries: pages that rows get in addition.
            rows: rows of new requests, with all their pages.
            released: full pages whose window pages go back.
            bound: full pages that get a window page, and these.
            after: the end of the replay that still reads the tables: on a device what ``tables.replayed`` returns, on
                the host what ``EventRing.record_event`` does.
            deadline_s: for the daemon's reply.

        Raises:
            TableOverflowError, TableHoleError, WindowMismatchError, PageOutOfRangeError, DuplicatePageError,
                InvalidFieldError: by ``wait``; the tables are unchanged.
            TablesBusyError: by ``wait``: the previous update has not ended.
        """
        name = self._name_of(tables)
        counts, ids = calls.table_lists(lengths, entries, rows, released, bound)
        event, replayed = (None, after) if isinstance(after, int) else (after, None)
        body = UpdateTables(tables=name, extra_tokens=extra_tokens, after=event, replayed=replayed, **counts)
        return self.begin(asked(body, {"batch": "lengths", "replayed": "after"}, (ids,)), deadline_s=deadline_s)

    # -- tiers

    def offload(
        self,
        pool: str,
        lists: Sequence[Pages],
        *,
        release: bool = False,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> TierOperation:
        """Copy pages to the host tier, as a snapshot, which the operation names once it is accepted. Returns at once.

        Do not write or free the pages before the operation is done.

        Args:
            pool: the pool of the pages.
            lists: the pages, one list a component; see ``pages``.
            release: let the daemon free the pages as soon as they are copied; an operation that fails leaves them.
            after: work that still fills the pages, see ``EventRing.record_event``; nothing is read before it is done.
            deadline_s: for the whole operation.
        """
        heads, ids = page_lists(lists)
        body = Offload(pool=pool, lists=heads, release=release, after=after)
        return self._begin_operation(body, ids, deadline_s)

    def restore(
        self,
        pool: str,
        snapshot: str,
        lists: Sequence[Pages] | None = None,
        *,
        drop: bool = False,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> TierOperation:
        """Copy a snapshot of this user into pages. Returns at once; all or nothing.

        Args:
            pool: of the same layout as the snapshot's, the same pool or another one.
            snapshot: its name.
            lists: the pages, as many as it has, one list a component. None: the daemon takes pages for this session as
                soon as enough are free; the operation has them as ``pages``.
            drop: drop the snapshot once it is restored.
            after: work that still uses the pages; nothing is written before it is done.
            deadline_s: for the whole operation, waiting for pages included.
        """
        heads, ids = page_lists(() if lists is None else lists)
        body = Restore(
            snapshot=snapshot,
            pool=pool,
            lists=heads,
            allocate=lists is None,
            drop=drop,
            after=after,
        )
        return self._begin_operation(body, ids, deadline_s)

    def load(
        self,
        pool: str,
        lease: int,
        ids: npt.ArrayLike,
        *,
        first_block: int = 0,
        group: str = MAIN,
        unpin: bool = False,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> TierOperation:
        """Copy a group's blocks of a lease into pages, ``block_pages`` each. Returns at once.

        ``first_block`` is the number of the first one in the prompt. ``unpin`` ends the lease with the operation,
        however that ends.

        A missing or damaged block raises CacheMissError; the first ``operation.done.loaded`` blocks are loaded.
        """
        packed = packed_ids(ids, "ids")
        body = Load(
            lease=lease,
            pool=pool,
            pages=len(packed) // INT64_BYTES,
            first_block=first_block,
            group=group,
            after=after,
            unpin=unpin,
        )
        return self._begin_operation(body, [packed], deadline_s)

    def store(
        self,
        pool: str,
        hashes: Sequence[bytes],
        ids: npt.ArrayLike,
        *,
        parent: bytes | None = None,
        chains: Sequence[ChainStart] = (),
        group: str = MAIN,
        block_pages: int = 1,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> TierOperation:
        """Put pages of a group into the cache, ``block_pages`` a hash, unless it has them. Returns at once.

        Only pools of the same layout, model identity and user find them; a pool without a model is refused (NO_MODEL).
        Do not write the pages before the operation is done. ``parent`` is the hash before the first one: only new
        blocks have to be named. Blocks of several prompts may go at once, all or none of them: ``chains`` says where
        each but the first prompt's begin in ``hashes``, and the hash before.
        """
        packed = packed_ids(ids, "ids")
        body = Store(
            pool=pool,
            hashes=joined(hashes),
            pages=len(packed) // INT64_BYTES,
            parent=b"" if parent is None else parent,
            chains=sequence(chains, "ChainStarts", "chains"),
            group=group,
            block_pages=block_pages,
            after=after,
        )
        return self._begin_operation(body, [packed], deadline_s)

    def _begin_transfer(self, body: Send | Receive, ids: Sequence[bytes], deadline_s: float | None) -> Transfer:
        deadline_ms = 0 if deadline_s is None else self._deadline(deadline_s)[1]
        if self._lost_pools:
            self._check_pool(body)
        transfer, outgoing = self._core.transfer(body, ids, deadline_ms=deadline_ms)
        self._put(outgoing)
        return transfer

    def _begin_operation(
        self, body: Offload | Restore | Store | Load, ids: Sequence[bytes], deadline_s: float | None
    ) -> TierOperation:
        body = checked(body, IDS)
        deadline_ms = 0 if deadline_s is None else self._deadline(deadline_s)[1]
        if self._lost_pools:
            self._check_pool(body)
        operation, outgoing = self._core.operation(body, ids, deadline_ms=deadline_ms)
        self._put(outgoing)
        return operation

    def _times(self, call: Call[T], deadline_s: float | None) -> tuple[int, float]:
        """Return an operation's deadline as it travels, and in seconds.

        Raises:
            InvalidFieldError: it is no operation, its page lists are not those that its body announces, or the deadline
                is no number of seconds, or beyond the daemon's.
        """
        if not isinstance(call, Call):
            raise wrong_kind(call, "Operation, as kvferry.clients.calls makes them", "call")
        if call.ids:
            check_ids(call)
        kept_s, deadline_ms = self._deadline(deadline_s)
        return deadline_ms, kept_s
