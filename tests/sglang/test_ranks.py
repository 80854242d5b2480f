"""Ranks and stages of prefill and decode that differ: SGLang's pools and managers of all of them in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry.clients import Client
from kvferry.clients.sglang import bootstrap, transfer
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_GQA, TINY_MHA
from tests.kit.servers import AT_ONCE, LENGTHS, SIDES, Side, free_ports
from tests.sglang.in_process import LAST, PAGE, buffers_of, current_pool, manager, polled, reason, told, with_draft
from tests.sglang.servers import RANKS, Expected, assert_pages_count, assert_tokens, running_pair

TOKENS: Final = 64
DIM: Final = 8
FROM: Final = [1, 2, 3, 4]
TO: Final = [9, 7, 5, 3]
ROW_BYTES: Final = 64
ROWS: Final = 4


class Pages(NamedTuple):
    """The last pages of a prompt, at either side."""

    source: list[int]
    destination: list[int]


ALL: Final = Pages(FROM, TO)
WINDOW: Final = Pages([7, 5], [6, 2])
"""Of their own space."""


Kind: TypeAlias = Literal["mha", "narrow v", "mla", "windows"]


class Split(NamedTuple):
    """How a side splits the model: its tensor-parallel ranks, and the layers of each stage.

    ``shift``: by how much the stages after the first one say a wrong first layer. ``draft``: layers of its draft model,
    which SGLang makes in each stage. ``dp``: so many groups of such ranks attend to requests of their own.
    """

    tp: int
    stages: tuple[int, ...]
    shift: int = 0
    draft: int = 0
    dp: int = 1


class Topology(NamedTuple):
    """How both sides split a model of so many KV heads."""

    prefill: Split
    decode: Split
    heads: int = 4


WHOLE: Final = (15,)
TOPOLOGIES: Final = {
    "TP 2 to 2": Topology(Split(2, WHOLE), Split(2, WHOLE)),
    "TP 2 to 1": Topology(Split(2, WHOLE), Split(1, WHOLE)),
    "TP 1 to 2": Topology(Split(1, WHOLE), Split(2, WHOLE)),
    "TP 4 to 2": Topology(Split(4, WHOLE), Split(2, WHOLE)),
    "TP 4 to 2 of 2 heads": Topology(Split(4, WHOLE), Split(2, WHOLE), heads=2),
    "TP 1 to 4 of 2 heads": Topology(Split(1, WHOLE), Split(4, WHOLE), heads=2),
    "PP 2 to 1": Topology(Split(1, (8, 7)), Split(1, WHOLE)),
    "PP 1 to 2": Topology(Split(1, WHOLE), Split(1, (7, 8))),
    "PP 7+8 to 8+7": Topology(Split(1, (7, 8)), Split(1, (8, 7))),
    "PP 7+8 to 5+5+5": Topology(Split(1, (7, 8)), Split(1, (5, 5, 5))),
    "TP 2 PP 7+8 to TP 1 PP 8+7": Topology(Split(2, (7, 8)), Split(1, (8, 7))),
    "a draft at both": Topology(Split(1, WHOLE, draft=2), Split(1, WHOLE, draft=2)),
    "a draft at decode": Topology(Split(1, WHOLE), Split(1, WHOLE, draft=1)),
    "a draft at prefill": Topology(Split(1, WHOLE, draft=1), Split(1, WHOLE)),
    "TP 2 to 1, a draft at both": Topology(Split(2, WHOLE, draft=1), Split(1, WHOLE, draft=1)),
    "TP 1 to 4 of 2 heads, a draft at both": Topology(Split(1, WHOLE, draft=1), Split(4, WHOLE, draft=1), heads=2),
    "PP 8+7 to 1, a draft at both": Topology(Split(1, (8, 7), draft=2), Split(1, WHOLE, draft=2)),
    "PP 8+7 to 1, a draft at decode": Topology(Split(1, (8, 7)), Split(1, WHOLE, draft=2)),
    "PP 8+7 to 1, a draft at prefill": Topology(Split(1, (8, 7), draft=2), Split(1, WHOLE)),
}

SPLIT: Final = [name for name, one in TOPOLOGIES.items() if not one.prefill.draft + one.decode.draft]
"""Those without a draft model."""


class Place(NamedTuple):
    """A rank of a stage, and what of the model it has."""

    tp_rank: int
    tp_size: int
    layers: range
    heads: slice


class Content(NamedTuple):
    """A prompt's KV, (roles, layers, pages, slots, heads, dim): the model's, and the draft model's if it arrives."""

    model: torch.Tensor
    draft: torch.Tensor | None = None


