"""A session whose KV cache decode pulls, in the cluster core: the calls, their order and contents, and what ends them.

The replicas are doubles that are told what to answer; what they answer is encoded as engine outputs are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.cluster.core import ClusterCore
from deployments.cluster.recovery import Limits
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import HandoffFailed, ReplicaLost
from deployments.link.ingress_side import Part, Take
from deployments.manager.calls import Call, Close, Lost, Open, PrefillDone, Silent, Withdraw
from deployments.messages import (
    Admit,
    Handoff,
    Mode,
    Placement,
    ReplicaInfo,
    Role,
    SessionRequest,
    SessionTask,
)

WAIT_S = 60.0
PROMPT = [5, 6, 7]
WHERE = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_port": 7}
P, D = (
    ReplicaInfo(
        f"{role}-0", str(role), role, "node", "same", block_size=4, total_blocks=9, max_sessions=9, max_model_len=99
    )
    for role in (Role.PREFILL, Role.DECODE)
)


@dataclass
class Replica:
    """One replica. `called`: it has begun a part, `requests[-1]`. `ended`: that part was cancelled, or is over."""

    info: ReplicaInfo
    requests: list[EngineCoreRequest] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: SessionTask | None = None
    part: Part | None = None
    take: Take = lambda replica_id, frames: None

    def begin(self, task: SessionTask, part: Part) -> None:
        assert task.replica_id == self.info.replica_id
        self.task, self.part = task, part
        self.requests.append(MsgpackDecoder(EngineCoreRequest).decode(list(task.request)))
        self.called.set()

    def say(self, tokens: Sequence[int], finish: FinishReason | None = None, **fields: Any) -> None:
        assert self.task is not None
        output = EngineCoreOutput(self.task.request_id, list(tokens), finish_reason=finish, **fields)
        frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
        self.take(self.info.replica_id, [bytes(frame) for frame in frames])
        if finish is not None and self.info.role is Role.DECODE:
            self._part().ended("finished")

    def die(self) -> None:
        self._part().lost(ReplicaLost("its engine died"))

    def _part(self) -> Part:
        assert self.part is not None
        self.ended.set()
        part, self.part = self.part, None
        return part

    def cancel(self, part: Part) -> None:
        if self.part is part:
            self._part()


class Replicas:
    """What the core begins parts on."""

    def __init__(self) -> None:
        self.prefill, self.decode = Replica(P), Replica(D)

    def listen(self, take: Take) -> None:
        self.prefill.take = self.decode.take = take

    def begin(self, replica: ReplicaInfo, task: SessionTask, part: Part) -> Callable[[], None]:
        at = self.prefill if replica.role is Role.PREFILL else self.decode
        at.begin(task, part)
        return lambda: at.cancel(part)

    def close(self) -> None:
        self.listen(lambda replica_id, frames: None)


@dataclass
class Manager:
    """Places everything on the two replicas, and notes what it is told."""

    handoff_timeout_s: float = WAIT_S
    mode: Mode = Mode.DISAGGREGATED
    requests: list[SessionRequest] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, call: Call[Any]) -> Any:
        match call:
            case Open(request):
                self.requests.append(request)
                return self._placed(request.session_id)
            case Silent():
                return ()
            case PrefillDone():
                self.told.append("prefill done")
            case Lost(replica_id):
                self.told.append(f"lost {replica_id}")
            case Close(outcome=outcome, ended=ended):
                self.told.append(f"{outcome}, ended" if ended else outcome)
                self.closed.set()
            case Withdraw(outcome=outcome):
                self.told.append(outcome)
                self.closed.set()
        return None

    def _placed(self, session_id: str) -> Admit:
        prefill = P if self.mode is Mode.DISAGGREGATED else None
        return Admit(Placement(session_id, 1, self.mode, "", D, prefill, 3, self.handoff_timeout_s, WAIT_S))


class Cluster:
    """A cluster core over the doubles."""

    def __init__(self, attempts: int) -> None:
        self.manager = Manager()
        replicas = Replicas()
        self.prefill, self.decode = replicas.prefill, replicas.decode
        self.core = ClusterCore(self.manager, replicas, WAIT_S, 4, Limits(attempts), Handoff.PULLED)
        self.context = RequestContext("r")

    async def ask(self, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 5, **sampling})
        current.set(self.context)
        await self.core.add_request_async(
            EngineCoreRequest("r", list(PROMPT), None, params, None, 0.0, None, None, None)
        )

    async def prefilled(self, finish: FinishReason = FinishReason.LENGTH, **fields: Any) -> None:
        """Prefill answers; decode has been called."""
        await reached(self.prefill.called)
        self.prefill.say([40], finish, kv_transfer_params=WHERE, **fields)
        await reached(self.decode.called)

    async def next(self) -> EngineCoreOutput:
        (output,) = (await asyncio.wait_for(self.core.get_output_async(), WAIT_S)).outputs
        return output

    def close(self) -> None:
        self.core.shutdown()


async def reached(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), WAIT_S)


@pytest.fixture
async def cluster(no_leaks: None, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Sessions are placed once, unless a test asks for more by parameter."""
    made = Cluster(getattr(request, "param", 1))
    yield made
    made.close()


