"""Which requests are about files and batches, and what answers them where there are none. Pure ASGI."""

from __future__ import annotations

from app.errors import BatchesOff, answer
from app.held_response import Receive, Scope, Send, respond

FILES, BATCHES = "/v1/files", "/v1/batches"


def is_batch_route(path: str) -> bool:
    """Whether a path is one of these."""
    return any(path == route or path.startswith(f"{route}/") for route in (FILES, BATCHES))


async def off(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer of a server without batches."""
    reason = "files and batches are off on this server: `ingress.batches` switches them on"
    await respond(send, answer(BatchesOff(reason)))
