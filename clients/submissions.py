"""What a session sends without waiting, and what it keeps of what has arrived; both clients' base.

``poll`` says what has changed; ``wait_finished`` and ``wait_settled`` wait for a transfer, ``wait_done`` for an
operation of the tiers, ``wait`` for the reply to an update of tables: those are in ``async_requests``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar
from weakref import WeakSet

from kvferry.clients.arguments import seconds, wrong_kind
from kvferry.clients.batch import Batch
from kvferry.clients.calls import Call
from kvferry.clients.connection import Connection
from kvferry.clients.core.client_core import (
    BatchAnswered,
    ClientCore,
    News,
    OtherDaemon,
    Outgoing,
    ReplyArrived,
    unclaimed_pages,
)
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.devices import EngineDevices
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.clients.session_channel import SessionChannel
from kvferry.clients.submitting import PendingReply, Submitting
from kvferry.protocol.codec import Frames
from kvferry.protocol.errors import (
    InvalidFieldError,
    MisuseError,
    NoSessionError,
)
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.session_messages import Welcome
from kvferry.protocol.tier_messages import Load, Offload, Restore, Store
from kvferry.protocol.transfer_messages import Receive, Send

DEFAULT_WAIT_S: Final = 30.0
"""How long a call waits for what is under way already. A request's own deadline is by default the daemon's."""

CHANGES_KEPT: Final = 1 << 16
"""Of an engine that never polls: beyond these the oldest change is forgotten. The transfer itself says how it is."""

_FOLLOWED: Final = (Transfer, TierOperation)  # a union would be made at every use

T = TypeVar("T")


class Submissions(Submitting, OfOneProcess):
    """One session, in as far as nothing waits."""

    welcome: Welcome | None = None
    _use: AbstractContextManager[None]

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        """Use ``connect``.

        Raises:
            MisuseError: nobody has connected.
        """
        if not isinstance(connection, Connection):
            client = type(self).__name__
            raise MisuseError(f"{client}(...) is in no session: make one by {client}.connect(runtime_dir, name=...)")
        self._channel = channel = connection.channel
        self._devices = EngineDevices(connection.devices)
        self._lost_pools = set()
        self._tables = WeakSet()
        self._core = (
            ClientCore(
                BootId(channel.opened.boot_id),
                channel.opened.secret,
                last_message=channel.opened.last_message,
                owns_alone=connection.reconnect and not connection.opening.instance and not connection.opening.resume,
            )
            if channel
            else ClientCore(NO_BOOT)
        )
        self._changed: dict[Transfer | TierOperation, None] = {}
        self._replies: dict[int, ReplyArrived] = {}

    def __repr__(self) -> str:
        """Show the session and what is pending."""
        session = self._channel.opened.session if self._channel else None
        return f"<{type(self).__name__} session={session} {self._core!r}>"

    @property
    def boot_id(self) -> str:
        """Return which incarnation of the daemon this session is with."""
        return self._core.boot_id

    @property
    def secret(self) -> bytes:
        """Return what proves that this session is ours, for ``connect(resume=…)``; never log it."""
        return self._open_channel().opened.secret

    def batched(self) -> Batch:
        """Return a ``with`` block whose requests go to the daemon in one message when it ends, each for a result.

        Follow its requests as if they had been sent alone: transfers and operations by ``poll`` and ``wait_…``, what
        ``begin`` and ``free`` return by ``wait``. If the block raises, nothing is sent. More than the daemon takes in
        one message go in several, in their order.
        """
        with self._use:
            pass
        return Batch(
            self._core,
            self._use,
            self._limits(),
            deadline=self._deadline,
            send=self._put,
            refuse=lambda requests, error: self._hear(self._core.refuse(requests, error)),
            lost_pools=self._lost_pools,
            tables=self._tables,
        )

    def begin(self, call: Call[T], *, deadline_s: float | None = None) -> PendingReply[T]:
        """Send a request and return at once; ``wait`` takes its reply, ``is_ready`` says whether it has come."""
        with self._use:
            return self._begin(call, deadline_s=deadline_s)

    def _begin(self, call: Call[T], *, deadline_s: float | None = None) -> PendingReply[T]:
        """Send a request, in a call that is under way."""
        return super().begin(call, deadline_s=deadline_s)

    def _begin_transfer(self, body: Send | Receive, ids: Sequence[bytes], deadline_s: float | None) -> Transfer:
        with self._use:
            return super()._begin_transfer(body, ids, deadline_s)

    def _begin_operation(
        self, body: Offload | Restore | Store | Load, ids: Sequence[bytes], deadline_s: float | None
    ) -> TierOperation:
        with self._use:
            return super()._begin_operation(body, ids, deadline_s)

    def _deadline(self, deadline_s: float | None) -> tuple[float, int]:
        """Return a request's deadline in seconds, and in milliseconds as it travels: 0 is the daemon's default.

        Raises:
            InvalidFieldError: it is no number of seconds, or longer than the daemon takes.
        """
        limits = self._limits()
        if deadline_s is None:
            return limits.default_deadline_ms / 1000, 0
        deadline_s = seconds(deadline_s, "deadline_s")
        deadline_ms = max(1, round(deadline_s * 1000))
        if self.welcome and self._channel and deadline_ms > limits.max_deadline_ms:  # without a session none is kept to
            raise InvalidFieldError(
                f"{deadline_s:g} seconds; this daemon takes at most {limits.max_deadline_ms / 1000:g}, as its "
                "limits.max_deadline_ms has it",
                field="deadline_s",
            )
        return deadline_s, deadline_ms

    def _forget(self, pending: PendingReply[T]) -> None:
        """Give a reply up; pages that it brings, now or later, go back."""
        self._core.forget(pending.message_id)
        reply = self._replies.pop(pending.message_id, None)
        unclaimed = None if reply is None else unclaimed_pages(pending.call.body, reply.body, reply.ids)
        if unclaimed is not None:
            self._put(self._core.give_back(unclaimed))

    def _limits(self) -> Limits:
        return self.welcome.limits if self.welcome else Limits()

    def _check_pending(self, pending: PendingReply[T]) -> None:
        """Check that a reply can be waited for here.

        Raises:
            InvalidFieldError: it is none, another client's, or was taken before.
        """
        if not isinstance(pending, PendingReply):
            raise wrong_kind(pending, "pending reply, as update_tables returns it", "pending")
        self._check_ours(pending, "pending")
        if pending.taken:
            raise InvalidFieldError(f"{pending!r} was waited for before: keep what wait returned", field="pending")

    def _check_transfer(self, transfer: Transfer) -> None:
        """Check that this client can speak of a transfer.

        Raises:
            InvalidFieldError: it is none, or another client's.
        """
        if not isinstance(transfer, Transfer):
            raise wrong_kind(transfer, "transfer, as send and receive return it", "transfer")
        self._check_ours(transfer, "transfer")

    def _check_operation(self, operation: TierOperation) -> None:
        """Check that this client can speak of an operation of the tiers.

        Raises:
            InvalidFieldError: it is none, or another client's.
        """
        if not isinstance(operation, TierOperation):
            raise wrong_kind(operation, "TierOperation, as offload, restore, store and load return it", "operation")
        self._check_ours(operation, "operation")

    def _check_ours(self, one: Transfer | TierOperation | PendingReply[T], field: str) -> None:
        if one.conversation is not self._core.token:
            raise InvalidFieldError(f"{one!r} is another client's: only that client can use it", field=field)

    def _open_channel(self) -> SessionChannel:
        """Return the session's socket.

        Raises:
            NoSessionError: the client has no session.
        """
        if self._channel is None:
            raise NoSessionError("the client was connected with session=False", field="session")
        return self._channel

    @abstractmethod
    def _put(self, outgoing: Outgoing, frames: Frames | None = None) -> None:
        """Send a request; ``frames``: if they are made already."""

    @abstractmethod
    def _other_daemon(self, boot_id: BootId) -> None:
        """Find out what has become of the session: another daemon is there."""

    def _hear(self, news: News | BatchAnswered) -> None:
        """Take what a message from the daemon means: keep a reply for ``wait``, a change for ``poll``."""
        for one in news.news if isinstance(news, BatchAnswered) else (news,):
            if isinstance(one, _FOLLOWED):
                self._changed[one] = None
            elif isinstance(one, ReplyArrived):
                self._replied(one)
            elif isinstance(one, OtherDaemon):
                self._other_daemon(one.boot_id)
            else:
                self._put(self._core.give_back(one))
        while len(self._changed) > CHANGES_KEPT:
            del self._changed[next(iter(self._changed))]

    def _replied(self, reply: ReplyArrived) -> None:
        """Keep a reply for ``wait``."""
        self._replies[reply.message_id] = reply
