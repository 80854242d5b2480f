"""Layer by layer on an NPU: a chunk's pages go to decode while the forward pass that fills them computes later layers.

SGLang sends a chunk once the result of its forward pass is there. Here a SEND of the chunk's whole pages is said as
soon as the pass is queued on the device, and waits for events that the pass records between its layers. SGLang then
sends what is left: the prompt's last page stays for it, since the payload goes with that.

A chunk that the daemon would copy as a whole all the same goes as without this, and so does one beside which pages are
loaded from the host (HiCache).

SGLang gives pages of a chunk up where its radix tree has got the same prefix meanwhile, by a request beside it. A SEND
may still read them: they are free once it has settled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from kvferry.clients import KvferryError
from kvferry.clients.layers import LAYERED_BYTES
from kvferry.clients.sglang import pools
from kvferry.protocol.ids import HOST

logger = logging.getLogger(__name__)

PREFILL: Final = "prefill"
EXTEND: Final = "EXTEND"


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
    """Send what a batch computes while it does."""
    pool, ahead = pools.current(), _sent_ahead(scheduler, batch)
    try:
        steps = pool.layer_steps() if pool is not None and ahead else []
    except KvferryError as error:
        logger.debug("kvferry: a batch's chunks go as a whole: %s", error)
        steps = []
    if pool is None or not steps:
        return original(scheduler, batch, *rest, **more)
    table, size = scheduler.req_to_token_pool.req_to_token, pool.page_size
    rows = [table[req.kv.req_pool_idx, req.start_send_idx : end : size] for req, end in ahead]
    there = torch.cat(rows)
    slots = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    slots.copy_(there, non_blocking=True)
    copied = torch.accelerator.current_stream(there.device).record_event()
    result = original(scheduler, batch, *rest, **more)
    pool.signals.end(pool.compute_stream)
    copied.synchronize()  # it was queued before the pass, and does not wait for that
    for (req, end), row in zip(ahead, torch.split(slots, [len(one) for one in rows]), strict=True):
        ids = row.numpy()[len(row) - (end - req.start_send_idx) // size :] // size  # SGLang has sent a cached prefix
        req.disagg_kv_sender.send(ids, num_kv_tokens=len(ids) * size, steps=steps)
        req.start_send_idx = end
        scheduler.disagg_prefill_pending_chunk_rids.add(req.rid)
    pool.engine.flush()
    return result


def note_attention(
    _backend: object,
    q: object = None,  # noqa: ARG001  SGLang's names and defaults: some of its layers give others, by name
    k: object = None,  # noqa: ARG001
    v: object = None,  # noqa: ARG001
    layer: Any = None,  # noqa: ANN401
    forward_batch: Any = None,  # noqa: ANN401
    *_: object,
    **__: object,
) -> None:
    """Note that the layers before this one are filled, unless two parts of the batch are computed in turns.

    A draft model's layers, which are computed after the model's and numbered from 0, go with the last step: it is
    recorded at the pass's end.
    """
    pool = pools.current()
    if pool is not None and pool.signals.pending and forward_batch.tbo_parent_token_range is None:
        last = pool.first_layer + pool.layers - 1
        pool.signals.filled(min(layer.layer_id, last) - 1, pool.compute_stream)


def checkpoint(original: Callable[[Any, Any], None], scheduler: Any, req: Any) -> None:  # noqa: ANN401  SGLang's objects
    """Keep pages that a request gives up while it goes on, if they are sent ahead, until that has settled."""
    sender = req.disagg_kv_sender
    if not getattr(sender, "sends_ahead", False) or sender.conclude_state is not None:
        original(scheduler, req)
        return
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.free_group_begin()
    original(scheduler, req)
    sender.held += [partial(allocator.free, one) for one in allocator.free_group]
    sender.held += [partial(allocator.free_page_ids, one) for one in allocator.free_page_ids_group]
    allocator.free_group, allocator.free_page_ids_group = [], []
    allocator.free_group_end()


def _sent_ahead(scheduler: Any, batch: Any) -> list[tuple[Any, int]]:  # noqa: ANN401  SGLang's objects
    """Return the requests of which pages go while they are computed, and up to which token."""
    pool = pools.current()
    if (
        pool is None
        or pool.device == HOST
        or scheduler.disaggregation_mode.value != PREFILL
        or batch.forward_mode.name != EXTEND
        or batch.hicache_consumer_index >= 0
    ):
        return []
    from kvferry.clients.sglang.transfer import KvferryKVSender  # noqa: PLC0415  derives from SGLang's classes

    size, found = pool.page_size, []
    for req in batch.reqs:
        end = min(req.extend_end, len(req.origin_input_ids) - 1) // size * size
        new = (end - max(req.start_send_idx, req.prefix_len // size * size)) // size
        is_open = isinstance(req.disagg_kv_sender, KvferryKVSender) and not req.pending_bootstrap
        if is_open and new * pool.page_bytes >= LAYERED_BYTES:
            found.append((req, end))
    return found
