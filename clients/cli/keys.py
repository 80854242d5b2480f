"""``kvferry keys``: the key by which this node proves itself to daemons of other hosts, and those that it allows."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.clients.cli.console import WORKED, table
from kvferry.pools.host.placement import offer
from kvferry.protocol.addresses import TCP, scheme, wrong_address
from kvferry.protocol.config.load import read_config
from kvferry.protocol.errors import AccessDeniedError, ConfigError, InvalidFieldError
from kvferry.protocol.node_keys import ALLOWED, NEXT, OWN, NodeKey, NodeKeys, parsed, read_keys
from kvferry.protocol.printable import json_line, printable

DEFAULT: Final = "/etc/kvferry/keys"
_SECRET_MODE: Final = 0o600
_PUBLIC_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o700
MOST: Final = 2
"""Keys of a node at a time: the one that it uses, and the one that is to take its place."""


class Done(NamedTuple):
    """The keys that were made, allowed or revoked, and what is said of them."""

    keys: list[NodeKey]
    said: list[str]


class Place(NamedTuple):
    """The folder of keys, and where this node's daemon listens; None where the configuration does not say."""

    folder: Path
    listen: str | None

    @property
    def allowed(self) -> Path:
        """Return the folder of the certificates of others."""
        return self.folder / ALLOWED


