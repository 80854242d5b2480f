"""Hand-offs between daemons, as values: the other daemon's pool, offers that came from it, rooms announced by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.peer_messages import RoomName

if TYPE_CHECKING:
    from kvferry.daemon.rooms.sides import Offer, State


class Incarnation(NamedTuple):
    """One life of another daemon."""

    address: str
    boot_id: str


class Origin(NamedTuple):
    """What names an offer that came from another daemon."""

    peer: Incarnation
    room: RoomName
    offer: int


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
    """A room of another daemon that waits for a request. Local offers join it, one target each."""

    def __init__(self, home: Incarnation, room: RoomName, deadline_at: float) -> None:
        self.home = home
        self.room = room
        self.deadline_at = deadline_at
        self.targets: list[Target] = []

    def __repr__(self) -> str:
        """Show which room, and how many offers joined."""
        return f"<Announcement {self.room.request_id} of {self.home.address} offers={len(self.targets)}>"


class Target:
    """Another daemon's room as one local offer sees it. Goes through the states of a side.

    Attributes:
        number: names the offer to the room's home.
        sending: pieces of the offer that this daemon is writing to the home's landing slots.
    """

    def __init__(self, announcement: Announcement, offer: Offer, number: int, state: State) -> None:
        self.announcement = announcement
        self.offer = offer
        self.number = number
        self.state = state
        self.sending: set[int] = set()
