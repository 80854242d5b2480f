"""What breaks first as nodes are added: a trace's requests on 1 to 10,000 nodes, with the costs measured on one.

``python -m benchmarks.scale --trace FILE``. Each node brings the trace's whole load once more, with prompts of its own.
A router that knows where each block is sends a request to the node that has its prefix or, where that one's engine is
busy for longer than it takes to fetch the prefix from there, to the least busy one. Prefill hands every prompt over to
a decode engine on a node drawn by chance. Up to ``SIMULATED`` nodes are simulated request by request, and stand for the
others: what one node does, its peak of ten seconds, is that of the busiest of them; what all do together grows with
their number.

A *use* is demand over what there is: above 1, the thing breaks. Nothing is measured here: ``Costs`` says which command
prints each figure, and each can be given anew.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

SIZES: Final = (1, 10, 100, 1000, 10_000)
SIMULATED: Final = 16
WINDOW_S: Final = 10.0
"""Demand is summed up over so long: shorter peaks wait in queues."""

BLOCK_TOKENS: Final = 512
"""Of the traces' blocks."""

SHIFT_S: Final = 1.7
"""Each node's requests come so much later than those of the one before: not all of them at once."""


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What things cost and how much there is. Times are processor time, on a 2-core virtual machine, in microseconds.

    From ``make bench NAMES=growth`` where no other command is named; what a site has, it must say itself.
    """

    request_us: float = 175
    """ALLOCATE, FREE and the like: half of ``growth/engines/allocate``. An engine sends three for a prompt."""
    transfer_us: float = 1400
    """SEND and RECEIVE until both have settled: ``growth/engines/transfer``."""
    remote_transfer_us: float = 2500
    """What each of two daemons has of a transfer between them, without its bytes: a guess, no command prints it."""
    store_block_us: float = 12
    """A block stored, and one evicted: ``growth/blocks/store`` / 64."""
    lookup_block_us: float = 0.3
    """``growth/blocks/lookup`` / 64."""
    block_bytes: float = 450
    """``growth/blocks/memory``."""
    heartbeat_us: float = 450
    """A heartbeat sent and one answered, libzmq's thread included: ``growth/peers/heartbeat``."""
    link_memory_bytes: float = 35e3
    """``growth/peers/memory``."""
    router_block_us: float = 1.0
    """A change of a block, taken into the router's table: ``growth/router/change`` / 64."""
    router_lookup_us: float = 0.6
    """A block looked up there: ``growth/router/lookup`` / 64."""
    router_block_bytes: float = 380
    """``growth/router/memory``."""
    token_bytes: float = 131_072
    """KV of a token: 32 layers, 8 heads of 128, K and V of 2 bytes."""
    prefill_tokens_s: float = 60_000
    """What a node's engines compute."""
    decode_here: float = 0
    """The share of prompts that are decoded on the node of their prefill."""
    peers: float = 0
    """With how many others a node exchanges KV; 0: with all."""
    copy_bytes_s: float = 40e9
    """Pages copied by a daemon's four threads; ``make bench NAMES=local_transfer`` says what one of them does."""
    host_bytes: float = 512e9
    disk_bytes: float = 8e12
    disk_bytes_s: float = 6e9
    """Read and written together."""
    link_bytes_s: float = 50e9
    """A node's network, each way."""
    daemon_memory_bytes: float = 16e9
    """For all that the daemon itself keeps."""
    router_threads: float = 8
    router_memory_bytes: float = 64e9
    poll_s: float = 1
    """How often a router asks each daemon for changes."""

    most_peers: float = 1024
    """``MAX_PEERS`` of a daemon; with ``LimitNOFILE`` of 65,536."""
    heartbeat_s: float = 1
    """A third of ``peers.timeout_ms``."""
    most_transfers: float = 16_384
    """16 times ``limits.max_transfers_per_session``."""
    journal_changes: float = 65_536
    """Changes that a daemon keeps for routers; one has a chain of up to 256 blocks."""


class Request(msgspec.Struct, frozen=True):
    """A line of a trace; the time is in milliseconds."""

    timestamp: float
    input_length: int
    hash_ids: tuple[int, ...]
    node: int = 0
    """Whose load it is."""

    def of(self, node: int) -> Request:
        """Return the same of another node, whose prompts are others."""
        blocks = tuple(block * SIMULATED + node for block in self.hash_ids)
        return Request(self.timestamp + node * SHIFT_S * 1000, self.input_length, blocks, node)


class Use(NamedTuple):
    """How much of a thing is used; above 1 it breaks."""

    name: str
    share: float


