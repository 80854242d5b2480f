"""The classes that SGLang asks a transfer backend for.

A request is one transfer, of all ranks and stages of prefill to all of decode, however each side splits the model:
prefill does not know how decode does, decode learns at prefill's bootstrap server how prefill does, and names the pools
of the ranks that have its heads. Prefill's sender opens it without pages when the request comes, and hears by it
whether decode has pages (SGLang's back-pressure); each chunk is a SEND; the payload of the last one, of the last stage,
says with which weights and adapter the KV was computed, and has the row of metadata (first token, logprobs, hidden
states). Decode's receiver says RECEIVE for the pages that it lacks, and takes them only of its own weights and adapter.
SGLang uses pages again as soon as it is told of the end, so Success and Failed are told when the transfer has settled.

What senders and receivers begin in a step of the scheduler goes to the daemon in one message: SGLang polls them all
after it has begun what it begins, and the first one that is polled sends it. A chunk that others follow goes at once.

All methods are called by the scheduler's thread, but ``_handle_node_failure``, which SGLang's heartbeat thread calls.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import requests
from requests.adapters import HTTPAdapter
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg
from sglang.srt.utils.network import NetworkAddress
from urllib3.util import Retry

from kvferry.clients import Transfer, pages
from kvferry.clients.calls import asked
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.places import place_of
from kvferry.clients.sglang import identity, pools
from kvferry.clients.sglang.bootstrap import (
    HANDSHAKE,
    ROUTE,
    PrefillRank,
    PrefillRanks,
    Sources,
    misfit_of,
    request_id,
)
from kvferry.clients.sglang.carried import ON_PAGES, check_carried, state_lists
from kvferry.pools.planning.geometry import ranks_with_heads
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    ModelMismatchError,
    OverloadedError,
    StaleBootError,
    UnknownTransferError,
)
from kvferry.protocol.transfer_messages import Abandon, Cancel, Direction, LayerStep

logger = logging.getLogger(__name__)

ASK_S: Final = 5.0
WHILE_IT_STARTS: Final = Retry(connect=10, read=False, redirect=False, status=0, backoff_factor=0.05, backoff_max=5.0)
"""The server that starts the ranks starts the bootstrap server meanwhile: some 20 s are long enough for it."""

LONGEST_S: Final = 3600.0
"""What a daemon allows for a transfer."""

CANCEL_S: Final = 5.0
"""How long the daemon may take to end a half whose pages SGLang is about to use again, before the log says so."""

CANCEL_AGAIN_S: Final = 0.1

OPEN_AGAIN_S: Final = 0.05
OPEN_AT_ONCE: Final = 64
"""How often, and for how many at once, a daemon is asked again that had no room for their transfers."""

NO_HIDDEN_BYTES: Final = 64
"""Of a row of a draft model's hidden states at a server without one: SGLang has 16 floats in their place."""

ABORTED: Final = "Aborted by AbortReq."
"""As SGLang says it."""


