"""The writes of a prefill worker: those that wait for their turn, and those in flight."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any

from transfer.channel.decode_peers import DecodePeers
from transfer.channel.outbox import Key, Outbox, Trace
from transfer.channel.pacing import Job, Pacer
from transfer.channel.timings import Timings
from transfer.control import messages as control
from transfer.control.endpoint import Endpoint
from transfer.memory.plane import Plane, PlaneError, WriteState

logger = logging.getLogger("baton.transfer")


class Writes:
    """Posts writes as the pacer allows, and calls `written(job, ok)` when a write has ended.

    The handoff of a job is a key and the rank of a decode worker.
    """

    def __init__(
        self,
        plane: Plane,
        endpoint: Endpoint,
        peers: DecodePeers,
        outbox: Outbox,
        pacer: Pacer,
        trace: Trace,
        timings: Timings,
        written: Callable[[Job, bool], None],
    ) -> None:
        self._plane, self._endpoint, self._peers, self._outbox = plane, endpoint, peers, outbox
        self._pacer, self._trace, self._timings, self._written = pacer, trace, timings, written
        self.in_flight: deque[tuple[Job, Any, float]] = deque()

    def wait_s(self, now: float) -> float | None:
        """Seconds until the pacer's rate allows a waiting write. None when no write waits."""
        return self._pacer.wait_s(now) if len(self._pacer) else None

    def push(self, job: Job) -> None:
        """Add a write, to be posted when its turn comes."""
        self._pacer.push(job)

    def drop(self, handoff: Hashable) -> list[Job]:
        """Forget the writes of a handoff that are not posted yet, and return them."""
        return self._pacer.drop(handoff)

    def are_reading(self, keys: Collection[Key]) -> bool:
        """Whether a write in flight reads blocks of one of these handoffs."""
        return any(job.handoff[0] in keys for job, *_ in self.in_flight)

    def progress(self) -> None:
        """Look at the writes in flight, then post what may be posted."""
        now = time.monotonic()
        for _ in range(len(self.in_flight)):
            job, handle, begun = self.in_flight.popleft()
            state = self._plane.check(handle)
            if state is WriteState.BUSY:
                self.in_flight.append((job, handle, begun))
                self._nudge(job.peer, begun, now)
            else:
                self._end(job, begun, state is WriteState.DONE)
        self._post()

    def _nudge(self, peer: bytes, begun: float, now: float) -> None:
        """Wake the decode worker of a slow write.

        Over some transports a write needs work on the other side, and a waiting decode worker is asleep.
        """
        agent = self._peers.agents.get(peer)
        is_slow = now - begun > self._timings.nudge_after_s
        if agent is not None and is_slow and now - agent.nudged_s > self._timings.nudge_again_s:
            agent.nudged_s = now
            self._endpoint.send(peer, control.Nudge())

    def _post(self) -> None:
        now = time.monotonic()
        while (job := self._pacer.pop(now)) is not None:
            write = job.write
            try:
                agent = self._peers.agents[job.peer]
                handle = self._plane.write(agent.name, write.layer, write.local, write.remote)
            except PlaneError as error:
                session_id = job.handoff[0][0]
                logger.warning("session %s: %s", session_id, error, extra={"session_id": session_id})
                self._end(job, now, ok=False)
                continue
            self._trace("layer_write", session=job.handoff[0][0], layer=write.layer, blocks=len(write.local))
            self.in_flight.append((job, handle, now))

    def _end(self, job: Job, begun: float, ok: bool) -> None:
        self._pacer.done(job)
        if ok:
            counts = self._outbox.counts
            counts["writes"] += 1
            counts["blocks_written"] += len(job.write.local)
            counts["bytes_written"] += job.size
            counts["write_s"] += time.monotonic() - begun
        self._trace("layer_written", session=job.handoff[0][0], layer=job.write.layer, ok=ok, bytes=job.size)
        self._written(job, ok)

    def finish(self, timeout_s: float) -> bool:
        """Wait for the writes in flight, and begin no new ones. False when they take longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < deadline:
            self.in_flight = deque(each for each in self.in_flight if self._plane.check(each[1]) is WriteState.BUSY)
        return not self.in_flight
