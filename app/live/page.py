"""The live page, its events, and the timelines of sessions, as ASGI applications."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.responses import JSONResponse, Response, StreamingResponse

from app.errors import SessionNotFound, answer
from app.live.feed import Feed
from app.live.sessions import Sessions

PAGE, EVENTS, SESSIONS = "/status", "/status/events", "/status/sessions/"
_LONGEST = 256
"""Characters of a name that an error repeats."""
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


class Page:
    """Answers for `/status`, `/status/events` and `/status/sessions/ID`."""

    def __init__(self, feed: Feed, sessions: Sessions) -> None:
        self._feed, self._sessions = feed, sessions
        self._html = Path(__file__).with_name("page.html").read_bytes()

    async def at(self, path: str) -> Response | None:
        """The response to a GET; None for another path."""
        if path == PAGE:
            return Response(self._html, media_type="text/html", headers=_HEADERS)
        if path == EVENTS:
            return StreamingResponse(self._events(), media_type="text/event-stream", headers=_HEADERS)
        if path.startswith(SESSIONS):
            return await self._session(path.removeprefix(SESSIONS))
        return None

    async def _session(self, name: str) -> Response:
        found = await self._sessions.find(name)
        if found is None:
            refusal = answer(SessionNotFound(f"no ingress knows a request or a session {name[:_LONGEST]!r}"))
            return JSONResponse(refusal.body, refusal.status, headers=_HEADERS)
        return JSONResponse(found, headers=_HEADERS)

    async def _events(self) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        async with aclosing(self._feed.snapshots()) as snapshots:
            async for snapshot in snapshots:
                yield f"data: {snapshot}\n\n"
