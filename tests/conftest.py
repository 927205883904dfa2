"""What every test may use."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# As in a replica (deployments/engine/build.py), and before anything imports torch's compiler, which reads it once.
os.environ["TORCH_COMPILE_DISABLE"] = "1"
# Every Ray of the tests asks for one token. By Ray's own rule it would ask where the user has a token, and the first
# `ray.init` of a test makes one: a cluster started before would then ask for no token, and a later one would insist
# on it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# LiteLLM has a list of prices in its package, and LangChain's traces are off: no client asks another server than ours.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = os.environ["LANGCHAIN_TRACING_V2"] = "false"

# No example bounds time: a busy machine takes many times as long for one as for the next.
hypothesis.settings.register_profile("baton", deadline=None)
hypothesis.settings.load_profile("baton")

SETTLE_S = 60.0
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
ENGINES = (
    "tests/app/batches/test_killed_engines.py",
    "tests/deployments/engine/",
    "tests/e2e/",
    "tests/load_tests/bench/test_kv_reuse.py",
    "tests/load_tests/bench/test_offline.py",
    "tests/load_tests/bench/test_transfer.py",
)


FETCHES, LINES, REAL_LINES = 300, 60_000, 60


def pytest_addoption(parser: pytest.Parser) -> None:
    told = f"fetches at random between real engines (default: {FETCHES})"
    parser.addoption("--fetches", type=int, default=FETCHES, help=told)
    parser.addoption("--lines", type=int, default=LINES, help=f"lines of the largest batch (default: {LINES})")
    told = f"lines of the batch that real engines answer and that is killed (default: {REAL_LINES})"
    parser.addoption("--real-lines", type=int, default=REAL_LINES, help=told)


class Lines(LoadScopeScheduling):
    """The two lines that `make test` runs side by side: engines, one group of them at a time, and what has none."""

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if nodeid.startswith(ENGINES) else "no engines"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lines | None:
    return Lines(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.nodeid.startswith(ENGINES):
            raise pytest.UsageError(f"{item.nodeid} starts engines, so it belongs into one of {ENGINES}")


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("baton-")}


def _descriptors() -> dict[int, str]:
    open_now = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - an entry may go away while one looks
        try:
            open_now[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - the same
        except FileNotFoundError:
            continue
    return open_now


def _described(descriptor: int, link: str) -> str:
    """With a socket's addresses, by which one sees whose it is."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            return repr(same)
    except OSError:
        return f"{descriptor}: {link}"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread of ours or an open file descriptor behind.

    Ask for it first, before anything is opened, so that it looks after everything else is closed.
    """
    threads, descriptors = _threads(), _descriptors()
    yield
    deadline = time.monotonic() + SETTLE_S
    while True:
        left, open_now = _threads() - threads, _descriptors()
        if not left and len(open_now) <= len(descriptors):
            return
        gc.collect()
        if time.monotonic() > deadline:
            new = [_described(*each) for each in open_now.items() - descriptors.items()]
            more = len(open_now) - len(descriptors)
            pytest.fail(f"left behind: threads {left}; {more} more descriptors, of {new}")
        time.sleep(0.02)


@pytest.fixture
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that looks up a name or connects to an address of another machine. It gets no connection."""
    elsewhere: list[str] = []

    def check(host: Any) -> None:
        if str(host) not in LOOPBACK:
            elsewhere.append(str(host))
            raise ConnectionRefusedError(f"{host} is not loopback")

    def watch(owner: Any, name: str, host_of: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            check(host_of(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    def host_of(asked: socket.socket, address: Any) -> Any:
        return address[0] if asked.family in (socket.AF_INET, socket.AF_INET6) else "localhost"

    watch(socket, "getaddrinfo", lambda host, *_, **__: host)
    watch(socket.socket, "connect", host_of)
    watch(socket.socket, "connect_ex", host_of)
    yield
    assert elsewhere == []


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    """The loopback address of either family. Skipped where this machine has none."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((request.param, 0))
    except OSError as error:
        pytest.skip(f"no loopback at {request.param}: {error}")
    return str(request.param)
