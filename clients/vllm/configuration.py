"""What an operator says of the connector, and what of vLLM's configuration it needs; what is not carried, by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec

from kvferry.clients.model_weights import weights_revision
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import ModelIdentity, PoolName
from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELD: Final = "kv_connector_extra_config"
LONGEST_POOL_NAME: Final = 100
"""Ranks are appended."""

Memory = Literal["auto", "owned", "registered", "staged"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]

COMPUTED_WITH: Final = ("dtype", "quantization", "hf_overrides", "rope_scaling", "rope_theta")
"""Arguments of vLLM's model configuration under which the same weights and tokens give other KV."""

WITHOUT_DRAFT_KV: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
DRAFTS: Final = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""Ways to speculate, by vLLM's names: those whose drafts have no KV, and those of which it is carried."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's own configuration: ``kv_connector_extra_config``.

    Attributes:
        runtime_dir: the daemon's; empty: where a client looks by itself.
        pool: the name of this engine's pools, without ranks; empty: made of vLLM's engine id.
        memory: who allocates vLLM's KV memory; ``auto``: the daemon where that is possible, else ``staged``.
        required: whether the server needs a daemon at its start; else it does without.
        cache: whether blocks are looked up and stored in the prefix cache.
        layer_by_layer: whether long prompts travel while their last chunk is computed.
        hold_s: how long prefill keeps a prompt's blocks for a decode server that does not come.
        receive_s: how long decode waits for a prompt's blocks.
        cache_s: how long a load or store of the prefix cache may take.
    """

    runtime_dir: str = ""
    pool: Literal[""] | PoolName = ""
    memory: Memory = "auto"
    required: bool = True
    cache: bool = True
    layer_by_layer: bool = True
    hold_s: Seconds = 480.0
    receive_s: Seconds = 120.0
    cache_s: Seconds = 60.0


class Parallel(NamedTuple):
    """A place among the ranks of an engine: those of tensor parallelism."""

    rank: int
    size: int


class Configuration(NamedTuple):
    """All that both sides of the connector know.

    Attributes:
        settings: the operator's.
        instance: in the daemon, of all processes of this engine.
        pool: the name of its pools, without ranks.
        ranks: of tensor parallelism.
        block_size: tokens of a block.
        is_producer: whether it hands prompts to others.
        is_consumer: whether it takes prompts of others.
        drops_last: whether the last block that is found is computed again.
    """

    settings: Settings
    instance: str
    pool: str
    ranks: int
    block_size: int
    is_producer: bool
    is_consumer: bool
    drops_last: bool = False

    def pool_of(self, rank: int) -> str:
        """Return the name of a rank's pool."""
        return pool_of(self.pool, self.ranks, rank)


def pool_of(pool: str, ranks: int, rank: int) -> str:
    """Return the name of the pool of a rank of so many, of an engine whose pools have this name."""
    return pool if ranks == 1 else f"{pool}-tp{rank}"


def configuration_of(vllm_config: VllmConfig) -> Configuration:
    """Return what both sides know.

    Raises:
        InvalidFieldError: the extra configuration is wrong, or vLLM is to do what is not carried; says what.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    settings = settings_of(transfer.kv_connector_extra_config)
    check_carried(vllm_config)
    engine = name_of(str(transfer.engine_id))
    parallel = vllm_config.parallel_config
    pool = settings.pool
    if pool and parallel.data_parallel_size > 1:
        pool += f"-dp{parallel.data_parallel_rank}"
    return Configuration(
        settings=settings,
        instance=f"vllm-{engine}",
        pool=pool or f"vllm-{engine}",
        ranks=parallel.tensor_parallel_size,
        block_size=vllm_config.cache_config.block_size,
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        drops_last=_drops_last(vllm_config),
    )


def name_of(engine_id: str) -> str:
    """Return an engine's id as a name of pools and instances; no two ids give the same one."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", engine_id)[:LONGEST_POOL_NAME]
    if name == engine_id:
        return name
    return f"{name[: LONGEST_POOL_NAME - 17]}-{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}"


def settings_of(extra: dict[str, Any]) -> Settings:
    """Return the operator's settings.

    Raises:
        InvalidFieldError: a key is unknown, or has a value that it cannot have.
    """
    try:
        return msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise InvalidFieldError(
            f"{FIELD}: {error}; the keys are {', '.join(Settings.__struct_fields__)}, see docs/vllm.md", field=FIELD
        ) from error


