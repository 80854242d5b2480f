"""SGLang's pools of a model and of its draft model in one pool of the daemon's, without servers.

The peer is SGLang 0.5.23: ``Scheduler.init_memory_pools`` (managers/scheduler.py, line 1098), by which both are made
before anything reads either, and the lists of both one after another (disaggregation/prefill.py, line 301; decode.py,
line 646). ``test_ranks.py`` has a draft model at both sides, or at one, over ranks and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvferry.clients.sglang import identity
from kvferry.clients.sglang.retraction import Backup
from kvferry.protocol.errors import InvalidFieldError, ModelMismatchError
from tests import kit
from tests.kit.daemons import Daemon
from tests.sglang.in_process import (
    PAGE,
    Halves,
    buffers_of,
    chosen,
    halves,
    mha_pool,
    mla_pool,
    polled,
    reason,
    states_pool,
    told,
    windows_pool,
    with_draft,
)
from tests.sglang.test_hybrid_pools import TIER, TOKENS, slots, tensors_of

FROM: Final = [1, 2, 3, 4]
TO: Final = [40, 30, 20, 10]

Make = Callable[[], Any]
OTHER: Final[dict[str, Any]] = {"head_num": 4, "head_dim": 6, "v_head_dim": 4, "layer_num": 1}
other_heads = partial(MHATokenToKVPool, 256, PAGE, torch.bfloat16, **OTHER, device="cpu", enable_memory_saver=False)
other_latents = partial(MLATokenToKVPool, 256, PAGE, torch.float32, 12, 4, 1, "cpu", enable_memory_saver=False)
PAIRS: Final[dict[str, tuple[Make, Make]]] = {
    "mha": (mha_pool, mha_pool),
    "mha of other widths": (mha_pool, other_heads),
    "mla": (mla_pool, mla_pool),
    "mla of other widths": (mla_pool, other_latents),
    "mha beside mla": (mla_pool, other_heads),
    "mha beside windows": (windows_pool, mha_pool),
}


@pytest.fixture(scope="module", params=["daemon", "engine"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(pair: str, memory: str, kept_daemon: Daemon) -> Iterator[Halves]:
    environment = {"KVFERRY_SGLANG_POOL": f"{pair}-{memory}".replace(" ", "-"), "KVFERRY_SGLANG_MEMORY": memory}
    with halves(kept_daemon.runtime_dir, *PAIRS[pair], **environment) as one:
        yield one


def rows(pool: Any, page_ids: list[int]) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Return what SGLang finds in these pages, of each layer and role."""
    return [one.view(-1, PAGE, *one.shape[1:])[page_ids].clone() for one in buffers_of(pool)]


def fill(both: Halves) -> None:
    """Write random values to all pages of both models, as SGLang would."""
    for pool in (both.sglang, both.draft):
        for one in buffers_of(pool):
            one.copy_(torch.rand(one.shape))


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def transferred(both: Halves) -> None:
    """Have a request of four pages sent in two chunks, and received."""
    room = both.new_room()
    sender, receiver = both.sender(room, len(FROM), row=1), both.receiver(room)
    has_windows = bool(both.prefill.kv_args.state_types)
    receiver.send_metadata(np.array(TO, np.int32), 2, [np.array([9, 11])] if has_windows else None)
    assert polled(sender, KVPoll.WaitingForInput), reason(sender)
    sender.send(np.array(FROM[:2], np.int32))
    sender.send(np.array(FROM[2:], np.int32), [np.array([7, 5])] if has_windows else None)
    assert polled(receiver, KVPoll.Success), reason(receiver)
    assert polled(sender, KVPoll.Success)


