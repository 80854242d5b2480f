"""The demo's retracting engine against a real daemon, with a tiny model: turns, other pages, the same tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from transformers import DynamicCache

from examples.demo.engine import Engine
from examples.demo.messages import Done, FromEngine, Prompt, Restored, Retracted, Token, decode_line
from examples.demo.pressure import tiers_config
from examples.demo.retract_engine import RetractEngine
from kvferry.clients import Client, MhaSpec, new_request_id
from kvferry.protocol.errors import InternalError
from tests.daemons import running_daemon

PAGE_SIZE: Final = 16
PAGE_BYTES: Final = 2 * 2 * PAGE_SIZE * 2 * 12 * 4  # K and V of two layers, two heads of 12 floats
TEXT: Final = tuple(3 + number * number % 89 for number in range(5 * PAGE_SIZE))


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a daemon with a host tier; return where it serves."""
    config = tiers_config([prompt_of(TEXT)] * 16, PAGE_SIZE, PAGE_BYTES)
    with running_daemon(tmp_path_factory.mktemp("retract"), config) as daemon:
        yield daemon.runtime_dir


def prompt_of(tokens: tuple[int, ...], max_new_tokens: int = 12) -> Prompt:
    return Prompt(request_id=new_request_id(), tokens=tokens, max_new_tokens=max_new_tokens)


def several() -> list[Prompt]:
    """Return prompts under a page, of exact pages, of several pages, some of which need another page to decode."""
    lengths = (5, PAGE_SIZE, 2 * PAGE_SIZE, 3 * PAGE_SIZE - 1, 4 * PAGE_SIZE + 3, 2 * PAGE_SIZE + 1, 20, 40)
    return [prompt_of(TEXT[start : start + length]) for start, length in enumerate(lengths)]


_expected: Final[dict[tuple[int, ...], list[int]]] = {}


def expected(model: torch.nn.Module, prompt: Prompt) -> list[int]:
    """Return the greedy tokens with transformers' own cache, up to the end token 2."""
    if prompt.tokens not in _expected:
        _expected[prompt.tokens] = computed(model, prompt)
    return _expected[prompt.tokens]


def computed(model: torch.nn.Module, prompt: Prompt) -> list[int]:
    cache, tokens, found = DynamicCache(), list(prompt.tokens), [-1]
    while found[-1] != 2 and len(found) <= prompt.max_new_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
        tokens = [int(logits[0, -1].argmax())]
        found += tokens
    return found[1:]


def run(
    runtime_dir: Path, model: torch.nn.Module, prompts: list[Prompt], pages: int, name: str
) -> tuple[list[int], list[str]]:
    """Serve the prompts in a pool of so many pages; return which are left at the end, and the snapshots."""
    spec = MhaSpec(layers=2, tokens=pages * PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=2, head_dim=12, dtype="float32")
    with Client.connect(runtime_dir, name=name) as client:
        engine = RetractEngine(Engine(client, client.create_pool(name, spec), model))
        for prompt in prompts:
            engine.add(prompt)
        engine.run()
        owned = [pool.pages - pool.free for pool in client.status().pools if pool.pool == name]
        return owned, [one.snapshot for one in client.snapshots()]


@pytest.mark.parametrize("pages", [6, 12])
def test_tokens_are_those_of_one_process_whatever_the_pressure(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes], pages: int
) -> None:
    prompts = several()
    assert run(runtime_dir, tiny_model, prompts, pages, f"retract-{pages}") == ([0], [])
    said = reports(capsysbinary)
    for prompt in prompts:
        assert tokens_of(said, prompt) == expected(tiny_model, prompt)
    retracted = [line for line in said if isinstance(line, Retracted)]
    restored = [line for line in said if isinstance(line, Restored)]
    assert len(retracted) == len(restored) >= 3
    assert sum(line.other_pages for line in restored) > 0
    assert [line.moved_bytes for line in retracted] == [line.pages * PAGE_BYTES for line in retracted]
    assert [line.moved_bytes for line in restored] == [line.pages * PAGE_BYTES for line in restored]
    assert len([line for line in said if isinstance(line, Done)]) == len(prompts)


def reports(capsys: pytest.CaptureFixture[bytes]) -> list[FromEngine]:
    return [decode_line(line) for line in capsys.readouterr().out.splitlines()]


def tokens_of(said: list[FromEngine], prompt: Prompt) -> list[int]:
    return [line.token for line in said if isinstance(line, Token) and line.request_id == prompt.request_id]


def test_with_room_for_all_nobody_has_to_go(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(runtime_dir, tiny_model, several(), 40, "roomy")
    assert not [line for line in reports(capsysbinary) if isinstance(line, Retracted)]


def test_requests_that_outgrow_the_pool_together_take_turns(
    runtime_dir: Path, tiny_model: torch.nn.Module, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Both fit as they come, and none waits; then each needs a third page of the four."""
    prompts = [prompt_of(TEXT[start : start + 2 * PAGE_SIZE - 3]) for start in range(2)]
    assert run(runtime_dir, tiny_model, prompts, 4, "outgrown") == ([0], [])
    said = reports(capsysbinary)
    assert [tokens_of(said, prompt) for prompt in prompts] == [expected(tiny_model, prompt) for prompt in prompts]
    first = next(line for line in said if isinstance(line, Retracted))
    assert (first.pages, first.tokens) == (2, 4)


def test_a_prompt_that_can_never_fit_is_an_error_not_a_hang(runtime_dir: Path, tiny_model: torch.nn.Module) -> None:
    with pytest.raises(InternalError, match="80 tokens does not fit in tiny"):
        run(runtime_dir, tiny_model, [prompt_of(TEXT)], 5, "tiny")
