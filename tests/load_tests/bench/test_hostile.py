"""The benchmark of a hostile client: short, with every kind of its requests."""

from __future__ import annotations

import pytest

from load_tests.bench.hostile import parse, run
from load_tests.hostile.bodies import MOST_BYTES, requests

KINDS = {sent.kind for sent in requests("m")}


def test_no_body_is_refused_for_its_length() -> None:
    assert len(KINDS) == len(requests("m"))
    assert max(len(sent.body) for sent in requests("m")) <= MOST_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_clients_get_their_answers_and_nothing_is_left() -> None:
    found = run(parse(["--rounds", "1", "--seconds", "8", "--clients", "4", "--connections", "40"]))
    assert found["benchmark"] == "hostile"
    assert (found["errors"], found["why"], found["probes_failed"], found["left"]) == (0, [], 0, {})
    assert found["requests"] > 4
    assert found["throughput_ratio"] > 0
    answered = {status for outcomes in found["hostile"].values() for status in outcomes if status != "slowest_ms"}
    assert answered <= {"400", "413", "429"}, "what is hostile is refused, and not served"
    assert "400" in answered
