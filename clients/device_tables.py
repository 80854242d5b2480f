"""Tables on a device as their engine's process uses them: two words in their memory that streams write and wait for.

The daemon's stream writes ``shown`` behind an update's copies, for which replays wait. If its process ends before, they
would wait forever: a thread here waits for that end, and does in its place what it has left to do.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.attention.table_layout import WORD_BYTES, TableShape, table_layout
from kvferry.attention.table_mirror import TableMirror
from kvferry.clients.devices import TablesMemory
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import on_stream
from kvferry.protocol.errors import KvferryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class DeviceTables:
    """See above. Any thread may use it."""

    def __init__(self, memory: TablesMemory, host: HostRegion, shape: TableShape, process: int) -> None:
        """Use tables in this memory, and their mirror in the daemon's; take ``process``, the daemon's pidfd, over."""
        self._memory = memory
        self._words = table_layout(shape).words
        self._shown = int(memory.tensor.data_ptr()) + self._words
        self._replays = itertools.count(1)
        self._watch_process(host, shape, process)

    def __repr__(self) -> str:
        """Show what is shown."""
        return f"<DeviceTables {self._mirror!r}>"

    @property
    def sequence(self) -> int:
        """Return the number of the last update that the device shows, or is about to."""
        return self._mirror.mirrored

    def order(self, stream: torch.Stream | None) -> None:
        """Make a stream wait for the copies of the last update."""
        accelerator, sequence = self._memory.accelerator, self.sequence
        with accelerator.calling():
            accelerator.vendor.wait_value(self._shown, sequence, stream or accelerator.current_stream())

    def replayed(self, stream: torch.Stream | None) -> int:
        """Return the number that a stream writes now, behind all that it was given."""
        accelerator, number = self._memory.accelerator, next(self._replays)
        with accelerator.calling():
            on = stream or accelerator.current_stream()
            accelerator.vendor.write_value(self._shown + WORD_BYTES, number, on)
        return number

    def renew(self, host: HostRegion, shape: TableShape, process: int) -> None:
        """Go on with a daemon that has just mapped the tables, and has made this mirror.

        First waits until what is copied in the place of the one before is there: it would come over this one's updates.
        """
        self.close()
        if copied := self._watch.result():
            accelerator = self._memory.accelerator
            try:
                with accelerator.calling():
                    accelerator.wait(copied)
            except KvferryError as error:
                logger.warning("kvferry: tables: %s", error)
        self._watch_process(host, shape, process)

    def close(self) -> None:
        """Let the tables be; the memory goes with the last tensor."""
        self._close()

    def _watch_process(self, host: HostRegion, shape: TableShape, process: int) -> None:
        self._mirror = mirror = TableMirror(host.view(), shape)
        memory = self._memory
        self._watch = _Watch(process, lambda: _complete(memory, mirror))
        self._close = weakref.finalize(self, self._watch.close)


def _complete(memory: TablesMemory, mirror: TableMirror) -> torch.Event | None:
    """Show the last update that a daemon which has ended had whole in the mirror; return None if it is shown.

    Its own copies, if some come yet, write the same bytes. The event comes behind these; they may wait for a replay.
    """
    sequence, accelerator, tensor = mirror.mirrored, memory.accelerator, memory.tensor
    end = len(mirror.bytes)
    shown, word = int(tensor.data_ptr()) + end, slice(end, end + WORD_BYTES)
    with accelerator.calling():
        backend, vendor, stream = accelerator.torch, accelerator.vendor, accelerator.streams.host_to_device
        pinned = accelerator.pinned(word.stop, backend.uint8)
        with on_stream(backend, accelerator.streams.device_to_host) as reading:
            pinned[word].copy_(tensor[word], non_blocking=True)
            accelerator.wait(reading.record_event())
        if int(pinned[word].numpy().view("uint64")[0]) >= sequence:
            return None
        pinned.numpy()[:end] = mirror.bytes
        if mirror.after:
            vendor.wait_value(shown + WORD_BYTES, mirror.after, stream)
        with on_stream(backend, stream):
            tensor[:end].copy_(pinned[:end], non_blocking=True)  # torch keeps the pinned memory until it is copied
        vendor.write_value(shown, sequence, stream)
        event: torch.Event = stream.record_event()
        return event


class _Watch:
    """Calls ``ended`` on a thread of its own once a process has ended, unless it is closed before."""

    def __init__(self, process: int, ended: Callable[[], torch.Event | None]) -> None:
        """Take the pidfd over."""
        self._process = process
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = ended
        self._lock = threading.Lock()
        self._is_over = False
        self._result: torch.Event | None = None
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
        self._thread.start()

    def result(self) -> torch.Event | None:
        """Return what ``ended`` has returned, None if it was not called; after ``close``."""
        self._thread.join()
        return self._result

    def close(self) -> None:
        """Watch no longer; ``ended`` may be under way."""
        with self._lock:
            if not self._is_over:
                os.eventfd_write(self._stop, 1)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._process, self._stop):
            poll.register(fd, select.POLLIN)
        if self._stop not in dict(poll.poll()):
            try:
                self._result = self._ended()
            except KvferryError as error:
                logger.warning("kvferry: tables of a daemon that has ended may not show its last update: %s", error)
        with self._lock:
            self._is_over = True
            os.close(self._process)
            os.close(self._stop)
