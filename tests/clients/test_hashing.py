"""The hash chain of cached blocks: what it depends on, what it does not, and that its bytes never change."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.hashing import block_hashes
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import HASH_BYTES

TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
BLOCK = st.integers(1, 9)
SALT = st.binary(max_size=20)


def chain(tokens: list[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Return the hashes as the module's docstring defines them."""
    before, hashes = hashlib.sha256(b"kvferry blocks 1:" + salt).digest()[:16], []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(one.to_bytes(8, "little", signed=True) for one in tokens[start : start + block_tokens])
        before = hashlib.sha256(before + block).digest()[:16]
        hashes.append(before)
    return hashes


@given(TOKENS, BLOCK, SALT)
def test_it_is_the_chain_that_is_documented(tokens: list[int], block_tokens: int, salt: bytes) -> None:
    hashes = block_hashes(tokens, block_tokens, salt=salt)
    assert hashes == chain(tokens, block_tokens, salt)
    assert len(hashes) == len(tokens) // block_tokens
    assert {len(one) for one in hashes} <= {HASH_BYTES}


def test_the_bytes_never_change() -> None:
    """Blocks outlive releases: what was stored under a name is found under it."""
    hashes = [one.hex() for one in block_hashes(range(8), 4, salt=b"model")]
    assert hashes == ["48f59cc0f2d832bd67cb28fb170a9c57", "cd0da20f88dff2f5372407705f3d66e4"]


@given(TOKENS, BLOCK, SALT, st.data())
def test_a_grown_sequence_needs_its_new_blocks_only(
    tokens: list[int], block_tokens: int, salt: bytes, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    ends = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5).map(sorted))
    for end in [*ends, len(tokens)]:
        grown = tokens[len(hashes) * block_tokens : end]
        parent = hashes[-1] if hashes else None
        hashes += block_hashes(grown, block_tokens, parent=parent, salt=salt)
    assert hashes == block_hashes(tokens, block_tokens, salt=salt)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=40), BLOCK, st.data())
def test_a_token_changes_its_block_and_all_after_it(tokens: list[int], block_tokens: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    pairs = zip(block_hashes(tokens, block_tokens), block_hashes(other, block_tokens), strict=True)
    assert [ours != theirs for ours, theirs in pairs] == [
        number >= at // block_tokens for number in range(len(tokens) // block_tokens)
    ]


def test_equal_blocks_in_other_places_are_other_blocks() -> None:
    hashes = block_hashes([7] * 12, 3)
    assert len(set(hashes)) == 4


@given(SALT, SALT)
def test_salts_part_the_chains(one: bytes, other: bytes) -> None:
    ours, theirs = (block_hashes(range(6), 3, salt=salt) for salt in (one, other))
    assert (ours == theirs) == (one == other)
    assert bool({*ours} & {*theirs}) == (one == other)


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(10, dtype=np.int32),
        np.arange(10, dtype=np.uint16),
        np.arange(10, dtype=">i8"),
        np.arange(20)[::2] // 2,
        tuple(range(10)),
        torch.arange(10, dtype=torch.int32),
    ],
    ids=["int32", "uint16", "big-endian", "strided", "tuple", "tensor"],
)
def test_how_the_tokens_are_held_makes_no_difference(tokens: npt.ArrayLike) -> None:
    assert block_hashes(tokens, 4) == block_hashes(list(range(10)), 4)


def test_no_whole_block_is_no_hash() -> None:
    assert block_hashes([], 4) == block_hashes(np.empty(0), 4) == block_hashes([1, 2, 3], 4) == []


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("block_tokens", {"tokens": [1], "block_tokens": 0}),
        ("parent", {"tokens": [1], "block_tokens": 1, "parent": b"short"}),
        ("parent", {"tokens": [1], "block_tokens": 1, "parent": b""}),
        ("tokens", {"tokens": [1.5], "block_tokens": 1}),
        ("tokens", {"tokens": [[1]], "block_tokens": 1}),
        ("tokens", {"tokens": [True], "block_tokens": 1}),
        ("tokens", {"tokens": [2**63], "block_tokens": 1}),
        ("tokens", {"tokens": [2**70], "block_tokens": 1}),
        ("tokens", {"tokens": "text", "block_tokens": 1}),
    ],
)
def test_nonsense_is_refused(field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        block_hashes(**arguments)  # type: ignore[arg-type]
    assert refused.value.field == field
