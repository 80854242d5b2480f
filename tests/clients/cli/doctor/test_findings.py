"""What each check finds: a table of a host's state, and of the finding that it leads to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients.cli.doctor import kernel, npus, ports, tiers, trials, wheels
from kvferry.clients.cli.doctor.host import Finding, Host, Outcome, State, User, exit_status, summary
from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.ports import Listener
from kvferry.clients.cli.doctor.running import Running
from kvferry.clients.cli.doctor.wheels import NPU_WHEEL, PLAIN_WHEEL, TorchFound
from kvferry.pools.copy_kernel import Description
from kvferry.protocol.config.schema import MemoryConfig
from kvferry.protocol.session_messages import StatusReport
from tests.clients.cli.doctor.fake_host import (
    GIB_IN_KIB,
    MODERN_KERNEL,
    OLD_KERNEL,
    ROOT,
    limits,
    make_host,
    needs_of,
    npu_files,
    script,
)


class Row(NamedTuple):
    """A check on a host, and what it must find. ``state`` None: nothing to say; what is well has no fix."""

    check: Callable[[Host], Finding | None]
    state: str | None
    found: str = ""
    fix: str = ""
    files: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    user: User = ROOT
    python: str = "exit 1"


def of(check: Callable[..., Finding | None], *arguments: object, **named: object) -> Callable[[Host], Finding | None]:
    """Return a check of a host alone, with these further arguments."""
    return lambda host: check(host, *arguments, **named)


# -- the kernel and its limits

RELEASE: Final = "/proc/sys/kernel/osrelease"
POOLS: Final = 64 * GIB


def on_kernel(release: str, state: str) -> Row:
    return Row(kernel.check_kernel, state, release.strip(), files={RELEASE: release})


def locked(release: str, limit: int | str, state: str, *, npu: bool = True) -> Row:
    fix = "" if state == "ok" else "LimitMEMLOCK=infinity"
    files = {RELEASE: release, "/proc/self/limits": limits(locked=limit)}
    return Row(of(kernel.check_memlock, None, POOLS, npu=npu), state, "this shell", fix, files)


def files_of(pid: int | None, state: str, found: str, files: Mapping[str, str]) -> Row:
    return Row(of(kernel.check_files, pid), state, found, files=files)


OF_BOTH: Final = {RELEASE: OLD_KERNEL, "/proc/self/limits": limits(64, 0), "/proc/4711/limits": limits()}
MEMINFO: Final = f"MemTotal:       {64 * GIB_IN_KIB} kB\nMemFree: 1 kB\nMemAvailable:   {32 * GIB_IN_KIB} kB\n"


def memory(bound: str, pool_gib: int, state: str, said: str = "") -> Row:
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/4711/cgroup": "0::/kvferry.service\n",
        "/proc/self/cgroup": "0::/user.slice\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/cgroup/kvferry.service/memory.max": bound,
    }
    said = f"{said or '64.0 GiB, 32.0 GiB available'}; pools may take {pool_gib}.0 GiB"
    return Row(of(kernel.check_memory, pool_gib * GIB, 4711), state, said, files=files)


LIMITED: Final = "16.0 GiB allowed by /sys/fs/cgroup/kvferry.service/memory.max, 16.0 GiB available"


def huge_pages(setting: str, state: str, found: str, fix: str = "", wanted: str = "auto", free: int = 3) -> Row:
    files = {
        "/proc/meminfo": f"HugePages_Total: 8\nHugePages_Free: {free + 1}\nHugePages_Rsvd: 1\nHugepagesize: 2048 kB\n",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": setting,
    }
    config = MemoryConfig(huge_pages=wanted)  # type: ignore[arg-type]
    return Row(of(kernel.check_huge_pages, config, 64 << 20), state, found, fix, files)


def numa(
    state: str | None, found: str, fix: str = "", *, cpus: str = "0-7", nodes: int = 2, wanted: int | None = None
) -> Row:
    files = {
        "/sys/devices/system/node/has_memory": f"0-{nodes - 1}\n" if nodes > 1 else "0\n",
        "/sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "/sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "/proc/4711/status": f"Name:\tkvferry\nCpus_allowed_list:\t{cpus}\n",
    }
    return Row(of(kernel.check_numa, MemoryConfig(numa_node=wanted), 4711), state, found, fix, files)


OF_THE_KERNEL: Final = {
    "the first kernel that populates": on_kernel("5.14.0-427.el9", "ok"),
    "an old kernel": on_kernel(OLD_KERNEL, "warning"),
    "memlock on an old kernel without NPUs": locked(OLD_KERNEL, 8 << 20, "ok", npu=False),
    "memlock that a driver may count": locked(MODERN_KERNEL, 8 << 20, "warning"),
    "memlock a byte short": locked(OLD_KERNEL, POOLS - 1, "missing"),
    "memlock that just suffices": locked(OLD_KERNEL, POOLS, "ok"),
    "the daemon's memlock": Row(of(kernel.check_memlock, 4711, POOLS, npu=True), "ok", "pid 4711", files=OF_BOTH),
    "files of the daemon": files_of(4711, "ok", "65536 for the daemon (pid 4711)", OF_BOTH),
    "files of a daemon out of sight": files_of(0, "unknown", "not seen from here", {}),
    "one file too few": files_of(None, "warning", "8191", {"/proc/self/limits": limits(8191)}),
    "just enough files": files_of(None, "ok", "8192", {"/proc/self/limits": limits(8192)}),
    "pools as large as memory": memory("", 64, "ok"),
    "pools larger than memory": memory("", 65, "missing"),
    "a container that suffices": memory(str(16 * GIB), 16, "ok", LIMITED),
    "a container that is too small": memory(str(16 * GIB), 17, "warning", LIMITED),
    "huge pages that the kernel forms": huge_pages(
        "always [advise] never", "ok", "advise; 3 of 8 reserved 2 MiB pages"
    ),
    "huge pages that it does not form": huge_pages("always advise [never]", "warning", "never", "echo advise > /sys"),
    "enough reserved pages": huge_pages("[never]", "ok", "32 of 8 reserved 2 MiB pages", wanted="reserved", free=32),
    "a reserved page too few": huge_pages(
        "[never]", "warning", "31 of 8", "sysctl vm.nr_hugepages=9", wanted="reserved", free=31
    ),
    "one NUMA node": numa(None, "", nodes=1),
    "CPUs of one node": numa("ok", "2 nodes; pools come from node 1, the one of all CPUs of the daemon", cpus="4-6,12"),
    "CPUs of both nodes": numa("warning", "come from any of them", "set memory.numa_node", cpus="3-4"),
    "a node that is not there": numa("missing", "no node 2", "memory.numa_node = one of 0, 1", wanted=2),
    "no /dev/shm for NPUs": Row(of(kernel.check_shm, npu=True), "missing", "No such file"),
    "shared memory": Row(of(kernel.check_shm, npu=True), "ok", " free", files={"/dev/shm/x": ""}),  # noqa: S108
}

# -- NPUs: nodes, group, driver, CANN

SMI: Final = """\
| npu-smi 25.5.0                   Version: 25.5.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.1        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3351 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 93.1        46                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3351 / 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 4711          | python                   | 210                     |
"""
TWO: Final = npu_files()
INSTALL_INFO: Final = "/etc/ascend_install.info"
HIDDEN: Final = {"/sys/bus/pci/devices/0000:01:00.0/numa_node": "-1\n"}
CANN_HOME: Final = {"ASCEND_HOME_PATH": "/opt/cann"}
SET_ENV: Final = "/usr/local/Ascend/ascend-toolkit/set_env.sh"


def driver(version: str, state: str) -> Row:
    files = {"/usr/local/Ascend/driver/version.info": f"Version={version}\n"}
    return Row(of(npus.check_driver, None), state, version, files=files)


def health(outcome: Outcome | None, state: str, found: str, fix: str = "") -> Row:
    return Row(lambda _host: npus.check_health(outcome), state, found, fix)


def cann(variable: str, version: str, state: str) -> Row:
    files = {"/opt/cann/aarch64-linux/ascend_toolkit_install.info": f"package_name=x\nversion={version}\narch=a\n"}
    return Row(npus.check_cann, state, f"{version} in /opt/cann", files=files, environ={variable: "/opt/cann"})


def worker(group: int) -> User:
    return User("worker", 7, frozenset({group}))


def without(*names: str) -> dict[str, str]:
    """Return the files of a host with NPUs, but for those whose names begin so."""
    return {name: text for name, text in TWO.items() if not name.startswith(names)}


def group_of(name: str, state: str, found: str, fix: str = "") -> Row:
    files = {INSTALL_INFO: f"UserGroup={name}\n", "/etc/group": "npu:x:77:\nHwHiAiUser:x:1000:\nroot:x:0:\n"}
    return Row(npus.check_group, state, found, fix, files, user=worker(77))


OF_NPUS: Final = {
    "twelve nodes": Row(
        npus.check_nodes, "ok", "/dev/davinci0 to davinci11 (12) and their managers, open to root", files=npu_files(12)
    ),
    "no nodes": Row(npus.check_nodes, "missing", "", "--device /dev/davinci0 --device /dev/davinci_manager"),
    "no manager": Row(
        npus.check_nodes,
        "missing",
        "/dev/davinci0 to davinci1 (2), but no /dev/hisi_hdc",
        files=without("/dev/hisi_hdc"),
    ),
    "a member": Row(npus.check_group, "ok", "worker is in HwHiAiUser", files=TWO, user=worker(1000)),
    "no member": Row(npus.check_group, "warning", "worker is not in", "usermod -aG", TWO, user=worker(7)),
    "the group of the driver": group_of("npu", "ok", "worker is in npu"),
    "root's group": group_of("root", "warning", "worker is not in root", "install the driver for a separate group"),
    "NUMA by the driver's numbers": Row(
        npus.check_numa,
        "ok",
        "NPU 0: node 0 (cores 0-7); NPU 1: node 0 (cores 0-7); NPU 2: node 1 (cores 8-15); NPU 3: node 1 (cores 8-15)",
        files=npu_files(4),
    ),
    "a hidden topology": Row(npus.check_numa, "warning", "NPU 3: no node", files=npu_files(4) | HIDDEN),
    "a driver that suffices": driver("25.5.0", "ok"),
    "a driver before its release": driver("25.5.rc1", "warning"),
    "the driver by npu-smi": Row(of(npus.check_driver, Outcome(0, SMI.format(health="OK"), "")), "ok", "25.5.0"),
    "no driver": Row(of(npus.check_driver, None), "missing", "no /usr/local/Ascend/driver/version.info"),
    "NPUs without a driver": Row(
        of(npus.check_driver, None), "missing", "the PCI bus has 2 NPUs", files=without("/dev", "/etc", "/usr")
    ),
    "healthy": health(Outcome(0, SMI.format(health="OK"), ""), "ok", "2 x 910B3"),
    "an NPU whose memory ends with its owner": health(
        Outcome(0, SMI.format(health="OK").replace("910B3", "950PR"), ""), "ok", "2 x 950PR: within seconds"
    ),
    "an NPU is ill": health(Outcome(0, SMI.format(health="Alarm"), ""), "warning", "NPU 1: Alarm"),
    "the driver hangs": health(Outcome(None, "", ""), "missing", "did not answer", "dmesg"),
    "no npu-smi": health(None, "unknown", "no npu-smi"),
    "CANN": cann("ASCEND_HOME_PATH", "8.5.0", "ok"),
    "CANN before its release": cann("ASCEND_HOME_PATH", "8.5.0.alpha002", "warning"),
    "CANN that is not there": Row(npus.check_cann, "missing", "/opt/cann", environ=CANN_HOME),
    "CANN that was not sourced": Row(
        npus.check_cann,
        "missing",
        "installed in",
        f"source {SET_ENV}",
        {SET_ENV: "", "/usr/local/Ascend/ascend-toolkit/latest/version.cfg": ""},
    ),
    "a library that loads": Row(npus.check_library, "ok", "libascendcl.so loads", python="exit 0"),
    "a library that is not found": Row(
        npus.check_library,
        "missing",
        "libascendcl.so: cannot open",
        "LD_LIBRARY_PATH",
        python="echo 'OSError: libascendcl.so: cannot open' >&2; exit 1",
    ),
}

# -- torch_npu

TORCH: Final = "2.13.0"
NO_CANN: Final = TorchFound(
    TORCH, TORCH, "importing torch_npu", "ImportError: libhccl.so: cannot open shared object file"
)


def torch(found: TorchFound, state: str, said: str, fix: str = "") -> Row:
    return Row(lambda _host: wheels.check_torch_npu(found), state, said, fix)


def torch_without_npu(found: TorchFound, state: str | None, said: str = "", fix: str = "") -> Row:
    return Row(lambda _host: wheels.check_without_npu(found), state, said, fix)


OF_TORCH: Final = {
    "torch_npu": torch(
        TorchFound("2.13.0+cpu", TORCH, devices=8), "ok", "2.13.0 beside torch 2.13.0+cpu; torch sees 8 de"
    ),
    "no torch_npu": torch(TorchFound("2.13.0+cpu"), "missing", "not installed", "torch-npu==2.13.0 "),
    "versions that do not fit": torch(TorchFound(TORCH, "2.7.1.post2", devices=8), "missing", "does not match"),
    "torch_npu without CANN": torch(NO_CANN, "missing", "importing torch_npu fails: ImportError", "set_env.sh"),
    "a driver that hangs": torch(
        TorchFound(TORCH, TORCH, "counting devices", "no answer within 2 s"), "missing", "no answer", "dmesg"
    ),
    "torch_npu without devices": torch(TorchFound(TORCH, TORCH), "missing", "no device", "ASCEND_RT_VISIBLE_DEVICES"),
    "no NPU, and a torch_npu that harms": torch_without_npu(
        NO_CANN, "warning", "so does a plain `import torch`", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    ),
}

# -- Mooncake, its ports, and the tiers

LISTEN: Final = '[peers]\nlisten = "tcp://127.0.0.1:7801"\n'
TCP: Final = needs_of(LISTEN + '[network]\ntransport = "mooncake"\n')
ASCEND: Final = needs_of('[network]\ntransport = "mooncake"\nprotocol = "ascend"\n')
STORE_TOML: Final = '[tiers.remote]\ntransport = "mooncake_store"\naddress = "10.0.0.3"\n'
STORE: Final = needs_of(STORE_TOML)
ASCEND_STORE: Final = needs_of(STORE_TOML + 'protocol = "ascend"\n')
OTHERS: Final = Listener("127.0.0.1", 7801, 9, "nginx")
OWN: Final = Listener("127.0.0.1", 7801, 4711, "kvferry")
ELSEWHERE: Final = [Listener("127.0.0.1", 7802, 9, "nginx"), Listener("10.9.9.9", 7801, 9, "nginx")]
UNSEEN: Final = Listener("127.0.0.1", 7801, None)
STORES: Final = [OWN, Listener("0.0.0.0", 15003, 4712)]  # noqa: S104  shown
SERVICE: Final = {"/proc/4711/cgroup": "0::/system.slice/system-kvferry.slice/kvferry@node.service"}
UNIT_OF_HOSTS: Final = {
    "/etc/systemd/system/kvferry@.service": "[Service]\nIPAddressDeny=any\nIPAddressAllow=10.1.0.0/16\n"
}
MOONCAKES: Final = [OWN, OTHERS, Listener("0.0.0.0", 15002, 4711), Listener("::", 15001, 4711)]  # noqa: S104  shown


def wheel(needs: Needs, installed: list[str], state: str, importing: str = "exit 0", **more: str) -> Row:
    """Return a row with an interpreter that has these wheels, and does this when it is to import one."""
    said = json.dumps(dict.fromkeys(installed, "0.3.13"))
    python = f"case \"$2\" in *metadata*) echo '{said}';; *) {importing};; esac"
    found = more.get("found", f"{installed[0]} 0.3.13" if installed else "not installed")
    fix = more.get("fix", "" if state == "ok" else "pip install")
    return Row(of(wheels.check_wheel, needs), state, found, fix, python=python)


def master(at: str) -> Row:
    needs = needs_of(f'{STORE_TOML}master = "{at}"')
    return Row(lambda _host: tiers.check_master(needs), "warning", f"{at}: ", "mooncake_master")


def listens(
    needs: Needs, sockets: list[Listener], running: Running, state: str, found: str, fix: str = "", problem: str = ""
) -> Row:
    """Where the port is tried, ``problem`` is what the daemon's code says."""
    return Row(of(ports.check_listen, needs, sockets, running), state, found, fix, python=trial_says(problem))


