"""Identifiers and their form on the wire."""

from __future__ import annotations

import os
from typing import Annotated, Literal, NewType

import msgspec
from msgspec import Meta

Hex128 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""128 bits as 32 lower-case hexadecimal digits, on the wire, in JSON and in logs; for example a request id."""

BootId = NewType("BootId", str)
"""One life of a daemon: 32 hexadecimal digits, or empty if any boot id is accepted."""

PoolLifetime = Literal["daemon", "instance"]
"""With what a pool ends that nobody deletes: the daemon, or the instance that created it."""

PoolName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*\\Z", min_length=1, max_length=128)]
PeerAddress = Annotated[str, Meta(pattern="^(tcp://[^ ]+:[0-9]+|ipc:///[^ ]+)\\Z", max_length=256)]
"""Where a daemon listens for other daemons: ``tcp://ADDRESS:PORT``, or ``ipc://PATH`` on the same host."""

PeerKey = Annotated[str, Meta(pattern="^([0-9a-f]{32})?\\Z", max_length=32)]
"""128 bits that one daemon has told one address, as 32 hexadecimal digits; or nothing."""

ComponentName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*\\Z", min_length=1, max_length=32)]

HOST = "host"
DeviceName = Annotated[str, Meta(pattern="^(host|(npu|cuda):[0-9]{1,3})\\Z", max_length=16)]
"""Where a pool's memory is: ``host``, ``npu:N`` or ``cuda:N``; N is torch's device index in this process."""

PLAIN_TEXT = "^[^\\x00-\\x1f\\x7f]*\\Z"
"""Text without control characters, safe to print."""

PlainText = Annotated[str, Meta(pattern=PLAIN_TEXT)]

TenantNumber = Annotated[int, Meta(ge=0, lt=1 << 33)]
"""A user's number, or one that ``config.tenants`` gives."""

ProcessId = Annotated[int, Meta(ge=1, lt=1 << 31)]

ClientName = Annotated[str, Meta(max_length=128)]
"""The name that a client gives itself, shown in status and logs."""

PATTERNS = {
    "^(host|(npu|cuda):[0-9]{1,3})\\Z": "host, npu:N or cuda:N",
    "^(tcp://[^ ]+:[0-9]+|ipc:///[^ ]+)\\Z": "tcp://ADDRESS:PORT or ipc:///PATH",
    "^[A-Za-z0-9][A-Za-z0-9._-]*\\Z": "a name of letters, digits, '.', '_' and '-'",
    "^[a-z][a-z0-9_]*\\Z": "a name of small letters, digits and '_'",
    PLAIN_TEXT: "a text without control characters",
    "^[0-9a-f]{32}$": "32 hexadecimal digits in lower case",
    "^([0-9a-f]{32})?\\Z": "32 hexadecimal digits in lower case, or nothing",
}
"""A description of each pattern above, for error texts."""

NO_BOOT = BootId("")

MAIN = "main"
"""The component, and the page space, of a model's own paged attention."""


def new_request_id() -> str:
    """Return a fresh request id: 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def new_boot_id() -> BootId:
    """Return a fresh boot id: 128 random bits as 32 hexadecimal digits."""
    return BootId(os.urandom(16).hex())


def new_number() -> int:
    """Return 52 random bits, which JSON has exactly, above 0: a number, or the first of a count, of this boot alone.

    An engine may still have numbers of the daemon before this one, which must mean nothing here.
    """
    return (int.from_bytes(os.urandom(7)) >> 4) + 1


def new_key() -> str:
    """Return a fresh key for another daemon: 128 random bits as 32 hexadecimal digits. Never log it."""
    return os.urandom(16).hex()


def new_secret() -> bytes:
    """Return a fresh session secret: 16 random bytes. Never log it."""
    return os.urandom(16)


# -- the model whose KV a pool holds: given when the pool is created, and part of every cached block's key.


ModelName = Annotated[PlainText, Meta(min_length=1, max_length=256)]
Qualifier = Annotated[PlainText, Meta(max_length=256)]
COMPARED = ("name", "revision", "adapter")
"""Fields that must be equal in two pools that exchange pages; salts matter only to the cache."""

MAY_BE_UNKNOWN = ("revision",)
"""Fields compared only if both sides give them. An empty adapter is compared: a LoRA's KV is not the base model's."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The model that computed the KV in a pool's pages.

    Only pools with equal identity, layout and user share cached blocks. ``revision`` distinguishes versions of the
    weights: a commit or a checksum. ``adapter`` is the LoRA that all requests of the pool use; if requests use
    different ones, include the adapter in the blocks' hashes instead. ``salt`` separates caches of the same model; it
    is never shown.
    """

    name: ModelName
    revision: Qualifier = ""
    adapter: Qualifier = ""
    salt: Qualifier = ""

    def __repr__(self) -> str:
        """Show all but the salt."""
        return f"<ModelIdentity {self.label}{' salted' if self.salt else ''}>"

    @property
    def label(self) -> str:
        """Return ``NAME@REVISION+ADAPTER`` for errors, logs and lists; without the salt."""
        return f"{self.name}{self.revision and f'@{self.revision}'}{self.adapter and f'+{self.adapter}'}"

    @property
    def public(self) -> ModelIdentity:
        """Return the identity without the salt, which may be shown to others."""
        return msgspec.structs.replace(self, salt="") if self.salt else self
