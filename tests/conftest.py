"""What every test may use: the event loops, requirements that CI must meet, hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import hypothesis
import pytest
import structlog
from blockbuster import blockbuster_ctx

import kvferry.clients
import kvferry.daemon

IN_CI: Final = os.environ.get("CI") == "true"

hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if IN_CI else "dev")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("asyncio", {"use_uvloop": False, "debug": True}), id="asyncio-debug"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run each test marked ``anyio`` twice: on uvloop, and on asyncio's loop in debug mode."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Undo what a test that runs the daemon's code in this process has set."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a call of the daemon's or the clients' code that blocks a running event loop fail its test."""
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    with blockbuster_ctx(scanned_modules=[kvferry.clients, kvferry.daemon]):
        yield


@pytest.fixture(scope="session")
def require() -> Callable[[object, str], None]:
    """Return ``require(condition, reason)``: without the condition the test is skipped; in CI it fails."""

    def check(condition: object, reason: str) -> None:
        if condition:
            return
        if IN_CI:
            pytest.fail(f"CI must provide this: {reason}")
        pytest.skip(reason)

    return check