def mooncake_ports(sockets: Sequence[Listener], state: str, found: str, fix: str, files: Mapping[str, str]) -> Row:
    return Row(of(ports.check_mooncake, TCP, sockets, 4711), state, found, fix, files=files, environ={"PATH": "/none"})


def trial(check: Callable[..., Finding | None], needs: Needs, state: str, found: str, problem: str = "lost") -> Row:
    return Row(of(check, needs), state, found, problem and "mend it", python=trial_says(problem))


def daemon_at(*addresses: str, pid: int = 4711) -> Running:
    report = StatusReport(
        daemon_version="1", pid=1, uptime_ms=1, draining=False, pools=(), sessions=(), transfers=(), counters={},
        addresses=addresses,
    )  # fmt: skip
    return Running(Path("/run/kvferry"), report, pid=pid)


NO_DAEMON: Final = Running(Path("/run/kvferry"))
TCP_PLACE: Final = "tcp://127.0.0.1:7801"

NPU: Final = needs_of('[devices]\nopen = ["npu:0"]')


def trial_says(problem: str) -> str:
    """Return a Python that says what the daemon's code has met."""
    return f"""echo '{{"problem": "{problem}", "remedy": "{problem and "mend it"}"}}'"""


def host_tier(toml: str, state: str, found: str, *, total_gib: int = 100) -> Row:
    files = {"/proc/meminfo": f"MemTotal: {total_gib * GIB_IN_KIB} kB\n"} if total_gib else {}
    needs = needs_of(f'[pools]\nmax_bytes = "50GiB"\n{toml}')
    return Row(of(tiers.check_host_tier, needs), state, found, files=files)


