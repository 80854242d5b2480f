"""What of SGLang's KV, states and options the daemon's pools carry; the rest is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

from kvferry.clients import MhaSpec, pages
from kvferry.clients.calls import Pages
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity, pools
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN

ON_PAGES: Final = (StateType.MINIMAX_INDEX_K, StateType.MINIMAX_DENSE_KV)
"""What SGLang lists as states and the daemon has on the prompt's own pages: it goes with these."""

COMPONENTS: Final = {StateType.SWA: pools.SWA, StateType.MAMBA: pools.MAMBA, **dict.fromkeys(ON_PAGES, MAIN)}
"""Of the daemon's pool, by SGLang's state type."""

MISSING: Final = {
    "dsa": "index keys joined with their scales",
    "dsa_tail": "rings of a request's last tokens",
    "qsa_pending": "keys of a request that wait to be compressed",
    "qsa_compressed": "compressed keys beside whole ones",
    "swa_ring": "windows that are rings of a request",
    "c128_state": "compression states of a request",
    "request_row": "rows of a request without layers",
    "block_scale": "scales of the blocks within a page",
    "block_scale_swa": "scales of the blocks within a window's page",
    "dsv4_c128": "pages with a row for 128 tokens",
    "dsv4_c4_state": "rings of compression states of a request",
}
"""What the daemon's pools do not have for SGLang's other state types, by their names."""


def state_lists(kinds: Sequence[Any], indices: Sequence[Any] | None, end_page: int) -> list[Pages]:
    """Return the lists of a request's states, one of each of SGLang's state types.

    The pages of a window end with the prompt's, and a request has one slot of states: what both sides list is paired
    by logical page.

    Args:
        kinds: of the pool, all of them in ``COMPONENTS``.
        indices: page or slot ids of each kind; None before the last chunk.
        end_page: the logical page after the prompt's last one.

    Raises:
        InvalidFieldError: a window is longer than the prompt, or not each kind has a list.
    """
    if indices is None:
        return []
    if len(indices) != len(kinds):
        raise InvalidFieldError(f"{len(indices)} lists of {len(kinds)} kinds of states", field="state_indices")
    lists = []
    for kind, given in zip(kinds, indices, strict=True):
        if kind in ON_PAGES:
            continue
        ids = np.asarray(given, np.int64).reshape(-1)
        first = end_page - len(ids) if kind == StateType.SWA else 0
        if first < 0:
            raise InvalidFieldError(f"{len(ids)} window pages of a prompt of {end_page}", field="state_indices")
        lists.append(pages(ids, first_page=first, component=COMPONENTS[kind]))
    return lists


def check_carried(args: Any, pool: EnginePool | None) -> None:  # noqa: ANN401  SGLang's KVArgs
    """Refuse what is not carried yet, by name."""
    refused = [
        f"state of the kind {one.value} (the daemon's pools do not have {MISSING.get(one.value, 'it')})"
        for one in args.state_types
        if one not in COMPONENTS
    ]
    refused += _refused_options(args)
    if getattr(args, "is_hybrid_mla_backend", False):
        refused.append("hybrid MLA")
    if pool is None and not refused:
        refused.append("this kind of KV pool")
    if refused:
        raise InvalidFieldError(
            f"kvferry does not carry {', '.join(refused)} yet", field="disaggregation_transfer_backend"
        )
    assert pool is not None
    lists, is_mha = pool.lists, isinstance(pool.spec, MhaSpec)
    rows = zip(lists.names, lists.data_ptrs, lists.data_lens, lists.item_lens, strict=True)
    ours = [row for name, *row in rows if not (is_mha and "/index_k/" in name)]  # those SGLang lists as states
    count = len(args.kv_data_ptrs) - (0 if pools.is_last_stage() else args.num_draft_entries)
    theirs = itertools.zip_longest(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    if ours != [list(row) for row in theirs][:count]:
        raise InvalidFieldError(
            f"SGLang's KV memory is not pool {pool.name}: addresses, lengths or page sizes differ", field="kv_data_ptrs"
        )
    _check_states(args, pool)
    row_bytes, room_bytes = sum(args.aux_item_lens), pool.largest_payload_bytes - identity.CONTENT_BYTES
    if row_bytes > room_bytes:
        raise InvalidFieldError(
            f"a request's metadata is {row_bytes} bytes, the daemon has room for {room_bytes}: start the "
            "server without what makes it so large (sampling masks, hidden states)",
            field="aux_item_lens",
        )


def _check_states(args: Any, pool: EnginePool) -> None:  # noqa: ANN401  SGLang's KVArgs
    """Check that SGLang's states are the pool's windows and slots, and that what is on pages is the pool's, too.

    The sizes of a page of the latter are not: SGLang 0.5.23 says wrong ones of an NPU's dense layers.
    """
    states, paged = pool.state_lists, pool.lists.names
    rows = zip(states.names, states.data_ptrs, states.data_lens, states.item_lens, strict=True)
    ours = [row for name, *row in rows if name not in paged]  # an index is on the pages of prompts
    theirs: list[list[int]] = []
    listed = set(zip(pool.lists.data_ptrs, pool.lists.data_lens, strict=True))
    is_there = True
    for kind, *lists in zip(
        args.state_types, args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=False
    ):
        if kind in ON_PAGES:
            is_there &= set(zip(*lists[:2], strict=False)) <= listed
        else:
            theirs += [list(row) for row in zip(*lists, strict=False)]
    if ours != theirs or not is_there:
        raise InvalidFieldError(
            f"SGLang's states ({', '.join(one.value for one in args.state_types) or 'none'}) are not those of pool "
            f"{pool.name}: addresses, lengths or sizes of a page or slot differ",
            field="state_data_ptrs",
        )


def _refused_options(args: Any) -> list[str]:  # noqa: ANN401  SGLang's KVArgs
    """Return what SGLang was told to do that is not carried yet."""
    parallel, told = get_parallel(), get_disagg()
    sizes = (
        ("context-parallel ranks", parallel.attn_cp_size),
        ("decode context-parallel ranks", parallel.attn_dcp_size),
    )
    refused = [f"{size} {what}" for what, size in sizes if size > 1]
    if parallel.enable_kv_cache_sharding:
        refused.append("--enable-kv-cache-sharding")
    if told.disaggregation_decode_allocation_policy != "early":
        refused.append("--disaggregation-decode-allocation-policy other than early")
    caches = told.disaggregation_decode_enable_radix_cache and get_memory().enable_hierarchical_cache
    if caches and StateType.MAMBA in args.state_types:  # SGLang loads a prefix's state into the request's own slot, too
        refused.append("HiCache beside decode's prefix cache of states (--disaggregation-decode-enable-radix-cache)")
    return refused
