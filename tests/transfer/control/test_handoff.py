"""The two state machines of a handoff, each alone: what they answer, what is illegal and what is late."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from transfer.control.handoff import (
    Broken,
    IllegalEvent,
    Received,
    Receiver,
    ReceiverState,
    SendCancel,
    SendFailed,
    SendLanded,
    Write,
    Writer,
    WriterState,
)

LAYERS, BLOCK = 2, 4


def test_the_receiver_needs_the_blocks_and_the_token_in_either_order() -> None:
    first = Receiver()
    assert first.landed() == []
    assert first.first_token(7) == [Received(7)]
    second = Receiver()
    assert second.first_token(7) == []
    assert second.landed() == [Received(7)]
    assert Receiver(needs_token=False).landed() == [Received(None)]


def test_a_cancelled_receiver_waits_for_the_peers_answer() -> None:
    for answer, expected in (
        (Receiver.landed, "aborted"),
        (lambda machine: machine.failed("stopped"), "aborted"),
        (Receiver.peer_lost, "aborted"),
    ):
        receiver = Receiver()
        assert receiver.cancel("aborted") == [SendCancel()]
        assert receiver.first_token(7) == []
        assert receiver.state is ReceiverState.FENCING
        assert answer(receiver) == [Broken(expected)]


def test_a_receiver_that_asks_again_sends_again_as_the_answer_may_be_lost() -> None:
    receiver = Receiver()
    receiver.cancel("aborted")
    assert receiver.cancel("out of time") == [SendCancel()]
    assert receiver.failed("stopped") == [Broken("aborted")]


def test_a_receiver_with_every_block_has_nothing_to_fence() -> None:
    receiver = Receiver()
    receiver.landed()
    assert receiver.cancel("aborted") == [Broken("aborted")]


def test_a_receiver_that_is_done_ignores_the_late() -> None:
    receiver = Receiver(needs_token=False)
    receiver.landed()
    before = copy.deepcopy(receiver)
    assert receiver.landed() == []
    assert receiver.peer_lost() == []
    assert receiver.failed("late") == []
    assert receiver.cancel("late") == []
    assert receiver.first_token(9) == []
    assert receiver == before


def writer() -> Writer:
    return Writer(range(LAYERS), BLOCK)


@pytest.mark.parametrize(
    ("prepare", "event"),
    [
        (lambda w: w.ended(True), lambda w: w.saved(0, 4, 4, [1])),
        (lambda w: w.ended(True), lambda w: w.ended(True)),
        (lambda w: w.ended(False), lambda w: w.ended(True)),
        (lambda w: w.ended(True), lambda w: w.preempted()),
        (lambda w: None, lambda w: w.write_done(True)),
        (lambda w: w.stop("over"), lambda w: w.write_done(False)),
    ],
)
def test_an_illegal_event_raises_and_changes_nothing(
    prepare: Callable[[Writer], object], event: Callable[[Writer], object]
) -> None:
    machine = writer()
    prepare(machine)
    before = copy.deepcopy(machine)
    with pytest.raises(IllegalEvent):
        event(machine)
    assert machine == before


def test_blocks_go_as_soon_as_they_are_final() -> None:
    machine = writer()
    machine.offered(0, [10, 11])
    assert machine.saved(0, 3, 6, [1, 2]) == []
    assert machine.saved(0, 5, 6, [1, 2]) == [Write(0, 0, (1,), (10,))]
    assert machine.saved(0, 6, 6, [1, 2]) == [Write(0, 1, (2,), (11,))]


def test_what_was_computed_before_the_offer_goes_with_it() -> None:
    machine = writer()
    machine.saved(0, 6, 6, [1, 2])
    machine.saved(1, 4, 6, [1, 2])
    assert machine.offered(0, [10, 11]) == [Write(0, 0, (1, 2), (10, 11)), Write(1, 0, (1,), (10,))]


def test_only_the_layers_that_decode_wants_are_written() -> None:
    """Layers are numbered as in the model, and the worker has more of them."""
    machine = Writer(range(3, 5), BLOCK)
    machine.offered(0, [10])
    assert machine.saved(2, 4, 4, [1]) == []
    assert machine.saved(3, 4, 4, [1]) == [Write(3, 0, (1,), (10,))]
    assert machine.saved(4, 4, 4, [1]) == [Write(4, 0, (1,), (10,))]
    assert machine.saved(5, 4, 4, [1]) == []
    assert machine.is_computed
    assert machine.write_done(True) == []
    assert machine.write_done(True) == [SendLanded()]


def test_cached_blocks_of_decode_are_not_written() -> None:
    machine = writer()
    machine.offered(1, [11])
    assert machine.saved(0, 8, 8, [1, 2]) == [Write(0, 1, (2,), (11,))]


def test_too_few_offered_blocks_fail_once_and_write_nothing_after() -> None:
    machine = writer()
    machine.saved(0, 8, 8, [1, 2])
    machine.saved(1, 4, 8, [1, 2])
    assert machine.offered(0, [10]) == [SendFailed("decode offered too few blocks")]
    assert machine.state is WriterState.FAILED


def test_a_preempted_prefill_offers_no_blocks_that_are_no_longer_its_own() -> None:
    machine = writer()
    machine.saved(0, 4, 8, [1, 2])
    machine.preempted()
    assert machine.offered(0, [10, 11]) == []
    assert machine.saved(0, 4, 8, [5, 6]) == [Write(0, 0, (5,), (10,))]


def test_a_preempted_prefill_writes_no_block_twice() -> None:
    machine = writer()
    machine.offered(0, [10, 11])
    assert machine.saved(0, 4, 8, [1, 2]) == [Write(0, 0, (1,), (10,))]
    machine.write_done(True)
    machine.preempted()
    assert machine.saved(0, 4, 8, [5, 6]) == []
    assert machine.saved(0, 8, 8, [5, 6]) == [Write(0, 1, (6,), (11,))]
