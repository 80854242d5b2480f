"""The demo's router: starts daemons and engines, hands prompts out, and compares with plain ``generate()``.

With several hosts the last one decodes, and each of the others prefills one pipeline stage of the model; each has a
daemon. When requests are to be retracted there is a single engine, whose pool is too small for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from examples.demo import decode, prefill, retract
from examples.demo.engine import THREADS, Setup
from examples.demo.hosts import Host, hosts
from examples.demo.messages import Prompt, Ready, Reference, Tell
from examples.demo.model import converted_model, generate, load_config, load_model, load_tokenizer, token_bytes
from examples.demo.processes import SPAWN, Child, failure, listen, start_daemon
from examples.demo.prompts import PAGE_SIZE, make_prompts
from examples.demo.report import Report, RequestFigures, outcome, say
from kvferry.clients import new_request_id

PEER_PORT: Final = 7801
STAGE_PORT: Final = 7802
POOL_PAGES: Final = 64
SILENCE_S: Final = 600.0
"""Longer than any step on a slow machine; a process that dies is noticed immediately."""
REFERENCES: Final = 2
"""Processes that compute the reference, as many as engines before: one per core on the smallest machine."""


class Node(NamedTuple):
    """A daemon, and where it and its engines run. ``host`` is None for this host."""

    runtime_dir: Path
    daemon: Child
    host: Host | None = None

    def engine(self, name: str, main: Callable[..., None], setup: Setup, *arguments: object) -> Child:
        """Start an engine beside the daemon."""
        return Child(called(f"{name} engine", self.host), main, setup, *arguments, host=self.host)


class Router:
    """One run of the demo, with its daemons."""

    def __init__(self, folder: Path, model: Path, prompts: Sequence[Prompt], report: Report) -> None:
        """Serve these prompts; ``folder`` is for logs and configurations."""
        self.nodes: list[Node] = []
        self._folder = folder
        self._model = model
        self._prompts = prompts
        self._report = report

    @property
    def daemons(self) -> list[Child]:
        """Return all daemons."""
        return [node.daemon for node in self.nodes]

    def start_daemons(self, count: int, runtime_dir: Path, config: str, stack: contextlib.ExitStack) -> None:
        """Start a daemon, or with several hosts one on each; ``stack`` ends them.

        Raises:
            DemoError: a daemon does not start.
            OSError: the hosts cannot be made.
        """
        for host in [None] if count == 1 else stack.enter_context(hosts(count)):
            folder, own = (one / f"host-{host.number}" if host else one for one in (self._folder, runtime_dir))
            folder.mkdir(exist_ok=True)
            daemon = start_daemon(called("daemon", host), own, folder, network_config(host) if host else config, host)
            self.nodes.append(Node(own, stack.enter_context(daemon), host))
            say(f"the {daemon.name} serves in {own} (pid {daemon.pid})")

    def transfer(self) -> None:
        """Send all prompts to all engines at once, and follow them to the last token."""
        *stages, last = self.nodes if len(self.nodes) > 1 else self.nodes * 2
        first_stage = stages[0].host.address if stages[0].host else "", STAGE_PORT
        sources = [peer_address(node.host) for node in stages if node.host]
        together = SPAWN.Barrier(len(stages) + 1)
        with contextlib.ExitStack() as stack:
            engines = []
            for number, node in enumerate(stages):
                setup = self._setup(node, "prefill", POOL_PAGES)
                setup = setup._replace(together=together, stage=number, stages=len(stages))
                engines.append(node.engine("prefill", prefill.run, setup, self._prompts, first_stage))
                stack.enter_context(engines[-1])
            setup = self._setup(last, "decode", POOL_PAGES)._replace(together=together)
            engines.append(last.engine("decode", decode.run, setup, self._prompts, len(stages), sources))
            stack.enter_context(engines[-1])
            self._follow(engines)

    def retract(self) -> None:
        """Send all prompts to one engine, which has pages for about half of them."""
        (node,) = self.nodes
        count = retract.too_few_pages(self._prompts, PAGE_SIZE)
        say(f"a pool of {count} pages for prompts of {sum(len(one.tokens) for one in self._prompts)} tokens")
        with node.engine("retract", retract.run, self._setup(node, "retract", count), self._prompts) as engine:
            self._follow([engine])

    def compare(self) -> None:
        """Compute the same prompts with plain ``generate()``."""
        say("comparing with plain greedy generate()")
        by_length = sorted(self._prompts, key=lambda prompt: len(prompt.tokens))
        with contextlib.ExitStack() as stack:
            references = [
                stack.enter_context(Child(f"reference {number + 1}", compute_reference, self._model, some))
                for number in range(REFERENCES)
                if (some := by_length[number::REFERENCES])
            ]
            for _, message in listen(references, self.daemons, SILENCE_S):
                self._report.take(message)

    def keep(self) -> None:
        """Wait for Ctrl-C or SIGTERM.

        Raises:
            DemoError: a daemon ended by itself.
        """
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            ended = connection.wait([daemon.sentinel for daemon in self.daemons])
            raise failure([daemon for daemon in self.daemons if daemon.sentinel in ended])

    def end_daemons(self) -> None:
        """End the daemons.

        Raises:
            DemoError: one of them did not end well.
        """
        if failed := [daemon for daemon in self.daemons if daemon.end()]:
            raise failure(failed)

    def _setup(self, node: Node, name: str, page_count: int) -> Setup:
        return Setup(self._model, node.runtime_dir, f"demo-{name}", page_count * PAGE_SIZE)

    def _follow(self, engines: Sequence[Child]) -> None:
        """Report what the engines tell, until all of them have ended."""
        say(f"loading the model in {' and '.join(f'a {engine.name} (pid {engine.pid})' for engine in engines)}")
        for engine, message in listen(engines, self.daemons, SILENCE_S):
            if isinstance(message, Ready):
                say(f"the {engine.name} is ready after {message.load_s:.1f} s")
            else:
                self._report.take(message)


def called(what: str, host: Host | None) -> str:
    """Return ``what``, with the host's number if there are several hosts."""
    return f"{what} of host {host.number}" if host else what


