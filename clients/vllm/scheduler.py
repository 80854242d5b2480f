"""The scheduler's side of the connector: which blocks are loaded, received, stored and sent in a step.

It asks the daemon which blocks are cached, and never waits for it for long. What the workers have under way it knows by
what it has told them: a request that ends while its blocks may be being read keeps them until each rank has answered.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvferry.clients import Client, KvferryError, new_request_id
from kvferry.clients.calls import asked, joined
from kvferry.clients.places import DaemonPlace, place_of
from kvferry.clients.submitting import PendingReply
from kvferry.clients.vllm.groups import Group, unit_of, why_not_cached
from kvferry.clients.vllm.identity import (
    Adapters,
    Labels,
    digest_of,
    key_of,
    labels_of,
    name_of,
    prompt_digest,
)
from kvferry.clients.vllm.metadata import (
    HANDSHAKE,
    Blocks,
    Handoff,
    Load,
    Receive,
    Send,
    StepWork,
    Store,
    request_ids,
)
from kvferry.protocol.errors import DeadlineError, InvalidFieldError
from kvferry.protocol.session_messages import Status
from kvferry.protocol.tier_messages import HASH_BYTES, LEASE_S, Found, Lookup, Unpin
from kvferry.protocol.transfer_messages import Abandon, Direction

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvferry.clients.engine import Engine
    from kvferry.clients.vllm.configuration import Configuration
    from kvferry.clients.vllm.events import CacheEventLog

logger = logging.getLogger(__name__)

LOOKUP_S: Final = 2.0
"""What a lookup may take, lower tiers included; what is late counts as a miss."""

LOOK_S: Final = 60.0
"""What a look at the weights may take; requests wait for it, later ones are computed without the prefix cache."""

WAIT_S: Final = 0.002
"""How long a step waits for lookups; those that come later are looked at again at the next step."""

LONGEST_LIST: Final = 65536
"""Of hashes in a message."""


class Lookups:
    """A request's lookup: of each rank's pool, under way or answered.

    ``ends_at_s``: when it counts as a miss; ``asked_at_s``: its leases do not last for ever.
    """

    def __init__(self, client_generation: int, pending: list[PendingReply[Found]]) -> None:
        self.generation = client_generation
        self.pending = pending
        self.asked_at_s = time.monotonic()
        self.ends_at_s = self.asked_at_s + LOOKUP_S
        self.found: list[Found] = []


class Known:
    """What is known of a request.

    Attributes:
        request: vLLM's.
        handoff: what its parameters say, if they say anything that can be done.
        refused: why they cannot be followed, though it is to be prefilled elsewhere.
        blocks: its block ids by group, the prompt's first; 0 where a group needs none any more.
        local: how many tokens vLLM has found by itself, when it last asked.
        lookups: of the prefix cache; None: not asked, or used.
        stored: how many leading blocks are in the cache, or were told to be stored.
        sent: how many leading tokens were told to be sent.
        failed: whether something of it was to be loaded or received, and has not come.
        transfer: under which its prompt is sent; empty: it is not, or no longer.
        boot_id: of the daemon that it was sent by.
        is_sent: whether all of the prompt was told to be sent.
        is_read: whether its blocks may be being read.
        is_receiving: whether the workers were told to receive or load.
        adapter: what stands for its adapter's content; None: it is not known.
        key: what its blocks are named with beyond vLLM's hashes; None: not known yet, or they must not be shared.
        names: of its leading blocks.
        labels: what vLLM's hashes know by a name, with the contents.
        is_mixed: whether its blocks may be of other contents than these.
        prompt: what both sides of a transfer compare.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.handoff: Handoff | None = None
        self.refused = ""
        self.blocks: list[list[int]] = []
        self.local = 0
        self.lookups: Lookups | None = None
        self.stored = 0
        self.sent = 0
        self.failed = False
        self.transfer = ""
        self.boot_id = ""
        self.is_sent = False
        self.is_read = False
        self.is_receiving = False
        self.adapter: bytes | None = None
        self.key: bytes | None = None
        self.names: list[bytes] = []
        self.labels: dict[object, bytes | None] = {}
        self.is_mixed = False
        self.prompt = b""


