"""``kvferry demo``: starts a daemon and two engines, routes prompts to both, and compares with plain ``generate()``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from kvferry.clients.demo.messages import Arrived, Done, Prefilled, Prompt, Ready, Token
from kvferry.clients.demo.model import OFFLINE, check_installed, converted_model, load_tokenizer
from kvferry.clients.demo.processes import Child, listen, start_daemon
from kvferry.clients.demo.prompts import AT_LEAST, make_prompts
from kvferry.clients.demo.report import Report, RequestFigures, table
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import new_request_id

SILENCE_S = 180.0
POOL_TOKENS = 64 * 128
ENGINE_THREADS = 1


class _Run(NamedTuple):
    """What every step of a run needs."""

    folder: Path
    runtime_dir: Path
    model: Path


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 only where every token was identical."""
    options = _parser().parse_args(arguments)
    os.environ.update(OFFLINE)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        check_installed()
        with contextlib.ExitStack() as stack:
            return _run(options, stack)
    except KvferryError as error:
        print(f"demo: failed: {error}", flush=True)
    except KeyboardInterrupt:
        print("demo: failed: interrupted", flush=True)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvferry demo", description="Hand a real model's KV cache over.")
    parser.add_argument("--prompts", type=int, default=AT_LEAST, help=f"how many, at least {AT_LEAST}")
    parser.add_argument("--max-new-tokens", type=_positive, default=24, metavar="N", help="tokens a prompt (24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", action="store_true", help="leave the daemon up until Ctrl-C")
    parser.add_argument("--runtime-dir", type=Path, help="where the daemon's sockets go (a new folder)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    started = time.monotonic()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
    model = converted_model(_say)
    _say("loading the tokenizer and making prompts")
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
    report = Report(figures, tokenizer)
    run = _Run(folder, options.runtime_dir or folder / "run", model)
    daemon = stack.enter_context(start_daemon(run.runtime_dir, folder))
    _say(f"the daemon serves in {run.runtime_dir} (pid {daemon.pid})")
    _hand_off(run, prompts, report)
    _compare(run, prompts, report)
    totals = report.totals(time.monotonic() - started)
    print("\n".join(table(totals)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(totals)) + b"\n")
    if options.keep:
        _keep(run.runtime_dir)
    outcome = "ok" if totals.ok else "failed"
    print(
        f"demo: {outcome} prompts={totals.prompts} tokens={totals.tokens} identical={str(totals.identical).lower()}",
        flush=True,
    )
    return 0 if totals.ok else 1


def _hand_off(run: _Run, prompts: Sequence[Prompt], report: Report) -> None:
    """Give all prompts to both engines at once, and follow them to the last token."""
    with _engine(run, "prefill") as prefill, _engine(run, "decode") as decode:
        _say("loading the model in a prefill and a decode engine")
        for engine in (decode, prefill):
            engine.tell(prompts)
        for child, line in listen([prefill, decode], SILENCE_S):
            if isinstance(line, Ready):
                _say(f"the {child.name} engine (pid {child.pid}) is ready after {line.load_s:.1f} s")
            elif isinstance(line, Prefilled):
                report.prefilled(line)
            elif isinstance(line, Arrived):
                report.arrived(line)
            elif isinstance(line, Token):
                report.token(line)
            elif isinstance(line, Done):
                report.done(line)


def _compare(run: _Run, prompts: Sequence[Prompt], report: Report) -> None:
    """Let plain ``generate()`` compute the same prompts."""
    _say("comparing with plain greedy generate()")
    with _engine(run, "reference") as reference:
        reference.tell(prompts)
        for _, line in listen([reference], SILENCE_S):
            if isinstance(line, Done):
                report.reference(line)


def _engine(run: _Run, name: str) -> Child:
    arguments = ["--model", os.fspath(run.model), "--threads", str(ENGINE_THREADS)]
    arguments += ["--runtime-dir", os.fspath(run.runtime_dir)]
    arguments += ["--pool", f"demo-{name}", "--pool-tokens", str(POOL_TOKENS)]
    return Child(name, f"kvferry.clients.demo.{name}_engine", arguments, OFFLINE, run.folder)


def _keep(runtime_dir: Path) -> None:
    """Wait for Ctrl-C or SIGTERM."""
    _say(f"the daemon stays up: kvferry status --runtime-dir {runtime_dir}   (Ctrl-C ends it)")
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        signal.pause()


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def _terminated(_number: int, _frame: object) -> NoReturn:
    sys.exit(1)
