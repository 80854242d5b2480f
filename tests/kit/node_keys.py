"""Keys of nodes in folders, as ``kvferry keys`` writes them."""

from __future__ import annotations

import itertools
from pathlib import Path

import zmq

from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.protocol.node_keys import ALLOWED, NEXT, OWN, NodeKey

_SECONDS = itertools.count()


def new_node_key(name: str, address: str) -> NodeKey:
    """Return a new key of a node, newer than those before."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    number = next(_SECONDS)
    made = f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z"
    return NodeKey(name=name, address=address, made=made, public=public, secret=secret)


class KeyFolder:
    """A node's folder of keys."""

    def __init__(self, path: Path, key: NodeKey) -> None:
        self.path = path
        self.key = key
        (path / ALLOWED).mkdir(parents=True)
        self.use(key)

    def ring(self) -> KeyRing:
        """Return its keys as a daemon has them."""
        return KeyRing(self.path, self.key.address)

    def use(self, key: NodeKey, name: str = OWN) -> None:
        """Have this as the node's own key, or as the next one."""
        hidden = self.path / "made"
        hidden.touch(mode=0o600)
        hidden.write_text(key.secret_certificate)
        hidden.rename(self.path / name)

    def prepare(self, key: NodeKey) -> None:
        """Have a next key."""
        self.use(key, NEXT)

    def replace(self) -> None:
        """Let the next key take the place of the old one."""
        (self.path / NEXT).rename(self.path / OWN)

    def allow(self, key: NodeKey) -> None:
        file = self._file(key)
        made = file.with_suffix(".made")
        made.write_text(key.certificate)
        made.rename(file)

    def revoke(self, key: NodeKey) -> None:
        self._file(key).unlink()

    def _file(self, key: NodeKey) -> Path:
        return self.path / ALLOWED / f"{key.name}_{key.public.encode().hex()[:16]}.key"


def key_folders(path: Path, *addresses: str) -> list[KeyFolder]:
    """Return the folders of nodes, each of which allows all others."""
    folders = [
        KeyFolder(path / f"node-{number}", new_node_key(f"node-{number}", address))
        for number, address in enumerate(addresses)
    ]
    for one, other in itertools.permutations(folders, 2):
        one.allow(other.key)
    return folders
