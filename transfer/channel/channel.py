"""A worker's KV channel: one thread that owns the data plane, the control endpoint and every handoff.

The engine's thread only appends to a queue and takes results, so a step never waits for the network. `DecodeSide` and
`PrefillSide` hold the handoffs. Every worker has both.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from transfer.channel.decode_side import DecodeSide
from transfer.channel.dispatch import hand_on
from transfer.channel.handoff_log import HandoffLog, Span
from transfer.channel.layers import Chunk, Ready
from transfer.channel.library import Library
from transfer.channel.outbox import Key, Outbox, Results, Trace
from transfer.channel.pacing import Limits
from transfer.channel.prefill_side import PrefillSide
from transfer.channel.timings import TIMINGS, Timings
from transfer.control.endpoint import Endpoint, PeerGone
from transfer.control.messages import Seal
from transfer.memory.layout import KVLayout
from transfer.memory.partition import ONE_WORKER, Partition
from transfer.memory.plane import Plane

logger = logging.getLogger("baton.transfer")


class ChannelError(Exception):
    """The channel cannot move KV any more."""


class Channel:
    """One worker's channel. It calls `trace(event, **fields)` for every event of a handoff or a layer.

    `address`: the worker's endpoint, which also says which layers it has (`transfer.memory.partition`).
    """

    def __init__(
        self,
        plane: Plane,
        layout: KVLayout,
        seal: Seal,
        host: str,
        timeout_s: float,
        trace: Trace | None = None,
        limits: Limits | None = None,
        timings: Timings = TIMINGS,
    ) -> None:
        self._timings, self._plane, self._log = timings, plane, HandoffLog(trace)
        self._trace = self._log.note
        plane.register(layout)
        self._endpoint = Endpoint(plane.name, seal, host)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._endpoint.watch(self._wake)
        self._commands: deque[Callable[[], None]] = deque()
        self._outbox = Outbox()
        self._decode = DecodeSide(plane, layout, self._endpoint, self._outbox, timeout_s, self._trace, timings)
        self.address = self._decode.address
        self._prefill = PrefillSide(
            plane, layout, self._endpoint, self._outbox, timeout_s, self._trace, limits or Limits(), timings
        )
        self._chunks: tuple[Chunk, ...] = ()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="baton-channel", daemon=True)
        self._thread.start()

    # ---- called by the engine's thread

    def meet(self, writers: list[list[str]]) -> None:
        """Decode: the replicas that may write to this worker. Each is the endpoints of its workers by rank.

        This worker's own replica may be among them. New replicas are connected now, so that their first request does
        not wait for a connection. Replicas that are not listed are disconnected.
        """
        self._do(lambda: self._decode.meet(writers))

    def keep(self, readers: list[list[str]]) -> None:
        """Prefill: the replicas that this worker may write to. Replicas that are not listed any more are forgotten."""
        self._do(lambda: self._prefill.keep(readers))

    def offer(
        self, key: Key, request_id: str, peers: list[str], first_block: int, blocks: list[int], needs_token: bool
    ) -> None:
        """Decode: offer `blocks` to the prefill workers at `peers`, for the prompt's blocks from `first_block` on."""
        self._do(lambda: self._decode.offer(key, request_id, peers, first_block, blocks, needs_token))

    def fetch(
        self, key: Key, request_id: str, peers: list[str], blocks: list[int], hashes: list[bytes], timeout_s: float
    ) -> None:
        """Ask the workers at `peers` for cached blocks. `Results.fetched` says how many of them are here in the end.

        `key`: of the session that they are for. Each worker of a replica fetches for itself.
        """
        self._do(lambda: self._decode.fetch(key, request_id, peers, blocks, hashes, timeout_s))

    def lend(self, library: Library) -> None:
        """Other replicas may fetch what `library` has."""
        self._prefill.library = library

    def cancel(self, key: Key, reason: str) -> None:
        """Decode: the request is over. Its result comes once the peer writes no more."""
        self._do(lambda: self._decode.cancel(key, reason))

    def cancel_unoffered(self, key: Key, peers: list[str], reason: str) -> None:
        """Decode: the request ended before its blocks were offered. Prefill then does not wait for an offer."""
        self._do(lambda: self._decode.cancel_unoffered(key, peers, reason))

    def is_answered(self, key: Key, peers: Partition = ONE_WORKER) -> bool:
        """Prefill: whether each decode worker that takes KV from us has offered its blocks, or never will.

        `peers`: how the workers of the decode replica split it.
        """
        return self._prefill.is_answered(key, peers)

    def begin_step(self, chunks: list[Chunk]) -> None:
        """Prefill: a step begins that computes these chunks."""
        self._chunks = tuple(chunks)
        for chunk in chunks:
            self._trace("forward_begin", session=chunk.key[0], computed=chunk.computed)

    def layer_saved(self, layer: int, ready: Ready | None = None) -> None:
        """Prefill: a layer's KV of this step's chunks is computed, or will be once `ready` says so.

        `layer`: as the model numbers them.
        """
        if chunks := self._chunks:
            self._do(lambda: self._prefill.saved(chunks, layer, ready))

    def end_step(self) -> None:
        """Prefill: the forward pass is over."""
        for chunk in self._chunks:
            self._trace("forward_end", session=chunk.key[0], computed=chunk.computed)
        self._chunks = ()

    def ended(self, key: Key, request_id: str | None, ok: bool, peers: Partition = ONE_WORKER) -> None:
        """Prefill: the engine is done with the request. `Results.released` names it once its blocks are free.

        `request_id`: None when no chunk has been computed, and the engine does not wait.
        `ok`: the whole prompt is computed. `peers`: how the workers of the decode replica split its KV.
        """
        self._do(lambda: self._prefill.ended(key, request_id, ok, peers))

    def wait_quiet(self, keys: list[Key], timeout_s: float) -> bool:
        """Prefill: these requests were preempted. Wait until no write reads their blocks, as they are overwritten next.

        Returns False when writes still read them after `timeout_s`.
        """
        return self._until(lambda: self._prefill.preempted(keys), timeout_s)

    def recall(self, timeout_s: float) -> bool:
        """End all fetches from this worker, and wait until no write reads borrowed blocks. False after `timeout_s`."""
        return self._until(self._prefill.recall, timeout_s)

    def _until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the channel's thread finds that it is so. False after `timeout_s`."""
        come, given_up = threading.Event(), time.monotonic() + timeout_s

        def check() -> None:
            if is_so():
                come.set()
            elif time.monotonic() < given_up:
                self._commands.append(check)

        self._do(check)
        return come.wait(timeout_s)

    def take_results(self) -> Results:
        """The handoffs that have ended since the last call. Raises ChannelError when the channel's thread has died."""
        if self._error is not None:
            raise ChannelError("the KV channel's thread died") from self._error
        return self._outbox.take()

    @property
    def has_news(self) -> bool:
        """Whether, since the last `take_results`, there are results, an offer has come, or the channel has died."""
        return self._outbox.has_news

    def on_news(self, call: Callable[[], None]) -> None:
        """Set the function that the channel's thread calls when there is news."""
        self._outbox.on_news = call

    def counters(self) -> dict[str, float]:
        """Totals since the start, and the numbers of handoffs that are open now."""
        return self._outbox.counts | {
            "open_receiving": len(self._decode),
            "open_writing": len(self._prefill),
            "bad_messages": self._endpoint.bad_messages,
        }

    def spans(self, sessions: list[str]) -> tuple[float, dict[str, list[Span]]]:
        """This worker's clock, and what it did for the handoffs of each of these sessions. It knows the newest."""
        return time.monotonic(), {session: self._log.spans(session) for session in sessions}

    def close(self) -> None:
        """End the thread and release memory; idempotent. A thread that does not end in time is logged and left."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=self._timings.end_s)
        if self._thread.is_alive() and (frame := sys._current_frames().get(self._thread.ident or 0)):
            logger.error("the KV channel's thread did not end:\n%s", "".join(traceback.format_stack(frame)))
            return  # the thread still uses the descriptor
        os.close(self._wake)

    def _do(self, command: Callable[[], None]) -> None:
        if self._closing:  # the closed descriptor's number may name another file by now
            return
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # ---- the channel's own thread from here on

    def _run(self) -> None:
        try:
            self._plane.enter_thread()
            self._loop()
        except BaseException as error:
            self._error = error  # the engine's thread raises it from take_results
            self._outbox.alarm()
            raise
        finally:
            if self._prefill.writes.finish(self._timings.finish_writes_s):
                self._endpoint.close()  # tells the peers that no more writes come, so they may reuse their blocks
                self._plane.close()
            else:
                logger.error("writes did not end; the peers learn that they are over when this process ends")

    def _loop(self) -> None:
        while not self._closing:
            events = self._endpoint.poll(self._wait_ms())
            self._drain_wake()
            for _ in range(len(self._commands)):
                self._commands.popleft()()
            for event in events:
                if isinstance(event, PeerGone):
                    self._decode.peer_gone(event.endpoint)
                elif not hand_on(event, self._decode, self._prefill):
                    self._outbox.counts["messages_refused"] += 1
            self._progress()
            self._expire()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _wait_ms(self) -> int | None:
        """The longest time that the thread may sleep without news. None: until there is news.

        The thread does not sleep while one of our writes runs. It wakes often while the transport has work. It wakes
        seldom while handoffs are open: a peer may write here, and its transport needs ours.
        """
        now = time.monotonic()
        if self._commands or self._decode.is_comparing:
            return 0
        wait_s = self._prefill.wait_s(now)
        wait_ms = None if wait_s is None else math.ceil(wait_s * 1000)
        if self._decode.is_active(now) or self._prefill.is_active(now):
            longest_ms = self._timings.active_ms
        elif len(self._decode):
            longest_ms = self._timings.waiting_ms
        else:
            return wait_ms
        return longest_ms if wait_ms is None else min(wait_ms, longest_ms)

    def _progress(self) -> None:
        now = time.monotonic()
        if len(self._decode) or self._decode.is_active(now) or self._prefill.is_active(now):
            self._plane.progress()
        self._prefill.progress()
        self._decode.progress()
        if self._prefill.is_busy:
            time.sleep(self._timings.write_poll_s)

    def _expire(self) -> None:
        now = time.monotonic()
        self._decode.expire(now)
        self._prefill.expire(now)
