"""The channel, both sides in one process: orders of events, cancellation, failure, what is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transfer.channel.timings import Timings
from transfer.control.messages import FirstToken
from transfer.control.token_sender import TokenSender

KEY = ("session", 1)
PROMPT, TOKEN = 10, 42  # three blocks of four tokens
SOURCE, TARGET = [5, 6, 9], [20, 3, 4]


def give_token(decode: Any, key: tuple[str, int] = KEY, token: int = TOKEN) -> None:
    """What the prefill engine's scheduler does when it samples."""
    sender = TokenSender(decode.seal)
    before = decode.events.copy()
    sender.send(decode.channel.address, FirstToken(*key, token))
    decode.until(lambda: decode.channel._decode.early_tokens.get(key) == token or decode.events != before)
    sender.close()


def offer(decode: Any, prefill: Any, needs_token: bool = False) -> None:
    decode.channel.offer(KEY, "d", [prefill.channel.address], 0, TARGET, needs_token)


def assert_copied(prefill: Any, decode: Any) -> None:
    assert np.array_equal(decode.memory[:, :, TARGET], prefill.memory[:, :, SOURCE])
    others = [block for block in range(decode.blocks) if block not in TARGET]
    assert not decode.memory[:, :, others].any()


def test_prefill_knows_that_decode_has_offered_or_will_not(prefill: Any, decode: Any) -> None:
    assert not prefill.channel.is_answered(KEY)
    offer(decode, prefill)
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    other = ("other", 1)
    decode.channel.cancel_unoffered(other, [prefill.channel.address], "aborted")
    prefill.until(lambda: prefill.channel.is_answered(other))
    decode.channel.cancel(KEY, "aborted")
    prefill.until(lambda: not prefill.counter("open_writing"))
    assert prefill.channel.is_answered(KEY)
    assert decode.wait("broken", "d") == "aborted"


ORDERS = ["offer first", "offer between chunks", "offer last", "offer after the end"]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_offered_and_computed_in_any_order_lands(prefill: Any, decode: Any, order: str) -> None:
    prefill.fill(SOURCE, 1)
    steps: list[Callable[[], None]] = [
        lambda: prefill.save(KEY, "p", 7, PROMPT, SOURCE),
        lambda: prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE),
        lambda: prefill.channel.ended(KEY, "p", True),
    ]
    steps.insert(ORDERS.index(order), lambda: offer(decode, prefill))
    for step in steps:
        step()
        decode.barrier()
        prefill.barrier()
    assert decode.wait("received", "d") is None
    assert prefill.wait("released", "p")
    assert_copied(prefill, decode)
    assert prefill.counter("bytes_written") == prefill.layout.kv_bytes(3)
    assert prefill.counter("blocks_written") == 3 * prefill.layers
    prefill.wait_idle()
    decode.wait_idle()


