"""The code in docs/tiers.md does what the text around it says, on the run's device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.clients import Client, HybridSwaSpec, MhaSpec, ModelIdentity, TierOperation, pages
from kvferry.clients.hashing import block_hashes
from kvferry.daemon.services.leases import MAX_LEASES, MAX_PINS
from kvferry.daemon.tiers.disk_tier import PAUSE_S
from kvferry.daemon.tiers.operations import MAX_OPERATIONS
from kvferry.protocol.tier_messages import MAX_HASHES
from tests.kit.daemons import Daemon
from tests.kit.documents import ROOT, Reader, blocks, page, section, unknown_codes
from tests.kit.kvferry_command import run_kvferry
from tests.kit.pools import Filled

TEXT: Final = page("tiers.md")
OPERATIONS: Final = page("operations.md")
FAMILIES: Final = "tiers|cache|remote|messages|replies|sessions|transfers|peers|network"
COUNTERS: Final = {
    name
    for file in (ROOT / "daemon").rglob("*.py")
    for line in file.read_text().splitlines()
    if "counters.add(" in line
    for name in re.findall(rf'"((?:{FAMILIES})\.[a-z_.]+)"', line)
}
SPEC: Final = MhaSpec(layers=2, tokens=16 * 128, page_size=128, kv_heads=2, head_dim=4, dtype="float32")
MODEL_OF_TEXT: Final = ModelIdentity(name="Qwen/Qwen3-8B", revision="9c925d6")
HYBRID: Final = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), tokens=64, window_tokens=32, window=8, page_size=4, kv_heads=2, head_dim=4,
    dtype="float32",
)  # fmt: skip


RETRACT, LOOP = blocks(TEXT, "Offload and restore")
[LAND] = blocks(TEXT, "A transfer without pages")
REUSE, GROW, WINDOWS = blocks(TEXT, "Prefix cache")
[FOLLOW] = blocks(TEXT, "Events for routers")


@pytest.fixture
def reader(daemon: Daemon) -> Iterator[Reader]:
    with Client.connect(daemon.runtime_dir, name="reader") as client:
        while len(client.status().sessions) > 1:
            client.ping()  # until the last test's pages are back
        client.evict_cached()
        yield Reader(client)


@pytest.fixture
def decode(reader: Reader) -> Filled:
    reader.names["spec"] = SPEC
    return Filled(reader.client, "decode", SPEC, MODEL_OF_TEXT)


def test_offload_and_restore(reader: Reader, decode: Filled) -> None:
    ids = reader.names["ids"] = reader.client.allocate("decode", 8)
    content = decode.write(ids, seed=1)
    head, wait = RETRACT.split("back = ")
    reader.run(head)
    assert reader.names["done"].snapshot == reader.names["out"].snapshot
    others = reader.client.allocate("decode", 16)  # all: the pages were released
    reader.client.free("decode", others[3:])
    reader.run(f"back = {wait}")
    assert decode.holds(reader.names["ids"], content)
    assert reader.client.snapshots() == ()


def test_operations_come_from_poll(reader: Reader, decode: Filled) -> None:
    del decode
    gone_on: list[TierOperation] = []
    reader.names |= {"go_on": gone_on.append, "compute_again": pytest.fail}
    out = reader.client.offload("decode", [pages(reader.client.allocate("decode", 2))])
    while not gone_on:  # pytest's own timeout fails what never ends
        reader.run(LOOP)
    assert gone_on == [out]


def test_a_transfer_without_pages(daemon: Daemon, reader: Reader, decode: Filled) -> None:
    with Client.connect(daemon.runtime_dir, name="prefill") as prefill:
        source = Filled(prefill, "prefill", SPEC, MODEL_OF_TEXT)
        sent = prefill.allocate("prefill", 8)
        content = source.write(sent, seed=2)
        prefill.send("prefill", reader.names["request_id"], [pages(sent, tokens=1000)], first_token=5)
        reader.run(LAND)
        assert reader.names["arrived"].first_token == 5
        assert decode.holds(reader.names["ids"], content)
        source.close()


def test_the_prefix_cache(reader: Reader, decode: Filled) -> None:
    first, second = list(range(500)), [*range(256), *range(1000, 1256)]
    reader.names["tokens"] = first
    reader.run(REUSE)
    assert (reader.names["found"].blocks, reader.names["stored"].stored) == (0, 3)
    content = decode.read(reader.names["ids"])
    reader.names["tokens"] = second
    reader.run(REUSE)
    assert (reader.names["found"].blocks, reader.names["stored"].stored) == (2, 2)
    assert decode.holds(reader.names["ids"][:2], [one[:, :2] for one in content])


def test_a_sequence_that_has_grown(reader: Reader, decode: Filled) -> None:
    del decode
    tokens = list(range(6 * 128))
    hashes = block_hashes(tokens, 128)
    client = reader.client
    client.wait_done(client.store("decode", hashes, client.allocate("decode", 6)))
    reader.names |= {"tokens": tokens, "hashes": hashes[:4], "lease": client.lookup("decode", hashes[:4]).lease}
    reader.run(GROW)
    assert (reader.names["found"].blocks, reader.names["found"].lease_blocks) == (2, 6)


def test_hybrid_models(reader: Reader) -> None:
    client = reader.client
    Filled(client, "hybrid", HYBRID)
    reader.names |= {"tokens": list(range(24)), "spec": HYBRID}
    hashes = block_hashes(reader.names["tokens"], 4)
    client.wait_done(client.store("hybrid", hashes[:5], client.allocate("hybrid", 5)))
    client.wait_done(client.store("hybrid", hashes[3:5], client.allocate("hybrid", 2, "swa"), group="swa"))
    reader.names["hashes"] = hashes
    reader.run(WINDOWS)
    assert (reader.names["found"].blocks, len(reader.names["swa"])) == (5, 2)
    client.evict_cached(hashes[4:], pool="hybrid")
    reader.run(WINDOWS)
    assert reader.names["found"].blocks == 0, "of the window of 4 blocks one is missing"


def test_a_router(daemon: Daemon, reader: Reader, decode: Filled) -> None:
    del decode
    client = reader.client
    hashes = block_hashes(list(range(4 * 128)), 128)
    client.wait_done(client.store("decode", hashes[:2], client.allocate("decode", 2)))
    head, tail = FOLLOW.split("news = ")
    reader.run(head)
    (identity,) = {one.identity for one in client.cached_blocks()}
    assert reader.names["where"] == {(identity, "main", one.hex()): {"host"} for one in hashes[:2]}
    with Client.connect(daemon.runtime_dir, name="other") as other:
        other.wait_done(other.store("decode", hashes[2:], other.allocate("decode", 2), parent=hashes[1]))
        reader.run(f"news = {tail}")
        assert reader.names["where"] == {(identity, "main", one.hex()): {"host"} for one in hashes}
        other.evict_cached(hashes[:1], pool="decode")
        reader.run(f"news = {tail}")
    assert reader.names["where"][identity, "main", hashes[0].hex()] == set()


def test_every_code_that_the_text_names_exists() -> None:
    assert not unknown_codes(TEXT, "When something fails")


def test_the_figures_are_those_of_the_code() -> None:
    pins = f"{MAX_PINS:_}".replace("_", " ")
    assert f"over {MAX_OPERATIONS} operations, {MAX_LEASES} leases or {pins} leased blocks" in TEXT
    assert f"pauses for {PAUSE_S:g} s" in TEXT
    assert f"may number {MAX_HASHES:_}".replace("_", " ") in TEXT


def test_every_action_of_the_command_is_shown() -> None:
    usage = run_kvferry("cache", "--help").stdout
    actions = set(re.findall(r"^    (\w+)", usage.split("ACTION\n")[1].split("\n\n")[0], re.MULTILINE))
    shown = section(TEXT, "By hand")
    assert len(actions) > 5
    assert not {one for one in actions if one not in shown}


def test_every_key_that_the_text_names_is_one() -> None:
    example = (ROOT / "systemd/kvferry.toml").read_text()
    tables = re.split(r"^\[", example, flags=re.MULTILINE)[1:]
    keys = {f"{one.split(']')[0]}.{key}" for one in tables for key in re.findall(r"^#(\w+) = ", one, re.MULTILINE)}
    for text in (TEXT, OPERATIONS):
        named = set(re.findall(r"`(tiers(?:\.disk|\.remote)?\.\w+)`", text)) - COUNTERS
        assert len(named) >= 5
        assert named <= keys, named - keys


def test_every_counter_is_documented() -> None:
    assert len(COUNTERS) > 25
    assert not {one for one in COUNTERS if f"`{one}`" not in OPERATIONS}
    table = OPERATIONS.split("### Counters")[1].split("\n## ")[0]
    told = set(re.findall(rf"`((?:{FAMILIES})\.[a-z_.]+)`", table))
    assert told <= COUNTERS, told - COUNTERS
