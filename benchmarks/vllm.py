"""vLLM's engines with kvferry's connector, with vLLM's own, NIXL's and LMCache's, and with none.

A prefill and a decode engine of each, in turns with kvferry's. A peer's stand still in kvferry's turns, as idle ones
may take both cores (NIXL's do). Prefill has all but the last block of a prompt in its own cache, so that rounds are
short; decode has nothing, and gets all of it. Each engine's greedy tokens are compared with those of vLLM without a
connector, and what its connector was to bring is counted: where a token is wrong, or KV was computed that should have
come, there is an error instead of figures. On this machine two engines and the daemon share the cores.

Hand-overs are measured with a small model of random weights, too, which has sliding windows beside full attention: a
Gemma 3, beside NIXL's connector.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Final, NamedTuple

from benchmarks.measure import (
    MICROSECONDS,
    MILLISECONDS,
    Effort,
    MissingPeerError,
    Row,
    Target,
    Unit,
    memcpy,
    row_of,
    seconds,
)
from benchmarks.peers.lmcache import LMCache, LMCacheError, running_server
from benchmarks.peers.vllm import Engine, EngineError, Reply, Request, running_engine
from benchmarks.peers.vllm_hooks import External, Failed, Note, Said, Step
from benchmarks.processes import free_port, running_daemon

ROOT: Final = Path(__file__).parents[1]
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
PEERS: Final = ROOT / ".peers" / "vllm" / "bin" / "python"
MODELS: Final = ROOT / ".models"

LENGTHS: Final = (128, 1024, 4096)
"""Of what is handed over or found; two tokens more are computed, so that it is whole blocks by anybody's rounding."""

BLOCK_SIZE: Final = 128
"""vLLM's own choice on a CPU."""

FRESH: Final = BLOCK_SIZE + 2
MOST_PROMPTS: Final = 6
"""Of a length: the first round does not count."""

CHARACTERS: Final = 80_000
"""Of this project's manuals, of which prompts are made."""

NEW: Final = 4
IDLE_STEPS: Final = 60
IN_FLIGHT: Final = 64
BUSY_STEPS: Final = 24
SKIPPED_STEPS: Final = 3
STORED_S: Final = 60.0
SERVER_GB: Final = 2

HOST_TIER: Final = f"[tiers]\nhost_bytes = {SERVER_GB << 30}\n"
ENGINE_THREAD: Final = Target(50.0, "ours")
AS_FAST: Final = Target(1.0)
BYTES: Final = Unit("bytes", "lower")
REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's own proxies give to prefill."""

RECOMPUTED: Final = "vLLM without a connector, which computes the prompt again"
PLAIN_STEP: Final = "the whole step of vLLM without a connector: the ratio is the connector's share"


class Model(NamedTuple):
    """What engines compute.

    Attributes:
        name: of its folder.
        rows: how the names of its rows begin.
        blocks: of an engine.
        token_bytes: of K and V of a token in all layers.
    """

    name: str
    rows: str
    blocks: int
    token_bytes: int


SMOLLM2: Final = Model("smollm2-135m", "vllm", 160, 30 * 2 * 3 * 64 * 4)
GEMMA: Final = Model("tiny-gemma", "vllm/gemma3", 480, 6 * 2 * 2 * 32 * 4)
"""Four of its six layers have a window of 96 tokens, of which a request goes on with the last."""


class WrongResultError(RuntimeError):
    """An engine's tokens are not vLLM's own, or it has computed what its connector was to bring."""


class Contender(NamedTuple):
    """A connector.

    Attributes:
        name: in rows.
        is_: what it is, to a reader.
        python: of the environment that has it.
        prefill: vLLM's ``kv_transfer_config`` of the prefill engine; None: there is no such engine.
        decode: that of the decode engine; None: it has no connector.
        finds: whether it finds prompts that vLLM's own cache has lost.
        loads_meanwhile: whether a request is computed once its KV is there; else it is loaded within a step.
        environment: more variables, of either engine.
        moved: how many bytes of a hand-over it has moved, by what it says of itself; None: it says nothing.
    """

    name: str
    is_: str
    python: Path
    prefill: dict[str, Any] | None
    decode: dict[str, Any] | None
    finds: bool = True
    loads_meanwhile: bool = True
    environment: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    moved: Callable[[Mapping[str, Any]], int] | None = None


