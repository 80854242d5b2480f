"""The values of a configuration one by one: to be shown, compared, and given by environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kvferry.protocol.config.schema import Config, Section
from kvferry.protocol.settings import runtime_dirs, size_text

PREFIX: Final = "KVFERRY_"
OTHERWISE_GIVEN: Final = "runtime_dir"
"""Whose variable counts less than the file, not more: commands and engines read it, too."""

OF_DIRECTORY: Final = ("KVFERRY_RUNTIME_DIR", "XDG_RUNTIME_DIR")
DEFAULT: Final = "default"


def keys_of(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with dots, and its type."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from keys_of(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def variable_of(key: str) -> str:
    """Return the environment variable of a key: ``KVFERRY_TIERS_HOST_BYTES`` of ``tiers.host_bytes``."""
    return PREFIX + key.upper().replace(".", "_")


def values_of(config: Config) -> dict[str, object]:
    """Return the value of each key, as JSON has it."""
    plain, found = msgspec.json.decode(msgspec.json.encode(config)), dict[str, object]()
    for key, _ in keys_of():
        value: Any = plain
        for name in key.split("."):
            value = value[name]
        found[key] = value
    return found


class Sourced(NamedTuple):
    """A value, and where it comes from: ``DEFAULT``, a file, a variable with a ``$``, or an option."""

    value: object
    source: str


def sourced(
    config: Config, sources: Mapping[str, str], environ: Mapping[str, str], runtime_dir: object = None
) -> dict[str, Sourced]:
    """Return each value with its source; of the runtime directory what a daemon makes of it.

    ``runtime_dir``: by its option, if that is given.
    """
    found = {key: Sourced(value, sources.get(key, DEFAULT)) for key, value in values_of(config).items()}
    if runtime_dir is not None:
        found[OTHERWISE_GIVEN] = Sourced(str(runtime_dir), "--runtime-dir")
    elif config.runtime_dir is None:
        name = next((f"${one}" for one in OF_DIRECTORY if environ.get(one)), DEFAULT)
        found[OTHERWISE_GIVEN] = Sourced(runtime_dirs(environ)[0], name)
    return found


def shown(key: str, value: object) -> str:
    """Return a value for people: sizes with a unit, and a dash where it follows from the host or is off."""
    if value is None:
        return "-"
    if key.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, str]:
    """Return what differs, by key: what it is now, and what it was; a key that only one of the versions has, too."""
    return {
        key: f"{shown(key, after.get(key))}, was {shown(key, before.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    }
