"""vLLM's KV cache groups: layers that share a block table, and which blocks of it a request needs to go on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvferry.clients.vllm.configuration import refusal
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.tier_messages import CacheGroup

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

KINDS: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
MOST_CACHED: Final = 16
"""Groups of a lookup."""

ASCEND_LATENTS: Final = "AscendMLAAttentionSpec"
"""vllm-ascend's kind of latents, a class of its own."""

DRAFT_MODEL: Final = "draft_model."
"""Begins the names of the layers of a draft model that can do without the model."""

PLAIN: Final = (
    ("num_head_slots", None),
    ("compress_ratio", 1),
    ("model_version", None),
    ("num_speculative_blocks", 0),
    ("scale_dim", 0),
    ("cache_sparse_sfa_c8", False),
    ("cache_sparse_li_c8", False),
    ("sfa_dcp_replicated_indexer_size", 1),
    ("store_on_host", False),
)
"""What a spec may say, and what it says of a cache that is carried."""


class Group(NamedTuple):
    """A KV cache group.

    Attributes:
        component: in the daemon's pool.
        spec: vLLM's, of each of its layers.
        layers: their names, in their order.
        reach: how many tokens before the next one a request needs to go on; None: all.
        chunk: tokens of a chunk beyond whose beginning it needs none; 0: there are no chunks.
    """

    component: str
    spec: KVCacheSpec
    layers: tuple[str, ...]
    reach: int | None = None
    chunk: int = 0

    @property
    def block_size(self) -> int:
        """Return the tokens of a block; of a state that is one block a request, more than it ever has."""
        return int(self.spec.block_size)

    @property
    def is_state(self) -> bool:
        """Return whether a block is the state after all tokens before."""
        return isinstance(self.spec, MambaSpec)

    def first(self, tokens: int) -> int:
        """Return the first block that a request needs to go on after so many tokens."""
        if self.reach is None:
            return 0
        needed = tokens // self.chunk * self.chunk if self.chunk else tokens - self.reach
        return max(0, needed) // self.block_size

    def stop(self, tokens: int) -> int:
        """Return how many blocks so many tokens begin."""
        return -(-tokens // self.block_size)

    def cached(self, unit: int) -> CacheGroup:
        """Return what a cached prefix needs of this group, in blocks of so many tokens."""
        last = None if self.reach is None else max(1, -(-self.reach // unit))
        return CacheGroup(group=self.component, block_pages=unit // self.block_size, last=last)


def groups_of(kv_cache_config: KVCacheConfig) -> list[Group]:
    """Return the groups in vLLM's order.

    Raises:
        InvalidFieldError: one is of a kind that is not carried yet.
    """
    return [_group(number, one) for number, one in enumerate(kv_cache_config.kv_cache_groups)]


def _check_kind(spec: KVCacheSpec) -> None:
    """Check that a group's layers are of a kind that is carried.

    Raises:
        InvalidFieldError: names what it is.
    """
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        raise refusal("layers of unlike sizes in one group, as of sparse attention and its index", "kv_cache_groups")
    if type(spec) not in KINDS and type(spec).__name__ != ASCEND_LATENTS:
        raise refusal(f"a KV cache of the kind {type(spec).__name__}", "kv_cache_groups")
    if isinstance(spec, MambaSpec) and str(getattr(spec.mamba_type, "name", spec.mamba_type)).upper() == "MAMBA1":
        raise refusal("states of Mamba 1 (Jamba)", "kv_cache_groups")


def _group(number: int, told: object) -> Group:
    spec: KVCacheSpec = told.kv_cache_spec  # type: ignore[attr-defined]
    _check_kind(spec)
    for name, plain in PLAIN:
        found = getattr(spec, name, plain)
        if found != plain:
            raise refusal(f"a KV cache whose {name} is {found}", "kv_cache_groups")
    if getattr(spec, "sparse_head_dim", None) and index_of(spec) is None:
        raise refusal("sparse attention in layers that use another's index", "kv_cache_groups")
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "none":
            raise InvalidFieldError(
                f"states with vLLM's prefix cache (mamba_cache_mode {spec.mamba_cache_mode}): it finds no block for "
                "one that has come, with any connector: say --no-enable-prefix-caching",
                field="enable_prefix_caching",
            )
    elif getattr(spec, "tokens_per_state", 1) != 1:
        raise refusal(f"a KV cache whose tokens_per_state is {spec.tokens_per_state}", "kv_cache_groups")
    if not getattr(told, "enable_kv_transfer", True):
        raise refusal("a KV cache that vLLM keeps from transfers", "kv_cache_groups")
    reach, chunk = _needs(spec)
    layers = tuple(in_order(told.layer_names))  # type: ignore[attr-defined]
    return Group(f"group{number}" if number else MAIN, spec, layers, reach, chunk)


def index_of(spec: KVCacheSpec) -> int | None:
    """Return the width of the index's keys of vllm-ascend's sparse attention; None: a layer has none."""
    widths = getattr(spec, "sparse_head_dim", None)  # of a latent, its rope part, and the index
    return (int(widths[-1]) or None) if widths else None


def _needs(spec: KVCacheSpec) -> tuple[int | None, int]:
    """Return how far back a request needs what it has, and in chunks of how many tokens."""
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0), 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return spec.attention_chunk_size - 1, spec.attention_chunk_size
    return (1 if isinstance(spec, MambaSpec) else None), 0


def unit_of(groups: Sequence[Group]) -> int:
    """Return the tokens of a cached block: whole blocks of each group."""
    return math.lcm(*(one.block_size for one in groups))


def why_not_cached(groups: Sequence[Group]) -> str:
    """Return why the prefix cache cannot have these groups; empty: it can."""
    if len(groups) > MOST_CACHED:
        return f"{len(groups)} KV cache groups, more than {MOST_CACHED}"
    if any(one.is_state for one in groups):
        return "states, of which vLLM has the latest only"
    if any(one.reach is not None and one.block_size != unit_of(groups) for one in groups):
        return "windows in smaller blocks than full attention"
    return ""


def in_order(layers: Iterable[str]) -> list[str]:
    """Return layers by their numbers, which other engines have too, a draft model's last; vLLM has its own order."""
    return sorted(layers, key=lambda name: (name.startswith(DRAFT_MODEL), numbers_of(name), name))


def numbers_of(layer: str) -> list[int]:
    """Return the numbers in a layer's name."""
    return [int(one) for one in re.findall(r"\d+", layer)]
