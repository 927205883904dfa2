"""A check of a request's body that ends at its first fault, before vLLM's server checks all of it.

pydantic collects every fault of a body. In a list of things that may be of many kinds, a thing that is of none has
hundreds of faults: 16 KB of empty objects to `/v1/responses` take it 14 seconds, in which the ingress serves nothing.
So a body with more than a few values is first checked by the same schema, whose lists end at their first fault.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator
from starlette.responses import Response

from app.body_values import values_at_most
from app.errors import answer
from app.held_response import ASGIApp, Receive, Scope, Send, first, respond
from deployments.errors import NeverFits

FREE_VALUES = {"/v1/responses": 16}
"""A body with so many values takes less than 50 ms to check whole, even if all of them are wrong."""
OTHERS_FREE_VALUES = 256
PIECE = 64
"""Items of an `input` that are checked at a time."""
TOKENIZE = "/tokenize"
LONGEST_TOKENIZED = 1024 * 1024
"""Characters. Their tokens take the event loop some 30 ms, as a list and as JSON."""
_LISTS = ("list", "set", "frozenset", "tuple")


class EarlyCheck:
    """An ASGI middleware around the routes of `server`; it goes innermost, behind the check of API keys.

    `longest`: the characters of the longest text that a prompt can be, which is the most that `/tokenize` gets.
    """

    def __init__(self, app: ASGIApp, server: FastAPI, longest: int) -> None:
        self._app, self._server = app, server
        self._longest = min(longest, LONGEST_TOKENIZED)
        self._checks = {
            route.path: _check_of(route) for route in server.routes if isinstance(route, APIRoute) and _has_body(route)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        check = self._checks.get(path)
        if check is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        if path == TOKENIZE and _is_long(body, self._longest):
            refused = NeverFits(f"the text is longer than {self._longest} characters, and no prompt can be")
            await respond(send, answer(refused))
            return
        free = FREE_VALUES.get(path, OTHERS_FREE_VALUES)
        if values_at_most(scope, body) > free and (fault := await _fault(check, body)):
            handler = self._server.exception_handlers[RequestValidationError]
            response = handler(Request(scope), fault)
            assert not isinstance(response, Response)
            await (await response)(scope, receive, send)
            return
        await self._app(scope, first(message, receive), send)


def _has_body(route: APIRoute) -> bool:
    return len(route.dependant.body_params) == 1


def _is_long(body: bytes, most: int) -> bool:
    """Whether what is to be tokenised is too long. No text is longer than its body; a chat is more than its text."""
    if len(body) <= most:
        return False
    try:
        prompt = json.loads(body).get("prompt")
    except (ValueError, AttributeError, RecursionError):
        return False
    return len(prompt) > most if isinstance(prompt, str) else len(body) > 2 * most


def _check_of(route: APIRoute) -> SchemaValidator:
    """The route's own check of a body, but that its lists end at their first fault."""
    schema = TypeAdapter[Any](route.dependant.body_params[0].field_info.annotation).core_schema  # type: ignore[arg-type]
    # Without `_use_prebuilt=False` the check of each class is taken as it is.
    return SchemaValidator(_failing_fast(schema), _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """A pydantic schema whose lists end at their first fault."""
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    copied = {key: value if key == "metadata" else _failing_fast(value) for key, value in schema.items()}
    return copied | {"fail_fast": True} if schema.get("type") in _LISTS else copied


async def _fault(check: SchemaValidator, body: bytes) -> RequestValidationError | None:
    """The first faults of a body. None where there are none, and for what vLLM's server says otherwise."""
    try:
        parsed = json.loads(body)
        if await _may_have_fault(check, parsed):
            check.validate_python(parsed)
    except ValidationError as error:
        return RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        )
    except Exception:  # noqa: BLE001 - vLLM's own checks raise anything, and do so again in the server
        return None
    return None


async def _may_have_fault(check: SchemaValidator, parsed: Any) -> bool:
    """Other requests are served while a long `input` is looked at piece by piece."""
    items = parsed.get("input") if isinstance(parsed, dict) else None
    if not isinstance(items, list) or len(items) <= PIECE:
        return True
    for begin in range(0, len(items), PIECE):
        try:
            check.validate_python({**parsed, "input": items[begin : begin + PIECE]})
        except ValidationError:
            return True
        await asyncio.sleep(0)
    return False
