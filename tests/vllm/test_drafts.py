"""Engines with draft models: the draft's KV travels with the model's, and is found again with it.

Tokens are the model's, whatever the draft's KV is. The draft here computes what the model does, so with the right KV
most of its tokens are accepted, and fewer without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.clients.vllm.layers import NamedLayers
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.daemons import Daemon
from tests.kit.folders import MODELS, TINY_DEEPSEEK, TINY_MHA
from tests.vllm.in_process import (
    CHUNK,
    Asked,
    Engine,
    Pair,
    Served,
    begin_anew,
    by_hand,
    engine,
    metrics,
    prompt,
    reset,
    running_pair,
    settings,
    through_router,
)
from tests.vllm.servers import BLOCK

LENGTHS: Final = (5, 70, 130, 600)
NEW: Final = 40
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens"
COUNTED: Final[dict[str, Any]] = {"disable_log_stats": False, "max_num_batched_tokens": CHUNK}
"""Each engine computes the same chunks: at their ends vLLM's draft takes the prompt's last token for the next one."""


class Models(NamedTuple):
    """Folders: a model of one layer, a draft that computes the same from tokens alone, and another draft."""

    model: Path
    draft: Path
    other: Path

    def options(self, draft: Path | None = None, method: str = "eagle") -> dict[str, Any]:
        """Return the options of an engine that speculates."""
        told = {"method": method, "model": str(draft or self.draft), "num_speculative_tokens": 3}
        return {**COUNTED, "speculative_config": told}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Make them. An EAGLE draft has no norm of its input: embeddings of unit length need none."""
    plain, folder = MODELS / TINY_MHA, tmp_path_factory.mktemp("models")
    made = Models(folder / "model", folder / "draft", folder / "other")
    config = json.loads((plain / "config.json").read_text()) | {"num_hidden_layers": 1}
    every = load_file(plain / "model.safetensors")
    weights = {name: one for name, one in every.items() if ".layers." not in name}
    layer = {name: one for name, one in every.items() if name.startswith("model.layers.0.")}
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    width = config["hidden_size"]
    draft = {name.removeprefix("model."): one for name, one in layer.items() if "input_layernorm" not in name}
    draft["fc.weight"] = torch.eye(width, 2 * width)
    for path, what, tensors in (
        (made.model, {}, {**weights, **layer}),
        (made.draft, {"architectures": ["EagleLlamaForCausalLM"]}, draft),
        (made.other, {"architectures": ["EagleLlamaForCausalLM"]}, {**draft, "fc.weight": draft["fc.weight"] * 0.5}),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | what))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        for file in plain.glob("tokenizer*"):
            shutil.copy(file, path)
    return made


class Answer(NamedTuple):
    """New tokens, and how many of the draft's were accepted."""

    tokens: list[int]
    accepted: int


def asked(one: Engine, tokens: tuple[int, ...], **more: Any) -> Answer:  # noqa: ANN401  of Asked
    """Have a prompt computed, or what is left of it, and return what came of it."""
    before = one.call(metrics).get(ACCEPTED, 0)
    (answer,) = one.ask(Asked(tokens, NEW, **more))
    return Answer(answer.tokens, int(one.call(metrics).get(ACCEPTED, 0) - before))


@pytest.fixture(scope="module")
def alone(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Return what an engine answers that speculates alone; check that its tokens are those of one that does not."""
    folder, answers = tmp_path_factory.mktemp("alone"), []
    for more in (COUNTED, models.options()):
        with engine(folder, model=models.model, enable_prefix_caching=False, **more) as one:
            answers.append([asked(one, prompt(length)) for length in LENGTHS])
    plain, speculated = answers
    assert [one.tokens for one in speculated] == [one.tokens for one in plain]
    assert not any(one.accepted for one in plain)
    assert all(one.accepted > NEW // 2 for one in speculated), "the draft's tokens are accepted"
    return speculated


def handed_on(pair: Pair, length: int) -> Answer:
    """Have a prompt prefilled by one and decoded by the other; it must arrive."""
    (params,) = pair.prefilled(prompt(length))
    with pair.counts("transfers.receive.ok", 1):
        return asked(pair.decode, prompt(length), params=params)


@pytest.fixture(scope="module")
def shared(models: Models, kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two engines that both speculate."""
    folder = tmp_path_factory.mktemp("pair")
    options = {"model": models.model, "enable_prefix_caching": False, **models.options()}
    with running_pair(folder, kept_daemon.runtime_dir, **options) as made:
        yield made


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Return them; after each test nothing of it is left."""
    yield shared
    shared.assert_nothing_left()


def test_as_many_tokens_are_accepted_as_without_a_hand_over(pair: Pair, alone: list[Answer]) -> None:
    """Alone, at once, and where prefill computes in chunks."""
    assert [handed_on(pair, length) for length in LENGTHS] == alone


def test_the_drafts_blocks_are_those_of_prefill(pair: Pair) -> None:
    assert_blocks_travel(pair)


def assert_blocks_travel(pair: Pair) -> None:
    """Check each layer's full blocks of a prompt; of the last one decode computes the last token again."""
    tokens = prompt(3 * BLOCK + 7, seed=1)
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(tokens, 4, {"do_remote_decode": True}))
        pair.prefill.call(stepped_until_token, name)
        ours = pair.prefill.call(full_blocks, name)
        (answer,) = pair.prefill.wait(name)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(tokens, NEW, through_router(answer)))
        pair.decode.call(stepped_until_token, name)
        theirs = pair.decode.call(full_blocks, name)
        pair.decode.wait(name)
    assert len(ours) == len(theirs) == 2, "a layer of the model, and one of its draft"
    for one, other in zip(ours, theirs, strict=True):
        assert one.reshape(len(one), -1).any(axis=1).all()
        assert (one == other).all()


