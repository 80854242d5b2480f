"""Values that describe other daemons: their incarnations, pools, and the keys of their send requests."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.peer_messages import ReceiveName


class Incarnation(NamedTuple):
    """One life of another daemon: a restart makes a new one."""

    address: str
    boot_id: str


class Origin(NamedTuple):
    """The key of a send request that came from another daemon."""

    peer: Incarnation
    receive_request: ReceiveName
    send_request: int


class RemotePool:
    """A pool of another daemon.

    Attributes:
        mapping: its memory, mapped read-only by the transport; None before that, and for daemons on other hosts.
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
        """Show its tenant, name and daemon."""
        return f"<RemotePool {self.tenant}/{self.name} of {self.peer.address}>"

    def unmap(self) -> None:
        """Close the mapping; copies in progress keep the memory until they end."""
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None

    @property
    def region(self) -> HostRegion:
        """Return the mapped memory; call it only after the transport has mapped it."""
        assert self.mapping is not None, self
        return self.mapping
