"""CORS: which pages a browser lets use the API. Around everything else, so that errors carry its headers, too."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from app.access import rate_limit
from app.held_response import ASGIApp

_SHOWN = ("X-Request-Id", "X-Baton-Mode", "X-Baton-Rule", "Retry-After", *rate_limit.NAMES)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, for pages of these origins. A browser's question before a request needs no key."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"], expose_headers=list(_SHOWN)
    )
