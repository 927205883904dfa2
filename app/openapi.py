"""The OpenAPI document: vLLM's, completed with Baton's name, routes, headers and errors."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI

from app.access import rate_limit
from app.access.gate import OPEN, is_for_admins
from app.errors import anthropic_type_of, type_of

TITLE = "Baton"
_DESCRIPTION = "LLM serving with prefill and decode on separate replicas: OpenAI's and Anthropic's APIs."
GENERATES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
    }
)
"""Routes that open sessions."""
_SESSION_ERRORS = (403, 408, 413, 429, 500, 503, 504)
_MEANINGS = {
    400: "The request is wrong, or no replica could ever serve it.",
    401: "The server asks for an API key, and the request has none that it knows.",
    403: "The key may not use the route or the priority class.",
    404: "There is no such model, stored response, file or batch.",
    408: "The body did not arrive in time.",
    409: "A batch reads the file, or is over.",
    413: "The body is larger than `ingress.max_body_bytes`.",
    429: "Too much is asked for at once.",
    500: "The server failed.",
    503: "No replica is ready, or the replicas of the request were lost.",
    504: "The session outlived `placement.session_timeout_s`.",
}
_RATE_LIMITS = dict(
    zip(
        rate_limit.NAMES,
        (
            "Requests a minute that the API key may make.",
            "Requests that the API key may make now.",
            "When all requests of the minute are there again, as `7s` or `1m1s`.",
            "Tokens a minute that the API key may use.",
            "Tokens that the API key may use now.",
            "When all tokens of the minute are there again, as `7s` or `1m1s`.",
        ),
        strict=True,
    )
)
_HEADERS = {
    "X-Request-Id": "The request's own `X-Request-Id`, or a new one.",
    "X-Baton-Mode": "How the request was served: `disaggregated`, `decode_local` or `prefill_local`.",
    "X-Baton-Rule": "The rule that kept the request from being split; absent when none did.",
    "Retry-After": "Seconds after which trying again makes sense.",
    **{name: f"{about} Absent where the API key has no such limit." for name, about in _RATE_LIMITS.items()},
}
_DECIDED = ("X-Baton-Mode", "X-Baton-Rule", *rate_limit.NAMES)
"""Headers by which a response says how the session manager has decided."""
_PARAMETERS = {
    "X-Request-Id": "The request's id: 1 to 128 visible ASCII characters.",
    "X-Session-Id": "Requests with the same value go to the same replicas where they can. At most 256 bytes.",
    "X-Baton-Class": "The priority class, one of `placement.classes`. At most 256 bytes.",
}
_OWN = {
    "/health": ("Whether the ingress is alive", {"status": {"type": "string"}}, None),
    "/ready": (
        "Whether every pool has a ready replica",
        {"ready": {"type": "boolean"}, "pools": {"type": "object"}},
        "A pool has no ready replica, or the session manager does not answer.",
    ),
    "/baton/status": (
        "Pools, replicas, sessions, reservations, the queue, and counts",
        {"pools": {"type": "object"}, "ingress": {"type": "object"}},
        "The session manager does not answer.",
    ),
}
# The live page, its events and the timelines (`app/live`) are for people, and are not part of the document.
_STORED = {
    "/v1/responses/{response_id}": {
        "get": "Retrieve a stored response, or follow its events with `stream=true`",
        "delete": "Forget a stored response, and end it where it runs",
    },
    "/v1/responses/{response_id}/cancel": {"post": "End a background response"},
    "/v1/responses/{response_id}/input_items": {
        "get": "List what a stored response was made from, in pages: `after`, `limit` and `order`",
    },
}
_BATCHES = {
    "/v1/files": {
        "get": "List files, in pages: `after`, `limit`, `order`, `purpose`",
        "post": "Upload a file of requests",
    },
    "/v1/files/{file_id}": {"get": "Retrieve a file's object", "delete": "Delete a file"},
    "/v1/files/{file_id}/content": {"get": "Retrieve a file's bytes"},
    "/v1/batches": {"get": "List batches, in pages: `after` and `limit`", "post": "Begin a batch of an uploaded file"},
    "/v1/batches/{batch_id}": {"get": "Retrieve a batch"},
    "/v1/batches/{batch_id}/cancel": {"post": "End a batch as it is"},
}
_BODIES: dict[str, Any] = {
    "/v1/files": {
        "multipart/form-data": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "const": "batch"},
        }
    },
    "/v1/batches": {
        "application/json": {
            "input_file_id": {"type": "string"},
            "endpoint": {"type": "string"},
            "completion_window": {"type": "string"},
        }
    },
}
"""The bodies of requests for files and batches: what they must have."""


def complete(app: FastAPI) -> None:
    """Let the server show this document, made once, when `app.openapi` is first called: of the routes it has then."""
    app.title, app.version, app.description = TITLE, _version(), _DESCRIPTION
    vllms = app.openapi

    def document() -> dict[str, Any]:
        return app.openapi_schema or _completed(vllms())

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to change its document


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document, which it keeps as `openapi_schema`, changed in place."""
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(Error=_schema(anthropic=False), AnthropicError=_schema(anthropic=True))
    components["headers"] = {name: _header(name) for name in _HEADERS}
    components["parameters"] = {name: _parameter(name) for name in _PARAMETERS}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _complete(path, method, operation)
    document["paths"].update({path: {"get": _own(path, *about)} for path, about in _OWN.items()})
    document["paths"].update(
        {
            path: {method: _of_batches(path, method, what) for method, what in item.items()}
            for path, item in _BATCHES.items()
        }
    )
    document["paths"].update(
        {path: {method: _stored(path, method, what) for method, what in item.items()} for path, item in _STORED.items()}
    )
    return document


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:  # run from a folder that is not installed
        return "0"


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add headers and errors to one operation of vLLM's. Its own errors go: all have one shape."""
    generates = path in GENERATES
    responses: dict[str, Any] = {s: r for s, r in operation["responses"].items() if not s.startswith(("4", "5"))}
    for response in responses.values():
        response["headers"] = _headers("X-Request-Id", *(_DECIDED if generates else ()))
    anthropic = path.startswith("/v1/messages")
    responses |= {str(status): _error(status, anthropic) for status in _statuses(path, method, generates)}
    operation["responses"] = responses
    names = _PARAMETERS if path.startswith("/v1") else ("X-Request-Id",)
    operation["parameters"] = [
        *operation.get("parameters", ()),
        *({"$ref": f"#/components/parameters/{name}"} for name in names),
    ]


