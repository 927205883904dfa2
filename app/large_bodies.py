"""How many large bodies of one client are taken in at a time. The others wait unread in their connections.

A large body costs the ingress memory, and time in which it serves nothing else, before it is known what it is.
"""

from __future__ import annotations

from app.held_response import Scope
from app.turns import Turn, Turns

LARGE_BYTES = 64 * 1024
AT_ONCE, MOST_WAITING = 8, 64
_MOST_CLIENTS = 1024


class LargeBodies:
    """A body is large by what its header says, or where none says how long it is."""

    def __init__(self) -> None:
        self._clients: dict[str, Turns] = {}

    async def take(self, client: str, scope: Scope) -> Turn | None:
        """Wait for the client's turn; None for a body that needs none. Raises Overloaded."""
        if not _is_large(scope):
            return None
        if len(self._clients) >= _MOST_CLIENTS:
            self._clients = {name: turns for name, turns in self._clients.items() if not turns.is_idle}
        return await self._clients.setdefault(client, Turns(MOST_WAITING, AT_ONCE)).take(client)


def _is_large(scope: Scope) -> bool:
    headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
    length = headers.get(b"content-length", b"")
    return int(length) > LARGE_BYTES if length.isdigit() else b"transfer-encoding" in headers
