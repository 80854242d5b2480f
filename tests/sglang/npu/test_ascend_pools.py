"""SGLang's own pools for NPUs in the daemon's memory, or registered, are to SGLang what they are without kvferry.

The peer is SGLang 0.5.23: ``NPUMHATokenToKVPool`` and ``NPUMLATokenToKVPool`` of
``sglang/srt/hardware_backend/npu/memory_pool_npu.py``, lines 88 and 629, with ``get_contiguous_buf_infos`` (228, 945),
``get_state_buf_infos`` (875) and ``set_kv_buffer`` (263, 997).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.disaggregation.utils import MetadataBuffers

from kvferry.clients.devices import daemons_device
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import pools
from kvferry.protocol.errors import InvalidFieldError
from tests.kit.daemons import Daemon
from tests.kit.tables import with_tables
from tests.sglang.in_process import LAST, chosen, current_pool, told, with_draft
from tests.sglang.npu.docs_table import DOCUMENT, TABLES
from tests.sglang.npu.pools import (
    DRAFTS,
    FIA,
    FIRST_LAYER,
    HYBRIDS,
    INDEXED,
    KINDS,
    LAYERS,
    NOT_SERVED,
    NZ,
    PAGE,
    REFUSED,
    SERVED,
    TOKENS,
    WRITTEN,
    Kind,
    Refused,
    tensors_of,
)


class Made(NamedTuple):
    """A pool as SGLang has it without kvferry, one with it, and the latter as the daemon has it."""

    kind: Kind
    plain: Any
    ours: Any
    pool: EnginePool


def environment_of(daemon: Daemon, kind: Kind, memory: str = "daemon", name: str = "other") -> Mapping[str, str]:
    told = {"KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_POOL": name}
    return {**told, "KVFERRY_SGLANG_MEMORY": memory, **kind.environment}


@pytest.fixture(scope="module", params=["daemon", "engine"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, memory: str, daemon: Daemon) -> Iterator[Made]:
    kind = KINDS[request.param]
    with told(kind.environment):
        plain = kind.make()
    with chosen(environment_of(daemon, kind, memory, "made")), current_pool(lambda: None):
        ours = kind.make()
    pool = LAST()
    assert pool is not None
    yield Made(kind, plain, ours, pool)
    pool.engine.close()


def test_every_attribute_is_as_sglang_makes_it(made: Made) -> None:
    """So whatever SGLang reads from a pool, it finds; the shape says whether a buffer is FIA's."""
    assert vars(made.ours).keys() == vars(made.plain).keys()
    assert shapes_of(made.ours) == shapes_of(made.plain)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_models_pool_is_part_of_the_models(name: str, memory: str, daemon: Daemon) -> None:
    """Both are as SGLang makes them, and their lists those of the daemon's pool, one after the other."""
    kinds = KINDS[name], DRAFTS[name]
    with told(kinds[0].environment):
        plain = [kind.make() for kind in kinds]
    with chosen(environment_of(daemon, kinds[0], memory, "drafted")):
        model, draft = with_draft(*(kind.make for kind in kinds), heads=kinds[1].given.get("head_num", 1))
    pool = LAST()
    assert pool is not None
    for ours, theirs in zip((model, draft), plain, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert shapes_of(ours) == shapes_of(theirs)
        assert ours.get_contiguous_buf_infos()[1:] == theirs.get_contiguous_buf_infos()[1:]
    for ours, *theirs in zip(
        [pool.lists.data_ptrs, pool.lists.data_lens, pool.lists.item_lens],
        *(one.get_contiguous_buf_infos() for one in (model, draft)),
        strict=True,
    ):
        assert [*ours] == [*theirs[0], *theirs[1]]
    assert (pool.first_layer, pool.layers) == (FIRST_LAYER, LAYERS)
    pool.engine.close()


def shapes_of(pool: Any) -> dict[str, list[object]]:  # noqa: ANN401  SGLang's class
    """Return all tensors' shapes, types, strides and devices, by attribute."""
    return {
        name: [(one.shape, one.dtype, one.stride(), one.device) for one in found]
        for name, found in tensors_of(pool).items()
    }


def test_its_lists_are_those_that_the_daemon_transfers_by(made: Made) -> None:
    data_ptrs, data_lens, item_lens = made.ours.get_contiguous_buf_infos()
    lists = made.pool.lists
    assert [*lists.data_ptrs] == data_ptrs
    assert ([*lists.data_lens], [*lists.item_lens]) == (data_lens, item_lens)
    assert (data_lens, item_lens) == made.plain.get_contiguous_buf_infos()[1:]
    assert made.ours.get_kv_size_bytes() == made.plain.get_kv_size_bytes()


@pytest.mark.parametrize("made", INDEXED, indirect=True)
def test_the_indexers_keys_are_among_them(made: Made) -> None:
    """SGLang sends them by these lists; as states it lists them, too."""
    lists = made.pool.lists
    listed = set(zip(lists.data_ptrs, lists.data_lens, lists.item_lens, strict=True))
    assert set(zip(*made.ours.get_state_buf_infos(), strict=True)) <= listed
    assert any(name.startswith("main/index_k/") for name in lists.names)


@pytest.mark.parametrize("made", WRITTEN, indirect=True)
def test_what_sglang_writes_is_in_the_daemons_pages(made: Made) -> None:
    """In the page and row of the slot, in each layer; the same bytes as in SGLang's own memory."""
    slots = torch.tensor([PAGE + 3, 5 * PAGE, TOKENS + PAGE - 1])
    for layer in range(FIRST_LAYER, FIRST_LAYER + LAYERS):
        key, value = (torch.randn(3, *shape).to(made.kind.given["dtype"]) for shape in widths(made.kind))
        for one in (made.plain, made.ours):
            one.set_kv_buffer(SimpleNamespace(layer_id=layer), slots.to("npu"), key.to("npu"), value.to("npu"))
    for role in ("k", "v"):
        ours, theirs = (
            made.pool.tensor(role).cpu(),
            [one.cpu().flatten() for one in getattr(made.plain, f"{role}_buffer")],
        )
        assert torch.equal(ours.flatten(), torch.cat(theirs))
        assert set(ours.flatten(2).any(-1).nonzero()[:, 1].tolist()) == {1, 5, TOKENS // PAGE}


def widths(kind: Kind) -> list[tuple[int, ...]]:
    """Return the shape of a token's key and value."""
    given = kind.given
    if "head_num" in given:
        return [(given["head_num"], given["head_dim"]), (given["head_num"], given["v_head_dim"])]
    return [(1, given["kv_lora_rank"]), (1, given["qk_rope_head_dim"])]


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_is_not_carried_is_refused_by_name(refused: Refused, daemon: Daemon) -> None:
    """Also where one pool is made before another is refused."""
    before = LAST()

    def made() -> EnginePool | None:
        return None if LAST() is before else LAST()

    with (
        chosen({**environment_of(daemon, KINDS["mha"]), **refused.environment}),
        current_pool(made),
        pytest.raises(InvalidFieldError, match=f"does not carry {refused.says}.*choose another") as error,
    ):
        refused.make()
    assert error.value.field == "disaggregation_transfer_backend"
    first = made()
    if first is not None:
        first.engine.close()


def test_another_device_is_refused_by_name(daemon: Daemon) -> None:
    kind = KINDS["mha"]
    with (
        chosen(environment_of(daemon, kind)),
        current_pool(lambda: None),
        pytest.raises(InvalidFieldError, match="does not carry a KV pool on cpu"),
    ):
        kind._replace(given={**kind.given, "device": "cpu"}).make()


def test_the_documented_table_is_what_these_tests_run() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text, TABLES) == text, "python -m tests.sglang.npu.docs_table"
    assert {*SERVED, *NOT_SERVED} == {*KINDS, *HYBRIDS}
    for test in SERVED.values():
        module, _, name = test.partition(".")
        assert inspect.isfunction(getattr(importlib.import_module(f"tests.sglang.npu.{module}"), name))


@pytest.mark.parametrize(("name", "environment", "layouts"), [("mha", FIA, 1), ("mla", NZ, 2)])
def test_fia_changes_no_byte_of_a_page_and_nz_does(
    name: str,
    environment: dict[str, str],
    layouts: int,
    daemon: Daemon,
) -> None:
    """So prefill with FIA and decode without it exchange pages; of another order they are refused."""
    digests = set()
    for kind in (KINDS[name], KINDS[name]._replace(environment=environment)):
        with chosen(environment_of(daemon, kind)), current_pool(lambda: None):
            kind.make()
        pool = LAST()
        assert pool is not None
        digests.add(pool.layout_digest)
        pool.engine.close()
    assert len(digests) == layouts


def test_a_tensor_that_another_sglang_makes_beside_is_refused_by_name(daemon: Daemon) -> None:
    """It would have no memory."""
    kind = KINDS["mha"]
    with told():
        pool = kind.make()

    def create_buffers(one: Any) -> None:  # noqa: ANN401  SGLang's object
        one.scales = torch.zeros(3, device=one.device)

    with (
        chosen(environment_of(daemon, kind)),
        current_pool(lambda: None),
        pytest.raises(InvalidFieldError, match=r"does not carry NPUMHATokenToKVPool.scales"),
    ):
        pools.create_npu_mha_buffers(create_buffers, pool)
    made = LAST()
    assert made is not None
    made.engine.close()


def test_rows_of_metadata_are_where_the_processor_reads_them(daemon: Daemon) -> None:
    """SGLang has them on the NPU; its back end for Ascend reads them there."""
    sizes = {"size": 2, "hidden_size": 8, "hidden_states_dtype": torch.float16, "max_sampling_mask_tokens": 4}
    with told():
        assert all(one.device.type == "npu" for (one,) in tensors_of(MetadataBuffers(**sizes)).values())
    with chosen(environment_of(daemon, KINDS["mha"])):
        buffers = MetadataBuffers(**sizes)
    assert all(one.is_cpu for (one,) in tensors_of(buffers).values())
    assert set(buffers.get_buf_infos()[0]) == {one.data_ptr() for (one,) in tensors_of(buffers).values()}


@pytest.mark.parametrize(
    ("visible", "ours", "theirs"), [("", "npu:1", "npu:1"), ("3", "npu:0", "npu:3"), ("4, 6", "npu:1", "npu:6")]
)
def test_the_daemon_numbers_the_hosts_devices(visible: str, ours: str, theirs: str) -> None:
    assert daemons_device(ours, {"ASCEND_RT_VISIBLE_DEVICES": visible}) == theirs


@pytest.mark.parametrize("visible", ["3", "0,x"])
def test_a_device_that_is_not_visible_is_refused(visible: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        daemons_device("npu:1", {"ASCEND_RT_VISIBLE_DEVICES": visible})
    assert refused.value.field == "ASCEND_RT_VISIBLE_DEVICES"
