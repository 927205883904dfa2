"""The handoffs of a prefill worker: it writes computed KV into the blocks that decode offers.

Only the channel's thread uses this module, except for `is_answered`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from transfer.channel.decode_peers import DecodePeers
from transfer.channel.digests import BlockReader, WrittenBlocks
from transfer.channel.layers import Chunk, LaunchedLayers, Ready
from transfer.channel.library import Library, NoLibrary, answer
from transfer.channel.outbox import Key, Outbox, Trace, remember
from transfer.channel.pacing import Job, Limits, Pacer
from transfer.channel.timings import TIMINGS, Timings
from transfer.channel.writes import Writes
from transfer.channel.writing import Reader, Writing, job_of, objection, objection_to_blocks, objection_to_fetch
from transfer.control import messages as control
from transfer.control.endpoint import Endpoint
from transfer.control.handoff import SendFailed, SendLanded, Write, Writer, WriterEffect, WriterState
from transfer.memory.layout import KVLayout
from transfer.memory.partition import Partition, readers
from transfer.memory.plane import Plane


class PrefillSide:
    """`timeout_s`: the time from an offer, or from a first chunk, until all KV must be written.

    `peers`: the decode workers. `writes`: the writes that wait, and those in flight. `library`: what may be fetched.
    """

    def __init__(
        self,
        plane: Plane,
        layout: KVLayout,
        endpoint: Endpoint,
        outbox: Outbox,
        timeout_s: float,
        trace: Trace,
        limits: Limits,
        timings: Timings = TIMINGS,
    ) -> None:
        self._layout, self._partition, self._endpoint, self._outbox = layout, layout.partition, endpoint, outbox
        self._timeout_s, self._trace, self._offer_grace_s = timeout_s, trace, timings.offer_grace_s
        self._handoffs: dict[Key, Writing] = {}
        self._gone: OrderedDict[tuple[Key, int], str] = OrderedDict()  # by key and the rank of a decode worker
        self._launched = LaunchedLayers()
        self._contents = BlockReader(layout, outbox.counts)
        self.library: Library = NoLibrary()
        self.peers = DecodePeers(plane, layout, endpoint, outbox, timings.warm_up_s)
        self.writes = Writes(plane, endpoint, self.peers, outbox, Pacer(limits), trace, timings, self._written)

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way or a layer is being computed, so that the channel must look again soon."""
        return bool(self.writes.in_flight or self._launched)

    def __len__(self) -> int:
        """The number of open handoffs."""
        return len(self._handoffs)

    def is_active(self, now: float) -> bool:
        """Whether the transport is making or closing a data connection."""
        return self.peers.is_active(now)

    def wait_s(self, now: float) -> float | None:
        """Seconds until this side has work to do even without news. 0 while it is busy. None: never."""
        if self.is_busy:
            return 0.0
        waits = [max(0.0, writing.deadline - now) for writing in self._handoffs.values()]
        if (paced_s := self.writes.wait_s(now)) is not None:
            waits.append(paced_s)
        return min(waits, default=None)

    # ---- events from the engine

    def saved(self, chunks: tuple[Chunk, ...], layer: int, ready: Ready | None) -> None:
        """A layer of these chunks is computed, or will be when `ready` says so."""
        if ready is None:
            self._computed(chunks, layer)
        else:
            self._launched.add(chunks, layer, ready)

    def _catch_up(self, wait: bool = False) -> None:
        """Take the layers that are computed. With `wait`: wait for all launched layers, and take them."""
        for chunks, layer in self._launched.take(wait):
            self._computed(chunks, layer)

    def _computed(self, chunks: Iterable[Chunk], layer: int) -> None:
        for chunk in chunks:
            writing = self._open(chunk.key)
            writing.request_id = chunk.request_id
            for rank in self._readers(chunk.peers):
                machine = self._reader(chunk.key, rank, chunk.peers).machine
                effects = machine.saved(layer, chunk.computed, chunk.prompt, chunk.blocks)
                self._carry_out(chunk.key, rank, effects)

    def is_answered(self, key: Key, peers: Partition) -> bool:
        """Whether decode has offered its blocks, or the handoff is over already. Any thread may ask."""
        writing = self._handoffs.get(key)
        for rank in self._readers(peers):
            reader = writing.readers.get(rank) if writing else None
            if (reader is None or reader.peer is None) and (key, rank) not in self._gone:
                return False
        return True

    def ended(self, key: Key, request_id: str | None, ok: bool, peers: Partition) -> None:
        self._catch_up(wait=True)  # the engine has the step's result, so its layers are computed
        writing = self._open(key)
        writing.request_id = request_id
        ranks = self._readers(peers)
        if any(self._reader(key, rank, peers).peer is None for rank in ranks):  # decode had the prefill's time, too
            writing.deadline = min(writing.deadline, time.monotonic() + self._offer_grace_s)
        for rank, reader in writing.readers.items():  # a worker of another rank has offered for nothing
            self._carry_out(key, rank, reader.machine.ended(ok and rank in ranks))
        self._end_if_over(key)

    def preempted(self, keys: list[Key]) -> bool:
        """These requests lose their blocks. Returns True once no write reads them."""
        self._catch_up(wait=True)
        for key in keys:
            if writing := self._handoffs.get(key):
                for rank, reader in writing.readers.items():
                    reader.machine.preempted([job.write for job in self.writes.drop((key, rank))])
        return not self.writes.are_reading(keys)

    # ---- messages from decode

    def hello(self, sender: bytes, hello: control.Hello) -> None:
        """A decode worker introduces itself. The handoffs on a connection that it has lost end."""
        for lost in self.peers.hello(sender, hello):
            for key, writing in list(self._handoffs.items()):
                for rank, reader in writing.readers.items():
                    if reader.peer == lost:
                        reader.peer = sender
                        self._carry_out(key, rank, reader.machine.stop("the connection was lost"))
                self._end_if_over(key)

    def keep(self, replicas: list[list[str]]) -> None:
        """Only these decode replicas exist. Each is the endpoints of its workers."""
        busy = {
            reader.peer for writing in self._handoffs.values() for reader in writing.readers.values() if reader.peer
        }
        self.peers.keep(replicas, busy)

    def offered(self, sender: bytes, offer: control.Offer) -> None:
        key, rank = (offer.session, offer.epoch), offer.rank
        if (theirs := self.peers.layout_of(sender)) is None:
            return
        if (key, rank) in self._gone:
            self._endpoint.send(sender, control.Failed(*key, self._gone[key, rank]))
        elif reason := objection(self._layout, theirs, self._handoffs.get(key), sender, rank):
            self._outbox.counts["messages_refused"] += 1
            self._endpoint.send(sender, control.Failed(*key, reason))
        elif reason := objection_to_blocks(theirs, self._handoffs.get(key), self._handoffs.values(), sender, offer):
            self._outbox.counts["messages_refused"] += 1
            self.cancelled(sender, control.Cancel(*key, rank, reason))  # for good, even if the offer is repeated
        else:
            writing, reader = self._open(key), self._reader(key, rank, theirs.partition)
            if reader.peer is None:
                reader.peer = sender
                writing.deadline = time.monotonic() + min(offer.timeout_s, self._timeout_s)
                self._outbox.alarm()
            self._carry_out(key, rank, reader.machine.offered(offer.first_block, offer.blocks))

    def cancelled(self, sender: bytes, cancel: control.Cancel) -> None:
        """A cancel is always answered, because decode holds its blocks until the answer comes."""
        key, rank = (cancel.session, cancel.epoch), cancel.rank
        if (theirs := self.peers.layout_of(sender)) is None:
            return
        if reason := objection(self._layout, theirs, self._handoffs.get(key), sender, rank):
            self._outbox.counts["messages_refused"] += 1
            self._endpoint.send(sender, control.Failed(*key, reason))
        elif key not in self._handoffs:
            remember(self._gone, (key, rank), cancel.reason)
            self._outbox.alarm()
            self._endpoint.send(sender, control.Failed(*key, cancel.reason))
        else:
            reader = self._reader(key, rank, theirs.partition)
            reader.peer = sender
            self._carry_out(key, rank, reader.machine.stop(cancel.reason))
            if reader.machine.state is WriterState.LANDED:  # the first answer may have been lost
                self._answer(reader, control.Landed(*key))
            self._end_if_over(key)

    def fetch(self, sender: bytes, fetch: control.Fetch) -> None:
        """A worker asks for cached blocks. They are computed, so they are written at once.

        One that is open already is not answered: an answer would tell the worker that the first is over.
        """
        key, rank = (fetch.session, fetch.epoch), fetch.rank
        if (theirs := self.peers.layout_of(sender)) is None:
            return
        writing = self._handoffs.get(key)
        if writing and (reader := writing.readers.get(rank)) and reader.borrowed and reader.peer == sender:
            self._outbox.counts["messages_refused"] += 1
            return
        reason = self._gone.get((key, rank)) or objection(self._layout, theirs, writing, sender, rank)
        reason = reason or objection_to_fetch(theirs, writing, fetch)
        borrowed = () if reason else self.library.borrow(fetch.hashes)
        self._endpoint.send(sender, answer(fetch, borrowed, reason))
        if borrowed:
            writing, reader = self._open(key), self._reader(key, rank, theirs.partition)
            writing.deadline = time.monotonic() + min(fetch.timeout_s, self._timeout_s)
            written = WrittenBlocks(self._contents, reader.machine.layers, self._layout.window(theirs), borrowed)
            self._carry_out(key, rank, reader.lend(borrowed, sender, written, fetch.blocks))

    def recall(self) -> bool:
        """End all fetches from this worker. Returns True once no write reads borrowed blocks."""
        for key, writing in list(self._handoffs.items()):
            if writing.borrowed:
                for rank, reader in writing.readers.items():
                    self._carry_out(key, rank, reader.machine.stop("the blocks are needed here"))
                self._end_if_over(key)
        return not any(writing.borrowed for writing in self._handoffs.values())

    # ---- progress of the writes, and deadlines

    def progress(self) -> None:
        self._catch_up()
        self.writes.progress()

    def expire(self, now: float) -> None:
        for key, writing in list(self._handoffs.items()):
            if now > writing.deadline:
                writing.deadline = now + self._timeout_s
                for rank, reader in writing.readers.items():
                    self._carry_out(key, rank, reader.machine.stop("the handoff ran out of time"))
                self._end_if_over(key)

    # ---- effects

    def _readers(self, peers: Partition) -> tuple[int, ...]:
        return readers(self._layout.rank, self._partition, peers, self._layout.total_heads)

    def _open(self, key: Key) -> Writing:
        if key not in self._handoffs:
            self._handoffs[key] = Writing(time.monotonic() + self._timeout_s)
        return self._handoffs[key]

    def _reader(self, key: Key, rank: int, peers: Partition) -> Reader:
        """One decode worker's part of a handoff. A part that was cancelled before it began is stopped at once."""
        known = self._handoffs[key].readers
        if rank not in known:
            known[rank] = Reader(Writer(self._layout.shared_layers(peers, rank), self._layout.block_size))
            if (key, rank) in self._gone:
                self._carry_out(key, rank, known[rank].machine.stop(self._gone[key, rank]))
        return known[rank]

    def _carry_out(self, key: Key, rank: int, effects: list[WriterEffect]) -> None:
        reader = self._handoffs[key].readers[rank]
        for effect in effects:
            match effect:
                case Write():
                    assert reader.peer is not None
                    theirs = self.peers.agents[reader.peer].layout
                    self.writes.push(job_of(key, rank, reader, self._layout, theirs, effect))
                case SendLanded():
                    self._outbox.counts[f"{reader.kind}_landed"] += 1
                    self._trace("landed", session=key[0], rank=rank)
                    self._answer(reader, reader.landed(key))
                case SendFailed(reason):
                    self._outbox.counts[f"{reader.kind}_failed"] += 1
                    self._answer(reader, control.Failed(*key, reason))
        if reader.machine.state is WriterState.FENCING and (unposted := self.writes.drop((key, rank))):
            self._carry_out(key, rank, reader.machine.dropped(len(unposted)))

    def _written(self, job: Job, ok: bool) -> None:
        key, rank = job.handoff
        reader = self._handoffs[key].readers[rank]
        if ok:
            self._outbox.counts["bytes_overlapped"] += reader.wrote(job)
        self._carry_out(key, rank, reader.machine.write_done(ok))
        self._end_if_over(key)

    def _answer(self, reader: Reader, message: control.AnyMessage) -> None:
        if reader.peer is not None:
            self._endpoint.send(reader.peer, message)

    def _end_if_over(self, key: Key) -> None:
        """Close a handoff once the engine is done with the request and no write reads its blocks.

        A handoff that failed before its prefill began has no source blocks to wait for.
        """
        if (writing := self._handoffs.get(key)) is None:
            return
        borrowed, request_id = writing.borrowed, writing.request_id
        machines = [reader.machine for reader in writing.readers.values()]
        if not all(each.released if borrowed or request_id else each.state is WriterState.FAILED for each in machines):
            return
        if borrowed:
            self.library.give_back(borrowed)
        elif request_id is not None:
            self._outbox.released(request_id)
        del self._handoffs[key]
        for rank, reader in writing.readers.items():
            remember(self._gone, (key, rank), reader.machine.reason or "the handoff is over")
