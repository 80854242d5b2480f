"""``kvferry verify``: let the daemon check its books, and say what it found wrong."""

from __future__ import annotations

import argparse

from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.console import FAILED, WORKED, add_daemon
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_messages import Finding, Verified, Verify

TIMEOUT_S = 60.0


def add_verify(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command, TIMEOUT_S)
    command.add_argument("--deep", action="store_true", help="read the disk tier's files too, as far as time allows")
    command.add_argument("--json", action="store_true", help="for programs")


def verify(options: argparse.Namespace) -> int:
    """Print a line for each finding, then what was checked; return 1 where something is wrong."""
    with Connection.open(options.runtime_dir, "verify", timeout_s=options.timeout) as connection:
        verified = connection.call(Verify(deep=options.deep), timeout_s=connection.left_s)
    if options.json:
        print(json_line(verified))
    else:
        for finding in verified.findings:
            print(printable(finding_line(finding)))
        print(closing_line(verified))
    return FAILED if verified.findings else WORKED


def finding_line(finding: Finding) -> str:
    """Return a finding as one line: where, what, which pages or bytes, who holds them, what to do."""
    parts = [f"{finding.where}: {finding.what}"]
    if finding.at:
        more = f" and {finding.count - len(finding.at)} more" if finding.count > len(finding.at) else ""
        parts.append(f"at {', '.join(map(str, finding.at))}{more}")
    elif finding.count:
        parts.append(f"{finding.count} in all")
    if finding.holder:
        parts.append(f"held by {finding.holder}")
    return f"{'; '.join(parts)}. To do: {finding.remedy}"


def closing_line(verified: Verified) -> str:
    """Return the last line: what was looked at, and how much is wrong."""
    looked_at = ", ".join(f"{count} {what}" for what, count in verified.checked.items())
    wrong = len(verified.findings) + verified.left_out
    found = f"{wrong} findings" if wrong else "nothing is wrong"
    return f"verify: {looked_at}: {found} (others waited for {verified.longest_step_us / 1000:.1f} ms at most)"
