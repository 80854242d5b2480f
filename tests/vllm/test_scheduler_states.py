"""What vLLM's scheduler may do with a request at any moment: it must neither crash, nor wait, nor say wrong tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.daemons import Daemon
from tests.vllm.in_process import PROMPTS, Answer, Asked, Engine, Plain, Served, by_hand, drained, engine


@pytest.fixture(scope="module")
def stepped(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with a prefix cache."""
    told = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "stepped"}
    with engine(tmp_path_factory.mktemp("stepped"), told) as one:
        yield one


def state(served: Served, name: str) -> Any:  # noqa: ANN401  vLLM's
    """Return vLLM's state of a request."""
    [found] = [one for key, one in served.scheduler.requests.items() if key.partition("-")[0] == name]
    return found


def step_in_two(served: Served, until: str, name: str, between: Any) -> str:  # noqa: ANN401  a function
    """Step until a request is scheduled into a state, and do something before that step is executed.

    vLLM does so where it schedules a step while the one before it is computed. Return the state.
    """
    executor = served.llm.llm_engine.engine_core.engine_core.model_executor
    for _ in range(1000):
        step = served.scheduler.schedule()
        reached = state(served, name).status.name == until
        if reached:
            between()
        output = executor.execute_model(step)
        output = executor.sample_tokens(None) if output is None else output
        served.scheduler.update_from_output(step, output)
        if reached:
            return until
    return str(state(served, name).status.name)


def abort_while_it_is_loaded_again(served: Served, prompt: str) -> tuple[str, int]:
    """Preempt a request whose blocks were stored, and abort it while they are loaded; return what is left."""
    name = served.add(Asked(prompt, tokens=64))
    served.step_until(lambda: len(served.answers.get(name, Answer([], 0, None, None, [])).tokens) > 3)
    assert served.scheduler.reset_prefix_cache(reset_running_requests=True)
    reached = step_in_two(served, "WAITING_FOR_REMOTE_KVS", name, lambda: served.llm.llm_engine.abort_request([name]))
    drained(served)
    return reached, len(served.scheduler.requests)


def test_preempted_request_is_aborted_while_its_blocks_come_back(stepped: Engine, plain: Plain) -> None:
    with by_hand(stepped):
        assert stepped.call(abort_while_it_is_loaded_again, PROMPTS[0]) == ("WAITING_FOR_REMOTE_KVS", 0)
    assert [one.tokens for one in stepped.ask(*PROMPTS)] == plain.tokens(*PROMPTS)


def preempt_all(served: Served, names: list[str], tokens: int) -> list[Answer]:
    """Preempt all requests again and again while they are computed; return their answers."""
    for count in range(1, tokens, 3):
        while any(len(served.answers[one].tokens) <= count for one in names):
            served.step()
        served.step_until(lambda: {*served.states().values()} <= {"RUNNING"})
        assert served.scheduler.reset_prefix_cache(reset_running_requests=True)
    return served.wait(names)


def add_all(served: Served, prompts: tuple[str, ...], tokens: int) -> list[Answer]:
    """Ask, and preempt all of it again and again."""
    names = [served.add(Asked(one, tokens=tokens)) for one in prompts]
    served.step_until(lambda: all(one in served.answers for one in names))
    return preempt_all(served, names, tokens)


def test_preempted_requests_say_the_same(stepped: Engine, plain: Plain) -> None:
    with by_hand(stepped):
        answers = stepped.call(add_all, PROMPTS, 16)
        stepped.drain()
    assert [one.tokens for one in answers] == plain.tokens(*PROMPTS, tokens=16)


def test_a_daemon_that_does_not_answer_is_not_waited_for(stepped: Engine, plain: Plain, kept_daemon: Daemon) -> None:
    want = plain.tokens(*PROMPTS)
    with kept_daemon.stopped():
        assert [one.tokens for one in stepped.ask(*PROMPTS)] == want
    stepped.drain()
    assert [one.tokens for one in stepped.ask(*PROMPTS)] == want


def without_one_rank(served: Served) -> tuple[int | None, bool]:
    """Tell the scheduler's side that a rank found no daemon at its start; return what it finds for a request then."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415

    from kvferry.clients.vllm.connector import KvferryConnector  # noqa: PLC0415

    config = copy.deepcopy(served.llm.llm_engine.vllm_config)
    config.kv_transfer_config.kv_connector_extra_config = {"runtime_dir": "/nowhere", "required": False}
    rank = KvferryConnector(config, KVConnectorRole.WORKER, served.scheduler.kv_cache_config)
    connector = served.scheduler.connector
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank.get_handshake_metadata()})
    name = served.add(Asked(PROMPTS[0], params={"do_remote_prefill": True, "transfer_id": "t"}))
    found: tuple[int | None, bool] = connector.get_num_new_matched_tokens(state(served, name), 0)
    return found


def test_all_ranks_or_none(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A scheduler that had work done by a rank that has no daemon would wait for its answer for ever."""
    told = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "skewed", "required": False}
    with engine(tmp_path_factory.mktemp("skewed"), told) as one, by_hand(one):
        assert one.call(without_one_rank) == (0, False)
        one.drain()
        assert any("runs without it" in line for line in one.log())
