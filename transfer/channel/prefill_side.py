"""The prefill worker's handoffs: writes what is computed into what is offered, and answers for it.

Runs in the channel's thread alone, but for `is_answered`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer.channel.outbox import Key, Outbox, Trace, remember
from transfer.channel.pacing import Job, Limits, Pacer
from transfer.control import messages as control
from transfer.control.endpoint import Endpoint
from transfer.control.handoff import SendFailed, SendLanded, Write, Writer, WriterEffect, WriterState
from transfer.memory.heads import readers, sources
from transfer.memory.layout import KVLayout, mismatch
from transfer.memory.plane import WARM_UP_S, Plane, PlaneError, WriteState

logger = logging.getLogger("baton.transfer")

OFFER_GRACE_S = 10.0
NUDGE_AFTER_S, NUDGE_AGAIN_S = 0.0005, 0.005

Reading = tuple[Key, int]  # one decode worker's part of a handoff: key and rank


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step computes of a request: after it, `computed` of `prompt` tokens lie in `blocks`.

    `peers`: workers of the decode replica.
    """

    key: Key
    request_id: str
    computed: int
    prompt: int
    blocks: tuple[int, ...]
    peers: int = 1


class Ready(Protocol):
    """Whether a layer's KV is in memory: a CUDA event, recorded on the compute stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Reader:
    machine: Writer
    peer: bytes | None = None


@dataclass(slots=True)
class _Writing:
    deadline: float
    readers: dict[int, _Reader] = field(default_factory=dict)
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Agent:
    name: str
    layout: KVLayout
    address: str


class PrefillSide:
    """`timeout_s`: from an offer, or a first chunk, until everything must be written."""

    def __init__(
        self,
        plane: Plane,
        layout: KVLayout,
        endpoint: Endpoint,
        outbox: Outbox,
        timeout_s: float,
        trace: Trace,
        limits: Limits,
    ) -> None:
        self._plane, self._layout, self._endpoint, self._outbox = plane, layout, endpoint, outbox
        self._timeout_s, self._trace = timeout_s, trace
        self._writing: dict[Key, _Writing] = {}
        self._gone: OrderedDict[Reading, str] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._listed: set[str] = set()
        self._warm_until = 0.0
        self._pacer = Pacer(limits)
        self.agents: dict[bytes, _Agent] = {}
        self.in_flight: deque[tuple[Job, Any, float]] = deque()
        self._computing: deque[tuple[tuple[Chunk, ...], int, Ready]] = deque()
        self._nudged: dict[bytes, float] = {}

    @property
    def is_busy(self) -> bool:
        """A write is under way, or a layer is being computed: look again soon."""
        return bool(self.in_flight or self._computing)

    def __len__(self) -> int:
        """Handoffs that are open."""
        return len(self._writing)

    def is_active(self, now: float) -> bool:
        """The transport makes a data connection, or takes one down."""
        return now < self._warm_until

    def wait_s(self, now: float) -> float | None:
        """Seconds until there is something to do without news: 0 while we are busy, None for never."""
        if self.is_busy:
            return 0.0
        deadlines = [max(0.0, writing.deadline - now) for writing in self._writing.values()]
        if len(self._pacer):
            deadlines.append(self._pacer.wait_s(now))
        return min(deadlines, default=None)

    # ---- what the engine does

    def saved(self, chunks: tuple[Chunk, ...], layer: int, ready: Ready | None) -> None:
        """An engine launches layers far ahead of its GPU: waiting here would post the first after the last."""
        if ready is None:
            self._computed(chunks, layer)
        else:
            self._computing.append((chunks, layer, ready))

    def _catch_up(self, wait: bool = False) -> None:
        """Take the layers that are computed; `wait`: all that were launched."""
        while self._computing:
            chunks, layer, ready = self._computing[0]
            if wait:
                ready.synchronize()
            elif not ready.query():
                return
            self._computing.popleft()
            self._computed(chunks, layer)

    def _computed(self, chunks: Iterable[Chunk], layer: int) -> None:
        for chunk in chunks:
            writing = self._open(chunk.key)
            writing.request_id = chunk.request_id
            for rank in self._readers(chunk.peers):
                effects = self._reader(chunk.key, rank).machine.saved(layer, chunk.computed, chunk.prompt, chunk.blocks)
                self._carry_out(chunk.key, rank, effects)

    def is_answered(self, key: Key, peers: int) -> bool:
        """Decode has offered its blocks, or the handoff is over already. For any thread."""
        writing = self._writing.get(key)
        for rank in self._readers(peers):
            reader = writing.readers.get(rank) if writing else None
            if (reader is None or reader.peer is None) and (key, rank) not in self._gone:
                return False
        return True

    def ended(self, key: Key, request_id: str, ok: bool, peers: int) -> None:
        self._catch_up(wait=True)  # the engine has the result of the step: its layers are computed
        writing = self._open(key)
        writing.request_id = request_id
        ranks = self._readers(peers)
        if any(self._reader(key, rank).peer is None for rank in ranks):  # decode had the whole prefill's time to offer
            writing.deadline = min(writing.deadline, time.monotonic() + OFFER_GRACE_S)
        for rank, reader in writing.readers.items():  # whoever else has offered waits for nothing
            self._carry_out(key, rank, reader.machine.ended(ok and rank in ranks))
        self._end_if_over(key)

    def preempted(self, keys: list[Key]) -> bool:
        """These requests lose their blocks; True once no write reads them."""
        self._catch_up(wait=True)
        for key in keys:
            if writing := self._writing.get(key):
                for rank, reader in writing.readers.items():
                    reader.machine.preempted([job.write for job in self._pacer.drop((key, rank))])
        return not any(job.handoff[0] in keys for job, *_ in self.in_flight)

    # ---- what decode says

    def hello(self, sender: bytes, hello: control.Hello) -> None:
        agent = _Agent(hello.agent, hello.layout, hello.address)
        known = {peer: other for peer, other in self.agents.items() if peer == sender or other.name == agent.name}
        if sender in known and known != {sender: agent}:  # no answer: "refused" would say that we do not write to it
            self._outbox.counts["messages_refused"] += 1
            return
        reason = self._refused.get(sender)
        if any(other != agent for other in known.values()):
            reason = "this agent's name is another worker's"
        elif not known and reason is None:
            reason = self._connect(hello)
        if reason is not None:
            self._refuse(sender, reason)
            return
        for lost in known.keys() - {sender}:
            self._succeed(lost, sender)
        self.agents[sender] = agent
        self._endpoint.send(sender, control.Welcome())

    def _connect(self, hello: control.Hello) -> str | None:
        """Why we cannot write to this peer, if we cannot."""
        self._warm_until = time.monotonic() + WARM_UP_S
        reason = mismatch(self._layout, hello.layout)
        if reason is None:
            try:
                self._plane.connect(hello.agent, hello.agent_metadata, hello.layout)
            except PlaneError as error:
                reason = str(error)
        return reason

    def _succeed(self, lost: bytes, sender: bytes) -> None:
        """A worker that connects anew has lost its connection, and given up the handoffs that were on it."""
        del self.agents[lost]
        self._nudged.pop(lost, None)
        for key, writing in list(self._writing.items()):
            for rank, reader in writing.readers.items():
                if reader.peer == lost:
                    reader.peer = sender
                    self._stop(key, rank, reader, "the connection was lost")
            self._end_if_over(key)

    def _refuse(self, sender: bytes, reason: str) -> None:
        """For good: a peer that hears it takes its blocks back, so nothing may be written on this connection later."""
        self._outbox.counts["messages_refused"] += 1
        remember(self._refused, sender, reason)
        self._endpoint.send(sender, control.Refused(reason[: control.REASON_CHARS]))

    def keep(self, peers: list[list[str]]) -> None:
        """The replicas that there are, each the endpoints of its workers: forget those that were and are not."""
        now_listed = {endpoint for workers in peers for endpoint in workers}
        gone, self._listed = self._listed - now_listed, now_listed
        busy = {reader.peer for writing in self._writing.values() for reader in writing.readers.values()}
        for sender, agent in list(self.agents.items()):
            if agent.address not in gone:
                continue
            if sender in busy:
                self._listed.add(agent.address)  # next time
            else:
                self._warm_until = time.monotonic() + WARM_UP_S
                self._plane.disconnect(agent.name)
                del self.agents[sender]
                self._nudged.pop(sender, None)

    def offered(self, sender: bytes, offer: control.Offer) -> None:
        key, rank = (offer.session, offer.epoch), offer.rank
        if sender not in self.agents:  # forgotten, or its Hello was lost: refused, it introduces itself anew
            self._refuse(sender, "this worker is not known here")
        elif (key, rank) in self._gone:
            self._endpoint.send(sender, control.Failed(*key, self._gone[key, rank]))
        elif reason := self._objection(sender, key, rank):
            self._outbox.counts["messages_refused"] += 1
            self._endpoint.send(sender, control.Failed(*key, reason))
        elif reason := self._objection_to_blocks(sender, key, offer):
            self._outbox.counts["messages_refused"] += 1
            self.cancelled(sender, control.Cancel(*key, rank, reason))  # for good, also if it is repeated
        else:
            writing, reader = self._open(key), self._reader(key, rank)
            if reader.peer is None:
                reader.peer = sender
                writing.deadline = time.monotonic() + min(offer.timeout_s, self._timeout_s)
                self._outbox.alarm()
            self._carry_out(key, rank, reader.machine.offered(offer.first_block, offer.blocks))

    def cancelled(self, sender: bytes, cancel: control.Cancel) -> None:
        """Always answered, because decode holds its blocks until it is."""
        key, rank = (cancel.session, cancel.epoch), cancel.rank
        if sender not in self.agents:
            self._refuse(sender, "this worker is not known here")
        elif reason := self._objection(sender, key, rank):
            self._outbox.counts["messages_refused"] += 1
            self._endpoint.send(sender, control.Failed(*key, reason))
        elif key not in self._writing:
            remember(self._gone, (key, rank), cancel.reason)
            self._outbox.alarm()
            self._endpoint.send(sender, control.Failed(*key, cancel.reason))
        else:
            reader = self._reader(key, rank)
            reader.peer = sender
            self._stop(key, rank, reader, cancel.reason)
            if reader.machine.state is WriterState.LANDED:  # the first answer may have been lost
                self._answer(reader, control.Landed(*key))
            self._end_if_over(key)

    def _objection(self, sender: bytes, key: Key, rank: int) -> str | None:
        """Why this peer has no part in a handoff as worker `rank`. Then no write of the handoff goes to it."""
        theirs, ours = self.agents[sender].layout, self._layout
        if rank != theirs.rank:
            return "a message in another worker's name"
        if ours.rank not in sources(rank, theirs.workers, ours.workers, ours.total_heads):
            return "this worker's heads are not ours to write"
        if writing := self._writing.get(key):
            reader = writing.readers.get(rank)
            if reader is None and writing.request_id is not None:
                return "the prefill is for a replica of fewer workers"
            if reader is not None and reader.peer not in (None, sender):
                return "another worker has offered its blocks"
        return None

    def _objection_to_blocks(self, sender: bytes, key: Key, offer: control.Offer) -> str | None:
        """What is wrong with the blocks of an offer that is not a repetition."""
        writing, has = self._writing.get(key), self.agents[sender].layout.num_blocks
        if writing and (reader := writing.readers.get(offer.rank)) and reader.machine.remote is not None:
            return None
        if offer.first_block < 0 or not offer.blocks or not all(0 <= block < has for block in offer.blocks):
            return "an offer of blocks that the peer does not have"
        if len(offer.blocks) + self._unbegun(sender) > has:
            return "more blocks are offered than the peer has"
        return None

    def _unbegun(self, sender: bytes) -> int:
        """Blocks that a peer has offered to prefills that have not begun. It holds them, so there is an end to them."""
        return sum(
            len(reader.machine.remote or ())
            for writing in self._writing.values()
            if writing.request_id is None
            for reader in writing.readers.values()
            if reader.peer == sender and reader.machine.state is WriterState.OPEN
        )

    # ---- what time and the data plane do

    def progress(self) -> None:
        self._catch_up()
        now = time.monotonic()
        for _ in range(len(self.in_flight)):
            job, handle, begun = self.in_flight.popleft()
            state = self._plane.check(handle)
            if state is WriteState.BUSY:
                self.in_flight.append((job, handle, begun))
                self._nudge(job.peer, begun, now)
            else:
                self._written(job, begun, state is WriteState.DONE)
        self._post()

    def _nudge(self, peer: bytes, begun: float, now: float) -> None:
        """Over some transports a write waits for the other side's attention; a decode worker that waits sleeps."""
        if now - begun > NUDGE_AFTER_S and now - self._nudged.get(peer, 0.0) > NUDGE_AGAIN_S:
            self._nudged[peer] = now
            self._endpoint.send(peer, control.Nudge())

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
                for rank, reader in writing.readers.items():
                    self._stop(key, rank, reader, "the handoff ran out of time")
                self._end_if_over(key)

    # ---- effects

    def _readers(self, peers: int) -> list[int]:
        layout = self._layout
        return readers(layout.rank, layout.workers, peers, layout.total_heads)

    def _open(self, key: Key) -> _Writing:
        if key not in self._writing:
            self._writing[key] = _Writing(time.monotonic() + self._timeout_s)
        return self._writing[key]

    def _reader(self, key: Key, rank: int) -> _Reader:
        """One decode worker's part; one that was cancelled before it began is stopped from the start."""
        known = self._writing[key].readers
        if rank not in known:
            known[rank] = _Reader(Writer(self._layout.num_layers, self._layout.block_size))
            if (key, rank) in self._gone:
                self._carry_out(key, rank, known[rank].machine.stop(self._gone[key, rank]))
        return known[rank]

    def _stop(self, key: Key, rank: int, reader: _Reader, reason: str) -> None:
        self._carry_out(key, rank, reader.machine.stop(reason))

    def _carry_out(self, key: Key, rank: int, effects: list[WriterEffect]) -> None:
        reader = self._writing[key].readers[rank]
        for effect in effects:
            match effect:
                case Write():
                    self._pacer.push(self._job(key, rank, reader, effect))
                case SendLanded():
                    self._outbox.counts["handoffs_landed"] += 1
                    self._trace("landed", session=key[0], rank=rank)
                    self._answer(reader, control.Landed(*key))
                case SendFailed(reason):
                    self._outbox.counts["handoffs_failed"] += 1
                    self._answer(reader, control.Failed(*key, reason))
        if reader.machine.state is WriterState.FENCING and (unposted := self._pacer.drop((key, rank))):
            self._carry_out(key, rank, reader.machine.dropped(len(unposted)))

    def _job(self, key: Key, rank: int, reader: _Reader, write: Write) -> Job:
        assert reader.peer is not None
        _, length = self._layout.window(self.agents[reader.peer].layout)
        descriptors = len(write.local) * self._layout.regions_per_layer
        return Job((key, rank), reader.peer, descriptors * length, descriptors, write)

    def _post(self) -> None:
        now = time.monotonic()
        while (job := self._pacer.pop(now)) is not None:
            write = job.write
            try:
                handle = self._plane.write(self.agents[job.peer].name, write.layer, write.local, write.remote)
            except PlaneError as error:
                logger.warning("session %s: %s", job.handoff[0][0], error)
                self._written(job, now, ok=False)
                continue
            self._trace("layer_write", session=job.handoff[0][0], layer=write.layer, blocks=len(write.local))
            self.in_flight.append((job, handle, now))

    def _written(self, job: Job, begun: float, ok: bool) -> None:
        self._pacer.done(job)
        (key, rank), write = job.handoff, job.write
        if ok:
            counts = self._outbox.counts
            counts["writes"] += 1
            counts["blocks_written"] += len(write.local)
            counts["bytes_written"] += job.size
            counts["write_s"] += time.monotonic() - begun
        self._trace("layer_written", session=key[0], layer=write.layer, ok=ok, bytes=job.size)
        self._carry_out(key, rank, self._writing[key].readers[rank].machine.write_done(ok))
        self._end_if_over(key)

    def _answer(self, reader: _Reader, message: control.AnyMessage) -> None:
        if reader.peer is not None:
            self._endpoint.send(reader.peer, message)

    def _end_if_over(self, key: Key) -> None:
        """Over once the engine is done with the request and no worker reads its blocks.

        A handoff that failed before its prefill began has no source to wait for.
        """
        writing = self._writing.get(key)
        if writing is None:
            return
        machines = [reader.machine for reader in writing.readers.values()]
        if writing.request_id is None:
            if all(machine.state is WriterState.FAILED for machine in machines):
                self._forget(key, writing)
        elif all(machine.released for machine in machines):
            self._outbox.released(writing.request_id)
            self._forget(key, writing)

    def _forget(self, key: Key, writing: _Writing) -> None:
        del self._writing[key]
        for rank, reader in writing.readers.items():
            remember(self._gone, (key, rank), reader.machine.reason or "the handoff is over")
