"""What the HTTP side and the cluster core tell each other about one HTTP request.

The middleware sets `current` before vLLM's server runs; the cluster core, called below that server in the same
context, notes how each of the request's sessions was placed, and why one failed.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from deployments.errors import SessionError
from deployments.messages import Mode


@dataclass
class RequestContext:
    """One HTTP request; it has several sessions when it asks for n > 1 or sends a batch of prompts.

    `priority`, `client`, `affinity` and `chat` go into each session's `SessionRequest`. `seed_moved`: a sampled answer
    with a seed went on in another engine than the one where it began.
    """

    request_id: str
    priority: str = ""
    client: str = ""
    affinity: str = ""
    chat: bool = False
    modes: set[Mode] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)
    seed_moved: bool = False
    error: SessionError | None = None


current: ContextVar[RequestContext | None] = ContextVar("baton_request", default=None)
