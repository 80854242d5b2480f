"""A dict in parts holds what a dict holds, before and after it is split."""

from __future__ import annotations

import random

import pytest

from kvferry.pools.tiers.split_dict import SPLIT_AT, SplitDict


@pytest.mark.parametrize("count", [100, SPLIT_AT + 1000])
def test_it_holds_what_a_dict_holds(count: int) -> None:
    drawn = random.Random(0)  # noqa: S311  no secret
    ours, model = SplitDict[bytes, int](), dict[bytes, int]()
    for number in range(count):
        key = number.to_bytes(16)
        ours[key] = model[key] = number
    for key in drawn.sample(sorted(model), count // 2):
        assert ours.pop(key) == model.pop(key)
        assert ours.get(key) is None
        assert key not in ours
    for key in drawn.sample(sorted(model), count // 4):
        ours[key] = model[key] = -1
    assert len(ours) == len(model)
    assert dict(ours.items()) == model
    assert sorted(ours.values()) == sorted(model.values())
    assert all(key in ours and ours[key] == ours.get(key) == value for key, value in model.items())


def test_what_is_not_there_is_refused() -> None:
    ours = SplitDict[str, int]()
    ours["a"] = 1
    with pytest.raises(KeyError):
        ours.pop("b")
    with pytest.raises(KeyError):
        ours["b"]
    assert len(ours) == 1


@pytest.mark.parametrize("more", [0, SPLIT_AT + 1])
def test_the_leading_ones_end_before_the_first_that_is_missing(more: int) -> None:
    ours = SplitDict[int, str]()
    for number in (0, 1, 2, 4, *range(10, 10 + more)):
        ours[number] = str(number)
    assert ours.leading(range(6)) == ["0", "1", "2"]
    assert ours.leading([3]) == []
