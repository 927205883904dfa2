"""A worker's KV channel: one thread that owns the data plane, the control endpoint and every handoff.

The engine's thread only appends to a queue and takes results, so a step never waits on the network. Both sides of
a handoff run here: `Receiver` in a decode worker, `Writer` in a prefill worker.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer import control
from transfer.control import Seal
from transfer.endpoint import Endpoint, Incoming, PeerGone
from transfer.handoff import (
    Broken,
    Received,
    Receiver,
    ReceiverEffect,
    Released,
    SendCancel,
    SendFailed,
    SendLanded,
    Write,
    Writer,
    WriterEffect,
)
from transfer.layout import KVLayout, mismatch
from transfer.plane import Plane, PlaneError, WriteState

logger = logging.getLogger("baton.transfer")


class ChannelError(Exception):
    """The channel can move nothing any more."""


Key = tuple[str, int]  # session id, epoch
TOMBSTONES = 4096
OFFER_GRACE_S = 10.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step computes of a request: after it, `computed` of `prompt` tokens lie in `blocks`."""

    key: Key
    request_id: str
    computed: int
    prompt: int
    blocks: tuple[int, ...]


class Ready(Protocol):
    """Waits until a layer's KV is in memory: a CUDA event, recorded on the compute stream."""

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class Results:
    """What has ended since the engine last asked, by engine request id."""

    received: dict[str, int | None] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Receiving:
    request_id: str
    endpoint: str
    deadline: float
    machine: Receiver


@dataclass(slots=True)
class _Writing:
    deadline: float
    machine: Writer
    request_id: str | None = None
    peer: bytes | None = None
    agent: str = ""


