"""The file format of a cached block on disk, and the file's name. Opens no file.

A file is ``header | page 0 | page 1 | ...``. The header fills whole 4096 bytes::

    8  magic "kvfblock"
    4  version of this format, little-endian like all numbers here
    4  size of the header in bytes
    4  size of the description in bytes
       description: a msgpack array of BlockHeader's fields
       zeros
    8  XXH3-64 of all preceding bytes of the header

So each byte of the file is covered by one checksum: the header by its own, each page by the page's. Files are stored
under ``TENANT/LAYOUT_DIGEST-IDENTITY/SPACE-BLOCK_PAGES/HH/HASH``, HH being the first two digits of HASH. The header
names the namespace, so a file of another one is rejected wherever it lies. Format 1, in folders ``LAYOUT_DIGEST``, did
not say which model's KV a file holds: such files are left alone and never served.
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

# -- errors of the disk tier. None of these is sent to an engine, which sees a miss.
#
# A damaged or missing block is computed again; the caller stops using a full or failing disk for a while.


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, a quota, or a file size limit: removing blocks may help."""


class DiskError(Exception):
    """Base class. The text names the file and the cause, never contents of the file."""


class MissingBlockError(DiskError):
    """There is no file for the block."""


class DamagedBlockError(DiskError):
    """The file is not what was written under that name. It was removed and counted."""


class DiskFullError(DiskError):
    """No space left, a quota reached, or a file larger than this process may write."""


class DiskFailedError(DiskError):
    """The operating system refused: an I/O error, a file system that became read-only, too many open files."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into one of the errors above.

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
"""Upper bound of the description without the space's name and the digests."""
_DIGEST_BYTES = 9

TENANT_NAME = re.compile(r"(0|[1-9][0-9]{0,9})\Z")
FORM_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\Z")
OUTDATED_NAME = re.compile(r"[0-9a-f]{32}\Z")
"""A folder of format 1, at the level of ``FORM_NAME``."""
SPACE_NAME = re.compile(r"([a-z][a-z0-9_]{0,63})-([1-9][0-9]{0,6})\Z")
LEAF_NAME = re.compile(r"[0-9a-f]{2}\Z")
BLOCK_NAME = re.compile(r"[0-9a-f]{32}\Z")
PART_NAME = re.compile(r"[0-9a-f]{32}\.([0-9a-f]{16})-[0-9a-f]+\.part\Z")


class BlockHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a file: the block's key, its parent, and the size and XXH3-64 digest of each page.

    ``model`` is a label for people; ``identity`` is what distinguishes models.
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
        """Return the block's key."""
        return BlockKey(
            Namespace(self.tenant, self.layout_digest, self.identity, self.space, self.block_pages), self.hash
        )


class NotABlockError(ValueError):
    """The bytes are not a header of this format, or a damaged one."""


def new_header(
    key: BlockKey, page_bytes: int, digests: tuple[int, ...], parent: bytes | None, model: str = ""
) -> BlockHeader:
    """Return the header of a block's file: ``page_bytes`` bytes and one digest for each of its pages.

    A model label longer than ``MAX_LABEL_BYTES`` is truncated.
    """
    label = model.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
    return BlockHeader(*key.namespace, key.hash, parent, page_bytes, digests, label)


def header_bytes(namespace: Namespace) -> int:
    """Return the header size in a namespace: the same for all its blocks, so that a file's size is known beforehand."""
    needed = _PREFIX.size + _FIXED_BYTES + len(namespace.space) + _DIGEST_BYTES * namespace.block_pages + _CHECKSUM.size
    return needed + -needed % ALIGNMENT


def file_bytes(namespace: Namespace, page_bytes: int) -> int:
    """Return the size of a block's file, header included."""
    return header_bytes(namespace) + namespace.block_pages * page_bytes


def encode_header(header: BlockHeader) -> bytes:
    """Return the header as the file's first bytes."""
    size = header_bytes(header.key.namespace)
    description = msgspec.msgpack.encode(header)
    checked = _PREFIX.pack(MAGIC, FORMAT_VERSION, size, len(description)) + description
    checked += bytes(size - len(checked) - _CHECKSUM.size)
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def announced_bytes(beginning: bytes) -> int:
    """Return the size of the header that starts with these bytes.

    Args:
        beginning: the file's first bytes, up to 4096.

    Raises:
        NotABlockError: they are not the start of a header of this format.
    """
    if len(beginning) < ALIGNMENT:
        raise NotABlockError(f"{len(beginning)} bytes are too few for a header")
    magic, version, size, _ = _PREFIX.unpack_from(beginning)
    if magic != MAGIC:
        raise NotABlockError("it does not begin with the magic number of a block")
    if version != FORMAT_VERSION:
        raise NotABlockError(f"format {version}, not {FORMAT_VERSION}")
    if not ALIGNMENT <= size <= MAX_HEADER_BYTES or size % ALIGNMENT:
        raise NotABlockError(f"a header of {size} bytes")
    return int(size)


def decode_header(data: bytes) -> BlockHeader:
    """Decode a whole header.

    Args:
        data: ``announced_bytes`` bytes.

    Raises:
        NotABlockError: the header is damaged or truncated.
    """
    if announced_bytes(data) != len(data):
        raise NotABlockError("the header is truncated")
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
        ValueError: a name that could escape the root, or that no scan would find.
    """
    where = key.namespace
    names = (str(where.tenant), f"{where.layout_digest}-{where.identity}", f"{where.space}-{where.block_pages}")
    for name, pattern in zip(names, (TENANT_NAME, FORM_NAME, SPACE_NAME), strict=True):
        if not pattern.match(name):
            raise ValueError(f"{name!r} is not a valid folder name for blocks")
    return Path(*names, file_name(key)[:2])


def namespace_of(folder: Path) -> Namespace:
    """Return the namespace of the blocks in a folder, which is named ``.../TENANT/FORM/SPACE-BLOCK_PAGES/HH``."""
    tenant, form, named, _ = folder.parts[-4:]
    layout_digest, identity = form.split("-")
    space, block_pages = named.rsplit("-", 1)
    return Namespace(int(tenant), layout_digest, identity, space, int(block_pages))


def file_name(key: BlockKey) -> str:
    """Return the name of a block's file.

    Raises:
        ValueError: the hash does not have 16 bytes.
    """
    if len(key.hash) != HASH_BYTES:
        raise ValueError(f"a hash of {len(key.hash)} bytes, not {HASH_BYTES}")
    return key.hash.hex()