LACKING_VERBS: Final = "echo 'ImportError: libibverbs.so.1: cannot open' >&2; exit 1"
LACKING_CURL: Final = "echo 'ImportError: libcurl.so.4: cannot open' >&2; exit 1"
DIES: Final = "echo 'No module named x' >&2; exit 1"
OF_OTHER_HOSTS: Final = {
    "no wheel, and none needed": wheel(needs_of(), [], "ok", found="not installed; not needed, network.transport is"),
    "no wheel": wheel(TCP, [], "missing"),
    "two wheels": wheel(TCP, [PLAIN_WHEEL, NPU_WHEEL], "missing"),
    "the plain wheel for NPUs": wheel(ASCEND, [PLAIN_WHEEL], "missing", fix=f"pip install {NPU_WHEEL}"),
    "the wrong wheel for the store": wheel(ASCEND_STORE, [PLAIN_WHEEL], "missing"),
    "a wheel without libibverbs": wheel(
        TCP, [PLAIN_WHEEL], "missing", LACKING_VERBS, found="libibverbs.so.1", fix="apt-get install libibverbs1"
    ),
    "libibverbs that nobody needs": Row(of(wheels.check_verbs, needs_of()), None),
    "no libibverbs": Row(of(wheels.check_verbs, TCP), "missing", "libibverbs.so.1: cannot open", python=LACKING_VERBS),
    "the store's module": Row(
        of(wheels.check_store_module, STORE), "ok", "can be imported", python='test "$2" = "import mooncake.store"'
    ),
    "a store's module without its libraries": Row(
        of(wheels.check_store_module, STORE), "missing", "libcurl.so.4", "apt-get install libcurl4", python=LACKING_CURL
    ),
    "a master that is away": master("[::1]:0"),
    "nothing listens": listens(needs_of(), [OTHERS], NO_DAEMON, "ok", "not set"),
    "a free port": listens(TCP, ELSEWHERE, NO_DAEMON, "ok", "tcp://127.0.0.1:7801 is free"),
    "a port that the daemon cannot have": listens(TCP, [], NO_DAEMON, "missing", "in use", "mend it", problem="in use"),
    "a port that is taken beside a daemon": listens(TCP, [OTHERS], daemon_at(), "missing", "held by nginx (pid 9)"),
    "a port that somebody unseen has": listens(TCP, [UNSEEN], NO_DAEMON, "missing", "may not see"),
    "the daemon's port": listens(TCP, [OWN], daemon_at(TCP_PLACE), "ok", f"{TCP_PLACE}, held by the daemon (pid 4711)"),
    "a daemon with another configuration": listens(TCP, [], daemon_at(), "warning", "does not listen at", "restart"),
    "no network to try": Row(of(trials.check_network, needs_of()), None),
    "bytes that arrive": trial(trials.check_network, TCP, "ok", "arrive at 127.0.0.1", ""),
    "bytes that do not arrive": trial(trials.check_network, TCP, "missing", "lost"),
    "a device that cannot be opened": trial(trials.check_open, NPU, "missing", "lost"),
    "a trial that dies": Row(
        of(trials.check_network, TCP), "unknown", "No module named x", "the daemon's Python", python=DIES
    ),
    "no ports of Mooncake": Row(of(ports.check_mooncake, needs_of(), [], None), None),
    "Mooncake's ports, open to all": mooncake_ports(
        MOONCAKES, "warning", "0.0.0.0:15002, [::]:15001; nothing is seen", "kvferry.nft", {}
    ),
    "Mooncake's ports, fenced by the unit": mooncake_ports(
        MOONCAKES, "ok", "; the unit lets only 10.1.0.0/16 reach it", "", UNIT_OF_HOSTS | SERVICE
    ),
    "a unit that the daemon is not in": mooncake_ports(MOONCAKES, "warning", "nothing", "hosts.conf", UNIT_OF_HOSTS),
    "a store's ports": mooncake_ports(
        STORES, "ok", "0.0.0.0:15003; ", "", UNIT_OF_HOSTS | SERVICE | {"/proc/4711/task/4711/children": "4712 "}
    ),
    "Mooncake's ports, unseen": mooncake_ports([OTHERS], "unknown", "may not see", "run as root", {}),
    "a tenth of the memory": host_tier(
        "", "ok", "10.0 GiB for snapshots and cached blocks; with pools 60.0 GiB of 100"
    ),
    "a tier that just fits": host_tier('[tiers]\nhost_bytes = "50GiB"', "ok", "with pools 100.0 GiB of 100.0 GiB"),
    "a tier and pools too large": host_tier('[tiers]\nhost_bytes = "51GiB"', "warning", "101.0 GiB of 100.0 GiB"),
    "a tier too large": host_tier('[tiers]\nhost_bytes = "101GiB"', "missing", "of 100.0 GiB of memory"),
    "a segment too large": host_tier(
        f'[tiers]\nhost_bytes = "47GiB"\n{STORE_TOML}', "warning", "4.0 GiB for the store of all nodes"
    ),
}
ROWS: Final = OF_THE_KERNEL | OF_NPUS | OF_TORCH | OF_OTHER_HOSTS


