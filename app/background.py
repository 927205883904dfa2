"""Background responses of one ingress: each runs on after its request has been answered, until it is over or cancelled.

The store has its status and its events, and any ingress shows them. This ingress renews the lease of each, and hears
from the store which ones to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from app.errors import Answer, TooManyForClient, answer
from app.held_response import ASGIApp, Exchange, Message, Receive, Scope, Send
from app.response_events import (
    Events,
    Response,
    changed,
    error_of,
    failed_event,
    is_content,
    is_last,
    response_of,
    with_status,
)
from app.timings import TIMINGS, Timings
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import Overloaded, StoreAway, Unavailable
from deployments.stored.calls import Begin, News, Put, Report, Store, Stored, Verdict

BROKEN_OFF = "the answer broke off"
STOPPED = "this server is being stopped"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What a run is to make. `show`: what vLLM's server says of the response as the request asked for it."""

    response_id: str
    owner: str
    items: bytes
    streamed: bool
    show: Callable[[Response], Response]


class Run:
    """One background response. It takes what vLLM's server streams."""

    def __init__(self, order: Order, context: RequestContext) -> None:
        self.order, self.context = order, context
        self.started: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        """The response as it begins, once vLLM's server has accepted the request; None where it has not."""
        self.events: list[bytes] = []
        self.told = 0
        """Events that the store knows."""
        self.status = "queued"
        self.refusal: Answer | None = None
        self.is_stopped = self.is_over = False
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._response: Response = {}
        self._final: Response | None = None
        self._reason = ""
        self._is_cancelled = False
        self._stream, self._http_status, self._body = Events(), 0, b""
        self._headers: dict[str, str] = {}

    def tapped(self, app: ASGIApp) -> ASGIApp:
        """The application; the run learns at once when it accepts the request. An `Exchange` holds that event back."""

        async def tapped(scope: Scope, receive: Receive, send: Send) -> None:
            async def tap(message: Message) -> None:
                if not self.started.done() and (begun := response_of(message.get("body", b""))) is not None:
                    self._response = with_status(self.order.show(begun), "queued")
                    self.started.set_result(self._response)
                await send(message)

            await app(scope, receive, tap)

        return tapped

    async def receive(self) -> Message:
        """What the client says: nothing. It is not there, and has not left."""
        await asyncio.Event().wait()
        raise AssertionError

    async def take(self, message: Message) -> None:
        """Part of what would go to the client."""
        if message["type"] == "http.response.start":
            self._http_status = message["status"]
            given = ((name.decode().lower(), value.decode()) for name, value in message["headers"])
            self._headers = {name: value for name, value in given if name == "retry-after"}
        elif self._http_status >= 400:
            self._body += message.get("body", b"")
        else:
            for event in self._stream.take(message.get("body", b"")):
                self._take_event(event)

    def _take_event(self, event: bytes) -> None:
        if (error := error_of(event)) is not None:
            self._reason = error
            return
        if is_content(event):
            self.status = "in_progress"
        event = changed(event, self.order.show)
        if is_last(event):
            self._final = response_of(event)
        if self.order.streamed:
            self.events.append(event)
        self.news.set()

    def end(self, reason: str = "") -> None:
        """There is no more to take. `reason`: why it was cut short."""
        self.is_over = True
        if self._http_status >= 400 and not reason:
            refusal = Answer(self._http_status, json.loads(self._body), self._headers)
            self._reason = str(refusal.body["error"].get("message"))
        else:
            refusal = answer(Unavailable(reason or BROKEN_OFF))
        if not self.started.done():
            self.refusal = refusal
            self.started.set_result(None)
        elif self._final is not None:
            self._response, self.status = self._final, self._final["status"]
        elif self.is_stopped:
            self.status = "cancelled"
        else:
            self.status = "failed"
            self._response = with_status(self._response, "failed", reason or self._reason or BROKEN_OFF)
            if self.order.streamed:
                self.events.append(failed_event(self._response, len(self.events)))
        self.news.set()

    def cancel(self) -> None:
        """Cut it short, once."""
        if self.task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    @property
    def stored(self) -> Stored:
        """The response as it is now."""
        order = self.order
        return Stored(order.owner, self.status, json.dumps(self._response).encode(), order.items, background=True)

    def untold(self) -> News:
        """What the store does not know yet."""
        return News(self.status, self.told, tuple(self.events[self.told :]))

    async def follow(self) -> AsyncIterator[bytes]:
        """The events from the first one on. The reader may leave."""
        number = 0
        while True:
            self.news.clear()
            for event in self.events[number:]:
                yield event
                number += 1
            if self.is_over and number == len(self.events):
                return
            if number == len(self.events):
                await self.news.wait()


