"""Collections look at what is new alone, and what is new is still collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvferry.daemon.process.garbage import collect_new_only


class Knot:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def new_only() -> Iterator[None]:
    """Collect what is new alone, until the test is over."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    collect_new_only()
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("new_only")
def test_what_outlived_a_full_collection_is_not_looked_at_again() -> None:
    kept = [Knot() for _ in range(1000)]
    before = gc.get_freeze_count()
    gc.collect()
    assert gc.get_freeze_count() >= before + len(kept)
    assert not any(one is kept[0] for one in gc.get_objects())


@pytest.mark.usefixtures("new_only")
def test_new_garbage_is_collected() -> None:
    knot = weakref.ref(Knot())
    gc.collect()
    assert knot() is None


@pytest.mark.usefixtures("new_only")
def test_asking_twice_changes_nothing() -> None:
    callbacks = list(gc.callbacks)
    collect_new_only()
    assert gc.callbacks == callbacks
