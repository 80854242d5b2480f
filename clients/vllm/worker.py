"""A worker's side of the connector: it moves the bytes of its rank's blocks as the scheduler's side says.

The thread that computes never waits for the daemon, but where blocks are about to be written that are still being read.
What cannot be loaded is told to vLLM as invalid blocks, which it computes again or fails, as ``kv_load_failure_policy``
says; what cannot be stored is dropped.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvferry.clients import KvferryError, Pages, TierOperation, Transfer, pages
from kvferry.clients.batch import Batch
from kvferry.clients.calls import asked
from kvferry.clients.layers import LAYERED_BYTES
from kvferry.clients.vllm.layers import NamedLayers
from kvferry.clients.vllm.metadata import (
    Blocks,
    Load,
    Receive,
    Send,
    StepWork,
    Store,
    Stores,
    joined_chunks,
    joined_stores,
)
from kvferry.clients.vllm.metrics import Kind, Moved
from kvferry.protocol.errors import (
    CancelledError,
    DaemonLostError,
    GeometryMismatchError,
    InvalidFieldError,
    LengthMismatchError,
    OverloadedError,
    StaleBootError,
    TransferExistsError,
)
from kvferry.protocol.tier_messages import CancelOperation, Unpin
from kvferry.protocol.transfer_messages import Abandon, Cancel, Direction, LayerStep

if TYPE_CHECKING:
    from kvferry.clients.engine import Engine
    from kvferry.clients.vllm.configuration import Settings
    from kvferry.clients.vllm.memory import RankMemory
    from kvferry.clients.vllm.weights import Weights
    from kvferry.protocol.base import DeviceEvent

logger = logging.getLogger(__name__)

WAIT_S: Final = 0.1
"""Between two looks of a thread that has to wait."""

SAY_AFTER_S: Final = 5.0
"""How long it may have to wait before the log says so."""

CANCEL_AGAIN_S: Final = 5.0
"""How long the daemon may take to end what it was told to, before it is told again."""

SAME_LAYOUT: Final = (
    "; prefill and decode need the same layout: vllm-ascend at both or at neither, equal --kv-cache-dtype, and on CPUs "
    "the same instructions"
)
"""What to configure where a block has other bytes at the other side."""

ASK_AGAIN_S: Final = 0.05
ASK_AT_ONCE: Final = 64
"""How often, and for how many at once, a daemon is asked again that had no room for their transfers."""


class Reading:
    """A store of several requests' blocks, which may not be written until it is over.

    Attributes:
        work: the daemon's operation.
        generation: of the engine's client.
        began_s: when it was begun.
        stores: of each request, as one.
        is_over: whether it has been seen to be over.
    """

    def __init__(self, work: Transfer | TierOperation, generation: int, began_s: float) -> None:
        self.work = work
        self.generation = generation
        self.began_s = began_s
        self.stores: list[Store] = []
        self.is_over = False


class Sending:
    """A prompt's blocks that are sent, chunk by chunk, as one transfer: until it is over they may not be written.

    Attributes:
        request_id: the daemon's.
        began_s: when the first chunk was filled.
        work: the latest chunk's, which tells of the transfer; None: the daemon was not asked yet, or had no room.
        earlier: those of the chunks before, each of which may be refused.
        generation: of the engine's client then.
        sent: the blocks of all chunks.
        asked: the first chunk, which the daemon may have no room for.
        unsent: chunks that wait, as one.
        has_last: whether the prompt's last chunk has come.
        error: why it goes no further.
    """

    def __init__(self, request_id: str, error: KvferryError | None = None) -> None:
        self.request_id = request_id
        self.began_s = time.monotonic()
        self.work: Transfer | None = None
        self.earlier: list[Transfer] = []
        self.generation = 0
        self.sent: list[Blocks] = []
        self.asked: Send | None = None
        self.unsent: Send | None = None
        self.has_last = False
        self.error = error

    def may_go(self, generation: int) -> bool:
        """Return whether the next chunk may be sent: the second one once the daemon has taken the first."""
        work = self.work
        if work is None:
            return self.error is None
        is_open = work.accepted is not None and work.finished is None and self.generation == generation
        return self.error is None and is_open

    def add(self, one: Send) -> None:
        """Take note of a chunk that is to be sent."""
        self.has_last |= one.is_last
        if self.error is None:
            self.unsent = one if self.unsent is None else joined_chunks(self.unsent, one)

    def begun(self, one: Send, work: Transfer, generation: int) -> None:
        """Take note of a chunk that the daemon was asked for."""
        if self.work is None:
            self.asked = one
        else:
            self.earlier.append(self.work)
        self.work, self.generation, self.unsent = work, generation, None
        self.sent += one.blocks

    def refused(self) -> None:
        """Take note that the daemon has no room for it: the same is asked for again."""
        assert self.asked is not None
        self.unsent = self.asked if self.unsent is None else joined_chunks(self.asked, self.unsent)
        self.asked, self.work, self.sent = None, None, []

    def fail(self, error: KvferryError) -> None:
        """Take note that nothing more of it is sent."""
        self.error, self.unsent = error, None


class Write(NamedTuple):
    """Blocks that a load or a receive writes."""

    work: Transfer | TierOperation | None
    generation: int
    began_s: float
    asked: Load | Receive
    refused: KvferryError | None = None


class Worker:
    """A rank's part: one thread's, that of vLLM's worker."""

    def __init__(self, engine: Engine, memory: RankMemory, weights: Weights, settings: Settings, rank: int) -> None:
        """Take a rank's session, memory and weights."""
        self._engine = engine
        self._memory = memory
        self._groups = memory.groups
        self._weights = weights
        self._look = 0
        """The number of the look that was taken at them, and is not reported."""
        self._pool = memory.pool.name
        self._settings = settings
        self._rank = rank
        self._readings: list[Reading] = []
        """Those that are not over."""
        self._reads: dict[str, list[tuple[Reading, int]]] = defaultdict(list)
        """By request, with the number of each store."""
        self._sends: dict[str, Sending] = {}
        """By request, until its last chunk has come or it has ended."""
        self._writes: dict[str, list[Write]] = defaultdict(list)
        """By request: of a load one for each group."""
        self._cancelled: dict[str, float] = {}
        """By request whose transfers or loads the daemon was told to end: when it is told again."""
        self._asks_at_s = 0.0
        self._ended: set[str] = set()
        """Requests whose blocks vLLM keeps until they are reported."""
        self._invalid: set[int] = set()
        self._lost: set[str] = set()
        """Requests of several groups of which something has not come, until they are reported."""
        self._stored: list[int] = []
        self._read: list[int] = []
        """Numbers of stores that read no block any more, whether they have worked or not."""
        self._failures: set[tuple[str, str]] = set()
        self._steps: tuple[LayerStep, ...] = ()
        """Of the chunks that go layer by layer in the step that is being computed."""
        self.signals = NamedLayers(memory.pool.layers)
        self.moved = Moved()

    def __repr__(self) -> str:
        """Show what is under way."""
        reads = len(self._reads) + len(self._sends)
        return f"<Worker {self._pool}: reads for {reads}, writes for {len(self._writes)}>"

    # -- what the scheduler's side says

    def give_up(self, requests: Sequence[str]) -> None:
        """Return once nothing reads the blocks of these requests: others are about to write them."""
        waits = [one for one in requests if one in self._reads or one in self._sends]
        if not waits:
            return
        for request in waits:
            self._cancel(request)
        says_at_s = time.monotonic() + SAY_AFTER_S
        self._poll()
        while waits := [one for one in waits if not self._is_read_out(one)]:
            self._engine.wait_for_news(WAIT_S)
            self._cancel_again()
            self._poll()
            if time.monotonic() > says_at_s:
                says_at_s = time.monotonic() + SAY_AFTER_S
                logger.error("kvferry: this worker waits until the daemon no longer reads blocks of %s", waits)
        for request in requests:
            self._forget(request)

    def begin_step(self, work: StepWork) -> None:
        """Begin what can be begun before a step is computed: its loads, and sends that go layer by layer."""
        if work.look:
            self._look = work.look
            self._weights.look()
        self.give_up(work.preempted)
        for request in work.aborted:
            self._cancel(request)
        self._ended.update(work.ended)
        layered = self._layered(work.sends)
        if not (work.loads or work.receives or layered):
            return
        writes: list[Load | Receive] = [*work.loads, *work.receives]
        refused = self._refused(work)
        begun, generation = self._begin([*(one for one in writes if one.request not in refused), *layered])
        now_s = time.monotonic()
        for one in writes:
            work_of = begun.get(id(one))
            self._writes[one.request].append(Write(work_of, generation, now_s, one, refused.get(one.request)))
        self._note_reads(layered, begun, generation)

    def filled(self, layer: str) -> None:
        """Take note of a layer that the step has computed."""
        self.signals.computed(layer)

    def end_step(self, work: StepWork) -> None:
        """Begin the stores and sends of a step that was computed."""
        self.signals.end()
        sends = [one for one in work.sends if not (self._steps and self._is_layered(one))]
        self._steps = ()
        if not (sends or work.stores):
            return
        told: list[Store | Send] = [*sends, *work.stores]
        self._memory.copy_out(blocks for one in told for blocks in _blocks_of(one))
        for one in sends:
            self._sending(one).add(one._replace(prompt=self._weights.told(one.prompt)))
        if sends:
            self._poll()
        reads: list[Store | Send] = [*self._due(), *work.stores]
        self._note_reads(reads, *self._begin(reads))

    # -- what vLLM hears

    def finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that have ended and whose blocks nobody reads any more, and those that are loaded."""
        if not (self._reads or self._sends or self._writes or self._ended):
            return None, None
        self._poll()
        self._cancel_again()
        self._go_on()
        loaded = {request for request, writes in tuple(self._writes.items()) if self._are_written(writes)}
        for request in loaded:
            self._end_writes(self._writes.pop(request))
        for request in {*self._look_at_stores(), *self._sends}:
            if self._is_read_out(request) and not self._has_more(request):
                self._forget(request)
        over = {request for request in self._ended if request not in self._reads and request not in self._sends}
        self._ended -= over
        return over or None, loaded or None

    def invalid_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded, once."""
        taken, self._invalid = self._invalid, set()
        return taken

    def lost(self) -> set[str]:
        """Return the requests of several groups of which something could not be loaded, once."""
        taken, self._lost = self._lost, set()
        return taken

    def stored(self) -> list[int]:
        """Return the numbers of the stores that are done, once."""
        taken, self._stored = self._stored, []
        return taken

    def read(self) -> list[int]:
        """Return the numbers of the stores that read no block any more, once."""
        taken, self._read = self._read, []
        return taken

    def looked(self) -> dict[int, tuple[int, bytes]]:
        """Return by this rank which look it has taken at its weights, and what stands for them, once."""
        look, self._look = self._look, 0
        return {self._rank: (look, self._weights.now)} if look else {}

    def close(self) -> None:
        """End the session; what it had under way ends with it."""
        self.signals.close()
        self._engine.close()

    # -- within

    def _is_layered(self, one: Send) -> bool:
        """Return whether a chunk goes layer by layer: the daemon moves smaller ones as a whole all the same."""
        return self._memory.size_of(one.blocks) >= LAYERED_BYTES

    def _layered(self, sends: Sequence[Send]) -> list[Send]:
        """Return the chunks that go layer by layer, having made their steps."""
        self._steps = ()
        if not self._settings.layer_by_layer or self._memory.kind == "staged":
            return []
        layered = [one._replace(prompt=self._weights.told(one.prompt)) for one in sends if self._is_layered(one)]
        if layered and not self._engine.is_away:
            try:
                self._steps = tuple(self._memory.pool.layer_steps(self.signals))  # of a device
                if not self._steps:
                    with self._engine.client() as client:
                        self._steps = tuple(self.signals.begin_step(client))
            except KvferryError as error:
                self._log("open_events", error)
        if not self._steps:
            return []
        for one in layered:
            self._sending(one).add(one)
        return [one for one in self._due() if one in layered]

    def _sending(self, one: Send) -> Sending:
        """Return the transfer that a chunk belongs to; one that another request has does not take it."""
        if one.request not in self._sends:
            error = None
            sent_as = one.ids[self._rank]
            if any(other.request_id == sent_as for other in self._sends.values()):
                error = TransferExistsError("another request is sent under this id", field="transfer_id")
                self._failed("send", error, one.request)
            self._sends[one.request] = Sending(sent_as, error)
        return self._sends[one.request]

    def _due(self) -> list[Send]:
        """Return the chunks that may be sent now: a prompt's second one once the daemon has taken the first."""
        generation = self._engine.generation
        return [one.unsent for one in self._sends.values() if one.unsent and one.may_go(generation)]

    def _refused(self, work: StepWork) -> dict[str, KvferryError]:
        """Return the loads and receives of a step that are not begun, and why."""
        live = {one.asked.parts for one in self._all_writes() if isinstance(one.asked, Receive)}
        refused: dict[str, KvferryError] = {}
        for one in work.receives:
            if one.refused:
                refused[one.request] = InvalidFieldError(one.refused, field="kv_transfer_params")
            elif one.parts in live:
                refused[one.request] = TransferExistsError("another request takes this one", field="transfer_id")
            live.add(one.parts)
        return refused | {request: CancelledError("the request was aborted") for request in work.aborted}

    def _go_on(self) -> None:
        """Send the chunks that may go now; ask again, now and then, for what the daemon had no room for, in turn."""
        again: list[Load | Receive] = []
        now_s = time.monotonic()
        if now_s >= self._asks_at_s:
            sends = [one for one in self._sends.values() if one.error is None and _has_no_room(one.work)]
            again = [one.asked for one in self._all_writes() if self._waits_for_room(one, now_s)]
            if sends or again:
                self._asks_at_s = now_s + ASK_AGAIN_S
                if ("room", "") not in self._failures:
                    self._failures.add(("room", ""))
                    logger.warning(
                        "kvferry: prompts wait: limits.max_transfers_per_session of the daemon allows no more"
                    )
            for sending in sends[:ASK_AT_ONCE]:
                sending.refused()
        due, again = self._due(), again[:ASK_AT_ONCE]
        begun, generation = self._begin([*due, *again])
        for one in again:
            (before,) = self._writes[one.request]
            self._writes[one.request] = [before._replace(work=begun.get(id(one)), generation=generation)]
        self._note_reads(due, begun, generation)

    def _waits_for_room(self, one: Write, now_s: float) -> bool:
        """Return whether the daemon had no room for a receive, and is to be asked again."""
        if one.refused is not None or isinstance(one.asked, Load) or not _has_no_room(one.work):
            return False
        return now_s < one.began_s + self._settings.receive_s

    def _look_at_stores(self) -> list[str]:
        """Return the requests of stores that are over since the last look."""
        requests: list[str] = []
        for one in [one for one in self._readings if self._is_over(one)]:
            one.is_over = True
            self._readings.remove(one)
            error = self._error_of(one)
            if error is None:
                self._worked("store", self._memory.size_of(store.blocks for store in one.stores), one.began_s)
            else:
                self._failed("store", error)
            requests += [store.request for store in one.stores]
        return requests

    def _look_at_sends(self) -> None:
        """Take note of prompts that travel no further; what the daemon still has of them it is told to end."""
        for request, one in self._sends.items():
            work = one.work
            if one.error is not None or work is None:
                continue
            if _has_no_room(work) and time.monotonic() < one.began_s + self._settings.hold_s:
                continue
            error = next((chunk.error for chunk in (work, *one.earlier) if chunk.error is not None), None)
            if error is None and not work.is_settled and self._is_gone(one):
                error = DaemonLostError("the daemon ended")
            if error is None:
                continue
            one.fail(error)
            self._failed("send", error, request)
            if work.accepted is None or isinstance(error, StaleBootError | DaemonLostError):
                self._say_abandoned(one.request_id, "send", ())
            else:
                self._cancel(request)

    def _begin(self, given: Sequence[Load | Receive | Store | Send]) -> tuple[dict[int, Transfer | TierOperation], int]:
        """Begin all of it in one message.

        Return what was begun, by the identity of what was given, and which client's it is.
        """
        begun: dict[int, Transfer | TierOperation] = {}
        generation = self._engine.generation
        if not given:
            return begun, generation
        try:
            after = self._memory.pool.event()  # on a device the model may still compute what this reads, or frees
            with self._engine.client() as client:
                generation = self._engine.generation  # while it is lent it is not given up
                if client.is_away:
                    raise DaemonLostError("the daemon is away")
                with client.batched() as step:
                    for one in given:
                        if isinstance(one, Load | Receive):
                            begun[id(one)] = self._begin_write(step, one, after)
                        elif isinstance(one, Send) and self._sends[one.request].may_go(generation):  # it may have ended
                            begun[id(one)] = self._begin_send(step, one, after)
                    for whole, parts in joined_stores(one for one in given if isinstance(one, Store)):
                        begun |= dict.fromkeys(map(id, parts), self._begin_store(step, whole, after))
        except KvferryError as error:
            self._log("begin", error)
            return {}, generation
        return begun, generation

    def _note_reads(
        self, reads: Sequence[Store | Send], begun: Mapping[int, Transfer | TierOperation], generation: int
    ) -> None:
        now_s = time.monotonic()
        readings: dict[int, Reading] = {}
        for one in reads:
            work = begun.get(id(one))
            if isinstance(one, Send):
                self._note_send(one, work, generation)
            elif work is None:
                self._read.append(one.number)
            else:
                reading = readings.get(id(work))
                if reading is None:
                    reading = readings[id(work)] = Reading(work, generation, now_s)
                    self._readings.append(reading)
                reading.stores.append(one)
                self._reads[one.request].append((reading, one.number))

    def _note_send(self, one: Send, work: Transfer | TierOperation | None, generation: int) -> None:
        """Take note of a chunk; the chunks of a prompt are one transfer."""
        sending = self._sends[one.request]
        if isinstance(work, Transfer):
            sending.begun(one, work, generation)
        elif sending.may_go(generation):
            sending.fail(DaemonLostError("the daemon is away"))
            self._say_abandoned(sending.request_id, "send", ())
            self._cancel(one.request)

    def _begin_write(self, step: Batch, one: Load | Receive, after: DeviceEvent | None) -> Transfer | TierOperation:
        if isinstance(one, Load):
            return step.load(
                self._pool,
                one.leases[self._rank],
                np.array(one.blocks.ids),
                first_block=one.skipped,
                group=self._groups[one.blocks.group].component,
                unpin=one.is_last,
                after=after,
                deadline_s=self._settings.cache_s,
            )
        part = one.parts[self._rank]
        return step.receive(
            self._pool,
            part.request_id,
            [self._pages(blocks) for blocks in one.blocks],
            sources=part.pools or 1,
            destinations=part.destinations,
            source_daemons=one.sources,
            after=after,
            deadline_s=self._settings.receive_s,
        )

    def _begin_store(self, step: Batch, whole: Stores, after: DeviceEvent | None) -> TierOperation:
        return step.store(
            self._pool,
            whole.names,
            np.array(whole.ids),
            parent=whole.parent,
            chains=whole.chains,
            group=self._groups[whole.group].component,
            block_pages=whole.each,
            after=after,
            deadline_s=self._settings.cache_s,
        )

    def _begin_send(self, step: Batch, one: Send, after: DeviceEvent | None) -> Transfer:
        return step.send(
            self._pool,
            one.ids[self._rank],
            [self._pages(blocks) for blocks in one.blocks],
            payload=one.prompt if one.is_last else b"",
            last=one.is_last,
            steps=(self._steps if self._is_layered(one) else ()) or self._memory.pool.step_of(after),
            deadline_s=self._settings.hold_s,
        )

    def _pages(self, blocks: Blocks) -> Pages:
        group = self._groups[blocks.group]
        tokens = blocks.tokens if self._memory.pool.page_size == group.block_size else None  # else they are bytes
        return pages(np.array(blocks.ids, np.int64), first_page=blocks.first, tokens=tokens, component=group.component)

    def _poll(self) -> None:
        try:
            self._engine.poll()
        except KvferryError as error:
            self._log("poll", error)
        self._look_at_sends()

    def _cancel_again(self) -> None:
        """Tell the daemon again what it was told and has not done: it may not have heard."""
        now_s = time.monotonic()
        for request in [one for one, at_s in self._cancelled.items() if at_s <= now_s]:
            del self._cancelled[request]
            self._cancel(request)

    def _cancel(self, request: str) -> None:
        """Have the daemon end a request's transfers and loads; it says when it has. Stores go on: they are short."""
        writes, sending = self._writes.get(request, []), self._sends.get(request)
        if writes and _has_no_room(writes[0].work):
            writes[0] = writes[0]._replace(refused=CancelledError("the request was aborted"))
        if sending is not None and sending.error is None and (sending.work is None or _has_no_room(sending.work)):
            sending.fail(CancelledError("the request was aborted"))
            self._say_abandoned(sending.request_id, "send", ())
        for work in (*(one.work for one in writes), sending and sending.work):
            if isinstance(work, Transfer) and work.finished is None and not work.is_settled:
                key = work.key
                body = Cancel(request_id=key.request_id, pool=key.pool, direction=key.direction, wait=False)
                self._engine.say(asked(body))
            elif isinstance(work, TierOperation) and work.number is not None and not work.is_done:
                self._engine.say(asked(CancelOperation(operation=work.number)))
            else:
                continue
            self._cancelled[request] = time.monotonic() + CANCEL_AGAIN_S

    def _say_abandoned(self, request_id: str, direction: Direction, daemons: Sequence[str]) -> None:
        """Tell the other side that this one does not come."""
        body = Abandon(
            request_id=request_id,
            direction=direction,
            daemons=tuple(daemons),
            reason="the other server could not",
        )
        self._engine.say(asked(body))

    def _is_gone(self, one: Reading | Write | Sending) -> bool:
        """Return whether nothing that moved it is there any more."""
        return one.generation != self._engine.generation or self._engine.lost is not None

    def _is_over(self, one: Reading | Write | Sending) -> bool:
        """Return whether no byte of it can move any more."""
        work = one.work
        if isinstance(one, Sending) and one.error is None:
            return isinstance(work, Transfer) and work.settled is not None
        return work is None or self._is_gone(one) or _has_ended(work)

    def _is_read_out(self, request: str) -> bool:
        sending = self._sends.get(request)
        reads = self._reads.get(request, ())
        is_read = all(one.is_over or self._is_over(one) for one, _ in reads)
        return is_read and (sending is None or self._is_over(sending))

    def _has_more(self, request: str) -> bool:
        """Return whether chunks of a prompt may still come."""
        sending = self._sends.get(request)
        return sending is not None and not sending.has_last and request not in self._ended

    def _forget(self, request: str) -> None:
        """Take note of how a request's stores and sends ended."""
        self._cancelled.pop(request, None)
        sending = self._sends.pop(request, None)
        if sending is not None and sending.error is None:
            self._worked("send", self._memory.size_of(sending.sent), sending.began_s)
        for reading, number in self._reads.pop(request, ()):
            self._read.append(number)
            if self._error_of(reading) is None:
                self._stored.append(number)

    def _error_of(self, one: Reading) -> Exception | None:
        """Return why a store that is over has stored nothing."""
        return one.work.error or (None if _has_ended(one.work) else DaemonLostError("the daemon ended"))

    def _all_writes(self) -> Iterator[Write]:
        return itertools.chain.from_iterable(self._writes.values())

    def _are_written(self, writes: Sequence[Write]) -> bool:
        now_s = time.monotonic()
        return all(self._is_over(one) and not self._waits_for_room(one, now_s) for one in writes)

    def _end_writes(self, writes: Sequence[Write]) -> None:
        """Take note of how a request's loads ended; what is missing counts as invalid, or lost, from now on."""
        for one in writes:
            error, arrived = self._outcome(one)
            blocks = _blocks_of(one.asked)
            if error is None:
                self._memory.copy_in(blocks)
            elif len(self._groups) > 1:  # ids of several groups say nothing of a prompt's order
                self._lost.add(one.asked.request)
            else:
                (ids,) = [each.ids for each in blocks] or [[]]
                self._memory.copy_in([blocks[0]._replace(ids=ids[:arrived])] if arrived else [])
                self._invalid.update(ids[arrived:])
            self._note_write(one, error)

    def _note_write(self, one: Write, error: Exception | None) -> None:
        what: Kind = "load" if isinstance(one.asked, Load) else "receive"
        if error is None:
            self._worked(what, self._memory.size_of(_blocks_of(one.asked)), one.began_s)
            return
        self._failed(what, error, one.asked.request)
        never_came = one.work is None or one.work.refused is not None
        never_came |= isinstance(error, StaleBootError | DaemonLostError)  # or no daemon knows of it any more
        never_came &= not isinstance(error, TransferExistsError)  # of which another request waits for the same
        if never_came and isinstance(one.asked, Load):
            self._engine.say(asked(Unpin(lease=one.asked.leases[self._rank])))
        elif never_came and isinstance(one.asked, Receive) and one.asked.parts:
            self._say_abandoned(one.asked.parts[self._rank].request_id, "receive", one.asked.sources)

    def _outcome(self, one: Write) -> tuple[Exception | None, int]:
        """Return why a load failed, and how many leading blocks it has filled."""
        work = one.work
        if one.refused is not None:
            return one.refused, 0
        if work is None or not _has_ended(work):
            return DaemonLostError("the daemon ended, or is away"), 0
        if isinstance(work, TierOperation):
            return work.error, 0 if work.done is None else work.done.loaded
        if work.error is None and isinstance(one.asked, Receive):
            assert work.finished is not None
            what = self._weights.difference(work.finished.payload, one.asked.prompt)
            if what:
                return LengthMismatchError(f"the other server has computed {what}", field="transfer_id"), 0
        return work.error, 0

    def _worked(self, what: Kind, size: int, began_s: float) -> None:
        self.moved.record(what, size, time.monotonic() - began_s)
        if self._failures:
            self._failures = {one for one in self._failures if one[0] not in {what, "begin", "poll", "room"}}

    def _failed(self, what: Kind, error: Exception, request: str = "") -> None:
        if isinstance(error, CancelledError):  # as it was told to
            return
        self.moved.failed(what, _code(error))
        self._log(what, error, request)

    def _log(self, what: str, error: Exception, request: str = "") -> None:
        """Say why something failed: each cause once, until it works again."""
        cause = what, _code(error)
        if cause not in self._failures:
            self._failures.add(cause)
            hint = SAME_LAYOUT if isinstance(error, GeometryMismatchError) else ""
            logger.warning("kvferry: %s failed%s: %s%s", what, f" for {request}" if request else "", error, hint)


def _blocks_of(one: Load | Receive | Store | Send) -> tuple[Blocks, ...]:
    return (one.blocks,) if isinstance(one, Load | Store) else one.blocks


def _code(error: Exception) -> str:
    return str(error.code) if isinstance(error, KvferryError) else type(error).__name__


def _has_no_room(work: Transfer | TierOperation | None) -> bool:
    """Return whether the daemon could not take a transfer now."""
    return isinstance(work, Transfer) and work.accepted is None and isinstance(work.refused, OverloadedError)


def _has_ended(work: Transfer | TierOperation) -> bool:
    return work.is_settled if isinstance(work, Transfer) else work.is_done
