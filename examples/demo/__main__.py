"""``make demo``: starts daemons and engines, routes prompts to them, and compares with plain ``generate()``.

With ``--retract`` it starts a single engine, whose requests take turns in a pool that is too small for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from examples.demo.cluster import Cluster, Node, check_possible, start_cluster, start_engine
from examples.demo.errors import DemoError
from examples.demo.messages import (
    Arrived,
    Done,
    FromEngine,
    Prefilled,
    Prompt,
    Ready,
    Restored,
    Retracted,
    Token,
)
from examples.demo.model import OFFLINE, check_installed, converted_model, load_tokenizer, token_bytes
from examples.demo.pressure import LEAST_NEW_TOKENS, tiers_config, too_few_pages
from examples.demo.processes import Child, failure, listen
from examples.demo.prompts import AT_LEAST, PAGE_SIZE, make_prompts
from examples.demo.report import Report, RequestFigures, Totals, retraction_table, table
from kvferry.protocol.ids import new_request_id

SILENCE_S = 600.0
"""Longer than any step on a slow machine; a process that dies is noticed immediately."""
POOL_TOKENS = 64 * 128
ENGINE_THREADS = 1
"""The same for all engines: otherwise tokens may differ."""
REFERENCES = 2
"""Processes that compute the reference, as many as engines before: one per core on the smallest machine."""
MOST_HOSTS = 3


class _Run(NamedTuple):
    """What every step of a run needs."""

    folder: Path
    model: Path
    cluster: Cluster


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 only if every token was identical."""
    options = _options(arguments)
    os.environ.update(OFFLINE)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        check_installed()
        check_possible(options.hosts)
        with contextlib.ExitStack() as stack:
            return _run(options, stack)
    except DemoError as error:
        if error.details:
            print(error.details)
        print(f"demo: failed: {error}", flush=True)
    except OSError as error:
        print(f"demo: failed: {error}", flush=True)
    except KeyboardInterrupt:
        print("demo: failed: interrupted", flush=True)
    return 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with status 2 if they contradict each other."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.transport is not None and (options.transport == "local") != (options.hosts == 1):
        parser.error("argument --transport: local is for --hosts 1, mooncake for more")
    if options.retract and options.hosts != 1:
        parser.error("argument --retract: requests take turns in one pool, which is on one host")
    if options.retract and options.max_new_tokens < LEAST_NEW_TOKENS:
        parser.error(f"argument --retract: needs --max-new-tokens {LEAST_NEW_TOKENS} or more")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo", description="Hand a real model's KV cache from prefill to decode."
    )
    at_least = _number_from(AT_LEAST)
    parser.add_argument("--prompts", type=at_least, default=AT_LEAST, metavar="N", help=f"how many, {AT_LEAST} or more")
    parser.add_argument("--max-new-tokens", type=_number_from(1), default=24, metavar="N", help="tokens a prompt (24)")
    parser.add_argument(
        "--hosts",
        type=int,
        choices=range(1, MOST_HOSTS + 1),
        default=1,
        help="1: one daemon (the default); 2: prefill and decode on separate hosts; 3: two pipeline stages prefill",
    )
    parser.add_argument("--transport", choices=("local", "mooncake"), help="local on one host, mooncake between hosts")
    parser.add_argument(
        "--retract",
        action="store_true",
        help="one engine whose pool is too small for all prompts: they take turns in it by offload and restore",
    )
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", action="store_true", help="keep the daemons running until Ctrl-C")
    parser.add_argument("--runtime-dir", type=Path, help="folder for the daemons' sockets (a new one)")
    return parser


