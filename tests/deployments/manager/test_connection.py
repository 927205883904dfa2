"""The session manager's connections: what crosses them, and what becomes of calls when they break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec
import pytest

from deployments.errors import Unavailable
from deployments.manager import calls, wire
from deployments.manager.calls import (
    Call,
    Close,
    Lost,
    Open,
    PrefillDone,
    Ready,
    Report,
    Silent,
    Status,
    View,
    Withdraw,
)
from deployments.manager.client import ManagerClient
from deployments.manager.manager import SessionManager
from deployments.manager.server import ManagerServer
from deployments.manager.timings import Timings
from deployments.messages import (
    MANAGER_RETIRES,
    Admit,
    Allowance,
    CacheChange,
    FetchPlan,
    Finished,
    ManagerView,
    Mode,
    Occupancy,
    Peers,
    Phase,
    Placement,
    Quota,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionRequest,
    StepSample,
)
from deployments.sealed_connection import framed, packed
from tests.deployments.manager.test_manager import BLOCK, config
from transfer.control.seal import BadMessage

SECRET = "a secret of the tests"
INFO = ReplicaInfo(
    "p0", "prefill", Role.PREFILL, "node", "engine", BLOCK, 100, 8, 2048, ("tcp://h:1",), 256, 4096, strict=True
)
DECODE = replace(INFO, replica_id="d0", pool="decode-small", role=Role.DECODE, total_blocks=20, strict=False)
SNAPSHOT = ReplicaSnapshot(
    "p0",
    2**60,
    Phase.READY,
    INFO,
    used_blocks=3,
    sessions=("s", "t"),
    reservations=(Reservation(4, 3, 40, 32, 0.5), Reservation()),
    counters={"preemptions": 0, "bytes": 1.5},
    finished=(Finished("r", 2, 9, True),),
    finished_version=7,
    steps=(StepSample(0.01, 5, 10, 2, 60),),
    cache=CacheChange(4, (0, 2**64 - 1), (17,), True),
    held_tokens=(40, 0),
    movable=frozenset({"s"}),
    is_starting=True,
)
REQUEST = SessionRequest(
    "s",
    40,
    20,
    (Mode.DECODE_LOCAL,),
    "rule",
    (2**64 - 1, 1),
    "class",
    "client",
    "key",
    "adapter",
    True,
    2,
    "d1",
    ("p0", "d2"),
    5,
    True,
    quota=Quota("team", 10, 1000, 2),
)


@dataclass
class Stage:
    """Managers that come and go, and where the client finds the one that is there."""

    servers: list[ManagerServer] = field(default_factory=list)
    managers: list[SessionManager] = field(default_factory=list)
    clients: list[ManagerClient] = field(default_factory=list)
    asked: int = 0

    async def begin(self, secret: str = SECRET) -> SessionManager:
        """Another manager, with two replicas; from now on it is the one that is found."""
        manager = SessionManager(config(), rng=random.Random(1))
        server = ManagerServer(manager, secret)
        await server.start("127.0.0.1")
        self.servers.append(server)
        self.managers.append(manager)
        for info in (INFO, DECODE):
            await manager.ask(Report(ReplicaSnapshot(info.replica_id, 1, Phase.READY, info)))
        return manager

    def client(self, secret: str = SECRET) -> ManagerClient:
        self.clients.append(ManagerClient(self.locate, secret))
        return self.clients[-1]

    async def locate(self) -> str:
        self.asked += 1
        if not self.servers:
            raise Unavailable("there is no manager")
        return self.servers[-1].address

    def kill(self) -> None:
        """The newest manager's process dies: its kernel closes its sockets."""
        server = self.servers.pop()
        assert server._server is not None
        server._server.close()
        for connection in server._connections:
            connection._transport.abort()

    @property
    def open(self) -> int:
        return len(self.managers[-1]._allocator.fleet.promises())

    @property
    def queued(self) -> int:
        return len(self.managers[-1]._allocator.room)


@pytest.fixture
async def stage(no_leaks: None) -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.begin()
    yield stage
    for client in stage.clients:
        client.shutdown()
    for server in stage.servers:
        await server.retire()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def until(look: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0.002)


def request(session_id: str, tokens: int = 200) -> SessionRequest:
    """It takes 15 of the decode replica's 20 blocks, so that a second one waits."""
    return SessionRequest(session_id, tokens, 40)


