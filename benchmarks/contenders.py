"""Three caches as servers, each as its own documentation starts it: ours, LMCache's and openYuanrong's datasystem.

All three speak ZeroMQ at ``control``, so that one script can be rude to each of them in its own messages.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from benchmarks.measure import MissingPeerError
from benchmarks.peers.cache_client import TOKEN_BYTES
from benchmarks.processes import START_TIMEOUT_S, STOP_TIMEOUT_S, anonymous_bytes, free_port
from kvferry.clients import Client
from kvferry.daemon.process.fd_store import open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.conversation import Conversation
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_messages import Ping
from kvferry.protocol.settings import SESSION_SOCKET, control_address

ROOT: Final = Path(__file__).parents[1]
PEERS: Final = ROOT / ".peers"
LOOK_S: Final = 0.05
LOAD_S: Final = 300.0
"""Of a client's imports, on a busy machine."""

MOST_BYTES: Final = 4 << 30
"""A server that takes more memory of its own is killed, before the kernel chooses whom to kill."""


class Answer(msgspec.Struct, frozen=True):
    """What a client says of one operation, after so many seconds; ``error`` also says that there is no answer."""

    ready: bool = False
    found: bool = False
    wrong: int = 0
    error: str = ""
    after_s: float = 0.0


class Sizes(NamedTuple):
    """An item's tokens, the bytes of the memory tier, and those that a disk tier is told of a disk that has fewer."""

    tokens: int
    memory_bytes: int
    disk_bytes: int

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one item."""
        return self.tokens * TOKEN_BYTES


class CacheClient:
    """A client process of a server; see ``benchmarks.peers.cache_client``."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        pipe = subprocess.PIPE
        with log.open("ab") as out:
            self.process = subprocess.Popen(  # noqa: S603  a client of what is measured
                command, stdin=pipe, stdout=pipe, stderr=out, cwd=ROOT, bufsize=0
            )
        self._awaited = 1

    def connect(self, timeout_s: float) -> Answer:
        """Wait until the process has imported what it needs, however long that takes; return the answer thereafter."""
        imported = self.answer(LOAD_S)
        self._awaited += not imported.error
        return self.answer(timeout_s) if not imported.error else imported

    def begin(self, operation: str, number: int) -> None:
        """Ask for an operation on the item of this number."""
        assert self.process.stdin is not None
        self._awaited += 1
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer says
            self.process.stdin.write(f"{operation} {number}\n".encode())

    def answer(self, timeout_s: float) -> Answer:
        """Wait for the answer to the last question; those to earlier ones may still come before it."""
        assert self.process.stdout is not None
        began, answer = time.perf_counter(), Answer()
        while self._awaited:
            left_s = max(0.0, began + timeout_s - time.perf_counter())
            if not readable(self.process.stdout.fileno(), left_s):
                return Answer(error=f"no answer in {timeout_s:.0f} s", after_s=timeout_s)
            line = self.process.stdout.readline()
            if not line:
                return Answer(error="the client has ended", after_s=time.perf_counter() - began)
            self._awaited -= 1
            answer = msgspec.json.decode(line, type=Answer)
        return msgspec.structs.replace(answer, after_s=time.perf_counter() - began)

    def ask(self, operation: str, number: int, timeout_s: float) -> Answer:
        """Ask, and wait for the answer."""
        self.begin(operation, number)
        return self.answer(timeout_s)

    def close(self) -> None:
        """Kill the process, which may be stopped."""
        with self.process:  # which closes its pipes, too
            self.process.kill()


