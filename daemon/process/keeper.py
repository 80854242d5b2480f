"""The keeper: a process that owns the device memory of pools from one daemon to the next.

``device_keeper`` starts it as a program of its own, ``python -I -S keeper.py DESCRIPTOR GRACE_S ends``, with a bound
Unix socket, or ``kvferry keeper`` becomes it, with ``stays``. It imports nothing but the standard library, and CANN's
runtime by ctypes once a device is asked for. It allocates, exports, and names the processes that may import; it maps
nothing, so it reads nothing, and has no stream. The first packet of a connection is HELLO; each packet is a request,
and is answered by one packet:

=========================  ====================================================================================
request                    effect
=========================  ====================================================================================
HELLO VERSION GENERATION   from now on this daemon writes, and older ones are refused: OK VERSION VISIBLE
WHO DEVICE                 use a device: OK and the driver's number of this process
MAKE KEY DEVICE BYTES      allocate and export memory, under a key of 32 hexadecimal digits that is free
SHARE KEY NUMBER           let a process import it, by the driver's number of that process: OK SHAREABLE BYTES
DROP KEY                   free it here, if it is there; it goes with the last process that has it mapped
LIST                       OK, and a line with KEY DEVICE BYTES for each
CANARY DEVICE SHAREABLE    remember memory of this daemon's own, which names this process as an importer
FENCE                      OK and how many canaries of older daemons can still be imported
LEAVE SECONDS              if this daemon goes, wait only so long for the next one
END                        free everything; end, unless this process stays
=========================  ====================================================================================

VISIBLE is this process's ``ASCEND_RT_VISIBLE_DEVICES``, by which devices are counted. A request that is not done is
answered by NO and why, or by FAILED CALL ERROR where the driver refused. Without a daemon for GRACE_S, or what LEAVE
said, everything is freed, and a process that does not stay ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final

VERSION: Final = 1
MAX_KEPT: Final = 1024
MAX_CANARIES: Final = 256
MAX_CONNECTIONS: Final = 8
MAX_PACKET_BYTES: Final = 256
MAX_ANSWER_BYTES: Final = 1 << 16
"""A LIST of ``MAX_KEPT`` is shorter."""

PAGE_BYTES: Final = 2 << 20
MAX_BYTES: Final = 1 << 50
STAYS: Final = "stays"
ENDS: Final = "ends"
VISIBLE_DEVICES: Final = "ASCEND_RT_VISIBLE_DEVICES"

_KEY_DIGITS: Final = 32
_MAX_DEVICE: Final = 999
_MAX_PROCESS: Final = (1 << 31) - 1
_MAX_WORD: Final = (1 << 64) - 1
_GONE: Final = frozenset({107000, 207006})
"""Errors of an import whose number is free, or names memory of a process that has not named this one."""

_PR_SET_DUMPABLE: Final = 4
_HBM_HUGE_PAGES: Final = 4
_ON_DEVICE: Final = 1
_CREDENTIALS: Final = struct.Struct("3i")


class _Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class _PhysicalMemory(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location", _Location),
        ("reserved", ctypes.c_uint64),
    )


class Refused(Exception):  # noqa: N818  an answer rather than an error of this process
    """A request is not done; the text is the answer."""


class Memory:
    """Device memory that is allocated and exported here."""

    def __init__(self, device: int, size_bytes: int, handle: int, shareable: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.handle = handle
        self.shareable = shareable


class Driver:
    """CANN's runtime, loaded when the first device is asked for."""

    def __init__(self) -> None:
        self._acl: Any = None

    def use(self, device: int) -> None:
        """Make a device this thread's current one, and open it the first time."""
        if self._acl is None:
            try:
                acl = _typed(ctypes.CDLL("libascendcl.so"))
            except (OSError, AttributeError) as cause:
                raise Refused(f"NO CANN's runtime cannot be used: {cause}") from cause
            error = acl.aclInit(None)
            if error:
                raise Refused(f"FAILED aclInit {error}")
            self._acl = acl
        self._call("aclrtSetDevice", device)

    def process_id(self) -> int:
        """Return this process's number as the driver knows it."""
        own = ctypes.c_int32()
        self._call("aclrtDeviceGetBareTgid", ctypes.byref(own))
        return own.value

    def make(self, device: int, size_bytes: int) -> Memory:
        """Allocate memory and export it with a list of processes, which is empty."""
        self.use(device)
        handle, shareable = ctypes.c_void_p(), ctypes.c_uint64()
        wanted = _PhysicalMemory(0, 0, _HBM_HUGE_PAGES, _Location(device, _ON_DEVICE), 0)
        self._call("aclrtMallocPhysical", ctypes.byref(handle), size_bytes, ctypes.byref(wanted), 0)
        try:
            self._call("aclrtMemExportToShareableHandle", handle, 0, 0, ctypes.byref(shareable))
        except Refused:
            self._acl.aclrtFreePhysical(handle)
            raise
        return Memory(device, size_bytes, handle.value or 0, shareable.value)

    def share(self, memory: Memory, process: int) -> None:
        """Let a process import memory."""
        self.use(memory.device)
        self._call("aclrtMemSetPidToShareableHandle", memory.shareable, (ctypes.c_int32 * 1)(process), 1)

    def free(self, memory: Memory) -> None:
        """Free memory; what fails is left to the end of this process."""
        self.use(memory.device)
        self._acl.aclrtFreePhysical(memory.handle)

    def is_gone(self, device: int, shareable: int) -> bool:
        """Return whether memory of a dead process is gone: as long as it can be imported, it is not."""
        self.use(device)
        handle = ctypes.c_void_p()
        error = self._acl.aclrtMemImportFromShareableHandle(shareable, device, ctypes.byref(handle))
        if not error:
            self._acl.aclrtFreePhysical(handle)
        return error in _GONE

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401  ctypes
        error = getattr(self._acl, name)(*arguments)
        if error:
            raise Refused(f"FAILED {name} {error}")


