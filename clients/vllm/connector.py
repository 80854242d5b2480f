"""The connector that vLLM creates: once in its scheduler's process, and once in each worker's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.request import RequestStatus

from kvferry.clients import KvferryError
from kvferry.clients.engine import Engine
from kvferry.clients.vllm.ascend import NPU
from kvferry.clients.vllm.configuration import (
    Configuration,
    Memory,
    Parallel,
    configuration_of,
    model_identity,
    refusal,
    shares_blocks,
)
from kvferry.clients.vllm.groups import groups_of, in_order, unit_of
from kvferry.clients.vllm.metadata import StepWork
from kvferry.clients.vllm.metrics import Moved, MovedPrometheus
from kvferry.clients.vllm.scheduler import Scheduler
from kvferry.protocol.errors import DaemonLostError
from kvferry.protocol.ids import HOST

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.clients.vllm.memory import Cache, RankMemory, Spec
    from kvferry.clients.vllm.worker import Worker

logger = logging.getLogger(__name__)

COMPLETE: Final = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class RanksSaid(KVConnectorWorkerMetadata):
    """What ranks have done and seen.

    ``stores``: the numbers of stores that are done, each as often as ranks have done it with a group. ``read``: the
    same of those that read no block any more. ``weights``: of each rank that has looked at its weights the look's
    number, and what stands for them.
    """

    stores: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    weights: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RanksSaid:
        """Return what both say."""
        return RanksSaid(self.stores + other.stores, self.read + other.read, self.weights | other.weights)


@dataclass
class WithoutDaemon(KVConnectorHandshakeMetadata):
    """What a rank says at its start that has found no daemon, and does without."""


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV cache, transfers and prefix cache, handled by the daemon; see docs/vllm.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Connect.

        Raises:
            InvalidFieldError: the configuration is wrong, or vLLM is to do what is not carried; says what.
            KvferryError: there is no daemon, or it refuses the session or the pool.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        told = configuration_of(vllm_config)
        if len(kv_cache_config.kv_cache_groups) > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
            raise refusal("several KV cache groups with this release of vLLM", "kv_cache_groups")
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._memory: RankMemory | None = None
        self._begin: Callable[[Mapping[str, Cache] | None], None] | None = None
        """What makes the worker, where that needs vLLM's memory."""
        self._is_required = told.settings.required
        self._has_work = False
        """Whether this worker has anything to do in the step that is bound."""
        with self._perhaps_without():
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler(told)
            else:
                self._make_worker(told)

    # -- a worker's

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Give vLLM the daemon's memory for its KV cache."""
        return None if self._memory is None else self._memory.allocation()

    def register_kv_caches(self, kv_caches: Mapping[str, Cache]) -> None:
        """Compare vLLM's KV cache with what the daemon was told of it; on a device, register it."""
        if self._begin is not None:
            with self._perhaps_without():
                self._begin(kv_caches)
        if self._memory is not None and self._worker is not None:
            self._memory.take(kv_caches)
            self._worker.signals.name(in_order(name for group in self._memory.groups for name in group.layers))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Return once nothing reads blocks that are about to be written."""
        if self._worker is not None and kv_connector_metadata.preempted:
            self._worker.give_up(kv_connector_metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: its loads arrive while it is computed."""
        super().bind_connector_metadata(connector_metadata)
        self._has_work = self._worker is not None and not connector_metadata.is_empty
        if self._worker is not None and self._has_work:
            self._worker.begin_step(connector_metadata)
            if self._worker.signals.pending:
                self.save_kv_layer = self._filled  # type: ignore[method-assign]  # all layers of all steps come by

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401  vLLM's signature
        """Do nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are scheduled once all of their blocks have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing; ``_filled`` is in its place while a prompt travels layer by layer."""

    def wait_for_save(self) -> None:
        """Begin the stores and sends of the step that was computed; their blocks are kept until they are over."""
        if self._worker is not None and self._has_work:
            self.__dict__.pop("save_kv_layer", None)
            self._worker.end_step(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return the requests whose blocks may be freed, and those whose blocks have come."""
        return (None, None) if self._worker is None else self._worker.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401  0.23 has no such class
        """Return the same, and the requests of several groups whose blocks have not come."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.lost()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that have not come."""
        return set() if self._worker is None else self._worker.invalid_blocks()

    def get_kv_connector_stats(self) -> Moved | None:
        """Return what was moved since the last step."""
        return None if self._worker is None else self._worker.moved.taken()

    def build_connector_worker_meta(self) -> RanksSaid | None:
        """Return which stores are done, for events, and what the weights are, if it was asked for."""
        if self._worker is None:
            return None
        said = RanksSaid(self._worker.stored(), self._worker.read(), self._worker.looked())
        return said if said.read or said.weights else None

    def get_handshake_metadata(self) -> WithoutDaemon | None:
        """Tell the scheduler's side if this rank can do nothing for it."""
        return WithoutDaemon() if self._worker is None else None

    # -- the scheduler's

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take note of the pool: where its prefix cache was reset, the weights may be others."""
        if self._scheduler is not None:
            self._scheduler.watch(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Do without a daemon where a rank does: nobody would answer for it."""
        ranks = sorted(rank for rank, one in metadata.items() if isinstance(one, WithoutDaemon))
        if ranks and self._scheduler is not None:
            logger.warning("kvferry: this server runs without it: ranks %s found no daemon at their start", ranks)
            self._scheduler.close()
            self._scheduler = None

    def on_new_request(self, request: Request) -> None:
        """Ask what of a request is cached."""
        if self._scheduler is not None:
            self._scheduler.came(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be had beyond those computed, and that they come between steps."""
        return (0, False) if self._scheduler is None else self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Have the blocks filled that were allocated for them."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, [list(ids) for ids in blocks.get_block_ids()], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepWork:
        """Return what the workers are to do in this step."""
        return StepWork() if self._scheduler is None else self._scheduler.work(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers have done."""
        if self._scheduler is not None:
            failed = getattr(connector_output, "failed_recving", None) or ()
            self._scheduler.failed(failed, connector_output.invalid_block_ids or frozenset())
            if connector_output.finished_recving:
                self._scheduler.arrived(connector_output.finished_recving)
            done = getattr(connector_output, "kv_connector_worker_meta", None)
            if isinstance(done, RanksSaid):
                self._scheduler.stored(done.stores)
                self._scheduler.read(done.read)
                self._scheduler.looked(done.weights)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Return whether its blocks are still being read, and what its answer says to decode."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.ended(request, is_complete=request.status in COMPLETE)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same where there are several groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def take_events(self) -> Iterable[Any]:
        """Return what was stored in the prefix cache, and what is gone."""
        return () if self._scheduler is None else self._scheduler.events()

    def reset_cache(self) -> bool:
        """Drop what is stored of this model in this layout, also what other engines of this user have stored.

        vLLM asks for it where weights are about to change, too.
        """
        return self._scheduler is None or self._scheduler.clear()

    # -- both

    def shutdown(self) -> None:
        """End the session, and with it what it had under way."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Moved:
        """Return statistics as another process has counted them."""
        return Moved(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MovedPrometheus:
        """Return the same for Prometheus."""
        return MovedPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- within

    @contextlib.contextmanager
    def _perhaps_without(self) -> Iterator[None]:
        """Go on without a daemon where the server may."""
        try:
            yield
        except DaemonLostError as error:
            if self._is_required:
                raise
            logger.warning('kvferry: this server runs without it ("required": false): %s', error)

    def _filled(self, layer_name: str, *_: object, **__: object) -> None:
        """Tell the daemon that a layer is filled."""
        assert self._worker is not None
        self._worker.filled(layer_name)

    def _make_scheduler(self, told: Configuration) -> Scheduler:
        from kvferry.clients.vllm.memory import choose  # noqa: PLC0415  torch

        specs = [
            choose(self._vllm_config, self._kv_cache_config, told, Parallel(rank, told.ranks))[1]
            for rank in range(told.ranks)
        ]
        if told.settings.cache and not shares_blocks(self._vllm_config):
            logger.warning(
                "kvferry: this vLLM hashes blocks from a random beginning, so nothing of its prefix cache is found by "
                "other engines, nor after a restart: set PYTHONHASHSEED to the same value for all of them"
            )
        groups = groups_of(self._kv_cache_config)
        unit = unit_of(groups)
        hash_size = getattr(self._kv_cache_config, "hash_block_size", None) or unit
        engine = Engine(f"{told.pool}-scheduler", told.settings.runtime_dir or None, instance=told.instance)
        events = None
        kv_events = self._vllm_config.kv_events_config
        if kv_events is not None and kv_events.enable_kv_cache_events and told.settings.cache:
            from kvferry.clients.vllm.events import CacheEventLog  # noqa: PLC0415

            events = CacheEventLog(engine, unit, hash_size, model_identity(self._vllm_config), specs)
        return Scheduler(engine, told, groups, hash_size, get_ip(), events)

    def _make_worker(self, told: Configuration) -> None:
        """Connect, and make this rank's pool; where vLLM's own memory of a device is registered, once it is there."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415

        from kvferry.clients.vllm.memory import choose  # noqa: PLC0415

        rank = get_tensor_model_parallel_rank()
        kind, spec = choose(self._vllm_config, self._kv_cache_config, told, Parallel(rank, told.ranks))
        ours = device = HOST
        if kind != "staged" and self._vllm_config.device_config.device_type == NPU:
            from kvferry.clients.devices import current_npu  # noqa: PLC0415  of devices alone

            ours, device = current_npu()
        name = told.pool_of(rank)
        engine = Engine(
            f"{name}-{kind}",
            told.settings.runtime_dir or None,
            instance=told.instance,
            devices={device: ours} if device != ours else {},
        )
        self._begin = partial(self._begin_worker, told, rank, kind, spec, engine, device)
        if kind != "registered" or device == HOST:
            self._begin(None)

    def _begin_worker(
        self,
        told: Configuration,
        rank: int,
        kind: Memory,
        spec: Spec,
        engine: Engine,
        device: str,
        kv_caches: Mapping[str, Cache] | None,
    ) -> None:
        from kvferry.clients.vllm.memory import made  # noqa: PLC0415  torch
        from kvferry.clients.vllm.weights import Weights  # noqa: PLC0415
        from kvferry.clients.vllm.worker import Worker  # noqa: PLC0415

        self._begin = None
        groups, model = groups_of(self._kv_cache_config), model_identity(self._vllm_config)
        try:
            memory = made(kind, engine, told.pool_of(rank), spec, model, groups, device=device, kv_caches=kv_caches)
            if device != HOST and kind == "owned":
                memory.give(self._kv_cache_config)
        except KvferryError:
            engine.close()
            raise
        self._memory = memory
        self._worker = Worker(engine, memory, Weights(self._vllm_config), told.settings, rank)