class Handover(NamedTuple):
    """A prompt's way to decode.

    Attributes:
        first_token: milliseconds from prefill's having its first token to decode's having its.
        arrived: to decode's beginning to compute, in milliseconds; without the load, where that is within the step.
        bytes_a_token: that its connector says it has moved, or those of the blocks that it was to bring.
    """

    first_token: float
    arrived: float
    bytes_a_token: float


class Steps(NamedTuple):
    """Steps of an engine, in microseconds.

    Attributes:
        connector: in its connector's methods, of either side together.
        scheduling: those of the scheduler's side alone, in the thread of the engine's core.
        whole: all of it.
    """

    connector: list[float]
    scheduling: list[float]
    whole: list[float]


class Prompts:
    """Prompts of real text by length and number, and vLLM's own tokens after each; filled once an engine can do it."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.text: list[int] = []
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def of(self, length: int, number: int) -> list[int]:
        """Return a prompt that begins as others of its length do, but for its last block."""
        begins = LENGTHS[-1] + (LENGTHS.index(length) * MOST_PROMPTS + number) * FRESH
        assert begins + FRESH <= len(self.text), "the text is too short"
        return [*self.text[: length + 2 - FRESH], *self.text[begins : begins + FRESH]]

    def short(self, number: int, length: int) -> list[int]:
        """Return one that begins as no other does."""
        return [number + 1000, *self.text[: length - 1]]

    def expect(self, prompt: Sequence[int], tokens: list[int]) -> None:
        """Take note of vLLM's own."""
        self._expected[tuple(prompt)] = tokens

    def after(self, prompt: Sequence[int]) -> list[int]:
        """Return them."""
        return self._expected[tuple(prompt)]


