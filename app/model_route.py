"""GET /v1/models/{id}, which OpenAI's API has and vLLM's server does not."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.errors import error_body, type_of

PATH = "/v1/models/{model:path}"


def install(app: FastAPI) -> None:
    """Add the route to a server of vLLM's. It knows every model and adapter that the server lists."""

    @app.get(PATH)
    async def retrieve_model(model: str, request: Request) -> JSONResponse:
        listed = (await request.app.state.openai_serving_models.show_available_models()).model_dump()
        if not model:  # a slash behind /v1/models
            return JSONResponse(listed)
        found = next((card for card in listed["data"] if card["id"] == model), None)
        if found is not None:
            return JSONResponse(found)
        missing = f"the model `{model}` does not exist"
        return JSONResponse(error_body(missing, type_of(404), "model_not_found", "model"), 404)
