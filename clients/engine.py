"""An inference engine's way to the daemon: its session, and going on after a loss. What the adapters have in common.

A process has one ``Engine`` for the thread that schedules or computes. That thread calls the client, and never waits
for a daemon that is away: what it asks then raises, and a thread of the engine's own looks for the daemon. That thread
also takes what has arrived while the other computes for longer than the daemon keeps a session without a socket.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import zmq

from kvferry.clients import Client, KvferryError, TierOperation
from kvferry.clients.batch import Batch
from kvferry.clients.calls import Call
from kvferry.clients.connection import Reconnected
from kvferry.clients.daemon_socket import absolute
from kvferry.clients.submitting import PendingReply
from kvferry.protocol.errors import (
    DaemonLostError,
    DeadlineError,
    NoSessionError,
    OverloadedError,
    PoolExistsError,
    PoolLostError,
    SessionLostError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S: Final = 0.25
"""How often the engine's thread looks at the session, or for the daemon."""

CONNECT_S: Final = 5.0
SAY_S: Final = 5.0
"""How long the daemon may take to do what nobody waits for."""

MOST_UNSAID: Final = 4096
"""What is kept for a daemon that is away; the oldest of more is dropped: who waits for it has a deadline, too."""

MOST_UNANSWERED: Final = 64
"""Of what is said: a session may have more requests under way, but others need them."""

PREDECESSOR_S: Final = 60.0
"""For how long a pool of this name may still be that of an engine that has ended."""


class Returning(Protocol):
    """A pool of this process, which must be the daemon's again after the session had to be opened anew.

    ``keeps_memory``: it can be made again from this process's memory, whatever the next daemon has.
    """

    name: str
    keeps_memory: bool

    def come_back(self, client: Client, *, resumed: bool) -> None:
        """Make the daemon know the pool again.

        Raises:
            PoolLostError: it never will.
            KvferryError: it does not yet.
        """


class Word(NamedTuple):
    """What nobody waits for the answer of, and which daemon it is for."""

    call: Call[Any]
    boot_id: str

    def is_for(self, boot_id: str) -> bool:
        """Return whether it is to be said to this daemon: what ended with another one need not be ended there."""
        return self.boot_id == boot_id or self.call.body.after_restart != "done"