class Rank(NamedTuple):
    """A rank of a stage of one side.

    Attributes:
        manager: as SGLang has it.
        sglang: its pool.
        place: what of the model it has.
        draft: that of its draft model, if it has one whose KV is the request's.
        rows: of metadata.
        tp_rank: among those that split the heads.
        dp_rank: which group it is in.
    """

    manager: transfer.KvferryKVManager
    sglang: Any
    place: Place
    draft: Any
    rows: np.ndarray[Any, np.dtype[np.uint8]]
    tp_rank: int
    dp_rank: int

    def parts(self, content: Content) -> Iterator[tuple[torch.Tensor, torch.Tensor, Pages]]:
        """Yield each buffer by pages, what of a prompt's content belongs in it, and in which pages."""
        if isinstance(self.sglang, SWAKVPool):
            for pool, pages in ((self.sglang.full_kv_pool, ALL), (self.sglang.swa_kv_pool, WINDOW)):
                yield from self._of(pool, content.model, pool.model_layer_ids, pages)
        else:
            yield from self._of(self.sglang, content.model, self.place.layers)
        if self.draft is not None and content.draft is not None:
            yield from self._of(self.draft, content.draft, range(self.draft.layer_num))

    def _of(
        self,
        sglang: Any,  # noqa: ANN401  SGLang's class
        content: torch.Tensor,
        layers: Sequence[int],
        pages: Pages = ALL,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Pages]]:
        heads = self.place.heads if isinstance(sglang, MHATokenToKVPool) else slice(None)
        for number, one in enumerate(buffers_of(sglang)):
            role, layer = divmod(number, sglang.layer_num)
            part = content[role, layers[layer], -len(pages.source) :, :, heads, : one.shape[-1]]
            yield one.view(-1, PAGE, *one.shape[1:]), part, pages

    def write(self, content: Content) -> None:
        for buffer, part, pages in self.parts(content):
            buffer[pages.source] = part

    def has(self, content: Content) -> bool:
        return all(torch.equal(buffer[pages.destination], part) for buffer, part, pages in self.parts(content))


class Sides:
    """All ranks and stages of prefill and of decode, over one daemon."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.prefill: list[Rank] = []
        self.decode: list[Rank] = []
        self._rooms = itertools.count(1)

    def open(
        self,
        destination: list[Any] | None = None,
        groups: tuple[int, int] = (0, 0),
        room: int = 0,
    ) -> tuple[list[Any], list[Any]]:
        """Have a request of all pages come to all; return the halves of prefill and of decode."""
        room = room or next(self._rooms)
        ours, theirs = (
            [one.manager for one in side if one.dp_rank == group]
            for side, group in zip((self.prefill, self.decode), groups, strict=True)
        )
        senders = [transfer.KvferryKVSender(one, self.address, room) for one in ours]
        receivers = [transfer.KvferryKVReceiver(one, self.address, room) for one in theirs]
        for receiver in receivers:
            receiver.init(groups[0])
            receiver.send_metadata(np.array(TO, np.int32), 2, destination)
        for sender in senders:
            sender.init(len(FROM), 1)
        return senders, receivers

    def begin(
        self,
        source: list[Any] | None = None,
        destination: list[Any] | None = None,
        groups: tuple[int, int] = (0, 0),
        room: int = 0,
    ) -> tuple[list[Any], list[Any]]:
        """Have a request of all pages sent and received by all; return the halves of prefill and of decode.

        ``source``, ``destination``: its states at both sides, as SGLang lists them. ``groups``: of data-parallel ranks.
        """
        senders, receivers = self.open(destination, groups, room)
        for sender in senders:
            assert polled(sender, KVPoll.WaitingForInput)
        for chunk, states in ((FROM[:2], None), (FROM[2:], source)):
            for sender in senders:
                sender.send(np.array(chunk, np.int32), states)
        return senders, receivers

    def transfer(self, *states: Any) -> None:  # noqa: ANN401  as ``begin``
        """Have a request of all pages sent and received by all."""
        for half in itertools.chain(*self.begin(*states)):
            assert polled(half, KVPoll.Success), reason(half)


def content_of(kind: Kind, topology: Topology) -> Content:
    """Return a prompt's KV."""
    chance, heads = torch.Generator().manual_seed(1), topology.heads
    shape = (1, 0, len(FROM), PAGE, 1, 2 * DIM) if kind == "mla" else (2, 0, len(FROM), PAGE, heads, DIM)
    model, draft = (
        torch.rand((shape[0], layers, *shape[2:]), generator=chance)
        for layers in (15, min(topology.prefill.draft, topology.decode.draft))
    )
    return Content(model, draft if draft.numel() else None)


