"""Which write goes next: limits, fairness, rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer.channel.pacing import BURST_S, Job, Limits, Pacer


def job(handoff: str, peer: str = "peer", size: int = 10, descriptors: int = 1, write: int = 0) -> Job:
    return Job(handoff, peer, size, descriptors, write)


def drain(pacer: Pacer, now: float = 0.0) -> list[Job]:
    popped = []
    while (next_job := pacer.pop(now)) is not None:
        popped.append(next_job)
    return popped


def test_a_peers_bytes_are_bounded_and_others_go_on() -> None:
    pacer = Pacer(Limits(peer_bytes=25))
    for _ in range(4):
        pacer.push(job("a", "one"))
    pacer.push(job("b", "two"))
    first = drain(pacer)
    assert [(j.handoff, j.peer) for j in first] == [("a", "one"), ("b", "two"), ("a", "one")]
    pacer.done(first[0])
    assert [j.handoff for j in drain(pacer)] == ["a"]
    assert len(pacer) == 1


def test_the_device_bounds_all_peers() -> None:
    pacer = Pacer(Limits(device_descriptors=2))
    for peer in ("one", "two", "three"):
        pacer.push(job(peer, peer))
    assert len(drain(pacer)) == 2
    assert len(pacer) == 1


def test_a_write_over_the_limit_goes_alone() -> None:
    pacer = Pacer(Limits(peer_bytes=5, peer_descriptors=1))
    pacer.push(job("a", size=100, descriptors=9))
    pacer.push(job("a"))
    (large,) = drain(pacer)
    assert large.size == 100
    pacer.done(large)
    assert len(drain(pacer)) == 1


def test_a_long_prompt_does_not_starve_a_short_one() -> None:
    pacer = Pacer(Limits(peer_bytes=10))
    for number in range(100):
        pacer.push(job("long", write=number))
    order: list[str] = []
    for _ in range(3):
        (popped,) = drain(pacer)
        order.append(popped.handoff)
        pacer.done(popped)
    for number in range(2):
        pacer.push(job("short", write=number))
    for _ in range(4):
        (popped,) = drain(pacer)
        order.append(popped.handoff)
        pacer.done(popped)
    assert order[:3] == ["long"] * 3
    assert order[3:].count("short") == 2


def test_a_handoffs_writes_keep_their_order() -> None:
    pacer = Pacer(Limits())
    for number in range(5):
        pacer.push(job("a", write=number))
        pacer.push(job("b", write=number))
    popped = drain(pacer)
    assert [j.write for j in popped if j.handoff == "a"] == list(range(5))


def test_the_rate_is_kept_over_time() -> None:
    pacer = Pacer(Limits(bytes_per_s=1000))
    for number in range(200):
        pacer.push(job("a", write=number))
    now, sent = 0.0, 0
    while len(pacer):
        sent += sum(j.size for j in drain(pacer, now))
        assert sent <= 1000 * (now + BURST_S) + 10 + 1e-6
        wait = pacer.wait_s(now)
        now += wait or 0.001
    assert 1.9 < now < 2.1
    assert pacer.wait_s(now) == 0.0, "nothing waits"


def test_dropped_writes_are_forgotten_and_not_outstanding() -> None:
    pacer = Pacer(Limits(peer_bytes=10))
    pacer.push(job("a", write=1))
    pacer.push(job("a", write=2))
    pacer.push(job("b", write=3))
    (first,) = drain(pacer)
    assert [j.write for j in pacer.drop("a")] == [2]
    assert pacer.drop("a") == []
    pacer.done(first)
    assert [j.write for j in drain(pacer)] == [3]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 50)), max_size=60))
def test_everything_goes_once_and_within_the_limits(jobs: list[tuple[str, str, int]]) -> None:
    limits = Limits(peer_bytes=60, device_bytes=90)
    pacer = Pacer(limits)
    for number, (handoff, peer, size) in enumerate(jobs):
        pacer.push(job(handoff, peer, size, 1, number))
    outstanding: list[Job] = []
    seen: list[int] = []
    while len(pacer) or outstanding:
        outstanding += (popped := drain(pacer))
        seen += [j.write for j in popped]
        assert outstanding, "nothing is outstanding and nothing may go"
        assert sum(j.size for j in outstanding) <= limits.device_bytes
        for peer in "xy":
            assert sum(j.size for j in outstanding if j.peer == peer) <= limits.peer_bytes
        pacer.done(outstanding.pop(0))
    assert sorted(seen) == list(range(len(jobs)))
