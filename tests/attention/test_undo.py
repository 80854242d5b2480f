"""What a block did is taken back if it fails, the last step first, and only then."""

from __future__ import annotations

import pytest

from kvferry.attention.visible_table import Undo


def test_a_block_that_ends_well() -> None:
    taken_back: list[int] = []
    with Undo() as undo:
        undo.by(taken_back.append, 1)
    assert taken_back == []


def test_a_block_that_fails() -> None:
    taken_back: list[int] = []

    def fail() -> None:
        with Undo() as undo:
            undo.by(taken_back.append, 1)
            undo.by(taken_back.append, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert taken_back == [2, 1]
