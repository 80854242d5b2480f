"""Connections to other daemons: one ROUTER that listens, and one link to each peer. Knows nothing of transfers.

Each side sends on its own connection and receives on the other's. A link has two *keys*: each side makes a new one for
each new connection and tells it, in PEER_HELLO, to the address that it connected to. Every message carries its sender's
key, and the key that the receiver has told the sender's address. So a message proves that its sender hears what is said
to the address that it names; no boot id, restart or end is believed without this proof. A message without proof has
only its address read, bounded in size, rate and number: the daemon greets that address, and a daemon there may answer.
A third party that is not on the path between two daemons can neither speak for one of them, nor part them, nor repeat
old messages. Without keys of nodes, one that is on the path, or that listens at an address of its own, is not kept out.

With keys of nodes (``key_ring``) TCP connections are encrypted by CURVE, and each side proves which node it is before
anything is read: see ``curve_listener``. A node speaks only for the address that its key is for. Where keys change, a
link moves to a new connection with the new ones and no message is lost: the peer has handled all that was said on the
old one before the first is sent on the new one. A link whose keys are revoked is cut off.

The peer is *up* once it has said our key again. Each side detects the other's end by itself: at once where the peer's
process ends and its host closes one of the two connections, otherwise once one of them was silent for ``timeout_ms``
and a heartbeat. Its daemon answers heartbeats of ours as well: it is *silent* while one is unanswered. Where it is for
too long, or reads too slowly, it is lost, too. When a peer is *lost*, unsent messages are dropped, and a new key makes
its messages void that are received only later. The two directions may break at different times, so the last messages of
one side may have been processed by the other before that one noticed.

A link that is down is kept while a receive request waits for the peer, and for a minute after its last use; where there
are too many, the least recently used one is dropped for a new one, and first those that only an unauthenticated peer
has named.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import structlog
import zmq
import zmq.asyncio

from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.control.kept_bytes import ConnectionBytes
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.peers.curve_listener import CurveListener
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.daemon.peers.link import (
    Heartbeat,
    LinkKeys,
    LinkStatus,
    PeerLink,
    PeerListener,
    Terms,
    frame_bytes,
    size_bytes,
)
from kvferry.daemon.process.access import Listener, folder_of_others
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.addresses import IPC, TCP, is_loopback, is_numeric, scheme, wrong_address, wrong_port
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidFieldError,
    KvferryError,
    MalformedError,
    OverloadedError,
    TooLargeError,
)
from kvferry.protocol.ids import BootId
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits
from kvferry.protocol.node_keys import NodeKey
from kvferry.protocol.peer_messages import (
    PeerBody,
    PeerEnvelope,
    PeerHead,
    PeerHeartbeat,
    PeerHello,
    decode_peer_body,
    decode_peer_head,
    encode_peer,
)

MAX_PEERS = 1024
"""A low RLIMIT_NOFILE lowers it: see ``Descriptors``."""
MAX_GUESTS = 128
GUESTS_PER_HOST = 16
"""Links to addresses that only an unauthenticated peer has named: in all, and by one host or one user of this host."""
TIDY_S = 10.0
QUIET_S = 60.0
NEEDED_CHECKS = 32
"""How many links are checked at a time for being needed, as each check scans all receive requests."""
LINGER_MS = 300
"""How long the last messages may take to leave when the daemon ends."""
MAX_UNPROVEN = 4096
"""Messages that prove nothing until their connection is closed: more than a peer has under way when a link breaks."""
WARNING_S = 1.0
"""How often a dropped message is logged at most; all are counted."""
SOCKETS_PER_LINK = 3
"""The DEALER and both ends of its monitor."""
KEYS_S = 1.0
"""How often is looked whether files of keys have changed."""
RETIRING_S = 60.0
"""How long a replaced key of this node may still be used by peers that have connected with it."""
LAST_WORDS_S = 0.1
"""How long the end of a peer's own connection is waited for, once ours to it has ended: its last words are on that."""
log = structlog.get_logger(__name__)