def pool_of(kind: Kind, place: Place) -> Any:  # noqa: ANN401  SGLang's class
    layers, heads = place.layers, place.heads.stop - place.heads.start
    if kind == "windows":
        odd, even = ([one for one in layers if one % 2 == which] for which in (1, 0))
        numbers = {"swa_attention_layer_ids": even, "full_attention_layer_ids": odd}
        return SWAKVPool(TOKENS, TOKENS, PAGE, torch.float32, heads, DIM, **numbers, device="cpu")
    more = {"device": "cpu", "enable_memory_saver": False, "start_layer": layers[0], "end_layer": layers[-1]}
    if kind == "mla":
        return MLATokenToKVPool(TOKENS, PAGE, torch.float32, DIM, DIM, len(layers), **more)
    v_dim = DIM // 2 if kind == "narrow v" else DIM
    return MHATokenToKVPool(TOKENS, PAGE, torch.float32, heads, DIM, len(layers), v_head_dim=v_dim, **more)


def args_of(
    sglang: Any,  # noqa: ANN401  SGLang's class
    draft: Any,  # noqa: ANN401  SGLang's class
    rows: np.ndarray[Any, np.dtype[np.uint8]],
    tp_rank: int,
    stage: int,
) -> KVArgs:
    args = KVArgs()
    lists = [one.get_contiguous_buf_infos() for one in (sglang, draft) if one is not None]
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = map(list, map(itertools.chain, *lists))
    args.num_draft_entries = 0 if draft is None else len(lists[1][0])
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [rows.ctypes.data], [rows.nbytes], [ROW_BYTES]
    setup_state_kv_args(args, sglang)
    args.page_size, args.kv_cache_dtype_str = PAGE, "float32"
    args.engine_rank, args.system_dp_rank, args.pp_rank = tp_rank, 0, stage
    return args


