"""The live page and its events, as ASGI applications."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.responses import Response, StreamingResponse

from app.live.feed import Feed

PAGE, EVENTS = "/status", "/status/events"
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


class Page:
    """Answers for `/status` and `/status/events`."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._html = Path(__file__).with_name("page.html").read_bytes()

    def at(self, path: str) -> Response | None:
        """The response to a GET; None for another path."""
        if path == PAGE:
            return Response(self._html, media_type="text/html", headers=_HEADERS)
        if path == EVENTS:
            return StreamingResponse(self._events(), media_type="text/event-stream", headers=_HEADERS)
        return None

    async def _events(self) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        async with aclosing(self._feed.snapshots()) as snapshots:
            async for snapshot in snapshots:
                yield f"data: {snapshot}\n\n"
