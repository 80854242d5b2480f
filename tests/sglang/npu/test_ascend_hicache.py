"""HiCache on a simulated NPU: SGLang's host pools for Ascend in the daemon's memory, registered with the NPU.

SGLang 0.5.23 copies there by ``kernel_ascend`` alone, whose operator has a stand-in in ``stubs/npu``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool, build_mamba_host_pool

from kvferry.clients import Client, MhaSpec, ModelIdentity
from kvferry.protocol.errors import InvalidFieldError
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_ASCEND
from tests.kit.servers import prompt, running
from tests.sglang.in_process import LAST, current_pool, keys_of, made_storage, same, states_pool, told
from tests.sglang.npu.pools import KINDS, LAYERS, NZ, PAGE
from tests.sglang.servers import EXTRA, Expected, hicache, request, server

CONFIG = "[tiers]\nhost_bytes = 67108864\n"
NPU: Any = torch.get_device_module("npu")
FILLED, EMPTY, OTHERS = (1, 2, 5), (3, 7, 6), (8, 4, 1)
"""Pages of the device's pool."""
PAGES = len(FILLED)
LENGTHS, SERVED_PAGE = (333, 600), 128
"""Of the server's prompts, and of its pages, in tokens."""
CARRIED = ["mha", "mha fia", "mla", "mla nz"]