@pytest.mark.parametrize("name", ROWS)
def test_a_check_finds(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    python = script(tmp_path / "its-python", row.python)
    host = make_host(tmp_path / "root", row.files, environ=row.environ, user=row.user, python=[python])
    (tmp_path / "root").mkdir(exist_ok=True)
    finding = row.check(host)
    if row.state is None or finding is None:
        assert finding is None
        assert row.state is None
        return
    assert finding.state == row.state
    assert row.found in finding.found
    assert row.fix in finding.fix
    assert bool(finding.fix) is (row.state != "ok")


def test_copies() -> None:
    assert kernel.check_copies(Description("avx2", "/usr/lib/libxxhash.so.0")) == Finding(
        "ok", "native, avx2 stores; checksums by libxxhash.so.0"
    )
    slow = kernel.check_copies(Description("python", "xxhash", "it was not built for here"))
    assert (slow.state, slow.found.endswith("it was not built for here"), bool(slow.fix)) == ("warning", True, True)


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("ImportError: libhccl.so: cannot open shared object file: No such file or directory", "source CANN's"),
        ("libascend_hal.so: cannot open shared object file", "the driver's lib64"),
        ("libtorch_npu.so: undefined symbol: aclrtMemcpyBatch", "are incompatible"),
    ],
)
def test_the_fix_fits_the_library(problem: str, fix: str) -> None:
    assert fix in npus.loader_fix(problem)


@pytest.mark.parametrize(
    ("states", "status", "said"),
    [
        ((), 0, "all is well"),
        (("ok", "ok"), 0, "all is well"),
        (("ok", "warning", "unknown"), 0, "warning: 1; unknown: 2"),
        (("ok", "missing"), 1, "missing: 1"),
        (("warning", "missing", "ok", "missing"), 1, "missing: 1, 3; warning: 0"),
    ],
)
def test_only_what_is_missing_counts_and_the_worst_comes_first(
    states: tuple[State, ...], status: int, said: str
) -> None:
    findings = {str(number): Finding(state, "") for number, state in enumerate(states)}
    assert (exit_status(findings.values()), summary(findings)) == (status, said)
