"""``kvferry cache``: list what is in the tiers, pin, evict and clear blocks, drop snapshots."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence

from kvferry.clients.cli.console import add_daemon, show, table
from kvferry.clients.cli.progress import Progress
from kvferry.clients.sync_client import Client
from kvferry.protocol.errors import ClientClosedError, DeadlineError, InvalidFieldError
from kvferry.protocol.printable import json_line
from kvferry.protocol.tier_messages import (
    HASH_BYTES,
    CachedBlockStatus,
    SnapshotStatus,
)

MIB = 1 << 20
TIMEOUT_S = 10.0


def add_cache(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, run in (
        ("list", "list this user's cached blocks, oldest first", _list),
        ("pin", "protect blocks from eviction", _pin),
        ("unpin", "allow eviction of blocks again", _pin),
        ("evict", "drop blocks from every tier; pinned ones stay", _evict),
        ("clear", "drop all blocks of a pool or a model identity from every tier; pinned ones stay", _evict),
        ("snapshots", "list this user's snapshots", _snapshots),
        ("drop", "drop snapshots", _drop),
    ):
        action = actions.add_parser(name, help=text, description=text)
        add_daemon(action, TIMEOUT_S)
        action.add_argument("--json", action="store_true", help="for programs: one JSON object per line")
        if name in {"pin", "unpin", "evict"}:
            action.add_argument("hashes", nargs="+", metavar="HASH", help="32 hexadecimal digits, as list shows them")
        if name in {"pin", "unpin", "evict", "clear"}:
            whose = action.add_mutually_exclusive_group(required=True)
            whose.add_argument("--pool", metavar="POOL", help="blocks of this pool's model identity and layout")
            whose.add_argument("--identity", metavar="ID", help="blocks of this identity, as list shows it")
            if name == "clear":
                whose.add_argument("--all", action="store_true", help="blocks of all of this user's models")
        if name == "drop":
            action.add_argument("snapshots", nargs="+", metavar="SNAPSHOT", help="as snapshots shows them")
        action.set_defaults(act=run)


def cache(options: argparse.Namespace) -> int:
    """Run the selected action, within ``--timeout``.

    Raises:
        KvferryError: it was refused, or the daemon has not answered in time.
    """
    ends_at = time.monotonic() + options.timeout
    with Progress("cache", "the daemon has not answered yet"):
        connected = Client.connect(options.runtime_dir, name="cache", timeout_s=options.timeout)
    with connected as client:
        ends = threading.Timer(max(0.0, ends_at - time.monotonic()), client.close)  # whatever the action asks then
        ends.daemon = True
        ends.start()
        try:
            status: int = options.act(client, options)
        except ClientClosedError as cause:
            raise DeadlineError(f"the daemon did not answer within {options.timeout:g} s (--timeout)") from cause
        finally:
            ends.cancel()
    return status


def _list(client: Client, options: argparse.Namespace) -> int:
    blocks = list(client.cached_blocks())
    if options.json:
        for one in blocks:
            print(json_line(one))
    else:
        head = ("hash", "tiers", "MiB", "pages", "group", "layout", "model", "parent", "pinned by")
        show(table("cached blocks", head, [_block_row(one) for one in blocks]))
    return 0


def _pin(client: Client, options: argparse.Namespace) -> int:
    found = client.pin_cached(
        _hashes(options.hashes), pool=options.pool, identity=options.identity, pinned=options.action == "pin"
    )
    if options.json:
        print(json_line({"blocks": found, "pinned": options.action == "pin"}))
    else:
        print(f"{found} blocks {options.action}ned")
    return 0 if found else 1


def _evict(client: Client, options: argparse.Namespace) -> int:
    hashes = _hashes(options.hashes) if options.action == "evict" else None
    done = client.evict_cached(hashes, pool=options.pool, identity=options.identity)
    if options.json:
        print(json_line({"blocks": done.blocks, "size_bytes": done.size_bytes, "kept": done.kept}))
    else:
        kept = f"; {done.kept} are pinned and stay" if done.kept else ""
        print(f"{done.blocks} blocks dropped, {done.size_bytes / MIB:.1f} MiB{kept}")
    return 0


def _snapshots(client: Client, options: argparse.Namespace) -> int:
    snapshots = client.snapshots()
    if options.json:
        for one in snapshots:
            print(json_line(one))
    else:
        head = ("snapshot", "pool", "model", "pages", "tokens", "MiB", "age s", "session", "state", "restores")
        show(table("snapshots", head, [_snapshot_row(one) for one in snapshots]))
    return 0


def _drop(client: Client, options: argparse.Namespace) -> int:
    for name in options.snapshots:
        dropped = client.drop_snapshot(name)
        if options.json:
            print(json_line({"snapshot": name, "deferred": dropped.deferred}))
        else:
            print(f"{name} {'is dropped when its restores are done' if dropped.deferred else 'dropped'}")
    return 0


def _hashes(given: Sequence[str]) -> list[bytes]:
    found = []
    for one in given:
        try:
            found.append(bytes.fromhex(one))
        except ValueError as cause:
            raise InvalidFieldError(f"{one!r} is not hexadecimal", field="HASH") from cause
        if len(found[-1]) != HASH_BYTES:
            raise InvalidFieldError(f"{one!r} does not have {2 * HASH_BYTES} digits", field="HASH")
    return found


def _block_row(one: CachedBlockStatus) -> Sequence[object]:
    size = f"{one.size_bytes / MIB:.2f}"
    pinned = ", ".join(one.pinned_by) or "-"
    parent = one.parent[:8] or "-"
    # Differently salted caches of one model share a label: only the identity differs.
    model = f"{one.model or '?'} ({one.identity})"
    form = (one.block_pages, one.group, one.layout_digest[:8], model)
    return (one.hash, "+".join(one.tiers), size, *form, parent, pinned)


def _snapshot_row(one: SnapshotStatus) -> Sequence[object]:
    pages = "+".join(str(part.count) for part in one.lists)
    session = "-" if one.session is None else one.session
    size, age = f"{one.size_bytes / MIB:.1f}", f"{one.age_ms / 1000:.0f}"
    return (
        one.snapshot,
        one.pool,
        one.model or "-",
        pages,
        one.tokens or "-",
        size,
        age,
        session,
        one.state,
        one.restores,
    )
