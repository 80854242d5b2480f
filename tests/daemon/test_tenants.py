"""Tenants: who is in which, as the kernel says it, and what they see of each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from kvferry.clients import Client
from kvferry.clients.cli.main import main
from kvferry.daemon.process.tenants import Tenants
from kvferry.protocol.base import Body, ErrorReply
from kvferry.protocol.config.schema import TenantConfig
from kvferry.protocol.config.tenants import number_of
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.pool_messages import PoolAttached, PoolCreated
from kvferry.protocol.session_messages import StatusReport, TenantStatus
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.users import SOMEBODY, Witness, as_user

GROUP, OTHER_GROUP = 5000, 6000
ANN, BEN = 2001, 2002
SPEC: Final = {
    "kind": "mha", "layers": 1, "tokens": 64, "page_size": 4, "kv_heads": 1, "head_dim": 4, "dtype": "float32",
}  # fmt: skip
CONFIG: Final = f"""
[pools]
max_bytes = "1MiB"
[tiers]
host_bytes = "4MiB"
[tenants.team-a]
users = [{ANN}]
groups = [{GROUP}]
share = 0.5
[tenants.team-b]
groups = [{OTHER_GROUP}]
tier_bytes = "1MiB"
"""
BY_ITS_COMMAND: Final = {"KVFERRY_TEST": "the daemon is started by the command that it starts its successor by"}
TEAMS: Final = {
    "team-a": TenantConfig(users=(ANN,), groups=(GROUP,)),
    "team-b": TenantConfig(groups=(OTHER_GROUP,)),
}
A, B = number_of("team-a"), number_of("team-b")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with kit.daemon(CONFIG, keep=True, environment=BY_ITS_COMMAND) as one:
        yield one


def told_by_the_kernel(user: int, group: int, groups: Sequence[int]) -> int:
    """Return the tenant of a process of this user and these groups."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("")  # which the kernel names
        listener.listen()
        with as_user(user, group, groups):
            client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            return Tenants(TEAMS).of(accepted)


@pytest.mark.parametrize(
    ("user", "group", "groups", "tenant"),
    [
        (ANN, 0, [0], A),
        (ANN, OTHER_GROUP, [OTHER_GROUP], A),  # who is named is not asked for groups
        (BEN, 0, [0], BEN),
        (BEN, GROUP, [0], A),
        (BEN, 0, [0, 77, OTHER_GROUP], B),
        (BEN, OTHER_GROUP, [0, GROUP], B),  # as which it acts
        (BEN, 0, [OTHER_GROUP, GROUP], A),  # the first one in the configuration
        (BEN, 0, range(100, 400), BEN),  # more groups than are looked at
        (0, GROUP, [GROUP], 0),
    ],
)
def test_a_process_is_of_the_tenant_that_the_kernel_says(
    user: int, group: int, groups: Sequence[int], tenant: int
) -> None:
    assert told_by_the_kernel(user, group, groups) == tenant


@pytest.mark.parametrize(
    ("tenants", "field", "said"),
    [
        ({"a": TenantConfig(groups=("no-such-group",))}, "tenants.a.groups", "this host has no such group"),
        ({"a": TenantConfig(users=("no-such-user",))}, "tenants.a.users", "this host has no such user"),
        (
            {"a": TenantConfig(users=("nobody",)), "b": TenantConfig(users=(65534,))},
            "tenants.b.users",
            "tenants.a.users",
        ),
        ({"a": TenantConfig(users=("root",))}, "tenants.a.users", "sees what everybody has"),
        ({"a": TenantConfig(users=(os.geteuid(),))}, "tenants.a.users", "sees what everybody has"),
    ],
)
def test_who_cannot_be_in_a_tenant_is_named(tenants: dict[str, TenantConfig], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tenants(tenants)
    assert caught.value.field == field
    assert said in caught.value.detail


def attached(who: Witness, pool: str) -> bool:
    return isinstance(who.say("ATTACH_POOL", pool=pool), PoolAttached)


def rows(answer: Body) -> dict[str, TenantStatus]:
    assert isinstance(answer, StatusReport)
    return {one.name or str(one.tenant): one for one in answer.tenants}


def test_members_of_a_tenant_see_each_others_and_nobody_elses(daemon: Daemon, client: Client) -> None:
    with (
        Witness.of(daemon, ANN, "ann") as ann,
        Witness.of(daemon, BEN, "ben", groups=[0, GROUP]) as ben,
        Witness.of(daemon, BEN, "of-team-b", groups=[0, OTHER_GROUP]) as of_b,
        Witness.of(daemon, SOMEBODY, "somebody") as somebody,
    ):
        assert isinstance(ann.say("CREATE_POOL", pool="theirs", spec=SPEC), PoolCreated)
        assert [attached(one, "theirs") for one in (ann, ben, of_b, somebody)] == [True, True, False, False]
        seen = rows(ben.say("STATUS"))
        assert seen.keys() == {"team-a"}
        assert (seen["team-a"].sessions, seen["team-a"].share) == (2, 0.5)
        assert seen["team-a"].pool_bytes > 0
        assert rows(somebody.say("STATUS")).keys() == {str(SOMEBODY)}
        assert rows(client.status()).keys() >= {"team-a", "team-b", str(SOMEBODY), "0"}


def test_what_is_kept_for_a_tenant_others_are_refused(daemon: Daemon) -> None:
    """Three quarters of ``pools.max_bytes``, of which half are kept for team A, though it has nothing."""
    large = SPEC | {"tokens": 4 * 6000}
    with Witness.of(daemon, SOMEBODY, "first") as first, Witness.of(daemon, ANN, "ann") as ann:
        refused, made = (one.say("CREATE_POOL", pool="large", spec=large) for one in (first, ann))
    assert isinstance(refused, ErrorReply)
    assert refused.error.code == "OUT_OF_MEMORY"
    assert isinstance(made, PoolCreated)


def test_a_session_stays_of_its_tenant_whatever_the_configuration_says_then(daemon: Daemon) -> None:
    with Witness.of(daemon, ANN, "ann") as ann:
        ann.say("CREATE_POOL", pool="theirs", spec=SPEC)
        daemon.configure(CONFIG.replace(f"users = [{ANN}]", "users = []"))
        daemon.upgrade()
        with Client.connect(daemon.runtime_dir) as client:
            report = client.status()
        assert [(one.pool, one.tenant) for one in report.pools] == [("theirs", A)]
        assert [one.tenant for one in report.sessions if one.name == "ann"] == [A]
        with Witness.of(daemon, ANN, "again") as again, Witness.of(daemon, BEN, "ben", groups=[0, GROUP]) as ben:
            assert [attached(one, "theirs") for one in (again, ben)] == [False, True]


def test_no_daemon_with_a_group_that_does_not_exist_takes_anothers_place(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.configure(CONFIG.replace(f"groups = [{OTHER_GROUP}]", 'groups = ["no-such-group"]'))
    with Witness.of(daemon, ANN, "ann") as ann:
        assert main(["upgrade", "--runtime-dir", os.fspath(daemon.runtime_dir)]) == 1
        assert "tenants.team-b.groups has 'no-such-group'" in capsys.readouterr().err
        assert rows(ann.say("STATUS")).keys() == {"team-a"}
