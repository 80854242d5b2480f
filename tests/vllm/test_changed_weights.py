"""Weights and adapters that change while real engines run: whose KV is shared, and handed on, follows their content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_GQA, TINY_MHA
from tests.vllm.adapters import make_adapter
from tests.vllm.in_process import STORY, TOKENS, Answer, Asked, Engine, Served, by_hand, engine, reset
from tests.vllm.pairs import through_router
from tests.vllm.servers import REMOTE_DECODE

Engines = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def engines(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Return two engines of one model, with adapters, and a prefix cache in the daemon."""
    folder = tmp_path_factory.mktemp("engines")
    options: dict[str, Any] = {"model": TINY_MHA, "enable_lora": True, "max_lora_rank": 8}
    told = {"runtime_dir": str(kept_daemon.runtime_dir)}
    with (
        engine(folder, {**told, "pool": "one"}, **options) as one,
        engine(folder, {**told, "pool": "two"}, **options) as two,
    ):
        yield one, two


def scaled(served: Served, factor: float, rank: int | None = None) -> None:
    """Scale some weights, as a trainer might; ``rank``: which alone."""

    def scale(model: Any) -> None:  # noqa: ANN401  vLLM's
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415

        if rank not in {None, get_tensor_model_parallel_rank()}:
            return
        for name, weights in model.named_parameters():
            if "layernorm" in name:
                weights.data[::2].mul_(factor)

    served.llm.apply_model(scale)


def changed(one: Engine, factor: float = 2.0) -> None:
    """Change an engine's weights and reset vLLM's own prefix cache, as who changes them has to."""
    one.drain()
    one.call(scaled, factor)
    assert one.call(reset)


@pytest.fixture
def changed_first(engines: Engines) -> Iterator[Engines]:
    """Return both, of which the first one has other weights than at its start."""
    changed(engines[0])
    yield engines
    changed(engines[0], 0.5)


def asked(one: Engine, prompt: str, **more: Any) -> Answer:  # noqa: ANN401  of Asked
    """Ask an engine that has nothing itself."""
    one.drain()
    assert one.call(reset)
    (answer,) = one.ask(prompt, **more)
    one.drain()
    return answer


def computed(one: Engine, prompt: str, **more: Any) -> list[int]:  # noqa: ANN401  of Asked
    """Return the tokens of a prompt that is computed whatever is cached."""
    return asked(one, prompt, skips_cache=True, **more).tokens


def prompt_of(name: str) -> str:
    """Return a prompt that no other test has."""
    return f"{name}: " + STORY * 6


def test_weights_that_changed_find_nothing_of_before(engines: Engines) -> None:
    one, other = engines
    prompt = prompt_of("before")
    before = asked(one, prompt)
    changed(one)
    try:
        after = asked(one, prompt)
        assert (after.cached, after.tokens) == (0, computed(one, prompt))
        assert after.tokens != before.tokens
        assert asked(other, prompt).cached > 0, "the control: what has those weights finds it"
    finally:
        changed(one, 0.5)


def paused(served: Served, factor: float) -> None:
    """Change weights as a trainer does by vLLM's interface: generation is paused, which resets caches, and goes on."""
    core = served.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("abort")
    served.step()
    scaled(served, factor)
    core.resume_scheduler()


def test_weights_that_change_while_generation_is_paused(engines: Engines) -> None:
    """Requests are aborted, of which vLLM tells its workers in a step between."""
    one, other = engines
    prompt = prompt_of("paused")
    before = asked(other, prompt)
    with by_hand(one):
        one.add("Shorter than a block: vLLM does not reset while blocks are being stored.")
        one.call(Served.step)
        one.call(paused, 2.0)
    other.call(reset, external=False)
    asked(other, prompt)
    try:
        (after,) = one.ask(prompt)
        assert (after.cached, after.tokens) == (0, computed(one, prompt))
        assert after.tokens != before.tokens
    finally:
        changed(one, 0.5)


def test_what_changed_weights_have_computed_is_for_them(changed_first: Engines) -> None:
    one, other = changed_first
    prompt = prompt_of("after")
    assert asked(one, prompt).cached == 0
    assert asked(one, prompt).cached > 0
    assert asked(other, prompt).cached == 0


def test_weights_are_told_by_their_content(engines: Engines) -> None:
    """The same change at both, and back."""
    one, other = engines
    prompt = prompt_of("content")
    assert asked(one, prompt).cached == 0
    for each in engines:
        changed(each)
    there = [asked(one, prompt), asked(other, prompt)]
    for each in engines:
        changed(each, 0.5)
    back = asked(one, prompt)
    assert [answer.cached > 0 for answer in (*there, back)] == [False, True, True]


