"""What fuzz targets are given: frames, and how they are changed. Imports nothing that is fuzzed.

A change is of one value in a frame, so that what is around it stays readable; or of single bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

FOLDER: Final = Path(__file__).parent
TARGETS: Final = tuple(sorted(one.stem for one in (FOLDER / "targets").glob("*.py")))
CRASHES: Final = FOLDER / "crashes"
"""Inputs that broke a target once: files in a folder of its name."""

MAX_INPUT_BYTES: Final = 16_384
SEPARATOR: Final = b"\x00--\x00"
_BYTES: Final = (b"\x00", b"\x7f", b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xdc", b"\xdf", b"\xff", b"\xff" * 8)
_NUMBERS: Final = (
    -1,
    0,
    1,
    2,
    127,
    128,
    255,
    4095,
    4096,
    65_535,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 62,
    (1 << 63) - 1,
)
_OTHERS: Final[Sequence[Any]] = (
    None,
    True,
    False,
    0.5,
    float("nan"),
    float("inf"),
    "",
    b"",
    "\x00",
    "x" * 300,
    [],
    {},
    [[]],
    {"a": 1},
)
_PREFIXES: Final = (0, 1, 2, 4)
"""How many bytes may be before a value in a frame: none, those of a step, or the length on a session socket."""


class Target(Protocol):
    """A module of ``tests.fuzz.targets``.

    ``ROUNDS``: the inputs of a run without a fuzzer, some seconds.
    """

    ROUNDS: int

    def take_one_input(self, data: bytes) -> None:
        """Have kvferry read the bytes; raises where it has a bug. Leaves nothing behind."""

    def seeds(self) -> list[bytes]:
        """Return inputs that are right, or nearly so."""


def target(name: str) -> Target:
    return cast("Target", import_module(f"tests.fuzz.targets.{name}"))


def joined(frames: Sequence[bytes]) -> bytes:
    return SEPARATOR.join(frames)


def frames_of(data: bytes) -> list[bytes]:
    return data.split(SEPARATOR)


def mutations(seeds: Sequence[bytes], rounds: int, seed: int) -> Iterator[bytes]:
    """Yield changed seeds, the same for the same seed."""
    source = random.Random(seed)  # noqa: S311  nothing secret
    for _ in range(rounds):
        data = source.choice(seeds)
        for _ in range(source.randint(1, 4)):
            data = mutated(data, source, seeds)
        yield data


def mutated(data: bytes, source: random.Random, others: Sequence[bytes]) -> bytes:
    """Return the input with one change; frames of ``others`` may come into it."""
    frames = frames_of(data)
    at = source.randrange(len(frames))
    match source.randrange(10):
        case 0 | 1 | 2 | 3 | 4:
            frames[at] = _with_another_value(frames[at], source)
        case 5:
            frames.insert(at, source.choice(frames_of(source.choice(others))))
        case 6:
            frames[at] = source.choice(frames_of(source.choice(others)))
        case 7:
            frames.insert(source.randrange(len(frames)), frames.pop(at))
        case 8 if len(frames) > 1:
            del frames[at]
        case _:
            frames[at] = _with_other_bytes(frames[at], source)
    return joined(frames)[:MAX_INPUT_BYTES]


def _with_other_bytes(frame: bytes, source: random.Random) -> bytes:
    data = bytearray(frame)
    at, cut = source.randint(0, len(data)), source.choice((0, 0, 1, 1, 4, 32))
    data[at : at + cut] = source.choice((source.choice(_BYTES), source.randbytes(source.randint(0, 9))))
    return bytes(data)


def _with_another_value(frame: bytes, source: random.Random) -> bytes:
    """Return the frame with one of its values changed, where it has any."""
    for size in _PREFIXES:
        for decode, encode in _FORMS:
            try:
                value = decode(frame[size:])
                if not isinstance(value, list | dict):
                    continue
                body = encode(_changed(value, source))
            except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, OverflowError):
                continue
            return (len(body).to_bytes(4, "little") if size == _PREFIXES[-1] else frame[:size]) + body
    return _with_other_bytes(frame, source)


_FORMS: Final[Sequence[tuple[Callable[[bytes], Any], Callable[[Any], bytes]]]] = (
    (msgspec.msgpack.decode, msgspec.msgpack.encode),
    (msgspec.json.decode, msgspec.json.encode),
)


def _changed(value: Any, source: random.Random) -> Any:  # noqa: ANN401, PLR0911  anything: a row for each type
    if source.random() < 0.1:
        return source.choice((*_NUMBERS, *_OTHERS))
    match value:
        case dict() if value:
            return _changed_dict(value, source)
        case list() if value:
            return _changed_list(value, source)
        case bool():
            return not value
        case int():
            near = (value - 1, value + 1, value * 2, -value, value ^ 1 << source.randrange(32))
            return source.choice((*near, *_NUMBERS))
        case str():
            at = source.randint(0, len(value))
            return value[:at] + source.choice(("", "0", "\x00", "\ud7ff", "/", value)) + value[at + 1 :]
        case bytes():
            return _with_other_bytes(value, source)
        case _:
            return source.choice((*_NUMBERS, *_OTHERS))


def _changed_dict(value: dict[Any, Any], source: random.Random) -> dict[Any, Any]:
    key = source.choice(list(value))
    match source.randrange(8):
        case 0:
            return {name: one for name, one in value.items() if name != key}
        case 1:
            return {**value, key: value[source.choice(list(value))]}
        case _:
            return {**value, key: _changed(value[key], source)}


def _changed_list(value: list[Any], source: random.Random) -> list[Any]:
    at = source.randrange(len(value))
    before, after = value[:at], value[at + 1 :]
    match source.randrange(8):
        case 0:
            return [*before, *after]
        case 1:
            return [*before, *[value[at]] * source.choice((2, 2, 3, 70)), *after]
        case 2:
            return [*before, source.choice(value), *after]
        case _:
            return [*before, _changed(value[at], source), *after]