def add_keys(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("make", "make this node's key or, where it has one, the next, which others are to allow before it is used"),
        ("show", "show this node's keys and those that it allows; --public: the certificate that others are given"),
        ("allow", "allow a node's key, by the certificate that `kvferry keys show --public` prints there"),
        ("revoke", "end a node's key: of another node all or the one given, of this node the one before the next"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--config", type=Path, metavar="FILE", help="the daemon's file, /etc/kvferry/NAME.toml say")
        action.add_argument("--keys", type=Path, metavar="DIR", help=f"the folder (peers.keys, or {DEFAULT})")
        action.add_argument("--json", action="store_true", help="for programs")
        if name == "make":
            action.add_argument("--name", default=os.uname().nodename, help="the node's name (%(default)s)")
            action.add_argument("--address", metavar="ADDRESS", help="where its daemon listens (peers.listen)")
        elif name == "show":
            action.add_argument("--public", action="store_true", help="print the newest certificate of this node")
        elif name == "allow":
            action.add_argument("file", metavar="FILE", help="the certificate; - for standard input")
        else:
            action.add_argument("name", metavar="NAME", help="the node's name")
            action.add_argument("key", metavar="KEY", nargs="?", default="", help="the key, or how it begins")


def keys(options: argparse.Namespace) -> int:
    """Make, show, allow or revoke keys. A daemon that runs follows within a second.

    Raises:
        ConfigError: the configuration or a file of keys cannot be read.
        InvalidFieldError: what is asked for contradicts what there is.
        AccessDeniedError: a file cannot be written.
    """
    place = _place(options)
    try:
        if options.action == "show":
            _show(read_keys(place.folder), public=options.public, as_json=options.json)
            return WORKED
        if options.action == "make":
            done = _make(place, options.name, options.address or place.listen)
        elif options.action == "allow":
            done = _allow(place, options.file)
        else:
            done = _revoke(place, options.name, options.key)
    except PermissionError as cause:
        raise AccessDeniedError(
            f"{cause.filename}: {cause.strerror}", remedy="run it as root or as the folder's owner"
        ) from cause
    print(json_line({"keys": [_row(one) for one in done.keys]}) if options.json else "\n".join(done.said))
    return WORKED


def _row(key: NodeKey) -> dict[str, str]:
    return {"node": key.name, "address": key.address, "key": key.public, "made": key.made}


def _place(options: argparse.Namespace) -> Place:
    peers = read_config(options.config, offer(), os.environ).config.peers
    return Place(options.keys or Path(peers.keys or DEFAULT), peers.listen)


def _make(place: Place, name: str, address: str | None) -> Done:
    import zmq  # noqa: PLC0415  the other commands do not need it

    name_of_file = NEXT if (place.folder / OWN).exists() else OWN
    if (place.folder / NEXT).exists():
        raise InvalidFieldError(
            "there is a next key already", field="make", remedy="let it take the old one's place: kvferry keys revoke"
        )
    if name_of_file == NEXT:
        own = read_keys(place.folder).own[0]
        name, address = own.name, own.address
    if address is None:
        raise InvalidFieldError("where does the daemon listen?", field="--address", remedy="give --config or --address")
    if wrong := wrong_address(address) if scheme(address) == TCP else f"{address} is no TCP address":
        raise InvalidFieldError(wrong, field="--address")
    public, secret = (half.decode() for half in zmq.curve_keypair())
    while public.startswith("-"):  # which `kvferry keys revoke NAME KEY` would take for an option
        public, secret = (half.decode() for half in zmq.curve_keypair())
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    key = NodeKey(name=name, address=address, made=made, public=public, secret=secret)
    parsed(key.secret_certificate, "--name")
    for folder in (place.folder, place.allowed):
        folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        _give_to_owner(folder, folder.parent if folder == place.allowed else folder)
    _write(place.folder / name_of_file, key.secret_certificate, _SECRET_MODE)
    said = [f"made {place.folder / name_of_file}: {key.public}, of {name} at {address}"]
    if name_of_file == NEXT:
        said.append(f"then, once all others allow it: kvferry keys revoke {name}")
    return Done([key], said)


def _show(found: NodeKeys, *, public: bool, as_json: bool) -> None:
    if public:
        print(found.own[-1].certificate, end="")
        return
    rows = [
        {"use": use, **_row(key)}
        for use, some in (("own", found.own[:1]), ("next", found.own[1:]), ("allowed", found.allowed.values()))
        for key in some
    ]
    if as_json:
        print(json_line({"keys": rows, "problems": found.problems}))
        return
    head = ("use", "node", "address", "key", "made")
    print("\n".join(map(printable, list(table("keys", head, [tuple(row.values()) for row in rows]))[1:])))
    for problem in found.problems:
        print(printable(f"kvferry keys: ignored: {problem}"), file=sys.stderr)


def _allow(place: Place, name: str) -> Done:
    try:
        text = sys.stdin.read(1 << 16) if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidFieldError(f"{name}: {cause}", field="FILE") from cause
    key = parsed(text, "standard input" if name == "-" else name)
    if key.secret:
        raise InvalidFieldError(
            "this is a secret certificate, which stays where it was made",
            field="FILE",
            remedy="kvferry keys show --public",
        )
    found = read_keys(place.folder)
    if any((key.name == own.name) != (key.address == own.address) for own in found.own):
        raise InvalidFieldError(f"{key.name} at {key.address} and this node contradict each other", field="FILE")
    others = [one for one in found.allowed.values() if key.name == one.name or key.address == one.address]
    if any((one.name, one.address) != (key.name, key.address) for one in others):
        raise InvalidFieldError(
            f"{key.name} at {key.address}: {others[0].name} at {others[0].address} is allowed",
            field="FILE",
            remedy=f"kvferry keys revoke {others[0].name}",
        )
    if len({one.public for one in others} | {key.public}) > MOST:
        raise InvalidFieldError(
            f"{key.name} has {MOST} keys here already", field="FILE", remedy=f"kvferry keys revoke {key.name} KEY"
        )
    _write(place.allowed / _file_name(key), key.certificate, _PUBLIC_MODE)
    return Done([key], [f"allowed {key.public}, of {key.name} at {key.address}"])


def _revoke(place: Place, name: str, key: str) -> Done:
    found = read_keys(place.folder)
    own = found.own[0]
    if name == own.name:
        if not (place.folder / NEXT).exists() or not own.public.startswith(key):
            raise InvalidFieldError(
                "this node would have no key",
                field="NAME",
                remedy="make the next one first, and let all others allow it",
            )
        (place.folder / NEXT).replace(place.folder / OWN)
        return Done([own], [f"revoked {own.public}: {name} uses {found.own[1].public} now"])
    gone = []
    for file in sorted(place.allowed.glob("*.key")):
        try:
            one = parsed(file.read_text(encoding="utf-8"), file.name)
        except (ConfigError, UnicodeDecodeError):
            continue
        if one.name == name and one.public.startswith(key):
            file.unlink()
            gone.append(one)
    if not gone:
        raise InvalidFieldError(f"no such key of {name} is allowed", field="NAME", remedy="kvferry keys show")
    return Done(gone, [f"revoked {one.public}, of {one.name} at {one.address}" for one in gone])


def _file_name(key: NodeKey) -> str:
    """Return a name that differs for each key, of characters that a Kubernetes secret may have as well."""
    return f"{key.name}_{key.public.encode().hex()[:16]}.key"


def _write(file: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all, for the folder's owner, whose daemon reads it."""
    made = file.with_name(f".{file.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(descriptor)
    _give_to_owner(made, file.parent)
    made.replace(file)


def _give_to_owner(file: Path, folder: Path) -> None:
    owner = folder.stat()
    if os.geteuid() == 0:
        os.chown(file, owner.st_uid, owner.st_gid)
