"""Every metric that the daemon exports: name, kind, labels and one line of help; docs/metrics.md has units and traps.

Pure: knows neither where values come from nor how they are written. Labels are bounded sets: names that this code has,
codes of errors, devices, and pools up to a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from kvferry.daemon.control.metrics import Distribution

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric; its counters' names end in ``_total``, as they are read."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


class Sample(NamedTuple):
    """One value of a metric, with the values of its labels in their order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


METRICS: Final[dict[str, Metric]] = {}
"""All of them, by name."""


def _metric(kind: Kind, name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    made = METRICS[f"kvferry_{name}"] = Metric(f"kvferry_{name}", kind, labels, text)
    return made


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return _metric("gauge", name, text, labels)


_POOL: Final = ("tenant", "pool", "device", "space")

INFO = _gauge("info", "1; the version of the daemon.", "version")
DRAINING = _gauge("draining", "1 while the daemon accepts no new transfers: it ends, hands over, or is drained.")
POOLS = _gauge("pools", "Pools, by who owns their memory.", "device", "memory_of")
POOL_MEMORY_BYTES = _gauge("pool_memory_bytes", "Memory of the pools.", "device", "memory_of")
POOL_PAGES = _gauge("pool_pages", "Pages of a page space of a pool, each in one state.", *_POOL, "state")
POOL_FREE_RUN_PAGES = _gauge("pool_largest_free_run_pages", "The most free pages in a row.", *_POOL)
POOL_PAGE_BYTES = _gauge("pool_page_bytes", "Bytes of a page, of all layers together.", *_POOL)
SESSIONS = _gauge("live_sessions", "Sessions of engines; away: without their socket, kept to be resumed.", "state")
UNACKNOWLEDGED_EVENTS = _gauge("unacknowledged_events", "Events that engines have not acknowledged, of all sessions.")
KEPT_BYTES = _gauge("kept_bytes", "What others make the daemon keep in memory.", "what")
KEPT_LIMIT_BYTES = _gauge("kept_limit_bytes", "The bound of what others make the daemon keep.", "what")
TRANSFERS = _gauge("live_transfers", "Send and receive requests that have not settled.", "direction", "state")
OLDEST_TRANSFER_SECONDS = _gauge("oldest_transfer_seconds", "Age of the oldest of these.", "direction", "state")
OPERATIONS = _gauge("live_operations", "Operations of the tiers under way.", "kind", "state")
PEERS = _gauge("peers", "Links to other daemons.", "state")
PEER_ROUND_TRIP_SECONDS = _gauge("peer_round_trip_seconds", "The longest last heartbeat of the peers that are up.")
NETWORK_BUFFERS = _gauge("network_buffers", "Bounce buffers, each in one state.", "state")
NETWORK_READY = _gauge("network_ready", "1 while other hosts can write here; 0: draining, fencing or broken.")
DEVICE_READY = _gauge("device_ready", "1 while the device is usable.", "device")
DEVICE_BYTES = _gauge("device_memory_bytes", "Memory of a device over all processes, as last asked.", "device", "state")
DEVICE_STREAMS = _gauge("device_streams", "Streams that the daemon has made on a device.", "device")
TABLES = _gauge("tables", "Graph tables.", "device")
TABLES_WAITING = _gauge("tables_waiting", "Graph tables with an update that waits or is being copied.", "device")
TIER_READY = _gauge("tier_ready", "1 while a tier takes blocks; 0: full, failing or away.", "tier")
TIER_SLOW = _gauge("tier_slow", "1 while the last blocks of a tier took far longer than they should.", "tier")
TIER_BYTES = _gauge("tier_bytes", "Memory of a tier, each byte in one state.", "tier", "state")
TIER_BLOCKS = _gauge("tier_blocks", "Cached blocks of a tier.", "tier")
TIER_SNAPSHOTS = _gauge("tier_snapshots", "Snapshots in the host tier.")
DESCRIPTORS = _gauge("descriptors", "Descriptors for sessions and pools, each in one state.", "state")
LISTENING = _gauge("listening", "1 while the daemon accepts connections; 0: no descriptor is left.")
LOOP_LAG_SECONDS = _metric("histogram", "loop_lag_seconds", "How late the control loop calls a timer.")


class Counted(NamedTuple):
    """A metric that follows from the daemon's counters: those whose whole name its pattern matches."""

    metric: Metric
    pattern: re.Pattern[str]
    scale: float = 1.0


COUNTED: Final[list[Counted]] = []


def _counted(name: str, pattern: str, text: str, scale: float = 1.0) -> None:
    compiled = re.compile(pattern)
    metric = _metric("counter", f"{name}_total", text, tuple(compiled.groupindex))
    COUNTED.append(Counted(metric, compiled, scale))


_counted("messages", r"messages\.received", "Messages of engines.")
_counted("messages_too_large", r"messages\.too_large", "Messages over a limit.")
_counted("messages_refused", r"messages\.refused\.(?P<code>\w+)", "Unreadable messages.")
_counted("requests_refused", r"requests\.refused\.(?P<code>\w+)", "Refused requests, at once or later, by their error.")
_counted("replies_unsent", r"replies\.(?P<reason>\w+)", "Replies and events that could not be sent.")
_counted("connections_closed", r"connections\.closed\.(?P<reason>\w+)", "Connections that the daemon closed.")
_counted("connections_paused", r"connections\.paused", "Pauses of a connection whose engine does not read.")
_counted("sessions", r"sessions\.(?P<event>opened|resumed|refused)", "Sessions by their beginning.")
_counted("session_ends_failed", r"sessions\.ends_failed", "Parts of the daemon that failed to release a session.")
_counted("adopted", r"adoption\.(?P<what>sessions|pools|pages|blocks|snapshots)", "What the last restart went on with.")
_counted("adoption_dropped", r"adoption\.(?P<what>\w+)_dropped", "What a restart lost.")
_counted("adoption_sessions_ended", r"adoption\.sessions_ended", "Sessions whose engine had ended before a restart.")
_counted("adoption_fence_seconds", r"adoption\.fence_ms", "How long the driver took the last daemon apart.", 1e-3)
_counted("not_kept", r"adoption\.not_kept", "What will not outlive this daemon.")
_counted("keeping_failures", r"adoption\.(?P<what>keeper_lost|store_lost|store_silent)", "Keeper or store failed.")
_counted("transfers", r"transfers\.(?P<direction>send|receive)\.(?P<outcome>\w+)", "Ended send and receive requests.")
_counted("transfer_bytes", r"transfers\.moved_bytes", "Bytes of receive requests that succeeded.")
_counted("transfers_layered", r"transfers\.layered", "SENDs that go layer by layer.")
_counted("transfers_trimmed", r"transfers\.trimmed", "Page lists that were cut to the shorter one.")
_counted("transfer_bugs", r"transfers\.(?P<what>bugs|effects_failed)", "Steps of transfers that raised.")
_counted("transfers_matched_unsent", r"transfers\.matched_unsent", "News of receivers to sessions that do not poll.")
_counted(
    "peer_links",
    r"peers\.(?P<event>up|lost|dropped|overflowed|closed|guests_refused|refused|handshakes_failed)",
    "What happened to links and connections of other daemons.",
)
_counted(
    "peer_messages",
    r"peers\.(?P<outcome>received|unsent|stale|too_late|malformed|failed|unproven|revoked)",
    "Messages of other daemons.",
)
_counted("peer_regions_given", r"peers\.regions_given", "Pools of this host that another daemon mapped.")
_counted("network_sent_bytes", r"network\.sent_bytes", "Bytes written to other hosts.")
_counted("network_direct_bytes", r"network\.direct_bytes", "Bytes of other hosts that came directly into pages.")
_counted(
    "network_failures",
    r"network\.(?P<what>refused|unknown_credits|unanswered_credits|late_writes)",
    "What went wrong with writes of and to other hosts.",
)
_counted("network_fences", r"network\.fences", "Rebuilds of the network engine.")
_counted("operation_bytes", r"operations\.(?P<kind>\w+)\.moved_bytes", "Bytes that operations of the tiers moved.")
_counted("operations", r"operations\.(?P<kind>\w+)\.(?P<outcome>\w+)", "Ended operations of the tiers.")
_counted("cache_lookups", r"cache\.lookups", "LOOKUPs.")
_counted("cache_asked_blocks", r"cache\.asked_blocks", "Blocks of prompts in LOOKUPs.")
_counted("cache_hit_blocks", r"cache\.hit_blocks", "Blocks that were found in all groups.")
_counted(
    "cache_found_blocks", r"cache\.found\.(?P<where>host|disk|remote|nowhere)", "All asked blocks, by where they are."
)
_counted("cache_unbounded_hit_blocks", r"cache\.unbounded_hit_blocks", "What would be hits if nothing were evicted.")
_counted("cache_stored_blocks", r"cache\.stored_blocks", "New blocks.")
_counted("cache_lost_blocks", r"cache\.(?P<reason>missed|damaged)_blocks", "Blocks that were found, and not read.")
_counted("cache_expired_leases", r"cache\.expired_leases", "Leases that nobody used for five minutes.")
_counted(
    "tier_block_events",
    r"tiers\.(?P<tier>\w+)\.(?P<event>evicted|lost|promoted|written|read|skipped|damaged|missing)_blocks",
    "What happened to blocks of a tier.",
)
_counted("tier_promotions_refused", r"tiers\.host\.promotions_refused", "Blocks without room to come up.")
_counted("tier_busy", r"tiers\.host\.busy", "Requests that were told to come again, as the host tier is full.")
_counted("tier_outages", r"tiers\.(?P<tier>disk)\.(?P<what>full|failed)", "How often a tier did not take blocks.")
_counted("store", r"remote\.(?P<event>processes_started|joined|lost)", "What happened to the shared store.")
_counted("store_lookups", r"remote\.lookups", "Questions to the shared store.")
_counted("store_lookups_failed", r"remote\.lookups_(?P<reason>late|refused)", "Questions that it did not answer.")
_counted("store_found_blocks", r"remote\.found", "Blocks that the shared store has found.")
_counted("store_bytes", r"remote\.(?P<request>puts|gets)_bytes", "Bytes put into the shared store, and taken from it.")
_counted("store_requests", r"remote\.(?P<request>puts|gets)_(?P<outcome>\w+)", "Blocks put and got, by outcome.")
_counted("store_headers_damaged", r"remote\.headers_damaged", "Blocks of the shared store that are not what they say.")


_counted("copy_bytes", r"copies\.(?P<transport>local|pull|network)\.bytes", "Bytes of copies that have ended.")
_counted("copy_group_bytes", r"copies\.groups\.(?P<group>.+)", "The same by group of KV.")

COPY_BUSY_SECONDS = _metric(
    "counter", "copy_busy_seconds_total", "Time in which at least one copy was under way.", ("transport",)
)
STAGE_SECONDS = _metric(
    "histogram", "transfer_stage_seconds", "Where the time of transfers goes.", ("stage", "transport")
)
TRANSFER_SECONDS = _metric(
    "histogram", "transfer_seconds", "Times of sides that succeeded, as FINISHED says them.", ("direction", "part")
)
TIER_SECONDS = _metric("histogram", "tier_block_seconds", "What a lower tier took for a block.", ("tier", "way"))
TIER_RESIDENCE_SECONDS = _metric("histogram", "tier_residence_seconds", "Age of evicted blocks of the host tier.")
TIMED: Final = (
    Counted(STAGE_SECONDS, re.compile(r"stages\.(?P<stage>\w+)\.(?P<transport>\w+)")),
    Counted(TIER_SECONDS, re.compile(r"tiers\.(?P<tier>disk|remote)\.(?P<way>write|read|sync)")),
    Counted(TIER_RESIDENCE_SECONDS, re.compile(r"tiers\.host\.residence")),
    Counted(TRANSFER_SECONDS, re.compile(r"transfers\.(?P<direction>send|receive)\.(?P<part>waited|moved)")),
)


class CounterNames:
    """Finds the metric of a counter, or of a time; each name is matched once."""

    def __init__(self, counted: Sequence[Counted] = COUNTED) -> None:
        self._counted = counted
        self._known: dict[str, tuple[Counted, tuple[str, ...]] | None] = {}

    def __repr__(self) -> str:
        """Show how many names are known."""
        return f"<CounterNames {len(self._known)}>"

    def of(self, name: str) -> tuple[Counted, tuple[str, ...]] | None:
        """Return the metric and label values of a counter; None: it has none."""
        if name not in self._known:
            matches = ((one, one.pattern.fullmatch(name)) for one in self._counted)
            self._known[name] = next(((one, tuple(found.groups())) for one, found in matches if found), None)
        return self._known[name]

    def samples(self, counts: Mapping[str, int]) -> Iterator[Sample]:
        """Yield a sample for each counter, and 0 for what has no labels and was not counted yet."""
        there: set[Metric] = set()
        for name, count in counts.items():
            found = self.of(name)
            if found is not None:
                counted, labels = found
                there.add(counted.metric)
                yield Sample(counted.metric, labels, count * counted.scale)
        for one in COUNTED:
            if not one.metric.labels and one.metric not in there:
                yield Sample(one.metric, (), 0)
