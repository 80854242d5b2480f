"""The demo's engines against a real daemon, with a tiny model: tokens, pages that run short, pages that come back."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import tomllib
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
from examples.demo.model import compute, cut_stage, pool_spec, token_bytes
from examples.demo.prefill import PrefillEngine, connect_stages
from examples.demo.retract import RetractEngine, tiers_config, too_few_pages
from kvferry.clients import Client, new_request_id, pages
from kvferry.protocol.errors import InternalError, PeerLostError, PoolFullError
from tests import kit
from tests.demo.conftest import llama

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
        """Return the messages of a kind."""
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
    """Make an engine with a pool of so many pages."""
    part: Any = copy.deepcopy(model)
    first_layer = cut_stage(part, stage, stages)
    spec = pool_spec(part.config, page_count * PAGE_SIZE, PAGE_SIZE, first_layer)
    with Client.connect(runtime_dir, name=name) as client:
        yield Engine(client, client.create_pool(f"{name}-{new_request_id()}", spec), part, told.messages.append)


def owned_pages(engine: Engine) -> int:
    """Return how many pages of its pool are not free, by the daemon's word."""
    return sum(pool.pages - pool.free for pool in engine.client.status().pools if pool.pool == engine.pool.name)


# -- a prefill and a decode engine, side by side as their processes are


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
    [([40], 40), ([6], 40), ([40], 6), ([6], 6), ([40, 40], 40), ([6, 40], 40), ([40, 6], 40), ([7, 6], 6)],
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


def test_stages_reuse_what_both_of_them_have(serve_apart: Callable[..., Served], tiny_model: torch.nn.Module) -> None:
    """The last stage's pages hold but one prompt: it gives its prefixes up, the first one still has them."""
    prompts = [prompt_of(one) for one in ((*PREFIX, 5), PREFIX[::-1], (*PREFIX, 6), (*PREFIX, 7))]
    told, _ = serve_apart(tiny_model, prompts, [40, 5], 40)
    assert [one.reused_pages for one in told.of(Prefilled)] == [0, 0, 0, 3]
    told.check_tokens(tiny_model, prompts)


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


# -- an engine whose requests take turns


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


def test_with_room_for_all_nobody_has_to_go(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    assert take_turns(runtime_dir, tiny_model, turns(), 40).of(Retracted) == []


def test_requests_that_outgrow_the_pool_together_take_turns(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    """Both fit as they come, and none waits; then each needs a third page of the four."""
    prompts = [prompt_of(TEXT[start : start + 2 * PAGE_SIZE - 3], 12) for start in range(2)]
    first = take_turns(runtime_dir, tiny_model, prompts, 4).of(Retracted)[0]
    assert (first.pages, first.tokens) == (2, 4)


@pytest.mark.parametrize(
    ("lengths", "count"), [((10, 20, 30, 40), 6), ((200, 10), 14), ((5,) * 8, 8)], ids=["half", "the longest", "equal"]
)
def test_each_prompt_fits_a_short_pool_and_not_all_of_them(lengths: tuple[int, ...], count: int) -> None:
    prompts = [prompt_of(range(length), 20) for length in lengths]
    needed = [prompt.most_pages(16) for prompt in prompts]
    assert too_few_pages(prompts, 16) == count
    assert max(needed) <= count < sum(needed)


def test_the_host_tier_holds_every_page() -> None:
    config = tomllib.loads(tiers_config([prompt_of(range(10), 20), prompt_of(range(40), 20)], 16, 700_000))
    assert config == {"tiers": {"host_bytes": 5 << 20}}  # six pages


@pytest.mark.parametrize(("tokens", "new", "count"), [(10, 7, 1), (10, 8, 2), (16, 1, 1), (16, 2, 2), (40, 20, 4)])
def test_the_last_token_needs_no_room(tokens: int, new: int, count: int) -> None:
    assert prompt_of(range(tokens), new).most_pages(16) == count


def test_bytes_of_a_token(tiny_model: Any) -> None:  # noqa: ANN401  a model
    assert token_bytes(tiny_model.config) * PAGE_SIZE == PAGE_BYTES


# -- a model in stages

CHUNKS: Final = (7, 1, 12)


@pytest.fixture(scope="module")
def deep_model() -> torch.nn.Module:
    """Return a model of five layers."""
    return llama(layers=5, vocabulary=97)


def logits_of(model: torch.nn.Module, stages: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the logits of each chunk's last token; ``change`` is done to what one stage hands to the next."""
    torch.manual_seed(3)
    parts: list[Any] = [copy.deepcopy(model) for _ in range(stages)]
    for number, part in enumerate(parts):
        cut_stage(part, number, stages)
    caches, found = [DynamicCache() for _ in parts], []
    for length in CHUNKS:
        states = torch.randint(0, 97, (length,))
        for number, (part, cache) in enumerate(zip(parts, caches, strict=True)):
            last = number == stages - 1
            states = compute(part, states, cache, only_last=last)
            states = states if last else change(states)
        found.append(states)
    return torch.cat(found)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_give_the_logits_of_the_whole_model(deep_model: torch.nn.Module, stages: int) -> None:
    torch.manual_seed(3)
    cache, whole = DynamicCache(), []
    for length in CHUNKS:
        tokens = torch.randint(0, 97, (1, length))
        with torch.inference_mode():
            whole.append(deep_model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0])
    assert torch.equal(logits_of(deep_model, stages, lambda states: states), torch.cat(whole))
    if stages > 1:
        assert not torch.allclose(logits_of(deep_model, stages, torch.zeros_like), torch.cat(whole))


def test_stages_have_all_layers_once_and_about_as_many_each(deep_model: torch.nn.Module) -> None:
    def layers_of(stage: int, stages: int) -> tuple[int, int]:
        part: Any = copy.deepcopy(deep_model)
        return cut_stage(part, stage, stages), len(part.model.layers)

    assert [layers_of(stage, 3) for stage in range(3)] == [(0, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize(("stage", "stages"), [(2, 2), (-1, 2), (0, 6), (0, 0)])
def test_stages_that_a_model_does_not_have(deep_model: torch.nn.Module, stage: int, stages: int) -> None:
    with pytest.raises(ValueError, match="of a model that has 5 layers"):
        cut_stage(deep_model, stage, stages)
