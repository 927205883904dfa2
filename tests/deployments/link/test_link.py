"""The connection between an ingress and a replica: order, ends, what breaks it, and what becomes of the parts."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.protocol import EngineCrashed, EngineError, RequestRefused
from deployments.errors import ReplicaCrashed, ReplicaGone, ReplicaLost, RequestFault
from deployments.link import ingress_side, replica_side, wire
from deployments.link.ingress_side import Links
from deployments.link.replica_side import Ingress, LinkServer
from deployments.messages import MOVED, ReplicaInfo, Reservation, Role, SessionTask
from deployments.sealed_connection import connect, framed, packed
from transfer.control.seal import BadMessage

SECRET = "a secret of the tests"
WAIT_S = 60.0
LEASE_S = 0.4
INFO = ReplicaInfo("p0", "prefill", Role.PREFILL, "node", "engine", 16, 100, 8, 2048)
TASK = SessionTask("s", 1, "p0", "r", (b"request", b"image"), 60.0, 100, Reservation(4, 3, 40, 32, 0.5), True, True)


class Run:
    """A part on the replica. `over`: what it comes to. `cancelled`: set when it is cancelled."""

    def __init__(self, task: SessionTask, ingress: Ingress, number: int) -> None:
        self.task, self.ingress, self.number = task, ingress, number
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = asyncio.Event()

    def give(self, *frames: bytes, finished: bool = False) -> None:
        assert self.ingress.give(list(frames), [self.number] if finished else [])
        if finished:
            self.over.set_result("finished")


class Runs:
    """A replica that does what the test says."""

    def __init__(self) -> None:
        self.all: list[Run] = []
        self.begun = asyncio.Event()

    async def run(self, task: SessionTask, ingress: Ingress, number: int) -> str:
        run = Run(task, ingress, number)
        self.all.append(run)
        self.begun.set()
        try:
            outcome = await run.over
        except asyncio.CancelledError:
            run.cancelled.set()
            raise
        return outcome

    def orphan(self, ingress: Ingress) -> None:
        for run in self.all:
            if run.ingress is ingress and not run.over.done():
                run.over.set_exception(EngineError("the ingress is gone"))

    async def next(self, count: int = 1) -> Run:
        """Wait until so many parts have begun. Returns the newest."""
        async with asyncio.timeout(WAIT_S):
            while len(self.all) < count:
                self.begun.clear()
                await self.begun.wait()
        return self.all[-1]


@dataclass
class Part:
    """What the ingress is told of a part."""

    told: list[Any] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, outcome: str) -> None:
        self.told.append(outcome)
        self.over.set()

    def lost(self, error: ReplicaLost) -> None:
        self.told.append(error)
        self.over.set()

    def refused(self, error: RequestFault) -> None:
        self.told.append(error)
        self.over.set()

    async def end(self) -> Any:
        """Wait for the end, which comes once."""
        await asyncio.wait_for(self.over.wait(), WAIT_S)
        (told,) = self.told
        return told


class Stage:
    """One replica and one ingress. `asked`: how often the replica was looked for. `heard`: outputs, in order."""

    def __init__(self) -> None:
        self.runs = Runs()
        self.server = LinkServer(self.runs, SECRET, LEASE_S)
        self.links = Links(self.find, SECRET, LEASE_S)
        self.links.listen(lambda replica_id, frames: self.heard.append((replica_id, list(frames))))
        self.heard: list[tuple[str, list[bytes]]] = []
        self.asked = 0
        self.error: Exception | None = None
        self.found = asyncio.Event()
        self.found.set()

    async def find(self, replica: ReplicaInfo, task: SessionTask) -> str:
        self.asked += 1
        await self.found.wait()
        if self.error is not None:
            raise self.error
        return self.server.address

    def begin(self, task: SessionTask = TASK) -> tuple[Part, Any]:
        part = Part()
        return part, self.links.begin(INFO, task, part)

    async def begun(self, task: SessionTask = TASK) -> tuple[Part, Any, Run]:
        part, cancel = self.begin(task)
        return part, cancel, await self.runs.next(len(self.runs.all) + 1)


@pytest.fixture
async def stage(no_leaks: None) -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.server.start("127.0.0.1")
    yield stage
    stage.links.close()
    stage.links.close()
    stage.server.close()
    stage.server.close()
    async with asyncio.timeout(WAIT_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)


async def test_a_part_s_outputs_come_in_order_and_its_end_last(stage: Stage) -> None:
    part, _, run = await stage.begun()
    assert run.task == TASK
    for number in range(50):
        run.give(b"%d" % number, b"more", finished=number == 49)
        assert not part.told
    assert await part.end() == "finished"
    assert stage.heard == [("p0", [b"%d" % number, b"more"]) for number in range(50)]


async def test_parts_share_a_connection_that_is_looked_for_once(stage: Stage) -> None:
    stage.found.clear()
    parts = [stage.begin(replace(TASK, session_id=f"s{number}"))[0] for number in range(5)]
    stage.found.set()
    await stage.runs.next(5)
    assert [run.task.session_id for run in stage.runs.all] == [f"s{number}" for number in range(5)]
    assert stage.asked == 1
    for run in stage.runs.all:
        run.over.set_result("expired")
    assert [await part.end() for part in parts] == ["expired"] * 5


@pytest.mark.parametrize("outcome", ["expired", MOVED])
async def test_another_end_than_the_last_output_is_told(stage: Stage, outcome: str) -> None:
    part, cancel, run = await stage.begun()
    run.over.set_result(outcome)
    assert await part.end() == outcome
    cancel()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RequestRefused("no such token"), RequestFault("no such token")),
        (EngineCrashed("an error in a step"), ReplicaCrashed("an error in a step")),
        (EngineError("out of memory"), ReplicaLost("out of memory")),
    ],
)
async def test_a_failure_says_what_is_to_blame(stage: Stage, error: Exception, told: Exception) -> None:
    part, _, run = await stage.begun()
    run.over.set_exception(error)
    heard = await part.end()
    assert (type(heard), str(heard)) == (type(told), str(told))


@pytest.mark.parametrize(
    ("error", "why"), [(EngineError("out of memory"), "out of memory"), (KeyError("x"), "KeyError('x')")]
)
async def test_a_part_that_fails_is_lost_and_no_other(stage: Stage, error: Exception, why: str) -> None:
    mine, _, run = await stage.begun()
    other, _, goes_on = await stage.begun()
    run.over.set_exception(error)
    lost = await mine.end()
    assert isinstance(lost, ReplicaLost)
    assert str(lost) == why
    goes_on.give(b"last", finished=True)
    assert await other.end() == "finished"


async def test_a_cancelled_part_is_told_nothing(stage: Stage) -> None:
    part, cancel, run = await stage.begun()
    cancel()
    cancel()
    await asyncio.wait_for(run.cancelled.wait(), WAIT_S)
    other, _, goes_on = await stage.begun()
    goes_on.give(b"last", finished=True)
    await other.end()
    assert not part.told


async def test_a_part_that_is_cancelled_before_the_connection_stands_never_begins(stage: Stage) -> None:
    stage.found.clear()
    mine, cancel = stage.begin(replace(TASK, session_id="mine"))
    stage.begin(replace(TASK, session_id="other"))
    cancel()
    stage.found.set()
    await stage.runs.next()
    assert [run.task.session_id for run in stage.runs.all] == ["other"]
    assert not mine.told


async def test_a_replica_that_dies_loses_its_parts_and_is_looked_for_again(stage: Stage) -> None:
    part, cancel, _ = await stage.begun()
    (link,) = stage.server._links
    link._transport.abort()
    lost = await part.end()
    assert isinstance(lost, ReplicaLost)
    assert "replica p0 has gone" in str(lost)
    cancel()
    await stage.begun()
    assert stage.asked == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ReplicaGone("it was taken out"), ReplicaGone),
        (ConnectionRefusedError("no such port"), ReplicaLost),
    ],
)
async def test_a_replica_that_is_not_found_loses_all_that_waits_for_it(
    stage: Stage, error: Exception, told: type[Exception]
) -> None:
    stage.error = error
    parts = [stage.begin()[0] for _ in range(3)]
    assert [type(await part.end()) for part in parts] == [told] * 3
    stage.error = None
    await stage.begun()


async def test_a_replica_that_is_not_found_in_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_side, "CONNECT_S", 0.05)
    stage.found.clear()
    part, _ = stage.begin()
    assert "was not reached within 0.05 s" in str(await part.end())


async def test_a_replica_with_another_secret_takes_no_part(stage: Stage) -> None:
    stranger = Links(stage.find, "another secret", LEASE_S)
    part = Part()
    stranger.begin(INFO, TASK, part)
    assert isinstance(await part.end(), ReplicaLost)
    assert not stage.runs.all
    stranger.close()


# ---- ingresses that are gone


async def test_an_ingress_that_dies_ends_its_runs_and_no_others(stage: Stage) -> None:
    _, _, run = await stage.begun()
    dying = Links(stage.find, SECRET, LEASE_S)
    dying.begin(INFO, TASK, Part())
    theirs = await stage.runs.next(2)
    dying.close()
    with pytest.raises(EngineError, match="the ingress is gone"):
        await asyncio.wait_for(asyncio.shield(theirs.over), WAIT_S)
    assert not theirs.ingress.give([b"lost"])
    assert not run.over.done()


async def test_an_ingress_that_is_silent_is_gone_after_its_lease(stage: Stage) -> None:
    """Its process is stopped, say: its connection stays open, and it reads nothing."""
    silent = Links(stage.find, SECRET, 1000.0)
    silent.begin(INFO, TASK, Part())
    theirs = await stage.runs.next()
    _, _, run = await stage.begun()
    with pytest.raises(EngineError, match="the ingress is gone"):
        await asyncio.wait_for(asyncio.shield(theirs.over), WAIT_S)
    await asyncio.sleep(2 * LEASE_S)
    assert not run.over.done(), "one that has nothing to say is alive"
    silent.close()


async def test_an_ingress_is_gone_after_looks_and_not_after_seconds(stage: Stage) -> None:
    """A replica that stood still looks late, and hears then what has come in the meantime."""
    _, _, run = await stage.begun()
    time.sleep(2 * LEASE_S)  # noqa: ASYNC251
    await asyncio.sleep(LEASE_S / 2)
    assert not run.over.done()


async def test_a_peer_that_says_nothing_is_cut_off(stage: Stage) -> None:
    host, _, port = stage.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()


async def test_an_ingress_that_reads_nothing_takes_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_side, "BACKLOG_BYTES", 100_000)
    host, _, port = stage.server.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(framed(wire.seal(SECRET).pack(packed(wire.Begin(1, TASK)))))
    run = await stage.runs.next()
    large, taken = b"x" * 1_000_000, 0
    while run.ingress.give([large]):
        taken += 1
        await asyncio.sleep(0)
        assert taken < 1000
    writer.close()


# ---- hostile and foreign messages


def sealed(message: Any) -> bytes:
    return framed(wire.seal(SECRET).pack(packed(message)))


HOSTILE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "longer than any": b"\xff\xff\xff\xff",
    "empty": b"\0\0\0\0",
    "what only a replica says": sealed(wire.Outputs(0, [b"x"])),
    "no message": sealed({"a": 1}),
    "a part that is there": sealed(wire.Begin(1, TASK)) * 2,
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
async def test_a_peer_that_says_what_no_ingress_says_is_cut_off_and_others_go_on(stage: Stage, said: bytes) -> None:
    part, _, run = await stage.begun()
    host, _, port = stage.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    run.give(b"last", finished=True)
    assert await part.end() == "finished"


async def test_a_replica_that_says_what_no_replica_says_loses_its_parts(stage: Stage) -> None:
    part, _, run = await stage.begun()
    run.ingress.send(wire.Cancel(1))  # type: ignore[attr-defined]
    assert isinstance(await part.end(), ReplicaLost)


class Whisper(wire.Message, frozen=True):
    """A message of a later version."""


async def test_a_message_of_another_version_fails_its_part_alone(stage: Stage) -> None:
    mine, _, run = await stage.begun()
    other, _, goes_on = await stage.begun()
    run.ingress.send(Whisper(run.number))  # type: ignore[attr-defined]
    assert "of another version" in str(await mine.end())
    (link,) = stage.links._links.values()
    link.send(Whisper(goes_on.number))
    assert "of another version" in str(await other.end())
    later, _, run = await stage.begun()
    run.give(b"last", finished=True)
    assert await later.end() == "finished"


def test_what_is_sealed_for_the_manager_is_none_of_the_link_s() -> None:
    from deployments.manager import wire as managers

    with pytest.raises(BadMessage, match="wrong seal"):
        wire.seal(SECRET).unpack(managers.seal(SECRET).pack(packed(wire.Beat(0))))


MESSAGES = [
    wire.Begin(1, TASK),
    wire.Cancel(2),
    wire.Beat(0),
    wire.Outputs(0, [b"frame", b""], [1, 2**40]),
    wire.Ended(3, MOVED),
    wire.Failed(4, "why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_out_as_they_went_in(message: wire.AnyMessage) -> None:
    again = wire.message_of(packed(message))
    assert again == message
    assert type(again) is type(message)
    assert msgspec.to_builtins(again) == msgspec.to_builtins(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(st.binary(max_size=200) | JSON.map(msgspec.msgpack.encode))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    try:
        message = wire.message_of(msgspec.Raw(body))
    except BadMessage:
        return
    assert isinstance(message, wire.AnyMessage | wire.Unknown)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_that_was_changed_on_the_way_is_refused(message: wire.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(wire.seal(SECRET).pack(packed(message)))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadMessage, match="wrong seal"):
        wire.seal(SECRET).unpack(bytes(frame))


@pytest.mark.parametrize("seed", range(20))
async def test_a_replica_outlives_any_bytes(stage: Stage, seed: int) -> None:
    """Changed, cut, repeated and shuffled messages, in pieces: the connection breaks or goes on, and others go on."""
    draw = random.Random(seed)
    part, _, run = await stage.begun()
    address, closed = stage.server.address, asyncio.Event()

    class Fuzz(asyncio.Protocol):
        transport: asyncio.Transport

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport  # type: ignore[assignment]

        def connection_lost(self, error: Exception | None) -> None:
            closed.set()

    fuzz = await connect(address, Fuzz)
    frames = [bytearray(sealed(draw.choice(MESSAGES))) for _ in range(30)]
    for frame in draw.sample(frames, 5):
        frame[draw.randrange(len(frame))] ^= draw.randrange(1, 256)
    sent = b"".join(frames)[: -draw.randrange(1, 20)]
    for start, end in itertools.pairwise([0, *sorted(draw.sample(range(1, len(sent)), 10)), len(sent)]):
        fuzz.transport.write(sent[start:end])
        await asyncio.sleep(0)
    await asyncio.wait_for(closed.wait(), WAIT_S)
    run.give(b"last", finished=True)
    assert await part.end() == "finished"
    assert len(stage.server._links) == 1
