"""A SGLang process's way to the daemon: what the environment says of it, its session, and going on after a loss.

A scheduler process has one ``Engine``. Its scheduler's thread calls the client, and never waits for a daemon that is
away: what it asks then raises, and a thread of the engine's own looks for the daemon. That thread also takes what has
arrived while the scheduler computes for longer than the daemon keeps a session without a socket.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, cast, get_args

import msgspec
import zmq

from kvferry.clients import Client, KvferryError, TierOperation
from kvferry.clients.calls import Call
from kvferry.clients.connection import Reconnected
from kvferry.clients.submissions import PendingReply
from kvferry.protocol.errors import (
    DaemonLostError,
    DeadlineError,
    InvalidFieldError,
    NoSessionError,
    OverloadedError,
    PoolExistsError,
    PoolLostError,
    SessionLostError,
)
from kvferry.protocol.ids import PoolName

logger = logging.getLogger(__name__)

Memory = Literal["daemon", "engine"]
"""Who allocates the pools: ``daemon``, or ``engine``, which registers them; docs/sglang.md: what each survives."""

LOOK_S: Final = 0.25
"""How often the engine's thread looks at the session, or for the daemon."""

CONNECT_S: Final = 5.0
SAY_S: Final = 5.0
"""How long the daemon may take to do what nobody waits for."""

MOST_UNSAID: Final = 4096
"""What is kept for a daemon that is away; the oldest of more is dropped: who waits for it has a deadline, too."""

PREDECESSOR_S: Final = 60.0
"""For how long a pool of this name may still be that of an engine that has ended."""


class Settings(NamedTuple):
    """What the environment says.

    Attributes:
        runtime_dir: KVFERRY_RUNTIME_DIR, the daemon's; None: where a client looks by itself.
        pool: KVFERRY_SGLANG_POOL, the name of this server's pools without ranks; empty: of its mode and port.
        memory: KVFERRY_SGLANG_MEMORY.
    """

    runtime_dir: str | None
    pool: str
    memory: Memory


def settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return what the environment says.

    Raises:
        InvalidFieldError: a variable has a value that it cannot have; ``field`` is its name.
    """
    memory = environment.get("KVFERRY_SGLANG_MEMORY", "daemon")
    if memory not in get_args(Memory):
        raise InvalidFieldError(
            f"KVFERRY_SGLANG_MEMORY is {memory!r}: say daemon or engine", field="KVFERRY_SGLANG_MEMORY"
        )
    pool = environment.get("KVFERRY_SGLANG_POOL", "")
    try:
        if pool:
            msgspec.convert(pool, PoolName)
    except msgspec.ValidationError as error:
        raise InvalidFieldError(
            f"KVFERRY_SGLANG_POOL is {pool!r}: up to 128 letters, digits, dots, dashes and underscores, the first a "
            "letter or digit",
            field="KVFERRY_SGLANG_POOL",
        ) from error
    return Settings(environment.get("KVFERRY_RUNTIME_DIR") or None, pool, cast("Memory", memory))


class Returning(Protocol):
    """A pool of this process, which must be the daemon's again after the session had to be opened anew."""

    name: str

    def come_back(self, client: Client, *, resumed: bool) -> None:
        """Make the daemon know the pool again.

        Raises:
            PoolLostError: it never will.
            KvferryError: it does not yet.
        """


