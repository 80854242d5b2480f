"""Collections look at what is new alone, and what is new is still collected."""

from __future__ import annotations

import gc
import weakref

from kvferry.daemon.process.garbage import collect_new_only


class Knot:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_outlived_a_full_collection_is_not_looked_at_again() -> None:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    try:
        collect_new_only()
        collect_new_only()
        assert len(gc.callbacks) <= len(callbacks) + 1, "asking twice changes nothing"
        kept, before, knot = [Knot() for _ in range(1000)], gc.get_freeze_count(), weakref.ref(Knot())
        gc.collect()
        assert gc.get_freeze_count() >= before + len(kept)
        assert knot() is None
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        gc.unfreeze()