def test_a_wiped_draft_costs_acceptance_and_no_token(pair: Pair, alone: list[Answer]) -> None:
    """The control: what is accepted depends on the draft's rows that have travelled."""
    answer = handed_on_and_wiped(pair, LENGTHS[-1])
    assert answer.tokens == alone[-1].tokens
    assert answer.accepted < alone[-1].accepted


def handed_on_and_wiped(pair: Pair, length: int) -> Answer:
    """Have a prompt prefilled by one and decoded by the other, which loses the draft's rows once it has computed it."""
    (params,) = pair.prefilled(prompt(length))
    before = pair.decode.call(metrics)[ACCEPTED]
    with by_hand(pair.decode), pair.counts("transfers.receive.ok", 1):
        name = pair.decode.add(Asked(prompt(length), NEW, params))
        pair.decode.call(stepped_until_token, name)
        pair.decode.call(wiped, name)
        (answer,) = pair.decode.wait(name)
    return Answer(answer.tokens, int(pair.decode.call(metrics)[ACCEPTED] - before))


def stepped_until_token(served: Served, name: str) -> None:
    """Step until all of a prompt is computed."""
    served.step_until(lambda: served.request(name).num_output_tokens > 0)


def full_blocks(served: Served, name: str) -> list[npt.NDArray[Any]]:
    """Return of each layer the blocks that a request's prompt fills."""
    request = served.request(name)
    (ids,) = served.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return [
        layer[list(ids)[: request.num_prompt_tokens // served.scheduler.block_size]].numpy().copy()
        for layer in by_layers(served).values()
    ]


def wiped(served: Served, name: str) -> None:
    """Write zeros to the draft's rows of a request."""
    (ids,) = served.scheduler.kv_cache_manager.get_block_ids(served.request(name).request_id)
    *_, draft = by_layers(served).values()
    draft[list(ids)] = 0


def by_layers(served: Served) -> dict[str, torch.Tensor]:
    """Return vLLM's layers of KV by name, the draft's last."""
    layers = served.runner.compilation_config.static_forward_context
    return {name: layers[name].kv_cache for name in sorted(layers)}


# -- one side drafts, or with another draft


SIDES: Final = {"decode": (False, True), "prefill": (True, False)}


@pytest.mark.long
@pytest.mark.parametrize("drafting", SIDES)
def test_one_side_drafts(
    drafting: str, models: Models, alone: list[Answer], kept_daemon: Daemon, tmp_path: Path
) -> None:
    """The model's KV travels; of the draft's, which only prefill computes, acceptance alone depends."""
    prefill, decode = (models.options() if one else COUNTED for one in SIDES[drafting])
    with running_pair(
        tmp_path,
        kept_daemon.runtime_dir,
        model=models.model,
        prefill_options=prefill,
        decode_options=decode,
        enable_prefix_caching=False,
    ) as pair:
        answers = [handed_on(pair, length) for length in LENGTHS]
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        accepted = sum(one.accepted for one in answers)
        assert accepted < sum(one.accepted for one in alone) if drafting == "decode" else accepted == 0


@pytest.mark.long
def test_another_draft_at_prefill_is_said_and_computed_again(
    models: Models, alone: list[Answer], kept_daemon: Daemon, tmp_path: Path
) -> None:
    options = {"prefill_options": models.options(models.other), "decode_options": models.options()}
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, model=models.model, enable_prefix_caching=False, **options
    ) as pair:
        assert handed_on(pair, LENGTHS[-1]) == alone[-1]
        assert any(
            "the other server has computed the prompt with another draft model" in one for one in pair.decode.log()
        )


@pytest.mark.long
def test_a_draft_that_is_a_model_of_its_own(models: Models, kept_daemon: Daemon, tmp_path: Path) -> None:
    """Of the model itself as its draft all tokens are accepted, if it has the KV of the prompt."""
    options = models.options(models.model, "draft_model")
    with engine(tmp_path, model=models.model, enable_prefix_caching=False, **options) as one:
        want = [asked(one, prompt(length)) for length in LENGTHS]
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, model=models.model, enable_prefix_caching=False, **options
    ) as pair:
        assert [handed_on(pair, length) for length in LENGTHS] == want
    assert all(one.accepted > NEW // 2 for one in want)


@pytest.mark.long
def test_blocks_and_acceptance_of_an_mtp(kept_daemon: Daemon, tmp_path: Path) -> None:
    """Of latents, and a module that computes what the model does from tokens alone.

    Of latents tokens differ by the batch, so some more or fewer are accepted than without a hand-over.
    """
    told = {"method": "mtp", "num_speculative_tokens": 1}
    options = {**COUNTED, "attention_config": {"backend": "CPU_MLA"}, "block_size": 16, "speculative_config": told}
    options["max_num_batched_tokens"] = 1024  # this backend computes no chunks
    options |= {"model": mtp_model(tmp_path / "model"), "enable_prefix_caching": False}
    with engine(tmp_path, **options) as one:
        alone = sum(asked(one, prompt(length)).accepted for length in LENGTHS)
    with running_pair(tmp_path, kept_daemon.runtime_dir, **options) as pair:
        assert_blocks_travel(pair)
        wiped_rows = sum(handed_on_and_wiped(pair, length).accepted for length in LENGTHS)
        assert wiped_rows < alone / 2 < alone * 3 / 4 < sum(handed_on(pair, length).accepted for length in LENGTHS)


def mtp_model(folder: Path) -> Path:
    """Make a model of one layer with one MTP module."""
    plain = MODELS / TINY_DEEPSEEK
    shutil.copytree(plain, folder)
    config = json.loads((plain / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "first_k_dense_replace": 2}
    (folder / "config.json").write_text(json.dumps(config))
    every = load_file(plain / "model.safetensors")
    weights = {name: one for name, one in every.items() if ".layers." not in name or ".layers.0." in name}
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    width, module = config["hidden_size"], "model.layers.1."
    module_of = {name.replace(".layers.0.", ".layers.1."): one for name, one in weights.items() if ".layers.0." in name}
    module_of |= {f"{module}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    module_of[f"{module}eh_proj.weight"] = torch.eye(width, 2 * width)
    module_of[f"{module}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    module_of[f"{module}shared_head.head.weight"] = weights["lm_head.weight"]
    tensors = {name: one.clone() for name, one in (weights | module_of).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# -- the prefix cache


@pytest.mark.long
def test_drafts_of_the_prefix_cache(models: Models, alone: list[Answer], kept_daemon: Daemon, tmp_path: Path) -> None:
    """Found with the same draft alone; the last block is computed again, as vLLM does with its own cache."""
    tokens = prompt(LENGTHS[-1])
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    with ExitStack() as stack:

        def start(name: str, **more: Any) -> Engine:  # noqa: ANN401  vLLM's
            told = settings(kept_daemon, f"drafts-{name}")
            return stack.enter_context(engine(tmp_path, told, model=models.model, **more))

        def found(one: Engine) -> int:
            (answer,) = one.ask(Asked(tokens, NEW))
            one.drain()
            assert answer.tokens == alone[-1].tokens
            return answer.cached

        one, other = start("one", **models.options()), start("other", **models.options(models.other))
        assert [found(one), found(other)] == [0, 0]
        assert one.call(reset)
        one.ask("A step.", tokens=1)
        before = one.call(metrics)[ACCEPTED]
        assert found(one) == whole - BLOCK
        assert one.call(metrics)[ACCEPTED] - before == alone[-1].accepted
        assert found(start("without", **COUNTED)) == 0
        one.call(changed_draft)
        begin_anew(one)
        assert found(one) == 0, "its draft's weights have changed"


def changed_draft(served: Served) -> None:
    """Change a draft's weights, as a trainer might; its kernels have copies of the others'."""
    weights = served.runner.drafter.model.model.layers[0].post_attention_layernorm.weight
    assert weights.numel()
    weights.data.mul_(0.5)


# -- layer by layer


class Ring:
    """What steps were told that are filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def step(self, first: int, layers: int) -> LayerStep:
        return LayerStep(first_layer=first, layers=layers, event=first, value=1)

    def record(self, step: LayerStep, _stream: None) -> None:
        self.filled.append(step.first_layer)


@pytest.mark.parametrize(("drafts", "amid"), [(0, [0, 4]), (1, [0])])
def test_the_last_layers_go_when_the_draft_has_computed(drafts: int, amid: list[int]) -> None:
    """Their step has the draft's layers, which come after the model's."""
    ring: Any = Ring()
    signals = NamedLayers(6)
    signals.name(f"layer{number}" for number in range(6 + drafts))
    signals.begin(ring)
    for number in (*range(6 + drafts), *range(6, 6 + drafts)):  # a draft has several passes
        signals.computed(f"layer{number}")
    assert ring.filled == amid
    signals.end()
    assert ring.filled == [0, 4]
