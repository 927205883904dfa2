"""A whole control plane in one process, without Ray: every part is the real one but the engines, which are mocks.

For the tests of the control plane, and for the benchmark `chaos`.

Direct ports stand in for Serve handles. What crosses one is pickled, and a cancelled call is cancelled on the replica
without waiting for it, as Serve does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from configs.schema import BatonConfig, ChannelConfig, MockEngineConfig, ModelConfig, PlacementConfig, PoolConfig
from deployments.cluster import request_context
from deployments.cluster.core import ClusterCore
from deployments.cluster.recovery import Limits
from deployments.cluster.request_context import RequestContext
from deployments.cluster.timings import DEFAULT_TIMINGS, Timings
from deployments.engine.mock.engine import MockEngine
from deployments.engine.protocol import EngineError, Identity
from deployments.errors import ReplicaLost, Unavailable
from deployments.manager.manager import LISTEN_S, SessionManager
from deployments.manager.stand_in import StandIn
from deployments.messages import Handoff, Role, SessionReport, SessionTask
from deployments.replica.replica import Replica
from load_tests.chaos.points import Points
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import PlaneError, WriteState

WAIT_S, PATIENCE_S = 30.0, 90.0  # of the configuration; and of who waits for what it should bring about
BLOCKS = {"prefill": 256, "decode-small": 144, "decode-large": 288}
PREFILL, SMALL, LARGE = "prefill-0", "decode-small-0", "decode-large-0"
REPLICAS = {PREFILL: "prefill", SMALL: "decode-small", LARGE: "decode-large"}
MAX_MODEL_LEN = 512


def config(engine: dict[str, Any] | None = None, scale: int = 1, **placement: Any) -> BatonConfig:
    """One prefill and two unlike decode pools of quick mock engines, with `scale` times the blocks."""
    base = MockEngineConfig(
        block_size=4,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        num_layers=3,
        step_s=0.001,
        prefill_tokens_per_s=1e6,
    ).model_copy(update=engine or {})
    engines = {pool: base.model_copy(update={"num_blocks": scale * blocks}) for pool, blocks in BLOCKS.items()}
    pools = {pool: PoolConfig(engine=engine) for pool, engine in engines.items()}
    times = {"split": "always", "queue_timeout_s": WAIT_S, "session_timeout_s": 2 * WAIT_S, "snapshot_interval_s": 0.01}
    return BatonConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN),
        prefill=pools["prefill"],
        decode={"small": pools["decode-small"], "large": pools["decode-large"]},
        channel=ChannelConfig(kind="in_process", handoff_timeout_s=WAIT_S),
        placement=PlacementConfig(**{**times, **placement}),
    )


async def until(look: Callable[[], Awaitable[Any]], wait_s: float = PATIENCE_S) -> Any:
    """Ask again until the answer is true, for a bounded time."""
    async with asyncio.timeout(wait_s):
        while not (seen := await look()):  # noqa: ASYNC110 - many things are looked at, few of them tell
            await asyncio.sleep(0.002)
    return seen


class GatedPlane(InProcessPlane):
    """While `shut`, writes are under way; they land late when it opens, or fail when it is `broken`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.shut = self.broken = False
        self.writes = 0
        self.on_write: Callable[[], None] = lambda: None

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        self.writes += 1
        self.on_write()
        return agent, layer, tuple(local), tuple(remote)

    def check(self, handle: Any) -> WriteState:
        if self.broken:
            return WriteState.FAILED
        if self.shut:
            return WriteState.BUSY
        try:
            return super().write(*handle)
        except PlaneError:
            return WriteState.FAILED


