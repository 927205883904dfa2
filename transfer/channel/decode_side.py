"""The handoffs to a worker, and its fetches: it offers blocks, waits for KV and first token, and fences cancelled ones.

A handoff is fenced while peers may still write its blocks: the peers are asked to stop, until each has answered that
it has stopped. When all of a fetch is written, its blocks are compared with their digests before they count. Only the
channel's thread uses this module.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from transfer.channel.digests import BlockReader
from transfer.channel.fetched import FetchedBlocks
from transfer.channel.outbox import Key, Outbox, Trace, remember
from transfer.channel.timings import TIMINGS, Timings
from transfer.control import messages as control
from transfer.control.endpoint import Endpoint
from transfer.control.handoff import Received, Receiver, ReceiverEffect, SendCancel
from transfer.memory.layout import KVLayout
from transfer.memory.partition import endpoint_of, partition_of, sources
from transfer.memory.plane import Plane

logger = logging.getLogger("baton.transfer")

NO_SOURCE = "the other replica's workers do not have the layers of this one's model"


@dataclass(slots=True)
class _Receiving:
    """`deadline`: by the monotonic clock. `fetched`: what a fetch asked for; None for a handoff."""

    request_id: str
    endpoints: list[str]
    deadline: float
    machine: Receiver
    fetched: FetchedBlocks | None = None


class DecodeSide:
    """`timeout_s`: the time from an offer until its KV must be here. After it, the peers are told to stop, and are told
    again after every further `timeout_s`. `address`: this worker's endpoint.
    """

    def __init__(
        self,
        plane: Plane,
        layout: KVLayout,
        endpoint: Endpoint,
        outbox: Outbox,
        timeout_s: float,
        trace: Trace,
        timings: Timings = TIMINGS,
    ) -> None:
        self._plane, self._layout, self._endpoint, self._outbox = plane, layout, endpoint, outbox
        self.address = endpoint_of(endpoint.address, layout.layers, layout.total_layers)
        self._timeout_s, self._trace, self._timings = timeout_s, trace, timings
        self._receiving: dict[Key, _Receiving] = {}
        self._contents = BlockReader(layout, outbox.counts)
        self._comparing: dict[Key, FetchedBlocks] = {}
        self._active_until = 0.0
        self.early_tokens: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        """The number of open handoffs."""
        return len(self._receiving) + len(self._comparing)

    @property
    def is_comparing(self) -> bool:
        """Whether blocks have come that are not compared with their digests yet."""
        return bool(self._comparing)

    def is_active(self, now: float) -> bool:
        """Whether the transport has work on our side: a write is under way, or a new peer makes its connection."""
        return now < self._active_until

    def nudged(self) -> None:
        self._active_until = max(self._active_until, time.monotonic() + self._timings.nudged_s)

    def meet(self, peers: list[list[str]]) -> None:
        """Only these replicas may write here: connect the new ones and disconnect all others.

        Each replica is the list of its workers' endpoints. A peer with an open handoff stays connected.
        """
        wanted = {endpoint for workers in peers for endpoint in self._sources(workers)} - {self.address}
        busy = {endpoint for receiving in self._receiving.values() for endpoint in receiving.endpoints}
        for endpoint in self._endpoint.peers - wanted - busy:
            self._endpoint.disconnect(endpoint)
        for endpoint in wanted:
            self._reach(endpoint)

    def offer(
        self, key: Key, request_id: str, peers: list[str], first_block: int, blocks: list[int], needs_token: bool
    ) -> None:
        if not (endpoints := self._sources(peers)):
            self._outbox.broken(request_id, NO_SOURCE)
            return
        machine = Receiver(needs_token, set(endpoints))
        self._receiving[key] = _Receiving(request_id, endpoints, time.monotonic() + self._timeout_s, machine)
        offer = control.Offer(*key, self._layout.rank, first_block, blocks, self._timeout_s)
        for endpoint in endpoints:
            self._reach(endpoint)
            self._endpoint.send(endpoint, offer)
        self._trace("offered", session=key[0], blocks=len(blocks))
        if (token := self.early_tokens.pop(key, None)) is not None:
            machine.first_token(token)

    def fetch(
        self, key: Key, request_id: str, peers: list[str], blocks: list[int], hashes: list[bytes], timeout_s: float
    ) -> None:
        if not (endpoints := self._sources(peers)):
            self._outbox.fetched(request_id, 0, len(blocks), 0.0)
            return
        machine = Receiver(needs_token=False, writing=set(endpoints))
        deadline = time.monotonic() + min(timeout_s, self._timeout_s)
        late_at = deadline + self._timings.fetch_grace_s
        fetched = FetchedBlocks(request_id, self._layout, peers, blocks, late_at)
        self._receiving[key] = _Receiving(request_id, endpoints, deadline, machine, fetched)
        fetch = control.Fetch(*key, self._layout.rank, blocks, hashes, timeout_s)
        for endpoint in endpoints:
            self._reach(endpoint)
            self._endpoint.send(endpoint, fetch)
        self._trace("fetch", session=key[0], blocks=len(blocks))

    def found(self, key: Key, blocks: int, endpoint: str) -> None:
        """A peer has this number of the leading blocks, and writes those."""
        if self._is_writing(key, endpoint) and (fetched := self._receiving[key].fetched) is not None:
            fetched.found[endpoint] = blocks

    def cancel_unoffered(self, key: Key, peers: list[str], reason: str) -> None:
        for endpoint in self._sources(peers):
            self._reach(endpoint)
            self._endpoint.send(endpoint, control.Cancel(*key, self._layout.rank, reason))

    def cancel(self, key: Key, reason: str) -> None:
        if key in self._comparing:
            self._compared(key)
        else:
            self._tell(key, lambda machine: machine.cancel(reason))

    def landed(self, key: Key, endpoint: str, digests: tuple[bytes, ...] = ()) -> None:
        if self._is_writing(key, endpoint):
            if (fetched := self._receiving[key].fetched) is not None:
                fetched.digests[endpoint] = digests
            self._tell(key, lambda machine: machine.landed(endpoint))

    def failed(self, key: Key, reason: str, endpoint: str) -> None:
        if self._is_writing(key, endpoint):
            self._tell(key, lambda machine: machine.failed(reason, endpoint))

    def first_token(self, key: Key, token: int) -> None:
        """A first token has come. It may come before the engine step that offers the blocks; it is then kept."""
        if key in self._receiving:
            self._tell(key, lambda machine: machine.first_token(token))
        else:
            remember(self.early_tokens, key, token)

    def peer_gone(self, endpoint: str) -> None:
        for key in self._handed_over_by(endpoint):
            self._tell(key, lambda machine: machine.peer_lost(endpoint))

    def refused(self, endpoint: str, reason: str) -> None:
        logger.error("the prefill worker at %s refuses us: %s", endpoint, reason)
        self._endpoint.disconnect(endpoint)
        for key in self._handed_over_by(endpoint):
            self.failed(key, reason, endpoint)

    def expire(self, now: float) -> None:
        for key, receiving in list(self._receiving.items()):
            if now > receiving.deadline:
                receiving.deadline = now + self._timeout_s
                self.cancel(key, "the KV cache did not arrive in time")
            if (fetched := receiving.fetched) and now > fetched.late_at and key in self._receiving:
                fetched.late_at = math.inf
                self._outbox.late(receiving.request_id)
        for key in [key for key, fetched in self._comparing.items() if now > fetched.late_at]:
            self._compared(key)

    def progress(self) -> None:
        """Compare a piece of what has come with its digests: of the fetch that has waited longest."""
        for key in list(self._comparing)[:1]:
            if self._comparing[key].compare(self._contents):
                self._compared(key)

    def _compared(self, key: Key) -> None:
        """A fetch is over. What is not compared by now has not come."""
        fetched = self._comparing.pop(key)
        blocks, asked, counts = fetched.good, len(fetched.blocks), self._outbox.counts
        if fetched.is_corrupt:
            counts["fetches_corrupt"] += 1
            text = "session %s: block %d of a fetch from %s is not as it was written, and is computed"
            logger.warning(text, key[0], blocks, ", ".join(fetched.parts), extra={"session_id": key[0]})
        self._outbox.fetched(fetched.request_id, blocks, asked, time.monotonic() - fetched.begun)
        self._trace("fetched", session=key[0], blocks=blocks)

    def _sources(self, peers: list[str]) -> list[str]:
        """The endpoints of those workers of a prefill replica from which this worker takes its KV.

        None where they say that the model has another number of layers: some of this worker's would not come.
        """
        layout, partition = self._layout, partition_of(peers)
        if partition.stages and sum(partition.stages) != layout.total_layers:
            return []
        return [peers[rank] for rank in sources(layout.rank, layout.partition, partition, layout.total_heads)]

    def _is_writing(self, key: Key, endpoint: str) -> bool:
        """Whether this peer still writes the handoff. Other peers have no influence on how the handoff ends."""
        if key not in self._receiving:
            return False  # late or repeated
        if endpoint in self._receiving[key].endpoints:
            return endpoint in self._receiving[key].machine.writing
        self._outbox.counts["messages_refused"] += 1
        return False

    def _handed_over_by(self, endpoint: str) -> list[Key]:
        return [key for key, receiving in self._receiving.items() if endpoint in receiving.endpoints]

    def _reach(self, endpoint: str) -> None:
        """Connect a peer, unless it is connected, and introduce this worker to it."""
        if self._endpoint.connect(endpoint):
            hello = control.Hello(self.address, self._plane.name, self._plane.metadata(), self._layout)
            self._endpoint.send(endpoint, hello)
            self._active_until = time.monotonic() + self._timings.warm_up_s

    def _tell(self, key: Key, event: Callable[[Receiver], list[ReceiverEffect]]) -> None:
        receiving = self._receiving.get(key)
        for effect in event(receiving.machine) if receiving else ():
            assert receiving is not None
            if isinstance(effect, SendCancel):
                for endpoint in receiving.machine.writing:
                    cancel = control.Cancel(*key, self._layout.rank, receiving.machine.reason)
                    self._endpoint.send(endpoint, cancel)
                continue
            del self._receiving[key]
            if (fetched := receiving.fetched) is not None:
                self._comparing[key] = fetched
                if not (isinstance(effect, Received) and fetched.came):
                    self._compared(key)
                continue
            self._trace("received", session=key[0], ok=isinstance(effect, Received))
            if isinstance(effect, Received):
                self._outbox.received(receiving.request_id, effect.token)
            else:
                self._outbox.broken(receiving.request_id, effect.reason)
