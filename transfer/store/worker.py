"""A thread that stores and loads, for an engine whose steps must wait for neither memory nor disk."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from transfer.store.block_memory import Gate, Lender
from transfer.store.block_store import BlockStore
from transfer.store.ledger import Changes, Tier
from transfer.store.refs import BlockRef, StoreError, chain

logger = logging.getLogger("baton.store")

QUEUED_JOBS = 256
CLOSE_S = 15.0
DRAIN_S = 10.0
"""Of that, the time in which a closed worker brings what its host tier has down to its disk tier."""


@dataclass(slots=True)
class StoreResults:
    """The jobs that have ended since the engine last asked: for each block whether it is stored, or loaded."""

    stored: dict[str, list[bool]] = field(default_factory=dict)
    loaded: dict[str, list[bool]] = field(default_factory=dict)


class _Kind(Enum):
    LOAD = "load"
    STORE = "store"
    STORE_LENT = "store lent"
    DELETE = "delete"
    TOUCH = "touch"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True)
class _Job:
    kind: _Kind
    keys: Sequence[bytes] = ()
    blocks: Sequence[int] = ()
    refs: Sequence[BlockRef] = ()
    job_id: str = ""
    lender: Lender | None = None
    gate: Gate = field(default_factory=Gate)


class StoreWorker:
    """The thread owns `store` from now on, and closes it.

    Jobs are done in order, but loads go before what waits to be stored. The blocks of a store or load are the thread's
    until its result is there: its memory may be neither freed nor written. Each has exactly one result. A method that
    returns False has queued nothing: the queue is full, or the worker is closed. The thread calls `on_news` when there
    is something to take.
    """

    def __init__(self, store: BlockStore, on_news: Callable[[], None] = lambda: None, jobs: int = QUEUED_JOBS) -> None:
        self._store, self._on_news, self._limit = store, on_news, jobs
        self._loads, self._others = deque[_Job](), deque[_Job]()
        self._gates: dict[str, Gate] = {}
        self._deletes = 0  # that wait in `others`; no load overtakes them
        self._results, self._changes, self._news = StoreResults(), store.take_changes(), True
        self._wake = threading.Condition()
        self._closing = self._is_busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="baton-store", daemon=True)
        self._thread.start()

    # ---- called by the engine's thread

    def store(self, job_id: str, refs: Sequence[BlockRef], blocks: Sequence[int]) -> bool:
        """Store `blocks` as the consecutive blocks `refs` of a prompt. `job_id`: of this job alone."""
        return self._queue(_Job(_Kind.STORE, blocks=blocks, refs=refs, job_id=job_id))

    def store_lent(self, keys: Sequence[bytes], lender: Lender) -> bool:
        """Store the blocks of a prompt, from its first on, as far as `lender` has them when their turn comes.

        They are borrowed a few at a time, only while they are copied. There is no result.
        """
        return self._queue(_Job(_Kind.STORE_LENT, keys, lender=lender))

    def load(self, job_id: str, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Load blocks by their keys into `blocks`. `job_id`: of this job alone."""
        job = _Job(_Kind.LOAD, keys, blocks, job_id=job_id)
        if is_queued := self._queue(job):
            self._gates[job_id] = job.gate
        return is_queued

    def give_up(self, job_id: str) -> None:
        """Of a load whose result has not been taken: its blocks are the caller's again, and are not written any more.

        It has its result all the same, some time.
        """
        if (gate := self._gates.get(job_id)) is not None:
            gate.shut()

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Forget blocks. No load that is queued later finds them, unless they are stored again."""
        return self._queue(_Job(_Kind.DELETE, keys))

    def touch(self, keys: Sequence[bytes]) -> bool:
        """Count one use of each key, for prompts that find their blocks elsewhere."""
        return self._queue(_Job(_Kind.TOUCH, keys))

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        """The fastest tier that has each block now; a hint."""
        return self._store.lookup(keys)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, are in a tier now; a hint."""
        return self._store.leading(keys)

    def take_results(self) -> StoreResults:
        """The jobs that have ended since the last call. Raises StoreError when the thread has died."""
        if self._error is not None:
            raise StoreError("the store's thread died") from self._error
        with self._wake:
            taken, self._results, self._news = self._results, StoreResults(), False
        for job_id in taken.loaded:
            self._gates.pop(job_id, None)
        return taken

    def take_changes(self) -> Changes:
        """Which blocks have come into a tier (True) or gone (False) since the last call. Any thread may call it.

        Of a thread that has died, all have gone.
        """
        with self._wake:
            taken, self._changes = self._changes, {}
        return taken

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or the thread has died."""
        return self._news

    def counters(self) -> dict[str, float]:
        """Totals since the start, and the number of jobs that are not over: those that wait, and one that runs."""
        with self._wake:
            open_jobs = len(self._loads) + len(self._others) + self._is_busy
        return self._store.counters() | {"open_jobs": open_jobs}

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Give up what waits but deletes, end what runs, drain the host tier, and close the store; idempotent.

        Loads and stores that waited have results without a block. Returns whether the thread has ended. One that has
        not, because the disk hangs, is logged and left; it may still read and write its job's blocks.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and (frame := sys._current_frames().get(self._thread.ident or 0)):
            logger.error("the store's thread did not end:\n%s", "".join(traceback.format_stack(frame)))
        return not self._thread.is_alive()

    def _queue(self, job: _Job) -> bool:
        if len(job.refs or job.keys) != len(job.blocks) and job.kind in (_Kind.STORE, _Kind.LOAD):
            raise ValueError(f"{len(job.refs or job.keys)} keys for {len(job.blocks)} blocks")
        with self._wake:
            if self._closing or self._error or len(self._loads) + len(self._others) >= self._limit:
                return False
            self._append(job)
            self._wake.notify()
        return True

    def _append(self, job: _Job) -> None:
        (self._loads if job.kind is _Kind.LOAD else self._others).append(job)
        self._deletes += job.kind is _Kind.DELETE

    # ---- the thread from here on

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._report(job, self._do(job))
            for job in (*self._loads, *self._others):
                self._report(job, self._do(job) if job.kind is _Kind.DELETE else [False] * len(job.blocks))
            self._store.drain(DRAIN_S)
        except BaseException as error:
            with self._wake:
                self._changes |= dict.fromkeys(self._store.held(), False)
                self._error, self._news = error, True  # the engine's thread raises it from take_results
            self._on_news()
            raise
        finally:
            self._store.close()

    def _next(self) -> _Job | None:
        """The next job, or None when the worker is being closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._loads or self._others)
            if self._closing:
                return None
            self._is_busy = True
            if self._loads and not self._deletes:
                return self._loads.popleft()
            job = self._others.popleft()
            self._deletes -= job.kind is _Kind.DELETE
            return job

    def _do(self, job: _Job) -> list[bool]:
        match job.kind:
            case _Kind.STORE:
                return self._store.store(job.refs, job.blocks)
            case _Kind.STORE_LENT:
                assert job.lender is not None
                self._store.store_lent(chain(job.keys), job.lender)
            case _Kind.LOAD:
                found = zip(job.keys, self._store.lookup(job.keys), strict=True)
                on_disk = [key for key, tier in found if tier is Tier.DISK]
                done = self._store.load(job.keys, job.blocks, job.gate)
                with self._wake:
                    if on_disk:
                        self._append(_Job(_Kind.PROMOTE, on_disk))  # behind what waits
                return done
            case _Kind.DELETE:
                self._store.delete(job.keys)
            case _Kind.TOUCH:
                self._store.touch(job.keys)
            case _Kind.PROMOTE:
                self._store.promote(job.keys)
        return []

    def _report(self, job: _Job, done: list[bool]) -> None:
        changes = self._store.take_changes()
        with self._wake:
            self._changes.update(changes)
            if job.kind is _Kind.STORE:
                self._results.stored[job.job_id] = done
            elif job.kind is _Kind.LOAD:
                self._results.loaded[job.job_id] = done
            self._news, self._is_busy = True, False
        self._on_news()