class Tier:
    """Blocks that one node has in a tier, the least recently used first."""

    def __init__(self, size_bytes: float, block_bytes: float) -> None:
        self._capacity = int(size_bytes // block_bytes)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        """Return whether a block is there."""
        return block in self._blocks

    def __len__(self) -> int:
        """Return how many blocks are there."""
        return len(self._blocks)

    def use(self, block: int) -> int | None:
        """Put a block there, or use it again; return one that has to go, if any."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        return self._blocks.popitem(last=False)[0] if len(self._blocks) > self._capacity else None


class Node:
    """One daemon with its tiers and its engine; what is asked of it, by kind and window."""

    def __init__(self, costs: Costs) -> None:
        block_bytes = costs.token_bytes * BLOCK_TOKENS
        self.host, self.disk = Tier(costs.host_bytes, block_bytes), Tier(costs.disk_bytes, block_bytes)
        self.free_at_s = 0.0
        """When its engine has computed all that it was given."""
        self.ends_s: list[float] = []
        """When the transfers end that wait."""
        self.most_waiting = 0
        self._asked: dict[tuple[str, int], float] = {}

    def __contains__(self, block: int) -> bool:
        """Return whether it has a block in any tier."""
        return block in self.host or block in self.disk

    def ask(self, what: str, at_s: float, amount: float) -> None:
        """Count what is asked of it."""
        window = (what, int(at_s // WINDOW_S))
        self._asked[window] = self._asked.get(window, 0) + amount

    def peak(self, what: str) -> float:
        """Return the most that was asked in a window, per second."""
        return max((amount for (kind, _), amount in self._asked.items() if kind == what), default=0.0) / WINDOW_S

    def wait(self, at_s: float, end_s: float) -> None:
        """Let a transfer wait until its prompt is computed."""
        while self.ends_s and self.ends_s[0] <= at_s:
            heappop(self.ends_s)
        heappush(self.ends_s, end_s)
        self.most_waiting = max(self.most_waiting, len(self.ends_s))


class Cluster:
    """Nodes that are simulated request by request, and stand for others."""

    def __init__(self, nodes: int, costs: Costs) -> None:
        self.costs = costs
        self.nodes = [Node(costs) for _ in range(nodes)]
        self.router = Node(costs)
        self._where: dict[int, Node] = {}
        self._random = random.Random(nodes)  # noqa: S311  the same each time
        self._block_bytes = costs.token_bytes * BLOCK_TOKENS

    def run(self, requests: Sequence[Request]) -> None:
        """Serve the requests once for each node."""
        streams = [[one.of(node) for one in requests] for node in range(len(self.nodes))]
        for request in merge(*streams, key=attrgetter("timestamp")):
            self._serve(request)

    def _serve(self, request: Request) -> None:
        costs, at_s, blocks = self.costs, request.timestamp / 1000, request.hash_ids
        self.router.ask("processor", at_s, len(blocks) * costs.router_lookup_us)
        prefix = [*self._prefix(blocks)]
        node = self._choose(prefix, at_s)
        for block in prefix:
            self._bring(block, node, at_s)
        for block in blocks[len(prefix) :]:
            self._keep(block, node, at_s)
        new = len(blocks) - len(prefix)
        node.ask(
            "processor", at_s, 3 * costs.request_us + len(blocks) * costs.lookup_block_us + new * costs.store_block_us
        )
        node.ask("copies", at_s, new * self._block_bytes)
        tokens = max(1, request.input_length - len(prefix) * BLOCK_TOKENS)
        node.free_at_s = max(node.free_at_s, at_s) + tokens / costs.prefill_tokens_s
        self._hand_over(node, at_s, node.free_at_s, request.input_length * costs.token_bytes)

    def _prefix(self, blocks: Sequence[int]) -> Iterator[int]:
        for block in blocks:
            if block not in self._where or block not in self._where[block]:
                return
            yield block

    def _choose(self, prefix: Sequence[int], at_s: float) -> Node:
        """Return the node that has the prefix or, where it is sooner fetched from there, the least busy one."""
        self._random.shuffle(self.nodes)  # of several that have nothing to do, any
        idle = min(self.nodes, key=lambda node: max(node.free_at_s, at_s))
        if not prefix:
            return idle
        holder = self._where[prefix[-1]]
        saved_s = max(holder.free_at_s, at_s) - max(idle.free_at_s, at_s)
        return holder if saved_s <= len(prefix) * self._block_bytes / self.costs.link_bytes_s else idle

    def _bring(self, block: int, node: Node, at_s: float) -> None:
        """Bring a block of the prefix into the engine's pool: from the host tier, the disk, or another node."""
        if block not in node:
            other = self._where[block]
            other.ask("out", at_s, self._block_bytes)
            node.ask("in", at_s, self._block_bytes)
            for one in (node, other):
                one.ask("processor", at_s, self.costs.store_block_us)
        elif block not in node.host:
            node.ask("disk", at_s, self._block_bytes)
        node.ask("copies", at_s, self._block_bytes)
        self._keep(block, node, at_s)

    def _keep(self, block: int, node: Node, at_s: float) -> None:
        """Have a block in the host tier; what it pushes out goes to the disk."""
        if block not in node.host:
            self._changed(node, at_s)
        pushed = node.host.use(block)
        self._where[block] = node
        if pushed is None:
            return
        self._changed(node, at_s)
        if pushed not in node.disk:
            node.ask("disk", at_s, self._block_bytes)
        node.disk.use(pushed)

    def _changed(self, node: Node, at_s: float) -> None:
        node.ask("changes", at_s, 1)
        self.router.ask("processor", at_s, self.costs.router_block_us)

    def _hand_over(self, node: Node, at_s: float, end_s: float, size_bytes: float) -> None:
        """Let prefill's pages go to a decode engine, whose RECEIVE has waited since the request came."""
        costs, decode = self.costs, node
        if len(self.nodes) > 1 and self._random.random() >= costs.decode_here:
            decode = self._random.choice([one for one in self.nodes if one is not node])
        decode.wait(at_s, end_s)
        if decode is node:
            node.ask("processor", end_s, costs.transfer_us)
            node.ask("copies", end_s, size_bytes)
            return
        node.ask("out", end_s, size_bytes)
        decode.ask("in", end_s, size_bytes)
        for one in (node, decode):
            one.ask("processor", end_s, costs.remote_transfer_us)
            one.ask("copies", end_s, size_bytes)

    # -- what it comes to

    def uses(self, size: int) -> list[Use]:
        """Return how much of each thing is used by ``size`` nodes, the most used first."""
        costs, nodes = self.costs, self.nodes
        peers = min(size - 1, costs.peers or size)
        heartbeats_us = peers * costs.heartbeat_us / costs.heartbeat_s
        blocks = (costs.host_bytes + costs.disk_bytes) / self._block_bytes  # in the long run
        share = size / len(nodes)

        def busiest(what: str) -> float:
            return max(node.peak(what) for node in nodes)

        polls_us = size / costs.poll_s * costs.request_us
        found = [
            Use("daemon: control loop", (busiest("processor") + heartbeats_us) / 1e6),
            Use("daemon: copies", busiest("copies") / costs.copy_bytes_s),
            Use("daemon: transfers waiting", max(node.most_waiting for node in nodes) / costs.most_transfers),
            Use(
                "daemon: memory",
                (blocks * costs.block_bytes + peers * costs.link_memory_bytes) / costs.daemon_memory_bytes,
            ),
            Use("daemon: journal", busiest("changes") * costs.poll_s / costs.journal_changes),
            Use("tiers: disk", busiest("disk") / costs.disk_bytes_s),
            Use("links: bytes", max(busiest("in"), busiest("out")) / costs.link_bytes_s),
            Use("links: heartbeats", heartbeats_us / 1e6),
            Use("links: peers of a daemon", peers / costs.most_peers),
            Use("router: processor", (share * self.router.peak("processor") + polls_us) / 1e6 / costs.router_threads),
            Use("router: memory", size * blocks * costs.router_block_bytes / costs.router_memory_bytes),
        ]
        return sorted(found, key=lambda use: -use.share)


def read_requests(trace: Path, count: int) -> list[Request]:
    """Return the first requests of a trace."""
    with trace.open("rb") as lines:
        return [msgspec.json.decode(line, type=Request) for line in islice(lines, count)]


def simulate(requests: Sequence[Request], sizes: Sequence[int], costs: Costs) -> dict[int, list[Use]]:
    """Return, for each number of nodes, how much of each thing they use, the most used first."""
    clusters: dict[int, Cluster] = {}
    for size in sizes:
        nodes = min(size, SIMULATED)
        if nodes not in clusters:
            clusters[nodes] = Cluster(nodes, costs)
            clusters[nodes].run(requests)
    return {size: clusters[min(size, SIMULATED)].uses(size) for size in sizes}


def table(found: dict[int, list[Use]], shown: int) -> str:
    """Return a line for each size: what breaks first, or is nearest to it, and what comes next."""
    lines = []
    for size, uses in found.items():
        first, *others = uses
        says = (
            f"breaks: {first.share:.3g} times what there is"
            if first.share > 1
            else f"holds: {1 / first.share:.3g} times as much would break it"
        )
        rest = ", ".join(f"{name} {share:.2g}" for name, share in others[: shown - 1])
        lines.append(f"{size:>6} nodes: {first.name} {says}; next: {rest}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate each size and print what breaks first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="What breaks first, by nodes.")
    parser.add_argument("--trace", type=Path, required=True, action="append", metavar="FILE", help="may be given again")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="NODES")
    parser.add_argument("--requests", type=int, default=2000, metavar="COUNT", help="of the trace, for each node")
    parser.add_argument(
        "--cost", action="append", default=[], metavar="NAME=VALUE", help=f"of: {', '.join(Costs.__struct_fields__)}"
    )
    parser.add_argument("--shown", type=int, default=4, metavar="COUNT", help="how many things to name at each size")
    options = parser.parse_args(arguments)
    try:
        costs = msgspec.convert(dict(one.split("=", 1) for one in options.cost), Costs, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        parser.error(f"--cost: {error}")
    for trace in options.trace:
        requests = read_requests(trace, options.requests)
        print(
            f"== {trace.name}: {len(requests)} requests in {requests[-1].timestamp / 1000:.0f} s for each node",
            flush=True,
        )
        print(table(simulate(requests, options.sizes, costs), options.shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
