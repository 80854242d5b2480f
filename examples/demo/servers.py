"""The demo with an engine's own servers: prefill and decode by one daemon, the engine's router in front of them.

What they say is compared with a plain server, which runs first, so that no more than two run at once. Needs the
environment that ``make demo ENGINE=…`` makes.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from examples.demo.messages import DemoError, Reference
from examples.demo.model import load_tokenizer
from examples.demo.processes import failure, start_daemon
from examples.demo.prompts import make_prompts
from examples.demo.report import MIB, Report, RequestFigures, outcome, say
from kvferry.clients import Client
from tests.kit.folders import SMOLLM2
from tests.kit.servers import Program, Reply, ServerError, running

POOL_TOKENS: Final = 8192

Ask = Callable[[dict[str, object]], Reply]


class EngineServers(NamedTuple):
    """An engine's servers.

    Attributes:
        title: the engine, as its users call it.
        option: what ``make demo`` is told of it.
        front: what stands in front of prefill and decode.
        models: the folder of the models.
        path: of requests.
        body: a request for so many tokens after these.
        plain: a server that computes all by itself, with its log in this folder.
        pair: runs a prefill and a decode server by the daemon of a runtime directory, and returns what is in front.
    """

    title: str
    option: str
    front: str
    models: Path
    path: str
    body: Callable[[Sequence[int], int], dict[str, object]]
    plain: Callable[[Path], Program]
    pair: Callable[[Path, Path], AbstractContextManager[Program]]


def run_servers(engine: EngineServers, options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Run the demo; return 0 only if every token was identical. ``stack`` ends what was started.

    Raises:
        DemoError: a server or the daemon did not start, or a request failed.
    """
    started = time.monotonic()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
    model = engine.models / SMOLLM2
    if not (model / "config.json").is_file():
        raise DemoError(f"no model in {model}; `make demo ENGINE={engine.option}` makes it")
    tokenizer = load_tokenizer(model)
    prompts = make_prompts(tokenizer, options.prompts)
    bodies = [engine.body(one.tokens, options.max_new_tokens) for one in prompts]
    figures = {
        str(number): RequestFigures(number=number, shows=one.shows, prompt_tokens=len(one.tokens))
        for number, one in enumerate(prompts, 1)
    }
    report = Report(figures, tokenizer)
    try:
        say(f"a plain server of {engine.title} computes the prompts, to compare with (a start takes half a minute) ...")
        plain = engine.plain(folder)
        with running(plain):
            expected = _ask_all(lambda body: plain.post(engine.path, body), bodies, lambda _number, _reply: None)
        runtime_dir = (options.runtime_dir or folder / "run").absolute()
        daemon = stack.enter_context(start_daemon("daemon", runtime_dir, folder, ""))
        say(f"the daemon serves in {runtime_dir} (pid {daemon.pid})")
        say(f"a prefill and a decode server start, then {engine.title}'s {engine.front} ...")
        with engine.pair(folder, runtime_dir) as front:
            say(f"{len(bodies)} prompts go to the {engine.front} at {front.url}, all at once")

            def take(number: int, reply: Reply) -> None:
                figure = figures[str(number)]
                figure.tokens = reply.tokens
                print(
                    f"  {number:2} | {figure.shows}, {figure.prompt_tokens} tokens: {tokenizer.decode(reply.tokens)!r}"
                )
                report.take(Reference(str(number), tuple(expected[number - 1].tokens)))

            _ask_all(lambda body: front.post(engine.path, body), bodies, take)
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