class GatedEngine(MockEngine):
    """A mock engine that computes nothing while `go` is clear; `stopped` says that it has come to wait there.

    One that `is_deaf` answers no question, as an engine in an endless step would not.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go, self.stopped, self.is_deaf = asyncio.Event(), asyncio.Event(), False
        self.slower_s = 0.0
        self.on_point: Callable[[str], None] = lambda point: None
        self.go.set()

    async def add(self, frames: tuple[bytes, ...]) -> None:
        await super().add(frames)
        if self._role is Role.DECODE:
            self.on_point("before_offer")

    def _loaded(self, sequence: Any, token: int | None) -> None:
        super()._loaded(sequence, token)
        self.on_point("landing")

    async def _compute(self, work: Any) -> None:
        if not self.go.is_set():
            self.stopped.set()
            await self.go.wait()
            self.stopped.clear()
        if self.slower_s:
            await asyncio.sleep(self.slower_s)
        await super()._compute(work)
        if self._role is Role.DECODE:
            self.on_point("decoding")

    async def counters(self) -> dict[str, float]:
        if self.is_deaf:
            await asyncio.sleep(3600)
        return await super().counters()

    @property
    def used_blocks(self) -> int:
        return self._scheduler.used_blocks

    def fill(self) -> Callable[[], None]:
        """Take every free block away; the answer gives them back."""
        free = self._scheduler._free
        taken = tuple(free)
        free.clear()

        def give_back() -> None:
            free.extend(taken)
            self._wake.set()

        return give_back


class ManagerPort:
    """The session manager's port. As over Serve, a call that is open when the manager dies ends with an error at once,
    and one that comes while there is none waits for the next.
    """

    def __init__(self, manager: SessionManager) -> None:
        self._manager: SessionManager | None = manager
        self._dead, self._born = asyncio.Event(), asyncio.Event()
        self._born.set()

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def lose(self) -> None:
        self._manager, self._born = None, asyncio.Event()
        self._dead.set()

    def restart(self, manager: SessionManager) -> None:
        self._manager, self._dead = manager, asyncio.Event()
        self._born.set()

    async def _call(self, name: str, *args: Any) -> Any:
        await self._born.wait()
        call = asyncio.ensure_future(getattr(self._manager, name)(*pickle.loads(pickle.dumps(args))))
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({call, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Unavailable("it has died")
            return pickle.loads(pickle.dumps(call.result()))
        finally:
            call.cancel()
            dead.cancel()


class Pool:
    """A pool's port. `error` is raised instead of a call; `reply_to` sends the outputs somewhere else."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas
        self.tasks: list[SessionTask] = []
        self.error: Exception | None = None
        self.reply_to: str | None = None
        self.on_point: Callable[[str, str], None] = lambda point, replica_id: None

    async def run(self, task: SessionTask) -> SessionReport:
        task = pickle.loads(pickle.dumps(task))
        self.tasks.append(task)
        self.on_point("placed", task.replica_id)
        if self.error is not None:
            raise self.error
        if self.reply_to is not None:
            task = replace(task, reply_to=self.reply_to)
        if task.replica_id not in self._replicas:
            raise ReplicaLost(f"there is no {task.replica_id}")
        call = asyncio.create_task(self._replicas[task.replica_id].run(task))
        try:
            report: SessionReport = pickle.loads(pickle.dumps(await asyncio.shield(call)))
        except EngineError as error:
            raise ReplicaLost(str(error)) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        self.on_point("closing", task.replica_id)
        return report


class ManagerLine:
    """One ingress's way to the session manager. Once it is cut, because the ingress died, nothing goes over it."""

    def __init__(self, port: ManagerPort) -> None:
        self._port, self.is_cut = port, False

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    async def _call(self, name: str, *args: Any) -> Any:
        if self.is_cut:
            raise Unavailable("its ingress has died")
        return await getattr(self._port, name)(*args)


