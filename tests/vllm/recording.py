"""A connector that transfers nothing and records what vLLM calls, for test_interface.py.

A request says what is answered for it, in its ``kv_transfer_params``: ``tokens`` (how many are found outside),
``is_async``, ``fails`` (the first block that is loaded is invalid) and ``is_held`` (its blocks are not freed before a
step has passed).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

CALLS: Final[list[str]] = []
"""Each call, as "scheduler" or "worker" with the method's name, in order; of those a layer the first."""
_NOT_OF_A_STEP: Final = {"has_connector_metadata", "has_pending_push_work", "save_kv_layer"}
"""Called as often as there are layers, or as often as the engine asks whether it is idle."""
_STEP: Final = "a step"
SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "nothing is loaded": {},
    "loaded before the forward": {"tokens": 64},
    "loaded beside other steps": {"tokens": 64, "is_async": True},
    "its load fails": {"tokens": 64, "is_async": True, "fails": True},
    "aborted while it is loaded": {"tokens": 64, "is_async": True, "is_aborted": True},
    "its blocks are held": {"is_held": True},
}
"""What requests ask for, each alone: a prompt of 100 tokens in blocks of 32, and two tokens after it."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Scheduler and worker in this process."""
LIMIT_STEPS: Final = 20


@dataclass
class Loading(KVConnectorMetadata):
    """The requests whose blocks are to be loaded, with the invalid blocks among them."""

    requests: dict[str, list[int]] = field(default_factory=dict)
    is_async: set[str] = field(default_factory=set)


class RecordingConnector(KVConnectorBase_V1):
    """Answers what requests ask it to answer, and writes down each call."""

    def __init__(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401  vLLM's
        super().__init__(*arguments, **more)
        CALLS.append(f"{self.role.name.lower()} __init__")
        self._next = Loading()
        self._received: set[str] = set()
        self._held: set[str] = set()
        self._invalid: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ANN401
        tokens = max(_given(request, "tokens", 0) - num_computed_tokens, 0) if not request.num_preemptions else 0
        return tokens, bool(tokens) and _given(request, "is_async", default=False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        if num_external_tokens:
            invalid = list(blocks.get_block_ids()[0][:1]) if _given(request, "fails", default=False) else []
            self._next.requests[request.request_id] = invalid
            if _given(request, "is_async", default=False):
                self._next.is_async.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loading:  # noqa: ANN401, ARG002
        built, self._next = self._next, Loading()
        return built

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ANN401, ARG002
        return _given(request, "is_held", default=False), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        loading: Any = self._get_connector_metadata()
        self._received |= loading.is_async
        self._invalid.update(*loading.requests.values())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        sent, self._held = self._held, {one for one in finished_req_ids if one.startswith("held")}
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid


def _given(request: Any, name: str, default: Any) -> Any:  # noqa: ANN401
    return (request.kv_transfer_params or {}).get(name, default)


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: RecordingConnector, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        called = f"{self.role.name.lower()} {name}"
        if CALLS[-1:] != [called]:
            CALLS.append(called)
        return method(self, *arguments, **more)

    return call


for _name, _method in inspect.getmembers(RecordingConnector, inspect.isfunction):
    if not _name.startswith("_") and _name not in _NOT_OF_A_STEP:
        setattr(RecordingConnector, _name, _recorded(_name, _method))


def record(model: str) -> dict[str, list[str]]:
    """Return what is called in an engine in this process, for each of its steps one line.

    The keys are "start", each of :data:`SCENARIOS` from its request's start to its end, and "end".

    Raises:
        TimeoutError: A request did not end.
    """
    os.environ |= ENVIRONMENT
    from vllm import LLM, SamplingParams  # noqa: PLC0415  it reads the environment
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    CALLS.clear()
    transfer = KVTransferConfig(
        kv_connector=RecordingConnector.__name__,
        kv_connector_module_path=RecordingConnector.__module__,
        kv_role="kv_both",
    )
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        block_size=32,
        kv_transfer_config=transfer,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    found = {"start": _lines(CALLS)}
    for number, (what, given) in enumerate(SCENARIOS.items()):
        CALLS.clear()
        sampling = SamplingParams(
            temperature=0, max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": given}
        )
        prompt = [1, *(100 * number + i for i in range(99))]
        engine.add_request("held" if given.get("is_held") else "r", {"prompt_token_ids": prompt}, sampling)
        for step in range(LIMIT_STEPS):
            if not scheduler.has_requests():
                break
            if given.get("is_aborted") and step == 1:
                engine.abort_request(["r"])
            CALLS.append(_STEP)
            engine.step()
        else:
            raise TimeoutError(f"{what}: not over after {LIMIT_STEPS} steps")
        found[what] = _lines(CALLS)
    CALLS.clear()
    engine.engine_core.shutdown()
    return found | {"end": _lines(CALLS)}


def _lines(calls: list[str]) -> list[str]:
    """Return what is between two steps as a line: "scheduler: a b; worker: c; scheduler: d"."""
    lines = [""]
    side = ""
    for one in calls:
        caller, _, name = one.partition(" ")
        if one == _STEP:
            lines.append("")
        elif lines[-1] and caller == side:
            lines[-1] += f" {name}"
        else:
            lines[-1] += f"{'; ' if lines[-1] else ''}{caller}: {name}"
        side = caller
    return lines
