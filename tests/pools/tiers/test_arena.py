"""The arena against a map of its allocation units, one number each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.pools.tiers import arena as arena_module
from kvferry.pools.tiers.arena import ALLOCATION_UNIT_BYTES as UNIT
from kvferry.pools.tiers.arena import Arena, NotEnoughError
from tests.kit.devices import DEVICE

UNITS = 40
SIZES = st.sampled_from([1, UNIT, UNIT + 64, 3 * UNIT, 7 * UNIT - 1])


class _ArenaAgainstMap(RuleBasedStateMachine):
    """Does the same to an arena and to a list that says of each allocation unit which block has it, 0 for none."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(UNITS * UNIT + 100)
        self.owners = [0] * UNITS
        self.blocks: dict[int, tuple[int, int]] = {}  # number: offset, size
        self.last_block = 0

    def holes(self) -> list[int]:
        """Return the allocation units of each hole of the map."""
        text = "".join("x" if owner else "." for owner in self.owners)
        return [len(hole) for hole in text.split("x") if hole]

    @rule(count=st.integers(0, 9), size=SIZES)
    def allocate(self, count: int, size: int) -> None:
        units = -(-size // UNIT)
        transfer = sum(hole // units for hole in self.holes())
        assert self.arena.fitting(size) == transfer
        if transfer < count:
            with pytest.raises(NotEnoughError, match=f"{count * units * UNIT} bytes requested"):
                self.arena.allocate(count, size)
            return
        in_one_piece = any(hole // units >= count for hole in self.holes())
        offsets = self.arena.allocate(count, size)
        assert offsets.dtype == np.int64
        assert offsets.tolist() == sorted(offsets.tolist())
        assert len(offsets) == count
        if in_one_piece:
            assert set(np.diff(offsets).tolist()) <= {units * UNIT}
        for offset in offsets.tolist():
            self.take(offset, size)

    @rule(size=SIZES)
    def allocate_run(self, size: int) -> None:
        """Take one piece, from the smallest hole that has it."""
        units = -(-size // UNIT)
        fitting = [hole for hole in self.holes() if hole >= units]
        if not fitting:
            with pytest.raises(NotEnoughError):
                self.arena.allocate(1, size)
            return
        before = sorted(self.holes())
        self.take(int(self.arena.allocate(1, size)[0]), size)
        before.remove(min(fitting))
        assert sorted(self.holes()) == sorted([*before, *([min(fitting) - units] if min(fitting) > units else [])])

    def take(self, offset: int, size: int) -> None:
        """Note a block in the map: its allocation units must be free."""
        first, units = divmod(offset, UNIT)[0], -(-size // UNIT)
        assert offset % UNIT == 0
        assert self.owners[first : first + units] == [0] * units
        self.last_block += 1
        self.owners[first : first + units] = [self.last_block] * units
        self.blocks[self.last_block] = (offset, size)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        size = data.draw(st.sampled_from(sorted({size for _, size in self.blocks.values()})))
        same = [number for number, block in self.blocks.items() if block[1] == size]
        numbers = data.draw(st.lists(st.sampled_from(same), unique=True))
        self.arena.free(np.array([self.blocks[number][0] for number in numbers], np.int64), size)
        for number in numbers:
            del self.blocks[number]
        self.owners = [0 if owner in numbers else owner for owner in self.owners]

    @invariant()
    def agrees_with_the_map(self) -> None:
        self.arena.check_integrity()
        free = self.owners.count(0)
        assert self.arena.free_bytes == free * UNIT
        assert self.arena.used_bytes == (UNITS - free) * UNIT
        for units in range(1, UNITS + 1):
            assert self.arena.fitting(units * UNIT) == sum(hole // units for hole in self.holes())


TestArena = _ArenaAgainstMap.TestCase
TestArena.settings = DEVICE.examples(60, stateful_step_count=25)


class _ManyHoles(_ArenaAgainstMap):
    """The same by the way of an arena with many holes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(arena_module, "FEW", 0)

    def teardown(self) -> None:
        self.patch.undo()


TestManyHoles = _ManyHoles.TestCase
TestManyHoles.settings = DEVICE.examples(60, stateful_step_count=25)


@pytest.mark.parametrize(
    "units",
    [[1, 1], [9, 10], [-1], [3], [(1 << 63) // UNIT - 1]],
    ids=["twice", "past the end", "before", "not taken", "past all"],
)
def test_a_wrong_free_is_refused_and_changes_nothing(units: list[int]) -> None:
    arena = Arena(10 * UNIT)
    arena.allocate(10, 1)
    arena.free(np.array([3]) * UNIT, 1)
    with pytest.raises(AssertionError, match="a block"):
        arena.free(np.array(units) * UNIT, 1)
    assert arena.free_bytes == UNIT
    arena.check_integrity()


@pytest.mark.parametrize("freed", [[], [1]])
def test_an_arena_that_grows_has_more_free_bytes_at_its_end(freed: list[int]) -> None:
    arena = Arena(2 * UNIT, 5 * UNIT + 1)
    offsets = arena.allocate(2, UNIT)
    arena.free(offsets[freed], UNIT)
    arena.grow(4 * UNIT)
    arena.check_integrity()
    assert (arena.size_bytes, arena.max_bytes, arena.free_bytes) == (4 * UNIT, 5 * UNIT, (2 + len(freed)) * UNIT)
    assert len(arena.allocate(2 + len(freed), UNIT)) == 2 + len(freed)
    with pytest.raises(AssertionError, match="within its bound"):
        arena.grow(6 * UNIT)
    assert arena.allocate(0, 1).tolist() == []
    with pytest.raises(NotEnoughError):
        arena.allocate(1, 1)
    arena.check_integrity()
