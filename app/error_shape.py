"""The one shape of every error that leaves the server, and what vLLM's own errors become in it.

/v1/messages, and what is under it, has Anthropic's API; everything else has OpenAI's. An `Answer` keeps an error in
OpenAI's shape until it is sent. Types are named by `app.errors.type_of` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import responses as phrases
from typing import Any

from app.errors import Answer, anthropic_type_of, error_body, type_of

STREAMED = (b'data: {"error"', b"event: error\ndata: ")
"""How an error begins in a stream of OpenAI's, and of /v1/messages."""
_MESSAGES = "/v1/messages"
_LONGEST = 1000
"""Characters of a message that comes as plain text."""


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether an HTTP request is one of Anthropic's API, by its path."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def shaped(failure: Answer, anthropic: bool) -> Answer:
    """The error as its API's clients expect it."""
    if not anthropic:
        return failure
    error = {"type": anthropic_type_of(failure.status), "message": failure.body["error"]["message"]}
    return Answer(failure.status, {"type": "error", "error": error}, failure.headers)


def event(failure: Answer, anthropic: bool) -> bytes:
    """The error as an event of a stream. Anthropic's events name their type twice."""
    prefix = b"event: error\ndata: " if anthropic else b"data: "
    return prefix + json.dumps(shaped(failure, anthropic).body).encode() + b"\n\n"


def of_response(status: int, content: bytes) -> Answer:
    """The error of a response of vLLM's server, or of something in front of it, with any body."""
    try:
        parsed = json.loads(content)
    except ValueError:
        return _answer(status, content.decode(errors="replace")[:_LONGEST])
    inner = parsed.get("error", parsed.get("detail")) if isinstance(parsed, dict) else parsed
    return _of_object(status, inner) if isinstance(inner, dict) else _answer(status, inner)


def of_event(chunk: bytes) -> Answer | None:
    """The error with which a chunk of a stream begins; None where there is none. Without a status it is a 500."""
    prefix = next((prefix for prefix in STREAMED if chunk.startswith(prefix)), None)
    if prefix is None:
        return None
    try:
        error = json.loads(chunk.partition(b"\n\n")[0].partition(b"data: ")[2])["error"]
    except (ValueError, KeyError):
        return None
    if not isinstance(error, dict):
        return _answer(500, error)
    code = error.get("code")
    return _of_object(code if isinstance(code, int) and 400 <= code <= 599 else 500, error)


def _of_object(status: int, error: dict[str, Any]) -> Answer:
    return _answer(status, error.get("message"), error.get("code"), error.get("param"))


def _answer(status: int, message: Any, code: Any = None, param: str | None = None) -> Answer:
    """A message that is no text is shown as JSON. An empty one is replaced by the status's own words."""
    text = message if isinstance(message, str) or not message else json.dumps(message)
    text = text or phrases.get(status, "error")
    return Answer(status, error_body(text, type_of(status), status if code is None else code, param))
