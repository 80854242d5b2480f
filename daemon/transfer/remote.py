"""Transfers between daemons, as values: another daemon's pools, its send requests, its announced receive requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.peer_messages import ReceiveName

if TYPE_CHECKING:
    from kvferry.daemon.transfer.endpoints import SendRequest, State


class Incarnation(NamedTuple):
    """One life of another daemon."""

    address: str
    boot_id: str


class Origin(NamedTuple):
    """What names a send request that came from another daemon."""

    peer: Incarnation
    receive_request: ReceiveName
    send_request: int


class RemotePool:
    """A pool of another daemon.

    Attributes:
        mapping: its memory, for reading, where that daemon is on this host and the transport has mapped it.
    """

    def __init__(
        self,
        tenant: int,
        name: str,
        manifest: Manifest,
        peer: Incarnation,
        region_id: int,
        model: ModelIdentity | None = None,
    ) -> None:
        self.region_id = region_id
        self.tenant = tenant
        self.name = name
        self.manifest = manifest
        self.peer = peer
        self.model = model
        self.mapping: HostRegion | None = None

    def __repr__(self) -> str:
        """Show whose it is."""
        return f"<RemotePool {self.tenant}/{self.name} of {self.peer.address}>"

    def unmap(self) -> None:
        """Give the mapping up; copies that are under way keep the memory until they end."""
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None

    @property
    def region(self) -> HostRegion:
        """Return the mapped memory; only after the transport has mapped it."""
        assert self.mapping is not None, self
        return self.mapping


class Announcement:
    """A receive request that waits at another daemon. Local send requests join it, one remote endpoint each."""

    def __init__(self, home: Incarnation, receive_request: ReceiveName, deadline_at: float) -> None:
        self.home = home
        self.receive_request = receive_request
        self.deadline_at = deadline_at
        self.remote_endpoints: list[RemoteEndpoint] = []

    def __repr__(self) -> str:
        """Show which receive request, and how many send requests joined."""
        name = self.receive_request.request_id
        return f"<Announcement {name} of {self.home.address} sends={len(self.remote_endpoints)}>"


class RemoteEndpoint:
    """Another daemon's receive request as one local send request sees it. Goes through the states of a side.

    Attributes:
        number: names the send request to the receive request's home.
        sending: transfer ops of the send request that this daemon is writing to the home's bounce buffers.
    """

    def __init__(self, announcement: Announcement, send_request: SendRequest, number: int, state: State) -> None:
        self.announcement = announcement
        self.send_request = send_request
        self.number = number
        self.state = state
        self.sending: set[int] = set()
