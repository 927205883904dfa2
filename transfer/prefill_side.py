"""The prefill worker's handoffs: writes what is computed into what is offered, and answers for it.

Runs in the channel's thread alone, but for `is_answered`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from transfer import control
from transfer.endpoint import Endpoint
from transfer.handoff import Released, SendFailed, SendLanded, Write, Writer, WriterEffect
from transfer.layout import KVLayout, mismatch
from transfer.outbox import Key, Outbox, Trace, remember
from transfer.plane import Plane, PlaneError, WriteState

logger = logging.getLogger("baton.transfer")

OFFER_GRACE_S = 10.0


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
class _Writing:
    deadline: float
    machine: Writer
    request_id: str | None = None
    peer: bytes | None = None
    agent: str = ""


class PrefillSide:
    """`timeout_s`: from an offer, or a first chunk, until everything must be written."""

    def __init__(
        self, plane: Plane, layout: KVLayout, endpoint: Endpoint, outbox: Outbox, timeout_s: float, trace: Trace
    ) -> None:
        self._plane, self._layout, self._endpoint, self._outbox = plane, layout, endpoint, outbox
        self._timeout_s, self._trace = timeout_s, trace
        self._writing: dict[Key, _Writing] = {}
        self._gone: OrderedDict[Key, str] = OrderedDict()
        self.agents: dict[bytes, tuple[str, KVLayout]] = {}
        self.in_flight: deque[tuple[Key, Any, Write, float]] = deque()

    def __len__(self) -> int:
        """Handoffs that are open."""
        return len(self._writing)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do, if ever."""
        return min((writing.deadline for writing in self._writing.values()), default=None)

    # ---- what the engine does

    def saved(self, chunks: Iterable[Chunk], layer: int, ready: Ready | None) -> None:
        if ready is not None:
            ready.synchronize()
        for chunk in chunks:
            writing = self._writer(chunk.key)
            writing.request_id = chunk.request_id
            effects = writing.machine.saved(layer, chunk.computed, chunk.prompt, chunk.blocks)
            self._carry_out(chunk.key, effects)

    def is_answered(self, key: Key) -> bool:
        """Decode has offered its blocks, or the handoff is over already. For any thread."""
        writing = self._writing.get(key)
        return key in self._gone if writing is None else writing.peer is not None

    def ended(self, key: Key, request_id: str, ok: bool) -> None:
        writing = self._writer(key)
        writing.request_id = request_id
        if writing.peer is None:  # decode had the whole prefill's time to offer its blocks
            writing.deadline = min(writing.deadline, time.monotonic() + OFFER_GRACE_S)
        self._carry_out(key, writing.machine.ended(ok))

    def preempted(self, keys: list[Key]) -> bool:
        """These requests lose their blocks; True once no write reads them."""
        for key in keys:
            if writing := self._writing.get(key):
                writing.machine.preempted()
        return not any(key in keys for key, *_ in self.in_flight)

    # ---- what decode says

    def hello(self, sender: bytes, hello: control.Hello) -> None:
        reason = mismatch(self._layout, hello.layout)
        if reason is None:
            try:
                self._plane.connect(hello.agent, hello.agent_metadata, hello.layout)
            except PlaneError as error:
                reason = str(error)
        if reason is not None:
            self._endpoint.send(sender, control.Refused(reason))
            return
        self.agents[sender] = (hello.agent, hello.layout)
        self._endpoint.send(sender, control.Welcome())

    def offered(self, sender: bytes, offer: control.Offer) -> None:
        key = (offer.session, offer.epoch)
        if sender not in self.agents:
            return  # refused already
        agent, layout = self.agents[sender]
        if key in self._gone:
            self._endpoint.send(sender, control.Failed(*key, self._gone[key]))
        elif offer.first_block < 0 or not all(0 <= block < layout.num_blocks for block in offer.blocks):
            self._endpoint.send(sender, control.Failed(*key, "an offer of blocks that the peer does not have"))
        else:
            writing = self._writer(key)
            writing.peer, writing.agent = sender, agent
            writing.deadline = time.monotonic() + min(offer.timeout_s, self._timeout_s)
            self._outbox.alarm()
            self._carry_out(key, writing.machine.offered(offer.first_block, offer.blocks))

    def cancelled(self, sender: bytes, key: Key, reason: str) -> None:
        writing = self._writing.get(key)
        if writing is None:
            remember(self._gone, key, reason)
            self._outbox.alarm()
            self._endpoint.send(sender, control.Failed(*key, reason))
            return
        writing.peer = sender
        self._carry_out(key, writing.machine.stop(reason))
        self._drop_if_over(key, writing)

    # ---- what time and the data plane do

    def progress(self) -> None:
        for _ in range(len(self.in_flight)):
            key, handle, write, begun = self.in_flight.popleft()
            state = self._plane.check(handle)
            if state is WriteState.BUSY:
                self.in_flight.append((key, handle, write, begun))
            else:
                self._written(key, write, begun, state is WriteState.DONE)

    def finish_writes(self, timeout_s: float) -> bool:
        """See out what is in flight and begin nothing; False when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < deadline:
            self.in_flight = deque(w for w in self.in_flight if self._plane.check(w[1]) is WriteState.BUSY)
        return not self.in_flight

    def expire(self, now: float) -> None:
        for key, writing in list(self._writing.items()):
            if now > writing.deadline:
                writing.deadline = now + self._timeout_s
                self._carry_out(key, writing.machine.stop("the handoff ran out of time"))
                self._drop_if_over(key, writing)

    # ---- effects

    def _writer(self, key: Key) -> _Writing:
        if key not in self._writing:
            machine = Writer(self._layout.num_layers, self._layout.block_size)
            self._writing[key] = _Writing(time.monotonic() + self._timeout_s, machine)
            if key in self._gone:
                self._carry_out(key, machine.stop(self._gone[key]))
        return self._writing[key]

    def _carry_out(self, key: Key, effects: list[WriterEffect]) -> None:
        writing = self._writing[key]
        for effect in effects:
            match effect:
                case Write():
                    self._post(key, writing, effect)
                case SendLanded():
                    self._outbox.counts["handoffs_landed"] += 1
                    self._trace("landed", session=key[0])
                    self._answer(writing, control.Landed(*key))
                case SendFailed(reason):
                    self._outbox.counts["handoffs_failed"] += 1
                    self._answer(writing, control.Failed(*key, reason))
                case Released():
                    if writing.request_id is not None:
                        self._outbox.released(writing.request_id)
                    self._forget(key, writing)

    def _post(self, key: Key, writing: _Writing, write: Write) -> None:
        begun = time.monotonic()
        try:
            handle = self._plane.write(writing.agent, write.layer, write.local, write.remote)
        except PlaneError as error:
            logger.warning("session %s: %s", key[0], error)
            self._carry_out(key, writing.machine.write_done(ok=False))
            return
        self._trace("layer_write", session=key[0], layer=write.layer, blocks=len(write.local))
        self.in_flight.append((key, handle, write, begun))

    def _written(self, key: Key, write: Write, begun: float, ok: bool) -> None:
        if ok:
            counts = self._outbox.counts
            counts["writes"] += 1
            counts["blocks_written"] += len(write.local)
            counts["bytes_written"] += len(write.local) * self._layout.layer_block_bytes
            counts["write_s"] += time.monotonic() - begun
        self._trace("layer_written", session=key[0], layer=write.layer, ok=ok)
        writing = self._writing[key]
        self._carry_out(key, writing.machine.write_done(ok))
        self._drop_if_over(key, writing)

    def _answer(self, writing: _Writing, message: control.AnyMessage) -> None:
        if writing.peer is not None:
            self._endpoint.send(writing.peer, message)

    def _drop_if_over(self, key: Key, writing: _Writing) -> None:
        """A handoff that failed before its prefill began has no source to wait for."""
        if writing.request_id is None and not writing.machine.in_flight and writing.machine.reason:
            self._forget(key, writing)

    def _forget(self, key: Key, writing: _Writing) -> None:
        if self._writing.pop(key, None):
            remember(self._gone, key, writing.machine.reason or "the handoff is over")