class Channel:
    """One worker's channel. `trace(event, **fields)` is called with what happens to handoffs and layers."""

    def __init__(
        self,
        plane: Plane,
        layout: KVLayout,
        seal: Seal,
        host: str,
        timeout_s: float,
        trace: Callable[..., None] | None = None,
    ) -> None:
        self._plane, self._layout, self._timeout_s = plane, layout, timeout_s
        self._trace = trace or (lambda event, **fields: None)
        plane.register(layout)
        self._endpoint = Endpoint(plane.name, seal, host)
        self.address = self._endpoint.address
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._endpoint.watch(self._wake)
        self._commands: deque[Callable[[], None]] = deque()
        self._receiving: dict[Key, _Receiving] = {}
        self._writing: dict[Key, _Writing] = {}
        self._early_tokens: OrderedDict[Key, int] = OrderedDict()
        self._gone: OrderedDict[Key, str] = OrderedDict()
        self._agents: dict[bytes, tuple[str, KVLayout]] = {}
        self._in_flight: deque[tuple[Key, Any, Write, float]] = deque()
        self._results, self._lock, self._news = Results(), threading.Lock(), threading.Event()
        self._counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._chunks: tuple[Chunk, ...] = ()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="baton-channel", daemon=True)
        self._thread.start()

    # ---- called by the engine's thread

    def offer(
        self, key: Key, request_id: str, endpoint: str, first_block: int, blocks: list[int], needs_token: bool
    ) -> None:
        """Decode: offer `blocks` to the prefill worker at `endpoint` for the prompt's blocks from `first_block`."""
        self._do(lambda: self._offer(key, request_id, endpoint, first_block, blocks, needs_token))

    def cancel(self, key: Key, reason: str) -> None:
        """Decode: the request is over; its result comes once the peer writes no more."""
        self._do(lambda: self._cancel(key, reason))

    def withdraw(self, key: Key, endpoint: str, reason: str) -> None:
        """Decode: the request ended before its blocks were offered; prefill need not wait for an offer."""
        self._do(lambda: self._withdraw(key, endpoint, reason))

    def begin_step(self, chunks: list[Chunk]) -> None:
        """Prefill: this step computes these chunks."""
        self._chunks = tuple(chunks)
        for chunk in chunks:
            self._trace("forward_begin", session=chunk.key[0], computed=chunk.computed)

    def layer_saved(self, layer: int, ready: Ready | None = None) -> None:
        """Prefill: a layer's KV of this step's chunks is computed, or will be when `ready` is."""
        if chunks := self._chunks:
            self._do(lambda: self._saved(chunks, layer, ready))

    def end_step(self) -> None:
        """Prefill: the forward pass is over."""
        for chunk in self._chunks:
            self._trace("forward_end", session=chunk.key[0], computed=chunk.computed)
        self._chunks = ()

    def ended(self, key: Key, request_id: str, ok: bool) -> None:
        """Prefill: the engine is done with the request; `Results.released` names it when its blocks are free."""
        self._do(lambda: self._ended(key, request_id, ok))

    def wait_quiet(self, keys: list[Key], timeout_s: float) -> bool:
        """Prefill: these were preempted. Wait until no write reads their blocks, soon to be overwritten."""
        quiet = threading.Event()

        def check() -> None:
            for key in keys:
                if writing := self._writing.get(key):
                    writing.machine.preempted()
            if any(key in keys for key, *_ in self._in_flight):
                self._commands.append(check)
            else:
                quiet.set()

        self._do(check)
        return quiet.wait(timeout_s)

    def take_results(self) -> Results:
        """What has ended since the last call. Raises ChannelError when the channel's thread has died."""
        if self._error is not None:
            raise ChannelError("the KV channel's thread died") from self._error
        with self._lock:
            taken, self._results = self._results, Results()
            self._news.clear()
        return taken

    def wait_news(self, timeout_s: float) -> None:
        """Wait until there are results to take, or the channel has died."""
        self._news.wait(timeout_s)

    def counters(self) -> dict[str, float]:
        """Totals since the start, and what is open now."""
        return self._counts | {
            "open_receiving": len(self._receiving),
            "open_writing": len(self._writing),
            "bad_messages": self._endpoint.bad_messages,
        }

    def close(self) -> None:
        """End the thread and release memory; idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=10)
        os.close(self._wake)

    def _do(self, command: Callable[[], None]) -> None:
        if self._closing:  # the descriptor may be somebody else's by now
            return
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # ---- the channel's own thread from here on

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._error = error  # the engine's thread raises it from take_results
            self._news.set()
            raise
        finally:
            if self._finish_writes():
                self._endpoint.close()  # from here on peers know that we write no more
                self._plane.close()

    def _finish_writes(self) -> bool:
        """See out what is in flight. False: it did not end, and only the process's own end may tell the peers.

        Closing the connections tells decode that its blocks are its own again.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._in_flight and time.monotonic() < deadline:
            self._in_flight = deque(w for w in self._in_flight if self._plane.check(w[1]) is WriteState.BUSY)
        if self._in_flight:
            logger.error("%d writes did not end", len(self._in_flight))
        return not self._in_flight

    def _loop(self) -> None:
        while not self._closing:
            events = self._endpoint.poll(self._wait_ms())
            self._drain_wake()
            for _ in range(len(self._commands)):
                self._commands.popleft()()
            for event in events:
                if isinstance(event, PeerGone):
                    self._peer_gone(event.endpoint)
                else:
                    self._handle(event)
            self._progress()
            self._expire()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _wait_ms(self) -> int | None:
        """Poll while a transfer runs; while one is expected, drive the transport now and then; else sleep."""
        if self._in_flight or self._commands:
            return 0
        if self._receiving:
            return 2
        deadlines = [w.deadline for w in self._writing.values()]
        return max(1, int((min(deadlines) - time.monotonic()) * 1000)) if deadlines else None

    def _progress(self) -> None:
        if self._receiving:
            self._plane.progress()
        for _ in range(len(self._in_flight)):
            key, handle, write, begun = self._in_flight.popleft()
            state = self._plane.check(handle)
            if state is WriteState.BUSY:
                self._in_flight.append((key, handle, write, begun))
            else:
                self._written(key, write, begun, state is WriteState.DONE)
        if self._in_flight:
            time.sleep(0.00005)

    def _expire(self) -> None:
        now = time.monotonic()
        for key, receiving in list(self._receiving.items()):
            if now > receiving.deadline:
                receiving.deadline = now + self._timeout_s
                self._received(key, receiving.machine.cancel("the KV cache did not arrive in time"))
        for key, writing in list(self._writing.items()):
            if now > writing.deadline:
                writing.deadline = now + self._timeout_s
                self._write(key, writing.machine.stop("the handoff ran out of time"))
                self._drop_if_over(key, writing)

    def _handle(self, incoming: Incoming) -> None:
        sender, message = incoming.sender, incoming.message
        match message:
            case control.Hello() if isinstance(sender, bytes):
                self._hello(sender, message)
            case control.Offer() if isinstance(sender, bytes):
                self._offered(sender, message)
            case control.Cancel(session, epoch, reason) if isinstance(sender, bytes):
                self._cancelled(sender, (session, epoch), reason)
            case control.FirstToken(session, epoch, token):
                self._first_token((session, epoch), token)
            case control.Landed(session, epoch):
                self._received((session, epoch), self._machine((session, epoch), Receiver.landed))
            case control.Failed(session, epoch, reason):
                self._received((session, epoch), self._machine((session, epoch), lambda m: m.failed(reason)))
            case control.Refused(reason) if isinstance(sender, str):
                self._refused(sender, reason)
            case _:
                return

    # decode side

    def _offer(
        self, key: Key, request_id: str, endpoint: str, first_block: int, blocks: list[int], needs_token: bool
    ) -> None:
        machine = Receiver(needs_token=needs_token)
        self._receiving[key] = _Receiving(request_id, endpoint, time.monotonic() + self._timeout_s, machine)
        self._reach(endpoint)
        self._endpoint.send(endpoint, control.Offer(*key, first_block, blocks, self._timeout_s))
        self._trace("offered", session=key[0], blocks=len(blocks))
        if (token := self._early_tokens.pop(key, None)) is not None:
            machine.first_token(token)

    def _reach(self, endpoint: str) -> None:
        """Introduce ourselves to a peer that we have no connection to."""
        if self._endpoint.connect(endpoint):
            hello = control.Hello(self._plane.name, self._plane.metadata(), self._layout)
            self._endpoint.send(endpoint, hello)

    def _withdraw(self, key: Key, endpoint: str, reason: str) -> None:
        self._reach(endpoint)
        self._endpoint.send(endpoint, control.Cancel(*key, reason))

    def _cancel(self, key: Key, reason: str) -> None:
        self._received(key, self._machine(key, lambda m: m.cancel(reason)))

    def _machine(self, key: Key, event: Callable[[Receiver], list[ReceiverEffect]]) -> list[ReceiverEffect]:
        receiving = self._receiving.get(key)
        return event(receiving.machine) if receiving else []

    def _first_token(self, key: Key, token: int) -> None:
        if key in self._receiving:
            self._received(key, self._receiving[key].machine.first_token(token))
        else:
            _remember(self._early_tokens, key, token)

    def _received(self, key: Key, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            receiving = self._receiving[key]
            if isinstance(effect, SendCancel):
                cancel = control.Cancel(*key, receiving.machine.reason)
                self._endpoint.send(receiving.endpoint, cancel)
                continue
            del self._receiving[key]
            with self._lock:
                if isinstance(effect, Received):
                    self._results.received[receiving.request_id] = effect.token
                elif isinstance(effect, Broken):
                    self._results.broken[receiving.request_id] = effect.reason
                self._news.set()
            self._counts["handoffs_received" if isinstance(effect, Received) else "handoffs_broken"] += 1
            self._trace("received", session=key[0], ok=isinstance(effect, Received))

    def _peer_gone(self, endpoint: str) -> None:
        for key, receiving in list(self._receiving.items()):
            if receiving.endpoint == endpoint:
                self._received(key, receiving.machine.peer_lost())

    def _refused(self, endpoint: str, reason: str) -> None:
        logger.error("the prefill worker at %s refuses us: %s", endpoint, reason)
        self._endpoint.disconnect(endpoint)
        for key, receiving in list(self._receiving.items()):
            if receiving.endpoint == endpoint:
                self._received(key, receiving.machine.failed(reason))

    # prefill side

    def _hello(self, sender: bytes, hello: control.Hello) -> None:
        reason = mismatch(self._layout, hello.layout)
        if reason is None:
            try:
                self._plane.connect(hello.agent, hello.agent_metadata, hello.layout)
            except PlaneError as error:
                reason = str(error)
        if reason is not None:
            self._endpoint.send(sender, control.Refused(reason))
            return
        self._agents[sender] = (hello.agent, hello.layout)
        self._endpoint.send(sender, control.Welcome())

    def _writer(self, key: Key) -> _Writing:
        if key not in self._writing:
            machine = Writer(self._layout.num_layers, self._layout.block_size)
            self._writing[key] = _Writing(time.monotonic() + self._timeout_s, machine)
            if key in self._gone:
                self._write(key, machine.stop(self._gone[key]))
        return self._writing[key]

    def _offered(self, sender: bytes, offer: control.Offer) -> None:
        key = (offer.session, offer.epoch)
        if sender not in self._agents:
            return  # refused already
        if key in self._gone:
            self._endpoint.send(sender, control.Failed(*key, self._gone[key]))
            return
        agent, layout = self._agents[sender]
        if offer.first_block < 0 or not all(0 <= block < layout.num_blocks for block in offer.blocks):
            self._endpoint.send(sender, control.Failed(*key, "an offer of blocks that the peer does not have"))
            return
        writing = self._writer(key)
        writing.peer, writing.agent = sender, agent
        writing.deadline = time.monotonic() + min(offer.timeout_s, self._timeout_s)
        self._write(key, writing.machine.offered(offer.first_block, offer.blocks))

    def _cancelled(self, sender: bytes, key: Key, reason: str) -> None:
        writing = self._writing.get(key)
        if writing is None:
            _remember(self._gone, key, reason)
            self._endpoint.send(sender, control.Failed(*key, reason))
            return
        writing.peer = sender
        self._write(key, writing.machine.stop(reason))
        self._drop_if_over(key, writing)

    def _saved(self, chunks: tuple[Chunk, ...], layer: int, ready: Ready | None) -> None:
        if ready is not None:
            ready.synchronize()
        for chunk in chunks:
            writing = self._writer(chunk.key)
            writing.request_id = chunk.request_id
            effects = writing.machine.saved(layer, chunk.computed, chunk.prompt, chunk.blocks)
            self._write(chunk.key, effects)

    def _ended(self, key: Key, request_id: str, ok: bool) -> None:
        writing = self._writer(key)
        writing.request_id = request_id
        if writing.peer is None:  # decode had the whole prefill's time to offer its blocks
            writing.deadline = min(writing.deadline, time.monotonic() + OFFER_GRACE_S)
        self._write(key, writing.machine.ended(ok))

    def _write(self, key: Key, effects: list[WriterEffect]) -> None:
        writing = self._writing[key]
        for effect in effects:
            match effect:
                case Write():
                    self._post(key, writing, effect)
                case SendLanded():
                    self._counts["handoffs_landed"] += 1
                    self._trace("landed", session=key[0])
                    self._answer(writing, control.Landed(*key))
                case SendFailed(reason):
                    self._counts["handoffs_failed"] += 1
                    self._answer(writing, control.Failed(*key, reason))
                case Released():
                    self._release(key, writing)

    def _post(self, key: Key, writing: _Writing, write: Write) -> None:
        begun = time.monotonic()
        try:
            handle = self._plane.write(writing.agent, write.layer, write.local, write.remote)
        except PlaneError as error:
            logger.warning("session %s: %s", key[0], error)
            self._write(key, writing.machine.write_done(ok=False))
            return
        self._trace("layer_write", session=key[0], layer=write.layer, blocks=len(write.local))
        self._in_flight.append((key, handle, write, begun))

    def _written(self, key: Key, write: Write, begun: float, ok: bool) -> None:
        if ok:
            self._counts["writes"] += 1
            self._counts["blocks_written"] += len(write.local)
            self._counts["bytes_written"] += len(write.local) * self._layout.layer_block_bytes
            self._counts["write_s"] += time.monotonic() - begun
        self._trace("layer_written", session=key[0], layer=write.layer, ok=ok)
        writing = self._writing[key]
        self._write(key, writing.machine.write_done(ok))
        self._drop_if_over(key, writing)

    def _answer(self, writing: _Writing, message: control.AnyMessage) -> None:
        if writing.peer is not None:
            self._endpoint.send(writing.peer, message)

    def _release(self, key: Key, writing: _Writing) -> None:
        with self._lock:
            if writing.request_id is not None:
                self._results.released.add(writing.request_id)
                self._news.set()
        self._forget(key, writing)

    def _drop_if_over(self, key: Key, writing: _Writing) -> None:
        """A handoff that failed before its prefill began has no source to wait for."""
        if writing.request_id is None and not writing.machine.in_flight and writing.machine.reason:
            self._forget(key, writing)

    def _forget(self, key: Key, writing: _Writing) -> None:
        if self._writing.pop(key, None):
            _remember(self._gone, key, writing.machine.reason or "the handoff is over")


COUNTERS = (
    "writes",
    "blocks_written",
    "bytes_written",
    "write_s",
    "handoffs_landed",
    "handoffs_failed",
    "handoffs_received",
    "handoffs_broken",
)


def _remember(book: OrderedDict[Key, Any], key: Key, value: Any) -> None:
    book[key] = value
    while len(book) > TOMBSTONES:
        book.popitem(last=False)