class PeerLinks:
    """All links, and the listening socket. Serves between ``start`` and ``close``.

    Attributes:
        by_key: the links by our keys for them.
        terms: what this daemon can take.
    """

    def __init__(
        self,
        boot_id: BootId,
        listener: Listener,
        listen: str | None,
        heartbeat: Heartbeat,
        limits: Limits,
        counters: Counters,
        bounce_buffer_bytes: int = 0,
        descriptors: Descriptors | None = None,
        kept: ConnectionBytes | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        """Take over a Unix socket for daemons of this host and, with ``listen``, listen on TCP.

        ``kept`` counts what connections to it keep. With ``keys`` all peers over TCP prove which node they are.

        Raises:
            ConfigError: the TCP address cannot be listened on, or peers could not connect to it.
        """
        if listen and not is_numeric(listen):
            raise ConfigError(f"{listen}: give a numeric address of this host", field="peers.listen")
        if listen and (wrong := wrong_port(listen, 0)):
            raise ConfigError(wrong, field="peers.listen")
        self.boot_id = boot_id
        self.heartbeat = heartbeat
        self.limits = limits
        self.terms = Terms(limits.max_frame_bytes, limits.max_message_bytes, bounce_buffer_bytes)
        self.counters = counters
        self.loop = asyncio.get_running_loop()
        self.listener: PeerListener | None = None
        self._descriptors = descriptors or Descriptors()
        self.keys = keys
        self._router = ControlSocket(
            listener,
            limits,
            counters,
            also=None if keys else listen,
            name="peers",
            max_connections=self._descriptors.peers // (2 if keys else 1),
            kept=kept,
        )
        self._curve: CurveListener | None = None
        if keys is not None and listen:
            most = self._descriptors.peers // 2
            try:
                self._curve = CurveListener(listen, keys, limits, counters, heartbeat.timeout_ms, most)
            except ConfigError:
                self._router.close()
                raise
        self.context = zmq.asyncio.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_PER_LINK * MAX_PEERS)  # a closed socket counts a little longer
        self.context.socket(zmq.DEALER).close()  # its threads begin now: without a descriptor libzmq ends the process
        self._max_links = min(MAX_PEERS, self._descriptors.links)
        self.addresses = {"ipc": f"ipc://{listener.path}"}
        if listen:
            self.addresses["tcp"] = self._curve.endpoint if self._curve is not None else self._router.endpoint
        self.by_key: dict[str, PeerLink] = {}
        self._links: dict[str, PeerLink] = {}
        self._unproven: Counter[bytes] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_at = -WARNING_S

    def __repr__(self) -> str:
        """Show the peers."""
        return f"<PeerLinks {list(self._links.values())}>"

    @property
    def interval_s(self) -> float:
        """Return the heartbeat interval in seconds."""
        return self.heartbeat.interval_ms / 1000

    def start(self, listener: PeerListener) -> None:
        """Serve on the running loop, and notify the listener."""
        self.listener = listener
        self._router.start(self.loop, self._received, self._spoken_on, self._ended)
        self._tasks = [
            self.loop.create_task(self._every(self.interval_s, self._beat), name="heartbeats"),
            self.loop.create_task(self._every(TIDY_S, self._tidy), name="unused links"),
        ]
        if self._curve is not None and self.keys is not None:
            self._curve.start(self._received, self._spoken_on, self._ended)
            self._tasks.append(self.loop.create_task(self._follow_keys(self.keys, self._curve), name="keys of nodes"))

    def close(self) -> None:
        """Close all connections and stop listening; the last messages have LINGER_MS to leave. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()
        self.context.term()  # before our ROUTER closes, which peers take for our end
        self._router.close()
        if self._curve is not None:
            self._curve.close()

    @property
    def is_listening(self) -> bool:
        """Return whether other daemons can connect."""
        return self._router.is_listening

    @property
    def peers_prove(self) -> Literal["", "key", "nothing"]:
        """Return what daemons of other hosts prove who they are by; empty where none can connect."""
        listen = self.addresses.get(TCP)
        if listen is None:
            return ""
        return "key" if self.keys is not None else "" if is_loopback(listen) else "nothing"

    def check_reachable(self, address: str, field: str) -> None:
        """Check that this daemon can send to an address, and be answered.

        Raises:
            InvalidFieldError: no daemon can listen there, or this daemon does not listen where that one could connect.
        """
        if scheme(address) not in self.addresses:
            raise InvalidFieldError(
                f"{address}: this daemon listens on no TCP address; set peers.listen in its configuration", field=field
            )
        if wrong := wrong_address(address):
            raise InvalidFieldError(wrong, field=field)
        if scheme(address) == IPC and (folder := folder_of_others(Path(address.partition("://")[2]))) is not None:
            raise InvalidFieldError(
                f"{address}: others than root and the daemon's user may put a socket there, in {folder}",
                field=field,
                remedy="name the peer.sock of a daemon, in a folder that is its own",
            )
        if self.keys is not None and scheme(address) == TCP and not self.keys.keys_of(address):
            raise InvalidFieldError(
                f"{address}: no key of a node is allowed for this address",
                field=field,
                remedy="there: kvferry keys show --public, here: kvferry keys allow; or correct the address",
            )

    def keys_for(self, address: str) -> LinkKeys | None:
        """Return what a connection to an address is to be made with; None without keys."""
        return next(iter(self.choices_of_keys(address)), None)

    def choices_of_keys(self, address: str) -> list[LinkKeys]:
        """Return what a connection to an address may be made with, the best first."""
        if self.keys is None or scheme(address) != TCP:
            return []
        return [LinkKeys(own, their) for own in self.keys.own for their in self.keys.keys_of(address)]

    async def last_words(self, link: PeerLink) -> None:
        """Wait until what a peer said before its end has come: libzmq reads it by a thread of its own."""
        if self._curve is not None:
            await self._curve.until_ended(link.heard_on, LAST_WORDS_S)

    async def _follow_keys(self, keys: KeyRing, curve: CurveListener) -> None:
        """Follow changes of the files of keys."""
        retire_at = 0.0
        while True:
            await asyncio.sleep(KEYS_S)
            with self.going_on():
                now = time.monotonic()
                if await keys.reread():
                    retire_at = now + RETIRING_S
                    curve.update()
                    for link in list(self._links.values()):
                        with self.going_on(link.address):
                            self._check_keys(keys, link)
                curve.retire(at_once=now >= retire_at)

    def _check_keys(self, keys: KeyRing, link: PeerLink) -> None:
        """Cut a link off whose peer has proved itself by a key that is not allowed any more; let others follow."""
        used = [key for key in (link.keys and link.keys.their, link.heard_key) if key is not None]
        if all(keys.node_of(key.public) == key for key in used):
            link.follow_keys(time.monotonic())
        else:
            self._replace(link, "its key was revoked")

    def is_own(self, address: str) -> bool:
        """Return whether an address is one of this daemon's."""
        return address in self.addresses.values()

    def connect(self, address: str, field: str = "address", tenant: int | None = None) -> Incarnation | None:
        """Ensure that there is a link; return the incarnation that can be sent to, if it is up.

        ``tenant``: whose transfer names the address. It may have a share of the links.

        Raises:
            InvalidFieldError: the address is invalid, or too many other daemons are known.
        """
        link = self._links.get(address)
        if link is None:
            self.check_reachable(address, field)
            if tenant is not None:
                self._check_share(address, field, tenant)
            if len(self._links) >= self._max_links and not (self._drop_guest() or self._drop_one()):
                raise InvalidFieldError(f"{address}: {len(self._links)} other daemons are known already", field=field)
            link = self._links[address] = PeerLink(self, address, field, None)
        link.guest_of = None
        if tenant is not None:
            link.named_by.add(tenant)
        link.used_at = time.monotonic()
        return link.peer

    def _check_share(self, address: str, field: str, tenant: int) -> None:
        """Check that a tenant has not named too many addresses at which no daemon has proved itself.

        Raises:
            InvalidFieldError: it has, and all of them are needed.
        """
        used = Counter([one for link in self._links.values() if not link.is_proven for one in link.named_by])
        if used[tenant] >= self._descriptors.most_links(tenant, used) and not self._drop_one(of=tenant):
            raise InvalidFieldError(
                f"{address}: transfers of {whose(tenant)} wait for {used[tenant]} other daemons (your bound)",
                field=field,
            )

    def known_to(self, tenant: int | None) -> set[str]:
        """Return the addresses that a tenant may be told: not those that only transfers of others have named."""
        return {link.address for link in self._links.values() if link.is_public or tenant in link.named_by}

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        """Send a message to an incarnation; return False, with nothing sent, where it is gone.

        Raises:
            TooLargeError: one of the two daemons does not take so large a message.
        """
        link = self._links.get(peer.address)
        if link is None or link.peer != peer:
            self.counters.add("peers.unsent")
            return False
        self.say(link, body, ids)
        return True

    def say(self, link: PeerLink, body: PeerBody, ids: Sequence[PageIds] = (), *, at_once: bool = False) -> None:
        """Send a message to a peer that is up; ``at_once``: see ``PeerLink.put``.

        Raises:
            TooLargeError: one of the two daemons does not take so large a message.
        """
        own, terms = self.own_address(link.address), link.terms
        frames = encode_peer(PeerEnvelope(own, link.key, link.peer_key, body), ids)
        largest, size = max(map(frame_bytes, frames)), size_bytes(frames)
        if largest > terms.max_frame_bytes or size > terms.max_message_bytes:
            raise TooLargeError(
                f"{size} bytes, one frame with {largest}, are too many for {link.address}: both daemons take frames of "
                f"{terms.max_frame_bytes} and messages of {terms.max_message_bytes} bytes",
                field="limits.max_frame_bytes",
                remedy="send smaller chunks, or give both daemons the same, larger limits.max_frame_bytes",
            )
        link.put(frames, at_once=at_once)

    def terms_with(self, peer: Incarnation) -> Terms:
        """Return what this daemon and an incarnation that is up can take; of one that is gone, what this one can."""
        link = self._links.get(peer.address)
        return self.terms if link is None else link.terms

    def own_address(self, address: str) -> str:
        """Return the address by which the peer at ``address`` reaches this daemon."""
        return self.addresses[scheme(address)]

    def up(self) -> list[Incarnation]:
        """Return all peers that can be sent to."""
        return [link.peer for link in self._links.values() if link.peer is not None]

    def status(self) -> tuple[LinkStatus, ...]:
        """Return each link as STATUS shows it."""
        now = time.monotonic()
        return tuple(link.status(now) for link in self._links.values())

    def hello(self, link: PeerLink) -> Frames:
        """Return the frames of our PEER_HELLO for a link, with the last key that was named for its address."""
        body = PeerHello(
            boot_id=self.boot_id,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            dialled=link.address,
            max_frame_bytes=self.terms.max_frame_bytes,
            max_message_bytes=self.terms.max_message_bytes,
            bounce_buffer_bytes=self.terms.bounce_buffer_bytes,
        )
        return encode_peer(PeerEnvelope(self.own_address(link.address), link.key, link.claimed_key, body))

    def _spoken_on(self) -> set[bytes]:
        """Return the connections on which peers that are up have spoken: no unauthenticated one takes their places."""
        return {link.heard_on for link in self._links.values() if link.peer is not None}

    def _ended(self, connection: bytes) -> None:
        """Process that a connection to this daemon has ended: who spoke on it cannot be heard any more."""
        self._unproven.pop(connection, None)
        for link in list(self._links.values()):
            if link.left == connection:
                link.left = b""
            if link.heard_on == connection and link.peer is not None:
                with self.going_on(link.address):
                    link.begin_anew("its connection to this daemon has ended, or was silent")

    @contextlib.contextmanager
    def going_on(self, address: str = "") -> Iterator[None]:
        """Let an error end nothing but this."""
        try:
            yield
        except Exception as error:
            self.counters.add("peers.failed")
            log.exception("a link failed", cause=str(error), peer=address)

    async def _every(self, interval_s: float, call: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            with self.going_on():
                call()

    def _received(self, message: ReceivedMessage, key: NodeKey | None = None) -> None:
        self.counters.add("peers.received")
        head = None
        try:
            head = decode_peer_head(message.frames[0] if message.frames else b"")
            self._check_speaker(head, key)
            self._process(head, message, key)
        except KvferryError as error:
            self._dropped(error, head, message, key)
        except Exception as error:  # a bug must not end the loop
            self.counters.add("peers.failed")
            log.exception("a peer's message failed", cause=str(error), peer=head.address if head else "")

    def _check_speaker(self, head: PeerHead, key: NodeKey | None) -> None:
        """Check that a node that has proved its key speaks for itself alone, and that nothing else speaks for a node.

        Raises:
            AccessDeniedError: it speaks for another one.
        """
        if key is not None and head.address != key.address:
            raise AccessDeniedError(f"{key.name} speaks for {head.address}, and its key is for {key.address}")
        if key is None and self.keys is not None and scheme(head.address) == TCP:
            raise AccessDeniedError(f"a connection without a key speaks for {head.address}")

    def _dropped(
        self,
        error: KvferryError,
        head: PeerHead | None,
        message: ReceivedMessage,
        key: NodeKey | None,
        body: PeerBody | None = None,
    ) -> None:
        """Count that a message was dropped, and log it; of many in a short time only the first."""
        self.counters.add("peers.malformed")
        now = time.monotonic()
        if now - self._warned_at >= WARNING_S:
            self._warned_at = now
            peer, origin = head.address if head else "", self._origin_of(message, key)
            request_id = body.request_id if body else ""
            log.warning(
                "a peer's message was dropped", cause=str(error), peer=peer, origin=origin, request_id=request_id
            )

    def _origin_of(self, message: ReceivedMessage, key: NodeKey | None) -> object:
        """Return whose a message is: a node's name, a user's number, or the address of a host."""
        return self._router.origin_of(message.identity) if key is None else key.name

    def _process(self, head: PeerHead, message: ReceivedMessage, key: NodeKey | None) -> None:
        link = self.by_key.get(head.to_key)
        if link is None or link.address != head.address:
            self._count_unproven(message.identity)
            self._hint(head, self._origin_of(message, key))
            return
        if message.too_large:
            raise MalformedError(f"a message of more than {self.limits.max_message_bytes} bytes")
        incoming = decode_peer_body(head, message.frames[1:])
        body = incoming.envelope.body
        if isinstance(body, PeerHello):
            link.heard(message.identity, key)
            self._warn_of_names(body, link)
            link.greeted(head.key, body)
            return
        if link.peer is None or link.peer_key != head.key:  # late, by an earlier connection
            self.counters.add("peers.stale")
            link.hinted(head.key)
            return
        link.heard(message.identity, key)
        if isinstance(body, PeerHeartbeat):
            link.heartbeat(body)
        elif self.listener is not None:
            try:
                self.listener.on_message(link.peer, body, incoming.ids)
            except KvferryError as error:
                self._dropped(error, head, message, key, body)

    def _count_unproven(self, connection: bytes) -> None:
        self.counters.add("peers.unproven")
        self._unproven[connection] += 1
        if self._unproven[connection] > MAX_UNPROVEN:
            self.counters.add("peers.closed")
            self._router.end(connection)

    def _hint(self, head: PeerHead, origin: object) -> None:
        """Greet the address that a message names, as it does not prove who has sent it. Nothing else is read of it.

        Raises:
            InvalidFieldError: no daemon can be at that address.
        """
        is_local = not isinstance(origin, str)  # a user of this host, not the address of another one
        if (scheme(head.address) == IPC) != is_local or self.is_own(head.address):
            raise MalformedError(f"{head.address} cannot be who speaks on this socket")
        link = self._links.get(head.address)
        if link is None:
            self.check_reachable(head.address, "address")
            guests = [one.guest_of for one in self._links.values() if one.guest_of is not None]
            full = len(guests) >= MAX_GUESTS or guests.count(origin) >= GUESTS_PER_HOST
            if full or (len(self._links) >= self._max_links and not self._drop_one()):
                self.counters.add("peers.guests_refused")
                return
            link = self._links[head.address] = PeerLink(self, head.address, "address", origin)
        link.hinted(head.key)

    def _warn_of_names(self, hello: PeerHello, link: PeerLink) -> None:
        if not self.is_own(hello.dialled):
            log.warning(
                "a peer connected by an address that is not this daemon's own", name=hello.dialled, peer=link.address
            )

    def overflowed(self, link: PeerLink) -> None:
        """Replace a link whose peer reads too slowly."""
        if self._links.get(link.address) is not link:
            return
        self.counters.add("peers.overflowed")
        self._replace(link, f"it read too slowly: {link.waiting} messages were waiting")

    def spoke(self, link: PeerLink) -> None:
        """Drop a link whose peer has spoken on it, where daemons only listen."""
        if self._links.get(link.address) is link:
            self.counters.add("peers.spoke")
            with self.going_on(link.address):
                self._cut(link, "it spoke on a connection on which daemons only listen")

    def _cut(self, link: PeerLink, why: str) -> None:
        del self._links[link.address]
        link.close()
        link.cut_off(why)

    def _replace(self, link: PeerLink, why: str) -> None:
        """Cut a link off, and connect anew."""
        self._cut(link, why)
        try:
            self.connect(link.address)
            self._links[link.address].named_by |= link.named_by
        except (InvalidFieldError, OverloadedError) as error:
            log.warning("a peer was not connected to again", cause=str(error))

    def drain_received(self) -> None:
        """Process the messages that peers have sent by now."""
        self._router.drain_received()
        if self._curve is not None:
            self._curve.drain_received()

    def _beat(self) -> None:
        now = time.monotonic()
        for link in list(self._links.values()):
            link.beat(now)
        patience_s = self.heartbeat.timeout_ms / 1000
        for link in [one for one in self._links.values() if one.guest_of is not None]:
            if link.quiet_s(now) > patience_s:
                self._drop(link)

    def _tidy(self) -> None:
        while self._drop_one(QUIET_S):
            pass

    def _drop_guest(self) -> bool:
        """Drop a link that only an unauthenticated peer has asked for; return whether there was one."""
        guest = next((link for link in self._links.values() if link.guest_of is not None), None)
        if guest is not None:
            self._drop(guest)
        return guest is not None

    def _drop_one(self, quiet_s: float = 0.0, of: int | None = None) -> bool:
        """Drop the least recently used link that is down and not needed; return whether there was one.

        ``of``: of those that transfers of this tenant alone have named. Even when links are short, each has
        ``timeout_ms`` to come up.
        """
        now = time.monotonic()
        min_s = max(quiet_s, self.heartbeat.timeout_ms / 1000)
        quiet = [link for link in self._links.values() if link.quiet_s(now) > min_s]
        if of is not None:
            quiet = [link for link in quiet if link.named_by == {of}]
        for link in heapq.nsmallest(NEEDED_CHECKS, quiet, key=lambda link: link.used_at):
            if self.listener is not None and self.listener.is_needed(link.address):
                link.used_at = now
                continue
            self._drop(link)
            return True
        return False

    def _drop(self, link: PeerLink) -> None:
        self._links.pop(link.address).close()
        self.counters.add("peers.dropped")