def test_reset_without_change_keeps_what_is_stored(engines: Engines) -> None:
    one, other = engines
    prompt = prompt_of("reset")
    asked(one, prompt)
    assert [asked(each, prompt).cached > 0 for each in (one, other, one)] == [True] * 3


@pytest.mark.long
def test_two_ranks_are_looked_at(kept_daemon: Daemon, tmp_path: Path) -> None:
    """What one of them alone has changed is a change of both."""
    told = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "ranks"}
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    options["environment"] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for functions of tests
    prompt = prompt_of("ranks")
    with engine(tmp_path, told, model=TINY_GQA, **options) as one:
        cached = [asked(one, prompt).cached > 0, asked(one, prompt).cached > 0]
        for factor in (2.0, 0.5):
            one.drain()
            one.call(scaled, factor, rank=1)
            cached.append(asked(one, prompt).cached > 0)
    assert cached == [False, True, False, True]


def handed_on(one: Engine, other: Engine, prompt: str, **more: Any) -> Answer:  # noqa: ANN401  of Asked
    """Have a prompt prefilled by one engine, and decoded by the other."""
    for each in (one, other):
        each.drain()
        assert each.call(reset)
        each.log()
    (prefilled,) = one.ask(Asked(prompt, 1, dict(REMOTE_DECODE)), **more)
    (answer,) = other.ask(Asked(prompt, TOKENS, through_router(prefilled)), **more)
    for each in (one, other):
        each.drain()
    return answer


def receive_failed(one: Engine) -> bool:
    """Return whether a prompt that has come was not taken."""
    one.drain()
    return any("with another adapter or other weights" in line for line in one.log())


def test_prompts_of_other_weights_are_not_taken(changed_first: Engines) -> None:
    one, other = changed_first
    prompt = prompt_of("handed on")
    answer = handed_on(one, other, prompt)
    assert receive_failed(other)
    assert answer.tokens == computed(other, prompt)


def test_prompts_of_equal_weights_are_taken(changed_first: Engines) -> None:
    one, other = changed_first
    changed(other)
    try:
        handed_on(one, other, prompt_of("equal"))
        assert not receive_failed(other)
    finally:
        changed(other, 0.5)


def test_adapters_loaded_in_place(engines: Engines, tmp_path: Path) -> None:
    """New weights, and the same weights with another alpha, under one name, path and number."""
    one, other = engines
    prompt = prompt_of("in place")
    said = []
    for seed, alpha in ((1, 64), (2, 64), (2, 16)):
        make_adapter(tmp_path / "adapter", seed, lora_alpha=alpha)
        told: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "number": 101, "in_place": True}
        first, again, elsewhere = asked(one, prompt, **told), asked(one, prompt, **told), asked(other, prompt, **told)
        assert [answer.cached > 0 for answer in (first, again, elsewhere)] == [False, True, True]
        assert first.tokens == again.tokens == elsewhere.tokens == computed(one, prompt, **told)
        said.append(tuple(first.tokens))
    assert len(set(said)) == len(said)


def test_adapter_that_changed_behind_vllm_is_not_shared(engines: Engines, tmp_path: Path) -> None:
    """It has the old weights in memory, and may load the new ones at any time."""
    one, _ = engines
    one.log()
    prompt = prompt_of("behind")
    told: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "number": 102}
    for seed, cached in ((3, [False, True]), (4, [False, False])):
        make_adapter(tmp_path / "adapter", seed)
        assert [asked(one, prompt, **told).cached > 0 for _ in cached] == cached
    assert any("is not shared: its files have changed" in line for line in one.log())


def test_decode_compares_an_adapters_content(engines: Engines, tmp_path: Path) -> None:
    one, other = engines
    prompt = prompt_of("adapters")
    make_adapter(tmp_path / "adapter", 5)
    told: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "number": 103, "in_place": True}
    handed_on(one, other, prompt, **told)
    assert not receive_failed(other)
    for each in engines:
        assert each.call(reset)
    (prefilled,) = one.ask(Asked(prompt, 1, dict(REMOTE_DECODE)), **told)
    make_adapter(tmp_path / "adapter", 6)
    (answer,) = other.ask(Asked(prompt, TOKENS, through_router(prefilled)), **told)
    assert answer.tokens == computed(other, prompt, **told)
    assert receive_failed(other)
    one.drain()
