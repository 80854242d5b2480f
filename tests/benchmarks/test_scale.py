"""The simulation of many nodes is the same each time, and what is made scarce breaks first."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.scale import Costs, Request, main, simulate

PLENTY = {
    name: 1e15 for name in Costs.__struct_fields__ if name.endswith(("bytes_s", "tokens_s")) or name.startswith("most_")
}
"""No thing of the daemon, of the tiers and of the links is scarce."""

ROOM = Costs(
    **PLENTY,
    host_bytes=8 * 512 * 131_072,
    disk_bytes=16 * 512 * 131_072,
    daemon_memory_bytes=1e15,
    router_memory_bytes=1e15,
    journal_changes=1e15,
    router_threads=1e6,
)
"""A host tier of 8 blocks and a disk of 16."""


@pytest.fixture
def requests() -> list[Request]:
    """Return prompts that begin with others' blocks, four a second."""
    return [Request(250 * number, 2048, (0, number % 5 + 1, number, number + 1)) for number in range(10, 70)]


SCARCE = {
    "request_us": (1e6, "daemon: control loop"),
    "copy_bytes_s": (1.0, "daemon: copies"),
    "most_transfers": (1e-3, "daemon: transfers waiting"),
    "block_bytes": (1e18, "daemon: memory"),
    "journal_changes": (1e-3, "daemon: journal"),
    "disk_bytes_s": (1.0, "tiers: disk"),
    "link_bytes_s": (1.0, "links: bytes"),
    "most_peers": (1.0, "links: peers of a daemon"),
    "router_lookup_us": (1e15, "router: processor"),
    "router_block_bytes": (1e18, "router: memory"),
}


@pytest.mark.parametrize("name", SCARCE)
def test_what_is_scarce_breaks_first(requests: list[Request], name: str) -> None:
    value, breaks = SCARCE[name]
    [first, *_] = simulate(requests, [10], msgspec.structs.replace(ROOM, **{name: value}))[10]
    assert (first.name, first.share > 1) == (breaks, True)


def test_one_node_has_no_links(requests: list[Request]) -> None:
    uses = dict(simulate(requests, [1], ROOM)[1])
    assert all(share == 0 for name, share in uses.items() if name.startswith("links:"))


def test_what_all_nodes_do_grows_with_them_and_what_one_does_not(requests: list[Request]) -> None:
    found = simulate(requests, [100, 10_000], Costs())
    small, large = dict(found[100]), dict(found[10_000])
    assert large["router: memory"] == pytest.approx(100 * small["router: memory"])
    assert large["daemon: copies"] == small["daemon: copies"]
    assert large["links: peers of a daemon"] == pytest.approx(9999 / 1024)


def test_it_names_the_first_thing_that_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * at, "input_length": 600, "output_length": 1, "hash_ids": [at]} for at in range(5)]
    trace.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert main(["--trace", str(trace), "--sizes", "1", "2000", "--cost", "daemon_memory_bytes=1e12"]) == 0
    shown = capsys.readouterr().out
    assert "5 requests in 4 s" in shown
    assert "1 nodes: tiers: disk" not in shown
    assert "holds" in shown
    assert "2000 nodes: links: peers of a daemon breaks: 1.95 times" in shown
