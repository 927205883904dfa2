"""One ingress of the control plane: the cluster core with its stand-in, and a frontend that receives the outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from configs.schema import BatonConfig
from deployments.cluster import request_context
from deployments.cluster.core import ClusterCore
from deployments.cluster.port import Replicas
from deployments.cluster.recovery import Limits
from deployments.cluster.request_context import RequestContext
from deployments.cluster.timeline import Timelines
from deployments.cluster.timings import DEFAULT_TIMINGS, Timings
from deployments.manager.calls import Manager
from deployments.manager.stand_in import StandIn
from deployments.manager.timings import TIMINGS
from deployments.manager.timings import Timings as ManagerTimings
from deployments.messages import Handoff
from load_tests.harness.control_plane.fleet import PATIENCE_S
from load_tests.harness.control_plane.ports import Fleet, ManagerLine, ManagerPort, Watched


@dataclass
class Answer:
    """What the frontend receives for one request, and when.

    `surplus`: outputs that came after the last one. `cut`: its ingress died before the end. `times_s`: the time of each
    output, by the monotonic clock.
    """

    request_id: str
    context: RequestContext
    tokens: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    surplus: list[EngineCoreOutput] = field(default_factory=list)
    cut: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    times_s: list[float] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def has_failed(self) -> bool:
        """The frontend was told of an error."""
        return self.reason is FinishReason.ERROR

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[-1].stop_reason if self.outputs else None

    def take(self, output: EngineCoreOutput) -> None:
        if self.reason is not None:
            self.surplus.append(output)
            return
        self.outputs.append(output)
        self.times_s.append(time.monotonic())
        self.tokens += output.new_token_ids
        self.news.set()

    async def has(self, tokens: int) -> Answer:
        """Wait until the answer has `tokens` tokens."""
        await self._until(lambda: len(self.tokens) >= tokens)
        return self

    async def over(self, wait_s: float = PATIENCE_S) -> Answer:
        """Wait for the end."""
        await self._until(lambda: self.cut or self.reason is not None, wait_s)
        return self

    async def _until(self, condition: Callable[[], bool], wait_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(wait_s):
            while not condition():
                self.news.clear()
                await self.news.wait()


def core_over(
    config: BatonConfig,
    fleet: Fleet,
    line: ManagerLine,
    limits: Limits,
    timings: Timings = DEFAULT_TIMINGS,
    manager_timings: ManagerTimings = TIMINGS,
    timelines: Timelines | None = None,
) -> tuple[ClusterCore, StandIn]:
    """A cluster core over the replicas of a control plane, and the stand-in by which it asks the session manager."""
    stand_in = StandIn(line, config, manager_timings)
    links = Watched(fleet, config.placement.ingress_lease_s)
    return core_between(config, stand_in, links, limits, timings, timelines), stand_in


def core_between(
    config: BatonConfig,
    manager: Manager,
    replicas: Replicas,
    limits: Limits,
    timings: Timings = DEFAULT_TIMINGS,
    timelines: Timelines | None = None,
) -> ClusterCore:
    """A cluster core that asks this session manager and reaches these replicas."""
    handoff = Handoff.PULLED if config.channel.kind == "vllm" else Handoff.PUSHED
    timeout_s = config.placement.session_timeout_s
    block_size = config.block_size
    return ClusterCore(manager, replicas, timeout_s, block_size, limits, handoff, timings, timelines=timelines)


class Ingress:
    """A cluster core whose calls to the manager can be cut. `answers` and `timelines` fill as it goes."""

    def __init__(
        self,
        config: BatonConfig,
        timings: Timings,
        limits: Limits,
        fleet: Fleet,
        manager: ManagerPort,
        answers: Mapping[str, Answer],
        manager_timings: ManagerTimings,
    ) -> None:
        self._answers = answers
        self._manager_line = ManagerLine(manager)
        self.timelines = Timelines(config.ingress.timelines)
        self.core, self.stand_in = core_over(
            config, fleet, self._manager_line, limits, timings, manager_timings, self.timelines
        )
        self._reader = asyncio.create_task(self._read())

    def shutdown(self) -> None:
        """Shut the core down, as a process does that ends normally."""
        self.core.shutdown()
        self.stand_in.shutdown()

    def kill(self) -> None:
        """The process dies: it tells the manager nothing any more, and its connections break."""
        self._manager_line.is_cut = True
        self.shutdown()
        self._reader.cancel()

    async def close(self) -> None:
        """End the frontend's task."""
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def add(self, answer: Answer, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        """Add a request as vLLM's frontend does, in a context of its own."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        request = EngineCoreRequest(answer.request_id, list(prompt), None, params, None, 0.0, None, None, None)

        async def add() -> None:
            request_context.current.set(answer.context)
            await self.core.add_request_async(request)

        await asyncio.get_running_loop().create_task(add(), context=copy_context())

    async def _read(self) -> None:
        while True:
            for output in (await self.core.get_output_async()).outputs:
                if (answer := self._answers.get(output.request_id)) is not None:
                    answer.take(output)
