"""Hosts that are folders: files laid out as on a real one, made by hand for the checks to look at."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.pools.host.placement import offer
from kvferry.protocol.config.load import read_config

ROOT: Final = User("root", 0, frozenset({0}))
WORKER: Final = User("worker", 100_001, frozenset({100_002}))

MODERN_KERNEL: Final = "6.6.0-72.0.0.76.oe2403sp1.aarch64\n"
OLD_KERNEL: Final = "5.10.0-136.12.0.86.oe2203sp1.aarch64\n"
GIB_IN_KIB: Final = 1 << 20

LIMITS: Final = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 {files}                files
Max locked memory         {locked}              {locked}            bytes
"""


def make_host(
    root: Path,
    files: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    user: User = ROOT,
    python: Sequence[str] = (sys.executable,),
) -> Host:
    """Return a host with these files, by their absolute paths."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root=root, environ=dict(environ or {}), user=user, python=tuple(python))


def script(path: Path, text: str) -> str:
    """Write a shell script that can be run, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def limits(files: int | str = 65536, locked: int | str = "unlimited") -> str:
    return LIMITS.format(files=files, locked=locked)


def npu_files(count: int = 2) -> dict[str, str]:
    """Return the files of a host with a driver and so many NPUs, every two of them on a NUMA node of their own."""
    files = {
        "/usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        "/etc/ascend_install.info": "UserName=HwHiAiUser\nUserGroup=HwHiAiUser\n",
        "/etc/group": "root:x:0:\nHwHiAiUser:x:1000:\n",
        "/dev/davinci_manager": "",
        "/dev/devmm_svm": "",
        "/dev/hisi_hdc": "",
    }
    for number in range(count):
        files[f"/dev/davinci{number}"] = ""
        address, node = f"0000:{count - number:02x}:00.0", number // 2
        device = f"/sys/bus/pci/devices/{address}"
        files |= {f"{device}/vendor": "0x19e5\n", f"{device}/class": "0x120000\n", f"{device}/numa_node": f"{node}\n"}
        files[f"/sys/bus/pci/drivers/devdrv_device_driver/{address}/dev_id"] = f"{number}\n"
        files[f"/sys/devices/system/node/node{node}/cpulist"] = f"{node * 8}-{node * 8 + 7}\n"
    return files


def needs_of(toml: str = "") -> Needs:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(toml)
        file.flush()
        return Needs(read_config(Path(file.name), offer())[0], path=Path(file.name))
