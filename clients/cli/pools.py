"""``kvferry pools``: the holders of each pool's pages, and how old these are."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import msgspec

from kvferry.clients.cli.console import WORKED, add_daemon, show, table
from kvferry.clients.cli.inspect import ask
from kvferry.protocol.printable import json_line
from kvferry.protocol.session_messages import PoolStatus, SpaceStatus, Status, StatusReport


def add_pools(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument("--json", action="store_true", help="for programs")


def pools(options: argparse.Namespace) -> int:
    """Print the pools, and the holders of their pages."""
    report, boot_id = ask(options, "pools", Status(holders=True))
    if options.json:
        print(json_line({"boot_id": boot_id, "pools": msgspec.to_builtins(report.pools)}))
    else:
        show(pool_lines(report))
    return WORKED


def pool_lines(report: StatusReport) -> Iterable[str]:
    """Yield the lines that ``kvferry pools`` prints."""
    rows = [
        (pool.pool, pool.tenant, one.space, one.pages, one.free, one.largest_free_run, one.busy)
        for pool in report.pools
        for one in spaces_of(pool)
    ]
    yield from table("pools", ("pool", "tenant", "space", "pages", "free", "free in a row", "busy"), rows)
    holders = [
        (pool.pool, pool.tenant, one.space, one.pages, one.busy, f"{one.age_ms // 1000} s", one.name)
        for pool in report.pools
        for one in pool.holders  # the oldest first
    ]
    yield from table("holders of pages", ("pool", "tenant", "space", "pages", "busy", "oldest", "holder"), holders)
    if report.others is not None and report.others.pools:
        yield ""
        yield f"{report.others.users} other users have {report.others.pools} pools"


def spaces_of(pool: PoolStatus) -> tuple[SpaceStatus, ...]:
    """Return the page spaces of a pool, also where there is one."""
    return pool.spaces or (
        SpaceStatus(
            space="main",
            page_bytes=pool.page_bytes,
            pages=pool.pages,
            free=pool.free,
            busy=pool.busy,
            largest_free_run=pool.largest_free_run,
        ),
    )
