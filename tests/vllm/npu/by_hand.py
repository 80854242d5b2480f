"""Two engines of the real vllm-ascend 0.23 on a *simulated* NPU, by hand: what one computes the other goes on with.

All is vLLM's and vllm-ascend's, from core to runner, but the forward pass, which needs more of CANN than is simulated:
here it writes rows that say which token is where, and compares those of tokens before. Of a second prompt a block is
wiped at prefill: decode must find its rows wrong. Their environment is not the project's (8.4 GB): torch 2.10.0,
torch-npu 2.10.0.post4 and, both built from source without CUDA or CANN (``VLLM_TARGET_DEVICE=empty``,
``COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1``), vllm 0.23.0 and vllm-ascend 0.23.0.post1; pytest and hypothesis::

    export LD_LIBRARY_PATH=$(.venv-npu/bin/python -m tests.cann_simulator.build) CANN_SIMULATOR_DIR=$(mktemp -d)
    export PYTHONPATH=src:. KVFERRY=$(mktemp -d)/run
    echo tiers.host_bytes = 268435456 >$KVFERRY.toml
    .venv-npu/bin/python -m kvferry.daemon --keep --config $KVFERRY.toml --runtime-dir $KVFERRY &
    $VENV/bin/python -m tests.vllm.npu.by_hand prefill mha|mla|sparse registered|owned
    .venv/bin/kvferry status --runtime-dir $KVFERRY --json  # transfers.receive.ok: 2
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.kit.folders import MODELS, TINY_ASCEND, TINY_DEEPSEEK
from tests.vllm.servers import REMOTE_DECODE, connector

sys.modules |= {"acl": (acl := ModuleType("acl")), "acl.rt": (runtime := ModuleType("acl.rt"))}
vars(acl)["rt"], vars(runtime)["memcpy"] = runtime, None  # CANN's; sleep mode's
ctypes.CDLL("libascendcl.so").aclrtSetDevice(0)  # before torch_npu reserves addresses

import torch  # noqa: E402
import torch_npu  # noqa: E402

vars(torch.version)["cann"] = "9.0.0"
cast = torch_npu.npu_format_cast  # of a CPU's weights there is none
torch_npu.npu_format_cast = lambda one, *more, **named: one if one.is_cpu else cast(one, *more, **named)

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

BLOCK: Final = 128
PROMPT: Final = 1800
"""Tokens: of two steps, of which the first goes layer by layer."""
WIPED: Final = "wiped"
NAMES: Final = ("whole", WIPED)
LAYERS: Final = {"num_hidden_layers": 6, "first_k_dense_replace": 6}
INDEX: Final = {"model_type": "deepseek_v32", "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
SPARSE: Final = {"architectures": ["DeepseekV32ForCausalLM"], **INDEX}
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mha": {"model": str(MODELS / TINY_ASCEND), "hf_overrides": LAYERS},
    "mla": {"model": str(MODELS / TINY_DEEPSEEK), "hf_overrides": LAYERS},
    "sparse": {"model": str(MODELS / TINY_DEEPSEEK), "hf_overrides": {**LAYERS, **SPARSE}},
}


def engine(kind: str, pool: str, memory: str) -> Any:  # noqa: ANN401  vLLM's
    """Start vLLM's core. Its weights and rotary tables are on the CPU, and nothing is computed to warm it up."""
    load_general_plugins()
    told = connector(Path(os.environ["KVFERRY"]), pool, memory=memory)
    told |= {"engine_id": pool, "kv_connector_module_path": "kvferry.clients.vllm.connector"}
    config = EngineArgs(
        **KINDS[kind], dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        block_size=BLOCK, num_gpu_blocks_override=32, max_model_len=2048, max_num_batched_tokens=12 * BLOCK,
        max_num_seqs=4, async_scheduling=False, kv_transfer_config=KVTransferConfig(**told),
    ).create_engine_config()  # fmt: skip
    config.load_config.device = "cpu"
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  once there is a platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415
    from vllm_ascend.worker import worker  # noqa: PLC0415

    vars(worker)["_register_atb_extensions"] = lambda: None
    worker.NPUWorker.determine_available_memory = lambda _: 1 << 30
    worker.NPUWorker.compile_or_warm_up_model = lambda _: worker.CompilationTimes(0.0, 0.0)
    return EngineCore(config, UniProcExecutor, log_stats=False)


