"""`/baton/prefixes`: prefixes that administrators pin, so that they stay in the prefix caches of all replicas.

`POST` has the body that a request with this prompt would have. vLLM's server reads it as it would for the request
itself, as for `/baton/explain`. Below it, the session manager is asked to pin, and not to place.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from app.access.gate import check_admin
from app.errors import Answer, BadPrefixRequest, MethodNotAllowed, error_body, type_of
from app.held_response import Scope
from deployments.cluster.request_context import RequestContext
from deployments.manager.calls import Prefixes

PREFIXES = "/baton/prefixes"


def pins(scope: Scope) -> bool:
    """Whether a request asks to pin a prefix."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PREFIXES and scope["method"] == "POST"


def prefixes_of(path: str, scope: Scope, admin_key: str | None) -> Prefixes | None:
    """What a request to list or to unpin asks the session manager; None where it is none, as one that pins.

    Raises MethodNotAllowed, and AdminOnly. `admin_key`: `ingress.admin_key`.
    """
    name = path.removeprefix(f"{PREFIXES}/")
    is_one, method = name != path and bool(name) and "/" not in name, scope["method"]
    if not (is_one or path == PREFIXES) or pins(scope):
        return None
    if method not in (("DELETE",) if is_one else ("GET", "HEAD")):
        raise MethodNotAllowed(f"{scope['path']} answers {'DELETE' if is_one else 'GET and POST'} only")
    if is_one:
        check_admin(scope, admin_key)
    return Prefixes(unpin=name) if is_one else Prefixes()


def prefixes_answer(call: Prefixes, found: dict[str, Any]) -> Answer:
    """The response for what the session manager has answered."""
    if "refused" in found:
        return Answer(404, error_body(found["refused"], type_of(404), "prefix_not_found"))
    return Answer(200, {"id": call.unpin, "unpinned": True} if call.unpin else found)


def begin_pin(context: RequestContext, scope: Scope, parts: int) -> None:
    """Have the prompt of this request pinned, and nothing served. `parts`: the answers that it would have.

    With `separate_caches` it is pinned for the API key that `?key=NAME` names, or else for the request's own. Raises
    BadPrefixRequest.
    """
    if parts > 1:
        raise BadPrefixRequest("one prefix is pinned at a time: the body must have one prompt, and no `n` over 1")
    asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    if (name := asked.get("key", [""])[0]) and context.namespace is not None:
        context.namespace = f"key {name}"
    context.pins = True
