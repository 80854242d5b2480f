"""The keys of this node and of those that it talks to, as their files have them now. Knows no connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
import zmq

from kvferry.protocol.config.schema import PeersConfig
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_keys import NodeKey, newest_first, read_keys

log = structlog.get_logger(__name__)


class KeyRing:
    """This node's keys, and the allow-list.

    Attributes:
        own: the key that this node proves itself by and, where there is one, the next one, which others may use too.
    """

    def __init__(self, folder: Path, address: str) -> None:
        """Read a folder; ``address`` is where this daemon listens.

        Raises:
            ConfigError: there is no key of this node, it is another address's, or its halves are no pair.
        """
        self._folder = folder
        self._address = address
        self._signature = _signature(folder)
        self.own, self._allowed = self._read()

    def __repr__(self) -> str:
        """Show whose keys there are, and nothing secret."""
        return f"<KeyRing {self.own} allowed={len(self._allowed)}>"

    def node_of(self, public: str) -> NodeKey | None:
        """Return whose key it is; None where it is not allowed."""
        return self._allowed.get(public)

    def keys_of(self, address: str) -> list[NodeKey]:
        """Return the allowed keys of the node at an address, the newest first."""
        return newest_first(key for key in self._allowed.values() if key.address == address)

    async def reread(self) -> bool:
        """Read the files again if they have changed; return whether. Where they cannot be used, the keys stay."""
        signature = await asyncio.to_thread(_signature, self._folder)
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            self.own, self._allowed = await asyncio.to_thread(self._read)
        except ConfigError as error:
            log.warning("keys of nodes stay as they were", cause=error.detail, remedy=error.remedy)
            return False
        log.info("keys of nodes have changed", own=self.own[0].short, allowed=len(self._allowed))
        return True

    def _read(self) -> tuple[tuple[NodeKey, ...], dict[str, NodeKey]]:
        found = read_keys(self._folder)
        for key in found.own:
            if key.address != self._address:
                raise ConfigError(
                    f"the key in {self._folder} is for {key.address}, and this daemon listens at {self._address}",
                    field="peers.keys",
                    remedy="make a key for peers.listen: kvferry keys make in an empty folder",
                )
            if zmq.curve_public(key.secret.encode()).decode() != key.public:
                raise ConfigError(f"the halves of the key in {self._folder} are no pair", field="peers.keys")
        for problem in found.problems:
            log.warning("a key is ignored", cause=problem)
        return found.own, found.allowed


async def open_keys(peers: PeersConfig) -> KeyRing | None:
    """Return the keys of nodes; None where none are configured, of which the log says what it means.

    Raises:
        ConfigError: see ``KeyRing``.
    """
    if peers.listen is None:
        return None
    if peers.keys is None:
        if peers.insecure:
            log.warning(
                "any process that reaches peers.listen may act as a daemon: peers.insecure",
                listen=peers.listen,
                remedy="kvferry keys make, and peers.keys",
            )
        return None
    keys = await asyncio.to_thread(KeyRing, Path(peers.keys), peers.listen)
    log.info("daemons of other hosts need keys", node=keys.own[0].name, own=keys.own[0].short)
    return keys


def _signature(folder: Path) -> tuple[object, ...]:
    """Return what changes whenever a file of the folder does."""
    found: list[tuple[str, int, int, int]] = []
    for pattern in ("*.key_secret", "allowed/*.key"):
        for file in folder.glob(pattern):
            try:
                status = file.stat()
            except OSError:
                continue
            found.append((file.name, status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(sorted(found))
