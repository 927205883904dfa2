"""Whether an answer is one that an API may give: its status, the shape of its errors, and the end of its stream."""

from __future__ import annotations

import json
from typing import Any

from load_tests.fuzz.bodies import PATHS, Case

NO_CAPACITY = "no_replica_available"
_LAST = {
    "/v1/completions": ("data: [DONE]",),
    "/v1/chat/completions": ("data: [DONE]",),
    "/v1/responses": ("event: response.completed", "event: response.incomplete", "event: response.failed"),
    "/v1/messages": ("event: message_stop",),
}


def verdict(case: Case, status: int, content_type: str, body: bytes) -> str:
    """What an answer is: `ok`, `refused` with a 4xx, `no_capacity`, `5xx`, or `malformed`."""
    if content_type.startswith("text/event-stream"):
        return _of_stream(case, body)
    if case.method != "POST" or case.path.partition("?")[0] not in PATHS:  # pages, figures, Baton's own; a proxy's, too
        return "5xx" if status >= 500 else "refused" if status >= 400 else "ok"
    try:
        parsed = json.loads(body)
    except ValueError:
        return "5xx" if status >= 500 else "malformed"
    if status >= 500:
        return "no_capacity" if status == 503 and _code(parsed) == NO_CAPACITY else "5xx"
    if status >= 400:
        return "refused" if _is_error(case, parsed) else "malformed"
    return "ok" if isinstance(parsed, dict) and not parsed.get("error") else "malformed"


def _of_stream(case: Case, body: bytes) -> str:
    lines = body.decode(errors="replace").split("\n")
    try:
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    except ValueError:
        return "malformed"
    errors = [event for event in events if isinstance(event, dict) and event.get("error")]
    if errors:
        return _of_event(case, errors[0])
    return "ok" if any(line in _LAST.get(case.path, ()) for line in lines) else "malformed"


def _of_event(case: Case, event: dict[str, Any]) -> str:
    """An error with which a stream breaks off has no status of its own: its code and type say it."""
    if not _is_error(case, event):
        return "malformed"
    code, kind = _code(event), event["error"]["type"]
    if code == NO_CAPACITY:
        return "no_capacity"
    is_refusal = kind in ("invalid_request_error", "rate_limit_error") or (isinstance(code, int) and code < 500)
    return "refused" if is_refusal else "5xx"


def _code(parsed: Any) -> Any:
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _is_error(case: Case, parsed: Any) -> bool:
    """Whether it is an error in its API's shape: Anthropic's of /v1/messages, OpenAI's of everything else."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict) or not all(isinstance(error.get(name), str) for name in ("message", "type")):
        return False
    if case.path.startswith("/v1/messages"):
        return parsed.keys() == {"type", "error"} and error.keys() == {"type", "message"}
    return parsed.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
