"""vLLM's KV memory and what the daemon is told of it: byte by byte, and with real engines over each kind of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.clients import Client, ModelIdentity
from kvferry.clients.engine import Engine as Session
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.vllm.configuration import Configuration, Parallel, Settings
from kvferry.clients.vllm.groups import groups_of
from kvferry.clients.vllm.memory import RankMemory, Spec, choose, spec_of
from kvferry.clients.vllm.metadata import Blocks
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import array_of
from kvferry.protocol.errors import InvalidFieldError
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_MHA
from tests.vllm.in_process import (
    PROMPTS,
    Asked,
    Engine,
    Plain,
    Served,
    assert_all_is_free,
    engine,
    prompt,
    prompt_of,
    reset,
    settings,
    through_router,
)
from tests.vllm.servers import REMOTE_DECODE


def full_attention(**more: Any) -> FullAttentionSpec:  # noqa: ANN401  of vLLM's
    """Return what vLLM says of a group of layers with heads."""
    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.float32, **more}
    )


LAYERS, BLOCKS, BLOCK = 11, 5, 8
"""More than ten layers: as text, layer 10 would come before layer 2."""
HEADS, WIDTH = 2, 16
RANK, ROPE = 16, 8
MHA = full_attention()
NARROW_V = full_attention(head_size_v=4)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16)
ONE_RANK = Parallel(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    """What vllm-ascend has in the place of vLLM's, by its name; with its field of 0.23."""

    sparse_head_dim: tuple[int, ...] | None = None
    cache_sparse_li_c8: bool = False
    sfa_dcp_replicated_indexer_size: int = 1


class AscendSFAIndexerCacheSpec(MLAAttentionSpec):
    """The same of an indexer's cache."""


ASCEND_MLA = AscendMLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16)


def window(**more: Any) -> SlidingWindowSpec:  # noqa: ANN401  of vLLM's
    """Return the same of a group of windows."""
    told = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.float32, **more}
    return SlidingWindowSpec(**{"sliding_window": 20, **told})


def states(**more: Any) -> MambaSpec:  # noqa: ANN401  of vLLM's
    """Return the same of a group of states, whose blocks end with a gap."""
    told = {"block_size": 1024, "shapes": ((3, 8), (4, 5)), "dtypes": (torch.float32, torch.float32), **more}
    return MambaSpec(**{"page_size_padded": MHA.page_size_bytes, **told})


def names(count: int = LAYERS) -> list[str]:
    """Return the names of layers."""
    return [f"model.layers.{number}.self_attn.attn" for number in range(count)]


def vllm_config(total_heads: int = HEADS, *, device: str = "cuda", dtype: str = "auto", drafts: int = 0) -> Any:  # noqa: ANN401
    """Return what of vLLM's configuration says what KV is; ``drafts``: how many of the layers are a draft model's."""
    text = SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: total_heads,
        get_num_layers=lambda _: LAYERS - drafts,
        dtype=torch.bfloat16,
        hf_text_config=text,
        enable_sleep_mode=False,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=dtype),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=SimpleNamespace() if drafts else None,
        parallel_config=None,
    )


def kv_cache_config(kind: Any = MHA, layout: str = "LBHNC", layers: list[str] | None = None) -> KVCacheConfig:  # noqa: ANN401
    """Return what vLLM would say of its KV memory, all of it in one allocation."""
    return grouped((kind, names() if layers is None else layers), layout=layout)


def grouped(*groups: tuple[Any, list[str]], layout: str = "LBHNC") -> KVCacheConfig:
    """Return the same of several groups, in the same memory."""
    page, count = groups[0][0].page_size_bytes, max(len(layers) for _, layers in groups)
    of_layer, of_block = (page * BLOCKS, page) if layout.startswith("L") else (page, page * count)
    size = page * BLOCKS * count
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=layers, layer_stride=of_layer, block_stride=of_block)
            for _, layers in groups
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, kind) for kind, layers in groups],
        kv_cache_layout=layout,
    )


def owned_spec(kind: Any, layout: str, **more: Any) -> Spec | None:  # noqa: ANN401  vLLM's
    """Return what the daemon is told of vLLM's own memory."""
    return spec_of(vllm_config(**more), kv_cache_config(kind, layout), ONE_RANK, staged=False)


