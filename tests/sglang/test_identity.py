"""What must not share blocks shares none: adapters, salts, media, embeddings and weights, with SGLang's own requests.

Each pair differs in one thing; a pair that differs in nothing shares all, so that a case cannot pass by never sharing.
"""

from __future__ import annotations

import json
import pkgutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.kit.daemons import Daemon
from tests.sglang.in_process import Halves, Opened, halves, mha_pool, opened, polled

PAGE: Final = 16
PAGES: Final = 3
CONFIG: Final = "[tiers]\nhost_bytes = 67108864\n"
NAME: Final = "sql"
RECEIVERS: Final = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
ADAPTER: Final = {"r": 8, "lora_alpha": 16, "use_rslora": False, "target_modules": ["q_proj"]}


@pytest.fixture
def one(daemon: Daemon, name: str) -> Iterator[Opened]:
    """Return a server's storage, of a model of this test's own."""
    with opened(daemon.runtime_dir, name, served_model_name=name) as storage:
        yield storage


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write(tmp_path / "adapter")
    return tmp_path / "adapter"


def write(folder: Path, weights: bytes = b"weights", **config: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **config}))
    (folder / "adapter_model.safetensors").write_bytes(bytes(200_000) + weights + bytes(200_000))


def manager(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  SGLang's class
    """Return the adapters of a server that has just started, but for their weights."""
    monkeypatch.setattr(LoRAManager, "load_lora_weights", lambda *_: None)
    monkeypatch.setattr(LoRAManager, "load_lora_weights_from_tensors", lambda *_: None)
    monkeypatch.setattr(LoRAManager, "validate_new_adapter", lambda *_: None)
    adapters: Any = object.__new__(LoRAManager)
    adapters.base_hf_config, adapters.device = SimpleNamespace(vocab_size=1000), torch.device("cpu")
    adapters.configs, adapters.loras, adapters.lora_refs, adapters.num_pinned_loras = {}, {}, {}, 0
    return adapters


def loaded_at_start(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str = NAME) -> str:
    """Return the number of an adapter that a new server was told at its start."""
    number: str = LoRARef.deterministic_id(name, str(folder))
    ref = LoRARef(lora_id=number, lora_name=name, lora_path=str(folder), pinned=False)
    result = manager(monkeypatch).load_lora_adapter(ref)
    assert result.success, result.error_message
    return number


def loaded_from_tensors(monkeypatch: pytest.MonkeyPatch, value: float, **config: object) -> str:
    """Return the number of an adapter that a running server was given."""
    ref = LoRARef(lora_name=NAME, lora_path="__tensor__", pinned=False)
    tensors = {"a": torch.full((2, 2), value, dtype=torch.bfloat16)}
    result = manager(monkeypatch).load_lora_adapter_from_tensors(ref, tensors, {**ADAPTER, **config})
    assert result.success, result.error_message
    number: str = ref.lora_id
    return number


def request(*, token: int = 7, media: int | None = None, **told: object) -> Req:
    """Return a request as a scheduler makes it; ``media``: seed of an image in the middle of the prompt."""
    tokens = array("q", [token] * (PAGE * PAGES))
    if media is not None:
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.full((4, 4), float(media)))
        item.set_pad_value()
        tokens[PAGE : 2 * PAGE] = array("q", item.padding_sequence(PAGE))
    return Req("rid", "", tokens, SamplingParams(), **told)


def keys(of: Req) -> list[str]:
    """Return the keys of a request's pages, as SGLang's cache makes them."""
    key = RadixKey(of.origin_input_ids, of.extra_key, cache_salt=of.cache_salt)
    found: list[str] = get_storage_hash_str(key, page_size=PAGE)
    return found


def shared(one: Opened, first: Req, second: Req) -> int:
    """Store what a request has computed; return how many leading pages another one finds."""
    slots = one.take(PAGES)
    assert one.storage.batch_set_v1(keys(first), slots) == [True] * PAGES
    one.host.free(slots)
    found: int = one.storage.batch_exists(keys(second))
    return found