def test_bytes_that_land_while_the_prompt_is_computed_are_counted_apart(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    prefill.save(KEY, "p", 7, PROMPT, SOURCE)
    prefill.wait_counter("writes", prefill.layers)
    first = prefill.counter("bytes_written")
    assert prefill.counter("bytes_overlapped") == first > 0
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    assert decode.wait("received", "d") is None
    whole = prefill.counter("bytes_written")
    assert whole == prefill.layout.kv_bytes(3)
    assert first <= prefill.counter("bytes_overlapped") < whole, "the last layer is written when all is computed"


def test_bytes_of_a_prompt_that_is_computed_already_are_not_overlapped(prefill: Any, decode: Any) -> None:
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.barrier()
    offer(decode, prefill)
    assert decode.wait("received", "d") is None
    assert prefill.counter("bytes_written") == prefill.layout.kv_bytes(3)
    assert prefill.counter("bytes_overlapped") == 0


def test_blocks_are_held_until_the_offer_comes_and_no_longer(prefill: Any, decode: Any) -> None:
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.channel.ended(KEY, "p", True)
    prefill.barrier()
    assert not prefill.collect().released
    offer(decode, prefill)
    assert prefill.wait("released", "p")


def test_an_early_first_token_waits_for_its_offer(prefill: Any, decode: Any) -> None:
    give_token(decode)
    offer(decode, prefill, needs_token=True)
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    assert decode.wait("received", "d") == TOKEN


def test_a_late_first_token_holds_the_result_back(prefill: Any, decode: Any) -> None:
    offer(decode, prefill, needs_token=True)
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.wait_counter("handoffs_landed", 1)
    assert not decode.collect().received
    give_token(decode)
    assert decode.wait("received", "d") == TOKEN


def test_cancelled_before_anything_is_computed(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    decode.channel.cancel(KEY, "aborted")
    assert decode.wait("broken", "d") == "aborted"
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.channel.ended(KEY, "p", True)
    assert prefill.wait("released", "p")
    assert prefill.counter("writes") == 0
    prefill.wait_idle()


def test_cancelled_between_chunks(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    prefill.save(KEY, "p", 7, PROMPT, SOURCE)
    prefill.wait_counter("writes", prefill.layers)
    decode.channel.cancel(KEY, "aborted")
    assert decode.wait("broken", "d") == "aborted"
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.channel.ended(KEY, "p", True)
    assert prefill.wait("released", "p")
    assert prefill.counter("writes") == prefill.layers
    prefill.wait_idle()


def test_an_aborted_prefill_breaks_the_handoff(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    prefill.save(KEY, "p", 7, PROMPT, SOURCE)
    prefill.channel.ended(KEY, "p", False)
    assert decode.wait("broken", "d") == "the prefill was aborted"
    assert prefill.wait("released", "p")


def test_an_offer_for_a_prefill_that_is_over_breaks(prefill: Any, decode: Any) -> None:
    prefill.channel.ended(KEY, "p", False)
    assert prefill.wait("released", "p")
    offer(decode, prefill)
    assert decode.wait("broken", "d") == "the prefill was aborted"
    prefill.wait_idle()


def test_a_closed_peer_breaks_every_handoff_with_it(prefill: Any, decode: Any) -> None:
    for number in range(3):
        key, blocks = (f"s{number}", 1), [3 * number, 3 * number + 1]
        decode.channel.offer(key, f"d{number}", [prefill.channel.address], 0, blocks, True)
    prefill.until(lambda: prefill.counter("open_writing") == 3)
    prefill.channel.close()
    for number in range(3):
        assert decode.wait("broken", f"d{number}") == "the prefill replica was lost"
    decode.wait_idle()


def test_a_peer_that_was_never_there(decode: Any, make_side: Callable[..., Any]) -> None:
    gone = make_side("gone")
    gone.channel.close()
    decode.channel.offer(KEY, "d", [gone.channel.address], 0, TARGET, False)
    assert decode.wait("broken", "d") == "the prefill replica was lost"


def test_a_decode_replica_that_is_gone_frees_the_source(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    prefill.save(KEY, "p", 7, PROMPT, SOURCE)
    prefill.wait_counter("writes", prefill.layers)
    decode.channel.close()
    prefill.save(KEY, "p", PROMPT, PROMPT, SOURCE)
    prefill.channel.ended(KEY, "p", True)
    assert prefill.wait("released", "p")
    assert prefill.counter("handoffs_failed") == 1


@pytest.mark.parametrize(
    ("option", "name"), [({"fingerprint": "other"}, "fingerprint"), ({"block_size": 8}, "block_size")]
)
def test_an_unlike_layout_is_refused_and_the_difference_named(
    decode: Any, make_side: Callable[..., Any], option: dict[str, Any], name: str
) -> None:
    other = make_side("other", **option)
    for request_id in ("first", "second"):
        decode.channel.offer((request_id, 1), request_id, [other.channel.address], 0, TARGET, False)
        assert f"{name} differs" in decode.wait("broken", request_id)
    assert other.counter("open_writing") == 0


def test_another_secret_is_not_heard(prefill: Any, make_side: Callable[..., Any]) -> None:
    stranger = make_side("stranger", secret="another")
    stranger.channel.offer(KEY, "d", [prefill.channel.address], 0, TARGET, False)
    prefill.wait_counter("bad_messages", 2)  # hello and offer
    assert prefill.counter("open_writing") == 0
    stranger.channel.cancel(KEY, "aborted")
    prefill.channel.close()
    assert stranger.wait("broken", "d")


def test_both_sides_run_out_of_time(make_side: Callable[..., Any]) -> None:
    prefill, decode = make_side("prefill", timeout_s=0.2), make_side("decode", timeout_s=0.2)
    offer(decode, prefill)
    assert "time" in decode.wait("broken", "d")
    prefill.channel.ended(("never offered", 1), "p", True)
    assert prefill.wait("released", "p")
    prefill.wait_idle()


def test_a_lost_answer_to_a_cancel_is_asked_for_again(
    make_side: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_side("prefill"), make_side("decode")
    send, lost = prefill.channel._endpoint.send, list[Any]()

    def lossy(to: Any, message: Any) -> None:
        if type(message).__name__ == "Failed" and not lost:
            lost.append(message)
        else:
            send(to, message)

    monkeypatch.setattr(prefill.channel._endpoint, "send", lossy)
    offer(decode, prefill)
    decode.channel.cancel(KEY, "aborted")
    decode.until(lambda: lost)
    decode.run_out()  # only what came back from there asks again
    assert decode.wait("broken", "d") == "aborted"


def test_a_preempted_prefill_does_not_send_what_overwrote_it(prefill: Any, decode: Any) -> None:
    prefill.save(KEY, "p", 8, PROMPT, SOURCE)
    assert prefill.channel.wait_quiet([KEY], 10)
    prefill.fill(SOURCE, 666)  # another request took the blocks
    offer(decode, prefill)
    prefill.until(lambda: prefill.channel._prefill.peers.agents)
    prefill.barrier()
    again = [30, 31, 32]
    prefill.fill(again, 1)
    prefill.save(KEY, "p", PROMPT, PROMPT, again)
    prefill.channel.ended(KEY, "p", True)
    decode.wait("received", "d")
    assert np.array_equal(decode.memory[:, :, TARGET], prefill.memory[:, :, again])


def test_the_same_session_in_a_new_epoch_is_another_handoff(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    decode.channel.cancel(KEY, "aborted")
    decode.wait("broken", "d")
    again = ("session", 2)
    decode.channel.offer(again, "d2", [prefill.channel.address], 0, TARGET, False)
    prefill.save(again, "p", PROMPT, PROMPT, SOURCE)
    prefill.channel.ended(again, "p", True)
    assert decode.wait("received", "d2") is None
    prefill.wait("released", "p")
    prefill.wait_idle()


def test_a_closed_channel_takes_no_commands_and_closes_twice(prefill: Any) -> None:
    prefill.channel.close()
    prefill.channel.close()
    prefill.channel.cancel(KEY, "late")
    prefill.channel.ended(KEY, "p", True)
    assert not prefill.channel.wait_quiet([KEY], 0.01)


def test_a_thread_that_does_not_end_is_given_up_and_said_where_it_is(
    make_side: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = make_side("prefill", timings=Timings(end_s=0.05))
    stuck, hangs, close = threading.Event(), threading.Event(), prefill.channel._plane.close
    thread = prefill.channel._thread
    join = thread.join

    def hang() -> None:
        hangs.set()
        stuck.wait()
        close()

    def joined(timeout: float) -> None:
        assert hangs.wait(60)
        join(timeout)

    monkeypatch.setattr(prefill.channel._plane, "close", hang)
    monkeypatch.setattr(thread, "join", joined)
    prefill.channel.close()
    assert "did not end" in caplog.text
    assert "in hang" in caplog.text
    stuck.set()
    join(60)
    os.close(prefill.channel._wake)


def test_replicas_meet_before_the_first_request_and_forget_a_replica_that_is_gone(
    prefill: Any, decode: Any, make_side: Callable[..., Any]
) -> None:
    other = make_side("other")
    decode.channel.meet([[prefill.channel.address], [other.channel.address]])
    prefill.until(lambda: len(prefill.channel._prefill.peers.agents) == len(other.channel._prefill.peers.agents) == 1)
    prefill.channel.keep([[decode.channel.address]])
    prefill.channel.keep([])
    prefill.until(lambda: not prefill.channel._prefill.peers.agents)
    decode.channel.meet([[prefill.channel.address]])
    decode.until(lambda: decode.channel._endpoint.peers == {prefill.channel.address})


def test_a_peer_that_was_never_listed_is_not_forgotten(prefill: Any, decode: Any) -> None:
    decode.channel.meet([[prefill.channel.address]])
    prefill.until(lambda: prefill.channel._prefill.peers.agents)
    prefill.channel.keep([])
    prefill.barrier()
    assert prefill.channel._prefill.peers.agents


def test_a_peer_with_an_open_handoff_is_forgotten_later(prefill: Any, decode: Any) -> None:
    offer(decode, prefill)
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    for _ in range(2):
        prefill.channel.keep([[decode.channel.address]])
        prefill.channel.keep([])
    prefill.barrier()
    assert prefill.channel._prefill.peers.agents
    decode.channel.cancel(KEY, "aborted")
    prefill.wait_idle()
    prefill.channel.keep([])
    prefill.until(lambda: not prefill.channel._prefill.peers.agents)


def test_what_is_no_address_fails_its_own_handoff_only(prefill: Any, decode: Any) -> None:
    decode.channel.offer(KEY, "d", ["nonsense"], 0, TARGET, False)
    assert "lost" in decode.wait("broken", "d")
    decode.channel.offer(("good", 1), "g", [prefill.channel.address], 0, TARGET, False)
    prefill.save(("good", 1), "p", PROMPT, PROMPT, SOURCE)
    assert decode.wait("received", "g") is None