def peer_address(host: Host) -> str:
    """Return the address at which other hosts' daemons reach this one's."""
    return f"tcp://{host.address}:{PEER_PORT}"


def network_config(host: Host) -> str:
    """Return the configuration of a host's daemon, as TOML: its network is this demo's alone, and needs no keys."""
    peers = f'[peers]\nlisten = "{peer_address(host)}"\ninsecure = true\n'
    return f'{peers}\n[network]\ntransport = "mooncake"\n'


def compute_reference(tell: Tell, model: Path, prompts: Sequence[Prompt]) -> None:
    """Be a process that computes prompts with plain ``generate()``, one after another."""
    loaded = load_model(model, THREADS)
    for prompt in prompts:
        tell(Reference(prompt.request_id, tuple(generate(loaded, prompt.tokens, prompt.max_new_tokens))))


def run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Run the demo; return 0 only if every token was identical. ``stack`` ends what was started."""
    started = time.monotonic()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
    model = converted_model(say)
    say("loading the tokenizer and making prompts")
    tokenizer = load_tokenizer(model)
    prompts, figures = [], {}
    for number, one in enumerate(make_prompts(tokenizer, options.prompts), 1):
        prompt = Prompt(new_request_id(), tuple(one.tokens), options.max_new_tokens)
        prompts.append(prompt)
        figures[prompt.request_id] = RequestFigures(number=number, shows=one.shows, prompt_tokens=len(one.tokens))
    report = Report(figures, tokenizer, retracts=options.retract)
    router = Router(folder, model, prompts, report)
    runtime_dir = (options.runtime_dir or folder / "run").absolute()
    page_bytes = PAGE_SIZE * token_bytes(load_config(model))
    config = retract.tiers_config(prompts, PAGE_SIZE, page_bytes) if options.retract else ""
    router.start_daemons(options.hosts, runtime_dir, config, stack)
    (router.retract if options.retract else router.transfer)()
    router.compare()
    totals = report.totals(time.monotonic() - started)
    print("\n".join(report.table(totals)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(totals)) + b"\n")
    if options.keep:
        for node in router.nodes:
            stays = f"the {node.daemon.name} stays up: kvferry status --runtime-dir {node.runtime_dir}"
            say(f"{stays}   (Ctrl-C ends it)")
    else:
        router.end_daemons()
    if options.retract:
        say(f"retracted={totals.retracted} restored={totals.restored}")
    say(outcome(totals, ok=totals.ok))
    if options.keep:
        router.keep()
    return 0 if totals.ok else 1
