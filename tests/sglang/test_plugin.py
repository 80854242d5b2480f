"""What the plugin finds of SGLang, what it says of what it does not know, and that it is harmless where not chosen."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvferry.clients.sglang import plugin, pools
from kvferry.clients.sglang.settings import settings
from kvferry.protocol.errors import InvalidFieldError
from tests.sglang.in_process import current_pool, mha_pool, mla_pool, told

CONN = "sglang.srt.disaggregation.common.conn"


def said_by_process(code: str) -> Any:  # noqa: ANN401  JSON
    """Return the last line that a new process of this environment prints, with nothing of SGLang imported before."""
    command = [sys.executable, "-W", "ignore", "-c", inspect.cleandoc(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_installed_sglang_is_known() -> None:
    assert plugin.differences() == []


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        (lambda choices: None, "choices"),  # noqa: ARG005  its parameters are what counts
        (lambda iterable, more: None, "iterable, more"),  # noqa: ARG005
    ],
)
def test_another_signature_is_named(monkeypatch: pytest.MonkeyPatch, other: object, taken: str) -> None:
    path = "sglang.srt.server_args.add_disagg_transfer_backend_choices"
    monkeypatch.setattr(path, other)
    assert plugin.differences() == [f"{path} takes ({taken}), known is (iterable)"]


def test_another_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CONN}.CommonKVSender.send", lambda self, pages: None)  # noqa: ARG005
    [found] = plugin.differences()
    assert found.startswith(f"{CONN}.CommonKVSender.send takes (self, pages), known is (self, kv_indices, ")


def test_missing_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{CONN}.CommonKVBootstrapServer")
    found = plugin.differences()
    assert [one.partition(" ")[0] for one in found] == [
        one.path for one in plugin.KNOWN if "CommonKVBootstrapServer" in one.path
    ]
    assert all("is not there" in one for one in found)


def test_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CONN)
    monkeypatch.setitem(sys.modules, CONN, None)  # as if it could not be imported
    assert all(one.startswith(CONN) for one in plugin.differences())
    assert len(plugin.differences()) == sum(CONN in one.path for one in plugin.KNOWN)


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.6.0")
    assert plugin.differences() == ["SGLang is 0.6.0, known are 0.5.23"]


@pytest.mark.parametrize("missing", ["sglang", "sglang.srt.plugins.hook_registry", "sglang.srt.server_args"])
def test_register_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    for name in [one for one in sys.modules if one == missing or one.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it could not be imported
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "kvferry cannot be chosen in this SGLang" in caplog.text


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
    found = said_by_process("""
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
    before, after, is_none = found
    assert after[0] == {**before[0], "KVFERRY": "kvferry"}
    assert after[1:] == before[1:]
    assert is_none


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mha_pool(kind=type("OwnPool", (MHATokenToKVPool,), {})), "the KV pool OwnPool"),
        (lambda: mha_pool(device="meta"), "a KV pool on meta"),
        (lambda: mha_pool(kv_cache_layout="other"), "the KV layout 'other'"),
        (lambda: mla_pool(use_dsa=True), "sparse attention with an indexer"),
    ],
)
def test_pools_are_refused_by_name(make: Any, name: str) -> None:  # noqa: ANN401  a function
    with told(), current_pool(lambda: None), pytest.raises(InvalidFieldError, match=f"does not carry {name}"):
        make()


def test_second_pool_is_refused_by_name() -> None:
    one: Any = object()
    with told(), current_pool(lambda: one), pytest.raises(InvalidFieldError, match="a second KV pool"):
        mha_pool()


@pytest.mark.parametrize(
    ("attribute", "name"),
    [("post_capture_active", "backed after graph capture"), ("enable_custom_mem_pool", "a custom memory pool")],
)
@pytest.mark.parametrize("create", [pools.create_mha_buffers, pools.create_mla_buffers])
def test_other_memory_is_refused_by_name(create: Any, attribute: str, name: str) -> None:  # noqa: ANN401  a function
    kind = MHATokenToKVPool if create is pools.create_mha_buffers else MLATokenToKVPool
    pool = kind.__new__(kind)
    pool.device = "cpu"
    setattr(pool, attribute, True)
    with told(), current_pool(lambda: None), pytest.raises(InvalidFieldError, match=name):
        create(pytest.fail, pool)


def test_part_of_a_page_is_refused() -> None:
    with told(), current_pool(lambda: None), pytest.raises(InvalidFieldError, match="--max-total-tokens") as raised:
        mha_pool(tokens=63)
    assert raised.value.field == "max_total_tokens"


def test_no_daemon_is_said_at_start() -> None:
    with (
        told({"KVFERRY_RUNTIME_DIR": "/nowhere"}, served_model_name="tests"),
        current_pool(lambda: None),
        pytest.raises(Exception, match="/nowhere") as raised,
    ):
        mha_pool()
    assert getattr(raised.value, "code", None) == "DAEMON_LOST"


def test_settings_are_those_of_the_environment() -> None:
    assert settings({}) == (None, "", "daemon")
    given = {"KVFERRY_RUNTIME_DIR": "/run/k", "KVFERRY_SGLANG_POOL": "p", "KVFERRY_SGLANG_MEMORY": "engine"}
    assert settings(given) == ("/run/k", "p", "engine")


@pytest.mark.parametrize("value", ["", "Daemon", "both"])
def test_wrong_memory_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"{value!r}: say daemon or engine") as raised:
        settings({"KVFERRY_SGLANG_MEMORY": value})
    assert raised.value.field == "KVFERRY_SGLANG_MEMORY"


@pytest.mark.parametrize("name", ["a b", "x" * 200, "../p"])
def test_wrong_pool_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        settings({"KVFERRY_SGLANG_POOL": name})
    assert raised.value.field == "KVFERRY_SGLANG_POOL"