class Line:
    """One ingress's way to a pool. Once it is cut, because the ingress died, what was called over it runs on."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.is_cut = pool, False

    async def run(self, task: SessionTask) -> SessionReport:
        call = asyncio.create_task(self._pool.run(task))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self.is_cut:
                call.cancel()
            call.add_done_callback(_ignore)
            raise


def _ignore(call: asyncio.Task[Any]) -> None:
    if not call.cancelled():
        call.exception()


@dataclass
class Answer:
    """What the frontend gets for one request, and when. `surplus`: outputs after the last. `cut`: its ingress died."""

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
        """Wait for so many tokens."""
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


class InProcess:
    """The session manager, the replicas and the cluster core, and a frontend that takes the outputs."""

    def __init__(self, config: BatonConfig, timings: Timings = DEFAULT_TIMINGS, limits: Limits | None = None) -> None:
        self._config, self._timings = config, timings
        self._limits = limits or Limits(config.placement.max_attempts)
        self.manager = SessionManager(config)
        self.manager_port: Any = ManagerPort(self.manager)
        self.engines: dict[str, GatedEngine] = {}
        self.planes: dict[str, GatedPlane] = {}
        self.replicas: dict[str, Replica] = {}
        self.pools = {pool: Pool(self.replicas) for pool in config.pools}
        self.points = Points()
        for each in self.pools.values():
            each.on_point = self.points.reached
        self.answers: dict[str, Answer] = {}
        self._asked = 0
        self._begin_ingress()

    def _begin_ingress(self) -> None:
        config = self._config
        handoff = Handoff.PULLED if config.channel.kind == "vllm" else Handoff.PUSHED
        timeout_s, block_size = config.placement.session_timeout_s, config.prefill.engine.block_size
        self._lines = {name: Line(pool) for name, pool in self.pools.items()}
        self._manager_line: Any = ManagerLine(self.manager_port)
        self.stand_in = StandIn(self._manager_line, config)
        self.core = ClusterCore(
            self.stand_in, self._lines, "127.0.0.1", timeout_s, block_size, self._limits, handoff, self._timings
        )
        self._reader = asyncio.create_task(self._read())

    async def start(self, *replica_ids: str) -> None:
        """Start replicas; the session manager knows that they are ready."""
        for replica_id in replica_ids:
            self._build(replica_id)
        await asyncio.gather(*(self.replicas[replica_id].start() for replica_id in replica_ids))
        await until(lambda: self._are_ready(replica_ids))

    def _build(self, replica_id: str) -> None:
        pool = replica_id.rpartition("-")[0]
        role = Role.PREFILL if pool == "prefill" else Role.DECODE
        plane = self.planes[replica_id] = GatedPlane(replica_id)
        engine = self.engines[replica_id] = GatedEngine(
            self._config.pools[pool].engine,
            role=role,
            replica_id=replica_id,
            fingerprint="mock",
            secret="a secret of the tests",
            host="127.0.0.1",
            handoff_timeout_s=self._config.channel.handoff_timeout_s,
            max_model_len=self._config.model.max_model_len,
            plane=plane,
        )
        plane.on_write = lambda: self.points.reached("writing", replica_id)
        engine.on_point = lambda point: self.points.reached(point, replica_id)
        identity = Identity(replica_id, pool, role, "node", "127.0.0.1")
        self.replicas[replica_id] = Replica(identity, engine, self.manager_port, self._config.placement)

    async def _are_ready(self, replica_ids: Collection[str]) -> bool:
        pools = (await self.manager.ready())["pools"].values()
        loads = {replica_id: replica["load"] for pool in pools for replica_id, replica in pool["replicas"].items()}
        return all(loads.get(replica_id) for replica_id in replica_ids)

    def lose_manager(self) -> None:
        """The session manager dies, and all that it knew."""
        self.manager_port.lose()

    def restart_manager(self) -> None:
        """Another session manager takes its place."""
        self.manager = SessionManager(self._config, listen_s=LISTEN_S)
        self.manager_port.restart(self.manager)

    def kill_ingress(self) -> None:
        """The ingress dies with all that it knew, and another takes its place. Nobody is told."""
        self.end_ingress()
        for answer in self.answers.values():
            if answer.reason is None:
                answer.cut = True
                answer.news.set()
        self._begin_ingress()

    def end_ingress(self) -> None:
        """The ingress dies, and there is none."""
        self._manager_line.is_cut = True
        for line in self._lines.values():
            line.is_cut = True
        self.core.shutdown()
        self.stand_in.shutdown()
        self._reader.cancel()

    async def close(self) -> None:
        self.core.shutdown()
        self.stand_in.shutdown()
        for replica in self.replicas.values():
            await asyncio.wait_for(replica.stop(), WAIT_S)
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        core = self.core
        while True:
            for output in (await core.get_output_async()).outputs:
                if (answer := self.answers.get(output.request_id)) is not None:
                    answer.take(output)

    async def ask(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Add a request as vLLM's frontend does."""
        self._asked += 1
        request_id = f"request-{self._asked}"
        answer = self.answers[request_id] = Answer(request_id, RequestContext(request_id))
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        request = EngineCoreRequest(request_id, list(prompt), None, params, None, 0.0, None, None, None)

        self.points.reached("opening")

        async def add() -> None:
            request_context.current.set(answer.context)
            await self.core.add_request_async(request)

        await asyncio.get_running_loop().create_task(add(), context=copy_context())
        return answer

    def forget(self, answer: Answer) -> None:
        """Keep nothing of a request that is over, nor of the tasks that it was."""
        del self.answers[answer.request_id]
        for pool in self.pools.values():
            pool.tasks.clear()

    async def abort(self, answer: Answer) -> None:
        """Its client goes away."""
        await self.core.abort_requests_async([answer.request_id])

    async def answer(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Ask, and wait for the end."""
        return await (await self.ask(prompt, **sampling)).over()

    async def local(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        """What one decode replica answers by itself."""
        answer = await self.answer(prompt, **{**sampling, "prompt_logprobs": 0})
        assert answer.context.rules == {"prompt_logprobs"}
        return answer.tokens

    async def placements(self) -> dict[str, dict[str, Any]]:
        """The promises of open sessions by request id."""
        return {promise["session_id"]: promise for promise in (await self.manager.status())["promises"]}

    async def placed(self, answer: Answer) -> dict[str, Any]:
        """Wait until a request is placed, and who asked for its place has heard of it."""

        async def look() -> Any:
            return (await self.placements()).get(answer.request_id) if answer.context.modes else None

        placed: dict[str, Any] = await until(look)
        return placed

    async def queued(self, count: int) -> None:
        """Wait until so many requests wait for a place."""

        async def look() -> bool:
            return bool((await self.manager.status())["sessions"]["queued"] == count)

        await until(look)

    async def stopped(self, replica_id: str) -> None:
        """Wait until an engine whose `go` is clear has work and waits."""
        await asyncio.wait_for(self.engines[replica_id].stopped.wait(), WAIT_S)

    async def kill(self, replica_id: str) -> None:
        """End an engine in the midst of its work, its KV channel included, and see its replica unhealthy."""
        await self.engines[replica_id].shutdown()

        async def look() -> bool:
            try:
                self.replicas[replica_id].check_health()
            except EngineError:
                return True
            return False

        await until(look)

    async def bury(self, replica_id: str) -> None:
        """Stop what is left of a replica, and know it no more."""
        await asyncio.wait_for(self.replicas.pop(replica_id).stop(), WAIT_S)
        del self.engines[replica_id], self.planes[replica_id]

    async def closed(self) -> None:
        """Wait until the core and the manager have no open session, whatever the engines still have to do."""
        await self._until_nothing(self._open)

    async def settle(self, dead: Collection[str] = (), wait_s: float = PATIENCE_S) -> None:
        """Wait until nothing is open anywhere and every block is free, by the engines' and the manager's books."""
        await self._until_nothing(lambda: self._left(dead), wait_s)
        assert not [answer.surplus for answer in self.answers.values() if answer.surplus]

    async def _until_nothing(self, look: Callable[[], Any], wait_s: float = PATIENCE_S) -> None:
        left: dict[str, Any] = {}

        async def found_nothing() -> bool:
            nonlocal left
            left = await look()
            return not left

        try:
            await until(found_nothing, wait_s)
        except TimeoutError:
            raise AssertionError(f"still there after {wait_s:g} s: {left}") from None

    async def _open(self) -> dict[str, Any]:
        status = await self.manager.status()
        found = {"core": self.core.open_sessions, **status["sessions"], "promises": status["promises"]}
        del found["closed"]
        return {name: value for name, value in found.items() if value}

    async def _left(self, dead: Collection[str]) -> dict[str, Any]:
        found = await self._open()
        status = await self.manager.status()
        loads = {name: each["load"] for pool in status["pools"].values() for name, each in pool["replicas"].items()}
        for name, replica in self.replicas.items():
            if name not in dead and not loads.get(name):
                found[name] = "has not reported again since it was called lost"
            elif name not in dead:
                numbers, load = status["replicas"][name], loads[name]
                counters = await replica.counters()
                each = {key: numbers[key] for key in ("used_blocks", "running", "waiting", "sessions")}
                each |= {key: counters[key] for key in ("open_receiving", "open_writing")}
                overcommit = 1.0 if name.startswith("prefill") else self._config.placement.overcommit
                each |= {
                    "promised": int(load["total_blocks"] * overcommit) - load["free_blocks"],
                    "engine": self.engines[name].used_blocks,
                }
                found |= {f"{name} {key}": value for key, value in each.items() if value}
        return found


@contextlib.asynccontextmanager
async def in_process(
    config: BatonConfig,
    replica_ids: Collection[str] = tuple(REPLICAS),
    timings: Timings = DEFAULT_TIMINGS,
    limits: Limits | None = None,
) -> AsyncIterator[InProcess]:
    """A control plane with these replicas up; at the end nothing may be left of it."""
    cluster = InProcess(config, timings, limits)
    try:
        await cluster.start(*replica_ids)
        yield cluster
    finally:
        await cluster.close()
