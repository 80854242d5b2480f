"""The code in docs/engines.md about devices and graph tables does what the text around it says, on the run's device.

What only a device can do is run by ``tests/npu/test_docs_on_npu.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch

from kvferry.clients import AttachedPool, Client, MhaSpec, ModelIdentity, new_request_id, pages
from kvferry.protocol import errors
from kvferry.protocol.ids import HOST
from tests import kit
from tests.kit.devices import DEVICE
from tests.kit.documents import Reader, blocks, page, unknown_codes

pytestmark = pytest.mark.any_device

TEXT: Final = page("engines.md")
SPEC: Final = MhaSpec(layers=2, tokens=8 * 128, page_size=128, kv_heads=2, head_dim=4, dtype="float16")


[INDEXER] = blocks(TEXT, "Indexers (DeepSeek V3.2)")
ON_A_DEVICE, LENDING = blocks(TEXT, "Pools on a device")
[OWN_MEMORY] = blocks(TEXT, "Host memory of an engine's own")
[WHOSE] = blocks(TEXT, "Whose KV it is")
TABLES, NEXT_STEP = blocks(TEXT, "Graph tables")
[OFFLOAD] = blocks(TEXT, "Offload, restore and the prefix cache")


@pytest.fixture
def reader(device: str) -> Iterator[Reader]:
    with kit.daemon() as daemon, Client.connect(daemon.runtime_dir, name="reader") as client:
        one = Reader(client, device)
        one.names["spec"] = SPEC
        yield one


class Other(NamedTuple):
    """A pool "other" beside the reader's, which waits for what the text sends."""

    client: Client
    pool: AttachedPool

    def arrived(self) -> torch.Tensor:
        return self.pool.tensor("main", "k").cpu()


@pytest.fixture
def other(reader: Reader, device: str) -> Other:
    return Other(reader.client, reader.client.create_pool("other", SPEC, device=device))


def test_pools_on_a_device(reader: Reader, other: Other, device: str) -> None:
    client = other.client
    taken = client.allocate("other", 4)
    received = client.receive("other", reader.names["request_id"], [pages(taken)])
    reader.run(ON_A_DEVICE)
    client.wait_finished(received)
    assert (other.arrived()[:, taken] == 1).all()
    assert not other.arrived()[:, 0].any()
    client.wait_settled(reader.names["sent"])
    [pool] = [one for one in client.status().pools if one.pool == "decode"]
    assert (pool.free, pool.device) == (pool.pages, device)


@pytest.mark.host_only
def test_host_memory_of_an_engines_own(reader: Reader) -> None:
    reader.run(OWN_MEMORY)
    [pool] = reader.names["client"].status().pools
    assert (pool.pool, pool.device, pool.registered_by is not None) == ("prefill", "host", True)


def test_graph_tables(reader: Reader, device: str) -> None:
    """The text is for the host, and says what a device needs instead."""
    in_place = ("ring.record_event()", "tables.replayed()")
    first, then = (TABLES, NEXT_STEP) if device == HOST else [one.replace(*in_place) for one in (TABLES, NEXT_STEP)]
    reader.run(ON_A_DEVICE.split("step = ")[0])
    reader.run(first)
    tables, ids = reader.names["tables"], reader.names["ids"]
    assert reader.names["block_tables"].shape == (8, 257)
    assert "`W = ceil(max(max_context_tokens + draft_tokens, request_row_tokens) / page_size)`" in TEXT
    expected = np.zeros((8, 257), np.int32)
    expected[0, :2], expected[1, 0] = ids[:2], ids[2]
    assert np.array_equal(reader.names["block_tables"].cpu().numpy(), expected)
    assert reader.names["seq_lens"].tolist() == [200, 100, 0, 0, 0, 0, 0, 0]
    assert reader.names["inputs"] == [{"actual_seq_lengths_kv": [200, 100, 0, 0]}]
    reader.run(then)
    expected[1, 1] = ids[3]
    assert np.array_equal(tables.block_tables.cpu().numpy(), expected)
    assert tables.host_lengths().lengths == [201, 129]


def test_whose_kv_it_is(reader: Reader, other: Other) -> None:
    reader.run(WHOSE)
    assert reader.names["pool"].model == reader.names["model"]
    client = other.client
    client.create_pool("third", SPEC, model=ModelIdentity(name="Qwen/Qwen3-8B", revision="a fine-tune")).close()
    sent, wanted = client.allocate("third", 1), client.allocate("decode", 1)
    client.send("third", reader.names["request_id"], [pages(sent)])
    refused = client.receive("decode", reader.names["request_id"], [pages(wanted)])
    with pytest.raises(errors.ModelMismatchError, match=r"8B@a fine-tune.*8B@9c925d6"):
        client.wait_finished(refused)


def test_an_indexers_keys_travel_with_mains_pages(reader: Reader, other: Other, device: str) -> None:
    before, send = INDEXER.split("...  #")
    reader.run(before.replace('"nsa", spec)', f'"nsa", spec, device="{device}")'))
    pool, index_k, ids = (reader.names[name] for name in ("pool", "index_k", "ids"))
    assert index_k.shape == (2, 17, 64, 1, 128)
    assert pool.layers("main", "index_k") == (0, 2)
    assert pool.engine_lists().state.names == ("main/index_k/0", "main/index_k/2")
    index_k[:, ids] = torch.arange(1, 4, dtype=torch.bfloat16, device=index_k.device).view(1, 3, 1, 1, 1)
    DEVICE.synchronize()
    client = other.client
    decode = client.create_pool("nsa-decode", reader.names["spec"], device=device)
    client.allocate("nsa-decode", 5)  # so that the page numbers differ
    wanted = client.allocate("nsa-decode", 3)
    transfer = client.receive("nsa-decode", reader.names["request_id"], [pages(wanted, tokens=150)])
    reader.run("...  #" + send)
    done = client.wait_finished(transfer)
    assert (done.trimmed_pages, done.moved_bytes) == (0, 3 * 64 * 2 * (4 * (512 + 64) + 2 * 128))
    assert torch.equal(decode.tensor("main", "index_k").cpu()[:, wanted], index_k.cpu()[:, ids])
    with_a_list = [pages(wanted), pages(wanted, component="index_k")]
    refused = client.receive("nsa-decode", new_request_id(), with_a_list)
    with pytest.raises(errors.UnknownComponentError):
        client.wait_finished(refused)


def test_offload_and_restore(reader: Reader, other: Other) -> None:
    k = other.pool.tensor("main", "k")
    ids = reader.names["ids"] = other.client.allocate("other", 8)
    k[:, ids] = 3
    DEVICE.synchronize()
    reader.run(OFFLOAD.replace('"decode"', '"other"'))
    assert sorted(reader.names["ids"]) == sorted(ids)
    assert reader.names["back"].done.copied_pages == 8
    assert other.client.snapshots() == ()


def test_every_code_that_the_text_names_exists() -> None:
    assert not unknown_codes(TEXT, "What to do about an error")
