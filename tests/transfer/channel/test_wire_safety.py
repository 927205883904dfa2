"""What peers with the right secret may send and should not: nothing of it ends the channel or another's handoff."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfer.control import messages as control
from transfer.control.endpoint import TAKE_AT_ONCE, Endpoint
from transfer.control.messages import Cancel, Failed, FirstToken, Hello, Landed, Offer, Refused, Seal, Welcome
from transfer.control.seal import DIGEST_BYTES, BadMessage
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout

SECRET = "a secret of the tests"
KEY = ("session", 1)
BLOCKS, BLOCK_BYTES, GUARD = 64, 32, 4096


def sealed(body: bytes) -> bytes:
    """Any bytes under a right seal."""
    key = hashlib.blake2b(SECRET.encode(), digest_size=32).digest()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=key).digest() + body


class Peer:
    """A decode worker without a channel: memory between two guards, and a connection on which it says what it likes."""

    seal = Seal(SECRET)

    def __init__(self, address: str, like: KVLayout, **unlike: Any) -> None:
        regions, block_bytes = len(like.bases), unlike.get("block_bytes", like.block_bytes)
        size = regions * like.num_blocks * block_bytes
        self.memory = np.zeros(GUARD + size + GUARD, dtype=np.uint8)
        base = int(self.memory.ctypes.data) + GUARD
        bases = tuple(base + region * like.num_blocks * block_bytes for region in range(regions))
        self.layout = dataclasses.replace(like, bases=bases, **unlike)
        self.plane = InProcessPlane(f"peer-{id(self)}")
        self.plane.register(self.layout)
        self.hello = Hello(f"tcp://peer-{id(self)}", self.plane.name, self.plane.metadata(), self.layout)
        self.context = zmq.Context()
        self.address = address
        self.socket = self.dial()

    def dial(self) -> zmq.Socket[bytes]:
        """Another connection, of another identity."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(self.address)
        return socket

    def say(self, *messages: control.AnyMessage) -> None:
        for message in messages:
            self.socket.send(self.seal.pack(message))

    def hear(self) -> control.AnyMessage:
        """The next answer."""
        return self.seal.unpack(self.socket.recv())

    def ask(self, message: control.AnyMessage) -> control.AnyMessage:
        self.say(message)
        return self.hear()

    def assert_guards(self) -> None:
        assert not self.memory[:GUARD].any()
        assert not self.memory[-GUARD:].any()

    def close(self) -> None:
        self.context.destroy(0)
        self.plane.close()


@pytest.fixture
def make_peer(prefill: Any) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**unlike: Any) -> Peer:
        made.append(Peer(prefill.channel.address, prefill.layout, **unlike))
        return made[-1]

    yield make
    for peer in made:
        peer.assert_guards()
        peer.close()


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    introduced = make_peer()
    assert introduced.ask(introduced.hello) == Welcome()
    return introduced


def offer(key: tuple[str, int] = KEY, rank: int = 0, blocks: tuple[int, ...] = (1, 2), timeout_s: float = 10) -> Offer:
    return Offer(*key, rank, 0, list(blocks), timeout_s)


def prefill_all(prefill: Any, key: tuple[str, int] = KEY, request_id: str = "p", peers: int = 1) -> None:
    """Compute a prompt of two blocks and end it."""
    prefill.fill([5, 6], 1)
    prefill.save(key, request_id, 8, 8, [5, 6])
    prefill.channel.ended(key, request_id, True, peers)


