"""Engine cores of a configuration's pools, started without Ray and ended with all their processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping

from configs.schema import BatonConfig, role_of
from deployments.engine.build import build_engine, environment
from deployments.engine.protocol import Identity
from deployments.host.processes import descendants
from deployments.messages import Role
from load_tests.harness.engines.pair import Core
from load_tests.harness.processes import Guard, title

HOST, SECRET = "127.0.0.1", "bench"


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while engines are in use. The next engine may be a variant without them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def several(config: BatonConfig, pools: Mapping[str, str]) -> AsyncIterator[dict[str, Core]]:
    """Start one engine for each name, of the pool that `pools` gives it, one after the other. Raises EngineError.

    All have the environment of the first one's pool. They know each other's channels.
    """
    guard = Guard()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.closing(guard))
        stack.enter_context(_environ(environment(config, next(iter(pools.values())))))
        cores: dict[str, Core] = {}
        for name, pool in pools.items():
            before = descendants(os.getpid())
            engine = build_engine(config, Identity(name, pool, Role(role_of(pool)), "here", HOST), secret=SECRET)
            try:
                info = await engine.start()
            finally:
                made = descendants(os.getpid()) - before
                guard.watch(pid for pid in made if "resource_tracker" not in title(pid))  # it is this process's own
            cores[name] = Core(engine, info)
            stack.push_async_callback(cores[name].close)
        for name, core in cores.items():
            if peers := [other.info.endpoints for peer, other in cores.items() if peer != name]:
                await core.engine.meet(peers)
        yield cores
