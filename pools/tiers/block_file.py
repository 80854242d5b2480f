"""The form of a cached block's file on disk, and its name. Opens no file.

A file is ``header | page 0 | page 1 | ...``. The header fills whole 4096 bytes::

    8  magic "kvfblock"
    4  version of this format, little-endian as all numbers here
    4  bytes of the header
    4  bytes of the description
       description: a msgpack array of BlockHeader's fields
       zeros
    8  XXH3-64 of all bytes of the header before

So each byte of the file is under one checksum: those of the header under its own, those of a page under the page's.
Files lie under ``TENANT/LAYOUT_DIGEST-IDENTITY/SPACE-BLOCK_PAGES/HH/HASH``, HH being HASH's first two digits. A file of
another namespace is none of this one's, wherever it lies: its header says whose it is. Format 1, in folders
``LAYOUT_DIGEST``, did not say which model's KV it holds: such files are left alone and never served.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from kvferry.pools.tiers.namespaces import BlockKey, Namespace

# -- what can go wrong with the disk tier, below the daemon. None of these travels: to an engine they are a miss.
#
# A damaged or missing block is computed again; a disk that is full or fails is left alone for a while by who calls.


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, a quota, or a limit on a file's size: removing blocks may help."""


class DiskError(Exception):
    """The base. The text names the file and the cause, never bytes of it."""


class MissingBlockError(DiskError):
    """No file of that block."""


class DamagedBlockError(DiskError):
    """The file is not what was written under that name. It is gone now, and counted."""


class DiskFullError(DiskError):
    """No space left, a quota reached, or a file larger than this process may write."""


class DiskFailedError(DiskError):
    """The operating system refused: an input/output error, a file system that became read-only, no more open files."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into the ones above.

    Raises:
        DiskFullError: there is no space.
        DiskFailedError: anything else.
    """
    try:
        yield
    except OSError as cause:
        kind = DiskFullError if cause.errno in FULL else DiskFailedError
        raise kind(f"{path}: {cause.strerror}") from cause


MAGIC = b"kvfblock"
FORMAT_VERSION = 2
ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 24
HASH_BYTES = 16

_PREFIX = struct.Struct("<8sIII")
_CHECKSUM = struct.Struct("<Q")
MAX_LABEL_BYTES = 512
_FIXED_BYTES = 1024
"""More than the description takes without the space's name and the digests."""
_DIGEST_BYTES = 9

TENANT_NAME = re.compile(r"(0|[1-9][0-9]{0,9})\Z")
FORM_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\Z")
OUTDATED_NAME = re.compile(r"[0-9a-f]{32}\Z")
"""A folder of format 1, in the place of one by ``FORM_NAME``."""
SPACE_NAME = re.compile(r"([a-z][a-z0-9_]{0,63})-([1-9][0-9]{0,6})\Z")
LEAF_NAME = re.compile(r"[0-9a-f]{2}\Z")
BLOCK_NAME = re.compile(r"[0-9a-f]{32}\Z")
PART_NAME = re.compile(r"[0-9a-f]{32}\.([0-9a-f]{16})-[0-9a-f]+\.part\Z")


class BlockHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a file says of itself: whose block it is, the block before it, the bytes and XXH3-64 digest of each page.

    ``model`` is the label of the model, for people: what tells models apart is ``identity``.
    """

    tenant: int
    layout_digest: str
    identity: str
    space: str
    block_pages: int
    hash: bytes
    parent: bytes | None
    page_bytes: int
    digests: tuple[int, ...]
    model: str = ""

    @property
    def key(self) -> BlockKey:
        """Return which block it is."""
        return BlockKey(
            Namespace(self.tenant, self.layout_digest, self.identity, self.space, self.block_pages), self.hash
        )


class NotABlockError(ValueError):
    """Bytes that are no header of this format, or a damaged one."""


def new_header(
    key: BlockKey, page_bytes: int, digests: tuple[int, ...], parent: bytes | None, model: str = ""
) -> BlockHeader:
    """Return the header of a block's file: ``page_bytes`` bytes and one digest for each of its pages.

    Of a model's label that is longer than ``MAX_LABEL_BYTES`` the rest is left out.
    """
    label = model.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
    return BlockHeader(*key.namespace, key.hash, parent, page_bytes, digests, label)


def header_bytes(namespace: Namespace) -> int:
    """Return the bytes of each header in a namespace: the same for all, so that a file's size is known beforehand."""
    needed = _PREFIX.size + _FIXED_BYTES + len(namespace.space) + _DIGEST_BYTES * namespace.block_pages + _CHECKSUM.size
    return needed + -needed % ALIGNMENT