async def test_every_call_comes_to_the_manager_and_its_answer_back(stage: Stage) -> None:
    manager, client = stage.managers[0], stage.client()
    admit = await client.ask(Open(request("s")))
    assert isinstance(admit, Admit)
    assert admit == Admit(manager._allocator.fleet.promises()[0].placement)
    assert await client.ask(View(0.0)) == await manager.ask(View(0.0))
    assert (await client.ask(Ready()))["pools"]["prefill"]["replicas"].keys() == {"p0"}
    assert (await client.ask(Status()))["promises"][0]["session_id"] == "s"
    await client.ask(PrefillDone("s", 1))
    assert not manager._allocator.fleet.promises()[0].prefilling
    await client.ask(Close("s", 1, "finished", 5))
    assert stage.open == 0
    assert (await manager.ask(Status()))["sessions"]["closed"] == {"finished": 1}
    refused = await client.ask(Open(request("long", 100_000)))
    assert isinstance(refused, Reject)
    assert refused.retry_after_s is None
    answer = await client.ask(Report(ReplicaSnapshot("p0", 2, Phase.READY, INFO)))
    assert answer.peers is not None
    assert answer.peers.endpoints == (DECODE.endpoints,)
    assert await client.ask(Silent(("p0", "unheard-of"))) == await manager.ask(Silent(("p0", "unheard-of")))
    await client.ask(Lost("d0", gone=True))
    assert isinstance(await manager.ask(Ready()), dict)
    assert "d0" in (await manager.ask(Status()))["breakers"]
    assert stage.asked == 1, "one connection serves all calls"


async def test_an_error_there_is_the_callers_and_the_connection_goes_on(stage: Stage) -> None:
    client = stage.client()
    with pytest.raises(Unavailable, match="allows no mode"):
        await client.ask(Open(SessionRequest("s", 10, 5, allowed=())))
    assert isinstance(await client.ask(Open(request("t"))), Admit)
    assert stage.asked == 1


async def test_a_cancelled_caller_gives_up_its_place(stage: Stage) -> None:
    client = stage.client()
    await client.ask(Open(request("first")))
    waiting = asyncio.create_task(client.ask(Open(request("second"))))
    await until(lambda: stage.queued == 1)
    waiting.cancel()
    await until(lambda: stage.queued == 0)
    await client.ask(Close("first", 1, "finished"))
    assert stage.open == 0, "a request that was given up is not placed"


async def test_a_caller_that_dies_gives_up_its_own_places_only(stage: Stage) -> None:
    dying, living = stage.client(), stage.client()
    await living.ask(Open(request("first")))
    calls = [asyncio.create_task(dying.ask(Open(request("theirs"))))]
    await until(lambda: stage.queued == 1)
    calls.append(asyncio.create_task(living.ask(Open(request("ours")))))
    await until(lambda: stage.queued == 2)
    assert dying._connection is not None
    dying._connection._transport.abort()
    with pytest.raises(Unavailable, match="has gone"):
        await calls[0]
    await until(lambda: stage.queued == 1)
    await living.ask(Close("first", 1, "finished"))
    assert isinstance(await calls[1], Admit)


async def test_a_manager_that_dies_fails_open_calls_at_once_and_the_next_is_found(stage: Stage) -> None:
    client = stage.client()
    await client.ask(Open(request("first")))
    calls = [asyncio.create_task(client.ask(Open(request("second")))), asyncio.create_task(client.ask(View(3600.0)))]
    await until(lambda: stage.queued == 1)
    stage.kill()
    for call in calls:
        with pytest.raises(Unavailable, match="has gone"):
            await call
    with pytest.raises(Unavailable, match="there is no manager"):
        await client.ask(View(0.0))
    await stage.begin()
    assert (await client.ask(View(0.0))) == await stage.managers[1].ask(View(0.0))
    assert isinstance(await client.ask(Open(request("third"))), Admit)
    assert stage.open == 1


async def test_a_manager_that_leaves_answers_what_it_owes_and_sends_callers_on(stage: Stage) -> None:
    old, client = stage.managers[0], stage.client()
    await client.ask(Open(request("first")))
    waiting = asyncio.create_task(client.ask(Open(request("second"))))
    viewing = asyncio.create_task(client.ask(View(0.3)))
    await until(lambda: stage.queued == 1)
    owed = asyncio.create_task(stage.servers[0].retire())
    decision = await waiting
    assert isinstance(decision, Reject)
    assert decision.code == MANAGER_RETIRES
    early = asyncio.create_task(client.ask(Open(request("third"))))  # while only the old one is found
    await asyncio.sleep(0.05)
    assert not early.done()
    await stage.begin()
    assert isinstance(await early, Admit)
    assert (await client.ask(View(0.0))).life == (await stage.managers[1].ask(View(0.0))).life
    assert (await viewing).life == (await old.ask(View(0.0))).life, "it was asked before, and is owed"
    await owed
    assert not stage.servers[0]._connections
    assert not old._allocator.room