class Pass:
    """What stands for a forward pass; it counts each request's computed tokens, and wrong rows of tokens before."""

    def __init__(self, core: Any) -> None:  # noqa: ANN401  vLLM's
        self.computed: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._scheduler, self._runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        (self._group,) = core.scheduler.kv_cache_config.kv_cache_groups
        self._without_tokens, self._runner.execute_model = self._runner.execute_model, self._execute

    def _execute(self, step: Any, *_: object) -> Any:  # noqa: ANN401  vLLM's
        from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415
        from vllm_ascend.attention.utils import maybe_save_kv_layer_to_connector  # noqa: PLC0415

        runner, counts = self._runner, step.num_scheduled_tokens
        if not counts:
            return self._without_tokens(step)
        get_kv_transfer_group().handle_preemptions(step.kv_connector_metadata)
        with set_forward_context({}, runner.vllm_config), runner.maybe_get_kv_connector_output(step) as output:
            for number, layer in enumerate(self._group.layer_names):
                for name, part in itertools.product(counts, range(len(runner.kv_caches[number]))):
                    self._fill(name, counts[name], number, part)
                maybe_save_kv_layer_to_connector(layer, list(runner.kv_caches[number]))
        self.computed.update(counts)
        requests = [self._scheduler.requests[name] for name in counts]
        sampled = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        places = {name: place for place, name in enumerate(counts)}
        return ModelRunnerOutput([*counts], places, sampled_token_ids=sampled, kv_connector_output=output)

    def _fill(self, name: str, count: int, layer: int, part: int) -> None:
        tensor, request = self._runner.kv_caches[layer][part], self._scheduler.requests[name]
        (blocks,), end = self._scheduler.kv_cache_manager.get_block_ids(name), request.num_computed_tokens
        first = torch.tensor(request.all_token_ids[:end]) * 7 + torch.arange(end) * 13 + layer * 101 + part * 31
        want = ((first[:, None] + torch.arange(tensor[0, 0].numel())) % 251).to(tensor.dtype)
        rows, start = tensor.cpu()[blocks].view(-1, want.shape[1]), end - count
        self.wrong[name] += int((rows[:start] != want[:start]).any(1).sum())
        rows[start:end] = want[start:]
        if name == WIPED:
            rows[BLOCK : 2 * BLOCK] = 0
        for number in range(start // BLOCK, -(-end // BLOCK)):
            tensor[blocks[number]].copy_(rows[number * BLOCK :][:BLOCK].view(tensor.shape[1:]))


def ask(core: Any, name: str, tokens: Sequence[int], params: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
    """Have what is left of a prompt computed, and return what the answer says to decode."""
    from vllm.v1.request import Request  # noqa: PLC0415

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    core.add_request(Request(name, list(tokens), sampling, None, block_hasher=core.request_block_hasher))
    while name in core.scheduler.requests:
        for one in itertools.chain.from_iterable(each.outputs for each in core.step()[0].values()):
            if one.finish_reason is not None:
                return one.kv_transfer_params
    raise AssertionError(name)


def main(side: str, kind: str, memory: str, params: str = "{}") -> None:
    """Be prefill, which starts decode; say what was computed, and what was wrong before it."""
    core = engine(kind, side, memory)
    rows, prompts = Pass(core), {name: [seed + n % 97 for n in range(PROMPT)] for seed, name in enumerate(NAMES)}
    if side == "decode":
        for name, told in json.loads(params).items():
            ask(core, name, prompts[name], told)
    else:
        answers = json.dumps({name: ask(core, name, prompt, REMOTE_DECODE) for name, prompt in prompts.items()})
        with subprocess.Popen([sys.executable, "-m", __spec__.name, "decode", kind, memory, answers]) as decode:
            while decode.poll() is None:
                core.step()
        assert decode.returncode == 0
        while core.scheduler.has_requests():
            core.step()
        assert core.reset_prefix_cache()
        ask(core, "found", prompts[NAMES[0]])
    sys.stdout.write(f"{side} {kind} {memory}: computed {dict(rows.computed)}, wrong {dict(rows.wrong)}\n")
    core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
