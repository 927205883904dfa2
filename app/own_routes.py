"""The routes that Baton answers itself, from what the session manager says. Pure ASGI, without Ray and vLLM."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from app.admin import check_drain, drain_of, drained
from app.errors import Answer, MethodNotAllowed, RequestError, answer, error_body, type_of
from app.held_response import Scope
from app.prefixes import prefixes_answer, prefixes_of
from app.timings import Timings
from configs.schema import IngressConfig
from deployments.manager.calls import Drain, Manager, Prefixes, Ready, Status

logger = logging.getLogger(__name__)


class OwnRoutes:
    """`counters`: the gateway's, which the status shows."""

    def __init__(
        self, manager: Manager, config: IngressConfig, timings: Timings, counters: dict[str, dict[str, int]]
    ) -> None:
        self._manager, self._config, self._timings, self._counters = manager, config, timings, counters
        self._gets = {"/health": self._health, "/ready": self._ready, "/baton/status": self._status}

    async def at(self, path: str, scope: Scope) -> Answer | None:
        """The answer of the route at this path; None where there is none. `path`: without the route prefix."""
        try:
            if (get := self._gets.get(path)) is not None:
                if scope["method"] not in ("GET", "HEAD"):
                    raise MethodNotAllowed(f"{scope['path']} answers GET only")
                return await get()
            if (drain := drain_of(path)) is not None:
                check_drain(scope, self._config.admin_key)
                return await self._drain(drain)
            if (prefixes := prefixes_of(path, scope, self._config.admin_key)) is not None:
                return await self._prefixes(prefixes)
        except RequestError as error:
            return answer(error)
        return None

    async def _health(self) -> Answer:
        return Answer(200, {"status": "alive"})

    async def _ready(self) -> Answer:
        state, _ = await self._ask(Ready())
        pools = state.get("pools") or {}
        ready = bool(pools) and all(pool.get("ready") for pool in pools.values())
        state = {"pools": {}, **state, "ready": ready}
        if not ready and "error" not in state:
            state["error"] = _unready("a pool has no ready replica", "not_ready")
        return Answer(200 if ready else 503, state)

    async def _status(self) -> Answer:
        state, answered = await self._ask(Status())
        return Answer(200 if answered else 503, {**state, "ingress": self._counters})

    async def _drain(self, call: Drain) -> Answer:
        found, answered = await self._ask(call)
        return drained(found) if answered else Answer(503, found)

    async def _prefixes(self, call: Prefixes) -> Answer:
        found, answered = await self._ask(call)
        return prefixes_answer(call, found) if answered else Answer(503, found)

    async def _ask(self, call: Ready | Status | Drain | Prefixes) -> tuple[dict[str, Any], bool]:
        """The control plane's answer and True, or only an error and False when there is no answer in time."""
        try:
            return await asyncio.wait_for(self._manager.ask(call), self._timings.control_s), True
        except Exception as error:  # noqa: BLE001 - the reason why there is no answer becomes the answer
            logger.warning("the control plane did not answer: %r", error)
            return {"error": _unready(f"{type(error).__name__}: {error}".rstrip(": "), "manager_away")}, False


def _unready(message: str, code: str) -> dict[str, Any]:
    """The error in a 503 of our own routes."""
    error: dict[str, Any] = error_body(message, type_of(503), code)["error"]
    return error