class Engine:
    """One session of this process, and the thread that holds on to it."""

    def __init__(
        self,
        name: str,
        runtime_dir: str | None,
        *,
        instance: str = "",
        devices: Mapping[str, str] | None = None,
        on_pool_lost: Callable[[PoolLostError], None] | None = None,
    ) -> None:
        """Connect.

        Args:
            name: of the session; sessions of an instance may have it too.
            runtime_dir: the daemon's; None: where a client looks by itself.
            instance: which owns what the session allocates, see docs/engines.md; empty: one of its own.
            devices: what this process calls the daemon's devices, where that differs.
            on_pool_lost: told, once and by any thread, that the memory of a pool of this process is gone.

        Raises:
            KvferryError: there is no daemon, or it refuses the session.
        """
        self.name = name
        given = runtime_dir or os.environ.get("KVFERRY_RUNTIME_DIR")
        self.runtime_dir = absolute(given) if given else None  # it connects again, from wherever the process is then
        self._devices = dict(devices or {})
        self.instance = instance or f"{name}-{uuid.uuid4().hex[:12]}"
        self.lost: PoolLostError | None = None
        """Why the pool's memory is gone: this engine cannot go on."""
        self.generation = 0
        """How many clients were given up: what they had under way has ended, and their daemon with it."""
        self._on_pool_lost = on_pool_lost
        self._lock = threading.Lock()
        self._client: Client | None = self._connect(b"")
        self._secret, self._boot_id = self._client.secret, self._client.boot_id
        self._away: KvferryError | None = None
        self._has_news = False
        self._must_renew = False
        """Whether the daemon that came back has not a pool that can be made again: by a session of its own."""
        self._step: Batch | None = None
        self._pools: list[Returning] = []
        self._unsaid: deque[Word] = deque(maxlen=MOST_UNSAID)
        self._unanswered: list[tuple[Word, PendingReply[Any]]] = []
        self._awaited: list[tuple[PendingReply[Any], Callable[[Any], None]]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hold_on, name="kvferry", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Show the session's name, and whether it is there."""
        return f"<Engine {self.name!r}{' away' if self._client is None else ''}>"

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """Lend the client to one thread.

        Raises:
            DaemonLostError, SessionLostError: the daemon is away; the engine looks for it.
            PoolLostError: it came back without this engine's memory.
        """
        with self._lock:
            client = self._there()
            self._send_step()
            yield client

    @contextlib.contextmanager
    def step(self) -> Iterator[Batch]:
        """Lend what collects requests of one step, which go to the daemon in one message.

        That is sent when this engine is next polled, waited for or asked for its client, whichever comes first; so it
        is for who polls next, as schedulers do at the end of a step.

        Raises:
            DaemonLostError, SessionLostError, PoolLostError: as ``client``.
        """
        with self._lock:
            client = self._there()
            if self._step is None:
                self._step = client.batched()
            yield self._step

    def flush(self) -> None:
        """Send what ``step`` has collected, where the model is to compute before anybody polls."""
        with self._lock:
            self._send_step()

    def _there(self) -> Client:
        if self.lost is not None:
            raise self.lost
        if self._client is None:
            assert self._away is not None
            raise self._away
        return self._client

    def _send_step(self) -> None:
        """Send what was collected; where it cannot be, each of it is refused."""
        step, self._step = self._step, None
        if step is not None:
            with contextlib.suppress(KvferryError), step:
                pass

    @property
    def is_away(self) -> bool:
        """Return whether the daemon, or its memory, is not there now; never waits."""
        client = self._client
        return self.lost is not None or client is None or client.is_away

    @property
    def boot_id(self) -> str:
        """Return which incarnation of the daemon the session is with; empty while it is away."""
        client = self._client
        return "" if client is None else client.boot_id

    def connect(self, name: str) -> Client:
        """Return a client of another session of this engine's instance, for another thread.

        Raises:
            KvferryError: there is no daemon, or it refuses the session.
        """
        return Client.connect(self.runtime_dir, name=name, instance=self.instance, timeout_s=CONNECT_S)

    def add(self, pool: Returning) -> None:
        """Hold on to a pool of this session."""
        self._pools.append(pool)

    def say(self, call: Call[Any]) -> None:
        """Have the daemon told what nobody waits for the answer of, soon, or once it is back.

        From any thread, and from a finalizer. It is said again where the daemon is busy. The next daemon is not told to
        end what has ended with this one: by its number that may be something else there.
        """
        self._unsaid.append(Word(call, self._boot_id))

    def when_answered(self, pending: PendingReply[T], then: Callable[[T], None]) -> None:
        """Have ``then`` told an answer that nobody else takes, by this engine's thread or in ``poll``, if it comes.

        It may ``say``, and nothing else of the engine's.
        """
        self._awaited.append((pending, then))

    def poll(self) -> None:
        """Take what has arrived; never waits. Transfers that were under way when the daemon was lost have ended.

        Raises:
            PoolLostError: the daemon came back without this engine's memory.
        """
        if self.lost is not None:
            raise self.lost
        with self._lock:
            self._send_step()
            self._say_all()
            self._take()

    def wait_for_news(self, timeout_s: float, others: Sequence[zmq.Socket[bytes]] = ()) -> None:
        """Return once something has arrived that nobody has looked for since this was called last, or at the time.

        Or once one of ``others`` is readable: this thread's own sockets.
        """
        ends_at = time.monotonic() + timeout_s
        with self._lock:
            self._send_step()
            while self._client is not None and not self._has_news:
                left_s = ends_at - time.monotonic()
                if left_s <= 0.0 or _is_readable(others, self._client.sockets, left_s):
                    break
                self._take(0.0 if self._client.sockets else left_s)
            self._has_news = False

    def close(self) -> None:
        """End the session, and what ends with it; its thread ends too."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client, self._away = None, DaemonLostError("this engine was closed")

    def _connect(self, resume: bytes) -> Client:
        return Client.connect(
            self.runtime_dir,
            name=self.name,
            instance=self.instance,
            on_reconnect=self._reconnected,
            resume=resume,
            devices=self._devices,
            timeout_s=CONNECT_S,
        )

    def _take(self, timeout_s: float = 0.0) -> None:
        if self._client is None:
            return
        try:
            self._has_news |= bool(self._client.poll(timeout_s))
        except KvferryError as error:
            self._lose(error)
        if self._must_renew:
            self._must_renew = False
            self._lose(DaemonLostError("it came back without this engine's pools, which are made again"))

    def _reconnected(self, event: Reconnected) -> None:
        """Note what the daemon that is back has not; called by the client."""
        self._boot_id = event.boot_id
        logger.warning("kvferry: the daemon is back, boot %s; %d transfers ended", event.boot_id, len(event.transfers))
        lost = {*event.pools, *(pool for pool, _ in event.pages)}
        self._must_renew |= any(one.name in lost and one.keeps_memory for one in self._pools)
        missing = {one.name for one in self._pools if one.name in lost and not one.keeps_memory}
        if missing:
            self._give_up(PoolLostError(f"the daemon came back without the memory of {', '.join(sorted(missing))}"))

    def _lose(self, error: KvferryError) -> None:
        """Give up a client that says that it has: every transfer of it has ended."""
        if self._client is None:
            return
        logger.error("kvferry: the daemon is away: %s", error)
        self._away = error if isinstance(error, DaemonLostError | SessionLostError) else DaemonLostError(error.detail)
        self._client.close()
        self._client = self._step = None
        self._unsaid.extend(word for word, _ in self._unanswered)
        self._unanswered.clear()
        self._awaited.clear()
        self.generation += 1

    def _give_up(self, error: PoolLostError) -> None:
        if self.lost is None:
            self.lost = error
            logger.error("kvferry: %s", error)
            if self._on_pool_lost is not None:
                self._on_pool_lost(error)

    def _hold_on(self) -> None:
        while self.lost is None and not self._closed.wait(LOOK_S):
            if self._client is None:
                self._look_for_daemon()
            elif self._lock.acquire(blocking=False):
                try:
                    self._send_step()
                    self._say_all()
                    self._take()
                finally:
                    self._lock.release()

    def _say_all(self) -> None:
        """Say what is to be said, and drop the answers that have come; never waits."""
        client = self._client
        if client is None or not (self._unsaid or self._unanswered or self._awaited):
            return
        try:
            for pending, then in [one for one in self._awaited if client.is_ready(one[0])]:
                self._awaited.remove((pending, then))
                with contextlib.suppress(KvferryError):
                    then(client.wait(pending))
            if self._unsaid and len(self._unanswered) < MOST_UNANSWERED:
                with client.batched() as step:
                    while self._unsaid and len(self._unanswered) < MOST_UNANSWERED:
                        word = self._unsaid[0]
                        if word.is_for(client.boot_id):
                            self._unanswered.append((word, step.begin(word.call, deadline_s=SAY_S)))
                        self._unsaid.popleft()
            now_s = time.monotonic()
            for one in [one for one in self._unanswered if one[1].ends_at <= now_s or client.is_ready(one[1])]:
                self._unanswered.remove(one)
                try:
                    client.wait(one[1])
                except OverloadedError:
                    self._unsaid.append(one[0])
                except KvferryError:
                    pass
        except KvferryError:
            pass  # ``_take`` finds it, and what was not said is said later

    def _resume(self) -> tuple[Client, bool]:
        """Return a client of the next daemon, and whether that knows the session."""
        try:
            client = self._connect(self._secret)
        except (NoSessionError, SessionLostError):
            return self._connect(b""), False
        if client.boot_id != self._boot_id:
            return client, True
        client.close()  # the old daemon: what was under way may still be, and ends with the session
        return self._connect(b""), False

    def _look_for_daemon(self) -> None:
        try:
            client, resumed = self._resume()
        except KvferryError:
            return
        try:
            for pool in self._pools:
                while_predecessor_ends(partial(pool.come_back, client, resumed=resumed))
        except PoolLostError as error:
            client.close()
            self._give_up(error)
        except KvferryError as error:
            client.close()
            logger.info("kvferry: not back yet: %s", error)
        else:
            with self._lock:
                self._client, self._secret, self._boot_id, self._away = client, client.secret, client.boot_id, None
            logger.warning("kvferry: the daemon is back, boot %s", client.boot_id)


def _is_readable(others: Sequence[zmq.Socket[bytes]], ours: Sequence[zmq.Socket[bytes] | int], wait_s: float) -> bool:
    """Wait for any of them; return whether one of the others is readable. Without ours there is no waiting."""
    poller = zmq.Poller()
    for one in (*others, *ours):
        poller.register(one, zmq.POLLIN)
    ready = poller.poll(math.ceil(wait_s * 1000) if ours else 0)
    return any(one in others for one, _ in ready)


def while_predecessor_ends(make: Callable[[], object]) -> None:
    """Make a pool, waiting where the name is still that of an engine that has ended, or the daemon is busy.

    Raises:
        PoolExistsError: it is another living engine's.
        KvferryError: the daemon refuses it.
    """
    ends_at = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            make()
        except (PoolExistsError, OverloadedError):
            if time.monotonic() > ends_at:
                raise
            time.sleep(LOOK_S)
        else:
            return


def end_of(client: Client, operation: TierOperation) -> KvferryError | None:
    """Wait until no byte of an operation can move any more: its pages are used again. Return why it failed.

    Raises:
        KvferryError: the client has given the daemon up.
    """
    while True:
        try:
            client.wait_done(operation)
        except DeadlineError as error:
            if operation.is_done:
                return error
        except KvferryError as error:
            if not operation.is_done:
                raise
            return error
        else:
            return None
