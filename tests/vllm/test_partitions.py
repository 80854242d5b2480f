"""Requests that must not share KV do not, whatever they differ in; equal ones do: each pair, at the scheduler's side.

The cases are those of vLLM's proposed suite for the partitioning of cache keys (its pull request 53769): adapters and
their versions, salts, media, embeddings in place of tokens; and what kvferry adds to vLLM's hashes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvferry.clients import Client, MhaSpec, ModelIdentity
from kvferry.clients.engine import Engine
from kvferry.clients.vllm.configuration import Configuration, Settings
from kvferry.clients.vllm.scheduler import Scheduler
from tests.kit.daemons import Daemon, soon
from tests.vllm.in_process import full_group

TOKENS: Final = 4
"""Of a block."""
BLOCKS: Final = 3
PROMPT: Final = tuple(range(1, BLOCKS * TOKENS + 2))
WIDTH: Final = 8
SPEC: Final = MhaSpec(
    layers=1, tokens=256 * TOKENS, page_size=TOKENS, dtype="float32", kv_heads=1, head_dim=4, joined=True
)
_NUMBERS: Final = itertools.count(1)
_NUMBERED: Final[dict[Path, int]] = defaultdict(lambda: 10 * next(_NUMBERS))
"""Where a test's adapters are, and from which number on they are counted: each test has its own."""

Make = Callable[[Path], Any]
"""Makes a request in a folder; what it writes there replaces what another one has written."""


class Side:
    """The scheduler's side of an engine, and what its worker would do."""

    def __init__(self, runtime_dir: Path, name: str) -> None:
        told = Configuration(Settings(), name, name, 1, TOKENS, is_producer=True, is_consumer=True)
        model = ModelIdentity(name="model", revision="weights")
        self.engine = Engine(f"{name}-scheduler", str(runtime_dir), instance=name)
        with self.engine.client() as client:
            client.create_pool(name, SPEC, model=model)
            self._pages = client.allocate(name, BLOCKS)
        self.scheduler = Scheduler(self.engine, told, [full_group(TOKENS)], TOKENS, "127.0.0.1", None)
        self._pool = name

    def computed(self, request: Any, *, local: int = 0) -> Any:  # noqa: ANN401  vLLM's
        """Have a request computed in one step, and what it stores stored; return the step's work.

        ``local``: how many tokens vLLM's own prefix cache has.
        """
        self.scheduler.came(request)
        self.found(request, ends=False, local=local)
        work = self.scheduler.work(step_of(request, [int(one) for one in self._pages]))
        with self.engine.client() as client:
            for one in work.stores:
                client.wait_done(client.store(self._pool, one.names, self._pages[: len(one.names)], parent=one.parent))
        self.scheduler.ended(request, is_complete=False)
        self.engine.poll()
        return work

    def found(self, request: Any, *, ends: bool = True, local: int = 0) -> int:  # noqa: ANN401  vLLM's
        """Return how many blocks of a request are found."""
        answers: list[int] = []

        def is_answered() -> bool:
            tokens, _ = self.scheduler.matched(request, local)
            answers.extend([] if tokens is None else [tokens])
            self.scheduler.work(step_of())
            return tokens is not None

        assert soon(is_answered)
        if ends:
            self.scheduler.ended(request, is_complete=False)
            self.engine.poll()
        return answers[0] // TOKENS

    def prompt_told(self, request: Any) -> bytes:  # noqa: ANN401  vLLM's
        """Return what decode would compare a prompt with."""
        request.kv_transfer_params = {"do_remote_decode": True}
        return bytes(self.computed(request).sends[-1].prompt)


def step_of(request: Any = None, pages: Sequence[int] = ()) -> Any:  # noqa: ANN401  vLLM's
    """Return what vLLM's scheduler says of a step that computes all of a prompt, or nothing."""
    name = "" if request is None else request.request_id
    new = SimpleNamespace(req_id=name, block_ids=(pages,), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=[new] if name else [],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: request.num_prompt_tokens} if name else {},
        preempted_req_ids=None,
    )