@contextlib.contextmanager
def sides(
    daemon: Daemon,
    name: str,
    topology: Topology,
    make: Callable[[Place], Any],
    make_draft: Callable[[Place], Any] | None = None,
    model_type: str = "",
) -> Iterator[Sides]:
    """Make all pools and managers as so many processes of SGLang would.

    ``make``: a rank's pool of SGLang's; ``make_draft``: its draft model's, of the same kind where it is left out.
    """
    port = free_ports(1)[0]
    both = Sides(f"127.0.0.1:{port}")
    server = bootstrap.KvferryKVBootstrapServer("127.0.0.1", port)
    options = {
        "disaggregation_mode": "prefill", "disaggregation_transfer_backend": "kvferry", "host": "127.0.0.1",
        "disaggregation_bootstrap_port": port, "served_model_name": "tests",
    }  # fmt: skip

    def rank(side: Side, split: Split, dp_rank: int, tp_rank: int, stage: int) -> Rank:
        count = max(1, topology.heads // split.tp)
        head = tp_rank * topology.heads // split.tp
        first = sum(split.stages[:stage]) + (split.shift if stage else 0)
        place = Place(tp_rank, split.tp, range(first, first + split.stages[stage]), slice(head, head + count))
        sglang, draft = with_draft(
            lambda: make(place),
            (lambda: (make_draft or make)(place._replace(layers=range(split.draft)))) if split.draft else None,
            heads=topology.heads,
            model_type=model_type,
        )
        pool = LAST()
        assert pool is not None
        stack.callback(pool.engine.close)
        rows = np.full((ROWS, ROW_BYTES), 64 * dp_rank + 16 * stage + tp_rank + 1, np.uint8)
        mode = DisaggregationMode.PREFILL if side == "prefill" else DisaggregationMode.DECODE
        with current_pool(lambda: pool):
            one = manager(args_of(sglang, draft, rows, tp_rank, stage), mode)
        is_last = stage == len(split.stages) - 1
        return Rank(one, sglang, place, draft if is_last else None, rows, tp_rank, dp_rank)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(conn, "PPConsensusStore", lambda *_: {})
        for side, split in zip(SIDES, (topology.prefill, topology.decode), strict=True):
            environment = {
                "KVFERRY_RUNTIME_DIR": os.fspath(daemon.runtime_dir), "KVFERRY_SGLANG_POOL": f"{name}-{side}"
            }  # fmt: skip
            stages, size = len(split.stages), split.tp * split.dp
            for dp_rank, stage, tp_rank in itertools.product(range(split.dp), range(stages), range(split.tp)):
                ranks = {
                    "tp_rank": dp_rank * split.tp + tp_rank, "tp_size": size, "moe_tp_size": size,
                    "attn_tp_rank": tp_rank, "attn_tp_size": split.tp, "attn_dp_rank": dp_rank,
                    "attn_dp_size": split.dp, "pp_rank": stage, "pp_size": stages,
                }  # fmt: skip
                with told(environment, ranks, **options):
                    (both.prefill if side == "prefill" else both.decode).append(
                        rank(side, split, dp_rank, tp_rank, stage)
                    )
        with told({}, None, **options):
            for one in both.decode:
                assert one.manager.try_ensure_parallel_info(both.address)
            yield both
    del server


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_rank_and_stage_of_decode_gets_its_layers_and_heads(
    kept_daemon: Daemon, name: str, topology: str, kind: Kind
) -> None:
    one = TOPOLOGIES[topology]
    states = [[np.array(pages)] for pages in WINDOW] if kind == "windows" else []
    draft = "mha" if kind == "windows" else kind
    with sides(kept_daemon, name, one, partial(pool_of, kind), partial(pool_of, draft)) as both:
        content = content_of(kind, one)
        for rank in both.prefill:
            rank.write(content)
        assert not any(rank.has(content) for rank in both.decode)
        both.transfer(*states)
        assert all(rank.has(content) for rank in both.decode)
        last = {rank.tp_rank: rank.rows[1] for rank in both.prefill}
        for rank in both.decode:
            assert (rank.rows[2] == last[rank.tp_rank * one.prefill.tp // one.decode.tp]).all()
        for part in content._fields if content.draft is not None else ("model",):
            for rank in both.prefill:
                if rank.place.layers == both.prefill[-1].place.layers:  # the last stage, with all that hold the same
                    rank.write(content._replace(**{part: torch.zeros_like(getattr(content, part))}))
            both.transfer(*states)
            assert not all(rank.has(content) for rank in both.decode), "its pages count"


def test_each_replica_serves_the_rank_of_decode_beside_it(kept_daemon: Daemon, name: str) -> None:
    with sides(kept_daemon, name, TOPOLOGIES["TP 2 to 2"], partial(pool_of, "mla")) as both:
        content = content_of("mla", TOPOLOGIES["TP 2 to 2"]).model
        for rank in both.prefill:
            rank.write(Content(content + rank.tp_rank))
        both.transfer()
        assert all(rank.has(Content(content + rank.tp_rank)) for rank in both.decode)


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Split(1, (7, 7), shift=1), "layers 7 of decode: no stage has them at prefill (stage 0: 0 to 6, stage 1: 8 to"),
        (Split(1, (8, 8), shift=-1), "layers 7 of decode: more than one stage has them at prefill (stage 0: 0 to 7"),
        (Split(1, (8, 6)), "layers 14 of decode: no stage has them at prefill (stage 0: 0 to 7, stage 1: 8 to 13)"),
    ],
    ids=["a gap", "an overlap", "a layer too few"],
)
def test_stages_that_do_not_fit_are_refused_with_the_layer_before_a_byte_moves(
    kept_daemon: Daemon, name: str, split: Split, says: str
) -> None:
    with sides(kept_daemon, name, Topology(split, Split(1, WHOLE)), partial(pool_of, "mha")) as both:
        senders, receivers = both.open()
        assert soon(lambda: {half.poll() for half in (*senders, *receivers)} == {KVPoll.Failed})
        assert all(says in reason(one) for one in receivers)
        assert all("the other server gave the request up" in reason(one) for one in senders)


