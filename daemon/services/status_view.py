"""What of STATUS a user is shown: what is his own, and totals of what is others'. Pure; knows no socket.

Root and the daemon's own user are shown everything: they could read it from the daemon's memory. Devices, tiers, other
daemons, descriptors and counters are the daemon's, without anybody's names, and are shown to all.
"""

from __future__ import annotations

import msgspec

from kvferry.daemon.process.access import may_see_all
from kvferry.protocol.session_messages import OthersStatus, StatusReport


def seen_by(report: StatusReport, user: int | None) -> StatusReport:
    """Return a report with what is others' as totals, unless the user may see all."""
    if may_see_all(user):
        return report
    sessions = tuple(one for one in report.sessions if one.tenant == user)
    numbers = {one.session for one in sessions}
    pools = tuple(one for one in report.pools if one.tenant == user)
    transfers = tuple(one for one in report.transfers if one.tenant == user)
    others = [one for one in report.pools if one.tenant != user]
    of_others = [one for one in report.sessions if one.tenant != user]
    operations = tuple(one for one in report.operations if one.session in numbers)
    tables = tuple(one for one in report.tables if one.session in numbers)
    return msgspec.structs.replace(
        report,
        pools=pools,
        sessions=sessions,
        transfers=transfers,
        operations=operations,
        tables=tables,
        recent=tuple(one for one in report.recent if one.tenant == user),
        configuration={},
        others=OthersStatus(
            users=len({one.tenant for one in others} | {one.tenant for one in of_others}),
            pools=len(others),
            region_bytes=sum(one.region_bytes for one in others),
            sessions=len(of_others),
            transfers=len(report.transfers) - len(transfers),
            operations=len(report.operations) - len(operations),
            tables=len(report.tables) - len(tables),
            kept_bytes=sum(one.kept_bytes + one.reply_bytes for one in of_others),
        ),
    )
