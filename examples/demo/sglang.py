"""The demo with SGLang's servers and router."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from examples.demo.servers import POOL_TOKENS, EngineServers, run_servers
from tests.kit.folders import MODELS
from tests.kit.servers import Program
from tests.sglang.servers import running_pair, server

PAGE_SIZE: Final = 64
OPTIONS: Final = ("--page-size", str(PAGE_SIZE))


def run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Run the demo; return 0 only if every token was identical. ``stack`` ends what was started.

    Raises:
        DemoError: a server or the daemon did not start, or a request failed.
    """
    return run_servers(
        EngineServers("SGLang", "sglang", "router", MODELS, "/generate", _body, _plain, _pair), options, stack
    )


def _body(tokens: Sequence[int], new: int) -> dict[str, object]:
    return {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": new}}


def _plain(folder: Path) -> Program:
    return server(folder, "plain", tokens=POOL_TOKENS, options=OPTIONS)


@contextlib.contextmanager
def _pair(folder: Path, runtime_dir: Path) -> Iterator[Program]:
    with running_pair(folder, runtime_dir, tokens=POOL_TOKENS, options=OPTIONS) as pair:
        yield pair.front