def test_both_pools_are_as_sglang_makes_them(both: Halves, pair: str) -> None:
    with told():
        plain = [make() for make in PAIRS[pair]]
    for ours, theirs in zip((both.sglang, both.draft), plain, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert [(one.shape, one.dtype, one.stride(), one.device) for one in tensors_of(ours)] == [
            (one.shape, one.dtype, one.stride(), one.device) for one in tensors_of(theirs)
        ]
        assert ours.get_contiguous_buf_infos()[1:] == theirs.get_contiguous_buf_infos()[1:]
        part = getattr(ours, "full_kv_pool", ours)
        assert part.data_ptrs.tolist() == [one.data_ptr() for one in buffers_of(part)]
    lists = both.pool.lists
    told_of = [one.get_contiguous_buf_infos() for one in (both.sglang, both.draft)]
    for ours, *theirs in zip((lists.data_ptrs, lists.data_lens, lists.item_lens), *told_of, strict=True):
        assert [*ours] == [*theirs[0], *theirs[1]]


def test_pages_of_both_arrive(both: Halves) -> None:
    fill(both)
    for wiped in (None, both.draft):
        for one in buffers_of(wiped) if wiped else ():
            one.view(-1, PAGE, *one.shape[1:])[FROM] = 0
        sent = [rows(pool, FROM) for pool in (both.sglang, both.draft)]
        assert not equal(rows(both.draft, TO), sent[1])
        transferred(both)
        assert equal(rows(both.sglang, TO), sent[0])
        assert equal(rows(both.draft, TO), sent[1])


def test_a_retracted_requests_draft_comes_back_with_it() -> None:
    """SGLang itself copies the model's pages only."""
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool, other_heads) as both:
        fill(both)
        before = [rows(pool, FROM[:3]) for pool in (both.sglang, both.draft)]
        backup = both.sglang.get_cpu_copy(slots(FROM))
        assert isinstance(backup, Backup)
        assert len(slots(FROM)) == TOKENS
        fill(both)
        both.sglang.load_cpu_copy(backup, slots(TO))
        assert equal(rows(both.sglang, TO[:3]), before[0])
        assert equal(rows(both.draft, TO[:3]), before[1])


def test_copies_between_slots_are_tried_once_there_is_memory(
    kept_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang tries them as it makes a pool: the model's has no memory then."""
    tried: list[list[int]] = []
    monkeypatch.setattr(memory_pool, "copy_all_layer_kv_cache_func", lambda at, *_: tried.append(at.tolist()))
    make = partial(mha_pool, enable_kv_cache_copy=True)
    with halves(kept_daemon.runtime_dir, make, make, KVFERRY_SGLANG_POOL="copies") as both:
        pools = both.sglang, both.draft
        assert sorted(tried) == sorted([one.data_ptr() for one in buffers_of(pool)] for pool in pools)


REFUSED: Final[list[tuple[str, Make, Make]]] = [
    ("latent rows of a draft model beside heads of KV", mha_pool, mla_pool),
    ("windows or states of a draft model", mha_pool, windows_pool),
    ("windows or states of a draft model", mha_pool, states_pool),
    ("a draft model's 128 tokens in pages of 4 beside 256 in pages of 4", mha_pool, partial(mha_pool, 128)),
    ("a draft model without a KV pool of its own", mha_pool, lambda: None),
]


@pytest.mark.parametrize(("says", "model", "draft"), REFUSED)
def test_what_is_not_carried_is_refused_by_name(says: str, model: Make, draft: Make, tmp_path: Path) -> None:
    with (
        chosen({"KVFERRY_RUNTIME_DIR": str(tmp_path)}),
        pytest.raises(InvalidFieldError, match=f"does not carry {says} yet: choose another"),
    ):
        with_draft(model, draft)


def test_another_draft_model_is_refused_and_none_is_not() -> None:
    for theirs, ours in (("one", "one"), ("one", ""), ("", "one")):
        identity.check_draft(theirs, ours)
    with pytest.raises(ModelMismatchError, match="another draft model"):
        identity.check_draft("one", "other")


def test_a_draft_model_is_told_from_others_by_its_weights(tmp_path: Path) -> None:
    """The layers that a model has for it are among the model's own, which are compared anyway."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(64) + folder.name.encode())
    found = []
    for path in (None, model, draft):
        with told(model_path=str(model), speculative_draft_model_path=path and str(path)):
            identity.weights.begin()
            found.append(identity.draft_revision())
            assert (found[-1] == identity.weights.start) == (path == model)
    assert found[0] == ""
    (draft / "model.safetensors").write_bytes(b"other weights")
    with told(model_path=str(model), speculative_draft_model_path=str(draft)):
        found.append(identity.draft_revision())
    assert len({*found}) == len(found)
