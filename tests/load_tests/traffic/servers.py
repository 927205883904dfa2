"""A server in this process for tests of the HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn


@contextlib.asynccontextmanager
async def serving(application: Callable[..., Any]) -> AsyncIterator[str]:
    """The URL of an ASGI application that listens on loopback until the end of the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(application, log_level="warning", lifespan="off", timeout_keep_alive=600)
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                async with asyncio.timeout(60):
                    while not server.started:
                        await asyncio.sleep(0.01)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