def file_bytes(namespace: Namespace, page_bytes: int) -> int:
    """Return the bytes of a block's file, its header included."""
    return header_bytes(namespace) + namespace.block_pages * page_bytes


def encode_header(header: BlockHeader) -> bytes:
    """Return the header as it stands at the beginning of the file."""
    size = header_bytes(header.key.namespace)
    description = msgspec.msgpack.encode(header)
    checked = _PREFIX.pack(MAGIC, FORMAT_VERSION, size, len(description)) + description
    checked += bytes(size - len(checked) - _CHECKSUM.size)
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def announced_bytes(beginning: bytes) -> int:
    """Return how many bytes the header has that begins so.

    Args:
        beginning: the file's first bytes, up to 4096.

    Raises:
        NotABlockError: they begin no header of this format.
    """
    if len(beginning) < ALIGNMENT:
        raise NotABlockError(f"{len(beginning)} bytes are no header")
    magic, version, size, _ = _PREFIX.unpack_from(beginning)
    if magic != MAGIC:
        raise NotABlockError("it does not begin as a block does")
    if version != FORMAT_VERSION:
        raise NotABlockError(f"format {version}, not {FORMAT_VERSION}")
    if not ALIGNMENT <= size <= MAX_HEADER_BYTES or size % ALIGNMENT:
        raise NotABlockError(f"a header of {size} bytes")
    return int(size)


def decode_header(data: bytes) -> BlockHeader:
    """Return what a whole header says.

    Args:
        data: as many bytes as ``announced_bytes`` says.

    Raises:
        NotABlockError: a byte of it is wrong, or some are missing.
    """
    if announced_bytes(data) != len(data):
        raise NotABlockError("the header is cut off")
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[: -_CHECKSUM.size]):
        raise NotABlockError("the header's checksum is wrong")
    *_, described = _PREFIX.unpack_from(data)
    try:
        header = msgspec.msgpack.decode(data[_PREFIX.size : _PREFIX.size + described], type=BlockHeader)
    except msgspec.MsgspecError as cause:
        raise NotABlockError(f"the header's description: {cause}") from cause
    if len(header.digests) != header.block_pages or header_bytes(header.key.namespace) != len(data):
        raise NotABlockError(f"a header of {len(data)} bytes and {len(header.digests)} digests")
    return header


def folder_of(key: BlockKey) -> Path:
    """Return the folder that a block's file is in, relative to the root.

    Raises:
        ValueError: a name that could leave the root, or that no scan would find.
    """
    where = key.namespace
    names = (str(where.tenant), f"{where.layout_digest}-{where.identity}", f"{where.space}-{where.block_pages}")
    for name, pattern in zip(names, (TENANT_NAME, FORM_NAME, SPACE_NAME), strict=True):
        if not pattern.match(name):
            raise ValueError(f"{name!r} is no name of a folder of blocks")
    return Path(*names, file_name(key)[:2])


def namespace_of(folder: Path) -> Namespace:
    """Return whose blocks are in a folder ``.../TENANT/FORM/SPACE-BLOCK_PAGES/HH``, which has such a name."""
    tenant, form, named, _ = folder.parts[-4:]
    layout_digest, identity = form.split("-")
    space, block_pages = named.rsplit("-", 1)
    return Namespace(int(tenant), layout_digest, identity, space, int(block_pages))


def file_name(key: BlockKey) -> str:
    """Return the name of a block's file.

    Raises:
        ValueError: a hash that is not of 16 bytes.
    """
    if len(key.hash) != HASH_BYTES:
        raise ValueError(f"a hash of {len(key.hash)} bytes, not {HASH_BYTES}")
    return key.hash.hex()
