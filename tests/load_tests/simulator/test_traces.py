"""Trace readers: both public formats, what is wrong with a line, and scaling to a rate and a size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from load_tests.simulator import synthetic
from load_tests.simulator.metrics import HOT
from load_tests.simulator.traces import Trace, TraceError, TraceRequest, find, load

MOONCAKE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 600, "output_length": 300, "hash_ids": [0, 7]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_lines_become_requests_with_the_hashes_of_full_blocks(tmp_path: Path) -> None:
    trace = load(written(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert trace.block_tokens == 512
    assert trace.requests == (TraceRequest(0.0, 1030, 5, (0, 1)), TraceRequest(3.0, 600, 300, (0,)))


def test_azure_lines_become_requests_without_hashes(tmp_path: Path) -> None:
    trace = load(written(tmp_path, "azure.csv", AZURE))
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == [(374, 44), (396, 109)]
    assert trace.requests[1].at_s - trace.requests[0].at_s == pytest.approx(4.314579)
    assert all(not request.hashes for request in trace.requests)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("m.jsonl", MOONCAKE + "{not json}\n", "request 3"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', "hash_ids"),
        ("m.jsonl", '{"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1]}\n', "1 hashes"),
        ("m.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "0 tokens"),
        ("a.csv", AZURE + "yesterday,1,1\n", "request 3"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.99,many,1\n", "many"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("x.csv", "a,b\n1,2\n", "neither"),
    ],
)
def test_a_malformed_trace_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        load(written(tmp_path, name, text))


def test_a_missing_trace_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES", str(tmp_path))
    with pytest.raises(TraceError, match=f"no trace mooncake.*{tmp_path}.*TRACES=DIR"):
        find("mooncake")
    written(tmp_path, "mooncake_conversation.jsonl", MOONCAKE)
    assert len(find("mooncake").requests) == 2


def test_scaling_keeps_order_and_gives_each_repetition_hashes_of_its_own() -> None:
    trace = Trace("t", 512, tuple(TraceRequest(10.0 + 2 * i, 600, 5, (i,)) for i in range(10)))
    scaled = trace.scaled(4.0, 25)
    times = [request.at_s for request in scaled.requests]
    assert len(times) == 25
    assert times[0] == 0.0
    assert all(later - earlier == pytest.approx(0.25) for earlier, later in pairwise(times))
    assert len({request.hashes for request in scaled.requests}) == 25
    assert [request.hashes for request in scaled.requests[:10]] == [request.hashes for request in trace.requests]


@pytest.mark.parametrize(
    ("output", "asked"), [(1, 256), (100, 256), (128, 256), (129, 512), (1000, 2048), (4097, 8192), (9000, 9000)]
)
def test_clients_ask_for_about_twice_what_they_get(output: int, asked: int) -> None:
    assert TraceRequest(0.0, 10, output).max_tokens == asked


@pytest.mark.parametrize(
    "make", [synthetic.poisson, synthetic.burst, synthetic.conversations, synthetic.hot, synthetic.documents]
)
def test_made_traces_follow_their_seed_and_rate(make: Callable[[float, int, int], Trace]) -> None:
    one, same, other = make(20.0, 2000, 3), make(20.0, 2000, 3), make(20.0, 2000, 4)
    assert one == same
    assert one != other
    times = [request.at_s for request in one.requests]
    assert len(times) == 2000
    assert times == sorted(times)
    assert 1000 / (times[-1] - times[999]) == pytest.approx(20.0, rel=0.35)


def test_turns_of_a_conversation_share_what_was_said() -> None:
    trace = synthetic.conversations(5.0, 400, seed=1)
    talks: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        talks.setdefault(request.client, []).append(request)
    pairs = [pair for turns in talks.values() for pair in pairwise(turns)]
    assert pairs
    assert all(later.hashes[: len(earlier.hashes)] == earlier.hashes for earlier, later in pairs)
    first, second = list(talks.values())[:2]
    assert set(first[0].hashes) & set(second[0].hashes) == {0, 1, 2, 3}


def test_a_document_is_asked_for_by_many_until_a_new_one_takes_its_place() -> None:
    trace = synthetic.documents(10.0, 1600, seed=3)
    of_documents = [each for each in trace.requests if each.client.startswith(HOT)]
    asked = [each.hashes[:96] for each in of_documents]
    others = [each for each in trace.requests if not each.client.startswith(HOT)]
    assert 0.72 < len(asked) / 1600 < 0.78
    assert all(each.prompt_tokens > 12_288 for each in of_documents)
    assert len({each.hashes[96] for each in of_documents if len(each.hashes) > 96}) > 1000, "each has a tail of its own"
    assert not {each.hashes[0] for each in others if each.hashes} & {each[0] for each in asked}
    assert len(set(asked)) == 4 + 7, "seven have come"
    assert len(set(asked[:100])) == len(set(asked[-100:])) == 4
    assert not set(asked[:100]) & set(asked[-100:])