class Scheduler:
    """One engine's, of its scheduler's thread."""

    def __init__(
        self,
        engine: Engine,
        told: Configuration,
        groups: Sequence[Group],
        hash_size: int,
        host: str,
        events: CacheEventLog | None,
    ) -> None:
        """Take the session.

        Args:
            engine: of this process.
            told: what both sides know.
            groups: vLLM's.
            hash_size: tokens of a block that vLLM hashes.
            host: this engine's own address.
            events: what is told of the prefix cache; None: nothing is.
        """
        self._engine = engine
        self._told = told
        self._host = host
        self._events = events
        self._groups = groups
        self._kept_back = 1 if any(one.reach is not None for one in groups) else 0
        """Tokens at a prompt's end that decode computes: what windows and states hold is that before the next one."""
        self._unit = unit_of(groups)
        """Tokens of a cached block."""
        self._each = [self._unit // one.block_size for one in groups]
        """Blocks of each group in it."""
        self._hashes = self._unit // hash_size
        self._caches = told.settings.cache and self._has_cache()
        self._held: dict[int, tuple[list[KVCacheBlock], int]] = {}
        """By the number of a store: blocks that vLLM may give up before, and how often it is still to be said done."""
        self._known: dict[str, Known] = {}
        self._work = StepWork()
        self._stores = 0
        self._place: DaemonPlace | None = None
        self._patience_s = WAIT_S
        self._adapters = Adapters()
        self._labels = Labels()
        self._weights: bytes | None = b""
        """What stands for the weights of all ranks; empty: they are those of the start; None: ranks are looking."""
        self._looks = 0
        self._is_look_due = self._is_look_awaited = False
        self._look_ends_at_s = 0.0
        self._looked: dict[int, bytes] = {}
        """What ranks have said of the look that is being taken."""
        self._block_pool: BlockPool | None = None
        self._local_cache: object = None

    def __repr__(self) -> str:
        """Show how many requests are known."""
        return f"<Scheduler of {self._engine!r}: {len(self._known)} requests>"

    # -- a request comes

    def came(self, request: Request) -> None:
        """Take note of a request, and ask what of it is cached."""
        if request.request_id in self._known:
            return
        self._notice_reset()
        known = self._known[request.request_id] = Known(request)
        self._identify(known)
        self._read_parameters(known)
        if known.handoff is None or not known.handoff.do_remote_prefill:
            self._look_up(known)

    def matched(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local ones can be had, and that they come meanwhile.

        None: it is not known yet.
        """
        self._notice_reset()
        self.came(request)
        known = self._known[request.request_id]
        known.local = local_tokens
        if self._is_mixed(known):  # what it had is gone: it begins anew
            self._identify(known)
        known.is_mixed = self._labels.mix(known.labels, self._weights) and local_tokens > 0
        if known.handoff is not None and known.handoff.do_remote_prefill:
            missing = max(0, self._handed_on(request) - local_tokens)
            return missing, missing > 0
        if known.is_mixed or known.failed or getattr(request, "skip_reading_prefix_cache", False):
            self._give_back(known)
            return 0, False
        if self._caches and self._weights is None and time.monotonic() < self._look_ends_at_s:
            self._is_look_awaited = True
            return None, False
        if known.lookups is None:
            self._look_up(known)
        blocks = self._found(known)
        if blocks is None:
            return None, False
        blocks -= bool(blocks and self._told.drops_last)
        known.stored = max(known.stored, blocks)
        more = blocks * self._unit - local_tokens
        if more > 0:
            return more, True
        self._give_back(known)
        return 0, False

    def allocated(self, request: Request, ids: list[list[int]], external_tokens: int) -> None:
        """Have the blocks that were given to external tokens filled."""
        known = self._known[request.request_id]
        known.blocks = ids
        handoff = None
        if known.handoff is not None and known.handoff.do_remote_prefill:
            handoff, known.handoff = known.handoff, None  # once: what is missing of it is computed here
        if not external_tokens:
            self._give_back(known)
            if handoff is not None:
                self._abandon(handoff)
            return
        known.is_receiving = True
        blocks = self._blocks(known, known.local, known.local + external_tokens, is_last=True)
        if handoff is not None:
            self._receive(known, handoff, self._of_each_group(blocks, known.local + external_tokens))
            return
        assert known.lookups is not None
        leases = tuple(one.lease for one in known.lookups.found)
        for one in blocks:
            skipped = one.first * self._groups[one.group].block_size // self._unit
            is_last = one is blocks[-1]
            self._work.loads.append(Load(request.request_id, one, leases, skipped, is_last))
        known.lookups = None
        known.stored = (known.local + external_tokens) // self._unit

    def _blocks(self, known: Known, before: int, tokens: int, *, is_last: bool, end: int = 0) -> tuple[Blocks, ...]:
        """Return a request's blocks beyond so many tokens, as far as it needs them to go on at the end.

        Args:
            known: the request.
            before: tokens that are there.
            tokens: that are there with these blocks.
            is_last: whether a block that they only begin is one of them; else it comes later.
            end: tokens at the end; by default these.
        """
        found = []
        for number, group in enumerate(self._groups):
            first = max(before // group.block_size, group.first(end or tokens))
            stop = group.stop(tokens) if is_last else tokens // group.block_size
            if end and is_last:  # at the end of a chunk none is needed; what is sent has some of each group
                first = min(first, stop - 1)
            if first < stop:
                size = min(tokens, stop * group.block_size) - first * group.block_size
                found.append(Blocks(known.blocks[number][first:stop], first, number, size))
        return tuple(found)

    def _of_each_group(self, blocks: tuple[Blocks, ...], tokens: int) -> tuple[Blocks, ...]:
        """Return the blocks, and an empty list for each group that needs none: the daemon wants one of each."""
        given = {one.group for one in blocks}
        unneeded = ((number, group) for number, group in enumerate(self._groups) if number not in given)
        return (*blocks, *(Blocks([], group.stop(tokens), number) for number, group in unneeded))

    # -- a step

    def work(self, step: SchedulerOutput) -> StepWork:
        """Return what the workers are to do in a step."""
        self._notice_reset()
        work, self._work = self._work, StepWork()
        if self._is_look_due and (step.num_scheduled_tokens or work.receives or self._is_look_awaited):
            # Not before: vLLM resets its cache when it is paused, and weights change until it goes on.
            work.look, self._look_ends_at_s = self._looks, time.monotonic() + LOOK_S
            self._is_look_due = self._is_look_awaited = False
        self._patience_s = WAIT_S
        # One that goes on with other blocks was preempted, also where vLLM has not said so.
        resumed = step.scheduled_cached_reqs.resumed_req_ids
        if step.preempted_req_ids or resumed:
            preempted = {*(step.preempted_req_ids or ()), *resumed}
            for name in preempted:
                self._preempted(self._known.get(name))
            work.preempted.extend(preempted)
        for known, before, tokens in self._computed(step):
            if known.transfer and not known.is_sent:
                self._send(work, known, tokens)
            if self._caches and tokens // self._unit > known.stored:
                self._store(work, known, before, tokens)
        return work

    def _computed(self, step: SchedulerOutput) -> Iterator[tuple[Known, int, int]]:
        """Yield the requests of a step, with how many tokens are computed before and after it."""
        counts = step.num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            known = self._known.get(new.req_id)
            if known is not None:
                known.blocks = [list(one) for one in new.block_ids]
                yield known, new.num_computed_tokens, new.num_computed_tokens + counts[new.req_id]
        cached = step.scheduled_cached_reqs
        for name, more, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            known = self._known.get(name)
            if known is None:
                continue
            if name in cached.resumed_req_ids:
                known.blocks = [list(one) for one in more or [()] * len(self._groups)]
            elif more:
                for ids, added in zip(known.blocks, more, strict=True):
                    ids.extend(added)
            yield known, tokens, tokens + counts[name]

    def ended(self, request: Request, *, is_complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return whether vLLM keeps the request's blocks, and what its answer says of its prompt.

        Args:
            request: vLLM's.
            is_complete: whether it has ended as it should.
        """
        name = request.request_id
        known = self._known.pop(name, None)
        if known is None:
            return False, None
        self._give_back(known)
        if known.handoff is not None and known.handoff.do_remote_prefill:
            self._abandon(known.handoff)
        said = None
        is_there = not self._engine.is_away and known.boot_id == self._engine.boot_id
        if known.transfer and known.is_sent and is_complete and is_there:
            said = self._parameters(known)
        elif known.transfer or known.is_receiving:
            self._work.aborted.append(name)
            if known.transfer and not known.sent:
                self._abandon_sending(known)
        if known.is_receiving:  # the workers say when that is over, and vLLM keeps the blocks until then
            return False, said
        if known.is_read:
            self._work.ended.append(name)
        return known.is_read, said

    def arrived(self, requests: Iterable[str]) -> None:
        """Take note of requests whose blocks are there."""
        for name in requests:
            known = self._known.get(name)
            if known is not None:
                known.is_receiving = False

    def failed(self, requests: Iterable[str], blocks: Collection[int]) -> None:
        """Take note of what has not come: requests of several groups, or blocks of one. These requests are computed.

        Nothing is loaded for them any more: vLLM counts the blocks that it takes from such a request as reserved for
        it, and where it has too few for both it waits for ever.
        """
        for name in requests:
            if name in self._known:
                self._known[name].failed = True
        if blocks:
            for known in self._known.values():
                known.failed |= known.is_receiving and any(one in blocks for ids in known.blocks for one in ids)

    def read(self, numbers: Iterable[int]) -> None:
        """Take note of stores that a rank has done with a group, or given up: vLLM may have their blocks back."""
        for number in numbers:
            blocks, left = self._held.pop(number, ([], 0))
            if left > 1:
                self._held[number] = blocks, left - 1
            elif blocks:
                assert self._block_pool is not None
                self._block_pool.free_blocks(blocks)

    def _hold(self, number: int, ids: Iterable[int], times: int) -> None:
        """Keep blocks from others until a store was said to be done this often: a window may leave them before."""
        if self._block_pool is not None:
            blocks = [self._block_pool.blocks[one] for one in ids]
            self._block_pool.touch(blocks)
            self._held[number] = blocks, times

    def stored(self, numbers: Iterable[int]) -> None:
        """Take note of stores that ranks have done."""
        if self._events is not None:
            self._events.stored(numbers)

    def events(self) -> list[KVCacheEvent]:
        """Return what was stored and what is gone since the last step."""
        return [] if self._events is None else self._events.take()

    def clear(self) -> bool:
        """Drop what is stored of this model in this layout; return whether that was done."""
        self._look_at_weights()
        if not self._caches:
            return True
        try:
            with self._engine.client() as client:
                self._wait_for_stores(client)
                for rank in range(self._told.ranks):
                    client.evict_cached(pool=self._told.pool_of(rank))
        except KvferryError as error:
            logger.warning("kvferry: the prefix cache was not reset: %s", error)
            return False
        return True

    def _wait_for_stores(self, client: Client) -> None:
        """Return once nothing is being stored: it would be there after the reset.

        Raises:
            KvferryError: it takes too long.
        """
        pools = {self._told.pool_of(rank) for rank in range(self._told.ranks)}
        ends_at_s = time.monotonic() + LOOKUP_S
        while any(one.kind == "store" and one.pool in pools for one in client.status().operations):
            if time.monotonic() > ends_at_s:
                raise DeadlineError("blocks are still being stored")
            client.poll(WAIT_S)

    def close(self) -> None:
        """End the session."""
        if self._events is not None:
            self._events.close()
        self._engine.close()

    def _has_cache(self) -> bool:
        """Return whether the daemon has a prefix cache for this engine's pools."""
        why = why_not_cached(self._groups)
        if why:
            logger.warning("kvferry: this engine has no prefix cache beyond its own: %s", why)
            return False
        try:
            with self._engine.client() as client:
                client.lookup(self._told.pool_of(0), [bytes(HASH_BYTES)], pin=False)
        except KvferryError as error:
            logger.warning("kvferry: this engine has no prefix cache beyond its own: %s", error)
            return False
        return True

    # -- the parameters of a request

    def _read_parameters(self, known: Known) -> None:
        request = known.request
        params = request.kv_transfer_params
        if not params or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
            return
        handoff = Handoff(do_remote_prefill=bool(params.get("do_remote_prefill")))
        try:
            handoff = _handoff_of(params)
            self._check(handoff)
        except InvalidFieldError as error:
            logger.warning("kvferry: kv_transfer_params of %s: %s", request.request_id, error)
            if handoff.do_remote_prefill:
                known.handoff, known.refused = handoff, f"{error.field}: {error.detail}"
            return
        known.handoff = handoff
        if handoff.do_remote_decode and not self._cut(request):
            self._abandon_sending(known)
            return
        known.prompt = prompt_digest(request, known.adapter, self._handed_on(request))
        if handoff.do_remote_decode:
            known.transfer = handoff.transfer_id or new_request_id()

    def _cut(self, request: Request) -> bool:
        """Have vLLM compute a prompt as far as decode takes it; return whether there is something to be handed on.

        A state is that after its last token, and a window that before the next one: so nothing may follow.
        """
        kept_back = self._kept_back
        if not kept_back:
            return True
        if request.num_prompt_tokens <= kept_back or getattr(request, "skip_reading_prefix_cache", False):
            return False
        tokens = request.prompt_token_ids
        if tokens is not None:
            del tokens[-kept_back:]
        else:
            request.prompt_embeds = request.prompt_embeds[:-kept_back]
        del request._all_token_ids[-kept_back:]  # noqa: SLF001  as vLLM's own connector does
        request.num_prompt_tokens -= kept_back
        request.max_tokens = 1
        return True

    def _handed_on(self, request: Request) -> int:
        """Return how many tokens of a prompt decode takes."""
        params = request.kv_transfer_params or {}
        return int(request.num_prompt_tokens) - (0 if params.get("do_remote_decode") else self._kept_back)

    def _check(self, handoff: Handoff) -> None:
        """Raise InvalidFieldError where the other engine says what does not fit this one."""
        told = self._told
        if handoff.do_remote_decode and not told.is_producer:
            raise InvalidFieldError("this engine is a kv_consumer", field="do_remote_decode")
        if not handoff.do_remote_prefill:
            return
        if not told.is_consumer:
            raise InvalidFieldError("this engine is a kv_producer", field="do_remote_prefill")
        if not handoff.transfer_id:
            raise InvalidFieldError(
                "missing: pass on all kv_transfer_params of prefill's answer, or give both sides one",
                field="transfer_id",
            )
        if handoff.handshake != HANDSHAKE:
            raise InvalidFieldError(
                f"prefill has another version of the connector (handshake {handoff.handshake}, {HANDSHAKE} here)",
                field="handshake",
            )
        if handoff.remote_pool is not None and handoff.remote_tp_size is None:
            raise InvalidFieldError(
                "missing: pass on all kv_transfer_params of prefill's answer", field="remote_tp_size"
            )
        if handoff.remote_pool is None and handoff.remote_tp_size not in {None, told.ranks}:
            raise InvalidFieldError(
                f"prefill has {handoff.remote_tp_size} ranks of tensor parallelism, this engine {told.ranks}: where "
                "they differ, ask prefill first, without a transfer_id, and pass on its answer",
                field="remote_tp_size",
            )

    def _parameters(self, known: Known) -> dict[str, Any]:
        """Return what prefill's answer says: a router passes it on to decode."""
        place = self._own_place()
        said: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": known.transfer,
            "remote_engine_id": self._told.instance,
            "remote_tp_size": self._told.ranks,
            "handshake": HANDSHAKE,
        }
        if not _is_given(known):
            said["remote_pool"] = self._told.pool
        if place is not None:
            said["remote_place"] = msgspec.to_builtins(place)
        return said

    def _own_place(self) -> DaemonPlace | None:
        """Return where this engine's daemon is; None: it is away."""
        is_old = self._place is None or self._place.boot_id != self._engine.boot_id
        if is_old and not self._engine.is_away:
            try:
                with self._engine.client() as client:
                    daemons = client.call(asked(Status()), deadline_s=LOOKUP_S).addresses
                    self._place = DaemonPlace(
                        host=self._host, place=place_of(daemons), daemons=daemons, boot_id=client.boot_id
                    )
            except KvferryError as error:
                logger.warning("kvferry: the daemon does not say where it is: %s", error)
        return self._place

    def _sources(self, handoff: Handoff) -> tuple[str, ...]:
        """Return the address of prefill's daemon; none where it is this engine's.

        Raises:
            InvalidFieldError: it has none that reaches here, or was this one before it restarted.
        """
        ours, theirs = self._own_place(), handoff.remote_place
        if theirs is not None and ours is not None:
            sources = theirs.reached_from(self._host, ours.daemons, ours.boot_id)
            if not sources and theirs.boot_id != ours.boot_id:
                raise InvalidFieldError(
                    "the daemon has been restarted since, and what prefill sent ended with it", field="remote_place"
                )
            return sources
        daemons = handoff.remote_daemons or ()
        return () if ours is None or set(daemons) & set(ours.daemons) else daemons[:1]

    # -- prefill to decode

    def _receive(self, known: Known, handoff: Handoff, blocks: tuple[Blocks, ...]) -> None:
        request = known.request
        sources: tuple[str, ...] = ()
        if not known.refused:
            try:
                sources = self._sources(handoff)
            except InvalidFieldError as error:
                logger.warning("kvferry: kv_transfer_params of %s: %s", request.request_id, error)
                known.refused = f"{error.field}: {error.detail}"
        if known.refused:
            self._abandon(handoff)
        self._work.receives.append(
            Receive(
                request=request.request_id,
                blocks=blocks,
                parts=() if known.refused else handoff.parts(self._told.ranks),
                sources=sources,
                prompt=known.prompt,
                refused=known.refused,
            )
        )

    def _send(self, work: StepWork, known: Known, tokens: int) -> None:
        """Send what a step completes: whole blocks, and at the prompt's end all that is left."""
        request = known.request
        prompt = request.num_prompt_tokens
        known.is_sent = tokens >= prompt
        tokens = min(tokens, prompt)
        blocks = self._blocks(known, known.sent, tokens, is_last=known.is_sent, end=prompt)
        if not blocks and not known.is_sent:
            return
        content = os.urandom(HASH_BYTES) if self._is_mixed(known) else known.prompt  # nobody's
        work.sends.append(Send(request.request_id, blocks, self._sent_ids(known), known.is_sent, content))
        if not known.sent:
            known.boot_id = self._engine.boot_id
        known.sent, known.is_read = tokens, True

    def _abandon(self, handoff: Handoff) -> None:
        """Tell prefill that nobody comes for a prompt."""
        if not handoff.transfer_id:
            return
        try:
            daemons = self._sources(handoff)
        except KvferryError:
            daemons = ()
        ranks = handoff.remote_tp_size or self._told.ranks
        ids = request_ids(handoff.transfer_id, ranks, together=handoff.remote_pool is not None)
        self._say_abandoned(ids, "receive", daemons)

    def _abandon_sending(self, known: Known) -> None:
        """Tell decode that a prompt does not come."""
        handoff = known.handoff
        if handoff is not None and handoff.transfer_id:  # else nobody else knows of it
            self._say_abandoned(self._sent_ids(known), "send", handoff.remote_daemons or ())

    def _sent_ids(self, known: Known) -> tuple[str, ...]:
        """Return the daemon's ids of each rank's part of a prompt that is sent."""
        return request_ids(known.transfer, self._told.ranks, together=not _is_given(known))

    def _say_abandoned(self, ids: Iterable[str], direction: Direction, daemons: Sequence[str]) -> None:
        for one in dict.fromkeys(ids):
            body = Abandon(
                request_id=one,
                direction=direction,
                daemons=tuple(daemons),
                reason="the other server gave the request up",
            )
            self._engine.say(asked(body))

    def _preempted(self, known: Known | None) -> None:
        """Forget what was read of blocks that are others' now."""
        if known is None:
            return
        self._give_back(known)
        if known.transfer and known.sent:
            # Who waits under a given id has been told of the end; else nobody knows of it yet, and another one will do.
            known.transfer = "" if _is_given(known) else new_request_id()
        known.sent, known.is_sent = 0, False

    # -- what KV depends on

    def _identify(self, known: Known) -> None:
        """Take note of the adapter and the media of a request that begins, or begins anew."""
        self._give_back(known)
        known.adapter = self._adapters.of(known.request.lora_request)
        known.labels = labels_of(known.request, known.adapter)
        known.key, known.names, known.stored, known.is_mixed = None, [], 0, False
        if known.prompt:
            known.prompt = prompt_digest(known.request, known.adapter, self._handed_on(known.request))

    def watch(self, block_pool: BlockPool) -> None:
        """Have the weights looked at where vLLM's own prefix cache is reset: who changes them has to do so."""
        self._block_pool = block_pool
        self._local_cache = getattr(block_pool, "cached_block_hash_to_block", None)

    def looked(self, weights: Mapping[int, tuple[int, bytes]]) -> None:
        """Take note of what stands for the weights of ranks, of which each look has a number."""
        self._looked |= {rank: found for rank, (look, found) in weights.items() if look == self._looks}
        if self._weights is None and len(self._looked) == self._told.ranks:
            found = [self._looked[rank] for rank in sorted(self._looked)]
            self._weights = digest_of(found) if any(found) else b""

    def _notice_reset(self) -> None:
        local = getattr(self._block_pool, "cached_block_hash_to_block", None)  # a new one with each reset
        if local is not self._local_cache:
            self._local_cache = local
            self._labels.forget()
            self._look_at_weights()

    def _look_at_weights(self) -> None:
        """Have all ranks look at their weights; until they have nothing is looked up, nor stored."""
        self._looks += 1
        self._is_look_due = True
        self._weights, self._looked = None, {}
        self._look_ends_at_s = math.inf
        for known in self._known.values():
            self._give_back(known)
            known.is_mixed = True

    def _is_mixed(self, known: Known) -> bool:
        """Return whether a request's blocks may be of other weights, or another adapter, than its key says."""
        if known.adapter and not known.is_mixed:
            known.is_mixed = not self._adapters.is_still(known.request.lora_request, known.adapter)
        return known.is_mixed

    # -- the prefix cache

    def _names(self, known: Known, stop: int) -> list[bytes]:
        """Return the names of a request's first blocks, as far as vLLM has hashed them; none: they are not shared."""
        if known.key is None and self._weights is not None and not known.is_mixed:
            known.key = key_of(known.labels, self._weights)
        if known.key is None:
            return []
        hashes, each = known.request.block_hashes, self._hashes
        numbers = range(len(known.names), min(stop, len(hashes) // each))
        known.names += [name_of(bytes(hashes[(number + 1) * each - 1]), known.key) for number in numbers]
        return known.names[:stop]

    def _look_up(self, known: Known, most: int = LONGEST_LIST) -> None:
        """Ask for the longest cached prefix, of ``most`` blocks; all but the last token, which must be computed."""
        if not self._caches or getattr(known.request, "skip_reading_prefix_cache", False):
            return
        names = self._names(known, min(most, (known.request.num_tokens - 1) // self._unit))
        if not names or self._engine.is_away:
            return
        needed = tuple(one.cached(self._unit) for one in self._groups)
        bodies = [
            Lookup(pool=self._told.pool_of(rank), hashes=joined(names), groups=needed)
            for rank in range(self._told.ranks)
        ]
        try:
            with self._engine.client() as client:
                generation = self._engine.generation
                if len(bodies) == 1:
                    pending = [client.begin(asked(bodies[0]), deadline_s=LOOKUP_S)]
                else:
                    with client.batched() as step:
                        pending = [step.begin(asked(body), deadline_s=LOOKUP_S) for body in bodies]
        except KvferryError as error:
            logger.debug("kvferry: no lookup: %s", error)
            return
        known.lookups = Lookups(generation, pending)

    def _found(self, known: Known) -> int | None:
        """Return how many leading blocks all ranks have; None: they have not answered yet."""
        if known.lookups is not None and time.monotonic() > known.lookups.asked_at_s + LEASE_S / 2:
            self._give_back(known)  # it has waited so long that its lease may have ended: what is there now?
            self._look_up(known)
        lookups = known.lookups
        if lookups is None:
            return 0
        if self._engine.is_away:  # it may be so for long, and need not know the lease then
            self._give_back(known)
            return 0
        began_s = time.monotonic()
        is_answered = self._answered(lookups, self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        if not is_answered:
            if time.monotonic() < lookups.ends_at_s:
                return None
            self._give_back(known)  # the daemon stands still
            known.lookups = Lookups(lookups.generation, [])
            return 0
        lengths = {one.blocks for one in lookups.found} or {0}
        if len(lengths) > 1 and self._kept_back:  # a lease has of a window the blocks at its own end only
            self._give_back(known)
            self._look_up(known, min(lengths))
            return None if min(lengths) else 0
        return min(lengths)

    def _answered(self, lookups: Lookups, wait_s: float) -> bool:
        """Take the answers that have come; return whether all have, or none ever will."""
        if lookups.generation != self._engine.generation:
            lookups.pending, lookups.found = [], []
        if not lookups.pending:
            return True
        ends_at = time.monotonic() + wait_s
        try:
            with self._engine.client() as client:
                while not all(client.is_ready(one) for one in lookups.pending):
                    left_s = ends_at - time.monotonic()
                    if left_s <= 0.0 or client.is_away:
                        return False
                    client.poll(left_s)
                for one in lookups.pending:
                    try:
                        lookups.found.append(client.wait(one))
                    except KvferryError as error:
                        lookups.found.append(Found(blocks=0))
                        logger.debug("kvferry: a lookup failed: %s", error)
        except KvferryError:
            lookups.found = []
        lookups.pending = []
        return True

    def _give_back(self, known: Known) -> None:
        """Give up what a request's lookup has pinned, or will."""
        lookups, known.lookups = known.lookups, None
        if lookups is not None and lookups.generation == self._engine.generation:
            for one in lookups.found:
                self._unpin(one)
            for pending in lookups.pending:
                self._engine.when_answered(pending, self._unpin)

    def _unpin(self, found: Found) -> None:
        if found.lease:
            self._engine.say(asked(Unpin(lease=found.lease)))

    def _store(self, work: StepWork, known: Known, before: int, tokens: int) -> None:
        """Store what a step completes of blocks whose hash is known: those of drafts that fail have none.

        ``before``: tokens that were computed before the step. What their windows have left is others' already.
        """
        unit, first = self._unit, known.stored
        hashed = len(known.request.block_hashes) // self._hashes
        held = min(len(ids) // each for ids, each in zip(known.blocks, self._each, strict=True))
        stop = min(tokens // unit, hashed, held)
        if stop <= first:
            return
        names = [] if self._is_mixed(known) else self._names(known, stop)
        if not names:
            return
        self._stores += 1
        name, stores, leaving = known.request.request_id, [], []
        for number, (group, each) in enumerate(zip(self._groups, self._each, strict=True)):
            begin = max(first, group.first(before) // each)
            if begin < stop:
                ids = known.blocks[number][begin * each : stop * each]
                parent = names[begin - 1] if begin else None
                blocks = Blocks(ids, begin * each, number)
                stores.append(Store(self._stores, name, blocks, names[begin:stop], parent))
                leaving += [] if group.reach is None else ids
        if leaving:
            self._hold(self._stores, leaving, len(stores) * self._told.ranks)
        work.stores += stores
        known.stored, known.is_read = stop, True
        if self._events is not None:
            self._events.stores(self._stores, known.request, names[first:stop], first, len(stores))


def _is_given(known: Known) -> bool:
    """Return whether a router has given the id under which a prompt is sent: decode may wait, knowing no pools."""
    return known.handoff is not None and bool(known.handoff.transfer_id)


def _handoff_of(params: dict[str, Any]) -> Handoff:
    """Return what a request's parameters say.

    Raises:
        InvalidFieldError: they are not what they should be.
    """
    try:
        return msgspec.convert(params, Handoff, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidFieldError(str(error), field="kv_transfer_params") from error
