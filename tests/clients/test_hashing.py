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
