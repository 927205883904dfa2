"""The session manager's connections: what crosses them, and what becomes of calls when they break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import Unavailable
from deployments.manager import client as manager_client
from deployments.manager import server as manager_server
from deployments.manager import wire
from deployments.manager.client import ManagerClient
from deployments.manager.manager import SessionManager
from deployments.manager.server import ManagerServer
from deployments.messages import (
    MANAGER_RETIRES,
    Admit,
    CacheChange,
    Finished,
    ManagerView,
    Mode,
    Peers,
    Phase,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionRequest,
    StepSample,
)
from tests.deployments.manager.test_manager import BLOCK, config
from transfer.control.seal import BadMessage

SECRET = "a secret of the tests"
INFO = ReplicaInfo("p0", "prefill", Role.PREFILL, "node", "engine", BLOCK, 100, 8, 2048, ("tcp://h:1",), 256, 4096)
DECODE = replace(INFO, replica_id="d0", pool="decode-small", role=Role.DECODE, total_blocks=20)
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
    5,
    True,
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
            await manager.report(ReplicaSnapshot(info.replica_id, 1, Phase.READY, info))
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
    admit = await client.open(request("s"))
    assert isinstance(admit, Admit)
    assert admit == Admit(manager._allocator.fleet.promises()[0].placement)
    assert await client.view(0.0) == await manager.view(0.0)
    assert (await client.ready())["pools"]["prefill"]["replicas"].keys() == {"p0"}
    assert (await client.status())["promises"][0]["session_id"] == "s"
    await client.prefill_done("s", 1)
    assert not manager._allocator.fleet.promises()[0].prefilling
    await client.close("s", 1, "finished", 5)
    assert stage.open == 0
    assert (await manager.status())["sessions"]["closed"] == {"finished": 1}
    refused = await client.open(request("long", 100_000))
    assert isinstance(refused, Reject)
    assert refused.retry_after_s is None
    answer = await client.report(ReplicaSnapshot("p0", 2, Phase.READY, INFO))
    assert answer.peers is not None
    assert answer.peers.endpoints == (DECODE.endpoints,)
    assert await client.silent(["p0", "unheard-of"]) == await manager.silent(["p0", "unheard-of"])
    await client.lost("d0", gone=True)
    assert isinstance(await manager.ready(), dict)
    assert "d0" in (await manager.status())["breakers"]
    assert stage.asked == 1, "one connection serves all calls"


async def test_an_error_there_is_the_callers_and_the_connection_goes_on(stage: Stage) -> None:
    client = stage.client()
    with pytest.raises(Unavailable, match="allows no mode"):
        await client.open(SessionRequest("s", 10, 5, allowed=()))
    assert isinstance(await client.open(request("t")), Admit)
    assert stage.asked == 1


async def test_a_cancelled_caller_gives_up_its_place(stage: Stage) -> None:
    client = stage.client()
    await client.open(request("first"))
    waiting = asyncio.create_task(client.open(request("second")))
    await until(lambda: stage.queued == 1)
    waiting.cancel()
    await until(lambda: stage.queued == 0)
    await client.close("first", 1, "finished")
    assert stage.open == 0, "what nobody waits for any more is not placed"


async def test_a_caller_that_dies_gives_up_its_places_and_nobody_elses(stage: Stage) -> None:
    dying, living = stage.client(), stage.client()
    await living.open(request("first"))
    calls = [asyncio.create_task(dying.open(request("theirs")))]
    await until(lambda: stage.queued == 1)
    calls.append(asyncio.create_task(living.open(request("ours"))))
    await until(lambda: stage.queued == 2)
    assert dying._connection is not None
    dying._connection._transport.abort()
    with pytest.raises(Unavailable, match="has gone"):
        await calls[0]
    await until(lambda: stage.queued == 1)
    await living.close("first", 1, "finished")
    assert isinstance(await calls[1], Admit)


async def test_a_manager_that_dies_fails_open_calls_at_once_and_the_next_is_found(stage: Stage) -> None:
    client = stage.client()
    await client.open(request("first"))
    calls = [asyncio.create_task(client.open(request("second"))), asyncio.create_task(client.view(3600.0))]
    await until(lambda: stage.queued == 1)
    stage.kill()
    for call in calls:
        with pytest.raises(Unavailable, match="has gone"):
            await call
    with pytest.raises(Unavailable, match="there is no manager"):
        await client.view(0.0)
    await stage.begin()
    assert (await client.view(0.0)) == await stage.managers[1].view(0.0)
    assert isinstance(await client.open(request("third")), Admit)
    assert stage.open == 1


async def test_a_manager_that_leaves_answers_what_it_owes_and_sends_callers_on(stage: Stage) -> None:
    old, client = stage.managers[0], stage.client()
    await client.open(request("first"))
    waiting = asyncio.create_task(client.open(request("second")))
    viewing = asyncio.create_task(client.view(0.3))
    await until(lambda: stage.queued == 1)
    owed = asyncio.create_task(stage.servers[0].retire())
    decision = await waiting
    assert isinstance(decision, Reject)
    assert decision.code == MANAGER_RETIRES
    early = asyncio.create_task(client.open(request("third")))  # while only the old one is found
    await asyncio.sleep(0.05)
    assert not early.done()
    await stage.begin()
    assert isinstance(await early, Admit)
    assert (await client.view(0.0)).life == (await stage.managers[1].view(0.0)).life
    assert (await viewing).life == (await old.view(0.0)).life, "it was asked before, and is owed"
    await owed
    assert not stage.servers[0]._connections
    assert not old._allocator.room


async def test_a_manager_that_leaves_does_not_wait_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_server, "LAST_ANSWERS_S", 0.05)
    client = stage.client()
    viewing = asyncio.create_task(client.view(3600.0))
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
    first, second = asyncio.create_task(client.view(0.0)), asyncio.create_task(client.view(0.0))
    await asyncio.sleep(0.01)
    first.cancel()
    found.set()
    assert (await second).snapshots
    assert stage.asked == 1


async def test_a_manager_that_is_not_found_in_time_is_unavailable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_client, "LOCATE_S", 0.05)
    client = stage.client()

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
            await client.view(0.0)


async def test_who_does_not_know_the_secret_is_cut_off_and_others_go_on(stage: Stage) -> None:
    client, stranger = stage.client(), stage.client("another secret")
    await client.view(0.0)
    with pytest.raises(Unavailable, match="has gone"):
        await stranger.close("s", 0, "finished")
    assert (await client.view(0.0)).snapshots
    assert stage.asked == 2


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        wire.framed(wire.seal(SECRET).pack(wire.Told(1))),
        wire.framed(wire.seal(SECRET)._digest(b"\x81") + b"\x81"),
    ],
    ids=["another protocol", "longer than any", "empty", "what only a manager says", "no message"],
)
async def test_who_says_what_no_caller_says_is_cut_off(stage: Stage, said: bytes) -> None:
    host, _, port = stage.servers[0].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    assert (await stage.client().view(0.0)).snapshots


async def test_an_answer_of_another_kind_is_no_answer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(call: wire.Call) -> wire.Answer:
        return wire.Told(call.number)

    monkeypatch.setattr(stage.servers[0], "answer", told)
    client = stage.client()
    for call in (client.open(REQUEST), client.view(0.0), client.report(SNAPSHOT), client.silent(()), client.ready()):
        with pytest.raises(Unavailable, match="answered with Told"):
            await call


@pytest.mark.parametrize(
    "message",
    [
        wire.Open(1, REQUEST),
        wire.Report(2, SNAPSHOT),
        wire.Heeded(2, ReportAnswer(Peers(9, (("tcp://h:1", "tcp://h:2"),)), True, True, ("s",))),
        wire.Viewed(3, ManagerView("life", (SNAPSHOT,))),
        wire.Close(4, "s", 1, "finished", None, True),
        wire.Rejected(5, Reject("why", 0.5, True, "queue_full")),
        wire.Shown(6, {"ready": True, "pools": {"a": {"age_s": 0.5, "phase": None}}}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_out_as_they_went_in(message: wire.AnyMessage) -> None:
    seal = wire.seal(SECRET)
    again = seal.unpack(seal.pack(message))
    assert again == message
    assert msgspec.to_builtins(again) == msgspec.to_builtins(message)
    for snapshot in (again.snapshot,) if isinstance(again, wire.Report) else ():
        assert isinstance(snapshot.reservations[0], Reservation)
        assert isinstance(snapshot.movable, frozenset)
        assert isinstance(snapshot.phase, Phase)


def test_what_is_sealed_for_the_channel_is_none_of_the_managers() -> None:
    from transfer.control.messages import Seal, Welcome

    with pytest.raises(BadMessage, match="wrong seal"):
        wire.seal(SECRET).unpack(Seal(SECRET).pack(Welcome()))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_frames_are_put_together_from_any_pieces(messages: list[bytes], piece: int) -> None:
    sent = b"".join(map(wire.framed, messages))
    frames = wire.Frames()
    found = [frame for at in range(0, len(sent), piece) for frame in frames.feed(sent[at : at + piece])]
    assert found == messages
