"""The control plane of `in_process` over real vLLM engines, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

from deployments.engine.build import build_engine
from deployments.engine.protocol import Identity
from deployments.host.processes import descendants
from deployments.messages import Mode, Role
from deployments.replica.replica import Replica
from load_tests.harness.control_plane import PREFILL, REPLICAS, SMALL, InProcess, until

SLOW_END_S = 10.0
"""Engines that take longer to end say where they are. One with tiers is killed after twice as long."""

faulthandler.register(signal.SIGUSR2, file=2)  # engines are forks of this process, and have it from here


class RealEngines(InProcess):
    def _build(self, replica_id: str) -> None:
        pool = REPLICAS[replica_id]
        role = Role.PREFILL if pool == "prefill" else Role.DECODE
        identity = Identity(replica_id, pool, role, "node", "127.0.0.1")
        engine = build_engine(self._config, identity, "a secret of the tests")
        self.replicas[replica_id] = Replica(identity, engine, self.manager_port, self._config.placement)

    async def close(self) -> None:
        late = asyncio.get_running_loop().call_later(SLOW_END_S, _say_where_they_are)
        try:
            await super().close()
        finally:
            late.cancel()

    async def alone(self, prompt: list[int], **sampling: Any) -> list[int]:
        """What the decode engine answers by itself. With prompt log probabilities it reads no cache."""
        answer = await self.answer(prompt, **{**sampling, "prompt_logprobs": 0})
        assert answer.context.modes == {Mode.DECODE_LOCAL}
        return answer.tokens

    async def used(self) -> list[int]:
        """Blocks in use on prefill and decode, as the engines say. Idle ones say nothing: short requests make them."""
        await asyncio.gather(self.answer([1, 2, 3], max_tokens=1), self.alone([1, 2, 3], max_tokens=2))
        return [self.replicas[replica_id]._readings.load.used_blocks for replica_id in (PREFILL, SMALL)]

    async def all_is_free(self) -> None:
        async def look() -> bool:
            return max(await self.used()) <= 1  # with several workers, the last short request's block still counts

        await until(look)
        await self.closed()


def _say_where_they_are() -> None:
    """Every process below this one that can writes the stacks of its threads to the test's output."""
    for pid in descendants(os.getpid()):
        if _catches(pid, signal.SIGUSR2):
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(pid, signal.SIGUSR2)


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line for line in status if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
