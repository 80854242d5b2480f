"""The form of a block's file: what is written today is read by every later version, or refused by name."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvferry.pools.tiers.block_file import (
    ALIGNMENT,
    NotABlockError,
    announced_bytes,
    decode_header,
    encode_header,
    file_bytes,
    folder_of,
    namespace_of,
    new_header,
)
from tests.kit.disk_blocks import IDENTITY, LAYOUT, block

GOLDEN_DIGEST = 14231727065725489589


def _sealed(data: bytes) -> bytes:
    """Return a header with the checksum that its bytes should have."""
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


@pytest.fixture
def encoded() -> bytes:
    key = block(1).key._replace(hash=bytes(range(16)))
    return encode_header(new_header(key, 1000, (1, 2, (1 << 64) - 1), bytes(16)))


def test_the_form_is_what_it_was(encoded: bytes) -> None:
    assert encoded[:20] == b"kvfblock" + struct.pack("<III", 2, ALIGNMENT, 128)
    assert xxhash.xxh3_64_intdigest(encoded) == GOLDEN_DIGEST


def test_a_header_comes_back(encoded: bytes) -> None:
    header = decode_header(encoded)
    assert header.digests == (1, 2, (1 << 64) - 1)
    assert (header.key.hash, header.parent) == (bytes(range(16)), bytes(16))


@pytest.mark.parametrize(
    ("position", "value", "why"),
    [
        (0, b"KVFBLOCK", "does not begin"),
        (8, struct.pack("<I", 1), "format 1, not 2"),
        (12, struct.pack("<I", 0), "a header of 0 bytes"),
        (12, struct.pack("<I", 1 << 30), "a header of"),
        (12, struct.pack("<I", 8192), "truncated"),
        (16, struct.pack("<I", 5), "description"),
        (20, b"\xc0", "description"),
    ],
)
def test_a_header_of_another_form_is_refused_whatever_its_checksum(
    encoded: bytes, position: int, value: bytes, why: str
) -> None:
    odd = _sealed(encoded[:position] + value + encoded[position + len(value) :])
    with pytest.raises(NotABlockError, match=why):
        decode_header(odd)


def test_digests_are_as_many_as_pages(encoded: bytes) -> None:
    assert announced_bytes(encoded) == len(encoded)
    odd = encode_header(new_header(block(1).key, 1000, (1, 2), None))
    with pytest.raises(NotABlockError, match="2 digests"):
        decode_header(odd)


@pytest.mark.parametrize("pages", [1, 400, 4096])
def test_every_header_of_a_namespace_has_one_length(pages: int) -> None:
    key = block(1, pages=pages, page_bytes=1, tenant=(1 << 32) - 1).key
    longest = encode_header(new_header(key, 1 << 62, ((1 << 64) - 1,) * pages, bytes(16), "ä" * 1000))
    assert len(longest) == len(encode_header(new_header(key, 1, (0,) * pages, None)))
    assert len(longest) == file_bytes(key.namespace, 1) - pages
    assert decode_header(longest).page_bytes == 1 << 62
    assert decode_header(longest).model == "ä" * 256


def test_a_folder_says_whose_blocks_it_has() -> None:
    key = block(1).key
    assert str(folder_of(key)) == f"7/{LAYOUT}-{IDENTITY}/main-3/{key.hash.hex()[:2]}"
    assert namespace_of(folder_of(key)) == key.namespace
