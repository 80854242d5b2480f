"""The demo's engines against a real daemon, with a tiny model: tokens, pages that run short, pages that come back."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import DynamicCache

from examples.demo.decode import DecodeEngine
from examples.demo.engine import Engine
from examples.demo.messages import Arrived, Done, Message, Prefilled, Prompt, Restored, Retracted, Token
from examples.demo.model import compute, cut_stage, pool_spec
from examples.demo.prefill import PrefillEngine, connect_stages
from examples.demo.retract import RetractEngine, tiers_config
from kvferry.clients import Client, new_request_id, pages
from kvferry.protocol.errors import InternalError, PeerLostError, PoolFullError
from tests import kit

PAGE_SIZE: Final = 16
PAGE_BYTES: Final = 2 * 2 * PAGE_SIZE * 2 * 12 * 4  # K and V of two layers, two heads of 12 floats
TEXT: Final = tuple(3 + number * number % 89 for number in range(5 * PAGE_SIZE))
PREFIX: Final = TEXT[: 3 * PAGE_SIZE]
SERVED_S: Final = 150.0
MessageT = TypeVar("MessageT", bound=Message)


def prompt_of(tokens: Sequence[int], max_new_tokens: int = 6) -> Prompt:
    return Prompt(new_request_id(), tuple(tokens), max_new_tokens)


@pytest.fixture(scope="module")
def runtime_dir() -> Iterator[Path]:
    """Run a daemon with a host tier; return where it serves. Stages talk over the loopback."""
    config = tiers_config([prompt_of(TEXT, 12)] * 16, PAGE_SIZE, PAGE_BYTES)
    with kit.daemon(config) as daemon, pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield daemon.runtime_dir


class Told:
    """What engines have told."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        return [one for one in self.messages if isinstance(one, kind)]

    def check_tokens(self, model: torch.nn.Module, prompts: list[Prompt]) -> None:
        """Check that each prompt got the tokens that one process with transformers' own cache computes."""
        for prompt in prompts:
            tokens = [one.token for one in self.of(Token) if one.request_id == prompt.request_id]
            assert tokens == expected(model, prompt)


def expected(model: torch.nn.Module, prompt: Prompt) -> list[int]:
    """Return the greedy tokens, up to the end token 2."""
    cache, tokens, found = DynamicCache(), list(prompt.tokens), [-1]
    while found[-1] != 2 and len(found) <= prompt.max_new_tokens:
        tokens = [int(compute(model, torch.tensor(tokens), cache)[-1].argmax())]
        found += tokens
    return found[1:]


@contextlib.contextmanager
def engine_of(
    runtime_dir: Path,
    model: torch.nn.Module,
    page_count: int,
    told: Told,
    *,
    name: str,
    stage: int = 0,
    stages: int = 1,
) -> Iterator[Engine]:
    part: Any = copy.deepcopy(model)
    first_layer = cut_stage(part, stage, stages)
    spec = pool_spec(part.config, page_count * PAGE_SIZE, PAGE_SIZE, first_layer)
    with Client.connect(runtime_dir, name=name) as client:
        yield Engine(client, client.create_pool(f"{name}-{new_request_id()}", spec), part, told.messages.append)


def owned_pages(engine: Engine) -> int:
    """Return how many pages of its pool are not free, by the daemon's word."""
    return sum(pool.pages - pool.free for pool in engine.client.status().pools if pool.pool == engine.pool.name)


class Served(NamedTuple):
    """What came of some prompts."""

    told: Told
    owned_pages: list[int]


def serve(
    runtime_dir: Path, model: torch.nn.Module, prompts: list[Prompt], prefill_pages: Sequence[int], decode_pages: int
) -> Served:
    """Prefill in as many stages as there are numbers of pages, and decode."""
    told, stages, store = Told(), len(prefill_pages), HashStore()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(stages) as executor:
        engines = [
            stack.enter_context(
                engine_of(runtime_dir, model, count, told, name=f"prefill-{stage}", stage=stage, stages=stages)
            )
            for stage, count in enumerate(prefill_pages)
        ]
        decode = stack.enter_context(engine_of(runtime_dir, model, decode_pages, told, name="decode"))

        def prefill(stage: int) -> None:
            group = connect_stages(store, stage, stages) if stages > 1 else None
            PrefillEngine(engines[stage], group).run(prompts)

        prefilled = [executor.submit(prefill, stage) for stage in range(stages)]
        DecodeEngine(decode, sources=stages).run(prompts)
        for one in prefilled:
            one.result()
        return Served(told, [owned_pages(engine) for engine in (*engines, decode)])


@pytest.fixture(scope="module")
def serve_apart(runtime_dir: Path) -> Iterator[Callable[..., Served]]:
    """Return ``serve`` in a process of its own: stages that disagree on what they compute wait for ever, or abort."""
    with get_context("spawn").Pool(1) as pool:
        yield lambda *arguments: pool.apply_async(serve, (runtime_dir, *arguments)).get(SERVED_S)