def check_carried(vllm_config: VllmConfig) -> None:
    """Refuse by name what is not carried yet.

    Raises:
        InvalidFieldError: ``field`` is vLLM's option.
    """
    parallel = vllm_config.parallel_config
    for option in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        size = getattr(parallel, option, 1)
        if size > 1:
            raise refusal(f"{option} {size}", option)
    if getattr(vllm_config.scheduler_config, "async_scheduling", False) and not keeps_freed_blocks():
        raise refusal("async scheduling with this release of vLLM", "async_scheduling")
    _check_drafts(vllm_config)


def _check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse by name the draft models that are not carried yet.

    Raises:
        InvalidFieldError: how this engine speculates.
    """
    if not _has_draft_kv(vllm_config):
        return
    method = vllm_config.speculative_config.method
    lookahead: int | None = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if method not in DRAFTS or lookahead is None:
        raise refusal(f"a draft model ({method}) with this release of vLLM", "speculative_config")
    if lookahead > 1:  # rows of a prompt's end are of tokens that nobody has verified
        raise refusal(f"an MTP of several modules, which reads {lookahead} tokens ahead", "speculative_config")


def _has_draft_kv(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WITHOUT_DRAFT_KV


def _drops_last(vllm_config: VllmConfig) -> bool:
    """Return whether the last block that is found is computed again, as vLLM does with its own cache.

    The draft's row of its last token depends on the next token, which may be another one here.
    """
    return _has_draft_kv(vllm_config) and bool(vllm_config.speculative_config.use_eagle_block_drop())


def draft_digest(vllm_config: VllmConfig) -> bytes:
    """Return what tells this engine's draft model from others, HASH_BYTES; empty: it has none with KV.

    Raises:
        InvalidFieldError: a file cannot be read, or changes while it is read.
    """
    if not _has_draft_kv(vllm_config):
        return b""
    told, model = vllm_config.speculative_config, vllm_config.speculative_config.draft_model_config
    weights = weights_revision(str(model.model), model.revision, vllm_config.load_config.download_dir)
    options = {name: str(getattr(model, name, None)) for name in COMPUTED_WITH}
    content = json.dumps([weights, options, str(told.method)], sort_keys=True)
    return hashlib.sha256(content.encode()).digest()[:HASH_BYTES]


def keeps_freed_blocks() -> bool:
    """Return whether vLLM gives nobody a block that a step in flight still writes: releases before 0.32 do."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  the connector's frontend needs none of it

    return hasattr(Scheduler, "_request_blocks_can_be_freed")


def refusal(what: str, field: str) -> InvalidFieldError:
    """Return the error for what is not carried."""
    return InvalidFieldError(f"kvferry's connector does not carry {what} yet: see docs/vllm.md", field=field)


def model_identity(vllm_config: VllmConfig) -> ModelIdentity:
    """Return whose KV it is: the served model, the very weights, and what they are computed with.

    Of the latter the dtype is readable: it is what two servers most often have different. Prompts travel between
    servers one of which has no draft model; cached blocks are of one draft model alone.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    told = {name: str(getattr(model, name, None)) for name in COMPUTED_WITH}
    config = getattr(model, "hf_config_path", None)
    if config:
        told["config"] = weights_revision(str(config), model.revision, load.download_dir)
    if str(load.load_format) == "dummy":  # weights that are in no file
        told["seed"] = str(model.seed)
    kv_dtype = str(vllm_config.cache_config.cache_dtype)
    if kv_dtype.endswith("per_token_head"):  # the layout has rows of bytes then; else it says the dtype
        told["kv_cache_dtype"] = kv_dtype
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    weights = weights_revision(str(model.model), model.revision, load.download_dir)
    names = model.served_model_name
    name = names if isinstance(names, str) else (names or [model.model])[0]
    revision = f"{weights}-{told['dtype'].removeprefix('torch.')}-{digest}"
    return ModelIdentity(name=name, revision=revision, salt=draft_digest(vllm_config).hex())


def shares_blocks(vllm_config: VllmConfig) -> bool:
    """Return whether other processes give the same tokens the same hash; else each starts from a random one."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415  the connector's frontend needs none of it

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    is_fixed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and not algorithm.startswith("xxhash")
    return is_fixed or os.environ.get("PYTHONHASHSEED") is not None