def _number_from(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a number from {lowest}, not {text!r}")
        return int(text)

    return read


def _writable(text: str) -> Path:
    """Return the path of a file, checked to be writable before a minute is spent on its contents."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return file


def _run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    started = time.monotonic()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
    model = converted_model(_print)
    _print("loading the tokenizer and making prompts")
    tokenizer = load_tokenizer(model)
    made = make_prompts(tokenizer, options.prompts)
    prompts = [
        Prompt(request_id=new_request_id(), tokens=tuple(one.tokens), max_new_tokens=options.max_new_tokens)
        for one in made
    ]
    figures = {
        prompt.request_id: RequestFigures(number=number, shows=one.shows, prompt_tokens=len(one.tokens))
        for number, (prompt, one) in enumerate(zip(prompts, made, strict=True), 1)
    }
    report = Report(figures, tokenizer, retracts=options.retract)
    runtime_dir = (options.runtime_dir or folder / "run").absolute()
    config = tiers_config(prompts, PAGE_SIZE, PAGE_SIZE * token_bytes(model)) if options.retract else ""
    cluster = start_cluster(options.hosts, runtime_dir, folder, stack, config)
    for node in cluster.nodes:
        _print(f"the {node.daemon.name} serves in {node.runtime_dir} (pid {node.daemon.pid})")
    run = _Run(folder, model, cluster)
    (_retract if options.retract else _transfer)(run, prompts, report)
    _compare(run, prompts, report)
    totals = report.totals(time.monotonic() - started)
    print("\n".join((retraction_table if options.retract else table)(totals)))
    _end(options, cluster, totals)
    return 0 if totals.ok else 1


def _end(options: argparse.Namespace, cluster: Cluster, totals: Totals) -> None:
    """Write the figures, end the daemons unless ``--keep`` is set, and print the outcome."""
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(totals)) + b"\n")
    if options.keep:
        for node in cluster.nodes:
            stays = f"the {node.daemon.name} stays up: kvferry status --runtime-dir {node.runtime_dir}"
            _print(f"{stays}   (Ctrl-C ends it)")
    elif failed := [daemon for daemon in cluster.daemons if daemon.end()]:
        raise failure(failed)
    if options.retract:
        _print(f"retracted={totals.retracted} restored={totals.restored}")
    outcome = "ok" if totals.ok else "failed"
    print(
        f"demo: {outcome} prompts={totals.prompts} tokens={totals.tokens} identical={str(totals.identical).lower()}",
        flush=True,
    )
    if options.keep:
        _keep(cluster.daemons)


def _transfer(run: _Run, prompts: Sequence[Prompt], report: Report) -> None:
    """Send all prompts to all engines at once, and follow them to the last token."""
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(_engine(run, node, "prefill", run.cluster.prefill_arguments(stage)))
            for stage, node in enumerate(run.cluster.prefill)
        ]
        engines.append(stack.enter_context(_engine(run, run.cluster.decode, "decode", run.cluster.decode_arguments())))
        _follow(engines, run.cluster, prompts, report)


def _retract(run: _Run, prompts: Sequence[Prompt], report: Report) -> None:
    """Send all prompts to one engine, which has pages for about half of them."""
    pool_tokens = too_few_pages(prompts, PAGE_SIZE) * PAGE_SIZE
    _print(
        f"a pool of {pool_tokens // PAGE_SIZE} pages for prompts of {sum(len(one.tokens) for one in prompts)} tokens"
    )
    with _engine(run, run.cluster.decode, "retract", (), pool_tokens) as engine:
        _follow([engine], run.cluster, prompts, report)


def _follow(engines: Sequence[Child], cluster: Cluster, prompts: Sequence[Prompt], report: Report) -> None:
    """Wait until the engines are ready, send them the prompts, the last engine first, and process their lines."""
    _print(f"loading the model in {' and '.join(f'a {engine.name} (pid {engine.pid})' for engine in engines)}")
    loading = set(engines)
    for child, line in listen(engines, cluster.daemons, SILENCE_S):
        if isinstance(line, Ready):
            _print(f"the {child.name} is ready after {line.load_s:.1f} s")
            loading.discard(child)
            if not loading:
                for engine in reversed(engines):
                    engine.notify(prompts)
        else:
            _take(line, report)


def _take(line: FromEngine, report: Report) -> None:
    """Add an engine's line to the report."""
    if isinstance(line, Prefilled):
        report.prefilled(line)
    elif isinstance(line, Arrived):
        report.arrived(line)
    elif isinstance(line, Token):
        report.token(line)
    elif isinstance(line, Retracted):
        report.retracted(line)
    elif isinstance(line, Restored):
        report.restored(line)
    elif isinstance(line, Done):
        report.done(line)


def _compare(run: _Run, prompts: Sequence[Prompt], report: Report) -> None:
    """Compute the same prompts with plain ``generate()``."""
    _print("comparing with plain greedy generate()")
    by_length = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    with contextlib.ExitStack() as stack:
        children = []
        for number in range(REFERENCES):
            child = stack.enter_context(_reference(run, number + 1))
            child.notify(by_length[number::REFERENCES])
            children.append(child)
        for _, line in listen(children, run.cluster.daemons, SILENCE_S):
            if isinstance(line, Done):
                report.reference(line)


def _engine(run: _Run, node: Node, name: str, its_arguments: Sequence[str], pool_tokens: int = POOL_TOKENS) -> Child:
    arguments = [*_model_arguments(run), "--pool", f"demo-{name}", "--pool-tokens", str(pool_tokens), *its_arguments]
    return start_engine(node, f"{name} engine", f"examples.demo.{name}_engine", arguments, OFFLINE)


def _reference(run: _Run, number: int) -> Child:
    module = "examples.demo.reference_engine"
    return Child(f"reference engine {number}", module, _model_arguments(run), OFFLINE, run.folder)


def _model_arguments(run: _Run) -> list[str]:
    return ["--model", os.fspath(run.model), "--threads", str(ENGINE_THREADS)]


def _keep(daemons: Sequence[Child]) -> None:
    """Wait for Ctrl-C or SIGTERM.

    Raises:
        DemoError: a daemon ended by itself.
    """
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        # Daemons write nothing to standard output, and close it when they end.
        ended, _, _ = select.select([daemon.output for daemon in daemons], [], [])
        raise failure([daemon for daemon in daemons if daemon.output in ended])


def _print(text: str) -> None:
    print(f"demo: {text}", flush=True)


def _terminated(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
