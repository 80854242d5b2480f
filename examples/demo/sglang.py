"""The demo with SGLang's own servers: prefill and decode by one daemon, SGLang's router in front of them.

What they say is compared with a plain server of SGLang's, which runs first, so that no more than two run at once. Needs
the environment that ``make demo ENGINE=sglang`` makes.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

from examples.demo.messages import DemoError, Reference
from examples.demo.model import load_tokenizer
from examples.demo.processes import failure, start_daemon
from examples.demo.prompts import make_prompts
from examples.demo.report import MIB, Report, RequestFigures, outcome, say
from kvferry.clients import Client
from tests.sglang.folders import MODELS, SMOLLM2
from tests.sglang.servers import Reply, ServerError, running, running_pair, server

PAGE_SIZE: Final = 64
POOL_TOKENS: Final = 8192
OPTIONS: Final = ("--page-size", str(PAGE_SIZE))

Ask = Callable[[dict[str, object]], Reply]


def run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Run the demo; return 0 only if every token was identical. ``stack`` ends what was started.

    Raises:
        DemoError: a server or the daemon did not start, or a request failed.
    """
    started = time.monotonic()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
    if not (MODELS / SMOLLM2 / "config.json").is_file():
        raise DemoError(f"no model in {MODELS / SMOLLM2}; `make demo ENGINE=sglang` makes it")
    tokenizer = load_tokenizer(MODELS / SMOLLM2)
    prompts = make_prompts(tokenizer, options.prompts)
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    bodies: list[dict[str, object]] = [{"input_ids": one.tokens, "sampling_params": sampling} for one in prompts]
    figures = {
        str(number): RequestFigures(number=number, shows=one.shows, prompt_tokens=len(one.tokens))
        for number, one in enumerate(prompts, 1)
    }
    report = Report(figures, tokenizer)
    try:
        say("a plain server of SGLang computes the prompts, to compare with (each start takes half a minute) ...")
        plain = server(folder, "plain", tokens=POOL_TOKENS, options=OPTIONS)
        with running(plain):
            expected = _ask_all(lambda body: plain.post("/generate", body), bodies, lambda _number, _reply: None)
        runtime_dir = (options.runtime_dir or folder / "run").absolute()
        daemon = stack.enter_context(start_daemon("daemon", runtime_dir, folder, ""))
        say(f"the daemon serves in {runtime_dir} (pid {daemon.pid})")
        say("a prefill and a decode server start, then SGLang's router ...")
        with running_pair(folder, runtime_dir, tokens=POOL_TOKENS, options=OPTIONS) as pair:
            say(f"{len(bodies)} prompts go to the router at {pair.router.url}, all at once")

            def take(number: int, reply: Reply) -> None:
                figure = figures[str(number)]
                figure.tokens = reply.tokens
                print(
                    f"  {number:2} | {figure.shows}, {figure.prompt_tokens} tokens: {tokenizer.decode(reply.tokens)!r}"
                )
                report.take(Reference(str(number), tuple(expected[number - 1].tokens)))

            _ask_all(lambda body: pair.router.post("/generate", body), bodies, take)
            with Client.connect(runtime_dir, session=False) as client:
                counters = client.status().counters
    except ServerError as error:
        reason, _, log = str(error).partition(":\n")
        raise DemoError(reason, log) from error
    if daemon.status() is not None:
        raise failure([daemon])
    handed_over = counters.get("transfers.receive.ok", 0)
    say(
        f"{handed_over} requests handed over by the daemon, {counters.get('transfers.moved_bytes', 0) / MIB:.1f} MiB; "
        f"{time.monotonic() - started:.0f} s in all"
    )
    totals = report.totals(time.monotonic() - started)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(totals)) + b"\n")
    ok = totals.ok and handed_over >= len(prompts)
    say(outcome(totals, ok=ok))
    return 0 if ok else 1


def _ask_all(ask: Ask, bodies: list[dict[str, object]], take: Callable[[int, Reply], None]) -> list[Reply]:
    """Ask all at once, and return the replies; ``take`` has each as it comes, with its number from 1 on.

    Raises:
        DemoError: a request failed.
    """
    with ThreadPoolExecutor(len(bodies)) as threads:
        asked = {threads.submit(ask, body): number for number, body in enumerate(bodies, 1)}
        for future in as_completed(asked):
            if future.result().status != HTTPStatus.OK:
                raise DemoError(f"prompt {asked[future]}: HTTP {future.result().status}: {future.result().body}")
            take(asked[future], future.result())
    return [future.result() for future in asked]