class Engines:
    """The engines of a contender."""

    def __init__(
        self, contender: Contender, model: Model, prefill: Engine | None, decode: Engine, prompts: Prompts
    ) -> None:
        """Take them; without ``prefill`` decode has no connector."""
        self.contender = contender
        self.model = model
        self.prompts = prompts
        self._prefill, self._decode = prefill, decode

    def wait_until_ready(self) -> None:
        """Return once they serve."""
        for one in self._all():
            one.wait_until_ready()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop all of their processes meanwhile."""
        with ExitStack() as stack:
            for one in self._all():
                stack.enter_context(one.standing_still())
            yield

    def fill_prompts(self, lengths: Sequence[int]) -> None:
        """Make the prompts, and compute what all others are compared with; without a connector."""
        assert self._prefill is None
        text = "".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
        self.prompts.text = self._decode.tokenize(text[:CHARACTERS])
        for prompt in (self.prompts.of(length, number) for length in lengths for number in range(MOST_PROMPTS)):
            [reply] = self._decode.ask(Request(prompt, NEW))
            self.prompts.expect(prompt, reply.tokens)

    def hand_over(self, prompt: list[int]) -> Handover:
        """Have a prompt prefilled by one and decoded by the other, one after the other, as vLLM's proxies do."""
        assert self._prefill is not None
        self._forget()
        [before] = self._prefill.ask(Request(prompt, 1, REMOTE_DECODE))
        [after] = self._decode.ask(Request(prompt, NEW, before.params))
        moved_bytes = self._check(prompt, after)
        return Handover(
            first_token=(after.first_token_at - before.first_token_at) * 1e3,
            arrived=(after.scheduled_at - before.first_token_at) * 1e3,
            bytes_a_token=moved_bytes / len(prompt),
        )

    def store(self, prompt: list[int]) -> None:
        """Have a prompt computed by decode, and return once it is found again.

        Raises:
            WrongResultError: it never is.
        """
        ends_at = time.monotonic() + STORED_S
        while True:
            self._forget()
            self._decode.ask(Request(prompt, 1))
            if _external_tokens(self._decode.notes()) >= _whole_blocks(prompt):
                return
            if time.monotonic() > ends_at:
                raise WrongResultError(f"{self.contender.name}: {len(prompt)} tokens are not found again")

    def first_token(self, prompt: list[int]) -> float:
        """Return how long decode takes for a prompt that vLLM's own cache does not have, in milliseconds."""
        self._forget()
        [reply] = self._decode.ask(Request(prompt, NEW))
        self._check(prompt, reply)
        return (reply.first_token_at - reply.asked_at) * 1e3

    def idle_steps(self, steps: int) -> Steps:
        """Return steps in which one request goes on within a block: its connector has nothing to do."""
        return self._steps([Request(self.prompts.short(0, 20), steps)])

    def busy_steps(self, requests: int, steps: int) -> Steps:
        """Return steps in which many requests go on, each of which fills a block meanwhile."""
        lengths = [BLOCK_SIZE - 1 - number % (steps - SKIPPED_STEPS - 1) for number in range(requests)]
        prompts = [self.prompts.short(1 + number, length) for number, length in enumerate(lengths)]
        return self._steps([Request(prompt, steps) for prompt in prompts])

    def _steps(self, requests: list[Request]) -> Steps:
        self._forget()
        self._decode.ask(*requests)
        noted = [one for one in self._decode.notes() if isinstance(one, Step)]
        computed = [one for one in noted if one.side == "scheduler" and one.requests == len(requests)][SKIPPED_STEPS:]
        workers = [one for one in noted if one.side == "worker"]  # whose steps end within the engine's
        within = [
            sum(other.us for other in workers if one.at_s - one.whole_us / 1e6 < other.at_s < one.at_s)
            for one in computed
        ]
        spent = [one.us + more for one, more in zip(computed, within, strict=True)]
        return Steps(spent, [one.us for one in computed], [one.whole_us for one in computed])

    def _forget(self) -> None:
        """Have decode's own cache emptied, and what was noted so far."""
        self._decode.reset()
        self._decode.notes()

    def _check(self, prompt: list[int], reply: Reply) -> int:
        """Raise for what is wrong with a reply; return how many bytes its connector has moved."""
        who = self.contender.name
        expected = self.prompts.after(prompt)
        if reply.tokens != expected:
            logged = " ".join(filter(None, (one.last_error() for one in self._all())))
            raise WrongResultError(
                f"{who}: after {len(prompt)} tokens came {reply.tokens} ({reply.ended_by}), not {expected}. {logged}"
            )
        if self._prefill is None:
            return 0
        noted = self._decode.notes()
        failed = sum(one.blocks for one in noted if isinstance(one, Failed))
        external = _external_tokens(noted)
        if failed or external < _whole_blocks(prompt):
            raise WrongResultError(
                f"{who}: {external} of {len(prompt)} tokens came from elsewhere, {failed} blocks failed"
            )
        moved = self.contender.moved
        if moved is None:
            return _whole_blocks(prompt) * self.model.token_bytes
        return sum(moved(one.data) for one in noted if isinstance(one, Said))

    def _all(self) -> list[Engine]:
        return [self._decode] if self._prefill is None else [self._prefill, self._decode]


class Baseline(NamedTuple):
    """Steps of kvferry's engine, which are compared with those of each peer: with one request, and with many."""

    idle: Steps
    busy: Steps


Part = Callable[[Engines, Engines, Effort], list[Row]]
MakeContender = Callable[[Path], AbstractContextManager[Contender]]


def measure(effort: Effort) -> list[Row]:
    """Measure against recomputing, and against each peer that runs here; the others are named, with why.

    Raises:
        MissingPeerError: vLLM, or the model, is not there, or kvferry's own engines do not do what they should; says
            why.
    """
    for needed in (PYTHON, *(MODELS / one.name for one in (SMOLLM2, GEMMA))):
        if not needed.exists():
            raise MissingPeerError(f"there is no {needed}: `make bench NAMES=vllm` sets it up")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as name:
        folder = Path(name)
        rows = measure_model(SMOLLM2, (example, nixl, lmcache), folder / SMOLLM2.name, effort)
        return rows + measure_model(GEMMA, (nixl,), folder / GEMMA.name, effort, hand_overs_alone=True)


