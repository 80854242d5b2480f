"""Every key of the configuration, from its schema: what is too small, too large or of a wrong type is refused in words.

Then the keys that are right by themselves and wrong together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from kvferry.protocol.config.conflicts import HostOffer
from kvferry.protocol.config.load import load_config, read_config
from kvferry.protocol.config.schema import Config, Section
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.limits import Limits
from kvferry.protocol.settings import size_bytes, size_text

HUGE = 10**30
OFFER = HostOffer(64 << 30, "this host", frozenset({0, 1}))


class Key(NamedTuple):
    """One key of the file."""

    name: str
    kind: inspect.Type

    def text(self, value: object) -> str:
        """Return a file that gives this key alone."""
        *tables, key = self.name.split(".")
        table = f"[{'.'.join(tables)}]\n" if tables else ""
        return f"{table}{key} = {toml(value)}\n"


def toml(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def keys(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from keys(field.type, f"{prefix}{field.name}.")
        else:
            yield Key(f"{prefix}{field.name}", plain(inspect.type_info(field.type)))


def plain(kind: inspect.Type) -> inspect.Type:
    """Return what a key is that may be left out, without what is said of it."""
    if isinstance(kind, inspect.Metadata):
        return plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        (one,) = (one for one in kind.types if not isinstance(one, inspect.NoneType))
        return plain(one)
    return kind


class Wrong(NamedTuple):
    """Values that a key may not have, and what the refusal must say of those that it may."""

    values: tuple[object, ...]
    said: tuple[str, ...]


def wrong(key: Key) -> Wrong:
    match key.kind:
        case inspect.IntType() | inspect.FloatType() as number:
            return wrong_number(key, number)
        case inspect.BoolType():
            return Wrong((0, 1, "true"), ("true or false",))
        case inspect.LiteralType(values=values):
            return Wrong(("", "x", 1, str(values[0]).upper()), tuple(f'"{one}"' for one in values))
        case inspect.StrType(pattern=pattern):
            assert pattern is not None, f"{key.name} takes any text"
            return Wrong(("", "\0", 1, True, "x" * 5000), ())
        case inspect.VarTupleType():
            return Wrong(("npu:0", ["device"], [1]), ("npu:N",))
        case inspect.DictType():
            return Wrong((1, [1], "x"), ("each key a name that begins with a letter", "each value a table"))
        case _:
            pytest.fail(f"{key.name}: a new kind of key: say here what is wrong for it")


def wrong_number(key: Key, number: inspect.IntType | inspect.FloatType) -> Wrong:
    assert number.le is not None, f"{key.name} has no upper bound"
    assert (number.ge is None) != (number.gt is None), f"{key.name} has no lower bound"
    low = number.gt if number.ge is None else number.ge - 1
    above = (number.le + 1, HUGE, math.nan, math.inf)
    values: tuple[object, ...] = (low, -1, -HUGE, *above, True, "1", "x", [1], {"y": 1})
    if isinstance(number, inspect.IntType):
        values = (*values, 1.5)
    if not key.name.endswith("_bytes"):
        return Wrong(values, (f"{number.le:.15g}",))
    sizes = ("8GB", "8 gib", "GiB", "-1GiB", "1e3MiB", "0.3KiB", f"{HUGE}TiB", "1GiB ")
    return Wrong((*values, *sizes), (size_text(int(number.le)), 'as "8GiB", "512 MiB" or "1.5GiB"'))


ALL = [pytest.param(key, id=key.name) for key in keys()]


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvferry.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    return file


def refused(tmp_path: Path, text: str) -> ConfigError:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, OFFER)
    assert caught.value.detail.startswith(f"{file}: ")
    return caught.value


@pytest.mark.parametrize("key", ALL)
def test_a_wrong_value_is_refused_with_file_key_value_and_what_is_right(tmp_path: Path, key: Key) -> None:
    values, said = wrong(key)
    for value in values:
        error = refused(tmp_path, key.text(value))
        shown = (toml(value) if not isinstance(value, dict) else json.dumps(value, separators=(",", ":")))[:60]
        assert error.field == key.name, value
        assert f" {key.name} = {shown}" in error.detail.replace("1e+30", str(HUGE)), value
        assert ": must be " in error.detail
        assert all(one in error.detail for one in said), value


@pytest.mark.parametrize("table", ["", "limits", "tiers", "tiers.disk"])
def test_an_unknown_key_is_refused_with_the_known_ones(tmp_path: Path, table: str) -> None:
    error = refused(tmp_path, Key(f"{table}.max_byte".lstrip("."), inspect.AnyType()).text(1))
    assert error.field == f"{table}.max_byte".lstrip(".")
    known = [key.name.removeprefix(f"{table}.") for key in keys() if key.name.startswith(table)]
    assert all(one.partition(".")[0] in error.detail for one in known)
    assert ("did you mean max_bytes?" in error.detail) == (table == "tiers.disk")


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ('[tenants."1a"]\nusers = [7]', "tenants.1a", "a tenant is a name that begins with a letter"),
        ("[tenants]\na = 3", "tenants.a", "must be a table, [tenants.a]"),
        ("[tenants.a]\nuser = [7]", "tenants.a.user", "did you mean users? [tenants.a] has users, groups, share"),
        ("[tenants.a]\nusers = [-1]", "tenants.a.users", "each a whole number from 0 to 4294967295 or a name of this"),
        ('[tenants.a]\ngroups = ["a b"]', "tenants.a.groups", "must be a list"),
        ("[tenants.a]\nusers = [7]\nshare = 2", "tenants.a.share", "above 0 and up to 1"),
        ("[tiers]\ntenant_bytes = 7", "tiers.tenant_bytes", "use tenants.NAME.tier_bytes"),
        ("[tiers]\nquotas = {7 = 7}", "tiers.quotas", "use tenants.NAME.tier_bytes, with users = [NUMBER]"),
    ],
)
def test_what_is_wrong_of_a_tenant_is_named(tmp_path: Path, text: str, field: str, said: str) -> None:
    error = refused(tmp_path, text)
    assert error.field == field
    assert field in error.detail
    assert said in error.detail


@pytest.mark.parametrize(
    ("text", "said"),
    [("[pools\n", "line 1"), ("limits = 3\n", "[limits]"), ("a = " + "[" * 10_000, ""), ("x = '\udce4'", "utf-8")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, OFFER)
    assert str(file) in caught.value.detail
    assert said in caught.value.detail
    assert ("named key" in caught.value.remedy) == bool(caught.value.field)


KEYS = 'keys = "/etc/kvferry/keys"\n'
LISTEN = f'[peers]\nlisten = "tcp://10.0.0.3:7801"\n{KEYS}'
MOONCAKE = f'{LISTEN}[network]\ntransport = "mooncake"\n'
BOUNCE_BUFFERS = 'bounce_buffers = 65536\nbounce_buffer_bytes = "1GiB"'
ALL_MEMORY = f'bounce_buffers = {OFFER.memory_bytes >> 30}\nbounce_buffer_bytes = "1GiB"'
TENANT = "[tenants.a]\nusers = [7]\n"
STORE = '[tiers.remote]\ntransport = "mooncake_store"\naddress = "10.0.0.3"\n'


@pytest.mark.parametrize(
    ("text", "field", "other"),
    [
        ('[peers]\nlisten = "tcp://10.0.0.3:70000"', "peers.listen", "65535"),
        ('[peers]\nlisten = "ipc:///run/peer.sock"', "peers.listen", "must be tcp://ADDRESS:PORT"),
        ('[peers]\nlisten = "tcp://*:7801"', "peers.listen", "tcp://[fd00::3]:7801"),
        ('[peers]\nlisten = "tcp://10.0.0.3:7801"', "peers.listen", "peers.insecure = true"),
        ("[peers]\n" + KEYS, "peers.keys", "peers.listen"),
        (LISTEN + "insecure = true", "peers.insecure", "peers.keys"),
        ('[metrics]\nlisten = "tcp://localhost:9464"', "metrics.listen", "tcp://127.0.0.1:9464"),
        ('[metrics]\nlisten = "tcp://127.0.0.1:0"', "metrics.listen", "65535"),
        ('[metrics]\nlisten = "127.0.0.1:9464"', "metrics.listen", "must be tcp://ADDRESS:PORT"),
        ('[peers]\nlisten = "tcp://[fe80::1]:7801"', "peers.listen", "link-local"),
        ('[peers]\nlisten = "tcp://[FD00:0::3]:7801"', "peers.listen", "write it as tcp://[fd00::3]:7801"),
        ('[network]\naddress = "::"', "network.address", "all addresses of this host"),
        ('[network]\naddress = "10.0.0.3:7801"', "network.address", "leave that out"),
        ('[network]\naddress = "fe80::1%eth0"', "network.address", "link-local"),
        ('[network]\naddress = "224.0.0.1"', "network.address", "no single host"),
        ('[tiers.remote]\naddress = "[::]"', "tiers.remote.address", "all addresses of this host"),
        ('[devices]\nopen = ["host"]', "devices.open", "npu:N"),
        ("[memory]\nnuma_node = 1023", "memory.numa_node", "this host has memory at the nodes 0"),
        ("[network]\ndirect = true", "network.direct", "network.transport"),
        ('[network]\ntransport = "mooncake"', "network.address", "peers.listen"),
        (MOONCAKE + ALL_MEMORY, "network.bounce_buffers", "this host"),  # and 4 more for what is sent
        (MOONCAKE + BOUNCE_BUFFERS, "network.bounce_buffers", "network.bounce_buffer_bytes = 1GiB"),
        ('[tiers]\nhost_bytes = 0\n[tiers.disk]\npath = "/srv"', "tiers.disk.path", "tiers.host_bytes = 0"),
        ("[tiers]\nhost_bytes = 0\n" + STORE, "tiers.remote.transport", "tiers.host_bytes = 0"),
        ("[tiers]\nhost_bytes = 0\n" + TENANT + 'tier_bytes = "1GiB"', "tenants.a.tier_bytes", "tiers.host_bytes = 0"),
        ("[tiers]\nhost_bytes = 8", "tiers.host_bytes", '"8GiB"?'),
        ('[tiers]\nhost_bytes = "1023TiB"', "tiers.host_bytes", "more than this host allows"),
        (STORE + 'segment_bytes = "1023TiB"', "tiers.remote.segment_bytes", "more than this host allows"),
        (
            '[tiers]\nhost_bytes = "1GiB"\n' + TENANT + 'tier_bytes = "2GiB"',
            "tenants.a.tier_bytes",
            "tiers.host_bytes = 1GiB",
        ),
        (TENANT + "tier_bytes = 8", "tenants.a.tier_bytes", '"8GiB"?'),
        (TENANT + "[tenants.b]\nusers = [8, 7]", "tenants.b.users", "tenants.a.users has 7"),
        (TENANT + 'groups = ["g"]\n[tenants.b]\ngroups = ["g"]', "tenants.b.groups", "tenants.a.groups has 'g'"),
        (TENANT + "share = 0.5\n[tenants.b]\nusers = [8]\nshare = 0.6", "tenants.b.share", "together are 1.1"),
        ("[tenants.a]\nshare = 0.5", "tenants.a", "without users and groups"),
        ("[tenants.plumless]\nusers = [1]\n[tenants.buckeroo]\nusers = [2]", "tenants.buckeroo", "tenants.plumless"),
        ('[tiers.remote]\nprotocol = "ascend"', "tiers.remote.protocol", "tiers.remote.transport"),
        ('[tiers.remote]\ntransport = "mooncake_store"', "tiers.remote.address", "network.address"),
    ],
)
def test_keys_that_exclude_each_other_are_named(tmp_path: Path, text: str, field: str, other: str) -> None:
    error = refused(tmp_path, text)
    assert error.field == field
    assert field in error.detail
    assert other in error.detail


def test_the_limits_follow_from_those_of_the_file(tmp_path: Path) -> None:
    assert Config().announced == Limits()
    text = "[limits]", "max_frame_bytes = '16MiB'", "max_transfers_per_session = 3", "max_kept_payload_bytes = '1MiB'"
    assert load_config(written(tmp_path, "\n".join(text)), OFFER).announced == Limits(
        max_frame_bytes=16 << 20,
        max_message_bytes=64 << 20,
        max_transfers_per_session=3,
        max_transfers=48,
        max_kept_session_payload_bytes=256 << 10,
        max_kept_payload_bytes=1 << 20,
    )


@pytest.mark.parametrize(
    ("text", "network", "store"),
    [
        ("", None, None),
        (MOONCAKE + 'protocol = "ascend"\ndirect = true', "10.0.0.3", "10.0.0.3"),
        (STORE + 'protocol = "ascend"', None, "10.0.0.3"),
        (TENANT + 'share = 0.4\n[tenants.b]\ngroups = [7, "g"]\nshare = 0.6\ntier_bytes = "1GiB"', None, None),
        (LISTEN + '[tiers.remote]\ntransport = "mooncake_store"', *("10.0.0.3",) * 2),
        ('[network]\naddress = "node3"\n[tiers.remote]\ntransport = "mooncake_store"', "node3", "node3"),
        ('[peers]\nlisten = "tcp://[fd00::3]:7801"\ninsecure = true', "fd00::3", "fd00::3"),
        ('[peers]\nlisten = "tcp://[::1]:7801"', "::1", "::1"),
        (LISTEN + '[network]\naddress = "node3"', "node3", "node3"),
        ('[network]\naddress = "node3"\n[tiers.remote]\naddress = "10.1.0.3"', "node3", "10.1.0.3"),
        ('[network]\naddress = "[FD00::3]"\n[tiers.remote]\naddress = "[::1]"', "FD00::3", "::1"),
    ],
)
def test_what_goes_together_and_where_others_reach_this_host(
    tmp_path: Path, text: str, network: str | None, store: str | None
) -> None:
    config = load_config(written(tmp_path, text), OFFER)
    assert (config.network_address, config.store_address) == (network, store)


def test_sizes(tmp_path: Path) -> None:
    """As text they may be as large as the bound, too: what else is right of a key, msgspec sees to."""
    assert [size_bytes(one) for one in ("512 MiB", "1.5GiB", "0TiB", "007KiB")] == [512 << 20, 3 << 29, 0, 7 << 10]
    for key in keys():
        if isinstance(key.kind, inspect.IntType) and key.name.endswith("_bytes"):
            assert key.kind.le is not None
            assert size_bytes(size_text(key.kind.le)) == key.kind.le
            config: Any = read_config(written(tmp_path, key.text(size_text(key.kind.le))), OFFER)[0]
            for name in key.name.split("."):
                config = getattr(config, name)
            assert config == key.kind.le
