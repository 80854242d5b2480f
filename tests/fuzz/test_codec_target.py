"""A short run of the fuzz target, and the inputs that once broke something."""

from __future__ import annotations

import pytest

from tests.fuzz.codec_target import inputs, main, take_one_input

ROUNDS = 10_000


def test_nothing_breaks() -> None:
    assert main([str(ROUNDS), "1"]) == 0


def test_inputs_are_reproducible_and_varied() -> None:
    assert list(inputs(50, 3)) == list(inputs(50, 3))
    assert len(set(inputs(50, 3)) | set(inputs(50, 4))) > 90


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 50_000, b"[" * 50_000, b'{"pool": "a", "pages": 3}'])
def test_what_once_broke_or_might(data: bytes) -> None:
    take_one_input(data)