def _statuses(path: str, method: str, generates: bool) -> list[int]:
    """What may go wrong with an operation, beside a wrong method."""
    found = {400, 500, *_key_errors(path)}
    if method == "post":
        found |= {404, 408, 413}
    if path in _BATCHES:
        found |= {404, 409, 429, 503}
    if path.startswith(("/v1/models/", "/v1/responses/")):
        found.add(404)
    return sorted(found | set(_SESSION_ERRORS if generates else ()))


def _key_errors(path: str) -> set[int]:
    """What may be wrong with the API key of a request, where the server asks for keys."""
    if path in OPEN:
        return set()
    return {401, 403} if path.startswith("/v1") or is_for_admins(path) else {401}


def _error(status: int, anthropic: bool, meaning: str | None = None) -> dict[str, Any]:
    kind = anthropic_type_of(status) if anthropic else type_of(status)
    retry = ("Retry-After",) if status in (429, 503) else ()
    limits = rate_limit.NAMES if status == 429 else ()
    return {
        "description": f"{meaning or _MEANINGS[status]} The error's type is `{kind}`.",
        "headers": _headers("X-Request-Id", *retry, *limits),
        "content": _json({"$ref": f"#/components/schemas/{'AnthropicError' if anthropic else 'Error'}"}),
    }


def _own(path: str, summary: str, properties: dict[str, Any], unready: str | None) -> dict[str, Any]:
    """One of Baton's own routes. `unready`: what its 503 means."""
    body = {"type": "object", "properties": properties, "required": list(properties)}
    headers = _headers("X-Request-Id")
    responses = {"200": {"description": "Successful Response", "headers": headers, "content": _json(body)}}
    responses |= {str(status): _error(status, anthropic=False) for status in sorted(_key_errors(path))}
    if unready is not None:
        responses["503"] = {**_error(503, anthropic=False, meaning=unready), "headers": headers}
    return {
        "summary": summary,
        "parameters": [{"$ref": "#/components/parameters/X-Request-Id"}],
        "responses": responses,
    }


def _stored(path: str, method: str, summary: str) -> dict[str, Any]:
    """A route of stored responses."""
    ids = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": [ids],
        "responses": {"200": {"description": "Successful Response", "content": _json({"type": "object"})}},
    }
    _complete(path, method, operation)
    operation["responses"]["503"] = _error(503, anthropic=False, meaning="The store of responses is away.")
    return operation


def _of_batches(path: str, method: str, summary: str) -> dict[str, Any]:
    """A route of files and batches."""
    name = path.partition("{")[2].partition("}")[0]
    ids = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}] if name else []
    bytes_ = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    content = bytes_ if path.endswith("/content") else _json({"type": "object"})
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": ids,
        "responses": {"200": {"description": "Successful Response", "content": content}},
    }
    if method == "post" and path in _BODIES:
        ((kind, fields),) = _BODIES[path].items()
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    _complete(path, method, operation)
    return operation


def _schema(anthropic: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if anthropic:
        fields: dict[str, Any] = {"type": text, "message": text}
        outer: dict[str, Any] = {"type": {"type": "string", "const": "error"}}
    else:
        code = {"anyOf": [text, {"type": "integer"}, {"type": "null"}]}
        fields = {"message": text, "type": text, "param": {"anyOf": [text, {"type": "null"}]}, "code": code}
        outer = {}
    outer["error"] = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": outer, "required": list(outer)}


def _header(name: str) -> dict[str, Any]:
    return {"description": _HEADERS[name], "schema": {"type": "string"}}


def _parameter(name: str) -> dict[str, Any]:
    longest = 128 if name == "X-Request-Id" else 256
    schema = {"type": "string", "maxLength": longest}
    return {"name": name, "in": "header", "required": False, "description": _PARAMETERS[name], "schema": schema}


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
