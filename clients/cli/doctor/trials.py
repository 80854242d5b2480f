"""Checks by the daemon's own code, each in a process of its own: what would a start meet with this configuration?

So doctor cannot be content with what the daemon refuses: a port that nobody listens on may be bound all the same, and
an address of this host may be one by which no bytes come.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.host import Finding, Host, run_child
from kvferry.clients.cli.doctor.needs import Needs

MODULE: Final = "kvferry.daemon.trial"
TIMEOUT_S: Final = 60.0
"""Opening eight devices takes half a minute if the driver has just been loaded."""


class _Outcome(msgspec.Struct, frozen=True):
    problem: str
    remedy: str


def check_network(host: Host, needs: Needs) -> Finding | None:
    """Check whether bytes come by the network's address; None if Mooncake does not transfer between hosts."""
    if not needs.mooncake:
        return None
    said = f"bytes that this host sends itself through Mooncake arrive at {needs.config.network_address}"
    return attempt(host, needs, "network.address", said)


def check_store_address(host: Host, needs: Needs) -> Finding | None:
    """Check whether bytes come by the store's address; None if no store is configured."""
    if not needs.store:
        return None
    said = f"bytes that this host sends itself through Mooncake arrive at {needs.config.store_address}"
    return attempt(host, needs, "tiers.remote.address", said)


def check_open(host: Host, needs: Needs) -> Finding | None:
    """Check whether the devices can be opened that the daemon opens at its start; None if it opens none, or runs."""
    names = ", ".join(needs.config.devices.open)
    if not names or needs.daemon_pid is not None:
        return None
    return attempt(host, needs, "devices.open", f"{names} can be opened")


def attempt(host: Host, needs: Needs, key: str, ok: str) -> Finding:
    """Have the daemon's code try what it needs for a key of the configuration file."""
    if needs.mistakes or needs.path is None:
        return Finding("unknown", "not tried: the daemon refuses the configuration", "correct the file")
    command = [*host.python, "-P", "-m", MODULE, str(host.path(needs.path)), key]
    done = run_child(command, host.environ, TIMEOUT_S)
    try:
        outcome = msgspec.convert(json.loads(done.output.strip().splitlines()[-1]), _Outcome)
    except (ValueError, IndexError):  # msgspec's ValidationError is one, too
        why = f"no end within {TIMEOUT_S:g} s" if done.status is None else done.last_error or f"status {done.status}"
        return Finding("unknown", f"it could not be tried: {why}", "run kvferry with the daemon's Python")
    return Finding("missing", outcome.problem, outcome.remedy) if outcome.problem else Finding("ok", ok)
