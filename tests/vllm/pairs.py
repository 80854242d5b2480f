"""A prefill and a decode engine, what a router says to them, and what a test looks at beside the tokens."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvferry.clients import Client
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.daemons import soon
from tests.vllm.in_process import BLOCK, TOKENS, Answer, Asked, Engine, Plain, Served, engine
from tests.vllm.servers import REMOTE_DECODE

CHUNK: Final = 3 * BLOCK
"""Tokens of a step of prefill; of SmolLM2 as many bytes as go layer by layer, of the tiny models fewer."""


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt of so many tokens, of which no other seed has the first block."""
    return tuple(random.Random(f"{seed}").choices(range(1000, 20000), k=length))  # noqa: S311


def want(plain: Plain, *prompts: tuple[int, ...], **more: Any) -> list[list[int]]:  # noqa: ANN401  of Plain
    """Return plain vLLM's tokens."""
    return plain.tokens(*(Asked(one) for one in prompts), **more)


class Pair(NamedTuple):
    """Two engines, and a client of the daemon of either."""

    prefill: Engine
    decode: Engine
    client: Client
    other: Client
    """Of decode's daemon; mostly the same one."""

    def prefilled(self, *prompts: tuple[int, ...], **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Have prompts prefilled, and return what the answers say to decode."""
        answers = self.prefill.ask(*(Asked(one, 1, {**REMOTE_DECODE, **more}) for one in prompts))
        assert [one.ended for one in answers] == ["length"] * len(prompts)
        return [through_router(one) for one in answers]

    def handed_on(self, *prompts: tuple[int, ...]) -> list[Answer]:
        """Have prompts prefilled first, and then decoded."""
        params = self.prefilled(*prompts)
        return self.decode.ask(*(Asked(one, TOKENS, said) for one, said in zip(prompts, params, strict=True)))

    def counted(self, name: str) -> int:
        """Return one of decode's daemon's counters."""
        return self.other.status().counters.get(name, 0)

    @contextlib.contextmanager
    def counts(self, name: str, count: int) -> Iterator[None]:
        """Assert by how much one of the counters grows."""
        before = self.counted(name)
        yield
        assert self.counted(name) - before == count, name

    def moved_bytes(self) -> int:
        """Return how many bytes have arrived at decode."""
        return self.counted("transfers.moved_bytes")

    def arrived_pages(self) -> int:
        """Return how many pages have arrived of prompts of which others are still to come."""
        return sum(one.arrived for one in self.other.status().transfers)

    def receives(self) -> int:
        """Return for how many prompts decode waits."""
        return sum(one.direction == "receive" for one in self.other.status().transfers)

    def assert_nothing_left(self) -> None:
        """Assert that a server would be idle at either side, has all its blocks, and the daemon nothing under way."""
        for one in (self.prefill, self.decode):
            one.drain()
            assert one.call(used_blocks) == 0
        for client in (self.client, self.other):
            assert soon(partial(_is_idle, client)), client.status().transfers


@contextlib.contextmanager
def running_pair(
    folder: Path,
    runtime_dir: Path | Sequence[Path],
    *,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_options: Mapping[str, Any] | None = None,
    decode_options: Mapping[str, Any] | None = None,
    **both: Any,  # noqa: ANN401  of engine
) -> Iterator[Pair]:
    """Run both engines.

    Args:
        folder: for their output.
        runtime_dir: the daemon's; or prefill's and decode's.
        prefill: settings of the connector at prefill.
        decode: settings of the connector at decode.
        prefill_options: of the engine.
        decode_options: of the engine.
        **both: options of both engines.
    """
    name = uuid.uuid4().hex[:8]  # of this pair's pools, beside others of the same daemon
    here, there = (runtime_dir, runtime_dir) if isinstance(runtime_dir, Path) else runtime_dir
    common: dict[str, Any] = {"role": "kv_producer", "max_num_batched_tokens": CHUNK, **both, **(prefill_options or {})}
    with contextlib.ExitStack() as stack:
        first = {"runtime_dir": str(here), "pool": f"{name}-prefill", "cache": False, **(prefill or {})}
        one = stack.enter_context(engine(folder, first, **common))
        second = {"runtime_dir": str(there), "pool": f"{name}-decode", "cache": False, **(decode or {})}
        other = stack.enter_context(engine(folder, second, **{"role": "kv_consumer", **both, **(decode_options or {})}))
        clients = [stack.enter_context(contextlib.closing(Client.connect(path))) for path in (here, there)]
        yield Pair(one, other, *clients)


def _is_idle(client: Client) -> bool:
    return not client.status().transfers


def through_router(answer: Answer) -> dict[str, Any]:
    """Return an answer's parameters as they come through a router: as JSON."""
    assert answer.params is not None
    said: dict[str, Any] = json.loads(json.dumps(answer.params))
    return said


def both_given() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a router that asks both sides at once says to prefill and to decode."""
    name = uuid.uuid4().hex
    return {"do_remote_decode": True, "transfer_id": name}, {"do_remote_prefill": True, "transfer_id": name}


# -- called in an engine's process


def used_blocks(served: Served) -> int:
    """Return how many blocks are not free; the null block is."""
    pool = served.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def preempted(served: Served) -> int:
    """Have vLLM preempt all requests that it computes; return how many."""
    before = len(served.scheduler.running)
    served.llm.reset_prefix_cache(reset_running_requests=True)
    return before - len(served.scheduler.running)


def preemptions_until_ended(served: Served, names: list[str]) -> int:
    """Step until requests have ended; return how often any was preempted."""
    found: dict[str, int] = {}

    def looked() -> bool:
        found.update({name: one.num_preemptions for name, one in served.scheduler.requests.items()})
        return all(name in served.answers and served.answers[name].ended for name in names)

    served.step_until(looked)
    return sum(found.values())


def request_of(served: Served, name: str) -> Any:  # noqa: ANN401  vLLM's
    """Return vLLM's request."""
    return next(one for key, one in served.scheduler.requests.items() if key.partition("-")[0] == name)


def state_of(served: Served, name: str) -> str:
    """Return vLLM's state of a request; empty: it has none of the name any more."""
    return served.states().get(name, "")


def stepped(served: Served, count: int = 1) -> None:
    """Do so many steps."""
    for _ in range(count):
        served.step()


def layers_told(served: Served, kill: int | None = None) -> tuple[int, int]:
    """Do one step; return of how many groups of layers the daemon was told meanwhile, and of how many at its end.

    ``kill``: a process that is killed when the second one is told.
    """
    from kvferry.clients.events import EventRing  # noqa: PLC0415  only here there is a torch
    from kvferry.clients.vllm.layers import LayerSignals  # noqa: PLC0415

    record, end = EventRing.record, LayerSignals.end
    told, left = [], [0]

    def recorded(ring: EventRing, step: LayerStep) -> None:
        told.append(step)
        if kill is not None and len(told) > 1:
            os.kill(kill, signal.SIGKILL)
        record(ring, step)

    def ended(signals: LayerSignals) -> None:
        left.append(len(signals.pending))
        end(signals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventRing, "record", recorded)
        patch.setattr(LayerSignals, "end", ended)
        served.step()
    return len(told) - sum(left), sum(left)


def stepped_until(served: Served, name: str, *states: str) -> None:
    """Step until vLLM's request is in one of these states."""
    served.step_until(lambda: state_of(served, name) in states)


def aborted(served: Served, *names: str) -> None:
    """Abort requests, as a server does whose client has gone."""
    served.llm.llm_engine.abort_request(list(names))


def aborted_before_it_began(served: Served, name: str) -> None:
    """Abort a request that vLLM has given blocks to be filled, in a step that its worker has not done yet."""
    core = served.llm.llm_engine.engine_core.engine_core
    begins = False
    while not begins:
        step = core.scheduler.schedule()
        begins = state_of(served, name) == "WAITING_FOR_REMOTE_KVS"
        if begins:
            aborted(served, name)
        core.scheduler.update_from_output(step, core.model_executor.execute_model(step))


def received(served: Served, name: str) -> None:
    """Step until a request's blocks are there, and before it is computed."""
    whole = request_of(served, name).request_id
    served.step_until(lambda: whole in served.scheduler.finished_recving_kv_req_ids)


def zeroed(served: Served, name: str) -> None:
    """Write zeros to the blocks of a request."""
    (ids,) = served.scheduler.kv_cache_manager.get_block_ids(request_of(served, name).request_id)
    for layer in served.runner.kv_caches:
        layer[list(ids)] = 0
