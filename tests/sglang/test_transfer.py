"""Manager, sender, receiver and bootstrap server as SGLang's schedulers call them, without servers."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import ctypes
import enum
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import requests
import sglang
import torch
from sglang.srt.disaggregation.ascend.conn import AscendStateType
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.checksum import KvChecksumComputer
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_parallel
from urllib3.util import Retry

from kvferry.clients.places import place_of
from kvferry.clients.sglang import bootstrap, carried, transfer
from kvferry.daemon.transports import local
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol.errors import InvalidFieldError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.in_process import serving
from tests.kit.servers import free_ports
from tests.sglang.in_process import (
    PAGE,
    ROW_BYTES,
    ROWS,
    SOON_S,
    Halves,
    current_pool,
    halves,
    manager,
    mha_pool,
    mla_pool,
    polled,
    reason,
)

KINDS: Final = (*StateType, *AscendStateType)
"""Of states."""


class Other(enum.Enum):
    """What another release may have."""

    NEW = "of another release"


NOTHING: Final[Callable[[Any], None]] = lambda _: None  # noqa: E731  what a case changes
LARGEST_PAYLOAD: Final = 2 << 20
FROM: Final = [1, 2, 3, 4]
TO: Final = [40, 30, 20, 10]
POOLS: Final[dict[str, tuple[Any, dict[str, str]]]] = {
    "mha": (mha_pool, {}),
    "mla": (mla_pool, {}),
    "mha-of-the-engine": (mha_pool, {"KVFERRY_SGLANG_MEMORY": "engine"}),
}


@pytest.fixture(scope="module", params=["mha", "mla", pytest.param("mha-of-the-engine", marks=pytest.mark.long)])
def both(request: pytest.FixtureRequest, kept_daemon: Daemon) -> Iterator[Halves]:
    make, environment = POOLS[request.param]
    with halves(kept_daemon.runtime_dir, make, KVFERRY_SGLANG_POOL=request.param, **environment) as one:
        yield one


@pytest.fixture(scope="module")
def mha(kept_daemon: Daemon) -> Iterator[Halves]:
    with halves(kept_daemon.runtime_dir, mha_pool, KVFERRY_SGLANG_POOL="of-mha") as one:
        yield one


def ids(page_ids: list[int]) -> Any:  # noqa: ANN401  an array
    return np.array(page_ids, np.int32)


def test_pool_of_sglang_is_the_daemons(both: Halves) -> None:
    lists = both.pool.lists
    theirs = both.sglang.get_contiguous_buf_infos()
    assert tuple(map(list, theirs)) == (list(lists.data_ptrs), list(lists.data_lens), list(lists.item_lens))


def longer(field: str) -> Callable[[Any], None]:
    """Return what makes the last of something longer that a scheduler says of its pool."""
    return lambda args: setattr(args, field, [*getattr(args, field)[:-1], getattr(args, field)[-1] + 64])


def saying(field: str, value: object) -> Callable[[Any], None]:
    """Return what has a scheduler say something else."""
    return lambda args: setattr(args, field, value)


REFUSED: Final[list[tuple[str, Callable[[Any], None], dict[str, Any], dict[str, Any]]]] = [
    *(
        ("addresses, lengths or page sizes differ", longer(field), {}, {})
        for field in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    ),
    *(
        (f"state of the kind {kind.value} .*do not have {missing}.* yet", saying("state_types", [kind]), {}, {})
        for kind, missing in (*((kind, carried.MISSING.get(kind.value, "")) for kind in KINDS), (Other.NEW, "it"))
        if kind not in carried.COMPONENTS
    ),
    (
        "metadata is 2097153 bytes, the daemon has room for 2097120",
        saying("aux_item_lens", [LARGEST_PAYLOAD, 1]), {}, {},
    ),
    ("2 context-parallel ranks yet", NOTHING, {"attn_cp_size": 2, "tp_size": 2, "moe_tp_size": 2}, {}),
    ("2 decode context-parallel ranks yet", NOTHING, {"attn_dcp_size": 2}, {}),
    ("--enable-kv-cache-sharding yet", NOTHING, {"enable_kv_cache_sharding": True}, {}),
    (
        "--disaggregation-decode-allocation-policy", NOTHING, {},
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
@pytest.mark.parametrize(("says", "change", "ranks", "options"), REFUSED)
def test_what_is_not_carried_is_refused_by_name(
    mha: Halves,
    says: str,
    change: Callable[[Any], None],
    ranks: dict[str, Any],
    options: dict[str, Any],
    mode: DisaggregationMode,
) -> None:
    args = copy.copy(mha.prefill.kv_args)
    change(args)
    with (
        get_parallel().override(**ranks),
        get_context().override_server_args(disaggregation_mode=mode.value, **options),
        pytest.raises(InvalidFieldError, match=says),
    ):
        manager(args, mode)


def test_each_of_sglangs_state_types_is_carried_or_what_is_missing_is_known() -> None:
    """Wherever SGLang has them."""
    sources = [file.read_text() for file in (Path(sglang.__file__).parent / "srt").rglob("*.py")]
    classes = [
        one
        for text in sources if "StateType(" in text
        for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ClassDef) and one.name.endswith("StateType")
    ]  # fmt: skip
    values = sorted(ast.literal_eval(one.value) for kind in classes for one in kind.body if isinstance(one, ast.Assign))
    assert values == sorted(kind.value for kind in KINDS)
    assert values == sorted([*(kind.value for kind in carried.COMPONENTS), *carried.MISSING])


def test_pool_that_is_not_the_daemons_is_refused_by_name(mha: Halves) -> None:
    with current_pool(lambda: None), pytest.raises(InvalidFieldError, match="this kind of KV pool"):
        manager(mha.prefill.kv_args, DisaggregationMode.PREFILL)


def test_pages_and_metadata_arrive(both: Halves) -> None:
    room = both.new_room()
    both.fill(FROM, 7.0)
    both.fill(TO, 1.0)
    both.rows[1], both.rows[2] = np.arange(ROW_BYTES) % 251, 0
    both.counts[1], both.counts[2] = (7, -8), 0
    sender, receiver = both.sender(room, len(FROM), row=1), both.receiver(room)
    assert sender.poll() == KVPoll.Bootstrapping
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.send_metadata(ids(TO), 2)
    assert polled(sender, KVPoll.WaitingForInput)
    sender.send(ids(FROM[:3]))
    assert receiver.poll() == KVPoll.Transferring
    sender.send(ids(FROM[3:]))
    assert polled(receiver, KVPoll.Success)
    assert polled(sender, KVPoll.Success)
    assert (both.tokens(TO) == 7).all()
    assert (both.rows[2] == both.rows[1]).all()
    assert (both.counts[2] == both.counts[1]).all()
    metric = sender.get_transfer_metric()
    assert metric.transfer_total_bytes == len(FROM) * sum(both.pool.lists.item_lens)
    assert metric.transfer_latency_s > 0
    sender.clear()
    receiver.clear()
    assert both.transfers() == []


@pytest.mark.parametrize("prefix", [2, len(FROM)])
def test_prefix_at_decode_is_not_written(both: Halves, prefix: int) -> None:
    """Of a whole prompt at decode only metadata travel."""
    room = both.new_room()
    both.fill(FROM, 7.0)
    both.fill(TO, 1.0)
    both.rows[1], both.rows[2] = 5, 0
    receiver, sender = both.receiver(room), both.sender(room, len(FROM), row=1)
    receiver.send_metadata(ids(TO[prefix:]), 2, decode_prefix_len=prefix * PAGE)
    sender.send(ids(FROM))
    assert polled(receiver, KVPoll.Success)
    assert polled(sender, KVPoll.Success)
    assert (both.tokens(TO[:prefix]) == 1).all()
    assert (both.tokens(TO[prefix:]) == 7).all()
    assert (both.rows[2] == 5).all()
    moved = sender.get_transfer_metric().transfer_total_bytes
    assert moved == len(FROM[prefix:]) * sum(both.pool.lists.item_lens)


def copy_wrongly(blocks: Blocks) -> None:
    """Copy, and flip a bit of what was copied first."""
    copy_one_by_one(blocks)
    ctypes.c_uint8.from_address(int(blocks[0, 1])).value ^= 1


@contextlib.contextmanager
def daemon_that_copies_wrongly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run a daemon on a thread, and return where it is."""
    monkeypatch.setattr(local, "best_copy", lambda: copy_wrongly)
    ready: Future[tuple[Path, Callable[[], object]]] = Future()

    async def serve() -> None:
        async with serving() as one:
            loop = asyncio.get_running_loop()
            ready.set_result((one.path, partial(loop.call_soon_threadsafe, one.stopping.set)))
            await one.stopping.wait()

    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(asyncio.run, serve())
        path, stop = ready.result(SOON_S)
        try:
            yield path
        finally:
            stop()
            ends.result(SOON_S)