@pytest.fixture(scope="module")
def sides(kept_daemon: Daemon) -> Iterator[tuple[Side, Side]]:
    """Return two engines of one model."""
    with contextlib.ExitStack() as stack:
        made = [Side(kept_daemon.runtime_dir, name) for name in ("first", "second")]
        for one in made:
            stack.callback(one.scheduler.close)
        yield made[0], made[1]


@pytest.fixture(autouse=True)
def _forget(kept_daemon: Daemon) -> None:
    """Have nothing cached: what lookups have pinned stays until their engine has said that it gives them back."""
    with Client.connect(kept_daemon.runtime_dir) as client:

        def is_empty() -> bool:
            client.evict_cached()
            return not list(client.cached_blocks())

        assert soon(is_empty)


# -- requests


def request_of(tokens: tuple[int, ...] | None = PROMPT, **more: Any) -> Any:  # noqa: ANN401  vLLM's
    """Return a request of vLLM's own, with vLLM's own hashes."""
    init_none_hash(sha256_cbor)
    return Request(
        f"request-{next(_NUMBERS)}",
        None if tokens is None else list(tokens),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(TOKENS, sha256_cbor),
        **more,
    )


def plain(_: Path) -> Any:  # noqa: ANN401  vLLM's
    """Return a request of tokens alone."""
    return request_of()


def salted(salt: str) -> Make:
    """Return what makes requests with a salt."""
    return lambda _: request_of(cache_salt=salt)


def adapted(
    name: str = "adapter",
    weights: bytes = b"weights",
    number: int = 1,
    folder: str = "adapter",
    config: Mapping[str, Any] | None = None,
    **more: Any,  # noqa: ANN401  vLLM's
) -> Make:
    """Return what makes requests with an adapter, having written it."""

    def make(path: Path) -> Any:  # noqa: ANN401  vLLM's
        where = path / folder
        where.mkdir(exist_ok=True)
        written = {"r": 8, "lora_alpha": 16, "use_rslora": False, **(config or {})}
        for file, content in (
            ("adapter_config.json", json.dumps(written).encode()),
            ("adapter_model.safetensors", weights),
        ):
            if not (where / file).exists() or (where / file).read_bytes() != content:
                (where / file).write_bytes(content)
        return request_of(lora_request=LoRARequest(name, _NUMBERED[path] + number, str(where), **more))

    return make


def seen(*media: tuple[str, int, float]) -> Make:
    """Return what makes requests with images: of each what vLLM calls it, where it is, and what it shows."""

    def make(_: Path) -> Any:  # noqa: ANN401  vLLM's
        features = []
        for identifier, offset, value in media:
            element = MultiModalFieldElem(data=torch.full((2, 3), value), field=MultiModalBatchedField())
            features.append(
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem({"pixel_values": element}),
                    modality="image",
                    identifier=identifier,
                    mm_position=PlaceholderRange(offset=offset, length=2),
                    mm_hash=identifier,
                )
            )
        return request_of(mm_features=features)

    return make


def embedded(seed: int, tokens: tuple[int, ...] | None = None, mask: list[bool] | None = None) -> Make:
    """Return what makes requests with embeddings in place of all tokens, or of some."""
    random = torch.randn(len(PROMPT), WIDTH, generator=torch.Generator().manual_seed(seed))
    return lambda _: request_of(tokens, prompt_embeds=random, prompt_is_token_ids=mask)


MIXED: Final = [at % 2 == 0 for at in range(len(PROMPT))]


class Pair(NamedTuple):
    """Two requests whose KV differs."""

    one: Make
    other: Make
    has_other_kv: bool = True
    """Else the KV is the same, and only whose it is differs."""
    shared: int = 0
    """Blocks that are the same in both."""


