"""The page allocator against a plain model: dictionaries and nothing clever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.pools import allocator as allocator_module
from kvferry.pools.allocator import OwnedPages, PageAllocator, PageCounts
from kvferry.pools.planning import page_ids
from kvferry.protocol import errors
from tests.kit.devices import DEVICE

PAGES = 9
OWNERS = st.integers(1, 3)
LISTS = st.lists(st.integers(-1, PAGES) | st.sampled_from([-(1 << 63), (1 << 63) - 1]), max_size=5)


def ids_of(pages: list[int]) -> np.typing.NDArray[np.int64]:
    return np.array(pages, np.int64)


class AllocatorAgainstModel(RuleBasedStateMachine):
    """Does the same to an allocator and to a model of it; refusals must be the model's, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.owner: dict[int, int] = {}
        self.readers: Counter[int] = Counter()
        self.writing: set[int] = set()
        self.doomed: set[int] = set()
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []

    def free_pages(self) -> set[int]:
        return set(range(1, PAGES)) - set(self.owner) - self.doomed

    def refusal(self, owner: int, pages: list[int]) -> type[errors.KvferryError] | None:
        """Return what must be raised for pages that should be the owner's."""
        if not pages:
            return errors.EmptyPagesError
        if any(not 1 <= page < PAGES for page in pages):
            return errors.PageOutOfRangeError
        return errors.NotOwnerError if any(self.owner.get(page) != owner for page in pages) else None

    def give_back(self, pages: set[int]) -> tuple[int, int]:
        """Take pages from their owner; return how many are free at once, and how many later."""
        busy = {page for page in pages if self.readers[page] or page in self.writing}
        for page in pages:
            del self.owner[page]
        self.doomed |= busy
        return len(pages - busy), len(busy)

    def reclaim(self) -> None:
        self.doomed = {page for page in self.doomed if self.readers[page] or page in self.writing}

    @rule(owner=OWNERS, count=st.integers(1, PAGES))
    def allocate(self, owner: int, count: int) -> None:
        free = sorted(self.free_pages())
        if count > len(free):
            with pytest.raises(errors.PoolFullError, match=f"{count} pages asked for, {len(free)} of 8 free"):
                self.allocator.allocate(owner, count)
            return
        assert self.allocator.allocate(owner, count).tolist() == free[:count]
        self.owner.update(dict.fromkeys(free[:count], owner))

    @rule(owner=OWNERS, pages=LISTS)
    def free_any(self, owner: int, pages: list[int]) -> None:
        error = self.refusal(owner, pages)
        if error is None and len(set(pages)) < len(pages):
            error = errors.DuplicatePageError
        if error is not None:
            with pytest.raises(error):
                self.allocator.free(owner, ids_of(pages))
            return
        assert self.allocator.free(owner, ids_of(pages)) == self.give_back(set(pages))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def free_owned(self, data: st.DataObject) -> None:
        owner = self.owner[data.draw(st.sampled_from(sorted(self.owner)))]
        mine = sorted(page for page, one in self.owner.items() if one == owner)
        pages = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        assert self.allocator.free(owner, ids_of(pages)) == self.give_back(set(pages))

    @rule(owner=OWNERS)
    def release_owner(self, owner: int) -> None:
        mine = {page for page, one in self.owner.items() if one == owner}
        assert self.allocator.release_owner(owner) == self.give_back(mine)

    @rule(owner=OWNERS, data=st.data())
    def begin_read(self, owner: int, data: st.DataObject) -> None:
        pages = data.draw(self.lists_near(owner))
        error = self.refusal(owner, pages)
        if error is None and set(pages) & self.writing:
            error = errors.PageBusyError
        if error is not None:
            with pytest.raises(error):
                self.allocator.begin_read(owner, ids_of(pages), "pages")
            return
        self.allocator.begin_read(owner, ids_of(pages), "pages")
        self.readers.update(pages)
        self.reads.append(pages)

    @rule(owner=OWNERS, data=st.data())
    def begin_write(self, owner: int, data: st.DataObject) -> None:
        pages = data.draw(self.lists_near(owner))
        error = self.refusal(owner, pages)
        if error is None and len(set(pages)) < len(pages):
            error = errors.DuplicatePageError
        if error is None and any(page in self.writing or self.readers[page] for page in pages):
            error = errors.PageBusyError
        if error is not None:
            with pytest.raises(error):
                self.allocator.begin_write(owner, ids_of(pages), "pages")
            return
        self.allocator.begin_write(owner, ids_of(pages), "pages")
        self.writing |= set(pages)
        self.writes.append(pages)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        pages = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        self.allocator.end_read(ids_of(pages))
        self.readers.subtract(pages)
        self.reclaim()

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        pages = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        self.allocator.end_write(ids_of(pages))
        self.writing -= set(pages)
        self.reclaim()

    @rule(owner=OWNERS, pages=st.lists(st.integers(1, PAGES - 1), max_size=5, unique=True))
    def free_what_is_still_owned(self, owner: int, pages: list[int]) -> None:
        """Take pages back that others may have by now: those stay."""
        mine = {page for page in pages if self.owner.get(page) == owner}
        assert self.allocator.free_owned(owner, ids_of(pages)) == self.give_back(mine)

    def lists_near(self, owner: int) -> st.SearchStrategy[list[int]]:
        """Return page lists that are mostly the owner's, so that not everything is refused."""
        mine = sorted(page for page, one in self.owner.items() if one == owner)
        return st.lists(st.sampled_from(mine), min_size=1, max_size=4) | LISTS if mine else LISTS

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Check every count that can be asked for, and the allocator's own integrity."""
        self.allocator.check_integrity()
        assert self.allocator.free_count == len(self.free_pages())
        busy = self.writing | {page for page, count in self.readers.items() if count}
        assert self.allocator.busy_count == len(busy)
        assert self.allocator.pages_by_owner() == dict(Counter(self.owner.values()))
        assert self.allocator.idle == (not self.owner and not self.doomed)
        assert self.allocator.counts() == self.counts()

    def counts(self) -> PageCounts:
        """Return how many pages are in which state."""
        read = {page for page, count in self.readers.items() if count}
        owned, free = self.owner.keys(), self.free_pages()
        idle, read, written = owned - read - self.writing, owned & read, owned & self.writing
        runs = "".join("x" if page in free else " " for page in range(PAGES)).split()
        largest = max(map(len, runs), default=0)
        return PageCounts(len(free), len(idle), len(read), len(written), len(self.doomed), largest)