async def test_prefill_comes_first_and_decode_gives_every_token(cluster: Cluster) -> None:
    await cluster.ask(stop_token_ids=[9], min_tokens=2, extra_args={"mine": 1})
    await reached(cluster.prefill.called)
    assert not cluster.decode.called.is_set()
    (request,) = cluster.prefill.requests
    params = request.sampling_params
    assert params is not None
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (1, 0, [])
    assert params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}

    counted = PrefillStats()
    counted.num_prompt_tokens = counted.num_computed_tokens = 3
    await cluster.prefilled(FinishReason.STOP, stop_reason=9, prefill_stats=counted)
    (request,) = cluster.decode.requests
    params = request.sampling_params
    assert params is not None
    assert request.prompt_token_ids == PROMPT
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (5, 2, [9])
    assert params.extra_args == {"mine": 1, "kv_transfer_params": WHERE}
    assert not cluster.prefill.ended.is_set(), "it holds the blocks that decode has yet to read"

    cluster.decode.say([41], prefill_stats=PrefillStats())
    first = await cluster.next()
    assert (first.new_token_ids, first.finish_reason, first.kv_transfer_params) == ([41], None, None)
    assert first.prefill_stats is not None
    assert first.prefill_stats.num_computed_tokens == 3, "the prefill's counts are the request's"
    await reached(cluster.prefill.ended)
    cluster.decode.say([9], FinishReason.STOP, stop_reason=9)
    last = await cluster.next()
    assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([9], FinishReason.STOP, 9)
    await reached(cluster.manager.closed)
    assert cluster.manager.told == ["prefill done", "stop, ended"]
    assert cluster.context.modes == {Mode.DISAGGREGATED}


@pytest.mark.parametrize("when", ["prefilling", "pulling", "decoding"])
async def test_a_cancel_ends_what_is_open_on_both_sides(cluster: Cluster, when: str) -> None:
    await cluster.ask()
    await reached(cluster.prefill.called)
    if when != "prefilling":
        await cluster.prefilled()
    if when == "decoding":
        cluster.decode.say([41])
        await cluster.next()
    await cluster.core.abort_requests_async(["r"])
    await reached(cluster.prefill.ended)
    if when != "prefilling":
        await reached(cluster.decode.ended)
    await reached(cluster.manager.closed)
    assert cluster.decode.called.is_set() == (when != "prefilling")
    assert cluster.manager.told[-1] == "cancelled"


async def test_decode_that_does_not_begin_in_time_fails_the_session(cluster: Cluster) -> None:
    cluster.manager.handoff_timeout_s = 0.05
    await cluster.ask()
    await cluster.prefilled()
    assert (await cluster.next()).finish_reason is FinishReason.ERROR
    assert type(cluster.context.error) is HandoffFailed
    await reached(cluster.prefill.ended)
    await reached(cluster.decode.ended)
    await reached(cluster.manager.closed)


