"""One target in a process of its own, guided by coverage: ``python -m tests.fuzz.guided TARGET [LIBFUZZER'S OPTIONS]``.

Half of the changes are libFuzzer's own, half are those of ``inputs``.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys

import atheris
import structlog

from tests.fuzz.inputs import mutated, target

INSTRUMENTED = ["kvferry", "tomllib"]
COLLECTED = 256


def main(name: str, *options: str) -> None:
    """Run until libFuzzer ends the process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with atheris.instrument_imports(include=INSTRUMENTED):
        one = target(name)
        seeds = one.seeds()  # imports what the module does not

    gc.collect()
    gc.freeze()  # what was imported is looked at no more
    taken = itertools.count(1)

    def take(data: bytes) -> None:
        one.take_one_input(data)
        if next(taken) % COLLECTED == 0:
            gc.collect()  # Python itself would wait until there is as much garbage as what was imported

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        source = random.Random(seed)  # noqa: S311  nothing secret
        found = atheris.Mutate(data, max_bytes) if seed % 2 else mutated(data, source, seeds)
        return bytes(found[:max_bytes])

    atheris.Setup([sys.argv[0], *options], take, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