# -- byte by byte


def with_scales(dtype: str) -> FullAttentionSpec:
    """Return what vLLM says of a cache with a scale a token and head, as its backend for it makes it."""
    kind = full_attention(dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype], kv_quant_mode=get_kv_quant_mode(dtype))
    made = TritonAttentionBackend.customize_spec(kind)
    assert isinstance(made, FullAttentionSpec)
    return made


class Case(NamedTuple):
    """A KV cache of vLLM's: what its rows are, in which order, ``--kv-cache-dtype``, and layers of a draft model."""

    kind: FullAttentionSpec
    layout: str
    dtype: str = "auto"
    drafts: int = 0

    @property
    def spec(self) -> Spec | None:
        """Return what the daemon is told of it."""
        return owned_spec(self.kind, self.layout, dtype=self.dtype, drafts=self.drafts)


@pytest.mark.parametrize(
    "case",
    [
        Case(MHA, "LBHNC"),
        Case(MHA, "LBNHC"),
        Case(MHA, "BLNHC"),
        Case(NARROW_V, "LBNHC"),
        Case(MLA, "LBHNC"),
        Case(MLA, "LBNHC"),
        Case(MLA, "BLHNC"),
        Case(MLA, "BLNHC"),
        Case(MHA, "LBHNC", drafts=3),
        Case(MLA, "LBNHC", drafts=1),
        Case(full_attention(dtype=torch.uint8), "LBNHC", "fp8"),
        Case(full_attention(dtype=torch.uint8), "LBHNC", "fp8_e5m2"),
        Case(with_scales("int8_per_token_head"), "LBHNC", "int8_per_token_head"),
        Case(with_scales("fp8_per_token_head"), "LBNHC", "fp8_per_token_head", drafts=2),
        Case(with_scales("int4_per_token_head"), "LBNHC", "int4_per_token_head"),
    ],
    ids=str,
)
def test_every_element_is_where_the_manifest_says(case: Case) -> None:
    """What vLLM's own views have written is read by the manifest's arrays."""
    kind, layout = case.kind, case.layout
    told = kv_cache_config(kind, layout)
    raw = torch.zeros(told.kv_cache_tensors[0].size, dtype=torch.int8)
    views = create_kv_cache_views(raw, kind, BLOCKS, KVCacheLayout[layout], told.kv_cache_tensors[0])
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[kind.dtype.itemsize]
    for number, view in enumerate(views):
        count = view.numel()
        view.view(bits)[:] = (torch.arange(count) + number * count).to(bits).view(view.shape)
    assert case.spec is not None
    manifest = manifest_of(case.spec)
    assert (manifest.region_bytes, manifest.pages) == (raw.numel(), BLOCKS)
    found = []
    for component in ("main", "draft")[: 2 if case.drafts else 1]:
        array = array_of(manifest, component, "k")
        part = raw.view(torch.uint8).numpy()[array.start : array.start + array.size_bytes]
        found.append(as_vllm(part.view(f"i{kind.dtype.itemsize}").reshape(array.shape), layout))
    assert len(found[-1]) == (case.drafts or LAYERS)
    assert (np.concatenate(found) == np.stack([view.view(bits).numpy() for view in views])).all()
    entry = manifest.entries[0]
    assert entry.page_tokens == BLOCK
    widths = (RANK, ROPE) if kind is MLA else (kind.head_size, kind.head_size_v)
    per_byte = {"int4_per_token_head": 2}.get(case.dtype, 1)
    keys, values = (one // per_byte + (4 if "per_token" in case.dtype else 0) for one in widths)
    assert str(entry.format).endswith(f"_{keys}_{values}")


def test_dtypes_of_the_cache_are_told_apart() -> None:
    """A layout says what its elements are; of those that are bytes with scales the model's identity says it."""
    float8 = [Case(full_attention(dtype=torch.uint8), "LBHNC", dtype).spec for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    dtypes = [manifest_of(one).entries[0].dtype for one in float8 if one is not None]
    assert dtypes == ["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]


def test_packed_latents_have_their_scales_in_them() -> None:
    kind = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656)
    told = vllm_config(dtype="fp8_ds_mla")
    told.model_config.hf_text_config = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64)
    spec = spec_of(told, kv_cache_config(kind, "LBNHC"), ONE_RANK, staged=False)
    assert spec is not None
    manifest = manifest_of(spec)
    assert manifest.region_bytes == kv_cache_config(kind).kv_cache_tensors[0].size
    assert spec_of(told, kv_cache_config(kind, "BLNHC"), ONE_RANK, staged=False) is None


@pytest.mark.parametrize("kinds", [(MHA, window(), window()), (MHA, states())], ids=["windows", "states"])
def test_groups_share_memory_as_the_manifest_says(kinds: tuple[Any, ...]) -> None:
    """Each group is a component, of which the first layers lie in the same bytes."""
    count, layers = len(kinds), names()[:7]
    told = grouped(*((kind, layers[number::count]) for number, kind in enumerate(kinds)))
    raw = torch.zeros(told.kv_cache_tensors[0].size, dtype=torch.int8)
    spec = spec_of(vllm_config(), told, ONE_RANK, staged=False)
    assert spec is not None
    manifest = manifest_of(spec)
    assert (manifest.region_bytes, manifest.pages) == (raw.numel(), BLOCKS)
    for number, (group, tensor) in enumerate(zip(groups_of(told), told.kv_cache_tensors, strict=True)):
        views = create_kv_cache_views(raw, group.spec, BLOCKS, KVCacheLayout.LBHNC, tensor)
        array = array_of(manifest, group.component, "k")
        bytes_of = raw.numpy()[array.start : array.start + array.size_bytes].reshape(len(views), BLOCKS, -1)
        for place, view in enumerate(views):
            view[number + 1].view(torch.uint8)[:] = 10 * number + place + 1  # a block of each group
            inside = view[0].nbytes
            assert (bytes_of[place, number + 1, :inside].view(np.uint8) == 10 * number + place + 1).all()
            assert not bytes_of[place, number + 1, inside:].any()
    assert [one.layer for one in manifest.entries if one.component == "main"] == list(range(0, 7, count))


def test_blocks_that_differ_are_bytes_of_a_rank() -> None:
    """Which pair with the very same only: a state is not cut by heads, nor read as another."""
    of = [
        spec_of(vllm_config(), grouped((MHA, names()[:2]), (kind, names()[2:4])), ranks, staged=True)
        for kind, ranks in (
            (window(), ONE_RANK),
            (states(), ONE_RANK),
            (states(), Parallel(1, 2)),
            (states(shapes=((3, 8), (5, 4))), ONE_RANK),
            (states(block_size=2048), ONE_RANK),
        )
    ]
    entries = [manifest_of(one).entries[0] for one in of if one]
    assert [(one.head_start, one.heads, one.total_heads) for one in entries] == [
        (0, 2, 2),
        (0, 1, 1),
        (1, 1, 2),
        (0, 1, 1),
        (0, 1, 1),
    ]
    formats = [one.format for one in entries]
    assert formats[1] == formats[2] == formats[4] != formats[3]


def as_vllm(array: npt.NDArray[Any], layout: str) -> npt.NDArray[Any]:
    """Return a manifest's array in vLLM's logical order: layers, blocks, heads, tokens, content."""
    array = array.reshape(array.shape[-5:])
    axes = layout.lower() if array.shape[layout.index("H")] == HEADS else layout[:2].lower() + "nhc"  # of one head
    return array.transpose([axes.index(axis) for axis in "lbhnc"])


@pytest.mark.parametrize("layout", ["BHLNC", "LHBNC", "BLHNC"])
def test_layout_that_the_daemon_has_not_is_staged(layout: str) -> None:
    assert owned_spec(MHA, layout) is None
    told = vllm_config(device="cpu"), kv_cache_config(MHA, layout)
    with pytest.raises(InvalidFieldError, match="'owned' is not possible here: this vLLM, or this layout") as error:
        choose(*told, configuration("owned"), ONE_RANK)
    assert error.value.field == "memory"
    assert choose(*told, configuration("auto"), ONE_RANK)[0] == "staged"


def test_gaps_and_another_order_of_layers_are_staged() -> None:
    gap, offset, several, unsaid = (kv_cache_config() for _ in range(4))
    gap.kv_cache_tensors[0].layer_stride += 64
    offset.kv_cache_tensors[0].offset = 64
    several.kv_cache_tensors.append(several.kv_cache_tensors[0])
    unsaid.kv_cache_layout = None
    for one in (gap, offset, several, unsaid, kv_cache_config(layers=sorted(names()))):
        assert spec_of(vllm_config(), one, ONE_RANK, staged=False) is None
        assert spec_of(vllm_config(), one, ONE_RANK, staged=True) is not None


def test_heads_of_a_rank() -> None:
    told = kv_cache_config()
    parts = [spec_of(vllm_config(8), told, Parallel(rank, 4), staged=False) for rank in range(4)]
    assert [manifest_of(one).entries[0].head_start for one in parts if one] == [0, 2, 4, 6]
    single = kv_cache_config(full_attention(num_kv_heads=1))
    same = [spec_of(vllm_config(2), single, Parallel(rank, 4), staged=False) for rank in range(4)]
    assert [manifest_of(one).entries[0].head_start for one in same if one] == [0, 0, 1, 1]


def test_order_of_bytes_on_a_cpu_is_named() -> None:
    cpu, other = owned_spec(MHA, "LBHNC", device="cpu"), owned_spec(MHA, "LBHNC")
    assert cpu is not None
    assert other is not None
    assert "_CPU_" in str(manifest_of(cpu).entries[0].format)
    assert manifest_of(cpu).layout_digest != manifest_of(other).layout_digest


def test_order_of_bytes_is_that_of_the_models_dtype() -> None:
    """A cache of 8 bits is ordered as the model's kernels read it; on a CPU with AMX that of another dtype differs."""
    kinds = [full_attention(dtype=dtype, block_size=32, head_size=32) for dtype in (torch.bfloat16, torch.uint8)]
    specs = [
        owned_spec(one, "LBHNC", device="cpu", dtype=dtype) for one, dtype in zip(kinds, ("auto", "fp8"), strict=True)
    ]
    first, second = (manifest_of(one).entries[0].format for one in specs if one is not None)
    assert first == second


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            RSWASpec(block_size=8, num_kv_heads=2, head_size=16, dtype=torch.float32, rswa_window=64),
            {},
            "RSWASpec",
        ),
        (states(mamba_cache_mode="align"), {}, "mamba_cache_mode align"),
        (states(mamba_type=MambaAttentionBackendEnum.MAMBA1), {}, "states of Mamba 1"),
        (
            UniformTypeKVCacheSpecs(
                block_size=BLOCK,
                kv_cache_specs={
                    "model.layers.0.self_attn.attn": MLA,
                    "model.layers.0.self_attn.indexer.k_cache": MLAAttentionSpec(
                        block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8
                    ),
                },
            ),
            {},
            "sparse attention and its index",
        ),
        (full_attention(state_content_bytes=136), {}, "dtype auto with rows of 136 bytes"),
        (full_attention(state_content_bytes=136), {"dtype": "turboquant_k8v4"}, "dtype turboquant_k8v4 with rows"),
        (
            MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=24, dtype=torch.int8, state_content_bytes=32),
            {"dtype": "int8_per_token_head"},
            "dtype int8_per_token_head with rows of 32 bytes",
        ),
        (MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=80, dtype=torch.bfloat16), {}, "latents of 80"),
        (full_attention(dtype=torch.uint8), {"dtype": "nvfp4"}, "nvfp4"),
    ],
    ids=["gap", "states", "Jamba", "sparse attention", "scales", "packed", "latents with scales", "latents", "dtype"],
)
def test_what_is_not_carried_is_refused_by_name(kind: Any, more: dict[str, Any], said: str) -> None:  # noqa: ANN401
    told = kv_cache_config(kind)
    with pytest.raises(InvalidFieldError, match=said):
        spec_of(vllm_config(**more), told, ONE_RANK, staged=True)


