"""The daemon's configuration: lines of TOML, and environment variables (a frame ``KVFERRY_…=value``)."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin
from unittest import mock

import msgspec

from kvferry.protocol.config.conflicts import HostOffer
from kvferry.protocol.config.load import read_config
from kvferry.protocol.config.schema import Config
from kvferry.protocol.config.values import PREFIX, changes, keys_of, shown, sourced, values_of, variable_of
from kvferry.protocol.errors import ConfigError
from tests.fuzz.inputs import FOLDER, frames_of, joined

ROUNDS: Final = 2_000
OFFER: Final = HostOffer(64 << 30, "this host", frozenset({0, 1}))
SHIPPED: Final = FOLDER.parents[1] / "systemd" / "kvferry.toml"
VALUES: Final = (
    "false", "true", "0", "1", "-1", "50", "4096", "1125899906842624", "0.5", "inf", '"8GiB"', '"1.5 MiB"',
    '"/var/lib/kvferry"', '"10.0.0.3"', '"node-3"', '"tcp://127.0.0.1:7801"', '"tcp://[fd00::3]:7801"',
    '"127.0.0.1:50051"', '["npu:0"]', '{"1000" = "4GiB"}', "1979-05-27", "[]",
)  # fmt: skip
"""As TOML has them; each key takes some."""

QUOTE: Final = '"'
FIELDS: Final = functools.cache(msgspec.structs.fields)
"""It evaluates annotations anew each time, which takes most of the time of reading a configuration."""


def seeds() -> list[bytes]:
    """Return each key with each value: in the file, as a variable, as both, and beside another kind of section."""
    found = [SHIPPED.read_text().splitlines()]
    for key, kind in keys_of():
        table, _, name = key.rpartition(".")
        for value in (*VALUES, *_literals(kind)):
            lines = [*([f"[{table}]"] if table else []), f"{name} = {value}"]
            variable = f"{variable_of(key)}={value.strip(QUOTE)}"
            found += [lines, [variable]]
            if value == VALUES[0]:
                found += [[*lines, variable], [f"{table or name} = 1", variable]]
    return [joined([line.encode() for line in lines]) for lines in found]


def take_one_input(data: bytes) -> None:
    """Read a configuration: it is refused in words, or all that is made of a configuration can be made of it."""
    with mock.patch.object(msgspec.structs, "fields", FIELDS):
        _take(data)


def _take(data: bytes) -> None:
    frames = frames_of(data)
    texts = [one.decode(errors="replace") for one in frames if one.startswith(PREFIX.encode())]
    environ = {name: value for name, _, value in (one.partition("=") for one in texts)}
    fd = os.memfd_create("kvferry.toml")
    try:
        os.write(fd, b"\n".join([one for one in frames if not one.startswith(PREFIX.encode())]))
        found = read_config(Path(f"/proc/self/fd/{fd}"), OFFER, environ)
        for mistake in found.mistakes:
            assert mistake.field, mistake
        config = found.accepted()
    except ConfigError as error:
        error.info()
        return
    finally:
        os.close(fd)
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    for key, one in sourced(config, found.sources, environ).items():
        shown(key, one.value)
    changes(values_of(Config()), values_of(config))
    assert config.announced.max_message_bytes >= config.announced.max_frame_bytes
    assert config.peers.heartbeat_ms > 0
    for size in (config.pools.size_bytes(OFFER.memory_bytes), config.tiers.size_bytes(OFFER.memory_bytes)):
        assert size >= 0


def _literals(kind: Any) -> list[str]:  # noqa: ANN401  a type
    parts = [kind, *get_args(kind)]
    return [f'"{value}"' for one in parts if get_origin(one) is Literal for value in get_args(one)]