@pytest.mark.parametrize("asks", ["prefill", "decode", "nobody"])
def test_byte_that_is_not_prefills_fails_the_request_where_checksums_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    with (
        daemon_that_copies_wrongly(monkeypatch) as runtime_dir,
        halves(runtime_dir, mha_pool, KVFERRY_SGLANG_POOL="damaged") as both,
    ):
        if asks != "nobody":
            with get_context().override_server_args(
                disaggregation_mode=asks,
                disaggregation_bootstrap_port=int(both.address.partition(":")[2]),
                disaggregation_enable_kv_checksum=True,
            ):
                made = manager(both.prefill.kv_args, DisaggregationMode(asks))
            assert asks == "prefill" or made.try_ensure_parallel_info(both.address)
            setattr(both, asks, made)
        both.fill(FROM, 7.0)
        both.fill(TO, 1.0)
        room = both.new_room()
        sender, receiver = both.sender(room, len(FROM)), both.receiver(room)
        receiver.send_metadata(ids(TO), 2)
        sender.send(ids(FROM))
        ended = KVPoll.Success if asks == "nobody" else KVPoll.Failed
        assert polled(receiver, ended)
        assert polled(sender, ended)
        assert not (both.tokens(TO) == 7).all()
        if asks != "nobody":
            assert "has other bytes than the source sent" in reason(receiver)