def slots(pages: Sequence[int]) -> torch.Tensor:
    """Return the slots of pages."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


class Opened(NamedTuple):
    """SGLang's device pool, its host pool (L2), and the backend of its storage (L3)."""

    device: Any
    host: Any
    storage: Any

    def fill(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """Write other bytes to pages of the device's pool; return them."""
        for array in self._arrays():
            new = torch.randn(LAYERS, len(pages), *array.shape[2:]).to(array.dtype)
            for layer, values in zip(array, new, strict=True):
                layer[torch.tensor(pages).to("npu")] = values.to("npu")
        return self.content(pages)

    def content(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return [array.cpu()[:, list(pages)] for array in self._arrays()]

    def take(self) -> torch.Tensor:
        """Take slots of the host pool."""
        taken: torch.Tensor = self.host.alloc(PAGES * PAGE)
        return taken

    def down(self, pages: Sequence[int], taken: torch.Tensor) -> None:
        """Have pages copied into the host pool, as SGLang's controller does."""
        self.host.backup_from_device_all_layer(self.device, taken, slots(pages), "kernel_ascend")

    def up(self, taken: torch.Tensor, pages: Sequence[int]) -> None:
        """Have them copied back, as SGLang's controller does, a layer at a time."""
        for layer in range(LAYERS):
            self.host.load_to_device_per_layer(self.device, taken, slots(pages), layer, "kernel_ascend")

    def wipe(self) -> None:
        for array in (self.host.k_buffer, self.host.v_buffer):
            array.zero_()

    def _arrays(self) -> list[torch.Tensor]:
        """Return k and v: (layers, pages, tokens, …)."""
        found = vars(self.device)
        return [found.get(f"{name}_tensor", found[name]) for name in ("k_buffer", "v_buffer")]


@contextmanager
def opened(
    daemon: Daemon,
    name: str,
    kind: str,
    environment: Mapping[str, str] | None = None,
    label: str = "kv",
    **more: object,
) -> Iterator[Opened]:
    """Open a host pool and its storage, as a server with these options does whose device pool is of this kind.

    ``label``: SGLang's of the host pool; beside windows ``full``, and theirs ``swa``.
    """
    variables = {"KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_POOL": name}
    is_mla = kind.startswith("mla")
    options: dict[str, Any] = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(EXTRA),
        "hicache_mem_layout": "page_first_kv_split" if is_mla else "page_first_direct",
        "hicache_io_backend": "kernel_ascend",
        "hicache_ratio": 2.0,
        "served_model_name": "model",
        "model_path": "nobody/model",
        **more,
    }
    with (
        told({**variables, **KINDS[kind].environment, **(environment or {})}, None, **options),
        current_pool(lambda: None),
        ExitStack() as stack,
    ):
        device = KINDS[kind].make()
        if "disaggregation_mode" in more:
            stack.callback(LAST().engine.close)  # type: ignore[union-attr]  # there is one
        host = build_kv_host_pool(kv_pool=device, page_size=PAGE, pool_label=label)
        stack.callback(host.allocator.host.pool.engine.close)
        storage = made_storage(host, is_mla=is_mla, extra=EXTRA)
        stack.callback(storage.close)
        yield Opened(device, host, storage)


CASES: Final[dict[str, tuple[str, dict[str, str], dict[str, str]]]] = {
    **{kind: (kind, {}, {}) for kind in CARRIED},
    "registered": ("mha fia", {"KVFERRY_SGLANG_MEMORY": "engine"}, {}),
    "registered latents": ("mla", {"KVFERRY_SGLANG_MEMORY": "engine"}, {}),
    "beside windows": ("mha fia", {}, {"label": "full"}),
    "windows": ("mha fia", {}, {"label": "swa"}),
    "beside transfers": (
        "mla", {}, {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "kvferry"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "environment", "more"), CASES.values(), ids=CASES)
def test_pages_go_down_and_come_back(
    daemon: Daemon, name: str, kind: str, environment: dict[str, str], more: dict[str, str]
) -> None:
    keys = keys_of(name, PAGES)
    with opened(daemon, name, kind, environment, **more) as one:
        new, taken = one.fill(FILLED), one.take()
        one.down(FILLED, taken)
        NPU.synchronize()
        assert one.storage.batch_set_v1(keys, taken) == [True] * PAGES
        one.wipe()
        one.up(taken, OTHERS)
        assert not same(one.content(OTHERS), new), "the control: SGLang copies what is in the host pool"
        other = one.take()
        assert one.storage.batch_get_v1(keys, other) == [True] * PAGES
        one.up(other, EMPTY)
        assert same(one.content(EMPTY), new)
    with opened(daemon, f"{name}-later", kind, environment, **more) as later:
        taken = later.take()
        assert later.storage.batch_get_v1(keys, taken) == [True] * PAGES
        later.up(taken, EMPTY)
        assert same(later.content(EMPTY), new)


def test_states_go_down_and_come_back(daemon: Daemon, name: str) -> None:
    """A slot of states is stored under the key of its prefix, beside full attention's pages."""
    [key] = keys_of(name, 1)
    with opened(daemon, name, "mha") as one:
        pool = states_pool().mamba_pool
        (info,) = pool.get_device_pool_infos()
        host = build_mamba_host_pool(pool, info, host_size=0, layout="page_first_direct")
        one.storage.register_mem_host_pool_v2(host, PoolName.MAMBA)

        def content(slot: int) -> list[torch.Tensor]:
            return [array.cpu()[:, slot] for array in (info.buffer_info.temporal, *info.buffer_info.conv)]

        def transfer(slots: torch.Tensor) -> list[PoolTransfer]:
            return [PoolTransfer(name=PoolName.MAMBA, host_indices=slots, keys=[key])]

        for array in (info.buffer_info.temporal, *info.buffer_info.conv):
            for layer in array:
                layer.copy_(torch.randn(layer.shape).to(layer.dtype))
        new, there, taken, other = content(3), torch.tensor([5]), host.alloc(1), host.alloc(1)
        host.backup_from_device_all_layer(pool, taken, torch.tensor([3]), "kernel_ascend")
        NPU.synchronize()
        assert one.storage.batch_set_v2(transfer(taken)) == {PoolName.MAMBA: [True]}
        for array in host.kv_buffer:
            array.zero_()
        host.load_to_device_per_layer(pool, other, there, 0, "kernel_ascend")
        assert not same(content(5), new), "the control: SGLang copies what is in the host pool"
        assert one.storage.batch_get_v2(transfer(other)) == {PoolName.MAMBA: [True]}
        host.load_to_device_per_layer(pool, other, there, 0, "kernel_ascend")
        assert same(content(5), new)
        host.allocator.host.pool.engine.close()


@pytest.mark.parametrize("kind", CARRIED)
def test_copies_to_and_from_the_host_pool_do_not_wait_for_the_stream(
    daemon: Daemon, name: str, kind: str, simulator: Simulator
) -> None:
    with opened(daemon, name, kind) as one:
        new, taken = one.fill(FILLED), one.take()
        size = sum(array.nbytes for array in new)
        to_host, to_device, before = (
            simulator.copied_bytes("to host"), simulator.copied_bytes("to device"), simulator.synchronized()
        )  # fmt: skip
        one.down(FILLED, taken)
        one.up(taken, EMPTY)
        assert soon(NPU.current_stream().record_event().query)
        assert simulator.synchronized() == before
        assert simulator.copied_bytes("to host") - to_host == size
        assert simulator.copied_bytes("to device") - to_device == size
        assert same(one.content(EMPTY), new)
        assert simulator.synchronized() > before, "the simulator counts"


def test_pages_of_another_order_are_not_found(daemon: Daemon, name: str) -> None:
    keys = keys_of(name, PAGES)
    with opened(daemon, name, "mla") as one:
        assert one.storage.batch_set_v1(keys, one.take()) == [True] * PAGES
        for order, found in ((NZ, 0), ({}, PAGES)):
            with opened(daemon, f"{name}-other", "mla", environment=order) as other:
                assert other.storage.batch_exists(keys) == found


REFUSED: Final = {
    "mha narrow v": "the 'kv' host pool AsymmetricMHATokenToKVPoolHost",
    "mla index": "an indexer's keys in the host pool",
    "mla some index nz": "an indexer's keys in the host pool",
    "mla packed": "packed latents",
}


@pytest.mark.parametrize(
    ("kind", "environment", "what"),
    [
        *((kind, {}, what) for kind, what in REFUSED.items()),
        ("mla", {"SGLANG_HICACHE_HOST_MEM_BACKEND": "memfabric"}, "a host pool that memfabric allocates"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(
    daemon: Daemon, name: str, kind: str, environment: dict[str, str], what: str
) -> None:
    with (
        pytest.raises(InvalidFieldError, match=f"does not carry {what}") as refused,
        opened(daemon, name, kind, environment),
    ):
        pass
    assert refused.value.field == "hicache_storage_backend"


def test_a_server_finds_its_prompts_again_after_a_flush(answers: Callable[[str], Expected], tmp_path: Path) -> None:
    """What came from the storage is counted, because the server may compute again what did not; zeros change it."""
    expected, whole = answers(TINY_ASCEND), [length // SERVED_PAGE for length in LENGTHS]
    tokens = [expected.tokens(length) for length in LENGTHS]

    def ask() -> tuple[list[list[int]], list[int]]:
        """Return the answers after a flush, and how many pages of each prompt came from the storage."""
        one.flush()
        replies = [one.post("/generate", request(prompt(length))) for length in LENGTHS]
        details = [reply.body["meta_info"]["cached_tokens_details"] or {} for reply in replies]
        return [reply.tokens for reply in replies], [at.get("storage", 0) // SERVED_PAGE for at in details]

    with kit.daemon("[tiers]\nhost_bytes = 268435456\n") as daemon, Client.connect(daemon.runtime_dir) as client:
        one = server(
            tmp_path, "plain", model=TINY_ASCEND, tokens=2048,
            options=[*hicache("page_first_direct", "kernel_ascend"), "--page-size", str(SERVED_PAGE)],
            environment={"KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir)},
        )  # fmt: skip
        with running(one):
            assert ask() == (tokens, [0] * len(LENGTHS))
            assert soon(lambda: len(list(client.cached_blocks())) >= sum(whole)), one.log_tail()
            assert ask() == (tokens, whole)
            put_zeros(client)
            changed, found = ask()
            assert found == whole
            assert all(ours != theirs for ours, theirs in zip(changed, tokens, strict=True))


def put_zeros(client: Client) -> None:
    """Have zeros in the place of all that is stored."""
    blocks = list(client.cached_blocks())
    name, revision = blocks[0].model.rsplit("@", 1)
    hashes = [bytes.fromhex(block.hash) for block in blocks]
    spec = MhaSpec(
        layers=3, tokens=SERVED_PAGE * len(blocks), page_size=SERVED_PAGE, kv_heads=2, head_dim=128, dtype="float32",
        view="page_first_direct",
    )  # fmt: skip
    client.create_pool("zeros", spec, model=ModelIdentity(name=name, revision=revision))
    ids = client.allocate("zeros", len(blocks))
    assert client.evict_cached(hashes, pool="zeros").blocks == len(blocks)
    assert client.wait_done(client.store("zeros", hashes, ids)).stored == len(blocks)
