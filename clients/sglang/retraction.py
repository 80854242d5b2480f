"""Decode's retraction: the pages of a request that has to make room become a snapshot of the host tier.

SGLang copies them into tensors of its own (``--disaggregation-decode-retraction-backup cpu_tensor``), and back into
other pages once there are some. Here that is OFFLOAD and RESTORE: no copy passes through the engine. Where the daemon
cannot take a request's pages, SGLang's own copy is made.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.clients import KvferryError, pages, pages_from_slots
from kvferry.clients.calls import asked
from kvferry.clients.engine import end_of
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import pools
from kvferry.protocol.errors import DaemonLostError
from kvferry.protocol.tier_messages import DropSnapshot

logger = logging.getLogger(__name__)

DEADLINE_S: Final = 20.0
MARGIN_S: Final = 5.0
"""How much longer than its deadline the end of an operation is waited for."""


class Backup:
    """A request's pages in the host tier. Dropped there when nobody has this any more, as SGLang drops its tensors.

    Attributes:
        snapshot: its name.
    """

    def __init__(self, pool: EnginePool, snapshot: str) -> None:
        self.snapshot = snapshot
        self._drop = weakref.finalize(self, pool.engine.say, asked(DropSnapshot(snapshot=snapshot)))
        self._drop.atexit = False

    def __repr__(self) -> str:
        """Show its name."""
        return f"<Backup {self.snapshot}>"

    def restored(self) -> None:
        """Note that the daemon has dropped it."""
        self._drop.detach()


def get_cpu_copy(original: Callable[..., Any], pool: Any, indices: Any, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
    """Offload the pages of a request's tokens: ``indices`` are their slots, from the first token on.

    Returns:
        A ``Backup``; a list of copies as ``original`` returns them where the daemon cannot take the pages; what that
        returns where the pool is not the daemon's.
    """
    ours = _ours(pool)
    if ours is None or not len(indices):
        return original(pool, indices, *rest, **more)
    try:
        ours.engine.poll()
        if ours.engine.is_away:
            raise DaemonLostError("the daemon is away, and the scheduler does not wait for it")
        after, ids = ours.event(), _page_ids(ours, indices)
        with ours.engine.client() as client:
            leaving = client.offload(ours.name, [pages(ids)], after=after, deadline_s=DEADLINE_S)
            client.wait_done(leaving, DEADLINE_S + MARGIN_S)
        assert leaving.snapshot is not None
    except KvferryError as error:
        logger.warning("kvferry: SGLang copies a retracted request's pages by itself: %s", error)
        return [original(one, indices, *rest, **more) for one in _as_sglang_copies(pool)]
    return Backup(ours, leaving.snapshot)


def load_cpu_copy(
    original: Callable[..., Any],
    pool: Any,  # noqa: ANN401  SGLang's object
    kv_cache_cpu: Any,  # noqa: ANN401  what ``get_cpu_copy`` has returned
    indices: Any,  # noqa: ANN401  a tensor
    *rest: Any,  # noqa: ANN401
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Restore them into the pages of other slots.

    Raises:
        KvferryError: they do not come back, see ``load_kv_cache``.
    """
    ours = _ours(pool)
    if ours is None or not len(indices):
        return original(pool, kv_cache_cpu, indices, *rest, **more)
    if not isinstance(kv_cache_cpu, Backup):
        for one, copied in zip(_as_sglang_copies(pool), kv_cache_cpu, strict=True):
            original(one, copied, indices, *rest, **more)
        return None
    after, ids = ours.event(), _page_ids(ours, indices)
    with ours.engine.client() as client:
        back = client.restore(
            ours.name, kv_cache_cpu.snapshot, [pages(ids)], drop=True, after=after, deadline_s=DEADLINE_S
        )
        error = end_of(client, back)  # SGLang uses the pages for others where this fails
    if error is not None:
        raise error
    kv_cache_cpu.restored()
    return None


def load_kv_cache(original: Callable[..., Any], req: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
    """Abort a request whose pages do not come back, with the reason in its answer: the scheduler goes on."""
    try:
        original(req, *rest, **more)
    except KvferryError as error:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415  SGLang need not be there

        logger.error("kvferry: the pages of request %s do not come back: %s", req.rid, error)  # noqa: TRY400
        req.kv.retraction_backup = None
        req.to_finish = FINISH_ABORT(str(error), status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


def _ours(pool: Any) -> EnginePool | None:  # noqa: ANN401  SGLang's object
    return pools.current() if type(pool).__name__ in (*pools.HOST_KINDS, *pools.NPU_KINDS) else None


def _as_sglang_copies(pool: Any) -> list[Any]:  # noqa: ANN401  SGLang's object
    """Return what SGLang's own copy is right of: of an NPU's pool it takes V for as wide as K, so each goes alone.

    SGLang copies a pair, so it copies either twice.
    """
    if type(pool).__name__ != "NPUMHATokenToKVPool" or pool.v_head_dim == pool.head_dim:
        return [pool]
    keys, values = copy.copy(pool), copy.copy(pool)
    keys.v_buffer = pool.k_buffer
    values.k_buffer, values.head_dim = pool.v_buffer, pool.v_head_dim
    return [keys, values]


def _page_ids(pool: EnginePool, slots: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401  a tensor
    """Return the pages of slots; where those are on a device, wait for the copy of them alone."""
    if not slots.is_cpu:
        import torch  # noqa: PLC0415  of the engine

        there, slots = slots, torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
        slots.copy_(there, non_blocking=True)
        torch.accelerator.current_stream(there.device).record_event().synchronize()
    return pages_from_slots(slots.numpy(), pool.spec.page_size)