class Runs:
    """The background responses of this ingress. Create it in a running event loop.

    `most`: of them at once. One client may have half of these.
    """

    def __init__(self, store: Store, most: int, timings: Timings = TIMINGS) -> None:
        self._store, self._most, self._timings = store, most, timings
        self._runs: dict[str, Run] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        # Ray cancels what was called in a client's context when that client goes; a run outlives its request.
        self._context = contextvars.copy_context()

    def __len__(self) -> int:
        return len(self._runs)

    async def start(self, order: Order, context: RequestContext, app: ASGIApp, scope: Scope, body: bytes) -> Run:
        """Start a run. When this returns, the store knows the response, or the run has a `refusal`.

        Raises Overloaded, TooManyForClient and StoreAway; then nothing runs.
        """
        if len(self._runs) >= self._most:
            raise Overloaded(f"{self._most} background responses run here already", 1.0, "too_many_background")
        if 2 * sum(run.context.client == context.client for run in self._runs.values()) >= self._most:
            raise TooManyForClient(
                f"a client may have {self._most // 2} background responses here, and this one has them"
            )
        run = Run(order, context)
        self._runs[order.response_id] = run
        self._empty.clear()
        run.task = self._task(self._run(run, app, scope, body), f"baton-response-{order.response_id}")
        run.task.add_done_callback(lambda _: self._gone(run))
        try:
            if await asyncio.shield(run.started) is None:
                return run
            if not await self._store.ask(Begin(order.response_id, run.stored, order.streamed)):
                raise Overloaded("the store of responses is full of responses that run", 1.0, "store_full")
        except BaseException:
            self.stop(order.response_id)
            raise
        if self._keeper is None or self._keeper.done():
            self._keeper = self._task(self._keep(), "baton-responses")
        return run

    def stop(self, response_id: str) -> None:
        """The response is over for the store: end it here, where it runs here."""
        if (run := self._runs.get(response_id)) is not None and not run.is_over:
            run.is_stopped = True
            run.cancel()

    async def ended(self) -> None:
        """Wait until nothing runs."""
        await self._empty.wait()

    async def close(self) -> None:
        """End what runs, as failed, and wait for it."""
        for run in self._runs.values():
            if not run.is_over:
                run.cancel()
        await self.ended()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name, context=self._context.copy())

    async def _run(self, run: Run, app: ASGIApp, scope: Scope, body: bytes) -> None:
        current.set(run.context)
        reason = ""
        try:
            exchange = Exchange(run.context, body, run.receive, run.take, self._timings)
            await exchange.run(run.tapped(app), scope)
        except asyncio.CancelledError:
            reason = STOPPED
        except Exception as error:
            logger.error("background response %s: %r", run.order.response_id, error, exc_info=error)
        run.end(reason)
        if run.refusal is None and not run.is_stopped:
            await self._finish(run)

    def _gone(self, run: Run) -> None:
        """The task of a run is over; it may have been cancelled before it began."""
        if not run.is_over:
            run.end(STOPPED)
        del self._runs[run.order.response_id]
        if not self._runs:
            self._empty.set()

    async def _finish(self, run: Run) -> None:
        """Give the store what the run has come to. Without an answer in time, the store's lease ends the response."""
        last = run.untold() if run.order.streamed else None
        try:
            async with asyncio.timeout(self._timings.store_s):
                while True:
                    with contextlib.suppress(StoreAway):
                        await self._store.ask(Put(run.order.response_id, run.stored, last))
                        return
                    await asyncio.sleep(self._timings.report_s)
        except TimeoutError:
            logger.warning("the store did not take the background response %s", run.order.response_id)

    async def _keep(self) -> None:
        """Report what runs, as long as something does."""
        while self._runs:
            await asyncio.sleep(self._timings.report_s)
            runs = [run for run in self._runs.values() if run.started.done() and not run.is_over]
            try:
                await self._report(runs)
            except StoreAway as error:
                logger.warning("background responses cannot be reported: %s", error)

    async def _report(self, runs: list[Run]) -> None:
        news = {run.order.response_id: run.untold() for run in runs}
        if not news:
            return
        verdicts = await self._store.ask(Report(news))
        for run in runs:
            told = news[run.order.response_id]
            verdict = verdicts.get(run.order.response_id)
            if verdict is Verdict.RUNS:
                run.told = told.first + len(told.events)
            elif verdict is Verdict.OVER:
                self.stop(run.order.response_id)
            elif not run.is_over:
                run.told = 0
                await self._store.ask(Begin(run.order.response_id, run.stored, run.order.streamed))