class KvferryKVManager(CommonKVManager):
    """One of a scheduler process, over the pool that this process has in the daemon's memory."""

    kv_args: Any

    def __init__(
        self,
        args: Any,  # noqa: ANN401  SGLang's KVArgs
        disaggregation_mode: DisaggregationMode,
        server_args: Any,  # noqa: ANN401  SGLang's
        is_mla_backend: bool | None = False,  # noqa: FBT001, FBT002  SGLang's signature
    ) -> None:
        """Check that what is to be transferred is the daemon's pool.

        Raises:
            InvalidFieldError: it is not, or the server does what is not carried yet; says what.
        """
        pool = pools.current()
        check_carried(args, pool)
        assert pool is not None
        self.pool: EnginePool = pool
        self._pool_name = pool.name
        self.draft = identity.draft_revision()
        self.checksums = bool(get_disagg().disaggregation_enable_kv_checksum)
        """Whether the daemon compares what has arrived with the other side's pages."""
        with pool.engine.client() as client:
            self._boot_id, self._addresses = client.boot_id, client.status().addresses
        self._prefills: dict[tuple[str, int], Sources] = {}
        self._server = ""
        """The bootstrap server's number, of prefill."""
        self.unopened: dict[_Half, None] = {}
        """Whose transfers the daemon had no room for, as they came."""
        self.turns = itertools.count()
        self._opens_at = 0.0
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if disaggregation_mode == DisaggregationMode.DECODE:
            self._start_heartbeat_checker_thread()  # finds a prefill server that ended before it opened its transfer

    def register_to_bootstrap(self) -> None:
        """Say at the bootstrap server which ranks there are, and where their daemon is.

        Raises:
            InvalidFieldError: it is not kvferry's.
        """
        rank = PrefillRank(
            handshake=HANDSHAKE,
            rank=f"{self.own_dp_rank}/{self.attn_tp_rank}/{self.pp_rank}",
            pool=self._pool_name,
            layers=self.pool.layer_numbers,
            row=tuple(self.kv_args.aux_item_lens),
            draft=self.draft,
            host=self.local_ip,
            place=place_of(self._addresses),
            daemons=self._addresses,
            boot_id=self._boot_id,
        )
        host = NetworkAddress.parse(self.dist_init_addr).resolved().host if self.dist_init_addr else self.bootstrap_host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  what SGLang listens at
        url = f"{NetworkAddress(host, self.bootstrap_port).to_url()}{ROUTE}"
        try:
            with requests.Session() as session:
                session.mount(url, HTTPAdapter(max_retries=WHILE_IT_STARTS))
                reply = session.put(url, data=msgspec.json.encode(rank), timeout=ASK_S)
            reply.raise_for_status()
            self._server = msgspec.json.decode(reply.content, type=PrefillRanks).server
        except (OSError, msgspec.MsgspecError, ValueError) as error:  # what requests raises is an OSError
            raise InvalidFieldError(
                f"the bootstrap server does not take where the daemon is ({error}): is another server at its port?",
                field="disaggregation_bootstrap_port",
            ) from error
        super().register_to_bootstrap()  # now this rank counts as ready

    @property
    def own_dp_rank(self) -> int:
        """Return which data-parallel rank this is, as decode calls it."""
        return int(self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank)

    def sources(self, bootstrap_addr: str, dp_rank: int, tp_size: int, pp_size: int) -> Sources:
        """Return whose KV this rank takes of a prefill server's data-parallel rank.

        Raises:
            InvalidFieldError: a rank or stage is missing, is of another version, or does not transfer by kvferry.
            OSError: its bootstrap server does not answer.
        """
        key = bootstrap_addr, dp_rank
        if key not in self._prefills:
            reply = requests.get(f"http://{bootstrap_addr}{ROUTE}", params={"dp": str(dp_rank)}, timeout=ASK_S)
            wanted = {f"{dp_rank}/{rank}/{stage}" for rank in range(tp_size) for stage in range(pp_size)}
            try:
                reply.raise_for_status()
                found = msgspec.json.decode(reply.content, type=PrefillRanks)
                versions = {one.handshake for one in found.ranks} - {HANDSHAKE}
                if not versions and {one.rank for one in found.ranks} != wanted:
                    raise msgspec.ValidationError(f"{len(found.ranks)} ranks have registered of {len(wanted)}")
            except (requests.HTTPError, msgspec.MsgspecError, ValueError) as error:
                raise InvalidFieldError(
                    f"the prefill server at {bootstrap_addr} does not say where its daemon is ({error}): start it with "
                    "--disaggregation-transfer-backend kvferry and the same kvferry",
                    field="bootstrap_addr",
                ) from error
            if versions:
                raise InvalidFieldError(
                    f"the prefill server at {bootstrap_addr} has another version of kvferry's plugin (handshake "
                    f"{versions.pop()}, {HANDSHAKE} here): install the same kvferry",
                    field="bootstrap_addr",
                )
            numbers, each = ranks_with_heads(self.attn_tp_rank, self.attn_tp_size, tp_size)
            mine = sorted(
                [one for one in found.ranks if one.tp_rank in numbers], key=lambda one: (-one.stage, one.tp_rank)
            )
            stages = [[one for one in mine if one.tp_rank == number] for number in numbers]
            misfits = filter(None, (misfit_of(one, self.pool.layer_numbers) for one in stages))
            self._prefills[key] = Sources(found.server, tuple(mine), each * self.pp_size, next(misfits, ""))
        return self._prefills[key]

    def source_daemons(self, sources: Sources) -> tuple[str, ...]:
        """Return the addresses of prefill's daemons, for RECEIVE; without our own, also after its restart.

        Raises:
            InvalidFieldError: one has none that reaches here.
        """
        found = [one.reached_from(self.local_ip, self._addresses, self._boot_id) for one in sources.ranks]
        return tuple(dict.fromkeys(address for addresses in found for address in addresses))

    def forget_prefill(self, bootstrap_addr: str) -> None:
        """Ask anew next time: the server may be another one by then. From any thread."""
        for key in [one for one in tuple(self._prefills) if one[0] == bootstrap_addr]:
            self._prefills.pop(key, None)

    def wait_for_room(self, half: _Half, error: KvferryError) -> None:
        """Have the daemon asked again for a half's transfer, in turn; who waits already keeps its place."""
        if half in self.unopened:
            return
        if not self.unopened:
            logger.warning("kvferry: requests wait (limits.max_transfers_per_session allows for more): %s", error)
        is_late = bool(self.unopened) and next(reversed(self.unopened)).turn > half.turn
        self.unopened[half] = None
        if is_late:  # those that came after it were looked at before it
            self.unopened = dict.fromkeys(sorted(self.unopened, key=lambda one: one.turn))

    def open_waiting(self) -> None:
        """Ask again, now and then: for those that came first."""
        now_s = time.monotonic()
        if self.unopened and now_s >= self._opens_at:
            self._opens_at = now_s + OPEN_AGAIN_S
            for one in tuple(itertools.islice(self.unopened, OPEN_AT_ONCE)):
                one.open()

    def request_id(self, room: int) -> str:
        """Return the id of the transfer of a request that this rank, of prefill, has."""
        return request_id(self._server, self.own_dp_rank, room)

    def known_prefills(self, bootstrap_addr: str) -> dict[int, Sources]:
        """Return what is known of a prefill server without asking, by its data-parallel ranks."""
        return {rank: one for (address, rank), one in tuple(self._prefills.items()) if address == bootstrap_addr}

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Learn how prefill splits the model: it may differ beside an indexer, which SGLang refuses for its own."""
        args = self.kv_args
        self.kv_args = copy.copy(args)
        self.kv_args.state_types = [one for one in args.state_types if one not in ON_PAGES]
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        finally:
            self.kv_args = args

    def _resolve_rank_mapping(self, info: Any) -> None:  # noqa: ANN401  SGLang's PrefillServerInfo
        """Have SGLang ask for one rank only, whatever sizes both sides have: kvferry's own are asked for above."""
        info.target_tp_rank, info.target_tp_ranks = 0, [0]
        info.target_cp_ranks, info.target_pp_ranks = [0], [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        self.forget_prefill(failed_bootstrap_addr)
        super()._handle_node_failure(failed_bootstrap_addr)


class _Half:
    """What sender and receiver have in common: from a transfer's state to SGLang's."""

    kv_mgr: KvferryKVManager
    bootstrap_room: int
    conclude_state: int | None
    content = identity.NO_CONTENT
    """Of which weights and adapter the KV is, since the request came."""
    turn = 0
    """Its place among those of this process that wait for room in the daemon."""
    _transfer: Transfer | None = None
    _generation = 0
    _cancelled = False
    _abandoned = False
    _direction: Direction

    def open(self) -> None:
        """Begin the transfer, unless it is begun."""
        raise NotImplementedError

    def _has_no_room(self) -> bool:
        """Return whether the daemon had no room for the transfer: it is asked again."""
        transfer, mgr = self._transfer, self.kv_mgr
        if transfer is not None and transfer.accepted is None and isinstance(transfer.refused, OverloadedError):
            mgr.wait_for_room(self, transfer.refused)
            self._transfer = None
        elif transfer is not None and (transfer.accepted is not None or transfer.refused is not None):
            mgr.unopened.pop(self, None)
        return self in mgr.unopened

    def _fail(self, reason: str) -> None:
        """Record why; the first reason counts."""
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.setdefault(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _is_failed(self) -> bool:
        """Return whether it was aborted, or its prefill server has gone."""
        return bool(self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed)

    def _conclude(self, state: int) -> int:
        self.kv_mgr.unopened.pop(self, None)
        self.kv_mgr.update_status(self.bootstrap_room, state)
        self.conclude_state = state
        if state == KVPoll.Failed and self._is_unknown():
            self._abandon()
        return state

    def _is_unknown(self) -> bool:
        """Return whether no daemon knows of this half: it never came, was refused, or its daemon is no more."""
        transfer = self._transfer
        if transfer is None or (transfer.refused is not None and transfer.accepted is None):
            return True
        return self._generation != self.kv_mgr.pool.engine.generation or isinstance(transfer.error, StaleBootError)

    def _abandon(self) -> None:
        """Tell the other half, once, that this one does not come; if need be as soon as the daemon is back."""
        if self._abandoned:
            return
        self._abandoned = True
        reason = "the other server gave the request up"
        for request, daemons in self._others():
            body = Abandon(request_id=request, direction=self._direction, daemons=daemons, reason=reason)
            self.kv_mgr.pool.engine.say(asked(body))

    def _others(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return by which ids the other half may wait, and at which daemons, but for those that ask ours."""
        raise NotImplementedError

    def _error(self) -> KvferryError | None:
        """Return why it failed, as far as the daemon has said."""
        return None if self._transfer is None else self._transfer.error

    def _look(self) -> int | None:
        """Take what has arrived, and return how it ended; None: it has not."""
        if self.conclude_state is not None:
            return self.conclude_state
        engine = self.kv_mgr.pool.engine
        engine.poll()
        self.kv_mgr.open_waiting()
        if not self._is_failed() and self._has_no_room():
            return None
        transfer = self._transfer
        if transfer is None:
            return self._conclude(KVPoll.Failed) if self._is_failed() else None
        error = self._error()
        if error is not None:
            self._fail(str(error))
        if self._is_failed():
            self._cancel()
        if self._generation != engine.generation:  # nothing that wrote for it is there any more
            self._fail("DAEMON_LOST: the daemon ended, and the request's transfer with it")
        elif not transfer.is_settled:
            return None
        return self._conclude(KVPoll.Failed if self._is_failed() else KVPoll.Success)

    def _cancel(self) -> None:
        """Have the daemon end it, once; ``poll`` says when it has."""
        self.kv_mgr.unopened.pop(self, None)
        transfer = self._transfer
        if transfer is None:
            self._abandon()
        elif transfer.finished is None and not transfer.is_settled and not self._cancelled:
            self._cancelled = True
            key = transfer.key
            cancel = Cancel(request_id=key.request_id, pool=key.pool, direction=key.direction, wait=False)
            self.kv_mgr.pool.engine.say(asked(cancel))

    def clear(self) -> None:
        """Forget it. SGLang may use the pages again at once, also where only another rank has failed."""
        self._give_up()
        super().clear()  # type: ignore[misc]  # of SGLang's class, which the halves have as well

    def _give_up(self) -> None:
        """Return when no byte of its pages moves any more: SGLang cannot hold them back, and has to wait here."""
        transfer, engine = self._transfer, self.kv_mgr.pool.engine
        self.kv_mgr.unopened.pop(self, None)
        if transfer is None:
            if self.conclude_state != KVPoll.Success:
                self._abandon()
            return
        while not transfer.is_settled and self._generation == engine.generation and engine.lost is None:
            try:
                with engine.client() as client:
                    client.cancel(transfer, deadline_s=CANCEL_S)
            except UnknownTransferError:  # it has ended
                return
            except KvferryError as error:
                logger.error(  # noqa: TRY400
                    "kvferry: room %s has not ended, this server waits until its pages can be used again: %s",
                    self.bootstrap_room, error,
                )  # fmt: skip
                engine.wait_for_news(CANCEL_AGAIN_S)
            else:
                return


class KvferryKVSender(_Half, CommonKVSender):
    """Prefill's half of a request's transfer."""

    _direction = "send"
    curr_idx: int
    num_kv_indices: int
    _transfer_start_time: float | None

    def __init__(
        self,
        mgr: KvferryKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,  # noqa: FBT001, FBT002  SGLang's signature
    ) -> None:
        """Open the transfer, so that decode's coming is heard, and decode hears of this one's end."""
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._is_last_sent = False
        self._earlier: list[Transfer] = []
        """Of the chunks before the latest one: each may be refused."""
        self.sends_ahead = False
        self.held: list[Callable[[], None]] = []
        """What gives pages back that are sent ahead and that the request has no more."""
        self.turn = next(mgr.turns)
        if mgr.unopened:
            mgr.unopened[self] = None
        else:
            self.open()

    def open(self) -> None:
        """Begin the transfer, unless it is begun."""
        if self._transfer is None and not self._is_failed():
            self._send([], is_last=False)

    def _error(self) -> KvferryError | None:
        return super()._error() or next((one.error for one in self._earlier if one.error is not None), None)

    def poll(self) -> int:
        """Return how far it is."""
        ended = self._look()
        if ended is not None:
            return ended
        if self._is_last_sent:
            return int(KVPoll.Transferring)
        if self._transfer is not None and self._transfer.matched:
            return int(KVPoll.WaitingForInput)
        self._check_bootstrap_timeout()  # SGLang's own: what has failed is given up at the next look
        return int(KVPoll.Bootstrapping)

    def poll_pp_consensus(self) -> int:
        """Return how far it is: decode receives of all stages or of none."""
        return self.poll()

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object = None,  # noqa: ARG002  a stream's, of other backends
        *,
        steps: Sequence[LayerStep] = (),
    ) -> None:
        """Send a chunk: the pages that follow those before.

        ``steps``: of the forward pass that fills them, where that is under way; SGLang itself gives none.
        """
        if self.conclude_state is not None or self._is_failed():
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        first, self.curr_idx = self.curr_idx, self.curr_idx + len(kv_indices)
        self._is_last_sent = self.curr_idx == self.num_kv_indices
        ids = np.asarray(kv_indices, np.int64)
        lists = [pages(ids, first_page=first, tokens=num_kv_tokens)] if len(ids) else []
        try:
            lists += state_lists(self.kv_mgr.kv_args.state_types, state_indices, self.curr_idx)
        except InvalidFieldError as error:
            self._fail(str(error))
            return
        self.sends_ahead |= bool(steps)
        self._send(lists, is_last=self._is_last_sent, steps=steps)
        if not (self._is_last_sent or steps):
            self.kv_mgr.pool.engine.flush()  # the model computes the next chunk before anybody polls
        self._record_transfer_indices(kv_indices, None)

    def get_transfer_metric(self) -> Any:  # noqa: ANN401  SGLang's KVTransferMetric
        """Return the bytes that the daemon has moved, in seconds from the first copy on: for SGLang's own metrics."""
        metric = super().get_transfer_metric()
        ended = self._transfer.finished if self._transfer is not None else None
        if ended is not None and ended.error is None:
            metric.transfer_total_bytes, metric.transfer_latency_s = ended.moved_bytes, ended.moved_us / 1e6
        return metric

    def _others(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(self.kv_mgr.request_id(self.bootstrap_room), ())]

    def abort(self) -> None:
        """Give it up; ``poll`` says Failed once no page is read any more.

        A prompt of which only some chunks are sent is not polled again, and SGLang uses its pages at once: this waits.
        """
        self._fail(ABORTED)
        if self.curr_idx and not self._is_last_sent:
            self._give_up()
        else:
            self._cancel()

    def _conclude(self, state: int) -> int:
        self._give_back()
        return super()._conclude(state)

    def _give_up(self) -> None:
        super()._give_up()
        self._give_back()

    def _give_back(self) -> None:
        while self.held:
            self.held.pop()()

    def _send(self, lists: list[Any], *, is_last: bool, steps: Sequence[LayerStep] = ()) -> None:
        mgr = self.kv_mgr
        try:
            has_row = is_last and mgr.pp_rank == mgr.pp_size - 1
            row = self.content + metadata_row(mgr.kv_args, self.aux_index) if has_row else b""
            if lists and not steps:
                steps = mgr.pool.step()  # on a device the model may still compute what this sends
            with mgr.pool.engine.step() as step:
                if self._transfer is not None:
                    if self._transfer.is_finished:
                        return  # ``poll`` says why; another SEND would be a second try, which nobody waits for
                    self._earlier.append(self._transfer)
                self._generation = mgr.pool.engine.generation
                self._transfer = step.send(
                    mgr.pool.name,
                    mgr.request_id(self.bootstrap_room),
                    lists,
                    last=is_last,
                    payload=row,
                    steps=steps,
                    checksums=mgr.checksums,
                    deadline_s=LONGEST_S,  # SGLang bounds how long decode may take to come, and decode all the rest
                )
        except KvferryError as error:
            self._fail(str(error))


class KvferryKVReceiver(_Half, CommonKVReceiver):
    """Decode's half of a request's transfer."""

    _direction = "receive"
    _sources: Sources | None = None
    init_time: float

    def init(self, prefill_dp_rank: int) -> None:
        """Learn where prefill's daemons are, and that both servers fit each other."""
        super().init(prefill_dp_rank)
        if self.conclude_state is not None:
            return
        info, mgr = self.prefill_info, self.kv_mgr
        if info.attn_cp_size != 1:
            self._fail(
                f"INVALID_FIELD: attn_cp_size: prefill has {info.attn_cp_size} context-parallel ranks: kvferry does "
                "not carry that yet"
            )  # prefill is told, too
        try:
            sources = mgr.sources(self.bootstrap_addr, prefill_dp_rank, info.attn_tp_size, info.pp_size)
            for one in sources.ranks:
                check_row(one.row, mgr.kv_args.aux_item_lens)
                identity.check_draft(one.draft, mgr.draft)
        except (InvalidFieldError, ModelMismatchError) as error:
            self._fail(str(error))
        except OSError as error:  # what requests raises is an OSError
            self._fail(f"the prefill server's bootstrap server at {self.bootstrap_addr} does not answer: {error}")
        else:
            if sources.misfit:
                self._fail(f"INVALID_FIELD: {sources.misfit}")  # prefill is told, too
            else:
                self._sources = sources

    def poll(self) -> int:
        """Return how far it is."""
        ended = self._look()
        if ended is not None:
            if ended == KVPoll.Failed:
                self.kv_mgr.forget_prefill(self.bootstrap_addr)
            return ended
        if self._transfer is not None:
            return int(KVPoll.Transferring)
        if self in self.kv_mgr.unopened and time.time() - self.init_time >= self.kv_mgr.waiting_timeout:
            self._fail(f"BUSY: the daemon had no room for the transfer within {self.kv_mgr.waiting_timeout} s")
        return int(KVPoll.Bootstrapping if self._sources is None else KVPoll.WaitingForInput)

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: object = None,  # noqa: ARG002  host destinations are not announced
        device_kv_indices: object = None,  # noqa: ARG002  of other backends
    ) -> None:
        """Have the pages filled that follow the prefix which is here; none where all of the prompt is."""
        if self.conclude_state is not None or self._is_failed() or self._sources is None:
            return
        self._row = aux_index
        self.init_time = time.time()
        first = (decode_prefix_len or 0) // self.kv_mgr.kv_args.page_size
        ids = np.asarray(kv_indices, np.int64)
        try:
            states = state_lists(self.kv_mgr.kv_args.state_types, state_indices, first + len(ids))
        except InvalidFieldError as error:
            self._fail(str(error))
            return
        self._lists = [pages(ids, first_page=first), *states] if len(ids) or states else []
        self.turn = next(self.kv_mgr.turns)
        self.open()

    def open(self) -> None:
        """Begin the transfer, unless it is begun."""
        mgr = self.kv_mgr
        if self._transfer is not None or self._sources is None or self._is_failed():
            return
        try:
            after = mgr.pool.event() if self._lists else None
            with mgr.pool.engine.step() as step:
                self._generation = mgr.pool.engine.generation
                self._transfer = step.receive(
                    mgr.pool.name,
                    request_id(self._sources.server, self.prefill_dp_rank, self.bootstrap_room),
                    self._lists,
                    sources=[one.pool for one in self._sources.ranks],
                    destinations=self._sources.destinations,
                    source_daemons=mgr.source_daemons(self._sources),
                    after=after,
                    checksums=mgr.checksums,
                    deadline_s=min(mgr.waiting_timeout, LONGEST_S),
                )
        except KvferryError as error:
            self._fail(str(error))

    def abort(self) -> None:
        """Give it up; ``poll`` says Failed once nothing can be written into its pages any more."""
        self._fail(ABORTED)
        self._cancel()

    def _others(self) -> list[tuple[str, tuple[str, ...]]]:
        mgr, others = self.kv_mgr, []
        known = mgr.known_prefills(self.bootstrap_addr)
        for rank, one in known.items() if self._sources is None else [(self.prefill_dp_rank, self._sources)]:
            daemons: tuple[str, ...] = ()
            with contextlib.suppress(InvalidFieldError):  # none that reaches there
                daemons = mgr.source_daemons(one)
            others.append((request_id(one.server, rank, self.bootstrap_room), daemons))
        return others

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Do nothing: the daemon tells the other side."""

    def _register_kv_args(self) -> bool:
        return True  # no pointers travel: each daemon knows its pools

    def _conclude(self, state: int) -> int:
        if state == KVPoll.Success:
            assert self._transfer is not None
            assert self._transfer.finished is not None
            assert self._sources is not None
            payload = self._transfer.finished.payload
            theirs, row = payload[: identity.CONTENT_BYTES], payload[identity.CONTENT_BYTES :]
            try:
                identity.check_content(theirs, self.content)
                set_metadata_row(self.kv_mgr.kv_args, self._row, row, self._sources.ranks[0].row)
            except (InvalidFieldError, ModelMismatchError) as error:
                self._fail(str(error))
                state = KVPoll.Failed
        return super()._conclude(state)


def metadata_row(args: Any, index: int | None) -> bytes:  # noqa: ANN401  SGLang's KVArgs
    """Return a request's row of metadata, one buffer after another."""
    assert index is not None
    lengths = args.aux_item_lens
    return b"".join(
        ctypes.string_at(at + index * one, one) for at, one in zip(args.aux_data_ptrs, lengths, strict=True)
    )


def check_row(theirs: Sequence[int], ours: Sequence[int]) -> None:
    """Check that prefill's metadata are decode's, but for hidden states of a draft model that one side has alone.

    Args:
        theirs: bytes of each buffer of prefill's, of one request.
        ours: the same of decode's.

    Raises:
        InvalidFieldError: they are not.
    """
    others = [pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]]
    if len(theirs) != len(ours) or len(others) > 1 or any(NO_HIDDEN_BYTES not in pair for pair in others):
        raise InvalidFieldError(
            f"prefill's metadata is {sum(theirs)} bytes a request, {sum(ours)} here: start both servers with the same "
            "options (the draft model, sampling masks, checksums)",
            field="row",
        )


def set_metadata_row(args: Any, index: int | None, row: bytes, theirs: Sequence[int]) -> None:  # noqa: ANN401
    """Write a request's row of metadata; hidden states that prefill does not have are zeros.

    Args:
        args: SGLang's KVArgs.
        index: of the row.
        row: prefill's.
        theirs: bytes of each of its buffers, which ``check_row`` has checked.

    Raises:
        InvalidFieldError: the row is not as long.
    """
    assert index is not None
    if len(row) != sum(theirs):
        raise InvalidFieldError(
            f"prefill's metadata is {len(row)} bytes, and it has said {sum(theirs)}: install the same kvferry",
            field="payload",
        )
    start = 0
    for at, ours, size in zip(args.aux_data_ptrs, args.aux_item_lens, theirs, strict=True):
        part = row[start : start + size] if size == ours else bytes(ours)
        ctypes.memmove(at + index * ours, part, ours)
        start += size