PAIRS: Final = {
    "tokens": Pair(plain, lambda _: request_of((9, *PROMPT[1:]))),
    "salt": Pair(salted("a"), salted("b"), has_other_kv=False),
    "salt or none": Pair(salted("a"), plain, has_other_kv=False),
    "adapter or none": Pair(adapted(), plain),
    "adapter's folder": Pair(adapted(), adapted("adapter", b"others", 2, "other")),
    "adapter loaded in place": Pair(adapted(), adapted(weights=b"others!", load_inplace=True)),
    "adapter loaded in place again": Pair(adapted(load_inplace=True), adapted(weights=b"others!", load_inplace=True)),
    "adapter loaded under another number": Pair(adapted(), adapted(weights=b"others!", number=2)),
    "adapter's alpha": Pair(adapted(), adapted(config={"lora_alpha": 32}, load_inplace=True)),
    "adapter's rslora": Pair(adapted(), adapted(config={"use_rslora": True}, load_inplace=True)),
    "adapter's target modules": Pair(adapted(), adapted(config={"target_modules": ["q"]}, load_inplace=True)),
    "media": Pair(seen(("a" * 64, 0, 1.0)), seen(("b" * 64, 0, 2.0))),
    "place of media": Pair(seen(("a" * 64, 0, 1.0)), seen(("a" * 64, 1, 1.0))),
    "second of two media": Pair(
        seen(("a" * 64, 0, 1.0), ("b" * 64, 6, 2.0)), seen(("a" * 64, 0, 1.0), ("c" * 64, 6, 3.0)), shared=1
    ),
    "media in another order": Pair(
        seen(("a" * 64, 0, 1.0), ("b" * 64, 6, 2.0)), seen(("b" * 64, 0, 2.0), ("a" * 64, 6, 1.0))
    ),
    "media that a client named": Pair(seen(("cat", 0, 1.0)), seen(("cat", 0, 2.0))),
    "media that vLLM counts": Pair(seen(("renderer0-mm-1-image-0", 0, 1.0)), seen(("renderer0-mm-1-image-0", 0, 2.0))),
    "media whose names are joined alike": Pair(
        seen(("ab", 0, 1.0), ("c", 6, 2.0)), seen(("a", 0, 3.0), ("bc", 6, 4.0))
    ),
    "embeddings": Pair(embedded(1), embedded(2)),
    "embeddings or tokens": Pair(embedded(1), plain),
    "embeddings among tokens": Pair(embedded(1, PROMPT, MIXED), embedded(2, PROMPT, MIXED)),
    "adapter beside a salt": Pair(
        lambda path: with_salt(adapted()(path)),
        lambda path: with_salt(adapted(weights=b"others!", load_inplace=True)(path)),
    ),
}


def with_salt(request: Any) -> Any:  # noqa: ANN401  vLLM's
    """Return the same request with a salt."""
    return request_of(lora_request=request.lora_request, cache_salt="salt")


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_is_not_found(sides: tuple[Side, Side], name: str, tmp_path: Path) -> None:
    pair = PAIRS[name]
    sides[0].computed(pair.one(tmp_path))
    assert [one.found(pair.other(tmp_path)) for one in sides] == [pair.shared] * 2


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_equal_is_found(sides: tuple[Side, Side], name: str, tmp_path: Path) -> None:
    """The control: what finds nothing mixes nothing. Decode tells prompts from each other, and knows its own."""
    pair = PAIRS[name]
    told = []
    for make in pair[:2]:
        sides[0].computed(make(tmp_path))
        assert [one.found(make(tmp_path)) for one in sides] == [BLOCKS, BLOCKS]
        told.append({one.prompt_told(make(tmp_path)) for one in sides})
    assert [len(one) for one in told] == [1, 1]
    assert (told[0] != told[1]) == pair.has_other_kv


LOCAL: Final = tuple(
    name for name in PAIRS if name.startswith(("adapter loaded in place", "adapter's alpha", "media that a"))
)
"""Pairs that vLLM's own prefix cache cannot tell from each other."""


@pytest.mark.parametrize("name", LOCAL)
def test_what_vllms_own_cache_mixes_goes_no_further(sides: tuple[Side, Side], name: str, tmp_path: Path) -> None:
    first, second = sides
    first.computed(PAIRS[name].one(tmp_path))
    first.computed(PAIRS[name].other(tmp_path), local=BLOCKS * TOKENS)
    assert [one.found(PAIRS[name].other(tmp_path)) for one in (second, first)] == [0, 0]


