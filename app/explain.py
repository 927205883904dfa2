"""`POST /baton/explain`: what would become of a request, from the body that the request would have. It is not served.

vLLM's server reads the body as it would for the request itself. Below it, the session manager is asked to explain, and
not to place (`deployments.manager.calls.Explain`).
"""

from __future__ import annotations

import msgspec

from app.errors import BadExplainRequest, MethodNotAllowed, RequestError
from app.held_response import Scope

EXPLAIN = "/baton/explain"
_RAW = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    messages: msgspec.Raw = _RAW
    prompt: msgspec.Raw = _RAW


_BODY = msgspec.json.Decoder(_Body)


def check_method(scope: Scope) -> None:
    """Raises MethodNotAllowed."""
    if scope["method"] != "POST":
        raise MethodNotAllowed(f"{EXPLAIN} answers POST only, with the body of a request")


def explained_scope(scope: Scope, body: bytes, wrong: type[RequestError] = BadExplainRequest) -> Scope:
    """The scope of the request that is to be explained: a chat completion has `messages`, a completion `prompt`.

    Raises `wrong`.
    """
    try:
        asked = _BODY.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise wrong(f"the body is no JSON object: {error}") from error
    if bytes(asked.messages):
        path = "/v1/chat/completions"
    elif bytes(asked.prompt):
        path = "/v1/completions"
    else:
        raise wrong("the body must be that of a chat completion, with `messages`, or of a completion")
    path = scope.get("root_path", "") + path
    return {**scope, "path": path, "raw_path": path.encode()}