@pytest.mark.parametrize("cluster", [4], indirect=True)
async def test_a_session_says_whose_handoffs_have_failed_until_its_answer_goes_on(cluster: Cluster) -> None:
    cluster.manager.handoff_timeout_s = 0.05
    await cluster.ask()
    for _ in range(2):
        await cluster.prefilled()
        cluster.prefill.called.clear()
        cluster.decode.called.clear()
    cluster.manager.handoff_timeout_s = WAIT_S
    await cluster.prefilled()
    cluster.prefill.called.clear()
    cluster.decode.say([41, 42])
    await cluster.next()
    cluster.decode.die()
    await reached(cluster.prefill.called)
    p = P.replica_id
    assert [request.failed_handoffs for request in cluster.manager.requests] == [(), (p,), (p, p), ()]
    await cluster.core.abort_requests_async(["r"])
    await reached(cluster.manager.closed)


async def test_the_limit_is_on_the_beginning_only(cluster: Cluster) -> None:
    cluster.manager.handoff_timeout_s = limit_s = 2.0
    await cluster.ask()
    await cluster.prefilled()
    cluster.decode.say([41])
    await cluster.next()
    await reached(cluster.prefill.ended)
    await asyncio.sleep(1.5 * limit_s)
    cluster.decode.say([42], FinishReason.LENGTH)
    assert (await cluster.next()).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_replica_that_is_lost_while_decode_pulls(cluster: Cluster, role: Role) -> None:
    await cluster.ask()
    await cluster.prefilled()
    (cluster.prefill if role is Role.PREFILL else cluster.decode).die()
    assert (await cluster.next()).finish_reason is FinishReason.ERROR
    assert type(cluster.context.error) is ReplicaLost
    await reached(cluster.prefill.ended)
    await reached(cluster.decode.ended)
    await reached(cluster.manager.closed)
    assert f"lost {role}-0" in cluster.manager.told


@pytest.mark.parametrize("cluster", [2], indirect=True)
async def test_an_answer_whose_decode_is_lost_is_prefilled_again_with_its_tokens(cluster: Cluster) -> None:
    await cluster.ask(max_tokens=5)
    await cluster.prefilled()
    cluster.decode.say([41, 42])
    await cluster.next()
    await reached(cluster.prefill.ended)
    for replica in (cluster.prefill, cluster.decode):
        replica.called.clear()
    cluster.decode.die()
    await reached(cluster.prefill.called)
    again = cluster.prefill.requests[-1]
    assert (again.request_id, again.prompt_token_ids) == ("r~2", PROMPT)
    assert again.sampling_params is not None
    assert again.sampling_params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}
    assert cluster.manager.requests[-1].attempt == 2
    await cluster.prefilled()
    params = cluster.decode.requests[-1].sampling_params
    assert params is not None
    assert (params.max_tokens, params.extra_args) == (5, {"kv_transfer_params": WHERE, "baton_answered": [41, 42]})
    cluster.decode.say([43, 44, 45], FinishReason.LENGTH)
    last = await cluster.next()
    assert (last.request_id, last.new_token_ids, last.finish_reason) == ("r", [43, 44, 45], FinishReason.LENGTH)
    assert cluster.context.error is None


async def test_what_only_the_first_token_kept_whole_is_split(cluster: Cluster) -> None:
    await cluster.ask(structured_outputs=StructuredOutputsParams(regex="a+"), seed=3, temperature=1.0)
    await cluster.prefilled()
    assert (cluster.manager.requests[0].rule, cluster.manager.requests[0].allowed[0]) == ("", Mode.DISAGGREGATED)
    prefill, decode = (replica.requests[0].sampling_params for replica in (cluster.prefill, cluster.decode))
    assert prefill is not None
    assert decode is not None
    assert prefill.structured_outputs is None
    assert decode.structured_outputs is not None
    assert decode.seed == 3


async def test_a_session_on_one_replica_is_told_nothing_of_transfers_by_the_client(cluster: Cluster) -> None:
    cluster.manager.mode = Mode.DECODE_LOCAL
    told = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}, "baton_answered": [666]}
    await cluster.ask(extra_args={"mine": 1, **told})
    await reached(cluster.decode.called)
    params = cluster.decode.requests[0].sampling_params
    assert params is not None
    assert (params.extra_args, params.max_tokens) == ({"mine": 1}, 5)
