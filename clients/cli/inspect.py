"""``kvferry ping`` and ``kvferry status``."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.console import FAILED, WORKED, add_daemon, add_wait, show, table
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_messages import (
    DescriptorsStatus,
    DeviceStatus,
    OthersStatus,
    PeerStatus,
    Ping,
    PoolStatus,
    SessionStatus,
    Status,
    StatusReport,
    TablesStatus,
    TenantStatus,
    TransferStatus,
)

MIB = 1 << 20
GIB = 1 << 30


def add_ping(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument("--json", action="store_true", help="for programs")


def ping(options: argparse.Namespace) -> int:
    """Print which daemon answers, and the round-trip time; return 1 where it accepts no new transfers."""
    with Connection.open(options.runtime_dir, "ping", timeout_s=options.timeout) as connection:
        started = time.perf_counter()
        pong = connection.call(Ping(), timeout_s=connection.left_s)
        elapsed_us = (time.perf_counter() - started) * 1e6
        version, boot_id = connection.welcome.daemon_version, connection.boot_id
    if options.json:
        said = {"boot_id": boot_id, "daemon_version": version, "round_trip_us": round(elapsed_us)}
        print(json_line({**said, "refuses_transfers": pong.refuses_transfers}))
    else:
        but = "; it accepts no new transfers: it ends or is drained" if pong.refuses_transfers else ""
        print(printable(f"kvferry {version} boot {boot_id[:8]} answers in {elapsed_us:.0f} us{but}"))
    return FAILED if pong.refuses_transfers else WORKED


def add_status(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    add_wait(command)
    command.add_argument("--json", action="store_true", help="for programs")


def status(options: argparse.Namespace) -> int:
    """Print the daemon's pools, sessions, transfers, devices, graph tables and counters."""
    report, boot_id = ask(options, "status", Status(), wait_s=options.wait)
    if options.json:
        print(json_line({"boot_id": boot_id, **msgspec.to_builtins(report)}))
    else:
        show(status_lines(report, boot_id))
    return 0


def ask(
    options: argparse.Namespace, name: str, request: Status, runtime_dir: str | None = None, *, wait_s: float = 0.0
) -> tuple[StatusReport, str]:
    """Return what the daemon reports to a command of this name, and its boot id; of another daemon where one is named.

    Raises:
        KvferryError: see ``Connection.open``.
    """
    directory = runtime_dir or options.runtime_dir
    with Connection.open(directory, name, timeout_s=options.timeout, wait_s=wait_s) as connection:
        return connection.call(request, timeout_s=connection.left_s), connection.boot_id


def names_of_sessions(report: StatusReport) -> dict[int, str]:
    """Return each session's number and name, and its process, as text."""
    return {one.session: f"{one.session} {one.name}, pid {one.pid}" for one in report.sessions}


def status_lines(report: StatusReport, boot_id: str) -> Iterable[str]:
    """Yield the lines that ``kvferry status`` prints."""
    state = "draining" if report.draining else "drained" if report.drained else "serving"
    yield (
        f"kvferry {report.daemon_version} pid {report.pid} boot {boot_id[:8]} {state}, "
        f"up for {report.uptime_ms / 1000:.0f} s"
    )
    if report.descriptors is not None:
        yield _descriptors_line(report.descriptors)
    yield f"other daemons find it at {', '.join(report.addresses)}{_PROOFS[report.peers_prove]}"
    named = {one.tenant: one.name for one in report.tenants if one.name}
    if named or len(report.tenants) > 1:
        of_tenant = ("tenant", "share", "sessions", "descriptors", "kept MiB", "pools GiB", "host tier GiB", "disk GiB")
        yield from table("tenants", of_tenant, [_tenant_row(one) for one in report.tenants])
    yield from table(
        "pools",
        ("pool", "tenant", "pages", "free", "busy", "page KiB", "GiB", "layout", "model", "device"),
        [row for pool in report.pools for row in _pool_rows(pool, named)],
    )
    yield from table(
        "sessions",
        ("session", "name", "instance", "tenant", "pid", "pages", "transfers", "unacked"),
        [_session_row(one, named) for one in report.sessions],
    )
    yield ""
    yield _transfers_line(report.transfers)
    if report.tiers:
        operations = f"; {len(report.operations)} operations under way" if report.operations else ""
        yield f"tiers: {', '.join(f'{one.tier} {one.state}' for one in report.tiers)}{operations} (kvferry tiers)"
    if report.others is not None:
        yield ""
        yield _others_line(report.others)
    if report.devices:
        of_device = ("device", "GiB", "free GiB", "pools GiB", "copies directly from", "pools kept by", "state")
        yield from table("devices", of_device, [_device_row(device) for device in report.devices])
    if report.tables:
        of_tables = ("tables", "session", "device", "rows", "columns", "updates", "state")
        yield from table("graph tables", of_tables, [_tables_row(one) for one in report.tables])
    if report.peers:
        of_peer = ("address", "node", "keys", "state", "round trip ms", "heard s ago", "announced", "waiting", "why")
        yield from table("other daemons", of_peer, [_peer_row(peer) for peer in report.peers])
    if report.network:
        slots = report.network
        of_slots = ("session", "state", "buffer KiB", "buffers", "free", "credits")
        of_quarantine = ("quarantined", "quarantined MiB", "held by")
        holders = ", ".join(f"{address} {count}" for address, count in slots.held_by.items()) or "-"
        row = (
            slots.session,
            slots.state,
            slots.bounce_buffer_bytes >> 10,
            slots.bounce_buffers,
            slots.free,
            slots.credits,
        )
        quarantined = (slots.quarantined, f"{slots.quarantined_bytes / MIB:.1f}")
        yield from table("network", (*of_slots, *of_quarantine), [(*row, *quarantined, holders)])
    yield from table("counters", ("name", "count"), list(report.counters.items()))


