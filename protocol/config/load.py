"""Loading a configuration: each mistake is one error that names the file or variable, key, value and allowed values.

What a key may be follows from its type in the schema. A key whose name ends in ``_bytes`` is a size. An environment
variable, ``KVFERRY_TIERS_HOST_BYTES`` for ``tiers.host_bytes``, counts more than the file.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from kvferry.protocol.config.conflicts import HostOffer, conflicts
from kvferry.protocol.config.schema import Config, Section, TenantConfig, TenantName
from kvferry.protocol.config.values import OTHERWISE_GIVEN, PREFIX, keys_of, variable_of
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.ids import PATTERNS
from kvferry.protocol.settings import SIZE_FORM, size_bytes, size_text

_S = TypeVar("_S", bound=Section)
_MAX_SHOWN = 64
TENANTS: Final = dict[TenantName, TenantConfig]
_TENANT_NAME: Final = inspect.type_info(TenantName)
REPLACED: Final = {
    "tiers.tenant_bytes": "tenants.NAME.tier_bytes, for users and groups that it names",
    "tiers.quotas": "tenants.NAME.tier_bytes, with users = [NUMBER]",
}
"""Keys of earlier checkouts, and what says it now."""
NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_FILE = "name a readable file with --config, or none for the defaults"
_NO_TABLE = "write it as TOML: [section] and key = value lines, in UTF-8"


class ReadConfig(NamedTuple):
    """A configuration, and its mistakes; a key that is one has its default."""

    config: Config
    mistakes: list[ConfigError]
    sources: dict[str, str]
    """By key: the file, or the variable with a ``$``, that gives its value; a key that is not here has its default."""

    def accepted(self) -> Config:
        """Return the configuration.

        Raises:
            ConfigError: its first mistake.
        """
        for mistake in self.mistakes:
            raise mistake
        return self.config


def load_config(path: Path | None, offer: HostOffer, environ: Mapping[str, str] = NO_VARIABLES) -> Config:
    """Return the configuration in a TOML file, if there is one, and in environment variables.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown or has a wrong value, two keys exclude each
            other, or the host offers less; names the keys, their values and what is allowed.
    """
    return read_config(path, offer, environ).accepted()


def read_config(path: Path | None, offer: HostOffer, environ: Mapping[str, str] = NO_VARIABLES) -> ReadConfig:
    """Return the configuration in a TOML file, if there is one, and in environment variables.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    table = {} if path is None else _parsed(path)
    given = _Given("the environment" if path is None else str(path), {})
    for key, kind in keys_of():
        name = variable_of(key)
        if key != OTHERWISE_GIVEN and name in environ:
            _put(table, key, _from_text(environ[name], kind))
            given.variables[key] = f"${name}"
    mistakes = _unknown_variables(environ)
    config = _table(given, "", Config, table, mistakes)
    if not mistakes and (table or path is not None):
        mistakes += [ConfigError(f"{given.by(key)}: {what}", field=key) for key, what in conflicts(config, offer)]
    in_table = {key: given.by(key) for key, _ in keys_of() if _has(table, key)}
    return ReadConfig(config, mistakes, in_table)


_OF_A_SERVICE: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
"""Kubernetes gives each container such variables of the services beside it, and one may be called kvferry-metrics."""


class _Given(NamedTuple):
    """Where values come from."""

    file: str
    variables: dict[str, str]

    def by(self, key: str) -> str:
        return self.variables.get(key) or self.variables.get(key.partition(".")[0], self.file)


