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

from kvferry.clients import HybridSwaSpec, KvferryError, MambaSpec, MhaSpec, MlaSpec, pages, pages_from_slots
from kvferry.clients.calls import Pages, asked
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
        window_page: the first logical page of its window, if it has one.
    """

    def __init__(self, pool: EnginePool, snapshot: str, window_page: int) -> None:
        self.snapshot = snapshot
        self.window_page = window_page
        self._drop = weakref.finalize(self, pool.engine.say, asked(DropSnapshot(snapshot=snapshot)))
        self._drop.atexit = False

    def __repr__(self) -> str:
        """Show its name."""
        return f"<Backup {self.snapshot}>"

    def restored(self) -> None:
        """Note that the daemon has dropped it."""
        self._drop.detach()


def get_cpu_copy(
    original: Callable[..., Any],
    pool: Any,  # noqa: ANN401  SGLang's object
    indices: Any,  # noqa: ANN401  a tensor
    mamba_indices: Any = None,  # noqa: ANN401  a tensor
    *rest: Any,  # noqa: ANN401
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Offload the pages of a request's tokens: ``indices`` are their slots, from the first token on.

    Those of its window, and its state, whose slot is in ``mamba_indices``, go with them.

    Returns:
        A ``Backup``; a list of copies as ``original`` returns them where the daemon cannot take the pages; what that
        returns where the pool is not the daemon's.
    """
    ours = _ours(pool)
    if ours is None or not len(indices):
        return original(pool, indices, mamba_indices, *rest, **more)
    window_page = max(0, len(indices) - (ours.window or len(indices))) // ours.page_size
    try:
        ours.engine.poll()
        if ours.engine.is_away:
            raise DaemonLostError("the daemon is away, and the scheduler does not wait for it")
        after, lists = ours.event(), _lists(ours, pool, indices, mamba_indices, window_page)
        with ours.engine.client() as client:
            leaving = client.offload(ours.name, lists, after=after, deadline_s=DEADLINE_S)
            client.wait_done(leaving, DEADLINE_S + MARGIN_S)
        assert leaving.snapshot is not None
    except KvferryError as error:
        logger.warning("kvferry: SGLang copies a retracted request's pages by itself: %s", error)
        return [original(one, indices, mamba_indices, *rest, **more) for one in _as_sglang_copies(pool)]
    return Backup(ours, leaving.snapshot, window_page)


def load_cpu_copy(
    original: Callable[..., Any],
    pool: Any,  # noqa: ANN401  SGLang's object
    kv_cache_cpu: Any,  # noqa: ANN401  what ``get_cpu_copy`` has returned
    indices: Any,  # noqa: ANN401  a tensor
    mamba_indices: Any = None,  # noqa: ANN401  a tensor
    *rest: Any,  # noqa: ANN401
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Restore them into the pages of other slots.

    Raises:
        KvferryError: they do not come back, see ``load_kv_cache``.
    """
    ours = _ours(pool)
    if ours is None or not len(indices):
        return original(pool, kv_cache_cpu, indices, mamba_indices, *rest, **more)
    if not isinstance(kv_cache_cpu, Backup):
        for one, copied in zip(_as_sglang_copies(pool), kv_cache_cpu, strict=True):
            original(one, copied, indices, mamba_indices, *rest, **more)
        return None
    after, lists = ours.event(), _lists(ours, pool, indices, mamba_indices, kv_cache_cpu.window_page)
    with ours.engine.client() as client:
        back = client.restore(ours.name, kv_cache_cpu.snapshot, lists, drop=True, after=after, deadline_s=DEADLINE_S)
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
    """Return the daemon's pool, where this is all of it: what is part of a hybrid pool goes with that."""
    ours, kind = pools.current(), type(pool).__name__
    specs = {pools.WINDOWS: HybridSwaSpec, pools.STATES: MambaSpec}.get(kind, MhaSpec | MlaSpec)
    return ours if ours is not None and kind in pools.KINDS and isinstance(ours.spec, specs) else None


def _lists(
    ours: EnginePool,
    pool: Any,  # noqa: ANN401  SGLang's object
    slots: Any,  # noqa: ANN401  a tensor
    state_slots: Any,  # noqa: ANN401  a tensor
    window_page: int,
) -> list[Pages]:
    """Return the pages of each component of a request."""
    lists = [pages(_page_ids(ours, slots))]
    if isinstance(ours.spec, HybridSwaSpec):
        window = pool.full_to_swa_index_mapping[slots[window_page * ours.page_size :]]
        lists.append(pages(_page_ids(ours, window), component=pools.SWA))
    if isinstance(ours.spec, MambaSpec):
        lists.append(pages(state_slots.reshape(-1).cpu().numpy(), component=pools.MAMBA))
    return lists


def _as_sglang_copies(pool: Any) -> list[Any]:  # noqa: ANN401  SGLang's object
    """Return what SGLang's own copy is right of: of an NPU's pool it takes V for as wide as K, so each goes alone.

    SGLang copies a pair, so it copies either twice.
    """
    is_right = all(
        type(one).__name__ != "NPUMHATokenToKVPool" or one.v_head_dim == one.head_dim
        for one in _parts(pool).values() or [pool]
    )
    return [pool] if is_right else [_only(pool, role) for role in ("k", "v")]


def _only(pool: Any, role: str) -> Any:  # noqa: ANN401  SGLang's objects
    """Return a pool, or one with the pools within it, that has keys or values in place of both."""
    one, parts = copy.copy(pool), _parts(pool)
    for name, part in parts.items():
        setattr(one, name, _only(part, role))
    if not parts:
        one.k_buffer = one.v_buffer = getattr(pool, f"{role}_buffer")
        one.head_dim = pool.head_dim if role == "k" else pool.v_head_dim
    return one


def _parts(pool: Any) -> dict[str, Any]:  # noqa: ANN401  SGLang's objects
    return {name: getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)}


def _page_ids(pool: EnginePool, slots: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401  a tensor
    """Return the pages of slots; where those are on a device, wait for the copy of them alone."""
    if not slots.is_cpu:
        import torch  # noqa: PLC0415  of the engine

        there, slots = slots, torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
        slots.copy_(there, non_blocking=True)
        torch.accelerator.current_stream(there.device).record_event().synchronize()
    return pages_from_slots(slots.numpy(), pool.page_size)