def measure_model(
    model: Model, peers: Sequence[MakeContender], folder: Path, effort: Effort, *, hand_overs_alone: bool = False
) -> list[Row]:
    """Measure engines of a model against recomputing, and against peers.

    Raises:
        MissingPeerError: kvferry's own engines do not do what they should.
    """
    prompts = Prompts()
    with ExitStack() as stack:
        try:
            ours = stack.enter_context(running_engines(kvferry, model, folder, prompts))
            with running_engines(plain, model, folder, prompts) as peer:
                ours.wait_until_ready()
                peer.wait_until_ready()
                peer.fill_prompts(LENGTHS[: effort.pick(len(LENGTHS), 1)])
                rows, parts = against_recompute(ours, peer, effort), [hand_overs]
                if not hand_overs_alone:
                    baseline, more = against_plain_steps(ours, peer, effort)
                    rows += more
                    parts += [hits, partial(steps, baseline=baseline)]
        except (EngineError, WrongResultError) as error:
            raise MissingPeerError(str(error)) from error
        for contender in peers:
            try:
                with running_engines(contender, model, folder, prompts) as peer:
                    peer.wait_until_ready()
                    for part in parts:
                        rows += _tried(part, ours, peer, effort)
            except (EngineError, LMCacheError, MissingPeerError) as error:
                _say(f"not measured: {contender.__name__}, {model.name}: {error}")
    return rows


def against_recompute(ours: Engines, peer: Engines, effort: Effort) -> list[Row]:
    """Compare a hand-over, and a hit, with computing the prompt again."""
    rows = []
    for prompts in _prompts(ours, effort, effort.pick(3, 1)):
        ours.store(prompts[0])
        figures: list[list[float]] = [[], [], []]
        for prompt in prompts:
            taken = ours.hand_over(prompt).first_token, ours.first_token(prompts[0]), peer.first_token(prompt)
            for one, figure in zip(figures, taken, strict=True):
                one.append(figure)
        handed, found, computed = (one[1:] for one in figures)
        row = partial(row_of, unit=MILLISECONDS, peer=computed, peer_is=RECOMPUTED, target=AS_FAST)
        rows.append(_said(row(f"{ours.model.rows}/handover/{_length(prompts)}_tokens/against_recompute", ours=handed)))
        rows.append(_said(row(f"{ours.model.rows}/hit/{_length(prompts)}_tokens/against_recompute", ours=found)))
    return rows


def against_plain_steps(ours: Engines, peer: Engines, effort: Effort) -> tuple[Baseline, list[Row]]:
    """Compare what a step takes in the connector with all of a step without one."""
    mine, theirs = (_all_steps(one, effort) for one in (ours, peer))
    row = partial(row_of, unit=MICROSECONDS, peer_is=PLAIN_STEP)
    p95_us = quantiles(mine.idle.connector, n=20)[-1]
    rows = [
        row(
            "vllm/step/nothing_to_do",
            ours=mine.idle.connector,
            peer=theirs.idle.whole,
            target=ENGINE_THREAD,
            note=f"p95 {p95_us:.0f} us",
        ),
        row(
            "vllm/step/in_flight",
            ours=[fmean(mine.busy.connector)],
            peer=[fmean(theirs.busy.whole)],
            note=_busy_note(mine),
        ),
    ]
    return mine, [_said(one) for one in rows]


def hand_overs(ours: Engines, peer: Engines, effort: Effort) -> list[Row]:
    """Compare hand-overs from prefill to decode."""
    rows = []
    for prompts in _prompts(ours, effort, effort.pick(MOST_PROMPTS - 1, 1)):
        both: tuple[list[Handover], list[Handover]] = ([], [])
        for prompt in prompts:
            with peer.standing_still():
                both[0].append(ours.hand_over(prompt))
            both[1].append(peer.hand_over(prompt))
        name, of, length = peer.contender.name, ours.model.rows, _length(prompts)
        figures = ["first_token", "arrived"] if peer.contender.loads_meanwhile else ["first_token"]
        for figure in figures:
            mine, theirs = ([getattr(found, figure) for found in one[1:]] for one in both)
            where = f"{of}/handover/{length}_tokens{'' if figure == 'first_token' else f'/{figure}'}/against_{name}"
            rows.append(_said(row_of(where, MILLISECONDS, mine, theirs, peer_is=peer.contender.is_, target=AS_FAST)))
        mine, theirs = ([found.bytes_a_token for found in one[1:]] for one in both)
        where = f"{ours.model.rows}/bytes_a_token/{length}_tokens/against_{name}"
        rows.append(
            _said(row_of(where, BYTES, mine, theirs, peer_is=peer.contender.is_, note=_copied(length, ours.model)))
        )
    return rows


