"""The demo's engines against a real daemon, with a tiny model: tokens, pages that run short, pages that come back."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from transformers import DynamicCache

from examples.demo.decode_engine import DecodeEngine
from examples.demo.engine import Engine
from examples.demo.messages import Arrived, FromEngine, Prefilled, Prompt, Token, decode_line
from examples.demo.prefill_engine import PrefillEngine
from examples.demo.stage_channel import StageChannel
from examples.demo.stages import cut_stage
from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.protocol.errors import InternalError, PeerLostError, PoolFullError
from tests.daemons import running_daemon

PAGE_SIZE: Final = 16
NEW_TOKENS: Final = 6
PAGE_BYTES: Final = 2 * 2 * PAGE_SIZE * 2 * 12 * 4  # K and V of two layers, two heads of 12 floats
PREFIX: Final = tuple(3 + number * number % 89 for number in range(3 * PAGE_SIZE))


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Iterator[Path]:
    """Run a daemon for one test; return where it serves."""
    with running_daemon(tmp_path) as daemon:
        yield daemon.runtime_dir


class Pair(NamedTuple):
    """Both engines, each with a session and a pool of its own."""

    prefill: PrefillEngine
    decode: DecodeEngine
    clients: tuple[Client, Client]

    def run(self, prompts: list[Prompt]) -> None:
        """Serve all prompts, the engines side by side as their processes are."""
        with ThreadPoolExecutor(1) as executor:
            prefilled = executor.submit(self._prefill, prompts)
            for prompt in prompts:
                self.decode.add(prompt)
            self.decode.run()
            prefilled.result()

    def owned_pages(self) -> list[int]:
        """Return how many pages of the two pools are not free, by the daemon's word."""
        return [pool.pages - pool.free for pool in self.clients[0].status().pools]

    def _prefill(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            self.prefill.prefill(prompt)
        self.prefill.finish()


@contextlib.contextmanager
def pair_of(runtime_dir: Path, model: torch.nn.Module, prefill_pages: int, decode_pages: int) -> Iterator[Pair]:
    """Make both engines, with pools of so many pages."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client.connect(runtime_dir, name=name)) for name in ("prefill", "decode")]
        prefill, decode = (
            Engine(client, client.create_pool(name, spec_of(count)), model)
            for client, name, count in zip(clients, ("prefill", "decode"), (prefill_pages, decode_pages), strict=True)
        )
        yield Pair(PrefillEngine(prefill), DecodeEngine(decode), (clients[0], clients[1]))


def spec_of(page_count: int, layers: range = range(2)) -> MhaSpec:
    return MhaSpec(
        layers=len(layers),
        first_layer=layers.start,
        tokens=page_count * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=2,
        head_dim=12,
        dtype="float32",
    )


def prompt_of(tokens: tuple[int, ...], max_new_tokens: int = NEW_TOKENS) -> Prompt:
    return Prompt(request_id=new_request_id(), tokens=tokens, max_new_tokens=max_new_tokens)


def several() -> list[Prompt]:
    """Return prompts under a page, of exact pages, of several pages, and with a shared prefix."""
    return [
        prompt_of(PREFIX[:5]),
        prompt_of(PREFIX[40:8:-1]),
        prompt_of((*PREFIX, 7, 8, 9)),
        prompt_of((*PREFIX, 7, 5)),
        prompt_of(PREFIX),
        prompt_of(PREFIX[::-1] + PREFIX[:20]),
        prompt_of((*PREFIX, *PREFIX[:30])),
    ]


def expected(model: torch.nn.Module, prompt: Prompt) -> list[int]:
    """Return the greedy tokens with transformers' own cache, up to the end token 2."""
    cache, tokens, found = DynamicCache(), list(prompt.tokens), [-1]
    while found[-1] != 2 and len(found) <= prompt.max_new_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
        tokens = [int(logits[0, -1].argmax())]
        found += tokens
    return found[1:]


def reports(capsys: pytest.CaptureFixture[bytes]) -> list[FromEngine]:
    return [decode_line(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("prefill_pages", "decode_pages"),
    [(40, 40), (6, 40), (40, 6), (6, 6)],
    ids=["roomy", "prefill short", "decode short", "both short"],
)
def test_tokens_are_those_of_one_process_and_all_pages_come_back(
    runtime_dir: Path,
    tiny_model: torch.nn.Module,
    capsysbinary: pytest.CaptureFixture[bytes],
    prefill_pages: int,
    decode_pages: int,
) -> None:
    prompts = several()
    with pair_of(runtime_dir, tiny_model, prefill_pages, decode_pages) as pair:
        pair.run(prompts)
        assert pair.owned_pages() == [0, 0]
    said = reports(capsysbinary)
    for prompt in prompts:
        tokens = [line.token for line in said if isinstance(line, Token) and line.request_id == prompt.request_id]
        assert tokens == expected(tiny_model, prompt)


def test_a_shared_prefix_is_computed_once_and_travels_each_time(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    prompts = [prompt_of((*PREFIX, token)) for token in (5, 6, 7)]
    with pair_of(runtime_dir, tiny_model, 40, 40) as pair:
        pair.run(prompts)
    said = reports(capsysbinary)
    assert [line.reused_pages for line in said if isinstance(line, Prefilled)] == [0, 3, 3]
    assert {line.moved_bytes for line in said if isinstance(line, Arrived)} == {4 * PAGE_BYTES}


def test_a_long_prompt_travels_in_chunks(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with pair_of(runtime_dir, tiny_model, 40, 40) as pair:
        pair.run([prompt_of((*PREFIX, *PREFIX[:30]))])
    (prefilled,) = (line for line in reports(capsysbinary) if isinstance(line, Prefilled))
    assert prefilled.chunks == 3


def test_a_prompt_that_can_never_fit_is_an_error_not_a_hang(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    with pair_of(runtime_dir, tiny_model, 2, 3) as pair:
        with pytest.raises(PoolFullError, match="2"):
            pair.prefill.prefill(prompt_of(PREFIX))
        with pytest.raises(InternalError, match="48 tokens does not fit in decode"):
            pair.decode.add(prompt_of(PREFIX))


def test_decode_says_that_prefill_has_gone(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    prompt = prompt_of(PREFIX)
    with pair_of(runtime_dir, tiny_model, 40, 40) as pair:
        pair.decode.add(prompt)
        pair.clients[1].ping()  # its RECEIVE is there
        ids = pair.clients[0].allocate("prefill", 1)
        pair.clients[0].send("prefill", prompt.request_id, [pages(ids, tokens=PAGE_SIZE)], last=False)
        pair.clients[0].ping()
        pair.clients[0].close()
        with pytest.raises(PeerLostError):
            pair.decode.run()


# -- prefill in pipeline stages


class Staged(NamedTuple):
    """Two prefill engines with a layer each, and a decode engine with both, each with a session and a pool."""

    stages: tuple[PrefillEngine, PrefillEngine]
    decode: DecodeEngine
    client: Client

    def run(self, prompts: list[Prompt]) -> None:
        """Serve all prompts, the engines side by side as their processes are."""
        with ThreadPoolExecutor(2) as executor:
            prefilled = [executor.submit(prefill_all, stage, prompts) for stage in self.stages]
            for prompt in prompts:
                self.decode.add(prompt)
            self.decode.run()
            for one in prefilled:
                one.result()


def prefill_all(stage: PrefillEngine, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        stage.prefill(prompt)
    stage.finish()


@contextlib.contextmanager
def staged(
    runtime_dir: Path, model: torch.nn.Module, stage_pages: tuple[int, int], decode_pages: int
) -> Iterator[Staged]:
    with contextlib.ExitStack() as stack:
        names = ("stage-0", "stage-1", "decode")
        clients = [stack.enter_context(Client.connect(runtime_dir, name=name)) for name in names]
        ends = [stack.enter_context(StageChannel(end)) for end in socket.socketpair()]
        engines = []
        layers = (range(1), range(1, 2), range(2))
        for client, name, held, count in zip(clients, names, layers, (*stage_pages, decode_pages), strict=True):
            part = copy.deepcopy(model)
            cut_stage(part, held)
            engines.append(Engine(client, client.create_pool(name, spec_of(count, held)), part))
        first = PrefillEngine(engines[0], after=ends[0])
        last = PrefillEngine(engines[1], before=ends[1])
        yield Staged((first, last), DecodeEngine(engines[2], sources=2), clients[0])


@pytest.mark.parametrize(
    ("stage_pages", "decode_pages"),
    [((40, 40), 40), ((6, 40), 40), ((40, 6), 40), ((7, 6), 6)],
    ids=["roomy", "first stage short", "last stage short", "all short"],
)
def test_two_stages_give_the_tokens_of_one_process(
    runtime_dir: Path,
    tiny_model: torch.nn.Module,
    capsysbinary: pytest.CaptureFixture[bytes],
    stage_pages: tuple[int, int],
    decode_pages: int,
) -> None:
    prompts = several()
    with staged(runtime_dir, tiny_model, stage_pages, decode_pages) as engines:
        engines.run(prompts)
        assert [pool.pages - pool.free for pool in engines.client.status().pools] == [0, 0, 0]
    said = reports(capsysbinary)
    prefilled = [line for line in said if isinstance(line, Prefilled)]
    assert [line.request_id for line in prefilled] == [prompt.request_id for prompt in prompts]
    for prompt in prompts:
        tokens = [line.token for line in said if isinstance(line, Token) and line.request_id == prompt.request_id]
        assert tokens == expected(tiny_model, prompt)
    if stage_pages == (40, 40):
        assert prefilled[3].reused_pages == 3


def test_stages_reuse_what_both_of_them_have(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The last stage's pages hold but one prompt: it gives its prefixes up, the first one still has them."""
    prompts = [prompt_of((*PREFIX, 5)), prompt_of(PREFIX[::-1]), prompt_of((*PREFIX, 6)), prompt_of((*PREFIX, 7))]
    with staged(runtime_dir, tiny_model, (40, 5), 40) as engines:
        engines.run(prompts)
    said = reports(capsysbinary)
    assert [line.reused_pages for line in said if isinstance(line, Prefilled)] == [0, 0, 0, 3]
    tokens = [line.token for line in said if isinstance(line, Token) and line.request_id == prompts[2].request_id]
    assert tokens == expected(tiny_model, prompts[2])
