"""A copier between tiers that does nothing by itself: a test decides when and how each job ends."""

from __future__ import annotations

import numpy as np
import xxhash

from kvferry.daemon.tiers.copier import BlockJob, OnJobDone
from kvferry.pools.tiers.blocks import BlockStep
from kvferry.protocol.errors import CancelledError, KvferryError, SnapshotDamagedError


class ScriptedCopier:
    """See ``TierCopier``. Between ``start`` and ``end`` a job is under way: its bytes move when ``copy`` is called.

    Attributes:
        under_way: the jobs started and not ended, oldest first.
        stopped: those that are to stop.
    """

    def __init__(self) -> None:
        self.under_way: list[BlockJob] = []
        self.stopped: set[BlockJob] = set()
        self._on_done: dict[BlockJob, OnJobDone] = {}

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<ScriptedCopier under_way={self.under_way} stopped={len(self.stopped)}>"

    def start(self, job: BlockJob, on_done: OnJobDone) -> None:
        """See ``TierCopier.start``."""
        assert job not in self.under_way, "a job that is under way"
        self.under_way.append(job)
        self._on_done[job] = on_done

    def stop(self, job: BlockJob) -> None:
        """See ``TierCopier.stop``."""
        if job in self.under_way:
            self.stopped.add(job)

    def close(self) -> None:
        """See ``TierCopier.close``."""
        self.under_way.clear()

    def copy(self, job: BlockJob) -> KvferryError | None:
        """Move a job's bytes, without a word: it stays under way. Return what is wrong with them; then none moved."""
        arena = job.arena.view()
        damaged = self._verify(job)
        if damaged is not None:
            return damaged
        for segment in job.segments:
            step = BlockStep(0, len(segment.pages.ids), 0, segment.pages.layout.content_bytes)
            move = segment.region.begin_offload if job.kind == "offload" else segment.region.begin_restore
            move(segment.pages, step, arena).wait()
        if job.kind == "offload" and job.checksums:
            job.digests = tuple(self._digests(job, number) for number in range(len(job.segments)))
        return None

    def end(self, job: BlockJob, error: KvferryError | None = None) -> None:
        """Report a job's end: no byte of it moves any more. One that was stopped ends with its error."""
        self.under_way.remove(job)
        if job in self.stopped:
            self.stopped.remove(job)
            error = error or CancelledError("stopped before all bytes were copied")
        self._on_done.pop(job)(job, error)

    def finish(self, job: BlockJob) -> None:
        """Move a job's bytes and report how that went; one that was stopped was done before."""
        self.stopped.discard(job)
        self.end(job, self.copy(job))

    def finish_all(self) -> None:
        """Finish every job, also those that start meanwhile; those that were stopped move nothing."""
        while self.under_way:
            job = self.under_way[0]
            if job in self.stopped:
                self.end(job)
            else:
                self.finish(job)

    def _verify(self, job: BlockJob) -> KvferryError | None:
        if job.kind == "offload" or job.digests is None:
            return None
        for number, segment in enumerate(job.segments):
            wrong = np.flatnonzero(self._digests(job, number) != job.digests[number])
            if len(wrong):
                space = segment.pages.layout.space
                return SnapshotDamagedError(f"block {wrong[0]} of space {space!r}", field=f"{space}[{wrong[0]}]")
        return None

    def _digests(self, job: BlockJob, number: int) -> np.typing.NDArray[np.uint64]:
        pages, arena = job.segments[number].pages, job.arena.view()
        size_bytes = pages.layout.block_bytes
        found = [xxhash.xxh3_64_intdigest(arena[at : at + size_bytes].data) for at in pages.offsets.tolist()]
        return np.array(found, np.uint64)