def hits(ours: Engines, peer: Engines, effort: Effort) -> list[Row]:
    """Compare prompts that are found outside of vLLM."""
    rows = []
    for prompts in _prompts(ours, effort, 0) if peer.contender.finds else ():
        both: tuple[list[float], list[float]] = ([], [])
        for one in (ours, peer):
            one.store(prompts[0])
        for _ in range(effort.pick(MOST_PROMPTS, 2)):
            with peer.standing_still():
                both[0].append(ours.first_token(prompts[0]))
            both[1].append(peer.first_token(prompts[0]))
        where = f"vllm/hit/{_length(prompts)}_tokens/against_{peer.contender.name}"
        mine, theirs = (one[1:] for one in both)
        rows.append(_said(row_of(where, MILLISECONDS, mine, theirs, peer_is=peer.contender.is_, target=AS_FAST)))
    return rows


def steps(_ours: Engines, peer: Engines, effort: Effort, *, baseline: Baseline) -> list[Row]:
    """Compare what a step takes in either connector."""
    theirs = _all_steps(peer, effort)
    row = partial(row_of, unit=MICROSECONDS, peer_is=peer.contender.is_)
    name = peer.contender.name
    rows = [
        row(f"vllm/step/nothing_to_do/against_{name}", ours=baseline.idle.connector, peer=theirs.idle.connector),
        row(
            f"vllm/step/in_flight/against_{name}",
            ours=[fmean(baseline.busy.connector)],
            peer=[fmean(theirs.busy.connector)],
        ),
    ]
    return [_said(one) for one in rows]


@contextmanager
def kvferry(_folder: Path) -> Iterator[Contender]:
    """Run kvferry's daemon; decode has its prefix cache, too."""
    with running_daemon(HOST_TIER) as runtime_dir:
        extra = {"runtime_dir": os.fspath(runtime_dir)}
        ours = partial(_connector, "KvferryConnector", kv_connector_module_path="kvferry.clients.vllm.connector")
        yield Contender(
            "kvferry",
            "kvferry",
            PYTHON,
            ours("kv_producer", {**extra, "cache": False}),
            ours("kv_both", extra),
            moved=lambda data: int(data.get("receive_bytes", 0)),
        )


@contextmanager
def plain(_folder: Path) -> Iterator[Contender]:
    """Nothing."""
    yield Contender("recompute", RECOMPUTED, PYTHON, None, None)


@contextmanager
def example(folder: Path) -> Iterator[Contender]:
    """The connector that vLLM has as an example: a file of safetensors a layer, which the page cache has."""
    extra = {"shared_storage_path": os.fspath(folder / "files")}
    both = _connector("ExampleConnector", "kv_both", extra)
    is_ = "vLLM's ExampleConnector: a file a layer, which the page cache has"
    yield Contender("example", is_, PYTHON, both, both, loads_meanwhile=False)


@contextmanager
def nixl(_folder: Path) -> Iterator[Contender]:
    """NIXL's connector; UCX chooses how the bytes go."""
    yield Contender(
        "nixl",
        f"vLLM's NixlConnector, NIXL {_version('nixl')}, UCX between two processes of this host",
        _peers_python(),
        _connector("NixlConnector", "kv_producer", {}, kv_buffer_device="cpu"),
        _connector("NixlConnector", "kv_consumer", {}, kv_buffer_device="cpu"),
        finds=False,
        environment=(
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        ),
        moved=lambda data: sum(data["bytes_transferred"]),
    )


