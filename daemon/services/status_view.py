"""What of STATUS a tenant is shown: what is its own, and totals of what is others'. Pure; knows no socket.

Root and the daemon's own user are shown everything: they could read it from the daemon's memory. Devices, tiers,
descriptors and counters are the daemon's, without anybody's names, and are shown to all; so are other daemons, but for
addresses that only others' transfers have named.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvferry.daemon.process.access import may_see_all
from kvferry.protocol.session_messages import OthersStatus, StatusReport


def seen_by(report: StatusReport, tenant: int | None, daemons: Collection[str]) -> StatusReport:
    """Return a report with what is others' as totals, unless the tenant may see all.

    ``daemons``: the addresses of other daemons that it may be told.
    """
    if may_see_all(tenant):
        return report
    sessions = tuple(one for one in report.sessions if one.tenant == tenant)
    numbers = {one.session for one in sessions}
    pools = tuple(one for one in report.pools if one.tenant == tenant)
    transfers = tuple(one for one in report.transfers if one.tenant == tenant)
    others = [one for one in report.pools if one.tenant != tenant]
    of_others = [one for one in report.sessions if one.tenant != tenant]
    operations = tuple(one for one in report.operations if one.session in numbers)
    tables = tuple(one for one in report.tables if one.session in numbers)
    return msgspec.structs.replace(
        report,
        pools=pools,
        sessions=sessions,
        transfers=transfers,
        operations=operations,
        tables=tables,
        recent=tuple(one for one in report.recent if one.tenant == tenant),
        peers=tuple(one for one in report.peers if one.address in daemons),
        configuration={},
        tenants=tuple(one for one in report.tenants if one.tenant == tenant),
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