class Engine:
    """One session of this process, and the thread that holds on to it."""

    def __init__(self, name: str, runtime_dir: str | None, *, ends_server: bool = True) -> None:
        """Connect. ``ends_server``: without the pool's memory this server cannot go on, and ends.

        Raises:
            KvferryError: there is no daemon, or it refuses the session.
        """
        self.name = name
        self.runtime_dir = runtime_dir
        self.instance = f"{name}-{uuid.uuid4().hex[:12]}"
        self.lost: PoolLostError | None = None
        """Why the pool's memory is gone: this engine cannot go on."""
        self.generation = 0
        """How many clients were given up: what they had under way has ended, and their daemon with it."""
        self._ends_server = ends_server
        self._lock = threading.Lock()
        self._client: Client | None = self._connect(b"")
        self._secret, self._boot_id = self._client.secret, self._client.boot_id
        self._away: KvferryError | None = None
        self._has_news = False
        self._pools: list[Returning] = []
        self._unsaid: deque[Call[Any]] = deque(maxlen=MOST_UNSAID)
        self._unanswered: list[PendingReply[Any]] = []
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
            if self.lost is not None:
                raise self.lost
            if self._client is None:
                assert self._away is not None
                raise self._away
            yield self._client

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

        From any thread, and from a finalizer.
        """
        self._unsaid.append(call)

    def poll(self) -> None:
        """Take what has arrived; never waits. Transfers that were under way when the daemon was lost have ended.

        Raises:
            PoolLostError: the daemon came back without this engine's memory.
        """
        if self.lost is not None:
            raise self.lost
        with self._lock:
            self._say_all()
            self._take()

    def wait_for_news(self, timeout_s: float, others: Sequence[zmq.Socket[bytes]] = ()) -> None:
        """Return once something has arrived that nobody has looked for since this was called last, or at the time.

        Or once one of ``others`` is readable: this thread's own sockets.
        """
        ends_at = time.monotonic() + timeout_s
        with self._lock:
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
            timeout_s=CONNECT_S,
        )

    def _take(self, timeout_s: float = 0.0) -> None:
        if self._client is None:
            return
        try:
            self._has_news |= bool(self._client.poll(timeout_s))
        except KvferryError as error:
            self._lose(error)

    def _reconnected(self, event: Reconnected) -> None:
        """Note what the daemon that is back has not; called by the client."""
        self._boot_id = event.boot_id
        logger.warning("kvferry: the daemon is back, boot %s; %d transfers ended", event.boot_id, len(event.transfers))
        missing = {*event.pools, *(pool for pool, _ in event.pages)} & {one.name for one in self._pools}
        if missing:
            self._give_up(PoolLostError(f"the daemon came back without the memory of {', '.join(sorted(missing))}"))

    def _lose(self, error: KvferryError) -> None:
        """Give up a client that says that it has: every transfer of it has ended."""
        if self._client is None:
            return
        logger.error("kvferry: the daemon is away: %s", error)
        self._away = error if isinstance(error, DaemonLostError | SessionLostError) else DaemonLostError(error.detail)
        self._client.close()
        self._client = None
        self._unanswered.clear()
        self.generation += 1

    def _give_up(self, error: PoolLostError) -> None:
        if self.lost is None:
            self.lost = error
            if not self._ends_server:
                logger.error("kvferry: %s; this server goes on without it", error)
                return
            logger.critical("kvferry: %s; this engine ends", error)
            _end_server()

    def _hold_on(self) -> None:
        while self.lost is None and not self._closed.wait(LOOK_S):
            if self._client is None:
                self._look_for_daemon()
            elif self._lock.acquire(blocking=False):
                try:
                    self._say_all()
                    self._take()
                finally:
                    self._lock.release()

    def _say_all(self) -> None:
        """Say what is to be said, and drop the answers that have come; never waits."""
        if self._client is None or not (self._unsaid or self._unanswered):
            return
        try:
            while self._unsaid:
                self._unanswered.append(self._client.begin(self._unsaid[0], deadline_s=SAY_S))
                self._unsaid.popleft()
            for one in [one for one in self._unanswered if self._client.is_ready(one)]:
                self._unanswered.remove(one)
                with contextlib.suppress(KvferryError):
                    self._client.wait(one)
        except KvferryError:
            pass  # ``_take`` finds it, and what was not said is said later

    def _look_for_daemon(self) -> None:
        resumed = True
        try:
            try:
                client = self._connect(self._secret)
                resumed = client.boot_id != self._boot_id
                if not resumed:  # the old daemon: what was under way may still be, and ends with the session
                    client.close()
            except (NoSessionError, SessionLostError):
                resumed = False
            if not resumed:
                client = self._connect(b"")
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


def _end_server() -> NoReturn:
    """End this scheduler process, and tell the server of it as SGLang's schedulers do.

    The process must not stay: for one that lives SGLang waits a minute for core dumps of a CUDA device, and answers
    nobody meanwhile.
    """
    server = multiprocessing.parent_process()
    if server is not None and server.pid is not None:  # else something other than SGLang started this process
        os.kill(server.pid, signal.SIGQUIT)
    os._exit(1)


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
    """Wait until no byte of an operation can move any more: SGLang uses its pages again. Return why it failed.

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