def several() -> list[Prompt]:
    """Return prompts under a page, of exact pages, of several pages, and with a shared prefix."""
    tokens = (
        PREFIX[:5],
        PREFIX[40:8:-1],
        (*PREFIX, 7, 8, 9),
        (*PREFIX, 7, 5),
        PREFIX,
        PREFIX[::-1] + PREFIX[:20],
        (*PREFIX, *PREFIX[:30]),
    )
    return [prompt_of(one) for one in tokens]


@pytest.mark.parametrize(
    ("prefill_pages", "decode_pages"),
    [
        ([6], 6),
        pytest.param([40], 40, marks=pytest.mark.full),
        pytest.param([40, 40], 40, marks=pytest.mark.full),
        pytest.param([7, 6], 6, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process_and_all_pages_come_back(
    serve_apart: Callable[..., Served], tiny_model: torch.nn.Module, prefill_pages: list[int], decode_pages: int
) -> None:
    prompts = several()
    served = serve_apart(tiny_model, prompts, prefill_pages, decode_pages)
    served.told.check_tokens(tiny_model, prompts)
    assert not any(served.owned_pages)
    prefilled = served.told.of(Prefilled)
    assert [one.request_id for one in prefilled] == [prompt.request_id for prompt in prompts]
    if min(*prefill_pages, decode_pages) == 40:
        assert [one.reused_pages for one in prefilled] == [0, 0, 0, 3, 2, 0, 3]
        assert [one.chunks for one in prefilled] == [1, 1, 2, 1, 1, 3, 1]


def test_a_shared_prefix_is_computed_once_and_travels_each_time(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    told, _ = serve(runtime_dir, tiny_model, [prompt_of((*PREFIX, token)) for token in (5, 6, 7)], [40], 40)
    assert [one.reused_pages for one in told.of(Prefilled)] == [0, 3, 3]
    assert {one.moved_bytes for one in told.of(Arrived)} == {4 * PAGE_BYTES}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        (PrefillEngine, PoolFullError, "4"),
        (DecodeEngine, InternalError, "64 tokens does not fit in never"),
        (RetractEngine, InternalError, "64 tokens does not fit in never"),
    ],
)
def test_a_prompt_that_can_never_fit_is_an_error_not_a_hang(
    runtime_dir: Path,
    tiny_model: torch.nn.Module,
    kind: type[PrefillEngine | DecodeEngine | RetractEngine],
    error: type[Exception],
    reason: str,
) -> None:
    with engine_of(runtime_dir, tiny_model, 3, Told(), name="never") as engine, pytest.raises(error, match=reason):
        kind(engine).run([prompt_of(TEXT[: 4 * PAGE_SIZE])])


@pytest.mark.full
def test_decode_says_that_prefill_has_gone(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    prompt, told = prompt_of(PREFIX), Told()
    with (
        engine_of(runtime_dir, tiny_model, 40, told, name="decode") as decode,
        engine_of(runtime_dir, tiny_model, 40, told, name="prefill") as prefill,
        ThreadPoolExecutor(1) as executor,
    ):
        decoded = executor.submit(DecodeEngine(decode).run, [prompt])
        pool = prefill.pool.name
        first = pages(prefill.client.allocate(pool, 1), tokens=PAGE_SIZE)
        sent = prefill.client.send(pool, prompt.request_id, [first], last=False)
        while not sent.matched:
            prefill.client.poll(1.0)
        prefill.client.close()
        with pytest.raises(PeerLostError):
            decoded.result()


def turns() -> list[Prompt]:
    """Return prompts under a page, of exact pages, of several pages, some of which need another page to decode."""
    lengths = (5, PAGE_SIZE, 2 * PAGE_SIZE, 3 * PAGE_SIZE - 1, 4 * PAGE_SIZE + 3, 2 * PAGE_SIZE + 1, 20, 40)
    return [prompt_of(TEXT[start : start + length], 12) for start, length in enumerate(lengths)]


def take_turns(runtime_dir: Path, model: torch.nn.Module, prompts: list[Prompt], page_count: int) -> Told:
    told = Told()
    with engine_of(runtime_dir, model, page_count, told, name="retract") as engine:
        RetractEngine(engine).run(prompts)
        assert owned_pages(engine) == 0
        assert list(engine.client.snapshots()) == []
    told.check_tokens(model, prompts)
    return told


@pytest.mark.parametrize("page_count", [6, 12])
def test_tokens_are_those_of_one_process_whatever_the_pressure(
    runtime_dir: Path, tiny_model: torch.nn.Module, page_count: int
) -> None:
    told = take_turns(runtime_dir, tiny_model, turns(), page_count)
    retracted, restored = told.of(Retracted), told.of(Restored)
    assert len(retracted) == len(restored) >= 3
    assert sum(one.other_pages for one in restored) > 0
    moved = [(one.moved_bytes, one.pages) for one in retracted] + [(one.moved_bytes, one.pages) for one in restored]
    assert all(size_bytes == count * PAGE_BYTES for size_bytes, count in moved)
    assert len(told.of(Done)) == len(turns())
