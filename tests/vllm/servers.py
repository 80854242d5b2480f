"""Real servers of vLLM, and vLLM's own proxy in front of a prefill and a decode server.

Requests are greedy, token ids in, token ids out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal

from examples.demo.hosts import Host
from tests.kit import servers
from tests.kit.folders import MODELS, REPOSITORY, SMOLLM2
from tests.kit.servers import REPLY_S, SIDES, Program, Reply, free_ports, running

BLOCK: Final = 32
NEW_TOKENS: Final = 16
COMPLETIONS: Final = "/v1/completions"
OPTIONS: Final = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
    *("--max-model-len", "4096", "--max-num-seqs", "16"),
)
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # each start would compile vLLM anew
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": os.fspath(REPOSITORY / "src"),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two servers compute on the same core
    "VLLM_NO_USAGE_STATS": "1",
}

REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies tell prefill."""

PROXY: Final = Path(sys.prefix, "source", "tests", "v1", "kv_connector", "nixl_integration", "toy_proxy_server.py")
"""vLLM's own, of its source distribution."""


def connector(runtime_dir: Path, pool: str = "", role: str = "kv_both", **more: object) -> dict[str, Any]:
    """Return what vLLM is told of the connector; ``more``: of its own settings."""
    extra = {"runtime_dir": os.fspath(runtime_dir), "pool": pool, **more}
    return {"kv_connector": "KvferryConnector", "kv_role": role, "kv_connector_extra_config": extra}


def request(ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> dict[str, object]:
    """Return a greedy request's body."""
    asked = {"prompt": list(ids), "max_tokens": new, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**asked, **more}


class Server(Program):
    """A server of vLLM."""

    def generate(self, ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> Reply:
        """Ask for new tokens."""
        return self.post(COMPLETIONS, request(ids, new, **more))


def server(
    folder: Path,
    name: str,
    *,
    transfer: Mapping[str, Any] | None = None,
    model: str = SMOLLM2,
    tokens: int = 4096,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    host: Host | None = None,
) -> Server:
    """Return a server that has not been started.

    Args:
        folder: for its log.
        name: of the program.
        transfer: vLLM's configuration of a connector; None: there is none.
        model: the name of a folder in ``.models``, and of what is served.
        tokens: in its KV cache.
        options: more of vLLM's.
        environment: more than this process's.
        host: where; None: on this machine's network.
    """
    [port] = free_ports(1)
    address = "127.0.0.1" if host is None else host.address
    arguments = ["-m", "vllm.entrypoints.cli.main", "serve", os.fspath(MODELS / model), "--served-model-name", model]
    arguments += [*OPTIONS, "--host", address, "--port", str(port)]
    arguments += ["--num-gpu-blocks-override", str(tokens // BLOCK + 1)]  # one is the null block
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(name, [*arguments, *options], folder, port, environment=_variables(host, environment), host=host)


def _variables(host: Host | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program on a host, which else takes a route to the Internet for its address."""
    return {**ENVIRONMENT, **({} if host is None else {"VLLM_HOST_IP": host.address}), **(more or {})}


class Pair(servers.Pair[Server]):
    """A prefill and a decode server, and vLLM's proxy in front of them."""

    def generate(self, ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> Reply:
        """Ask the proxy, as clients do."""
        return self.generating(ids, new, **more).result()

    def generating(self, ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> Future[Reply]:
        """Ask the proxy; the answer will be there."""
        return self.front.posted(COMPLETIONS, request(ids, new, **more))


@contextlib.contextmanager
def running_pair(
    folder: Path,
    runtime_dirs: tuple[Path, Path] | Path,
    *,
    model: str = SMOLLM2,
    tokens: int = 4096,
    chunk: int = 256,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: tuple[Host | None, Host | None] = (None, None),
    settings: Mapping[str, object] | None = None,
    policy: Literal["recompute", "fail"] = "fail",
) -> Iterator[Pair]:
    """Run a pair and its proxy.

    Args:
        folder: for the logs.
        runtime_dirs: prefill's daemon's and decode's, or that of both.
        model: the name of a folder in ``.models``.
        tokens: in either's KV cache.
        chunk: so many tokens of a prompt are computed at a time.
        options: more of vLLM's, for both.
        environment: more than this process's.
        hosts: prefill's, with the proxy and the clients, and decode's.
        settings: more of the connector's, for both.
        policy: vLLM's, for requests whose blocks cannot be loaded.
    """
    theirs = (runtime_dirs, runtime_dirs) if isinstance(runtime_dirs, Path) else runtime_dirs
    both = [*options, "--max-num-batched-tokens", str(chunk)]
    roles = ("kv_producer", "kv_consumer")
    prefill, decode = (
        server(
            folder, side, model=model, tokens=tokens, options=both, environment=environment, host=host,
            transfer={**connector(one, side, role, **(settings or {})), "kv_load_failure_policy": policy},
        )
        for side, role, one, host in zip(SIDES, roles, theirs, hosts, strict=True)
    )  # fmt: skip
    [port] = free_ports(1)
    arguments = [os.fspath(PROXY), "--host", prefill.address, "--port", str(port)]
    arguments += ["--prefiller-hosts", prefill.address, "--prefiller-ports", str(prefill.port)]
    arguments += ["--decoder-hosts", decode.address, "--decoder-ports", str(decode.port)]
    front = Program(
        "proxy", arguments, folder, port, environment=_variables(hosts[0]), host=hosts[0], up="/healthcheck"
    )
    with running(prefill, decode, front):
        yield Pair(prefill, decode, front)


@contextlib.contextmanager
def left_alone(program: Program, body: Mapping[str, object]) -> Iterator[None]:
    """Send a request, and close its connection on leaving, whether it is answered or not: so do clients that go."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(program.url).netloc, timeout=REPLY_S)
    with contextlib.closing(connection):
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        yield