@contextmanager
def lmcache(folder: Path) -> Iterator[Contender]:
    """LMCache's connector and server; chunks are a block, where 256 tokens are its own choice."""
    version = _version("lmcache")
    server = LMCache(version, _peers_python().parent)
    options = ("--chunk-size", str(BLOCK_SIZE), "--supported-transfer-mode", "auto")
    with running_server(server, folder / "lmcache.log", SERVER_GB, *options) as (rpc_url, _):
        host, _, port = rpc_url.rpartition(":")
        extra = {"lmcache.mp.host": host, "lmcache.mp.port": int(port)}
        both = _connector("LMCacheMPConnector", "kv_both", extra)
        yield Contender("lmcache", f"LMCache {version}, its MP connector and server", _peers_python(), both, both)


@contextmanager
def running_engines(make: MakeContender, model: Model, folder: Path, prompts: Prompts) -> Iterator[Engines]:
    """Start a contender's engines, not waiting for them."""
    folder.mkdir(exist_ok=True)
    with make(folder) as contender, ExitStack() as stack:
        started = [
            stack.enter_context(
                running_engine(
                    f"{contender.name}'s {side}",
                    contender.python,
                    folder / f"{contender.name}-{side}",
                    MODELS / model.name,
                    model.blocks,
                    connector,
                    environment,
                )
            )
            for side, connector, environment in zip(
                ("prefill", "decode"), (contender.prefill, contender.decode), contender.environment, strict=True
            )
            if connector is not None or side == "decode"
        ]
        yield Engines(contender, model, started[0] if len(started) > 1 else None, started[-1], prompts)


def _connector(name: str, role: str, extra: Mapping[str, object], **more: object) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": dict(extra), **more}


def _peers_python() -> Path:
    if not PEERS.exists():
        raise MissingPeerError(f"there is no {PEERS}: run `make peers` first")
    return PEERS


def _version(package: str) -> str:
    """Return which version of a peer's package there is."""
    wheel = next(_peers_python().parents[1].glob(f"lib/python*/site-packages/{package}-*.dist-info"), None)
    if wheel is None:
        raise MissingPeerError(f"{PEERS} has no {package}: remove {PEERS.parents[1]} and run `make peers` again")
    return wheel.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def _tried(part: Part, ours: Engines, peer: Engines, effort: Effort) -> list[Row]:
    """Return the rows of a part, or say why there are none."""
    try:
        return part(ours, peer, effort)
    except WrongResultError as error:
        _say(f"not measured: {error}")
        return []


def _prompts(ours: Engines, effort: Effort, rounds: int) -> list[list[list[int]]]:
    """Return the prompts of each length: one for the round that does not count, and of the others."""
    lengths = LENGTHS[: effort.pick(len(LENGTHS), 1)]
    return [[ours.prompts.of(length, number) for number in range(rounds + 1)] for length in lengths]


def _all_steps(engines: Engines, effort: Effort) -> Baseline:
    idle = engines.idle_steps(effort.pick(IDLE_STEPS, 10))
    return Baseline(idle, engines.busy_steps(effort.pick(IN_FLIGHT, 2), effort.pick(BUSY_STEPS, 10)))


def _busy_note(steps: Baseline) -> str:
    return (
        f"the mean of {len(steps.busy.connector)} steps, with the stores of {IN_FLIGHT} blocks; "
        f"{fmean(steps.busy.scheduling):.0f} us of it in the scheduler"
    )


def _length(prompts: Sequence[Sequence[int]]) -> int:
    return _whole_blocks(prompts[0])


def _whole_blocks(prompt: Sequence[int]) -> int:
    return len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def _external_tokens(notes: Sequence[Note]) -> int:
    return sum(one.tokens for one in notes if isinstance(one, External))


def _copied(tokens: int, model: Model) -> str:
    """Say how much KV so many tokens have, and how long it takes to copy that at least."""
    size = tokens * model.token_bytes
    copy = memcpy(size)
    copy_ms = median(seconds(copy) for _ in range(5)) * 1e3
    return f"{size / 1e6:.1f} MB, which one memcpy copies in {copy_ms:.1f} ms"


def _said(row: Row) -> Row:
    """Show a row at once: all of them take minutes."""
    _say(f"{row.name}: {row.ours:.1f} and {row.peer:.1f} {row.unit}")
    return row


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