class Server:
    """One cache server; within ``with`` it runs.

    Attributes:
        name, version: what it is.
        how: how it is started.
        control: the ZeroMQ address at which it takes requests.
        listeners: the addresses of all its sockets for clients, ``host:port`` or a path; ``control``'s is the first.
        valid: the frames of a small request that has a reply.
        unknown: the same of an operation that there is not.
        pid: its process.
        ended: why the race has ended it; empty if it has not.
    """

    name: str
    version: str
    how: str
    python: Path
    control: str
    valid: list[bytes]
    unknown: list[bytes]

    def __init__(self, folder: Path, sizes: Sizes, disk: Path | None) -> None:
        """``disk``: an empty folder for a disk tier, which becomes a file system of an item's size; or None."""
        self.folder, self.sizes, self.disk = folder, sizes, disk
        self.pid, self.ended = 0, ""
        self.client_address = ""
        self._clients: list[CacheClient] = []

    @property
    def listeners(self) -> list[str]:
        """See the attributes."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Return by its own account how much of the memory tier is in use."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and return once it serves."""
        mount = f'mount -t tmpfs -o size={self.sizes.item_bytes},mode=0700 none {self.disk} && exec "$@"'
        private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", mount, "sh"]
        command = [*(private if self.disk else []), *self._command()]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        with (self.folder / "log").open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)  # noqa: S603
        self.pid = process.pid
        self._wait(self._serves, lambda: process.poll() is not None)
        process.returncode = process.returncode or 0  # its end is looked for by its number
        threading.Thread(target=self._watch, args=[self.pid], daemon=True).start()

    def kill(self) -> None:
        """Kill it, and return once it has ended."""
        pidfd = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        assert readable(pidfd, STOP_TIMEOUT_S)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def alive(self) -> bool:
        """Return whether the process is there."""
        stat = Path(f"/proc/{self.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"

    def client(self) -> CacheClient:
        """Return a client, which is to connect."""
        module = [os.fspath(self.python), "-m", "benchmarks.peers.cache_client", type(self).__name__]
        client = CacheClient([*module, self.client_address, str(self.sizes.tokens)], self.folder / "client.log")
        self._clients.append(client)
        return client

    def close(self) -> None:
        """End all that it started."""
        for client in self._clients:
            client.close()
        if self.pid and self.alive():
            self.kill()

    def __enter__(self) -> Self:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has ended
            while anonymous_bytes(pid) < MOST_BYTES:
                time.sleep(LOOK_S)
            os.kill(pid, signal.SIGKILL)
            self.ended = f"was ended at {MOST_BYTES >> 30} GiB"

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _serves(self) -> bool:
        raise NotImplementedError

    def _wait(self, condition: Callable[[], bool], ended: Callable[[], bool] = lambda: False) -> None:
        ends_at = time.monotonic() + 4 * START_TIMEOUT_S
        while True:
            is_over = ended() or time.monotonic() > ends_at
            if condition():
                return
            if is_over:
                raise RuntimeError(f"{self.name} does not serve: {self._log()}")
            time.sleep(LOOK_S)

    def _log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*log"))


class Kvferry(Server):
    """Ours; ``--keep`` holds its memory over a restart where systemd does not."""

    name, version, how = "kvferry", metadata.version("kvferry"), "`kvferry daemon --keep`, defaults"
    python = Path(sys.executable)

    def __init__(self, folder: Path, sizes: Sizes, disk: Path | None) -> None:
        super().__init__(folder, sizes, disk)
        self.valid = Conversation().request(Ping(), (), deadline_ms=30_000)[1]
        self.unknown = [self.valid[0].replace(b"PING", b"NONE")]
        self.client_address = os.fspath(folder / "run")
        self.control = control_address(self.client_address)

    @property
    def listeners(self) -> list[str]:
        """See ``Server``."""
        return [self.control.removeprefix("ipc://"), f"{self.client_address}/{SESSION_SOCKET}"]

    def used_bytes(self) -> int:
        """See ``Server``."""
        with Client.connect(self.client_address) as client:
            return next(tier.used_bytes for tier in client.status().tiers if tier.tier == "host")

    def close(self) -> None:
        """See ``Server``."""
        super().close()
        with contextlib.suppress(KvferryError, OSError):
            open_store(Path(self.client_address), Inherited(), {})  # which ends who holds its memory

    def _command(self) -> list[str]:
        config = self.folder / "daemon.toml"
        disk = f'[tiers.disk]\npath = "{self.disk}"\nmax_bytes = {self.sizes.disk_bytes}\n' if self.disk else ""
        config.write_text(f"[tiers]\nhost_bytes = {self.sizes.memory_bytes}\n{disk}")
        daemon = [sys.executable, "-P", "-m", "kvferry.daemon", "--config", str(config), "--keep"]
        return [*daemon, "--runtime-dir", self.client_address]

    def _serves(self) -> bool:
        try:
            Client.connect(self.client_address, session=False).close()
        except KvferryError:
            return False
        return True


class LMCache(Server):
    """LMCache's server in CPU mode, by its own protocol."""

    name, how = "LMCache", "`lmcache server --eviction-policy LRU --max-workers 2`, CPU mode"
    python = PEERS / "lmcache" / "bin" / "python"

    def __init__(self, folder: Path, sizes: Sizes, disk: Path | None) -> None:
        super().__init__(folder, sizes, disk)
        self.version = installed(self.python, "lmcache")
        self.valid, self.unknown = (
            [msgspec.msgpack.encode(part) for part in (1, operation, None)] for operation in ("ping", "none")
        )
        self._ports = free_port(), free_port()
        self.control, self._http = f"tcp://127.0.0.1:{self._ports[0]}", f"http://127.0.0.1:{self._ports[1]}"
        self.client_address = f"{self.control},{self._http}"

    @property
    def listeners(self) -> list[str]:
        """See ``Server``."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    def used_bytes(self) -> int:
        """See ``Server``."""
        found = re.search(rb'"memory_used_bytes":(\d+)', fetched(f"{self._http}/status"))
        assert found
        return int(found[1])

    def close(self) -> None:
        """See ``Server``."""
        super().close()
        for client in self._clients:
            for left in Path("/dev/shm").glob(f"lmcache_kv_{client.process.pid}_*"):  # noqa: S108  it was killed
                left.unlink()

    def _command(self) -> list[str]:
        rpc, http = map(str, self._ports)
        server = [str(self.python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", rpc]
        server += ["--http-host", "127.0.0.1", "--http-port", http, "--eviction-policy", "LRU", "--max-workers", "2"]
        server += ["--l1-size-gb", str(self.sizes.memory_bytes / (1 << 30))]
        adapter = f'{{"type": "fs_native", "base_path": "{self.disk}"}}'
        return [*server, "--l2-adapter", adapter] if self.disk else server

    def _serves(self) -> bool:
        return bool(fetched(f"{self._http}/healthcheck"))


class Datasystem(Server):
    """openYuanrong's datasystem: a worker, and etcd, which it needs."""

    name, how = "datasystem", "`dscli start`, defaults but `io_thread_nice`, one etcd of its own"
    python = PEERS / "datasystem" / "bin" / "python"

    def __init__(self, folder: Path, sizes: Sizes, disk: Path | None) -> None:
        super().__init__(folder, sizes, disk)
        self.version = installed(self.python, "openyuanrong_datasystem")
        self.client_address = f"127.0.0.1:{free_port()}"
        self.control = f"tcp://{self.client_address}"
        self.valid, self.unknown = ([_request("WorkerOCService", method), b""] for method in (0, 999))
        self._etcd: subprocess.Popen[bytes] | None = None
        self._etcd_urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    @property
    def listeners(self) -> list[str]:
        """See ``Server``."""
        sockets = (self.folder / "datasystem" / "uds").rglob("*")
        return [self.client_address, *(os.fspath(path) for path in sockets if path.is_socket())]

    def used_bytes(self) -> int:
        """See ``Server``."""
        *_, line = (self.folder / "datasystem" / "logs" / "resource.log").read_text().splitlines()
        return int(line.split("|")[7].split("/")[0])

    def start(self) -> None:
        """Start etcd, if it does not run, and the worker by a command that ends once the worker serves."""
        client, peer = self._etcd_urls
        if self._etcd is None:
            etcd = [str(self.python.with_name("etcd")), "--data-dir", str(self.folder / "etcd")]
            etcd += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
            etcd += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
            with (self.folder / "etcd.log").open("wb") as out:
                self._etcd = subprocess.Popen(etcd, stdout=out, stderr=out)  # noqa: S603
            self._wait(lambda: bool(fetched(f"{client}/health")))
        super().start()

    def close(self) -> None:
        """See ``Server``."""
        super().close()
        for command in Path("/proc").glob("[0-9]*/cmdline"):  # a worker that did not serve in time
            with contextlib.suppress(OSError):
                if f"--worker_address={self.client_address}\0".encode() in command.read_bytes():
                    os.kill(int(command.parent.name), signal.SIGKILL)
        if self._etcd:
            self._etcd.kill()
            self._etcd.wait()

    def _command(self) -> list[str]:
        worker = [str(self.python.with_name("dscli")), "start", "-d", str(self.folder), "-w"]
        worker += ["--worker_address", self.client_address]
        worker += ["--etcd_address", self._etcd_urls[0].removeprefix("http://")]
        worker += ["--shared_memory_size_mb", str(self.sizes.memory_bytes >> 20), "--log_monitor_interval_ms", "1000"]
        worker += ["--io_thread_nice", "0"]  # by default -15, before all else that the machine does
        disk = ["--spill_directory", str(self.disk), "--spill_size_limit", str(self.sizes.disk_bytes)]
        return [*worker, *disk] if self.disk else worker

    def _serves(self) -> bool:
        found = re.search(r"success, PID: (\d+)", self._log())
        self.pid = int(found[1]) if found else self.pid
        return bool(found)


def _request(service: str, method: int) -> bytes:
    """Return the head of a request to the datasystem: its protobuf ``MetaPb``, with one empty tick."""

    def varint(value: int) -> bytes:
        parts = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
        return bytes([*(part | 0x80 for part in parts[:-1]), parts[-1]])

    def text(field: int, value: bytes) -> bytes:
        return varint(field << 3 | 2) + varint(len(value)) + value

    method_index, payload_index = varint(2 << 3) + varint(method), varint(3 << 3) + varint((1 << 64) - 1)
    timeout_ms = varint(11 << 3) + varint(30_000)
    return text(1, service.encode()) + method_index + payload_index + text(4, b"bench") + text(9, b"") + timeout_ms


def installed(python: Path, package: str) -> str:
    """Return the version of a package in a peer's environment.

    Raises:
        MissingPeerError: it is not there.
    """
    found = next(python.parents[1].glob(f"lib/python*/site-packages/{package}-*.dist-info"), None)
    if found is None:
        raise MissingPeerError(f"there is no {python.parents[1]}: `make bench NAMES=robustness` sets it up")
    return found.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def readable(descriptor: int, timeout_s: float) -> bool:
    """Return whether there is something to read in time."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1e3 * timeout_s))


def fetched(url: str) -> bytes:
    """Return what is at a URL of our own servers; nothing, where there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  our own server
            return bytes(answer.read())
    except OSError:
        return b""


SERVERS: Final[tuple[type[Server], ...]] = (Kvferry, LMCache, Datasystem)
