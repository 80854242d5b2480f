"""Names and headers of blocks in the remote tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.tiers.remote_store import StoredHeader, header_bytes, pack_header, remote_name, unpack_header
from kvferry.pools.tiers.cached_block import BlockKey, Namespace

KEY = BlockKey(Namespace(1000, "0f" * 16, "1e" * 16, "main", 4), bytes(range(16)))
PARENTS = st.none() | st.binary(min_size=16, max_size=16)
DIGESTS = st.lists(st.integers(0, (1 << 64) - 1), max_size=40)


@given(PARENTS, DIGESTS)
def test_a_header_comes_back(parent: bytes | None, digests: list[int]) -> None:
    packed = pack_header("a", parent, digests)
    assert len(packed) == header_bytes(len(digests))
    assert unpack_header("a", packed) == StoredHeader(parent, tuple(digests))


@given(PARENTS, DIGESTS, st.data())
def test_a_changed_header_is_none(parent: bytes | None, digests: list[int], data: st.DataObject) -> None:
    packed = bytearray(pack_header("a", parent, digests))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    assert unpack_header("a", bytes(packed)) is None


@given(DIGESTS, st.integers(min_value=1))
def test_a_cut_header_is_none(digests: list[int], cut: int) -> None:
    packed = pack_header("a", None, digests)
    assert unpack_header("a", packed[: -min(cut, len(packed))]) is None
    assert unpack_header("a", packed + bytes(8)) is None


def test_a_header_is_of_one_name() -> None:
    assert unpack_header("b", pack_header("a", None, [1, 2])) is None


@pytest.mark.parametrize(
    "other",
    [
        BlockKey(KEY.namespace._replace(layout_digest="0e" * 16), KEY.hash),
        BlockKey(KEY.namespace._replace(identity="1f" * 16), KEY.hash),
        BlockKey(KEY.namespace._replace(space="swa"), KEY.hash),
        BlockKey(KEY.namespace._replace(block_pages=5), KEY.hash),
        BlockKey(KEY.namespace, bytes(16)),
    ],
)
def test_other_blocks_have_other_names(other: BlockKey) -> None:
    for shared in (True, False):
        assert remote_name(other, shared=shared) != remote_name(KEY, shared=shared)


def test_only_shared_names_are_those_of_all_tenants() -> None:
    other = BlockKey(KEY.namespace._replace(tenant=1001), KEY.hash)
    assert remote_name(other, shared=False) != remote_name(KEY, shared=False)
    assert remote_name(other, shared=True) == remote_name(KEY, shared=True)
    assert (
        remote_name(KEY, shared=False)
        == f"kvferry/2/tenant-1000/{'0f' * 16}/{'1e' * 16}/main/4/{bytes(range(16)).hex()}"
    )
