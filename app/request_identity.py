"""What placement and admission learn of a request from its HTTP side: client, priority class and conversation."""

from __future__ import annotations

import hashlib
import json
import re

from app.access.gate import class_for, key_of, presented
from app.errors import HeaderTooLong
from app.held_response import Scope
from deployments.cluster.request_context import RequestContext

SESSION, PRIORITY = b"x-session-id", b"x-baton-class"
OWNER = "baton.owner"
"""Where the scope of a request that this server makes itself, such as for a line of a batch, has its owner. A client
cannot set it."""
_MAX_HEADER = 256
_CHAT = ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages")
# Found without parsing the body, which vLLM parses. A quote inside a JSON string has a backslash before it.
_USER = re.compile(rb'"user"\s*:\s*("(?:[^"\\]|\\.){1,256}")')


def request_context(
    request_id: str, scope: Scope, body: bytes, client: str, separate_caches: bool = False
) -> RequestContext:
    """The context of a request that goes to vLLM's server. Raises HeaderTooLong and ClassNotAllowed.

    A conversation is named by `X-Session-Id`, or else by the body's `user`. `client`: see `client_of`.
    `separate_caches`: as in the configuration.
    """
    headers = _headers(scope)
    session, priority = _text(headers, SESSION), _text(headers, PRIORITY)
    return RequestContext(
        request_id,
        priority=class_for(key_of(scope), priority),
        client=client,
        affinity=session or _user(body),
        chat=scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") in _CHAT,
        namespace=owner_of(scope) if separate_caches else None,
    )


def client_of(scope: Scope, client_header: str | None = None) -> str:
    """The client that a request comes from.

    It is known by the name of its API key, or by a hash of the key where keys are not checked. A client without one is
    known by its address: it can make up any other name. `client_header`: the header in which a trusted proxy gives the
    address.
    """
    if (known := key_of(scope)) is not None:
        return f"key {known.name}"
    key = presented(scope)
    return f"key {hashlib.sha256(key).hexdigest()[:16]}" if key else address_of(scope, client_header)


def address_of(scope: Scope, client_header: str | None) -> str:
    """The address that a request comes from; "" where it is not known. The last of several is the proxy's own word."""
    if client_header is None:
        return str((scope.get("client") or ("",))[0])
    name = client_header.lower().encode()
    said = [value for key, value in scope["headers"] if key.lower() == name]
    return said[-1].rsplit(b",", 1)[-1].strip().decode("latin-1")[:_MAX_HEADER] if said else ""


def owner_of(scope: Scope) -> str:
    """Whose stored responses, files and cached KV a request may use: by its API key; "" for all without one."""
    if OWNER in scope:
        return str(scope[OWNER])
    if (known := key_of(scope)) is not None:
        return f"key {known.name}"
    key = presented(scope)
    return hashlib.sha256(key).hexdigest() if key else ""


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in reversed(scope["headers"])}


def _text(headers: dict[bytes, bytes], name: bytes) -> str:
    value = headers.get(name, b"")
    if len(value) > _MAX_HEADER:
        raise HeaderTooLong(f"the header {name.decode()} is over {_MAX_HEADER} bytes")
    return value.decode(errors="replace").strip()


def _user(body: bytes) -> str:
    found = _USER.search(body)
    if found is None:
        return ""
    try:
        return str(json.loads(found[1]))
    except ValueError:
        return ""