@pytest.mark.parametrize("pairs", [[(0, 0), (1, 1)], [(0, 1), (1, 0)]])
def test_requests_of_data_parallel_ranks_do_not_cross(
    kept_daemon: Daemon, name: str, pairs: list[tuple[int, int]]
) -> None:
    """Both have the same room, as two routers give it."""
    topology = Topology(Split(1, WHOLE, dp=2), Split(2, WHOLE, dp=2))
    with sides(kept_daemon, name, topology, partial(pool_of, "mha")) as both:
        content = content_of("mha", topology).model
        for rank in both.prefill:
            rank.write(Content(content + rank.dp_rank))
        halves = [half for groups in pairs for side in both.begin(groups=groups, room=7) for half in side]
        assert all(polled(half, KVPoll.Success) for half in halves)
        for ours, theirs in pairs:
            (row,) = [rank.rows[1] for rank in both.prefill if rank.dp_rank == ours]
            for rank in both.decode:
                if rank.dp_rank == theirs:
                    assert rank.has(Content(content + ours))
                    assert (rank.rows[2] == row).all()


# -- servers


class Servers(NamedTuple):
    """What each side is told, how many pools it then has, which of prefill's is wiped, and the model."""

    prefill: Sequence[str]
    decode: Sequence[str]
    pools: tuple[int, int]
    wiped: str
    model: str = TINY_MHA


PAIRS: Final = {
    "TP 2 to 1": Servers(("--tp", "2"), (), (2, 1), "prefill-tp0"),
    "TP 1 to 2": Servers((), ("--tp", "2"), (1, 2), "prefill"),
    "TP 4 to 2": Servers(("--tp", "4"), ("--tp", "2"), (4, 2), "prefill-tp0", TINY_GQA),
    "PP 2 to 1": Servers(("--pp-size", "2"), (), (2, 1), "prefill-pp1"),
    "PP 1 to 2": Servers((), ("--pp-size", "2"), (1, 2), "prefill"),
}


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_those_of_a_plain_server(
    pair: str, answers: Callable[[str], Expected], kept_daemon: Daemon, tmp_path: Path
) -> None:
    one = PAIRS[pair]
    expected = answers(one.model)
    with running_pair(
        tmp_path,
        kept_daemon.runtime_dir,
        model=one.model,
        options=["--page-size", "16"],
        prefill_options=one.prefill,
        decode_options=one.decode,
        environment=RANKS,
    ) as both:
        with Client.connect(kept_daemon.runtime_dir) as client:
            before = client.status().counters
            assert_tokens(both, expected)
            assert soon(lambda: not client.status().transfers)
            after = client.status().counters
        for direction, pools_of_it in zip(("send", "receive"), one.pools, strict=True):
            name = f"transfers.{direction}.ok"
            prompts = len(LENGTHS) + len(AT_ONCE)
            assert after[name] - before.get(name, 0) == pools_of_it * prompts, direction
        assert_pages_count(both, kept_daemon.runtime_dir, expected, one.wiped)
