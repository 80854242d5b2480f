"""The demo with vLLM's servers and the proxy of vLLM's tests, which is told of no connector in particular."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.demo.servers import POOL_TOKENS, EngineServers, run_servers
from tests.kit.folders import MODELS
from tests.kit.servers import Program
from tests.vllm.servers import COMPLETIONS, request, running_pair, server


def run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Run the demo; return 0 only if every token was identical. ``stack`` ends what was started.

    Raises:
        DemoError: a server or the daemon did not start, or a request failed.
    """
    return run_servers(
        EngineServers("vLLM", "vllm", "proxy", MODELS, COMPLETIONS, _body, _plain, _pair), options, stack
    )


def _body(tokens: Sequence[int], new: int) -> dict[str, object]:
    return request(tokens, new, ignore_eos=False)


def _plain(folder: Path) -> Program:
    return server(folder, "plain", tokens=POOL_TOKENS)


@contextlib.contextmanager
def _pair(folder: Path, runtime_dir: Path) -> Iterator[Program]:
    with running_pair(folder, runtime_dir, tokens=POOL_TOKENS) as pair:
        yield pair.front