async def test_a_manager_that_leaves_does_not_wait_for_ever(stage: Stage) -> None:
    stage.servers[0]._timings = Timings(last_answers_s=0.05)
    client = stage.client()
    viewing = asyncio.create_task(client.ask(View(3600.0)))
    await until(lambda: stage.asked == 1 and stage.servers[0]._connections)
    await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        await stage.servers[0].retire()
        with pytest.raises(Unavailable):
            await viewing


async def test_a_caller_cancelled_while_it_connects_harms_no_other(stage: Stage) -> None:
    found, client = asyncio.Event(), stage.client()

    async def locate() -> str:
        await found.wait()
        return await stage.locate()

    client._locate = locate
    first, second = asyncio.create_task(client.ask(View(0.0))), asyncio.create_task(client.ask(View(0.0)))
    await asyncio.sleep(0.01)
    first.cancel()
    found.set()
    assert (await second).replicas
    assert stage.asked == 1


async def test_a_manager_that_is_not_found_in_time_is_unavailable(stage: Stage) -> None:
    client = ManagerClient(stage.locate, SECRET, Timings(locate_s=0.05))

    async def never() -> str:
        await asyncio.sleep(3600)
        return ""

    async def leaving() -> str:
        return ""

    async def nowhere() -> str:
        return "127.0.0.1:1"

    locate: Callable[[], Awaitable[str]]
    for locate in (never, leaving, nowhere):
        client._locate = locate
        with pytest.raises(Unavailable, match="cannot be reached"):
            await client.ask(View(0.0))


async def test_a_peer_without_the_secret_is_cut_off_and_others_go_on(stage: Stage) -> None:
    client, stranger = stage.client(), stage.client("another secret")
    await client.ask(View(0.0))
    with pytest.raises(Unavailable, match="has gone"):
        await stranger.ask(Withdraw("s", "finished"))
    assert (await client.ask(View(0.0))).replicas
    assert stage.asked == 2


def sealed(message: wire.AnyMessage) -> bytes:
    return framed(wire.seal(SECRET).pack(packed(message)))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        sealed(wire.Answered(1, wire.packed_answer(None))),
        framed(wire.seal(SECRET)._digest(b"\x81") + b"\x81"),
    ],
    ids=["another protocol", "longer than any", "empty", "what only a manager says", "no message"],
)
async def test_a_peer_that_says_what_no_caller_says_is_cut_off(stage: Stage, said: bytes) -> None:
    host, _, port = stage.servers[0].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    assert (await stage.client().ask(View(0.0))).replicas