def _transfers_line(transfers: Sequence[TransferStatus]) -> str:
    """Return how many there are by state, and what the oldest one waits for."""
    if not transfers:
        return "no transfers"
    counts = Counter((one.direction, one.state) for one in transfers)
    said = ", ".join(f"{count} {direction} {state}" for (direction, state), count in sorted(counts.items()))
    oldest = max(transfers, key=lambda one: one.age_ms)
    return (
        f"transfers: {said} (kvferry transfers); the oldest, {oldest.request_id}, is {oldest.age_ms / 1000:.1f} s old "
        f"and waits for {oldest.waits_for}"
    )


def _others_line(others: OthersStatus) -> str:
    return (
        f"{others.users} other users have {others.pools} pools of {others.region_bytes / GIB:.2f} GiB, "
        f"{others.sessions} sessions, {others.transfers} transfers, {others.operations} operations"
    )


_PROOFS: Final = {
    "": "",
    "key": ", with keys",
    "nothing": "; INSECURE: any process that reaches it may act as a daemon (peers.insecure)",
}


def _peer_row(peer: PeerStatus) -> tuple[object, ...]:
    """Return another daemon's row; what is not known is a dash."""
    round_trip = f"{peer.round_trip_us / 1000:.2f}" if peer.round_trip_us else "-"
    heard = f"{peer.quiet_ms / 1000:.1f}" if peer.quiet_ms else "-"
    known = (peer.address, peer.node or "-", " ".join(peer.keys) or "-")
    return (*known, peer.state, round_trip, heard, peer.announced, peer.waiting, peer.why or "-")


def _descriptors_line(one: DescriptorsStatus) -> str:
    waits = "" if one.listening else "; NEW CONNECTIONS WAIT: none is left"
    return f"{one.open} of {one.limit} descriptors open, {one.promised} of {one.room} promised{waits}"


def _pool_rows(pool: PoolStatus, named: Mapping[int, str]) -> Iterable[tuple[object, ...]]:
    """Yield a pool's row, and one for each further page space; spaces are named if there are several."""
    first, *more = [f"{pool.pool} {one.space}" for one in pool.spaces] or [pool.pool]
    yield (
        first, named.get(pool.tenant, pool.tenant), pool.pages, pool.free, pool.busy, f"{pool.page_bytes / 1024:.1f}",
        f"{pool.region_bytes / GIB:.2f}", pool.layout_digest[:8],
        pool.model.label if pool.model else "-", _place(pool),
    )  # fmt: skip
    for name, one in zip(more, pool.spaces[1:], strict=True):
        yield (name, "", one.pages, one.free, one.busy, f"{one.page_bytes / 1024:.1f}", "", "", "", "")


def _session_row(one: SessionStatus, named: Mapping[int, str]) -> tuple[object, ...]:
    """Return a session's row; its instance by its number, and its name where it has one."""
    instance = f"{one.owner} {one.instance}".rstrip()
    whose = named.get(one.tenant, one.tenant)
    return (one.session, one.name, instance, whose, one.pid, one.pages, one.transfers, one.unacknowledged_events)


def _tenant_row(one: TenantStatus) -> tuple[object, ...]:
    """Return a tenant's row, by its name or, of a user, the number."""
    share = f"{one.share:.0%}" if one.share else "-"
    sizes = [f"{size / GIB:.2f}" for size in (one.pool_bytes, one.tier_bytes, one.disk_bytes)]
    return (one.name or one.tenant, share, one.sessions, one.descriptors, f"{one.kept_bytes / MIB:.1f}", *sizes)


def _place(pool: PoolStatus) -> str:
    """Return a pool's device, and whose memory it is, or with whom it ends, where that is not the daemon."""
    if pool.registered_by is not None:
        return f"{pool.device}, registered by session {pool.registered_by}"
    return pool.device if pool.ends_with is None else f"{pool.device}, ends with instance {pool.ends_with}"


def _device_row(device: DeviceStatus) -> tuple[object, ...]:
    """Return a device's row; memory sizes are unknown until the device is first used."""
    total, free = (
        f"{size / GIB:.1f}" if device.total_bytes else "?" for size in (device.total_bytes, device.free_bytes)
    )
    pools, reaches = f"{device.pool_bytes / GIB:.2f}", " ".join(device.reaches) or "-"
    return (device.device, total, free, pools, reaches, device.keeper or "-", device.state)


def _tables_row(tables: TablesStatus) -> tuple[object, ...]:
    """Return the row of a session's graph tables."""
    state = "an update waits" if tables.waiting else "idle"
    return (tables.tables, tables.session, tables.device, tables.max_batch, tables.columns, tables.updates, state)
