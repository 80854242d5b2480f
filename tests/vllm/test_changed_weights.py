"""Weights and adapters that change while real engines run: whose KV is shared, and handed on, follows their content."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_GQA, TINY_MHA
from tests.vllm.in_process import (
    Asked,
    Engine,
    Served,
    by_hand,
    engine,
    make_adapter,
    prompt_of,
    reset,
    settings,
    through_router,
)
from tests.vllm.servers import REMOTE_DECODE

Engines = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def engines(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Return two engines of one model, with adapters, and a prefix cache in the daemon."""
    folder = tmp_path_factory.mktemp("engines")
    options: dict[str, Any] = {"model": TINY_MHA, "enable_lora": True, "max_lora_rank": 8}
    with (
        engine(folder, settings(kept_daemon, "one"), **options) as one,
        engine(folder, settings(kept_daemon, "two"), **options) as two,
    ):
        yield one, two


def scaled(served: Served, factor: float, rank: int | None = None) -> None:
    """Scale some weights, as a trainer might; ``rank``: which alone."""
    served.llm.apply_model(partial(scale, factor, rank))


def scale(factor: float, rank: int | None, model: Any) -> None:  # noqa: ANN401  vLLM's
    """Do that in a process of vLLM's."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415

    if rank not in {None, get_tensor_model_parallel_rank()}:
        return
    for name, weights in model.named_parameters():
        if "layernorm" in name:
            weights.data[::2].mul_(factor)


@contextlib.contextmanager
def changed(*engines: Engine) -> Iterator[None]:
    """Have engines other weights meanwhile, and reset vLLM's own prefix cache, as who changes them has to."""
    try:
        for one in engines:
            one.drain()
            one.call(scaled, 2.0)
            assert one.call(reset)
        yield
    finally:
        for one in engines:
            one.drain()
            one.call(scaled, 0.5)
            assert one.call(reset)


def computed(one: Engine, prompt: str, **more: Any) -> list[int]:  # noqa: ANN401  of Asked
    """Return the tokens of a prompt that is computed whatever is cached."""
    return one.ask_anew(prompt, skips_cache=True, **more).tokens


def is_found(one: Engine, prompt: str, **more: Any) -> bool:  # noqa: ANN401  of Asked
    return one.ask_anew(prompt, **more).cached > 0


def test_weights_that_changed_find_nothing_of_before(engines: Engines) -> None:
    one, other = engines
    prompt = prompt_of("before")
    before = one.ask_anew(prompt)
    with changed(one):
        after = one.ask_anew(prompt)
        assert (after.cached, after.tokens) == (0, computed(one, prompt))
        assert after.tokens != before.tokens
        assert is_found(other, prompt), "the control: what has those weights finds it"
        assert is_found(one, prompt)
        new = prompt_of("after")
        assert [is_found(one, new), is_found(one, new), is_found(other, new)] == [False, True, False]


def paused(served: Served, factor: float) -> None:
    """Change weights as a trainer does by vLLM's interface: generation is paused, which resets caches, and goes on."""
    served.core.pause_scheduler("abort")
    served.step()
    scaled(served, factor)
    served.core.resume_scheduler()


def test_weights_that_change_while_generation_is_paused(engines: Engines) -> None:
    """Requests are aborted, of which vLLM tells its workers in a step between."""
    one, other = engines
    prompt = prompt_of("paused")
    before = other.ask_anew(prompt)
    with by_hand(one):
        one.add("Shorter than a block: vLLM does not reset while blocks are being stored.")
        one.call(Served.step)
        one.call(paused, 2.0)
    other.ask_anew(prompt)
    try:
        (after,) = one.ask(prompt)
        assert (after.cached, after.tokens) == (0, computed(one, prompt))
        assert after.tokens != before.tokens
    finally:
        one.drain()
        one.call(scaled, 0.5)
        assert one.call(reset)


def test_weights_are_told_by_their_content(engines: Engines) -> None:
    """The same change at both, and back."""
    one, other = engines
    prompt = prompt_of("content")
    with changed(*engines):
        assert [is_found(one, prompt), is_found(other, prompt), is_found(one, prompt)] == [False, True, True]
    assert [is_found(one, prompt), is_found(other, prompt)] == [False, True], "a reset keeps what is stored"


@pytest.mark.long
def test_two_ranks_are_looked_at(kept_daemon: Daemon, tmp_path: Path) -> None:
    """What one of them alone has changed is a change of both."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    options["environment"] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for functions of tests
    prompt = prompt_of("ranks")
    with engine(tmp_path, settings(kept_daemon, "ranks"), model=TINY_GQA, **options) as one:
        cached = [is_found(one, prompt), is_found(one, prompt)]
        for factor in (2.0, 0.5):
            one.drain()
            one.call(scaled, factor, rank=1)
            cached.append(is_found(one, prompt))
    assert cached == [False, True, False, True]


def is_refused(one: Engine, other: Engine, prompt: str, **more: Any) -> bool:  # noqa: ANN401  of Asked
    """Have a prompt prefilled by one engine, and decoded by the other; return whether that did not take it.

    Its tokens must be its own whether it did or not.
    """
    for each in (one, other):
        each.drain()
        assert each.call(reset)
        each.log()
    (prefilled,) = one.ask(Asked(prompt, 1, dict(REMOTE_DECODE)), **more)
    (answer,) = other.ask(Asked(prompt, params=through_router(prefilled)), **more)
    for each in (one, other):
        each.drain()
    said = any("with another adapter or other weights" in line for line in other.log())
    assert answer.tokens == computed(other, prompt, **more)
    return said


def test_prompts_of_other_weights_are_not_taken(engines: Engines) -> None:
    one, other = engines
    with changed(one):
        assert is_refused(one, other, prompt_of("handed on"))
        with changed(other):
            assert not is_refused(one, other, prompt_of("equal"))


def test_adapters_loaded_in_place(engines: Engines, tmp_path: Path) -> None:
    """New weights, and the same weights with another alpha, under one name, path and number."""
    one, other = engines
    prompt = prompt_of("in place")
    said = []
    for seed, alpha in ((1, 64), (2, 64), (2, 16)):
        make_adapter(tmp_path / "adapter", seed, lora_alpha=alpha)
        told: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "number": 101, "in_place": True}
        first, again, elsewhere = (each.ask_anew(prompt, **told) for each in (one, one, other))
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
        assert [is_found(one, prompt, **told) for _ in cached] == cached
    assert any("is not shared: its files have changed" in line for line in one.log())


@pytest.mark.long
def test_decode_compares_an_adapters_content(engines: Engines, tmp_path: Path) -> None:
    one, other = engines
    prompt = prompt_of("adapters")
    make_adapter(tmp_path / "adapter", 5)
    told: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "number": 103, "in_place": True}
    assert not is_refused(one, other, prompt, **told)
    for each in engines:
        assert each.call(reset)
    (prefilled,) = one.ask(Asked(prompt, 1, dict(REMOTE_DECODE)), **told)
    make_adapter(tmp_path / "adapter", 6)
    other.log()
    (answer,) = other.ask(Asked(prompt, params=through_router(prefilled)), **told)
    other.drain()
    assert any("with another adapter or other weights" in line for line in other.log())
    assert answer.tokens == computed(other, prompt, **told)
    one.drain()
