"""Keys of nodes: files in zmq's own certificate format, which name whose key it is and where that daemon listens.

A folder of keys has ``own.key_secret``, the key that this node uses, and ``next.key_secret`` while one is to take its
place; ``allowed/*.key`` are public certificates of the nodes that it talks to, usually one a node, two during a
rotation. Knows nothing of sockets: zmq makes the keys.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.protocol.addresses import TCP, scheme, wrong_address
from kvferry.protocol.errors import ConfigError

OWN: Final = "own.key_secret"
NEXT: Final = "next.key_secret"
ALLOWED: Final = "allowed"
SHORT: Final = 8
"""So many characters of a key tell it from others for a reader."""

_MAX_BYTES: Final = 4096
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_FIELD: Final = re.compile(r'^\s*([a-z-]+)\s*=\s*"?([^"\n]*?)"?\s*$', re.MULTILINE)
_Z85: Final = "[0-9a-zA-Z.:+=^!/*?&<>()\\[\\]{}@%$#-]{40}"
NodeName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9.-]*\\Z", max_length=128)]
Key = Annotated[str, Meta(pattern=f"^{_Z85}\\Z")]
"""32 bytes in zmq's text form, Z85: 40 characters."""

_HIDDEN_BANNER: Final = """#   ****  kvferry  ****
#   ZeroMQ CURVE **Secret** Certificate
#   DO NOT PROVIDE THIS FILE TO OTHER USERS nor change its permissions.

"""
_PUBLIC_BANNER: Final = """#   ****  kvferry  ****
#   ZeroMQ CURVE Public Certificate

"""


class NodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """A node's key.

    Attributes:
        name: the node's.
        address: where its daemon listens for others: the only address that the key speaks for.
        made: when it was made, in a form that sorts by time.
        public: the public key.
        secret: the secret one; empty in a public certificate.
    """

    name: NodeName
    address: str
    made: Annotated[str, Meta(pattern="^[0-9TZ:-]{1,32}\\Z")]
    public: Key
    secret: Annotated[str, Meta(pattern=f"^({_Z85})?\\Z")] = ""

    def __repr__(self) -> str:
        """Show whose it is, and nothing secret."""
        return f"<NodeKey {self.name} {self.address} {self.short}>"

    @property
    def short(self) -> str:
        """Return the beginning of the public key."""
        return self.public[:SHORT]

    @property
    def certificate(self) -> str:
        """Return the public certificate, which others are given."""
        return self._text(_PUBLIC_BANNER, "")

    @property
    def secret_certificate(self) -> str:
        """Return the secret certificate, which nobody is given."""
        return self._text(_HIDDEN_BANNER, f'    secret-key = "{self.secret}"\n')

    def _text(self, banner: str, secret: str) -> str:
        metadata = f"metadata\n    name = {self.name}\n    address = {self.address}\n    made = {self.made}\n"
        return f'{banner}{metadata}curve\n    public-key = "{self.public}"\n{secret}'


class NodeKeys(NamedTuple):
    """What a folder of keys has.

    Attributes:
        own: this node's: the one in use and, where there is one, the next.
        allowed: those of the others, by public key.
        problems: what is wrong with files that are therefore ignored.
    """

    own: tuple[NodeKey, ...]
    allowed: dict[str, NodeKey]
    problems: tuple[str, ...]


def parsed(text: str, where: str) -> NodeKey:
    """Return the key in a certificate's text; ``where`` names it in errors.

    Raises:
        ConfigError: it is none, or does not say whose it is and where that daemon listens.
    """
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    fields = {name.replace("-key", ""): value for name, value in _FIELD.findall(lines)}
    try:
        key = msgspec.convert(fields, NodeKey)
    except msgspec.ValidationError as cause:
        at = re.search(r"`(?:\$\.)?(\w+)`\Z", str(cause))
        what = f"{at[1]} is missing or wrong" if at else str(cause)
        raise ConfigError(f"{where} is no certificate of a node: {what}", remedy=_MADE_BY) from cause
    wrong = wrong_address(key.address) if scheme(key.address) == TCP else f"{key.address} is no TCP address"
    if wrong:
        raise ConfigError(f"{where}: {wrong}", remedy=_MADE_BY)
    return key


_MADE_BY: Final = "kvferry keys make, or kvferry keys allow, writes such files"


def read_keys(folder: Path) -> NodeKeys:
    """Return the keys in a folder.

    Raises:
        ConfigError: it cannot be read, this node has no key of its own, or others may read that.
    """
    try:
        own = tuple(_secret(folder / name) for name in (OWN, NEXT) if name == OWN or (folder / name).exists())
        problems: list[str] = []
        allowed = _allowed(sorted((folder / ALLOWED).glob("*.key")), problems)
    except OSError as cause:
        what = f"{folder}: {cause.strerror}"
        raise ConfigError(what, field="peers.keys", remedy="make this node's key: kvferry keys make") from cause
    if len({(key.name, key.address) for key in own}) > 1:
        raise ConfigError(f"{folder}: {OWN} and {NEXT} name two nodes", field="peers.keys")
    return NodeKeys(own, allowed, tuple(problems))


def newest_first(keys: Iterable[NodeKey]) -> list[NodeKey]:
    """Return keys in the order in which they are tried."""
    return sorted(keys, key=attrgetter("made"), reverse=True)


def _allowed(files: Iterable[Path], problems: list[str]) -> dict[str, NodeKey]:
    """Return the certificates in files; where two contradict each other, the first one."""
    allowed: dict[str, NodeKey] = {}
    names: dict[str, str] = {}
    for file in files:
        try:
            key = parsed(_text(file), file.name)
        except (ConfigError, OSError, ValueError) as cause:
            problems.append(cause.detail if isinstance(cause, ConfigError) else f"{file.name}: {cause}")
            continue
        if allowed.get(key.public, key) != key or names.setdefault(key.address, key.name) != key.name:
            problems.append(f"{file.name}: another file says otherwise whose key, or who at {key.address}, it is")
            continue
        allowed[key.public] = key
    return allowed


def _secret(file: Path) -> NodeKey:
    if file.stat().st_mode & _OF_OTHERS:
        raise ConfigError(f"{file} is not its owner's alone", field="peers.keys", remedy=f"chmod 600 {file}")
    try:
        key = parsed(_text(file), str(file))
    except (UnicodeDecodeError, ConfigError) as cause:
        raise ConfigError(getattr(cause, "detail", str(cause)), field="peers.keys", remedy=_MADE_BY) from cause
    if not key.secret:
        raise ConfigError(f"{file} has no secret key", field="peers.keys", remedy=_MADE_BY)
    return key


def _text(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES).decode()