# -- the storage


def test_equal_requests_share_wherever_their_adapters_lie(
    one: Opened, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {"extra_key": "key", "cache_salt": "salt"}
    first = request(lora_id=loaded_at_start(monkeypatch, adapter), **told)
    write(tmp_path / "elsewhere")
    second = request(lora_id=loaded_at_start(monkeypatch, tmp_path / "elsewhere"), **told)
    assert shared(one, first, second) == PAGES
    assert shared(one, request(), request(lora_id=first.lora_id)) == 0


@pytest.mark.parametrize(
    "changed",
    [{"weights": b"tuned!!"}, {"lora_alpha": 32}, {"use_rslora": True}, {"r": 4}],
    ids=lambda changed: next(iter(changed)),
)
def test_an_adapter_that_was_trained_again_in_its_folder_shares_nothing(
    one: Opened, adapter: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    first = request(lora_id=loaded_at_start(monkeypatch, adapter))
    write(adapter, **changed)
    second = request(lora_id=loaded_at_start(monkeypatch, adapter))
    assert first.lora_id == second.lora_id
    assert shared(one, first, second) == 0


def test_an_adapter_that_changes_while_it_is_loaded_shares_nothing(
    one: Opened, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = request(lora_id=loaded_at_start(monkeypatch, adapter))
    adapters = manager(monkeypatch)
    monkeypatch.setattr(LoRAManager, "load_lora_weights", lambda *_: write(adapter, b"tuned!!"))
    ref = LoRARef(lora_id=first.lora_id, lora_name=NAME, lora_path=str(adapter), pinned=False)
    assert adapters.load_lora_adapter(ref).success
    torn = request(lora_id=first.lora_id)
    after = request(lora_id=loaded_at_start(monkeypatch, adapter))
    assert (shared(one, first, torn), shared(one, torn, after)) == (0, 0)


@pytest.mark.parametrize(("value", "alpha", "pages"), [(1.0, 16, PAGES), (2.0, 16, 0), (1.0, 32, 0)])
def test_adapters_of_tensors_share_where_these_are_equal(
    one: Opened, monkeypatch: pytest.MonkeyPatch, value: float, alpha: int, pages: int
) -> None:
    first = request(lora_id=loaded_from_tensors(monkeypatch, 1.0))
    second = request(lora_id=loaded_from_tensors(monkeypatch, value, lora_alpha=alpha))
    assert shared(one, first, second) == pages


def test_a_request_that_says_an_adapters_number_shares_nothing_with_it(
    one: Opened, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = loaded_at_start(monkeypatch, adapter)
    own = request(lora_id=lora)
    for claim in (lora, own.extra_key, f"={own.extra_key}"):
        assert shared(one, request(extra_key=claim), own) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"extra_key": "a"}, {"extra_key": "b"}),
        ({"extra_key": "ab"}, {"extra_key": "a", "cache_salt": "b"}),
        ({"extra_key": "a"}, {"cache_salt": "a"}),
        ({"extra_key": "lora:a"}, {"extra_key": "=lora:a"}),
        ({"token": 8}, {}),
    ],
    ids=str,
)
def test_other_salts_keys_and_tokens_share_nothing(one: Opened, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert shared(one, request(**first), request(**second)) == 0


def test_other_images_share_what_is_before_them(one: Opened) -> None:
    assert shared(one, request(media=1), request(media=1)) == PAGES
    assert shared(one, request(media=3), request(media=2)) == 1


def test_embeddings_in_place_of_tokens_are_never_cached() -> None:
    told = request(positional_embed_overrides=PositionalEmbeds([torch.ones(4)], [3]))
    assert told.skip_radix_cache_insert


# -- weights that are changed in the running server


class Weights:
    """The weights of a running server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have SGLang's manager do all but to write weights."""
        runner = SimpleNamespace(
            update_weights_from_disk=lambda *_, **__: (True, "done"),
            update_weights_from_tensor=lambda **_: (True, "done"),
            begin_weight_update=lambda: None,
            end_weight_update=lambda **_: None,
        )
        monkeypatch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
        monkeypatch.setattr(
            SchedulerWeightUpdaterManager, "__post_init__", lambda manager: setattr(manager, "tp_cpu_group", None)
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(
                weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=runner))],
                deserialize_own_rank=lambda _: {},
                model_runner=SimpleNamespace(model=torch.nn.Module()),
            ),
            draft_worker=None,
            memory_saver_adapter=SimpleNamespace(resume=lambda _: None),
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None, disaggregation_mode=None),
        )

    def from_disk(self, folder: Path, **told: object) -> None:
        assert self.manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=str(folder), **told)
        ).success

    def begin(self) -> None:
        assert self.manager.begin_weight_update(BeginWeightUpdateReqInput()).success

    def end(self) -> None:
        assert self.manager.end_weight_update(EndWeightUpdateReqInput()).success

    def resume(self, tag: str) -> None:
        self.manager.offload_tags.add(tag)
        self.manager.stashed_model_static_state = {"buffers": []}
        self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]))

    def from_tensors(self, version: str | None = None) -> None:
        """Load other ones, whose content nobody tells."""
        self.begin()
        told = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version=version)
        assert self.manager.update_weights_from_tensor(told).success
        self.end()


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    return Weights(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder of other weights."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "model.safetensors").write_bytes(bytes(100))
    return tmp_path / "step"


def of_others(folder: Path) -> Path:
    """Write other weights into a folder."""
    (folder / "model.safetensors").write_bytes(bytes(99) + b"1")
    return folder


def resumed(weights: Weights, tag: str, *, is_copied: bool) -> None:
    with get_context().override_server_args(enable_weights_cpu_backup=is_copied):
        weights.resume(tag)


CHANGES: Final[dict[str, Callable[[Weights, Path], None]]] = {
    "tensors": lambda weights, _: weights.from_tensors(),
    "tensors with a version": lambda weights, _: weights.from_tensors("5"),
    "not flushed for": lambda weights, folder: weights.from_disk(folder, flush_cache=False),
    "written past SGLang": lambda weights, _: weights.end(),
    "memory without a copy": lambda weights, _: resumed(weights, "weights", is_copied=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_may_be_others_share_nothing(one: Opened, weights: Weights, checkpoint: Path, change: str) -> None:
    weights.from_disk(checkpoint)
    for _ in range(2):
        if change == "written past SGLang":
            weights.begin()
        assert shared(one, request(), request()) == PAGES
        resumed(weights, "weights", is_copied=True)
        resumed(weights, "kv_cache", is_copied=False)
        assert one.storage.batch_exists(keys(request())) == PAGES
        CHANGES[change](weights, checkpoint)
        assert one.storage.batch_exists(keys(request())) == 0


def test_other_weights_in_the_same_folder_share_nothing(one: Opened, weights: Weights, checkpoint: Path) -> None:
    for count in (0, PAGES):
        assert one.storage.batch_exists(keys(request())) == 0
        weights.from_disk(checkpoint)
        assert one.storage.batch_exists(keys(request())) == count, "equal ones share"
        assert shared(one, request(), request()) == PAGES
        weights.from_tensors()
    weights.from_disk(of_others(checkpoint))
    assert one.storage.batch_exists(keys(request())) == 0


# -- prefill and decode


@pytest.fixture(scope="module")
def both(kept_daemon: Daemon) -> Iterator[Halves]:
    with halves(kept_daemon.runtime_dir, mha_pool, KVFERRY_SGLANG_POOL="identity") as one:
        yield one


def told_of(both: Halves, **told: Any) -> Req:  # noqa: ANN401
    """Return a request that has come to a server of a pair."""
    host, port = both.address.split(":")
    return request(bootstrap_host=host, bootstrap_port=int(port), **told)


def sender(both: Halves, of: Req) -> Any:  # noqa: ANN401  of SGLang's methods, too
    """Have prefill make its half of a request, of no pages, as its scheduler does."""
    queue = SimpleNamespace(
        _check_if_req_exceed_kv_capacity=lambda _: False,
        _process_req=lambda _: None,
        transfer_backend=TransferBackend.KVFERRY,
        kv_manager=both.prefill,
        bootstrap_port=of.bootstrap_port,
    )
    assert PrefillBootstrapQueue.create_sender(queue, of, 2)
    half: Any = of.disagg_kv_sender
    half.init(0, 0)
    return half


def receiver(both: Halves, of: Req) -> Any:  # noqa: ANN401
    """Have decode make its half."""
    queue = SimpleNamespace(queue=[], transfer_backend=TransferBackend.KVFERRY, kv_manager=both.decode)
    half = pkgutil.resolve_name(RECEIVERS)(queue, of).kv_receiver
    half.init(0)
    return half


def ended(sending: Any, receiving: Any) -> str:  # noqa: ANN401
    """Let both halves go to the end; return what decode says of it."""
    receiving.send_metadata([], 1)
    assert polled(sending, KVPoll.WaitingForInput)
    sending.send([])
    state = receiving.poll()
    while state not in {KVPoll.Success, KVPoll.Failed}:
        sending.poll()
        state = receiving.poll()
    return "" if state == KVPoll.Success else str(receiving.kv_mgr.failure_records[receiving.bootstrap_room])


def test_equal_adapters_pass_from_prefill_to_decode(
    both: Halves, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = both.new_room()
    write(tmp_path / "elsewhere")
    theirs = loaded_at_start(monkeypatch, adapter, "their-name")
    sending = sender(both, told_of(both, lora_id=theirs, bootstrap_room=room))
    ours = loaded_at_start(monkeypatch, tmp_path / "elsewhere")
    assert not ended(sending, receiver(both, told_of(both, lora_id=ours, bootstrap_room=room)))


@pytest.mark.parametrize("theirs", ["other", "none"])
def test_an_adapter_of_equal_name_and_path_does_not_pass(
    both: Halves, adapter: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    room = both.new_room()
    lora = None if theirs == "none" else loaded_at_start(monkeypatch, adapter)
    sending = sender(both, told_of(both, lora_id=lora, bootstrap_room=room))
    write(adapter, b"tuned!!")
    receiving = receiver(both, told_of(both, lora_id=loaded_at_start(monkeypatch, adapter), bootstrap_room=room))
    both.rows[1] = 5
    assert "MODEL_MISMATCH" in (why := ended(sending, receiving))
    assert "another adapter" in why
    assert (both.rows[1] == 5).all()


def test_weights_that_only_prefill_has_changed_do_not_pass(both: Halves, weights: Weights, checkpoint: Path) -> None:
    room = both.new_room()
    receiving = receiver(both, told_of(both, bootstrap_room=room))
    weights.from_disk(checkpoint)
    assert "other weights" in ended(sender(both, told_of(both, bootstrap_room=room)), receiving)


@pytest.mark.parametrize("version", ["5", None])
def test_weights_from_tensors_pass_where_both_call_them_alike(
    both: Halves, weights: Weights, version: str | None
) -> None:
    room = both.new_room()
    weights.from_tensors(version)
    sending = sender(both, told_of(both, bootstrap_room=room))
    weights.from_tensors(version)  # decode's, in this process too
    said = ended(sending, receiver(both, told_of(both, bootstrap_room=room)))
    assert not said if version else "weight_version" in said


def test_a_version_that_is_told_later_counts(both: Halves, weights: Weights) -> None:
    room, scheduler = both.new_room(), SimpleNamespace(record_weight_version_change=lambda **_: None)
    halves_of = []
    for make in (sender, receiver):
        weights.from_tensors()
        Scheduler.handle_update_weight_version(scheduler, UpdateWeightVersionReqInput(new_version="6"))
        halves_of.append(make(both, told_of(both, bootstrap_room=room)))
    assert not ended(*halves_of)