TestAllocator = AllocatorAgainstModel.TestCase
TestAllocator.settings = DEVICE.examples(80, stateful_step_count=40)


class AllocatorOfLongLists(AllocatorAgainstModel):
    """The same by the way of long lists."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(allocator_module, "FEW", 0)
        self.patch.setattr(page_ids, "FEW", 0)

    def teardown(self) -> None:
        self.patch.undo()


TestLongLists = AllocatorOfLongLists.TestCase
TestLongLists.settings = DEVICE.examples(80, stateful_step_count=40)


def test_the_lowest_free_pages_are_found_wherever_they_are() -> None:
    """In a pool of many stretches, which fill up and get holes again, against a list of what is taken."""
    drawn, pages = np.random.default_rng(5), 9000
    allocator = PageAllocator(pages)
    taken = np.zeros(pages, np.bool_)
    taken[0] = True
    for _ in range(100):
        free = np.flatnonzero(~taken)
        count = min(int(drawn.choice([1, 2, 50, 3000])), len(free))
        if count:
            assert allocator.allocate(1, count).tolist() == free[:count].tolist()
            taken[free[:count]] = True
        owned = np.flatnonzero(taken)[1:]
        back = drawn.permutation(owned)[: int(drawn.choice([1, 3, 40, 1000]))]
        allocator.free(1, back)
        taken[back] = False
        allocator.check_integrity()


def test_owned_pages_are_as_old_as_the_oldest_of_them() -> None:
    now_s = 1000.0
    allocator = PageAllocator(9, clock=lambda: now_s)
    assert allocator.owned() == []
    first = allocator.allocate(1, 2)
    now_s += 10
    allocator.allocate(1, 1)
    second = allocator.allocate(2, 3)
    allocator.begin_read(2, second[:2], "pages")
    now_s += 5
    assert allocator.owned() == [OwnedPages(1, 3, 0, 15), OwnedPages(2, 3, 2, 5)]
    allocator.free(1, first)
    allocator.allocate(3, 2)
    assert allocator.owned() == [OwnedPages(1, 1, 0, 5), OwnedPages(2, 3, 2, 5), OwnedPages(3, 2, 0, 0)]