class Connection:
    """A process that is connected: the ``number``-th one. ``generation`` is 0 until it has said HELLO."""

    def __init__(self, channel: socket.socket, number: int) -> None:
        self.channel = channel
        self.generation = 0
        self._number = number

    @property
    def rank(self) -> tuple[int, int]:
        """Return what is lowest of the one that is closed for another one: no daemon, then old ones."""
        return self.generation, self._number


class Keeper:
    """Keeps memory by key for the daemon with the highest generation, until it is told to end or nobody comes."""

    def __init__(self, listener: socket.socket, grace_s: float, *, stays: bool, driver: Driver | None = None) -> None:
        self._listener = listener
        self._grace_s = grace_s
        self._stays = stays
        self._driver = driver or Driver()
        self._kept: dict[str, Memory] = {}
        self._canaries: dict[tuple[int, int], int] = {}
        self._connections: dict[int, Connection] = {}
        self._accepted = 0
        self._poll = select.poll()
        self._newest = 0
        self._wait_s = grace_s
        self._free_at: float | None = time.monotonic() + grace_s
        self._has_ended = False
        self._requests: dict[str, tuple[int, Callable[..., str]]] = {
            "WHO": (1, self._who),
            "MAKE": (3, self._make),
            "SHARE": (2, self._share),
            "DROP": (1, self._drop),
            "LIST": (0, self._list),
            "CANARY": (2, self._canary),
            "FENCE": (0, self._fence),
            "LEAVE": (1, self._leave),
            "END": (0, self._end),
        }

    def __repr__(self) -> str:
        """Show how much there is."""
        return f"<Keeper memories={len(self._kept)} daemons={len(self._connections)}>"

    def serve(self) -> None:
        """Serve until told to end, or until no daemon comes in time."""
        self._poll.register(self._listener, select.POLLIN)
        while self._goes_on():
            left_s = None if self._free_at is None else max(0.0, self._free_at - time.monotonic())
            for fd, _ in self._poll.poll(None if left_s is None else 1000 * left_s + 1):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._connections and not self._heard(self._connections[fd]):
                    self._forget(fd)
        for fd in list(self._connections):
            self._forget(fd)

    def _goes_on(self) -> bool:
        if self._free_at is not None and time.monotonic() >= self._free_at:
            self._free_at = None
            self._end()
        return not self._has_ended

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            channel, _ = self._listener.accept()
            if _uid_of(channel) != os.getuid():
                channel.close()
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._forget(min(self._connections, key=lambda fd: self._connections[fd].rank))
            channel.setblocking(False)  # noqa: FBT003  socket's own signature
            self._accepted += 1
            self._connections[channel.fileno()] = Connection(channel, self._accepted)
            self._poll.register(channel, select.POLLIN)

    def _forget(self, fd: int) -> None:
        gone = self._connections.pop(fd)
        self._poll.unregister(fd)
        gone.channel.close()
        if gone.generation and gone.generation == self._newest:
            self._free_at = time.monotonic() + self._wait_s

    def _heard(self, connection: Connection) -> bool:
        """Answer a packet; return False where the daemon is gone, or reads no answers."""
        try:
            data, _, flags, _ = connection.channel.recvmsg(MAX_PACKET_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            answer = "NO it is too long" if flags & socket.MSG_TRUNC else self._answer(connection, data)
        except Refused as refusal:
            answer = str(refusal)
        try:
            connection.channel.send(answer.encode(errors="replace"))
        except OSError:
            return False
        return True

    def _answer(self, connection: Connection, data: bytes) -> str:
        kind, *words = data.decode("ascii", errors="replace").split(" ")
        if kind == "HELLO":
            return self._hello(connection, words)
        if not connection.generation:
            raise Refused("NO the first request is HELLO")
        if connection.generation != self._newest:
            raise Refused("NO a newer daemon writes")
        count, handle = self._requests.get(kind, (-1, self._list))
        if count != len(words):
            raise Refused("NO such request")
        return handle(*words)

    def _hello(self, connection: Connection, words: list[str]) -> str:
        if len(words) != 2:  # noqa: PLR2004
            raise Refused("NO such request")
        version, generation = _number(words[0], 0, _MAX_WORD), _number(words[1], 1, _MAX_WORD)
        if version != VERSION:
            raise Refused(f"NO this keeper speaks version {VERSION}")
        if connection.generation or generation <= self._newest:
            raise Refused("NO a newer daemon writes")
        connection.generation = self._newest = generation
        self._wait_s, self._free_at = self._grace_s, None
        return f"OK {VERSION} {os.environ.get(VISIBLE_DEVICES, '')}"

    def _who(self, device: str) -> str:
        self._driver.use(_number(device, 0, _MAX_DEVICE))
        return f"OK {self._driver.process_id()}"

    def _make(self, key: str, device: str, size: str) -> str:
        size_bytes = _number(size, PAGE_BYTES, MAX_BYTES)
        if size_bytes % PAGE_BYTES:
            raise Refused(f"NO {size_bytes} is not a multiple of {PAGE_BYTES}")
        if _key(key) in self._kept:
            raise Refused("NO that key is taken")
        if len(self._kept) >= MAX_KEPT:
            raise Refused(f"NO it keeps {MAX_KEPT}")
        self._kept[key] = self._driver.make(_number(device, 0, _MAX_DEVICE), size_bytes)
        return "OK"

    def _share(self, key: str, process: str) -> str:
        memory = self._kept.get(_key(key))
        if memory is None:
            raise Refused("NO it keeps no such memory")
        self._driver.share(memory, _number(process, 1, _MAX_PROCESS))
        return f"OK {memory.shareable} {memory.size_bytes}"

    def _drop(self, key: str) -> str:
        memory = self._kept.pop(_key(key), None)
        if memory is not None:
            self._driver.free(memory)
        return "OK"

    def _list(self) -> str:
        return "OK" + "".join(f"\n{key} {one.device} {one.size_bytes}" for key, one in self._kept.items())

    def _canary(self, device: str, shareable: str) -> str:
        at = _number(device, 0, _MAX_DEVICE), _number(shareable, 1, _MAX_WORD)
        if at not in self._canaries and len(self._canaries) >= MAX_CANARIES:
            raise Refused(f"NO it knows {MAX_CANARIES} canaries")
        self._canaries[at] = self._newest  # the driver gives a number again: then the older one is gone
        return "OK"

    def _fence(self) -> str:
        older = [at for at, generation in self._canaries.items() if generation < self._newest]
        gone = [at for at in older if self._driver.is_gone(*at)]
        for at in gone:
            del self._canaries[at]
        return f"OK {len(older) - len(gone)}"

    def _leave(self, seconds: str) -> str:
        self._wait_s = min(float(_number(seconds, 0, _MAX_WORD)), self._grace_s)
        return "OK"

    def _end(self) -> str:
        for key in list(self._kept):
            memory = self._kept.pop(key)
            try:
                self._driver.free(memory)
            except Refused:  # it goes with this process
                continue
        self._canaries.clear()
        self._has_ended = not self._stays
        return "OK"


def _number(word: str, least: int, most: int) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= 20 and least <= int(word) <= most):  # noqa: PLR2004
        raise Refused(f"NO {word[:40]!r} is no number from {least} to {most}")
    return int(word)