async def test_a_flood_of_openings_does_not_hold_up_what_else_is_asked(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between openings the manager looks at its other connections."""
    flood, control = stage.client(), stage.client()
    await asyncio.gather(flood.ask(View(0.0)), control.ask(View(0.0)))
    ask, opened = stage.managers[0].ask, 0
    first = asyncio.Event()

    async def counted(call: Call[Any]) -> Any:
        nonlocal opened
        if isinstance(call, Open):
            opened += 1
            first.set()
        return await ask(call)

    monkeypatch.setattr(stage.managers[0], "ask", counted)
    openings = [asyncio.create_task(flood.ask(Open(SessionRequest(f"s{n}", 1_000_000, 1)))) for n in range(2000)]
    await first.wait()
    assert (await control.ask(Ready()))["pools"]
    assert opened < 2000, "the answer did not wait for all of them"
    refused = await asyncio.gather(*openings)
    assert {type(each) for each in refused} == {Reject}


async def test_an_opening_that_is_cancelled_before_its_turn_is_not_begun(stage: Stage) -> None:
    client = stage.client()
    await client.ask(View(0.0))
    openings = [asyncio.create_task(client.ask(Open(request(f"s{n}")))) for n in range(200)]
    await asyncio.sleep(0)
    for opening in openings:
        opening.cancel()
    await asyncio.gather(*openings, return_exceptions=True)
    assert await client.ask(View(0.0))
    await until(lambda: stage.open == stage.queued == 0)


@pytest.mark.parametrize(
    "call", [Open(REQUEST), View(), Report(SNAPSHOT), Silent(()), Ready()], ids=lambda call: type(call).__name__
)
async def test_an_answer_of_another_kind_is_no_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, call: Call[Any]
) -> None:
    async def another(call: Call[Any]) -> int:
        return 7

    monkeypatch.setattr(stage.managers[0], "ask", another)
    client = stage.client()
    with pytest.raises(Unavailable, match="is not understood"):
        await client.ask(call)
    monkeypatch.undo()
    assert (await client.ask(View())).replicas
    assert stage.asked == 1, "only that call fails"


class Shout(Call[None], frozen=True, tag=True):
    """A call of a later version."""

    loudness: int


class Lost2(Call[None], frozen=True, tag="Lost"):
    """A call that has lost a field in a later version."""


class Whisper(wire.Message, frozen=True):
    """A message of a later version."""


@pytest.mark.parametrize("call", [Shout(11), Lost2()], ids=["unknown", "without a field"])
async def test_a_call_of_another_version_is_unavailable_and_harms_no_other(stage: Stage, call: Call[None]) -> None:
    client = stage.client()
    with pytest.raises(Unavailable, match="no call of this version"):
        await client.ask(call)
    assert (await client.ask(View())).replicas
    assert stage.asked == 1


async def test_a_message_of_another_version_fails_its_call_alone(stage: Stage) -> None:
    """Both ways: what a caller says to an older manager, and what a manager says to an older caller."""
    client = stage.client()
    await client.ask(View())
    viewing = asyncio.create_task(client.ask(View(3600.0)))
    ours, (theirs,) = client._connection, stage.servers[0]._connections
    assert ours is not None
    await until(lambda: ours._open)
    (number,) = ours._open
    for side, said in ((ours, 7), (theirs, number)):
        side._transport.write(framed(wire.seal(SECRET).pack(msgspec.Raw(msgspec.msgpack.encode(Whisper(said))))))
    with pytest.raises(Unavailable, match="of another version"):
        await viewing
    assert (await client.ask(View())).replicas
    assert stage.asked == 1


@pytest.mark.parametrize(
    "call",
    [Open(REQUEST), Report(SNAPSHOT), Close("s", 1, "finished", None, True), Withdraw("s", "cancelled")],
    ids=lambda call: type(call).__name__,
)
def test_calls_come_out_as_they_went_in(call: Call[Any]) -> None:
    again = wire.call_of(packed(call))
    assert again == call
    assert msgspec.to_builtins(again) == msgspec.to_builtins(call)
    for snapshot in (again.snapshot,) if isinstance(again, Report) else ():
        assert isinstance(snapshot.reservations[0], Reservation)
        assert isinstance(snapshot.movable, frozenset)
        assert isinstance(snapshot.phase, Phase)


FETCHES = Placement("s", 2, Mode.DECODE_LOCAL, "short", INFO, None, 3, 1.0, 9.0, fetch=FetchPlan(INFO, 32, 0.5, 0.25))


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Open(REQUEST), Reject("why", 0.5, True, "queue_full")),
        (Open(REQUEST), Admit(FETCHES)),
        (Open(REQUEST), Admit(FETCHES, Allowance(3, 0.5, 40, 60.5))),
        (Open(REQUEST), Reject("why", 0.5, code="tokens_per_minute", allowance=Allowance(3, 0.5, 40, 60.5))),
        (Report(SNAPSHOT), ReportAnswer(Peers(9, (("tcp://h:1", "tcp://h:2"),)), True, True, ("s",))),
        (View(), ManagerView("life", (Occupancy(INFO, 2, Reservation(4, 3, 40, 32, 0.5)),))),
        (Silent(("a", "b")), ("b",)),
        (Ready(), {"ready": True, "pools": {"a": {"age_s": 0.5, "phase": None}}}),
        (Lost("a"), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_answers_come_out_as_they_went_in(call: Call[Any], answer: Any) -> None:
    again = wire.answer_of(call, wire.packed_answer(answer))
    assert again == answer
    assert msgspec.to_builtins(again) == msgspec.to_builtins(answer)


def test_a_placement_without_a_limited_key_has_nothing_of_one_on_the_wire() -> None:
    assert b"allowance" not in bytes(wire.packed_answer(Admit(FETCHES)))
    assert b"allowance" in bytes(wire.packed_answer(Admit(FETCHES, Allowance())))


def test_every_call_has_an_answer_on_the_wire() -> None:
    assert set(wire._ANSWERS) == set(get_args(calls.AnyCall))


def test_what_is_sealed_for_the_channel_is_none_of_the_managers() -> None:
    from transfer.control.messages import Seal, Welcome

    with pytest.raises(BadMessage, match="wrong seal"):
        wire.seal(SECRET).unpack(Seal(SECRET).pack(Welcome()))
