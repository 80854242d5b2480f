"""A short run of each fuzz target without a fuzzer, and the inputs that once broke something."""

from __future__ import annotations

import pytest

from tests.fuzz.inputs import CRASHES, TARGETS, mutations, target

OF_CODEC = [b"", b"\xc1", b"\x91" * 50_000, b"[" * 50_000, b'{"pool": "a", "pages": 3}']


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks(name: str) -> None:
    one = target(name)
    seeds = one.seeds()
    for data in [*seeds, *mutations(seeds, one.ROUNDS, seed=1)]:
        try:
            one.take_one_input(data)
        except Exception as bug:
            bug.add_note(f"the input: bytes.fromhex({data.hex()!r})")
            raise


@pytest.mark.parametrize("data", OF_CODEC)
def test_what_once_broke_or_might(data: bytes) -> None:
    target("codec").take_one_input(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_fuzzer_has_found(name: str) -> None:
    for path in sorted((CRASHES / name).glob("*")):
        target(name).take_one_input(path.read_bytes())
