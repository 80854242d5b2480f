"""What the plugin finds of SGLang, what it says of what it does not know, and that it is harmless where not chosen."""

from __future__ import annotations

import inspect
import json
import logging
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvferry.clients import Client
from kvferry.clients.engine import Engine
from kvferry.clients.sglang import plugin, pools
from kvferry.clients.sglang.settings import end_server, settings
from kvferry.protocol.errors import InvalidFieldError, PoolLostError
from tests import kit
from tests.sglang.in_process import SOON_S, chosen, current_pool, mha_pool, mla_pool

CHOICES = "sglang.srt.server_args.add_disagg_transfer_backend_choices"
CONN = "sglang.srt.disaggregation.common.conn"
IMPORT_S = 120.0
"""Within which a process has imported SGLang."""


def said_by_process(code: str) -> Any:  # noqa: ANN401  JSON
    """Return the last line that a new process of this environment prints, with nothing of SGLang imported before."""
    command = [sys.executable, "-W", "ignore", "-c", inspect.cleandoc(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_installed_sglang_is_known() -> None:
    assert plugin.differences() == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: one.setattr(plugin, "installed_version", lambda: "0.6.0"), ["SGLang is 0.6.0, known are 0.5.23"]),
        (
            lambda one: one.setattr(CHOICES, lambda iterable, more: None),  # noqa: ARG005  its parameters count
            [f"{CHOICES} takes (iterable, more), known is (iterable)"],
        ),
        (
            lambda one: one.setattr(f"{CONN}.CommonKVSender.poll", None, raising=False),
            [],  # nothing that the plugin calls
        ),
        (
            lambda one: one.delattr(f"{CONN}.CommonKVBootstrapServer"),
            [f"{one.path} is not there" for one in plugin.KNOWN if "CommonKVBootstrapServer" in one.path],
        ),
        (
            lambda one: (one.delattr(CONN), one.setitem(sys.modules, CONN, None)),  # as if it could not be imported
            [f"{one.path} is not there" for one in plugin.KNOWN if CONN in one.path],
        ),
    ],
    ids=["release", "signature", "nothing", "class", "module"],
)
def test_what_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], found: list[str]
) -> None:
    change(monkeypatch)
    said = plugin.differences()
    assert len(said) == len(found)
    assert all(one.startswith(start) for one, start in zip(said, found, strict=True))


@pytest.mark.parametrize("missing", ["sglang", "sglang.srt.server_args"])
def test_register_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    for name in [one for one in sys.modules if one == missing or one.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it could not be imported
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "kvferry cannot be chosen in this SGLang" in caplog.text


@pytest.mark.long
def test_release_that_is_not_known_is_refused_where_kvferry_is_chosen() -> None:
    found = said_by_process("""
        import json
        from kvferry.clients.sglang import plugin
        plugin.installed_version = lambda: "0.6.0"
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.disaggregation import utils
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        said = ""
        try:
            utils.get_kv_class(utils.TransferBackend("kvferry"), utils.KVClassType.MANAGER)
        except RuntimeError as error:
            said = str(error)
        other = utils.get_kv_class(utils.TransferBackend("fake"), utils.KVClassType.MANAGER)
        print(json.dumps([said, other.__name__, hasattr(MHATokenToKVPool.get_cpu_copy, "__wrapped__")]))
    """)
    assert "does not know this SGLang: SGLang is 0.6.0, known are 0.5.23" in found[0]
    assert found[1:] == ["FakeKVManager", False]


def test_nothing_changes_where_kvferry_is_not_chosen() -> None:
    before, after, is_none = said_by_process("""
        import json, os
        import torch
        os.environ["KVFERRY_RUNTIME_DIR"] = "/nowhere"
        os.environ["KVFERRY_SGLANG_MEMORY"] = "wrong"
        from sglang.srt import server_args
        from sglang.srt.disaggregation import utils
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
        from sglang.srt.runtime_context import get_context, get_parallel

        get_parallel().override_permanently(attn_dcp_rank=0)

        def seen():
            backends = {one.name: one.value for one in utils.TransferBackend}
            theirs = [utils.TransferBackend(one) for one in ("fake", "mooncake")]
            classes = [str(utils.get_kv_class(one, kind)) for one in theirs for kind in utils.KVClassType]
            made = []
            for mode, backend in ((None, None), ("null", "mooncake"), ("prefill", "mooncake"), ("null", "kvferry")):
                override = get_context().override_server_args(
                    disaggregation_mode=mode, disaggregation_transfer_backend=backend)
                if mode:
                    override.install()
                mha = MHATokenToKVPool(64, 4, torch.float32, 2, 8, 3, "cpu", False)
                mla = MLATokenToKVPool(64, 4, torch.float32, 16, 8, 3, "cpu", False)
                for pool in (mha, mla):
                    infos = pool.get_contiguous_buf_infos()
                    copied = pool.get_cpu_copy(torch.arange(9)) if mode else None
                    if mode:
                        pool.load_cpu_copy(copied, torch.arange(9))
                    made.append([infos[1], infos[2], type(copied).__name__])
                override.restore()
            return backends, classes, made

        before = seen()
        from sglang.srt.plugins import load_plugins
        load_plugins()
        after = seen()
        from kvferry.clients.sglang import pools
        print(json.dumps([before, after, pools.current() is None]))
    """)
    assert after[0] == {**before[0], "KVFERRY": "kvferry"}
    assert after[1:] == before[1:]
    assert is_none


def unallocated(kind: Any, attribute: str) -> Callable[[], Any]:  # noqa: ANN401  SGLang's class
    """Return what allocates a pool of SGLang's that has something that is not carried."""

    def make() -> None:
        pool = kind.__new__(kind)
        pool.device = "cpu"
        setattr(pool, attribute, True)
        create = pools.create_mha_buffers if kind is MHATokenToKVPool else pools.create_mla_buffers
        create(pytest.fail, pool)

    return make


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mha_pool(kind=type("OwnPool", (MHATokenToKVPool,), {})), "does not carry the KV pool OwnPool"),
        (lambda: mha_pool(device="meta"), "does not carry a KV pool on meta"),
        (lambda: mha_pool(kv_cache_layout="other"), "does not carry the KV layout 'other'"),
        (lambda: mla_pool(use_dsa=True), "does not carry sparse attention with an indexer"),
        (unallocated(MHATokenToKVPool, "post_capture_active"), "backed after graph capture"),
        (unallocated(MLATokenToKVPool, "enable_custom_mem_pool"), "a custom memory pool"),
        (lambda: mha_pool(tokens=63), "--max-total-tokens"),
    ],
)
def test_pools_are_refused_by_name(make: Callable[[], Any], name: str) -> None:
    with chosen(), current_pool(lambda: None), pytest.raises(InvalidFieldError, match=name):
        make()


