"""The body of `/v1/responses`: the response itself, and the events of a stream of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deployments.stored.calls import Stored

Response = dict[str, Any]

_WHOLE = (b"event: response.created\n", b"event: response.in_progress\n", b"event: response.completed\n")
"""The events that carry the whole response."""
_PRELUDE = _WHOLE[:2]
_ERROR = b'data: {"error"'
_END = b"\n\n"


class Events:
    """Splits a stream into its events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, body: bytes) -> list[bytes]:
        """The events that end with this part of the stream."""
        *events, self._rest = (self._rest + body).split(_END)
        return [event + _END for event in events]

    @property
    def rest(self) -> bytes:
        """What is left of a stream that broke off."""
        return self._rest


def is_last(event: bytes) -> bool:
    """Whether this is the event with which a stream ends that did not fail."""
    return event.startswith(_WHOLE[2])


def is_content(event: bytes) -> bool:
    """Whether the engine has said something."""
    return event.startswith(b"event: ") and not event.startswith(_PRELUDE)


def response_of(event: bytes) -> Response | None:
    """The whole response where the event carries one."""
    if not event.startswith(_WHOLE):
        return None
    response: Response = _data(event)["response"]
    return response


def error_of(event: bytes) -> str | None:
    """What an error event says."""
    if not event.startswith(_ERROR):
        return None
    error = _data(event)["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def changed(event: bytes, change: Callable[[Response], Response]) -> bytes:
    """The event with another response in it, where it carries one."""
    if not event.startswith(_WHOLE):
        return event
    data = _data(event)
    data["response"] = change(data["response"])
    return encoded(data["type"], data)


def encoded(kind: str, data: dict[str, Any]) -> bytes:
    """An event of a stream."""
    return f"event: {kind}\ndata: {json.dumps(data)}".encode() + _END


def failed_event(response: Response, number: int) -> bytes:
    """The event with which the stream of a response ends that has failed."""
    return encoded("response.failed", {"type": "response.failed", "sequence_number": number, "response": response})


def is_failure(event: bytes) -> bool:
    """Whether this is an event of `failed_event`."""
    return event.startswith(b"event: response.failed\n")


def response_from(stored: Stored) -> Response:
    """A stored response as a client gets it."""
    response: Response = json.loads(stored.response)
    if response["status"] == stored.status:
        return response
    return with_status(response, stored.status, stored.reason)


def with_status(response: Response, status: str, reason: str = "") -> Response:
    """The response with another status. `reason`: why it failed."""
    error = {"code": "server_error", "message": reason} if reason else None
    return {**response, "status": status, "error": error}


def _data(event: bytes) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(event[event.index(b"data: ") + len(b"data: ") :])
    return data
