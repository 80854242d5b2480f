"""``kvferry ping`` and ``kvferry status``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import msgspec

from kvferry.clients.sync_client import Client
from kvferry.protocol.session_messages import StatusReport

GIB = 1 << 30


def ping(options: argparse.Namespace) -> int:
    """Print which daemon answers, and how fast."""
    with Client.connect(options.runtime_dir, name="ping", session=False, timeout_s=options.timeout) as client:
        elapsed_us = client.ping() * 1e6
        version = client.welcome.daemon_version if client.welcome else "?"
        print(f"kvferry {version} boot {client.boot_id[:8]} answers in {elapsed_us:.0f} us")
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the daemon's pools, sessions, hand-offs and counters."""
    with Client.connect(options.runtime_dir, name="status", session=False, timeout_s=options.timeout) as client:
        report = client.status()
        boot_id = client.boot_id
    if options.json:
        print(msgspec.json.encode({"boot_id": boot_id, **msgspec.to_builtins(report)}).decode())
    else:
        print("\n".join(_lines(report, boot_id)))
    return 0


def _lines(report: StatusReport, boot_id: str) -> Iterable[str]:
    state = "draining" if report.draining else "serving"
    yield (
        f"kvferry {report.daemon_version} pid {report.pid} boot {boot_id[:8]} {state} "
        f"for {report.uptime_ms / 1000:.0f} s"
    )
    yield from _table(
        "pools",
        ("pool", "tenant", "pages", "free", "busy", "page KiB", "GiB", "layout"),
        [
            (p.pool, p.tenant, p.pages, p.free, p.busy, f"{p.page_bytes / 1024:.1f}", f"{p.region_bytes / GIB:.2f}",
             p.layout_digest[:8])
            for p in report.pools
        ],
    )  # fmt: skip
    yield from _table(
        "sessions",
        ("session", "name", "tenant", "pid", "pages", "hand-offs", "unacked"),
        [(s.session, s.name, s.tenant, s.pid, s.pages, s.rooms, s.unacknowledged_events) for s in report.sessions],
    )
    yield from _table(
        "hand-offs",
        ("request", "side", "pool", "state", "age ms", "pages", "arrived", "waits for"),
        [(r.request, r.side, r.pool, r.state, r.age_ms, r.pages, r.arrived, r.waits_for) for r in report.rooms],
    )
    yield from _table("counters", ("name", "count"), list(report.counters.items()))


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterable[str]:
    yield ""
    if not rows:
        yield f"no {title}"
        return
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
