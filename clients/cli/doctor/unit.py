"""Checks of the systemd unit: whether it is installed, and whether it permits what the daemon needs."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.folders import STATE_FOLDER, is_of_all
from kvferry.clients.cli.doctor.host import Finding, Host
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.npus import MANAGER_NODES, davinci_nodes
from kvferry.clients.cli.doctor.running import RESTART
from kvferry.pools.host.memory import enough_for
from kvferry.protocol.config.schema import STAGING_BUFFERS

NAME: Final = "kvferry@.service"
FOLDERS: Final = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system",
                  "/usr/lib/systemd/system", "/lib/systemd/system")  # fmt: skip
DROP_INS: Final = f"/etc/systemd/system/{NAME}.d"
"""Where an operator's own settings go: files below /usr belong to packages."""

PRIVATE: Final = ("/tmp", "/var/tmp")  # noqa: S108  only compared as names
HOMES: Final = ("/home", "/root", "/run/user")
GIB: Final = 1 << 30
DEFAULT_STOP: Final = "90s"
STOP_MARGIN_S: Final = 20.0
_BOOTED: Final = "/run/systemd/system"


class Unit(msgspec.Struct, frozen=True):
    """A unit's settings with those of its drop-ins: all values of each key, in order."""

    path: str
    settings: dict[str, list[str]]

    def last(self, key: str) -> str:
        """Return the effective value of a key that takes one; empty if it is not set."""
        return self.settings.get(key, [""])[-1]

    def words(self, key: str) -> set[str]:
        """Return the words of all values of a key that takes several."""
        return {word for value in self.settings.get(key, []) for word in value.split()}

    def allows(self, node: str) -> bool:
        """Return whether the daemon may open a device node for reading and writing."""
        if not self.settings.get("DeviceAllow") and self.last("DevicePolicy") in {"", "auto"}:
            return True
        allowed = [value.split() for value in self.settings.get("DeviceAllow", [])]
        names = {entry[0] for entry in allowed if entry[1:] == [] or {"r", "w"} <= set(entry[1])}
        family = "char-" + re.sub(r"\d+\Z", "", node)
        return f"/dev/{node}" in names or family in names or "char-*" in names


def read_unit(host: Host) -> Unit | None:
    """Return the unit as systemd would read it; None if it is not installed."""
    path = next((PurePosixPath(folder) / NAME for folder in FOLDERS if host.path(f"{folder}/{NAME}").is_file()), None)
    if path is None:
        return None
    drop_ins: dict[str, PurePosixPath] = {}
    for folder in reversed(FOLDERS):  # the first folder wins over a file of the same name in a later one
        drop_ins |= {one: PurePosixPath(folder) / f"{NAME}.d" / one for one in host.names(f"{folder}/{NAME}.d")}
    settings: dict[str, list[str]] = {}
    for file in (path, *(drop_ins[one] for one in sorted(drop_ins) if one.endswith(".conf"))):
        _read(host.text(file), settings)
    return Unit(str(path), settings)


def check_unit(host: Host, needs: Needs, *, npu: bool) -> Finding:
    """Check whether the unit is installed, and whether it forbids something that is needed."""
    unit = read_unit(host)
    if unit is None:
        if not host.path(_BOOTED).is_dir():
            return Finding("ok", "systemd is not running here")
        fix = "kvferry systemd --install writes it, and says what to do then"
        return Finding("warning", f"{NAME} is not installed", fix)
    npu_faults = _npu_faults(host, unit) if npu else []
    faults = [
        *_network_faults(unit, needs),
        *_disk_faults(unit, needs),
        *_memory_faults(unit, needs),
        *_time_faults(unit, needs),
        *npu_faults,
    ]
    if faults:
        said, fixes = ("; ".join(texts) for texts in zip(*faults, strict=True))
        return Finding("missing", f"{unit.path}: {said}", f"{fixes}; then systemctl daemon-reload; {RESTART}")
    return Finding("ok", f"{unit.path}, user {unit.last('User') or 'root'}")


def check_unit_environment(host: Host) -> Finding | None:
    """Check whether the unit tells the daemon where CANN is, as a service does not read a shell's set_env.sh."""
    unit = read_unit(host)
    if unit is None:
        return None
    given = " ".join(unit.settings.get("Environment", []))
    if "LD_LIBRARY_PATH" in given or unit.settings.get("EnvironmentFile") or "set_env.sh" in unit.last("ExecStart"):
        return Finding("ok", "the unit sets an environment")
    fix = (
        "env -i bash -c 'source …/set_env.sh; env' | grep -E '^(ASCEND|LD_LIBRARY_PATH)' > /etc/kvferry/cann.env, "
        "and a drop-in with EnvironmentFile=/etc/kvferry/cann.env"
    )
    return Finding("warning", "the unit sets no LD_LIBRARY_PATH: the daemon finds CANN only by ld.so.conf", fix)


def _network_faults(unit: Unit, needs: Needs) -> list[tuple[str, str]]:
    """Return what keeps the daemon from reaching other hosts, each with the fix."""
    config = needs.config
    listens = (config.peers.listen, config.metrics.listen)
    hosts = [one and one.removeprefix("tcp://").rpartition(":")[0] for one in listens]
    hosts += [config.network_address] * needs.mooncake + [config.store_address] * needs.store
    wanted = {"AF_INET6" if ":" in host else "AF_INET" for host in hosts if host}
    if not wanted:
        return []
    families = unit.words("RestrictAddressFamilies")
    closed = families and not wanted <= families and not unit.last("RestrictAddressFamilies").startswith("~")
    denied = "any" in unit.words("IPAddressDeny") and not unit.words("IPAddressAllow")
    if closed or denied:
        fix = f"copy hosts.conf from beside the unit's file to {DROP_INS} and name your network in it"
        return [("it forbids the daemon to reach other hosts", fix)]
    return []


