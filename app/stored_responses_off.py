"""What /v1/responses answers to requests that need a stored response, while Baton stores none."""

from __future__ import annotations

from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.errors import StoredResponsesOff, answer

ROUTES = {
    "/v1/responses/{response_id}": ["GET", "DELETE"],
    "/v1/responses/{response_id}/cancel": ["POST"],
    "/v1/responses/{response_id}/input_items": ["GET"],
}
"""Paths and methods of OpenAI's API that only read or change stored responses."""
_NEEDED = "stored responses are off on this server, and {} needs them: `ingress.stored_responses` switches them on"


class WithoutStore:
    """vLLM's handler of /v1/responses. It refuses what needs a store; all else is vLLM's."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """Raises StoredResponsesOff for `background` and `previous_response_id`."""
        for name in ("background", "previous_response_id"):
            if getattr(request, name, None):
                raise StoredResponsesOff(_NEEDED.format(f"`{name}`"))
        return await self._handler.create_responses(request, raw_request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


def install(app: FastAPI) -> None:
    """Let a server of vLLM's, whose state is set, say how stored responses are switched on."""
    app.state.openai_serving_responses = WithoutStore(app.state.openai_serving_responses)
    app.add_exception_handler(StoredResponsesOff, _answer)
    app.middleware_stack = None  # a package that vLLM loads has built it before; it is built anew, with this handler
    for path, methods in ROUTES.items():
        app.add_api_route(path, _refuse, methods=methods, response_model=None, include_in_schema=False)


async def _refuse(response_id: str, request: Request) -> NoReturn:
    raise StoredResponsesOff(_NEEDED.format(f"{request.method} {request.url.path}"))


async def _answer(request: Request, error: Exception) -> JSONResponse:
    refusal = answer(error)
    return JSONResponse(refusal.body, refusal.status)
