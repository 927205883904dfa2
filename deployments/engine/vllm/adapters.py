"""The LoRA adapters of one engine: loaded before the first request that needs them.

vLLM would load an adapter in the step that first computes with it, and a load that fails there ends the engine. So an
adapter is loaded by a call of its own before its request is added: what fails then is that request alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.checkpoint.adapter import adapter_id, digits
from deployments.checkpoint.errors import AdapterError
from deployments.engine.protocol import RequestRefused
from deployments.messages import HeldAdapters


class Adapters:
    """`capacity`: the adapters that the engine keeps."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, None] = {}  # the one that was used last is the last
        self._needed: dict[str, int] = {}
        self._loading = asyncio.Lock()
        self._load_s = 0.0

    @property
    def held(self) -> HeldAdapters:
        """The adapters that are loaded, and how long the newest load took."""
        return HeldAdapters(tuple(map(digits, self._held)), self._load_s)

    async def load(self, engine: AsyncMPClient, request: EngineCoreRequest) -> None:
        """Have the adapter of a request loaded, if it has one. It stays until the request is over.

        A load that has begun comes to its end though its request is cancelled, for the engine does not stop it either.
        Raises RequestRefused when it cannot be loaded, and EngineDeadError.
        """
        adapter = request.lora_request
        if adapter is None:
            return
        async with self._loading:
            if adapter.lora_int_id not in self._held:
                await _to_its_end(self._load(engine, adapter))
            self._held[adapter.lora_int_id] = self._held.pop(adapter.lora_int_id, None)
            self._needed[request.request_id] = adapter.lora_int_id

    def over(self, request_ids: list[str]) -> None:
        """These requests no longer need their adapters."""
        for request_id in request_ids:
            self._needed.pop(request_id, None)

    async def _load(self, engine: AsyncMPClient, adapter: LoRARequest) -> None:
        if not self._capacity:
            raise RequestRefused("this engine serves no LoRA adapters")
        begun_s = time.monotonic()
        try:
            found = await asyncio.to_thread(adapter_id, adapter.lora_path)
        except AdapterError as error:
            raise RequestRefused(f"the adapter cannot be loaded: {error}") from error
        if found != adapter.lora_int_id:
            raise RequestRefused(f"the files of adapter {adapter.lora_name!r} are others on this node")
        try:
            await self._make_room(engine)
            await engine.add_lora_async(adapter)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM passes on what went wrong in the engine as a plain Exception
            raise RequestRefused(f"the adapter cannot be loaded: {error}") from error
        self._held[adapter.lora_int_id] = None
        self._load_s = time.monotonic() - begun_s

    async def _make_room(self, engine: AsyncMPClient) -> None:
        """Unload the adapter that no request needs and that was used the longest ago, if there is no room.

        Where requests need all of them, vLLM itself unloads one, and loads it again in a step that needs it.
        """
        if len(self._held) < self._capacity:
            return
        unneeded = (number for number in self._held if number not in self._needed.values())
        if (oldest := next(unneeded, None)) is not None:
            await engine.remove_lora_async(oldest)
            del self._held[oldest]
        else:
            self._held.pop(next(iter(self._held)))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do work that cannot be broken off. A cancellation takes effect at its end."""
    doing = asyncio.ensure_future(work)
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait({doing})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        doing.exception()  # it was the cancelled request's alone, and counts as seen
        raise asyncio.CancelledError
    await doing
