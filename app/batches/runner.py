"""The batches that this ingress runs: it takes those that nothing runs, keeps their leases, and sweeps the stores."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sqlalchemy import Connection

from app.batches import file_rows, lease_rows, line_rows
from app.batches.lease_rows import LEASE_S, Lease, LeaseLost
from app.batches.records import CANCELLED, CANCELLING, EXPIRED, Batch
from app.batches.run import BatchRun, Parts
from deployments.errors import StoreAway

logger = logging.getLogger("baton.batches")


LOOK_S = 1.0
"""How often an ingress looks for batches and renews its leases, in seconds."""
SWEEP_S = 60.0
AT_ONCE = 4
"""Batches that one ingress runs at once."""


class BatchRunner:
    """`holder`: the name of this ingress, which no other has. `start` it in a running event loop, and `close` it."""

    def __init__(self, holder: str, parts: Parts, look_s: float = LOOK_S, lease_s: float = LEASE_S) -> None:
        self._holder, self._parts, self._stores = holder, parts, parts.stores
        self._look_s, self._lease_s = look_s, lease_s
        self._runs: dict[Lease, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._renewed_s = self._stores.clock()

    def __len__(self) -> int:
        return len(self._runs)

    def start(self) -> None:
        """Run batches from now on."""
        looking = asyncio.create_task(self._look(), name="baton-batches")
        sweeping = asyncio.create_task(self._sweep(), name="baton-batches-sweep")
        self._tasks = (looking, sweeping)

    def wake(self) -> None:
        """There is something new: look now."""
        self._news.set()

    async def close(self) -> None:
        """Run nothing any more. Other ingresses may take the batches at once."""
        for task in self._tasks:
            task.cancel()
        runs = [task for _, task in self._runs.values()]
        leases = list(self._runs)
        for task in runs:
            task.cancel()
        if everything := {*self._tasks, *runs}:
            await asyncio.wait(everything)
        self._parts.slots.close()
        with contextlib.suppress(StoreAway):  # then the leases end by themselves
            await self._stores.database.write(lambda connection: lease_rows.release(connection, leases))

    # ---- leases

    async def _look(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._stores.prepare()
                await self._renew()
                while len(self._runs) < AT_ONCE and (batch := await self._take()) is not None:
                    self._begin(batch)
            except StoreAway as error:
                logger.warning("batches: %s", error)
                self._give_up_late()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._news.wait()

    async def _take(self) -> Batch | None:
        now_s = self._stores.clock()
        if not await self._stores.database.read(lambda c: lease_rows.is_any_free(c, now_s)):
            return None  # so idle ingresses do not write
        return await self._stores.database.write(lambda c: lease_rows.take(c, self._holder, now_s, self._lease_s))

    async def _renew(self) -> None:
        """Keep the leases of what runs, and end what was cancelled, has expired, or is another's."""
        now_s = self._stores.clock()
        scans = {lease: run.progress.scan for lease, (run, _) in self._runs.items()}
        held = {}
        if scans:
            held = await self._stores.database.write(lambda c: lease_rows.renew(c, scans, now_s, self._lease_s))
        self._renewed_s = now_s
        for lease in scans:
            if lease not in self._runs:
                continue
            run, task = self._runs[lease]
            if lease not in held:
                task.cancel()
            elif held[lease] == CANCELLING:
                run.stop(CANCELLED)
            elif now_s >= run.batch.expires_s:
                run.stop(EXPIRED)

    def _give_up_late(self) -> None:
        """Without the database for as long as a lease: another ingress may have taken the batches."""
        if self._stores.clock() - self._renewed_s > self._lease_s:
            for _, task in self._runs.values():
                task.cancel()

    def _begin(self, batch: Batch) -> None:
        lease = Lease(batch.number, self._holder, batch.epoch)
        run = BatchRun(batch, lease, self._parts)
        task = asyncio.create_task(self._go(run), name=f"baton-{batch.id}")
        self._runs[lease] = run, task
        task.add_done_callback(lambda _: self._gone(lease))

    def _gone(self, lease: Lease) -> None:
        del self._runs[lease]
        self.wake()

    async def _go(self, run: BatchRun) -> None:
        """Run a batch. What goes wrong leaves it to the ingress that takes it when its lease ends."""
        name = run.batch.id
        try:
            batch = await run.go()
        except* LeaseLost:
            logger.warning("another ingress has taken batch %s", name)
        except* StoreAway as away:
            logger.warning("batch %s waits for its stores: %s", name, away.exceptions[0])
        except* Exception as failed:
            logger.error("batch %s is interrupted: %r", name, failed.exceptions[0], exc_info=failed)
        else:
            counts = batch.counts
            logger.info("batch %s is %s: %d answered, %d failed", name, batch.status, counts.completed, counts.failed)

    # ---- what is old

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except StoreAway as error:
                logger.warning("batches: what is old stays for now: %s", error)

    async def sweep(self) -> None:
        """Remove files that have expired, and the journals of batches that are over."""
        now_s = self._stores.clock()

        def due(connection: Connection) -> list[str]:
            return file_rows.due(connection, now_s, 100)

        while found := await self._stores.database.write(due):
            for file_id in found:
                await self._stores.remove(file_id)
        while await self._stores.database.write(line_rows.sweep):
            pass