def test_a_draft_model_beside_several_groups_is_refused_by_name() -> None:
    several = grouped((MHA, names()[:6]), (window(), names()[6:]))
    assert spec_of(vllm_config(), several, ONE_RANK, staged=True)
    with pytest.raises(InvalidFieldError, match="a draft model beside several KV cache groups"):
        spec_of(vllm_config(drafts=1), several, ONE_RANK, staged=True)


def test_memory_of_a_device_is_staged() -> None:
    told = kv_cache_config()
    assert choose(vllm_config(), told, configuration("auto"), ONE_RANK)[0] == "staged"
    for wanted in ("owned", "registered"):
        with pytest.raises(InvalidFieldError, match="memory of the device cuda is vLLM's own"):
            choose(vllm_config(), told, configuration(wanted), ONE_RANK)


def configuration(memory: Any) -> Configuration:  # noqa: ANN401  a literal
    """Return the connector's configuration."""
    return Configuration(Settings(memory=memory), "instance", "pool", 1, BLOCK, is_producer=True, is_consumer=True)


# -- a rank's memory


@pytest.fixture
def rank(kept_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[RankMemory]:
    """Return a rank's memory of the kind that a test's parameter says."""
    session = Session("rank", str(kept_daemon.runtime_dir))
    told = kv_cache_config(MHA, "LBNHC")
    spec = spec_of(vllm_config(), told, ONE_RANK, staged=request.param == "staged")
    assert spec is not None
    model = ModelIdentity(name="model", revision="1")
    try:
        yield RankMemory(request.param, EnginePool(session, "rank", spec, model, "daemon"), groups_of(told))
    finally:
        session.close()


def caches(raw: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return vLLM's views of an allocation of its."""
    told = kv_cache_config(MHA, "LBNHC")
    views = create_kv_cache_views(raw, MHA, BLOCKS, KVCacheLayout.LBNHC, told.kv_cache_tensors[0])
    return dict(zip(names(), views, strict=True))


@pytest.mark.parametrize("rank", ["staged"], indirect=True)
def test_staged_blocks_are_copied_and_no_others(rank: RankMemory) -> None:
    raw = torch.randint(-128, 127, (rank.pool.elements().numel(),), dtype=torch.int8)
    layers = caches(raw)
    rank.take(dict(reversed(layers.items())))  # vLLM's order is not that of layers
    copies = rank.pool.tensor("k")
    rank.copy_out([Blocks([1, 3], 0)])
    bits = [
        (layer.view(torch.int32), copy.view(torch.int32)) for layer, copy in zip(layers.values(), copies, strict=True)
    ]
    for layer, copy in bits:
        assert torch.equal(copy[[1, 3]], layer[[1, 3]])
        assert not copy[[0, 2, 4]].any()
        copy.fill_(7)
    before = [layer.clone() for layer, _ in bits]
    rank.copy_in([Blocks([4], 0)])
    for (layer, _), was in zip(bits, before, strict=True):
        assert (layer[4] == 7).all()
        assert torch.equal(layer[:4], was[:4])


@pytest.mark.parametrize("kind", [MHA, NARROW_V, ASCEND_MLA], ids=["k and v", "narrow v", "latents and rope"])
def test_vllm_ascends_tensors_of_a_layer_are_copied_each(kept_daemon: Daemon, kind: Any) -> None:  # noqa: ANN401
    """As its worker makes them: each aligned to 2 MiB, at an offset in a longer allocation, blocks outermost."""
    told, config = kv_cache_config(kind), vllm_config(device="npu")
    for wanted, memory in (("auto", "registered"), ("owned", "owned"), ("staged", "staged")):
        kind_of_memory, spec = choose(config, told, configuration(wanted), ONE_RANK)
        assert kind_of_memory == memory
    heads, widths = (1, (RANK, ROPE)) if kind is ASCEND_MLA else (HEADS, (WIDTH, kind.head_size_v))
    layers = {name: tuple(aligned((BLOCKS, BLOCK, heads, width), kind.dtype) for width in widths) for name in names()}
    with closing(Session("ascend", str(kept_daemon.runtime_dir))) as session:
        pool = EnginePool(session, "ascend", spec, ModelIdentity(name="model", revision="1"), "daemon")
        rank = RankMemory("staged", pool, groups_of(told))
        rank.take(dict(reversed(layers.items())))
        rank.copy_out([Blocks([1, 3], 0)])
        for number, parts in enumerate(layers.values()):
            for role, part in zip(("k", "v"), parts, strict=True):
                copy = pool.tensor(role)[number].view(part.shape)
                assert torch.equal(copy[[1, 3]], part[[1, 3]])
                assert not copy[[0, 2, 4]].any()
                copy[4] = 7
        rank.copy_in([Blocks([4], 0)])
        assert all((part[4] == 7).all() and not (part[2] == 7).all() for parts in layers.values() for part in parts)
        with pytest.raises(InvalidFieldError, match=f"layer {names()[0]} of 3 tensors, not 2"):
            rank.take({name: (*parts, parts[0]) for name, parts in layers.items()})
        with pytest.raises(InvalidFieldError, match=f"layer {names()[0]} of 1 tensors, not 2"):
            rank.take({name: parts[0] for name, parts in layers.items()})


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random elements as vllm-ascend allocates them where there is a connector."""
    size, alignment = torch.Size(shape).numel() * dtype.itemsize, 2 << 20
    raw = torch.randint(1, 100, (size + alignment,), dtype=torch.int8)
    return raw[-raw.data_ptr() % alignment :][:size].view(dtype).view(shape)


def test_vllm_ascends_caches_that_are_not_carried_are_refused_by_name() -> None:
    several, config = grouped((MHA, names()[:6]), (window(), names()[6:])), vllm_config(device="npu")
    with pytest.raises(InvalidFieldError, match="several KV cache groups with vllm-ascend"):
        spec_of(config, several, ONE_RANK, staged=True)
    without = dataclasses.replace(ASCEND_MLA, sparse_head_dim=(RANK, ROPE, 0))
    with pytest.raises(InvalidFieldError, match="sparse attention in layers that use another's index"):
        groups_of(kv_cache_config(without))
    for field, value in (("cache_sparse_li_c8", True), ("sfa_dcp_replicated_indexer_size", 2)):
        changed: dict[str, Any] = {field: value}
        packed = dataclasses.replace(ASCEND_MLA, sparse_head_dim=(RANK, ROPE, 8), **changed)
        with pytest.raises(InvalidFieldError, match=f"a KV cache whose {field} is {value}"):
            groups_of(kv_cache_config(packed))
    latents = kv_cache_config(ASCEND_MLA)
    assert spec_of(config, latents, ONE_RANK, staged=False)
    config.additional_config = {"enable_kv_nz": True}
    with pytest.raises(InvalidFieldError, match=r"FRACTAL_NZ.*leave enable_kv_nz out") as error:
        spec_of(config, latents, ONE_RANK, staged=False)
    assert error.value.field == "additional_config"
    with pytest.raises(InvalidFieldError, match="a KV cache of the kind AscendSFAIndexerCacheSpec"):
        groups_of(kv_cache_config(AscendSFAIndexerCacheSpec(**vars(MLA))))


@pytest.mark.parametrize("rank", ["owned"], indirect=True)
def test_vllm_gets_the_pools_memory_once(rank: RankMemory) -> None:
    allocation = rank.allocation()
    assert allocation is not None
    size = rank.pool.elements().numel()
    with allocation:
        raw = torch.zeros(size, dtype=torch.int8)
        other = torch.zeros(size, dtype=torch.float32)
    assert raw.data_ptr() == rank.pool.elements().data_ptr() != other.data_ptr()
    rank.take(caches(raw))
    with allocation:
        torch.zeros(size, dtype=torch.int8)
    with pytest.raises(InvalidFieldError, match='say "memory": "staged"'):
        rank.take(caches(raw))
    with pytest.raises(InvalidFieldError, match=f"{LAYERS} layers lie elsewhere"):
        rank.take(caches(torch.zeros_like(raw)))


@pytest.mark.parametrize("rank", ["staged"], indirect=True)
def test_layers_that_share_another_ones_cache_have_none(rank: RankMemory) -> None:
    layers = caches(torch.zeros(rank.pool.elements().numel(), dtype=torch.int8))
    rank.take({**layers, "shares": layers[names()[3]]})
    layers[names()[3]][2] = 5
    rank.copy_out([Blocks([2], 0)])
    assert (rank.pool.tensor("k")[3, 2] == 5).all()


@pytest.mark.parametrize("rank", ["owned", "staged"], indirect=True)
def test_layers_of_another_shape_are_refused(rank: RankMemory) -> None:
    layers = caches(torch.zeros(rank.pool.elements().numel(), dtype=torch.int8))
    with pytest.raises(InvalidFieldError, match=f"10 layers in 11, without {names()[0]}"):
        rank.take(dict(list(layers.items())[1:]))
    with pytest.raises(InvalidFieldError, match="12 layers in 11, with another"):
        rank.take({**layers, "another": torch.zeros_like(layers[names()[0]])})
    layers[names()[3]] = layers[names()[3]][:4]
    with pytest.raises(InvalidFieldError, match=r"layer model.layers.3.self_attn.attn of the shape \(4, 2, 8, 32\)"):
        rank.take(layers)


# -- real engines


@pytest.mark.parametrize("memory", ["staged", pytest.param("registered", marks=pytest.mark.long)])
def test_engine_over_each_kind_of_memory(kept_daemon: Daemon, plain: Plain, tmp_path: Path, memory: str) -> None:
    want = plain.tokens(*PROMPTS, model=TINY_MHA)
    name = f"engine-{memory}"
    with (
        engine(tmp_path, settings(kept_daemon, name, memory=memory), model=TINY_MHA) as one,
        Client.connect(kept_daemon.runtime_dir) as client,
    ):
        assert [answer.tokens for answer in one.ask(*PROMPTS)] == want
        one.drain()
        status = client.status()
        (pool,) = [pool for pool in status.pools if pool.pool == name]
        (session,) = [session for session in status.sessions if session.name == f"{name}-{memory}"]
        assert pool.registered_by == (session.session if memory == "registered" else None)
        if memory == "staged":
            assert_same_blocks(one, client, pool.pool)
        assert one.call(reset)
        again = one.ask(*PROMPTS)
        assert [answer.tokens for answer in again] == want
        assert [answer.cached for answer in again] == [128, 128, 0, 128]
        assert_all_is_free(kept_daemon, one)
        assert any(f"vLLM's KV memory is {memory}" in line for line in one.log())


def assert_same_blocks(one: Engine, client: Client, pool: str) -> None:
    """Check that a pool has the bytes of vLLM's blocks, where it has any, which it has of several."""
    copy = client.attach_pool(pool).array("main", "k")
    blocks = one.call(content)
    filled = [block for block in range(1, copy.shape[1]) if copy[:, block].any()]
    assert len(filled) >= 8
    assert all((copy[:, block].reshape(blocks[:, block].shape) == blocks[:, block]).all() for block in filled)


def content(served: Served) -> npt.NDArray[Any]:
    """Return all of vLLM's KV memory, as (layers, blocks, …)."""
    return np.stack([layer.numpy() for layer in served.runner.kv_caches])


@pytest.mark.long
def test_blocks_of_8_bits_are_for_their_like_alone(kept_daemon: Daemon, tmp_path: Path) -> None:
    """Found and handed on with the same dtype of the cache; with another one they are computed, and the log says it."""
    with ExitStack() as stack, Client.connect(kept_daemon.runtime_dir) as client:
        one, other, third = (
            stack.enter_context(engine(tmp_path, settings(kept_daemon, name), model=TINY_MHA, kv_cache_dtype=dtype))
            for name, dtype in (("one", "fp8"), ("other", "fp8_e4m3"), ("third", "fp8_e5m2"))
        )
        with closing(client.attach_pool("one")) as pool:
            assert {entry.dtype for entry in pool.manifest.entries} == {"float8_e4m3fn"}
        asked = prompt_of("8 bits")
        (first,) = one.ask(asked)
        one.drain()
        answers = [each.ask_anew(asked) for each in (other, third)]
        want, theirs = (each.ask_anew(asked, skips_cache=True).tokens for each in (one, third))
        assert [answer.tokens for answer in (first, *answers)] == [want, want, theirs]
        assert [answer.cached > 0 for answer in answers] == [True, False]
        tokens = prompt(300, seed=8)
        for decode, arrived in ((other, 1), (third, 0)):
            want = decode.ask_anew(tokens, skips_cache=True).tokens
            (answer,) = one.ask(Asked(tokens, 1, dict(REMOTE_DECODE)))
            before = client.status().counters.get("transfers.receive.ok", 0)
            (received,) = decode.ask(Asked(tokens, params=through_router(answer)), salt="received")
            assert received.tokens == want
            assert client.status().counters.get("transfers.receive.ok", 0) - before == arrived
        assert any("float8_e4m3fn" in line and "float8_e5m2" in line for line in third.log())