class FakePrefill:
    """The endpoint of a prefill worker, for what a decode worker hears."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def accept(self) -> bytes:
        """The identity of the decode worker that says hello."""
        identity: bytes = self.socket.recv_multipart()[0]
        return identity

    def say(self, to: bytes, frame: bytes) -> None:
        self.socket.send_multipart([to, frame])


@pytest.fixture
def fake_prefill() -> Iterator[FakePrefill]:
    fake = FakePrefill()
    yield fake
    fake.context.destroy(0)


# ---- any message, with any values


BLOCK = st.integers(0, BLOCKS - 1)
ODD_NUMBER = st.sampled_from([-1, 0, 1, 2, 63, 64, 2**31, 2**60, 2**63 - 1, 2**64 - 1, -(2**63)])
ODD = st.one_of(
    ODD_NUMBER,
    st.none(),
    st.booleans(),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, "", "x" * 1_000_000, b"\x00", [0] * 100_000, [[]], {}]),
    st.text(max_size=5),
    st.lists(BLOCK | ODD_NUMBER, max_size=5),
)
SESSIONS = {"session": st.sampled_from(["a", "b"]), "epoch": st.integers(0, 2)}
MINE = {**SESSIONS, "rank": st.just(0)}
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "Welcome": {},
    "Nudge": {},
    "Refused": {"reason": st.text(max_size=3)},
    "Offer": {
        **MINE,
        "first_block": st.integers(0, 3),
        "blocks": st.lists(BLOCK, max_size=9),
        "timeout_s": st.floats(0, 1),
    },
    "Cancel": {**MINE, "reason": st.text(max_size=3)},
    "Landed": SESSIONS,
    "Failed": {**SESSIONS, "reason": st.text(max_size=3)},
    "FirstToken": {**SESSIONS, "token": st.integers(0, 9)},
}


@st.composite
def bodies(draw: st.DrawFn, hello: Hello) -> bytes:
    """A message with odd values in some fields; sometimes some of its bytes are others."""
    kind = draw(st.sampled_from(sorted(kind.__name__ for kind in control.AnyMessage.__args__)))
    if kind == "Hello":
        fields = msgspec.to_builtins(hello, builtin_types=(bytes,))
        layout = fields["layout"]
        for name in draw(st.lists(st.sampled_from(sorted(layout)), max_size=2)):
            layout[name] = draw(ODD)
    else:
        fields = {"type": kind} | {name: draw(values) for name, values in FIELDS[kind].items()}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        if name != "layout":
            fields[name] = draw(ODD)
    body = bytearray(msgspec.msgpack.encode(fields))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body)


@pytest.mark.slow
def test_no_message_ends_the_channel_or_a_handoff(
    prefill: Any, decode: Any, make_peer: Callable[..., Peer], fake_prefill: FakePrefill
) -> None:
    peer = make_peer()
    decode.channel.meet([[fake_prefill.address], [prefill.channel.address]])
    identity = fake_prefill.accept()
    examples = 0

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
    @given(st.lists(bodies(peer.hello), min_size=1, max_size=10))
    def goes_on(messages: list[bytes]) -> None:
        nonlocal examples
        examples += 1
        for number, body in enumerate(messages):
            peer.socket.send(sealed(body))
            if b"Refused" not in body:  # that ends the connection, as it should: see below
                fake_prefill.say(identity, sealed(body))
            if number == len(messages) // 2:
                prefill.save((f"a{examples}", 1), f"stray{examples}", 4, 8, [7, 8])
        key, request_id = (f"good {examples}", 1), str(examples)
        decode.memory[:] = 0
        decode.channel.offer(key, request_id, [prefill.channel.address], 0, [3, 1], False)
        prefill_all(prefill, key, request_id)
        prefill.channel.ended((f"a{examples}", 1), f"stray{examples}", False)
        assert decode.wait("received", request_id) is None
        assert prefill.wait("released", request_id)
        assert np.array_equal(decode.memory[:, :, [3, 1]], prefill.memory[:, :, [5, 6]])
        assert not np.delete(decode.memory, [1, 3], axis=2).any()
        peer.assert_guards()

    goes_on()
    assert prefill.counter("bad_messages") > 10
    assert prefill.counter("messages_refused") > 10
    assert decode.counter("bad_messages") > 10
    assert decode.counter("messages_refused") > 10
    assert len(prefill.channel._prefill.peers.agents) <= 2


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa4type\xa7Welcome\xa1x" + b"\x91" * 1_000_000 + b"\xc0",
        b"\x82\xa1x" + b"\x91" * 1_000_000 + b"\xc0\xa4type\xa7Welcome",
        b"\x82\xa4type\xa5Offer\xa6blocks\xdd\xff\xff\xff\xff\x00",
        b"\xc1",
    ],
    ids=["deep", "deep before its type", "four billion blocks", "reserved"],
)
def test_a_body_that_is_hard_to_read_is_a_bad_message(body: bytes) -> None:
    with pytest.raises(BadMessage, match="fits no message"):
        Peer.seal.unpack(sealed(body))


@pytest.mark.parametrize(
    "message",
    [
        offer(timeout_s=math.nan),
        offer(timeout_s=-1),
        offer(("x" * 257, 1)),
        Cancel(*KEY, 0, "x" * 1_000_000),
        Failed(*KEY, "x" * 1_000_000),
        FirstToken(*KEY, -1),
        FirstToken(*KEY, 2**40),
    ],
    ids=lambda message: f"{str(message)[:60]}",
)
def test_a_value_out_of_range_is_a_bad_message(message: control.AnyMessage) -> None:
    with pytest.raises(BadMessage, match="fits no message"):
        Peer.seal.unpack(Peer.seal.pack(message))


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 0},
        {"total_heads": 2**63},
        {"rank": 1},
        {"rank": -1},
        {"num_blocks": 2**60},
        {"num_blocks": 2**31},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"block_bytes": 0},
        {"block_size": 0},
        {"num_layers": 0, "bases": ()},
        {"bases": (-1,)},
        {"bases": (2**64 - 1,)},
        {"device_id": -1},
        {"device_id": 2**40},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_a_bad_message(change: dict[str, Any]) -> None:
    layout = msgspec.to_builtins(KVLayout(1, 1, 4, 16, 64, (2**47,)))
    body = {"type": "Hello", "address": "", "agent": "", "agent_metadata": b"", "layout": {**layout, **change}}
    with pytest.raises(BadMessage, match="fits no message"):
        Peer.seal.unpack(sealed(msgspec.msgpack.encode(body)))
    body["layout"] = layout
    assert isinstance(Peer.seal.unpack(sealed(msgspec.msgpack.encode(body))), Hello)


# ---- who may say what


@pytest.mark.parametrize("message", [Landed(*KEY), Failed(*KEY, ""), Welcome(), Refused("")], ids=str)
def test_what_prefill_says_is_not_heard_by_prefill(prefill: Any, peer: Peer, message: control.AnyMessage) -> None:
    peer.say(offer(), message)
    prefill.wait_counter("messages_refused", 1)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)


@pytest.mark.parametrize("message", [offer(), Cancel(*KEY, 0, "")], ids=["offer", "cancel"])
def test_what_decode_says_is_not_heard_by_decode(
    decode: Any, fake_prefill: FakePrefill, message: control.AnyMessage
) -> None:
    decode.channel.offer(KEY, "d", [fake_prefill.address], 0, [1], False)
    identity = fake_prefill.accept()
    fake_prefill.say(identity, Peer.seal.pack(message))
    decode.wait_counter("messages_refused", 1)
    assert not decode.collect().broken
    fake_prefill.say(identity, Peer.seal.pack(Landed(*KEY)))
    assert decode.wait("received", "d") is None


@pytest.mark.parametrize("message", [Landed(*KEY), Failed(*KEY, "not mine")], ids=["landed", "failed"])
def test_a_prefill_worker_ends_its_own_handoffs_only(
    prefill: Any, decode: Any, fake_prefill: FakePrefill, message: control.AnyMessage
) -> None:
    decode.channel.meet([[fake_prefill.address], [prefill.channel.address]])
    identity = fake_prefill.accept()
    decode.channel.offer(KEY, "d", [prefill.channel.address], 0, [1, 2], False)
    fake_prefill.say(identity, Peer.seal.pack(message))
    decode.wait_counter("messages_refused", 1)
    assert not decode.collect().broken
    assert not decode.results.received
    prefill_all(prefill)
    assert decode.wait("received", "d") is None


def test_an_offer_before_the_introduction_is_refused(prefill: Any, make_peer: Callable[..., Peer]) -> None:
    stranger = make_peer()
    assert isinstance(stranger.ask(offer()), Refused)
    assert prefill.counter("open_writing") == 0
    assert isinstance(stranger.ask(stranger.hello), Refused), "it has been told that nothing will be written"
    stranger.socket = stranger.dial()
    assert stranger.ask(stranger.hello) == Welcome()
    stranger.say(offer())
    prefill_all(prefill)
    assert stranger.hear() == Landed(*KEY)


def test_a_cancel_before_the_introduction_is_answered_and_ends_nothing(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer]
) -> None:
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    stranger = make_peer()
    assert isinstance(stranger.ask(Cancel(*KEY, 0, "mine")), Refused)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)


@pytest.mark.parametrize("message", [offer(blocks=(63, 62)), Cancel(*KEY, 0, "mine")], ids=["offer", "cancel"])
def test_a_handoff_belongs_to_who_offered_first(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer], message: control.AnyMessage
) -> None:
    """Its blocks are checked against its own layout, and its answer is the one that frees them."""
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    other = make_peer()
    assert other.ask(other.hello) == Welcome()
    assert other.ask(message) == Failed(*KEY, "another worker has offered its blocks")
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p")
    assert not other.memory.any()


@pytest.mark.parametrize("rank", [-1, 1, 2**40])
def test_only_ones_own_part_can_be_offered_or_cancelled(prefill: Any, peer: Peer, rank: int) -> None:
    for message in (offer(rank=rank), Cancel(*KEY, rank, "")):
        answer = peer.ask(message)
        assert isinstance(answer, Failed)
        assert "another worker's name" in answer.reason
    peer.say(offer())
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p"), "not held for a worker that does not exist"


@pytest.mark.parametrize("is_late", [False, True], ids=["before the prefill", "during the prefill"])
def test_a_worker_of_a_wider_replica_does_not_hold_the_source(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer], is_late: bool
) -> None:
    """The prefill is for a replica of one worker, and here comes the second of two."""
    second = make_peer(rank=1, workers=2)
    assert second.ask(second.hello) == Welcome()
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    if is_late:
        prefill.save(KEY, "p", 4, 8, [5, 6])
        prefill.barrier()
        assert isinstance(second.ask(offer(rank=1)), Failed)
    else:
        second.say(offer(rank=1))
        prefill.until(lambda: len(prefill.channel._prefill._handoffs[KEY].readers) == 2)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p")


def test_a_second_introduction_changes_nothing(prefill: Any, peer: Peer) -> None:
    assert peer.ask(peer.hello) == Welcome()
    unlike = msgspec.structs.replace(peer.hello, layout=dataclasses.replace(peer.layout, num_blocks=4))
    renamed = msgspec.structs.replace(peer.hello, agent="other")
    peer.say(unlike, renamed, offer(blocks=(62, 63)))
    prefill.wait_counter("messages_refused", 2)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert len(prefill.channel._prefill.peers.agents) == 1


def test_an_agent_is_not_taken_over(prefill: Any, peer: Peer, make_peer: Callable[..., Peer]) -> None:
    thief = make_peer()
    hello = msgspec.structs.replace(peer.hello, layout=thief.layout)
    assert isinstance(thief.ask(hello), Refused)
    peer.say(offer())
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert not thief.memory.any()


def test_memory_that_is_not_registered_is_refused(make_peer: Callable[..., Peer]) -> None:
    liar = make_peer()
    elsewhere = tuple(base + (1 << 40) for base in liar.layout.bases)
    for layout in (
        dataclasses.replace(liar.layout, bases=elsewhere),
        dataclasses.replace(liar.layout, num_blocks=BLOCKS + 1),
    ):
        answer = liar.ask(msgspec.structs.replace(liar.hello, layout=layout))
        assert isinstance(answer, Refused)
        assert "registered" in answer.reason


def test_a_new_connection_of_a_worker_ends_what_was_on_the_old_one(prefill: Any, peer: Peer) -> None:
    """Decode gave its blocks back when it lost the connection."""
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    peer.socket = peer.dial()
    peer.say(peer.hello)
    assert {type(peer.hear()), type(peer.hear())} == {Failed, Welcome}
    prefill_all(prefill)
    assert prefill.wait("released", "p")
    assert prefill.counter("writes") == 0
    assert len(prefill.channel._prefill.peers.agents) == 1
    again = ("again", 1)
    peer.say(offer(again))
    prefill_all(prefill, again, "p2")
    assert peer.hear() == Landed(*again)


def test_a_worker_that_was_forgotten_comes_back_by_itself(prefill: Any, decode: Any) -> None:
    decode.channel.meet([[prefill.channel.address]])
    prefill.until(lambda: prefill.channel._prefill.peers.agents)
    prefill.channel.keep([[decode.channel.address]])
    prefill.channel.keep([])
    prefill.until(lambda: not prefill.channel._prefill.peers.agents)
    decode.channel.offer(KEY, "first", [prefill.channel.address], 0, [1, 2], False)
    assert "not known" in decode.wait("broken", "first")
    decode.channel.offer(("next", 1), "next", [prefill.channel.address], 0, [1, 2], False)
    prefill_all(prefill, ("next", 1))
    assert decode.wait("received", "next") is None


# ---- how much, how often, how late


@pytest.mark.parametrize("blocks", [(), (-1,), (BLOCKS,), (0, 2**60), (*range(BLOCKS), 0)], ids=lambda b: b[-2:])
def test_only_blocks_that_there_are_can_be_offered(prefill: Any, peer: Peer, blocks: tuple[int, ...]) -> None:
    answer = peer.ask(offer(blocks=blocks))
    assert isinstance(answer, Failed)
    assert "blocks" in answer.reason
    assert prefill.counter("open_writing") == 0
    assert prefill.counter("messages_refused") == 1
    assert peer.ask(offer()) == answer, "its blocks were given back, and another offer may be an older one"


def test_offers_to_prefills_that_do_not_come_are_bounded(prefill: Any, decode: Any, peer: Peer) -> None:
    """A worker cannot have offered more blocks than it has; others are not in its way."""
    for number in range(10 * BLOCKS):
        peer.say(offer((f"never {number}", 1), blocks=(0,)))
    refused = [peer.hear() for _ in range(9 * BLOCKS)]
    assert {answer.reason for answer in refused if isinstance(answer, Failed)} == {
        "more blocks are offered than the peer has"
    }
    assert prefill.counter("open_writing") == BLOCKS
    decode.channel.offer(KEY, "d", [prefill.channel.address], 0, [1, 2], False)
    prefill_all(prefill)
    assert decode.wait("received", "d") is None


def test_a_repeated_offer_is_no_second_offer_and_buys_no_time(make_side: Callable[..., Any]) -> None:
    prefill = make_side("prefill", timeout_s=0.3)
    peer = Peer(prefill.channel.address, prefill.layout)
    peer.say(peer.hello, offer(blocks=tuple(range(BLOCKS))))
    assert peer.hear() == Welcome()
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    begun = prefill.channel._prefill._handoffs[KEY].deadline
    for blocks in ((1, 2), (), (-5,)):
        peer.say(offer(blocks=blocks))
    prefill.barrier()
    assert prefill.channel._prefill._handoffs[KEY].deadline == begun
    assert peer.hear() == Failed(*KEY, "the handoff ran out of time")
    peer.close()


def test_a_cancel_after_the_end_is_answered_again(prefill: Any, peer: Peer) -> None:
    """The first answer may have been lost, and the blocks are held until there is one."""
    peer.say(offer())
    prefill.save(KEY, "p", 8, 8, [5, 6])
    assert peer.hear() == Landed(*KEY)
    assert peer.ask(Cancel(*KEY, 0, "late")) == Landed(*KEY)
    prefill.channel.ended(KEY, "p", True)
    assert prefill.wait("released", "p")
    assert isinstance(peer.ask(Cancel(*KEY, 0, "later")), Failed)
    assert prefill.counter("handoffs_landed") == 1


def test_one_worker_cancels_and_the_other_runs_out_of_time(
    make_side: Callable[..., Any],
) -> None:
    """Two decode workers share one prefill worker, and the prefill never begins."""
    prefill = make_side("prefill", timeout_s=0.3)
    peers = [Peer(prefill.channel.address, prefill.layout, rank=rank, workers=2) for rank in (0, 1)]
    for rank, peer in enumerate(peers):
        peer.say(peer.hello, offer(rank=rank))
        assert peer.hear() == Welcome()
    prefill.until(lambda: len(prefill.channel._prefill._handoffs[KEY].readers) == 2)
    assert peers[1].ask(Cancel(*KEY, 1, "aborted")) == Failed(*KEY, "aborted")
    assert peers[0].hear() == Failed(*KEY, "the handoff ran out of time")
    prefill.wait_idle()
    prefill.collect()
    for peer in peers:
        peer.close()


def test_a_flood_on_one_connection_leaves_the_others_their_turn() -> None:
    endpoint = Endpoint("flooded", Peer.seal, "127.0.0.1")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint.address)
        for _ in range(2 * TAKE_AT_ONCE + 1):
            socket.send(Peer.seal.pack(Welcome()))
        taken = 0
        while taken < 2 * TAKE_AT_ONCE + 1:
            events = endpoint.poll(10_000)
            assert 0 < len(events) <= TAKE_AT_ONCE
            taken += len(events)
    endpoint.close()
