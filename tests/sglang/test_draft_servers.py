"""Pairs that speculate: the tokens are a plain server's, and so is how many of the draft's are accepted.

Tokens are the model's, whatever the draft's KV is. The draft here computes what the model does, so with the right KV
most of its tokens are accepted, and fewer without.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.folders import MODELS, TINY_MHA
from tests.kit.servers import Reply, prompt, running
from tests.sglang.servers import ENVIRONMENT, STUBS, Pair, RoomWatch, request, running_pair, server

LENGTHS: Final = (5, 70, 130, 600)
NEW: Final = 48
ON_CPU: Final = {
    "PYTHONPATH": f"{STUBS / 'drafts'}:{ENVIRONMENT['PYTHONPATH']}",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang's draft would have a C++ compiler run amid the first request
}
PAGES: Final = ("--page-size", "16")


class Models(NamedTuple):
    """The folders of a model of one layer, and of an EAGLE draft that computes the same from tokens alone."""

    model: Path
    draft: Path

    @property
    def options(self) -> list[str]:
        """Return the options of a server that speculates."""
        chain = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
        path = str(self.draft)
        return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", path, *chain]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Make both. An EAGLE draft has no norm of its input: embeddings of unit length need none."""
    plain, folder = MODELS / TINY_MHA, tmp_path_factory.mktemp("models")
    made = Models(folder / "model", folder / "draft")
    config = json.loads((plain / "config.json").read_text()) | {"num_hidden_layers": 1}
    every = load_file(plain / "model.safetensors")
    weights = {name: one for name, one in every.items() if ".layers." not in name}
    layer = {name: one for name, one in every.items() if name.startswith("model.layers.0.")}
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    width = config["hidden_size"]
    draft = {name.removeprefix("model."): one for name, one in layer.items() if "input_layernorm" not in name}
    draft |= {"fc.weight": torch.eye(width, 2 * width), "fc.bias": torch.zeros(width)}
    for path, what, tensors in (
        (made.model, {}, {**weights, **layer}),
        (made.draft, {"architectures": ["LlamaForCausalLMEagle"]}, draft),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | what))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        for file in plain.glob("tokenizer*"):
            shutil.copy(file, path)
    return made


class Answer(NamedTuple):
    """New tokens, and in how many passes the model has verified those that the draft proposed."""

    tokens: list[int]
    passes: int


def answer(reply: Reply) -> Answer:
    return Answer(reply.tokens, reply.body["meta_info"].get("spec_verify_ct", 0))


@pytest.fixture(scope="module")
def alone(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Return what a server says that speculates alone; check that its tokens are those of one that does not."""
    folder, answers = tmp_path_factory.mktemp("alone"), []
    for options in ([], models.options):
        one = server(folder, "plain", model=str(models.model), options=[*PAGES, *options], environment=ON_CPU)
        with running(one):
            answers.append([answer(one.post("/generate", request(prompt(length), NEW))) for length in LENGTHS])
    plain, speculated = answers
    assert [one.tokens for one in speculated] == [one.tokens for one in plain]
    assert not any(one.passes for one in plain)
    assert all(one.passes < 0.6 * NEW for one in speculated), "the draft's tokens are accepted"
    return speculated


SIDES_THAT_DRAFT: Final = {"both": (True, True), "decode": (False, True), "prefill": (True, False)}


@pytest.mark.long
@pytest.mark.parametrize("drafting", SIDES_THAT_DRAFT)
def test_tokens_and_how_many_are_accepted(
    drafting: str, models: Models, alone: list[Answer], kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    """Of the prompt's KV of the draft, which only prefill computes, acceptance alone depends."""
    prefill, decode = (models.options if one else [] for one in SIDES_THAT_DRAFT[drafting])
    with running_pair(
        tmp_path,
        kept_daemon.runtime_dir,
        model=str(models.model),
        options=PAGES,
        prefill_options=prefill,
        decode_options=decode,
        environment=ON_CPU,
    ) as pair:
        before = watch.arrived()
        answers = [answer(pair.generate(prompt(length), NEW)) for length in LENGTHS]
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        assert watch.arrived() - before == len(LENGTHS)
        if drafting == "both":
            assert [one.passes for one in answers] == [one.passes for one in alone]
            assert_draft_counts(pair, kept_daemon.runtime_dir, answers[-1])
        elif drafting == "decode":
            assert sum(one.passes for one in answers) > sum(one.passes for one in alone)


def assert_draft_counts(pair: Pair, runtime_dir: Path, expected: Answer) -> None:
    """Check that zeros in the draft's pages at prefill change how many of its tokens are accepted, and no token."""
    with Client.connect(runtime_dir) as other:
        pool = other.attach_pool("prefill")
        for role in ("k", "v"):
            pool.tensor("draft", role)[:, 1:] = 0
        pool.close()
    wiped = answer(pair.generate(prompt(LENGTHS[-1]), NEW))
    assert wiped.tokens == expected.tokens
    assert wiped.passes > expected.passes
    pair.prefill.flush()
    assert answer(pair.generate(prompt(LENGTHS[-1]), NEW)) == expected
