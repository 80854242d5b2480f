"""A short run of the fuzz target, and the inputs that once broke something."""

from __future__ import annotations

import pytest

from tests.fuzz.codec_target import main, take_one_input


def test_nothing_breaks() -> None:
    assert main(["10000", "1"]) == 0


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 50_000, b"[" * 50_000, b'{"pool": "a", "pages": 3}'])
def test_what_once_broke_or_might(data: bytes) -> None:
    take_one_input(data)