@pytest.mark.parametrize("backend", ["kvferry", "mooncake"])
def test_sglangs_own_checksum_is_left_out_where_the_daemon_compares(mha: Halves, backend: str) -> None:
    """SGLang takes 0 for no checksum; its own takes CUDA tensors only."""
    args = mha.prefill.kv_args
    own = KvChecksumComputer(torch.device("cpu"), args.kv_data_ptrs, args.kv_item_lens)
    with get_context().override_server_args(disaggregation_mode="prefill", disaggregation_transfer_backend=backend):
        if backend == "kvferry":
            assert own.compute(torch.tensor(FROM)) == 0
        else:
            with pytest.raises(AssertionError):
                own.compute(torch.tensor(FROM))


def have_reached(both: Halves, state: str) -> tuple[Any, Any]:
    """Return both halves of a request: prefill's is open, has been found by decode, or has sent a chunk."""
    room = both.new_room()
    sender, receiver = both.sender(room, len(FROM)), both.receiver(room)
    if state != "opened":
        receiver.send_metadata(ids(TO), 2)
        assert polled(sender, KVPoll.WaitingForInput)
    if state == "sending":
        sender.send(ids(FROM[:2]))
    return sender, receiver


@pytest.mark.parametrize("way", ["abort", "clear"])
@pytest.mark.parametrize("reached", ["opened", "waiting", "sending"])
def test_prefill_that_gives_up_is_heard(mha: Halves, way: str, reached: str) -> None:
    """SGLang clears a request whose other ranks have failed without an abort."""
    sender, receiver = have_reached(mha, reached)
    getattr(sender, way)()
    if reached == "opened":
        receiver.send_metadata(ids(TO), 2)
    assert polled(receiver, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(receiver)
    assert mha.transfers() == []


@pytest.mark.parametrize("way", ["abort", "clear"])
@pytest.mark.parametrize("reached", ["opened", "waiting", "sending"])
def test_decode_that_gives_up_is_heard(mha: Halves, way: str, reached: str) -> None:
    sender, receiver = have_reached(mha, reached)
    getattr(receiver, way)()
    if reached != "opened":
        assert receiver.poll() is not None  # by which the scheduler, in this state, gives up
    assert polled(sender, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(sender)
    if way == "abort":
        assert polled(receiver, KVPoll.Failed)
        assert "Aborted" in reason(receiver)
    assert mha.transfers() == []


def test_prefill_of_context_parallel_ranks_hears_that_decode_refuses_it(mha: Halves) -> None:
    room = mha.new_room()
    sender = mha.sender(room, len(FROM))
    before = mha.decode.prefill_info_table[mha.address]
    other = copy.copy(before)
    other.attn_cp_size = 2
    mha.decode.prefill_info_table[mha.address] = other
    receiver = mha.receiver(room)
    mha.decode.prefill_info_table[mha.address] = before
    assert polled(receiver, KVPoll.Failed)
    assert "INVALID_FIELD: attn_cp_size: prefill has 2 context-parallel ranks" in reason(receiver)
    assert polled(sender, KVPoll.Failed)


def test_a_side_that_is_refused_is_heard(mha: Halves) -> None:
    room = mha.new_room()
    sender, receiver = mha.sender(room, len(FROM)), mha.receiver(room)
    receiver.send_metadata(ids([1 << 20]), 2)
    assert polled(receiver, KVPoll.Failed)
    assert "PAGE_OUT_OF_RANGE" in reason(receiver)
    assert polled(sender, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(sender)
    room = mha.new_room()
    receiver = mha.receiver(room)
    receiver.send_metadata(ids(TO), 2)
    name = mha.pool.name
    mha.pool.name = "no-such-pool"
    sender = mha.sender(room, len(FROM))
    assert polled(sender, KVPoll.Failed)
    assert "no-such-pool" in reason(sender)
    mha.pool.name = name
    assert polled(receiver, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(receiver)


@pytest.mark.parametrize("early", ["send", "receive"])
def test_half_that_ended_with_its_daemon_is_heard_by_the_one_that_comes_to_the_next(
    mha: Halves, kept_daemon: Daemon, early: str
) -> None:
    """The next daemon knows nothing of it: the late half would wait for its whole deadline."""
    room = mha.new_room()
    first = mha.sender(room, len(FROM)) if early == "send" else mha.receiver(room)
    if early == "receive":
        first.send_metadata(ids(TO), 2)
    assert first.poll() != KVPoll.Failed
    kept_daemon.restart(signal.SIGKILL)
    assert polled(first, KVPoll.Failed)
    assert "STALE_BOOT" in reason(first)
    late = mha.receiver(room) if early == "send" else mha.sender(room, len(FROM))
    if early == "send":
        late.send_metadata(ids(TO), 2)
    assert polled(late, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(late)


def test_pages_are_free_once_a_half_is_cleared(mha: Halves) -> None:
    """SGLang uses a cleared request's pages at once: nothing may be written into them afterwards."""
    room = mha.new_room()
    mha.fill(FROM, 7.0)
    mha.fill(TO, 1.0)
    sender, receiver = mha.sender(room, len(FROM)), mha.receiver(room)
    receiver.send_metadata(ids(TO), 2)
    receiver.clear()
    sender.send(ids(FROM))
    assert polled(sender, KVPoll.Failed)
    assert (mha.tokens(TO) == 1).all()


@pytest.mark.parametrize(("side", "way"), [("receive", "clear"), ("send", "clear"), ("send", "abort")])
def test_pages_are_held_back_for_as_long_as_the_daemon_does_not_let_go_of_them(
    mha: Halves,
    kept_daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    side: str,
    way: str,
) -> None:
    """SGLang uses the pages again as soon as these calls return."""
    monkeypatch.setattr(transfer, "CANCEL_S", 0.1)
    sender, receiver = have_reached(mha, "sending")
    first, other = (sender, receiver) if side == "send" else (receiver, sender)
    with kept_daemon.stopped():
        waits = threading.Thread(target=getattr(first, way))
        waits.start()
        assert soon(lambda: "this server waits until its pages can be used again" in caplog.text)
        assert waits.is_alive()
    waits.join(SOON_S)
    assert not waits.is_alive()
    assert polled(other, KVPoll.Failed)
    assert "PEER_CANCELLED" in reason(other)


def test_prefill_that_gives_up_after_its_last_chunk_does_not_wait(mha: Halves, kept_daemon: Daemon) -> None:
    """SGLang asks until it is told Failed, and uses the pages only then."""
    sender, receiver = have_reached(mha, "sending")
    with kept_daemon.stopped():
        sender.send(ids(FROM[2:]))
        sender.abort()
        assert sender.poll() == KVPoll.Transferring
    assert polled(sender, KVPoll.Failed)
    assert "Aborted" in reason(sender)
    receiver.clear()


def test_requests_of_two_prefill_servers_with_equal_rooms_do_not_cross(mha: Halves, kept_daemon: Daemon) -> None:
    with halves(kept_daemon.runtime_dir, mha_pool, KVFERRY_SGLANG_POOL="of-another") as another:
        mha.fill(FROM, 3.0)
        another.fill(FROM, 5.0)
        room = mha.new_room()
        receiver = another.receiver(room)
        receiver.send_metadata(ids(TO), 2)
        assert looked(receiver)
        stranger = mha.sender(room, len(FROM))
        stranger.send(ids(FROM))
        assert soon(lambda: looked(stranger) and len(mha.transfers()) != 1)
        sender = another.sender(room, len(FROM))
        sender.send(ids(FROM))
        assert polled(receiver, KVPoll.Success)
        assert (another.tokens(TO) == 5).all()
        assert polled(sender, KVPoll.Success)
        stranger.abort()
        assert polled(stranger, KVPoll.Failed)


@pytest.fixture
def narrow() -> Iterator[Halves]:
    """Return halves whose daemon has room for two of them."""
    with (
        kit.daemon("[limits]\nmax_transfers_per_session = 2\n", keep=True) as daemon,
        halves(daemon.runtime_dir, mha_pool, KVFERRY_SGLANG_POOL="narrow") as one,
    ):
        yield one


def test_requests_that_the_daemon_has_no_room_for_wait_in_turn(narrow: Halves) -> None:
    """SGLang opens a transfer for each request that has come, however many they are."""
    rooms = [narrow.new_room() for _ in range(4)]
    senders = [narrow.sender(room, len(FROM)) for room in rooms]
    of = [narrow.prefill.request_id(room) for room in rooms]
    assert soon(lambda: looked(*reversed(senders)) and len(waiting(narrow)) == 2)
    assert waiting(narrow) == senders[2:]
    assert [one.poll() for one in senders] == [KVPoll.Bootstrapping] * 4
    for first in senders[:2]:
        first.abort()
        assert polled(first, KVPoll.Failed)
        assert soon(lambda: looked(*senders) and len(narrow.transfers()) == 2)
    assert sorted(narrow.transfers()) == of[2:]
    assert soon(lambda: looked(*senders) and not waiting(narrow))


def test_decode_waits_for_room_too(narrow: Halves) -> None:
    narrow.fill(FROM, 7.0)
    narrow.fill(TO, 1.0)
    room = narrow.new_room()
    sender, other, receiver = narrow.sender(room, len(FROM)), narrow.sender(narrow.new_room()), narrow.receiver(room)
    receiver.send_metadata(ids(TO), 2)
    assert polled(receiver, KVPoll.WaitingForInput)
    other.abort()
    assert soon(lambda: looked(receiver) and bool(sender.poll() == KVPoll.WaitingForInput))
    sender.send(ids(FROM))
    assert polled(receiver, KVPoll.Success)
    assert (narrow.tokens(TO) == 7).all()


def test_who_waits_for_room_for_too_long_fails(narrow: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    room = narrow.new_room()
    senders, receiver = (
        [narrow.sender(room), *(narrow.sender(narrow.new_room()) for _ in range(2))],
        narrow.receiver(room),
    )
    receiver.send_metadata(ids(TO), 2)
    assert soon(lambda: looked(receiver, *senders) and len(waiting(narrow)) == 2)
    monkeypatch.setattr(narrow.prefill, "bootstrap_timeout", 0)
    monkeypatch.setattr(narrow.decode, "waiting_timeout", 0)
    for one in (receiver, *senders):
        assert polled(one, KVPoll.Failed)
    assert "BUSY" in reason(receiver)
    assert "timed out" in reason(senders[2])
    assert waiting(narrow) == []


def looked(*some: Any) -> bool:  # noqa: ANN401  of SGLang's methods, too
    """Have these halves asked, as the scheduler does in each of its rounds."""
    return [one.poll() for one in some] != []


def waiting(both: Halves) -> list[Any]:
    """Return the halves that wait for room in the daemon."""
    return [*both.prefill.unopened, *both.decode.unopened]


@pytest.mark.parametrize("lengths", [[ROW_BYTES - 8, 16], [transfer.NO_HIDDEN_BYTES, 8], [ROW_BYTES]])
def test_metadata_of_other_lengths_fail_at_both_before_a_page_is_sent(mha: Halves, lengths: list[int]) -> None:
    room = mha.new_room()
    args = copy.copy(mha.decode.kv_args)
    args.aux_item_lens = lengths
    sender, receiver = mha.sender(room, len(FROM)), mha.receiver(room, mha.decode_with(args))
    receiver.send_metadata(ids(TO), 2)
    assert polled(receiver, KVPoll.Failed)
    assert "start both servers with the same options" in reason(receiver)
    assert polled(sender, KVPoll.Failed)


def test_hidden_states_that_only_one_side_has_are_zeros(mha: Halves) -> None:
    """The rest of the metadata is where it belongs."""
    args, hidden = copy.copy(mha.decode.kv_args), np.full((ROWS, 100), 9, np.uint8)
    hidden_at, counts_at = hidden.ctypes.data, args.aux_data_ptrs[1]
    args.aux_data_ptrs, args.aux_item_lens = [hidden_at, counts_at], [100, 16]
    row = bytes(range(transfer.NO_HIDDEN_BYTES)) + bytes(range(16))
    transfer.check_row((transfer.NO_HIDDEN_BYTES, 16), args.aux_item_lens)
    transfer.set_metadata_row(args, 2, row, (transfer.NO_HIDDEN_BYTES, 16))
    assert [row.any() for row in hidden] == [True, True, False, True]
    assert mha.counts[2].tobytes() == row[-16:]
    with pytest.raises(InvalidFieldError, match="is 79 bytes, and it has said 80"):
        transfer.set_metadata_row(args, 2, row[1:], (transfer.NO_HIDDEN_BYTES, 16))


def test_prefill_says_where_its_daemon_is_before_it_counts_as_ready(
    mha: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    request, this = requests.Session.request, threading.get_ident()

    def noted(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:  # noqa: ANN401
        if threading.get_ident() == this:  # decode managers ask for the health of theirs, until the process ends
            said.append(url.rpartition("/")[2])
        return request(session, method, url, **options)

    monkeypatch.setattr(requests.Session, "request", noted)
    mha.prefill.register_to_bootstrap()
    assert said == ["kvferry", "route"]


def test_ranks_wait_until_the_bootstrap_server_has_started(mha: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang starts it after them."""
    servers: list[bootstrap.KvferryKVBootstrapServer] = []
    port = free_ports(1)[0]
    wait = Retry.sleep

    def start_and_wait(retry: Retry, response: Any = None) -> None:  # noqa: ANN401  urllib3's
        if not servers:
            servers.append(bootstrap.KvferryKVBootstrapServer("127.0.0.1", port))
        wait(retry, response)

    monkeypatch.setattr(Retry, "sleep", start_and_wait)
    monkeypatch.setattr(mha.prefill, "bootstrap_port", port)
    mha.prefill.register_to_bootstrap()
    known = requests.get(f"http://127.0.0.1:{port}{bootstrap.ROUTE}", params={"dp": "0"}, timeout=5)
    assert [one["pool"] for one in known.json()["ranks"]] == ["of-mha"]


RANK: Final[dict[str, Any]] = {
    "handshake": 1,
    "rank": "7/0/0",
    "pool": "p",
    "layers": [0],
    "row": [64, 16],
    "host": "127.0.0.1",
    "place": "boot/1/2",
    "daemons": ["ipc:///x"],
    "boot_id": "0" * 32,
}


def route(both: Halves) -> str:
    return f"http://{both.address}{bootstrap.ROUTE}"


def said_of(both: Halves, dp_rank: int) -> Any:  # noqa: ANN401  of JSON
    return requests.get(route(both), params={"dp": str(dp_rank)}, timeout=5).json()["ranks"]


def test_bootstrap_server_keeps_what_ranks_say_and_not_more(mha: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests.put(route(mha), json=RANK, timeout=5).status_code == 200
    assert said_of(mha, 7) == [{**RANK, "draft": ""}]
    monkeypatch.setattr(bootstrap, "MOST_RANKS", 0)
    assert requests.put(route(mha), json={**RANK, "rank": "8/0/0"}, timeout=5).status_code == 507
    assert said_of(mha, 8) == []
    (known,) = said_of(mha, 0)
    assert requests.put(route(mha), json=known, timeout=5).status_code == 200


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "truncated"),
        (b'{"handshake": 1}', "missing required field `host`"),
        ({**RANK, "daemons": ["tcp://no address"]}, "daemons[0]"),
        ({**RANK, "daemons": ["ipc:///x"] * 9}, "daemons"),
        ({**RANK, "rank": "../7"}, "rank"),
        ({**RANK, "host": "h" * 257}, "host"),
        ({**RANK, "place": "a\nb"}, "place"),
        ({**RANK, "row": [0]}, "row"),
        ({**RANK, "row": [64] * 65}, "row"),
        ({**RANK, "more": 1}, "more"),
    ],
)
def test_bootstrap_server_refuses_what_is_no_rank(mha: Halves, body: bytes | dict[str, Any], what: str) -> None:
    sent: Any = {"data": body} if isinstance(body, bytes) else {"json": body}
    reply = requests.put(route(mha), timeout=5, **sent)
    assert reply.status_code == 400
    assert what in reply.text


def test_daemon_of_this_host_is_found_by_ipc_and_another_one_by_tcp(mha: Halves, tmp_path: Path) -> None:
    """Two machines, or containers, may have the same address, and the same path for another daemon's socket."""
    ipc, tcp = daemons = (f"ipc://{tmp_path}/peer.sock", "tcp://10.0.0.1:7801")
    own = mha.own_daemons()

    def found(**said: object) -> tuple[str, ...]:
        here = {**RANK, "host": mha.decode.local_ip, "place": place_of(daemons), "daemons": daemons}
        rank = msgspec.convert({**here, **said}, bootstrap.PrefillRank)
        return mha.decode.source_daemons(bootstrap.Sources(server="0" * 32, ranks=(rank, rank), destinations=1))

    assert found() == (ipc,)
    for other in (
        {"place": "another-kernel/1/2"},
        {"place": ""},
        {"host": "10.0.0.1"},
        {"daemons": ["ipc:///nowhere/peer.sock", tcp]},
    ):
        assert found(**other) == (tcp,)
    assert found(host="10.0.0.1", place=place_of(own), daemons=own) == (), "our own is known after its restart"
    with pytest.raises(InvalidFieldError, match=r"no address tcp:// of its own .* peers\.listen"):
        found(place="another-kernel/1/2", daemons=daemons[:1])


def test_prefill_of_another_version_or_of_another_backend_is_refused(mha: Halves) -> None:
    requests.put(route(mha), json={**RANK, "rank": "5/0/0", "handshake": 99}, timeout=5)
    with pytest.raises(InvalidFieldError, match="another version of kvferry's plugin"):
        mha.decode.sources(mha.address, 5, 1, 1)
    with pytest.raises(InvalidFieldError, match="--disaggregation-transfer-backend kvferry"):
        mha.decode.sources(mha.address, 6, 1, 1)
    known = {**RANK, "rank": "9/0/0", "handshake": bootstrap.HANDSHAKE}
    requests.put(route(mha), json=known, timeout=5)
    with pytest.raises(InvalidFieldError, match="1 ranks have registered of 2"):
        mha.decode.sources(mha.address, 9, 2, 1)


def test_nothing_is_left_in_the_daemon(mha: Halves) -> None:
    assert soon(lambda: mha.transfers() == [])