def test_what_vllms_own_cache_has_of_one_content_is_stored(
    sides: tuple[Side, Side], kept_daemon: Daemon, tmp_path: Path
) -> None:
    """The control."""
    first, second = sides
    first.computed(adapted()(tmp_path))
    with Client.connect(kept_daemon.runtime_dir) as client:
        client.evict_cached()
    first.computed(adapted()(tmp_path), local=BLOCKS * TOKENS)
    assert second.found(adapted()(tmp_path)) == BLOCKS


# -- weights that may have changed


class Pool:
    """What vLLM's block pool shows of its prefix cache."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.cached_block_hash_to_block = object()


def look_is(one: Side, weights: bytes, request: Any) -> None:  # noqa: ANN401  vLLM's
    """Have ranks look at the weights, for which a request waits."""
    assert one.scheduler.matched(request, 0) == (None, False)
    one.scheduler.looked({0: (one.scheduler.work(step_of()).look, weights)})
    one.scheduler.ended(request, is_complete=False)


@pytest.fixture
def watched(kept_daemon: Daemon) -> Iterator[tuple[Side, Pool]]:
    """Return an engine whose own prefix cache a test resets."""
    one = Side(kept_daemon.runtime_dir, f"watched-{next(_NUMBERS)}")
    pool: Any = Pool()
    one.scheduler.watch(pool)
    yield one, pool
    one.scheduler.close()


def test_a_request_waits_until_the_weights_were_looked_at(watched: tuple[Side, Pool], tmp_path: Path) -> None:
    """What ranks say of an earlier look does not count."""
    one, pool = watched
    one.computed(plain(tmp_path))
    for look in (1, 2):
        pool.reset()
        request = plain(tmp_path)
        if look == 1:
            assert one.scheduler.work(step_of()).look == 0, "vLLM may be paused, for weights that are about to change"
        assert one.scheduler.matched(request, 0) == (None, False)
        assert [one.scheduler.work(step_of()).look for _ in range(2)] == [look, 0]
        one.scheduler.looked({0: (look - 1, b"")})
        assert one.scheduler.matched(request, 0) == (None, False)
    one.scheduler.looked({0: (look, b"")})
    assert one.found(request) == BLOCKS


def test_other_weights_find_nothing(watched: tuple[Side, Pool], sides: tuple[Side, Side], tmp_path: Path) -> None:
    one, pool = watched
    one.computed(plain(tmp_path))
    assert one.scheduler.clear()
    sides[0].computed(plain(tmp_path))
    pool.reset()
    look_is(one, b"others", plain(tmp_path))
    assert one.found(plain(tmp_path)) == 0
    one.computed(plain(tmp_path))
    assert one.found(plain(tmp_path)) == BLOCKS
    assert sides[1].found(plain(tmp_path)) == BLOCKS, "the control: those of the start find theirs"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_was_begun_with_other_weights_is_not_stored(
    watched: tuple[Side, Pool], tmp_path: Path, *, is_preempted: bool
) -> None:
    """Nor is it taken for a prompt of these; one that is preempted begins anew."""
    one, pool = watched
    request = plain(tmp_path)
    request.kv_transfer_params = {"do_remote_decode": True}
    one.found(request, ends=False)
    pool.reset()
    look_is(one, b"others", plain(tmp_path))
    if is_preempted:
        one.found(request, ends=False)
    first, second = (one.scheduler.work(step_of(request, [1, 2, 3, 4])) for _ in range(2))
    assert [len(names) for _, _, _, names, _ in first.stores] == [BLOCKS] * is_preempted
    prompts = {first.sends[0].prompt, one.prompt_told(plain(tmp_path))}
    assert (len(prompts) == 1, second.sends) == (is_preempted, [])
    one.scheduler.ended(request, is_complete=False)
