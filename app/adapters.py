"""LoRA adapters as vLLM's server has them: those of the configuration, and those that were loaded by HTTP.

The list of the second kind is the session manager's, so an adapter that one ingress is told to load is served by all.
An ingress only checks an adapter; replicas load it with the first request for it. This file imports vllm.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from vllm.config import LoRAConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from app.access.gate import check_admin
from app.errors import AdminOnly, Answer, answer, error_body, type_of
from configs.schema import BatonConfig
from deployments.checkpoint.adapter import adapter_id
from deployments.checkpoint.errors import AdapterError
from deployments.errors import Unavailable
from deployments.manager.calls import Manager, ShareAdapters
from deployments.messages import Adapter, AdapterList

WAIT_S, LATE_S, AGAIN_S = 1.0, 2.0, 0.25
"""An open call for a newer list ends after the first, and counts as lost after the second more; then the pause."""

logger = logging.getLogger("baton.adapters")


class ServedAdapters:
    """Keeps vLLM's registry of adapters. `lora`: vLLM's own configuration, which says what it can serve."""

    def __init__(self, models: OpenAIServingModels, lora: LoRAConfig, config: BatonConfig, manager: Manager) -> None:
        assert config.lora is not None
        self._models, self._lora, self._manager = models, lora, manager
        self._paths = {adapter.name: adapter.path for adapter in config.lora.adapters}
        self._configured: dict[str, LoRARequest] = {}
        self._loaded = AdapterList()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check the adapters of the configuration, and follow the list of the others.

        Raises AdapterError where one cannot be served.
        """
        for name, path in self._paths.items():
            self._configured[name] = _request(await asyncio.to_thread(self._checked, name, path))
        self._take(self._loaded)
        self._following = asyncio.create_task(self._follow(), name="baton-adapters")

    def shutdown(self) -> None:
        """Stop following the list; idempotent."""
        if self._following is not None:
            self._following.cancel()

    async def load(self, asked: LoadLoRAAdapterRequest) -> Response:
        """Answer `/v1/load_lora_adapter`."""
        name = asked.lora_name
        if not name or not asked.lora_path:
            return _refused(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if self._models.is_base_model(name) or name in self._configured:
            return _refused(400, f"'{name}' is the name of a model of the configuration")
        if name in self._models.lora_requests and not asked.load_inplace:
            return _refused(400, f"the adapter '{name}' is loaded; `load_inplace` replaces it")
        try:
            adapter = await asyncio.to_thread(self._checked, name, asked.lora_path)
        except AdapterError as error:
            return _refused(400, str(error))
        return await self._change(ShareAdapters(self._loaded, load=(adapter,)), f"'{name}' added")

    async def unload(self, asked: UnloadLoRAAdapterRequest) -> Response:
        """Answer `/v1/unload_lora_adapter`. Answers that use the adapter go on."""
        name = asked.lora_name
        if name in self._configured:
            return _refused(400, f"the adapter '{name}' is of the configuration")
        if name not in self._models.lora_requests:
            return _refused(404, f"the adapter '{name}' cannot be found")
        return await self._change(ShareAdapters(self._loaded, unload=(name,)), f"'{name}' removed")

    async def _change(self, call: ShareAdapters, what: str) -> Response:
        try:
            self._take(await asyncio.wait_for(self._manager.ask(call), LATE_S))
        except (Unavailable, TimeoutError):
            refusal = answer(Unavailable("the session manager, which keeps the list of adapters, is away"))
            return JSONResponse(refusal.body, refusal.status, refusal.headers)
        return PlainTextResponse(f"Success: LoRA adapter {what} successfully.")

    def _checked(self, name: str, path: str) -> Adapter:
        """An adapter that engines can load, as far as its files tell. Reads them. Raises AdapterError."""
        try:
            PEFTHelper.from_local_dir(path, None).validate_legal(self._lora)
        except (OSError, TypeError, ValueError) as error:
            raise AdapterError(f"the adapter '{name}' cannot be served: {error}") from error
        return Adapter(name, path, adapter_id(path))

    async def _follow(self) -> None:
        while True:
            try:
                call = ShareAdapters(self._loaded, wait_s=WAIT_S)
                self._take(await asyncio.wait_for(self._manager.ask(call), WAIT_S + LATE_S))
            except (Unavailable, TimeoutError) as error:
                logger.info("the list of adapters did not come: %r", error)
                await asyncio.sleep(AGAIN_S)

    def _take(self, newer: AdapterList) -> None:
        if newer.version < self._loaded.version:  # of a manager that has not heard of it yet
            return
        self._loaded = newer
        loaded = {adapter.name: _request(adapter) for adapter in newer.adapters}
        self._models.lora_requests = loaded | self._configured


def _request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, adapter.path)


def _refused(status: int, why: str) -> Response:
    refusal = Answer(status, error_body(why, type_of(status), status))
    return JSONResponse(refusal.body, refusal.status)


async def serve_adapters(app: FastAPI, config: BatonConfig, manager: Manager) -> ServedAdapters | None:
    """Serve adapters with vLLM's server `app`, and the routes that load and unload them. None where there are none.

    Raises AdapterError where an adapter of the configuration cannot be served.
    """
    if config.lora is None:
        return None
    models: OpenAIServingModels = app.state.openai_serving_models
    served = ServedAdapters(models, models.input_processor.lora_config, config, manager)
    await served.start()
    key = config.ingress.admin_key

    def refusal(request: Request) -> Response | None:
        try:
            check_admin(request.scope, key)
        except AdminOnly as error:
            return _refused(403, str(error))
        return None

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(asked: LoadLoRAAdapterRequest, request: Request) -> Response:
        return refusal(request) or await served.load(asked)

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(asked: UnloadLoRAAdapterRequest, request: Request) -> Response:
        return refusal(request) or await served.unload(asked)

    return served