def _disk_faults(unit: Unit, needs: Needs) -> list[tuple[str, str]]:
    """Return what keeps the daemon from using the disk tier's folder, each with the fix."""
    if needs.config.tiers.disk.path is None or unit.last("ProtectSystem") != "strict":
        return []
    path = PurePosixPath(needs.config.tiers.disk.path)
    own = [
        PurePosixPath(folder, one.replace("%i", path.name if path.parent.name == "kvferry" else "%i"))
        for key, folder in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache"))
        for one in unit.words(key)
    ]
    given = [PurePosixPath(one.lstrip("-+")) for one in unit.words("ReadWritePaths")]
    if any(path.is_relative_to(one) for one in PRIVATE) and unit.last("PrivateTmp") in {"yes", "true", "1"}:
        fix = f"a persistent tiers.disk.path, such as {STATE_FOLDER}/NAME"
        return [(f"it gives the daemon a private /tmp, which is removed with it, and {path} is there", fix)]
    if any(path.is_relative_to(one) for one in (*own, *given)):
        return []
    said = f"it forbids the daemon to write in {path} (tiers.disk.path)"
    hidden = any(path.is_relative_to(one) for one in HOMES) and unit.last("ProtectHome") not in {"", "no", "false"}
    if is_of_all(path) or hidden:
        return [(said, f"a tiers.disk.path of the daemon's own outside of /home, such as {STATE_FOLDER}/NAME")]
    return [(said, f"ReadWritePaths={path} in a drop-in in {DROP_INS}")]


def _memory_faults(unit: Unit, needs: Needs) -> list[tuple[str, str]]:
    """Return whether the configuration lets the daemon take more memory than the unit does, with the fix."""
    limit = _bytes(unit.last("MemoryMax"))
    config = needs.config
    regions = (config.pools.max_bytes or 0) + (config.tiers.host_bytes or 0)
    if needs.store:
        regions += config.tiers.remote.segment_bytes
    if needs.mooncake:
        regions += (config.network.bounce_buffers + STAGING_BUFFERS) * config.network.bounce_buffer_bytes
    wanted = enough_for(regions)
    if limit is None or wanted <= limit:
        return []
    said = f"MemoryMax={unit.last('MemoryMax')} is less than the {wanted / GIB:.1f} GiB of pools, tiers and the daemon"
    return [(said, f"MemoryMax={-(-wanted // GIB)}G in a drop-in in {DROP_INS}, or smaller pools.max_bytes and tiers")]


def _time_faults(unit: Unit, needs: Needs) -> list[tuple[str, str]]:
    """Return whether the daemon is killed before it has drained, with the fix."""
    drain_s = needs.config.service.drain_timeout_s
    stop_s = _seconds(unit.last("TimeoutStopSec") or DEFAULT_STOP)
    if stop_s is None or stop_s > drain_s:
        return []
    said = f"it ends the daemon after {stop_s:g} s, while transfers have {drain_s:g} s (service.drain_timeout_s)"
    return [(said, f"TimeoutStopSec={drain_s + STOP_MARGIN_S:g}s in a drop-in in {DROP_INS}")]


def _bytes(text: str) -> int | None:
    """Return a size as systemd writes it; None for no limit, a part of the host's memory, and what is no size."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text)
    return int(found[1]) << (" KMGT".index(found[2] or " ") * 10) if found else None


def _seconds(text: str) -> float | None:
    """Return a time as systemd writes it; None for none, and for what is not understood."""
    units = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if not re.fullmatch(r"(\d+(\.\d+)?\s*[a-z]*\s*)+", text) or any(unit not in units for _, unit in parts):
        return None
    return sum(float(number) * units[unit] for number, unit in parts) or None


def _npu_faults(host: Host, unit: Unit) -> list[tuple[str, str]]:
    """Return what keeps the daemon from using NPUs, each with the fix."""
    faults = []
    locked = unit.last("LimitMEMLOCK")
    if locked != "infinity":
        faults.append((f"LimitMEMLOCK is {locked or 'not set'}", f"LimitMEMLOCK=infinity in a drop-in in {DROP_INS}"))
    closed = [node for node in (*davinci_nodes(host), *MANAGER_NODES) if not unit.allows(node)]
    if closed:
        faults.append(
            (
                f"DeviceAllow leaves out {', '.join(closed)}",
                f"DeviceAllow=/dev/{closed[0]} rw, and so on, in a drop-in in {DROP_INS}",
            )
        )
    return faults


def _read(text: str, settings: dict[str, list[str]]) -> None:
    """Add a unit file's assignments; an empty one resets the key."""
    for line in text.replace("\\\n", " ").splitlines():
        key, is_assignment, value = line.strip().partition("=")
        if not is_assignment or key.startswith(("#", ";", "[")):
            continue
        if value.strip():
            settings.setdefault(key.strip(), []).append(value.strip())
        else:
            settings.pop(key.strip(), None)