def _key(word: str) -> str:
    if len(word) != _KEY_DIGITS or not set(word) <= set("0123456789abcdef"):
        raise Refused(f"NO {word[:40]!r} is no key")
    return word


def _typed(acl: Any) -> Any:  # noqa: ANN401  ctypes
    pointer, size, uint64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    acl.aclrtSetDevice.argtypes = (ctypes.c_int32,)
    acl.aclrtMallocPhysical.argtypes = (pointer, size, pointer, uint64)
    acl.aclrtFreePhysical.argtypes = (pointer,)
    acl.aclrtMemExportToShareableHandle.argtypes = (pointer, ctypes.c_int, uint64, pointer)
    acl.aclrtMemImportFromShareableHandle.argtypes = (uint64, ctypes.c_int32, pointer)
    acl.aclrtMemSetPidToShareableHandle.argtypes = (uint64, pointer, size)
    acl.aclrtDeviceGetBareTgid.argtypes = (pointer,)
    return acl


def _uid_of(channel: socket.socket) -> int:
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def main(arguments: list[str]) -> None:
    """Serve on the listening socket whose descriptor is given; ``ends``: detached from who started it."""
    descriptor, grace_s, mode = arguments
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # who traces it names itself an importer
    with socket.socket(fileno=int(descriptor)) as listener:
        if mode == ENDS:
            _detach(listener)
        else:
            listener.listen()
        Keeper(listener, float(grace_s), stays=mode == STAYS).serve()


def _detach(listener: socket.socket) -> None:
    """Fork, and go on in the child. It listens before the parent ends, so that SO_PEERCRED names the child."""
    done, ready = os.pipe()
    if os.fork():
        os.close(ready)
        os.read(done, 1)
        os._exit(0)
    os.close(done)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # a daemon that takes another's place blocks it
    os.chdir("/")
    listener.listen()
    os.close(ready)


if __name__ == "__main__":
    main(sys.argv[1:])
