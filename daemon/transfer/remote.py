"""Another daemon as values: its life, its pools, and what names its send requests."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.peer_messages import ReceiveName


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