def test_second_pool_is_refused_by_name() -> None:
    one: Any = object()
    with chosen(), current_pool(lambda: one), pytest.raises(InvalidFieldError, match="a second KV pool"):
        mha_pool()


def test_no_daemon_is_said_at_start() -> None:
    with (
        chosen({"KVFERRY_RUNTIME_DIR": "/nowhere"}, served_model_name="tests"),
        current_pool(lambda: None),
        pytest.raises(Exception, match="/nowhere") as raised,
    ):
        mha_pool()
    assert getattr(raised.value, "code", None) == "DAEMON_LOST"


def test_settings_are_those_of_the_environment() -> None:
    assert settings({}) == (None, "", "daemon")
    given = {"KVFERRY_RUNTIME_DIR": "/run/k", "KVFERRY_SGLANG_POOL": "p", "KVFERRY_SGLANG_MEMORY": "engine"}
    assert settings(given) == ("/run/k", "p", "engine")
    for name, value in (("MEMORY", ""), ("MEMORY", "Daemon"), ("POOL", "a b"), ("POOL", "x" * 200), ("POOL", "../p")):
        with pytest.raises(InvalidFieldError, match=value) as raised:
            settings({f"KVFERRY_SGLANG_{name}": value})
        assert raised.value.field == f"KVFERRY_SGLANG_{name}"


class Lost:
    """A pool whose memory the next daemon has not."""

    name = "lost"
    keeps_memory = False

    def come_back(self, client: Client, *, resumed: bool) -> None:  # noqa: ARG002
        raise PoolLostError("the next daemon has not adopted it")


def scheduler(runtime_dir: str, started: Connection) -> None:
    """Be a scheduler process of a server, for as long as it is let."""
    Engine("scheduler", runtime_dir, on_pool_lost=end_server).add(Lost())
    started.send_bytes(b"")
    started.recv_bytes()


def test_a_scheduler_whose_memory_is_lost_ends_and_tells_its_server() -> None:
    """One that stayed would keep SGLang waiting for a minute."""
    told: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda number, _: told.append(number))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    try:
        with kit.daemon() as daemon:
            process = spawn.Process(target=scheduler, args=(str(daemon.runtime_dir), theirs))
            process.start()
            try:
                assert ours.poll(IMPORT_S)
                daemon.restart()
                process.join(SOON_S)
                assert (process.exitcode, told) == (1, [signal.SIGQUIT])
            finally:
                process.kill()
                process.join()
    finally:
        signal.signal(signal.SIGQUIT, before)
