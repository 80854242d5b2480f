"""``kvferry doctor``: run the checks in a readable order, and print their findings.

A check that raises does not stop the others: it becomes a finding itself.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvferry.clients.cli.console import add_daemon, table, terminal_columns
from kvferry.clients.cli.doctor import kernel, npus, ports, running, tiers, trials, unit, wheels
from kvferry.clients.cli.doctor.host import Finding, Host, exit_status, summary
from kvferry.clients.cli.doctor.needs import Needs, read_needs
from kvferry.clients.cli.progress import Progress
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.printable import json_line, printable

Found = Finding | dict[str, Finding] | None
"""One finding, or several, each with a name of its own."""

Checks = dict[str, Callable[[], Found]]
"""By the name in the report, the same in every release: programs select by it."""

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "memory": ("pools.max_bytes",),
    "huge pages": ("memory.huge_pages",),
    "numa of pools": ("memory.numa_node",),
    "memlock": ("pools.max_bytes", "tiers.host_bytes"),
    "mooncake": ("network.transport", "network.protocol", "tiers.remote.transport", "tiers.remote.protocol"),
    "peers.listen": ("peers.listen",),
    "peers.keys": ("peers.listen", "peers.keys", "peers.insecure"),
    "metrics.listen": ("metrics.listen",),
    "network.address": ("network.address",),
    "mooncake ports": ("network.transport",),
    "host tier": ("tiers.host_bytes", "tiers.remote.segment_bytes"),
    "disk tier": ("tiers.disk",),
    "mooncake store": ("tiers.remote.transport",),
    "tiers.remote.address": ("tiers.remote.address",),
    "store master": ("tiers.remote.master",),
    "tenants": ("tenants",),
    "runtime directory": ("runtime_dir",),
    "devices.open": ("devices",),
}
"""The keys that each check depends on: it is not run where the daemon refuses one of them."""

_LEAST_COLUMNS: Final = 40
_HEAD: Final = ("check", "state", "found")


def add_doctor(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="the daemon's configuration; by default its defaults"
    )
    add_daemon(command)
    command.add_argument("--user", metavar="NAME", help="the user that will use the devices (this user)")
    command.add_argument("--npu", action="store_true", help="require an NPU, even if none is visible")
    command.add_argument("--json", action="store_true", help="for programs")


def doctor(options: argparse.Namespace) -> int:
    """Print what this host has and lacks; return 1 if something that is needed is missing.

    Raises:
        InvalidFieldError: no such user, or the configuration cannot be read.
    """
    _check_readable(options.config)
    host = Host.this_one(options.user)
    with Progress("doctor", "looking at this host"):
        findings = examine(host, options)
    status = exit_status(findings.values())
    if options.json:
        report = {
            "status": status,
            "findings": [{"name": name, **msgspec.to_builtins(one)} for name, one in findings.items()],
        }
        print(json_line(report))
    else:
        print("\n".join(map(printable, lines(findings, terminal_columns()))))
    return status


def examine(host: Host, options: argparse.Namespace) -> dict[str, Finding]:
    """Run every check that applies to a host."""
    needs, configuration = read_needs(host, options.config, npu=options.npu)
    instance = options.config.stem if options.config else ""  # as kvferry@NAME has it
    daemon = running.ask_daemon(host, options.runtime_dir, needs.config.runtime_dir, options.timeout, instance)
    needs = msgspec.structs.replace(needs, daemon_pid=daemon.pid)
    npu = needs.asks_for_npu or npus.has_npu_sign(host)
    checks: Checks = {
        **_host_checks(host, needs, daemon, npu=npu),
        **(_npu_checks(host) if npu else _no_npu_checks(host)),
        **_transfer_checks(host, needs, daemon),
        **_tier_checks(host, needs, daemon),
        "systemd unit": partial(unit.check_unit, host, needs, npu=npu),
        "tenants": partial(running.check_tenants, needs.config),
        "runtime directory": partial(running.check_directory, daemon),
        "daemon": partial(running.check_daemon, daemon),
        "descriptors": partial(running.check_descriptors, daemon),
        "devices": partial(running.check_devices, daemon),
        "devices.open": partial(trials.check_open, host, needs),
    }
    findings = {"configuration": configuration}
    for name, check in checks.items():
        refused = needs.refused(KEYS.get(name, ()))
        findings |= {name: refused} if refused else _run(name, check)
    return findings


def lines(findings: Mapping[str, Finding], columns: int = 0) -> Iterable[str]:
    """Yield the report as text: one row per check, the fix below it, and a summary of the problems at the end.

    Long texts are wrapped for a terminal of ``columns``; with 0 they are not, so that lines can be searched for.
    """
    beside = (
        sum(
            2 + max(len(text) for text in texts)
            for texts in ((_HEAD[0], *findings), (_HEAD[1], *(one.state for one in findings.values())))
        )
        + 2
    )
    wrap = partial(
        textwrap.wrap,
        width=max(_LEAST_COLUMNS, columns - beside) if columns else sys.maxsize,
        break_long_words=False,  # commands stay copyable
        break_on_hyphens=False,
    )
    rows: list[tuple[str, str, str]] = []
    for name, one in findings.items():
        said = wrap(one.found) or [""]
        fix = wrap(f"-> {one.fix}", subsequent_indent="   ") if one.fix else []
        rows += [(name, one.state, said[0]), *(("", "", more) for more in (*said[1:], *fix))]
    yield from list(table("host", _HEAD, rows, room=0))[2:]
    yield ""
    yield summary(findings)


def _check_readable(config: Path | None) -> None:
    """Raise for a file that does not exist: a mistake on the command line, not a file that the daemon would refuse."""
    try:
        if config is not None:
            config.open("rb").close()
    except OSError as cause:
        raise InvalidFieldError(f"{config}: {cause.strerror}", field="--config") from cause


def _host_checks(host: Host, needs: Needs, daemon: running.Running, *, npu: bool) -> Checks:
    pool_bytes, tier_bytes, wanted = needs.pool_bytes(host), needs.host_tier_bytes(host), needs.config.memory
    return {
        "kernel": partial(kernel.check_kernel, host),
        "memory": partial(kernel.check_memory, host, pool_bytes, daemon.pid),
        "huge pages": partial(kernel.check_huge_pages, host, wanted, pool_bytes),
        "numa of pools": partial(kernel.check_numa, host, wanted, daemon.pid),
        "shared memory": partial(kernel.check_shm, host, npu=npu),
        "memlock": partial(kernel.check_memlock, host, daemon.pid, pool_bytes + tier_bytes, npu=npu),
        "open files": partial(kernel.check_files, host, daemon.pid),
        "copies": kernel.check_copies,
    }


def _npu_checks(host: Host) -> Checks:
    smi = npus.read_npu_smi(host)
    return {
        "driver": partial(npus.check_driver, host, smi),
        "npu health": partial(npus.check_health, smi),
        "device nodes": partial(npus.check_nodes, host),
        "group": partial(npus.check_group, host),
        "numa": partial(npus.check_numa, host),
        "CANN": partial(npus.check_cann, host),
        "CANN library": partial(npus.check_library, host),
        "torch_npu": lambda: wheels.check_torch_npu(wheels.probe_torch(host)),
        "unit's CANN": partial(unit.check_unit_environment, host),
    }


def _no_npu_checks(host: Host) -> Checks:
    return {
        "npu": lambda: Finding("ok", "no NPU on this host: host pools only"),
        "torch_npu": lambda: wheels.check_without_npu(wheels.probe_torch(host)),
    }


def _transfer_checks(host: Host, needs: Needs, daemon: running.Running) -> Checks:
    # Finding the sockets' owners means scanning all processes: only if something is configured to listen.
    listens = (needs.config.peers.listen, needs.config.metrics.listen, needs.mooncake, needs.store)
    sockets = ports.listeners(host) if any(listens) else []
    return {
        "mooncake": partial(wheels.check_wheel, host, needs),
        "libibverbs": partial(wheels.check_verbs, host, needs),
        "peers.listen": partial(ports.check_listen, host, needs, sockets, daemon),
        "peers.keys": partial(ports.check_keys, host, needs),
        "metrics.listen": partial(ports.check_metrics, host, needs, sockets, daemon.pid),
        "network.address": partial(trials.check_network, host, needs),
        "mooncake ports": partial(ports.check_mooncake, host, needs, sockets, daemon.pid),
    }


def _tier_checks(host: Host, needs: Needs, daemon: running.Running) -> Checks:
    used_bytes = running.used_bytes(daemon, "disk")
    return {
        "host tier": partial(tiers.check_host_tier, host, needs),
        "disk tier": partial(tiers.check_disk_tier, host, needs, used_bytes),
        "mooncake store": partial(wheels.check_store_module, host, needs),
        "tiers.remote.address": partial(trials.check_store_address, host, needs),
        "store master": partial(tiers.check_master, needs),
        "tiers": partial(running.check_tiers, daemon),
    }


def _run(name: str, check: Callable[[], Found]) -> dict[str, Finding]:
    """Return the findings of a check by their names, or one that says how it failed."""
    try:
        found = check()
    except Exception as error:  # noqa: BLE001  the command exists for hosts in odd states
        found = Finding("unknown", f"the check itself failed: {type(error).__name__}: {error}", "report it")
    if isinstance(found, Finding):
        return {name: found}
    return found or {}
