"""Versions as they are written in the wild, and their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.doctor.host import at_least, parse_version, same_release

NUMBERS = st.integers(0, 99)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("24.1.rc3", "25.5.0"),
        ("8.5.0.alpha001", "8.5.0"),
        ("8.5.0.beta1", "8.5.0.rc1"),
        ("8.5.RC1", "8.5.0"),
        ("8.2.RC1", "8.2.RC2"),
        ("8.5.0", "8.5.1"),
        ("8.5.0", "8.10.0"),
        ("25.2.0", "25.5.0"),
        ("5.10.0-136.12.0.86.oe2203sp1.aarch64", "5.14.0"),
    ],
)
def test_order(older: str, newer: str) -> None:
    assert at_least(newer, older)
    assert at_least(older, newer) is False


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_releases_are_ordered_by_their_numbers(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert at_least("{}.{}.{}".format(*one), "{}.{}.{}".format(*other)) is (one >= other)


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS), st.sampled_from(["alpha", "beta", "rc", "RC"]), st.integers(1, 99))
def test_what_comes_before_a_release(release: tuple[int, int, int], stage: str, number: int) -> None:
    final = "{}.{}.{}".format(*release)
    assert at_least(f"{final}.{stage}{number}", final) is False


@pytest.mark.parametrize("text", ["", "unknown", "rc1", "N/A", "7"])
def test_no_version(text: str) -> None:
    assert parse_version(text) is None
    assert at_least(text, "1.0.0") is None


@pytest.mark.parametrize(
    ("torch", "torch_npu", "fits"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("2.7.1", "2.7.1.post2", True),
        ("2.13.0", "2.13.1", False),
        ("2.13.0", "2.7.1", False),
        ("", "2.13.0", False),
    ],
)
def test_torch_and_torch_npu(torch: str, torch_npu: str, *, fits: bool) -> None:
    assert same_release(torch, torch_npu) is fits