def _put(table: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    at: Any = table
    for section in sections:
        at = at.setdefault(section, {})
        if not isinstance(at, dict):  # the file's own mistake
            return
    at[name] = value


def _has(table: object, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return True


def _from_text(text: str, kind: Any) -> object:  # noqa: ANN401  a type
    """Return what a variable's text means: itself where the key takes text, else the value that TOML reads in it."""
    try:
        return msgspec.convert(text, kind)
    except ValueError:
        pass
    try:
        return text if "\n" in text else tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text  # a size, or wrong


def _unknown_variables(environ: Mapping[str, str]) -> list[ConfigError]:
    """Return the mistakes of variables that name a section, and no key of it."""
    known = {variable_of(key): key for key, _ in keys_of()}
    sections = tuple({f"{PREFIX}{key.partition('.')[0].upper()}_" for key in known.values() if "." in key})
    found = []
    for name in sorted(environ):
        if name.startswith(sections) and name not in known and not _OF_A_SERVICE.search(name):
            near = difflib.get_close_matches(name, known, 1)
            found.append(ConfigError(f"${name}: no such key{f'; did you mean {near[0]}?' if near else ''}", field=name))
    return found


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ConfigError(f"{path}: {cause.strerror}", remedy=_NO_FILE) from cause
    except ValueError as cause:  # also invalid UTF-8
        raise ConfigError(f"{path}: {cause}", remedy=_NO_TABLE) from cause
    except RecursionError as cause:
        raise ConfigError(f"{path}: nested too deeply", remedy=_NO_TABLE) from cause


def allowed(key: str, kind: inspect.Type) -> str:  # noqa: C901, PLR0911  a table with one row per type
    """Describe in words what a key of this type may be."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            return str((schema or {}).get("description", "")) or allowed(key, inner)
        case inspect.UnionType(types=types):
            return " or ".join(allowed(key, one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return " or ".join(", ".join(f'"{one}"' for one in part) for part in (values[:-1], values[-1:]) if part)
        case inspect.IntType() if _is_size(key):
            return f"a size {_range(kind, size=True)}: {SIZE_FORM}"
        case inspect.IntType():
            return f"a whole number {_range(kind)}"
        case inspect.FloatType():
            return f"a number {_range(kind)}"
        case inspect.StrType(pattern=pattern):
            return PATTERNS.get(pattern or "", "text")
        case inspect.VarTupleType(item_type=item):
            return f"a list, each {allowed(key, item)}"
        case inspect.DictType(key_type=name, value_type=value):
            return f"a table, each key {allowed('', name)}, each value {allowed(key, value)}"
        case _:
            return "a table"


def _table(given: _Given, prefix: str, section: type[_S], table: object, mistakes: list[ConfigError]) -> _S:
    if not isinstance(table, dict):
        mistakes.append(
            ConfigError(f"{given.file}: {prefix} = {_shown(table)}: must be a table, [{prefix}]", field=prefix)
        )
        return section()
    fields: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(section)}
    values: dict[str, object] = {}
    for name, value in table.items():
        key = f"{prefix}.{name}" if prefix else name
        kind = fields.get(name)
        if isinstance(kind, type) and issubclass(kind, Section):
            values[name] = _table(given, key, kind, value, mistakes)
        elif kind is None:
            instead = f"use {REPLACED[key]}" if key in REPLACED else _unknown(name, prefix, fields)
            mistakes.append(ConfigError(f"{given.file}: {key}: {instead}", field=key))
        elif kind == TENANTS and isinstance(value, dict):
            values[name] = _tenants(given, value, mistakes)
        else:
            try:
                values[name] = msgspec.convert(_plain(key, value), kind, str_keys=True)
            except ValueError:  # msgspec's ValidationError is one
                what = allowed(key, inspect.type_info(kind))
                mistakes.append(ConfigError(f"{given.by(key)}: {key} = {_shown(value)}: must be {what}", field=key))
    return section(**values)


def _tenants(given: _Given, table: dict[str, object], mistakes: list[ConfigError]) -> dict[str, TenantConfig]:
    found = {}
    for name, its in table.items():
        key = f"tenants.{name}"
        try:
            msgspec.convert(name, TenantName)
        except ValueError:
            what = f"a tenant is {allowed('', _TENANT_NAME)}"
            mistakes.append(ConfigError(f"{given.by(key)}: {key}: {what}", field=key))
        found[name] = _table(given, key, TenantConfig, its, mistakes)
    return found


def _unknown(name: str, prefix: str, fields: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, fields, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"unknown key; {meant}{f'[{prefix}]' if prefix else 'the file'} has {', '.join(fields)}"


def _plain(key: str, value: object) -> object:
    """Return the value, with textual sizes converted to bytes.

    Raises:
        ValueError: a text is not a size, or a number is not finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not finite")
    if not _is_size(key):
        return value
    return size_bytes(value) if isinstance(value, str) else value


def _is_size(key: str) -> bool:
    return key.endswith("_bytes")


def _shown(value: object) -> str:
    """Return a value approximately as in TOML, shortened."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    if isinstance(value, float) and not math.isfinite(value):
        text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _range(kind: inspect.IntType | inspect.FloatType, *, size: bool = False) -> str:
    def text(bound: float) -> str:
        return size_text(int(bound)) if size else f"{bound:.15g}"

    low = f"from {text(kind.ge)} to" if kind.ge is not None else f"above {text(kind.gt or 0)} and up to"
    return f"{low} {text(kind.le or math.inf)}"
