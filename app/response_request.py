"""What a request to `/v1/responses` asks of the store, and how vLLM's server hears of it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from app.errors import BadResponseRequest, BodyTooLarge
from app.response_events import Response
from deployments.stored.calls import Stored

_CONTINUED = ("completed", "incomplete")


@dataclass(frozen=True)
class Wanted:
    """The body of a request, and what in it is the store's."""

    body: dict[str, Any]
    store: bool
    background: bool
    stream: bool
    previous: str | None

    @property
    def needs_store(self) -> bool:
        """Whether the request means nothing without a store. `store: true` is the API's default, and may be ignored."""
        return self.background or self.previous is not None


def wanted(body: bytes) -> Wanted | None:
    """None where the body is for vLLM's server to refuse. Raises BadResponseRequest."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict) or not isinstance(asked.get("input"), str | list):
        return None
    previous = asked.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise BadResponseRequest("previous_response_id must be a string")
    found = Wanted(asked, _flag(asked, "store", True), _flag(asked, "background"), _flag(asked, "stream"), previous)
    if found.background and not found.store:
        raise BadResponseRequest("background: true needs store: true")
    return found


def _flag(asked: dict[str, Any], name: str, default: bool = False) -> bool:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadResponseRequest(f"{name} must be true or false")
    return value


def new_id() -> str:
    """An id that cannot be guessed. A client does not choose it, so that it cannot take another's."""
    return f"resp_{uuid.uuid4().hex}"


def items_of(wanted: Wanted, previous: Stored | None) -> list[Any]:
    """All input items: those of the conversation before, and the request's own. Raises BadResponseRequest."""
    given = wanted.body["input"]
    own = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if previous is None:
        return list(own)
    if previous.status not in _CONTINUED:
        raise BadResponseRequest(f"the response {wanted.previous} is {previous.status} and cannot be continued")
    output = json.loads(previous.response)["output"]
    said = [item for item in output if item.get("type") != "message" or item.get("content")]
    return [*json.loads(previous.items), *said, *own]


def inner_body(wanted: Wanted, response_id: str, items: list[Any], max_bytes: int) -> bytes:
    """The body for vLLM's server: everything before is input, and it stores nothing. Raises BodyTooLarge.

    A background response is a stream there, so that it can be followed.
    """
    asked = {**wanted.body, "request_id": response_id, "store": False, "background": False}
    asked["stream"] = wanted.stream or wanted.background
    if asked.pop("previous_response_id", None) is not None:
        asked["input"] = items
    body = json.dumps(asked).encode()
    if wanted.previous is not None and len(body) > max_bytes:
        raise BodyTooLarge(f"the conversation up to here is over {max_bytes} bytes")
    return body


def shown(response: Response, wanted: Wanted, is_stored: bool) -> Response:
    """A response of vLLM's server as the request asked for it."""
    own = {"previous_response_id": wanted.previous, "background": wanted.background, "store": is_stored}
    return {**response, **own}
