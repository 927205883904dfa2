"""Files and batches of one ingress: the routes, and the runner of batches beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from app.access.gate import class_for, key_of
from app.batches.blobs import Blobs
from app.batches.database import Database
from app.batches.file_rows import Quota
from app.batches.line_call import LineCaller, Observe
from app.batches.line_rows import Result
from app.batches.routes import BatchRoutes
from app.batches.run import Parts
from app.batches.runner import BatchRunner
from app.batches.slots import Slots
from app.batches.stores import Stores
from app.batches.validation import Limits
from app.held_response import ASGIApp, Scope
from configs.schema import BatchesConfig, BatonConfig
from deployments.errors import StoreAway

logger = logging.getLogger("baton.batches")
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "batches"


class Batches:
    """`routes`: the ASGI application. `runner`: of this ingress. `start` it before a request comes, and `close` it."""

    def __init__(self, stores: Stores, routes: BatchRoutes, runner: BatchRunner) -> None:
        self._stores, self.routes, self.runner = stores, routes, runner

    async def start(self) -> None:
        """Run batches. Where the stores cannot be reached yet, requests get 503 until they can."""
        try:
            await self._stores.prepare()
        except StoreAway as error:
            logger.warning("batches: %s", error)
        self.runner.start()

    async def stop_running(self) -> None:
        """Leave the batches to other ingresses. The routes go on."""
        await self.runner.close()

    async def close(self) -> None:
        """End everything. No request may come any more."""
        await self.runner.close()
        await self._stores.close()


def batches_of(
    config: BatonConfig,
    app: ASGIApp,
    holder: str,
    observe: Observe = lambda context, status: None,
    noted: Callable[[Sequence[Result]], None] = lambda results: None,
) -> Batches | None:
    """As configured; None where there are none. `app`: vLLM's server. `holder`: the name of this ingress.

    `observe`: is called with every try of a line, as with every request. `noted`: with lines that are answered.
    """
    ingress, settings = config.ingress, config.ingress.batches
    if settings is None:
        return None
    stores = stores_of(settings)
    slots = Slots(settings.max_concurrency)
    most_parts = min(ingress.max_parts, config.placement.max_queued_requests or ingress.max_parts)
    caller = LineCaller(app, ingress, slots, settings.priority_class, most_parts, observe)
    limits = Limits(settings.max_lines, ingress.max_body_bytes)
    runner = BatchRunner(holder, Parts(stores, caller, slots, limits, noted))

    def check(scope: Scope) -> None:
        class_for(key_of(scope), settings.priority_class)

    window_s = settings.max_completion_window_s
    return Batches(stores, BatchRoutes(stores, settings.max_file_bytes, window_s, check, runner.wake), runner)


def stores_of(settings: BatchesConfig) -> Stores:
    """The stores of a configuration."""
    quota = Quota(settings.max_files, settings.max_bytes, settings.max_total_bytes, settings.max_batches)
    database = Database(settings.database_url or f"sqlite:///{DEFAULT_FOLDER / 'batches.db'}")
    return Stores(database, Blobs(settings.files_url or str(DEFAULT_FOLDER / "files")), quota, settings.file_ttl_s)
