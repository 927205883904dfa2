"""The mutator: the same cases for the same seed, on every route, most of them valid JSON, some of them hostile."""

from __future__ import annotations

import json
import sys
from collections import Counter

from load_tests.fuzz.bodies import PATHS, case

CASES = 1500


def test_a_seed_gives_the_same_cases_again() -> None:
    assert [case(7, number) for number in range(100)] == [case(7, number) for number in range(100)]
    assert [case(7, number) for number in range(100)] != [case(8, number) for number in range(100)]


def test_every_route_is_asked_and_bodies_have_what_is_hostile() -> None:
    limit = sys.getrecursionlimit()
    cases = [case(1, number) for number in range(CASES)]
    assert sys.getrecursionlimit() == limit
    paths = Counter(each.path for each in cases)
    assert set(PATHS) <= paths.keys()
    assert {"GET", "POST"} <= {each.method for each in cases}
    content = b"\n".join(each.content for each in cases)
    for hostile in (b'{"$ref": "#"}', b"root ::= root", b'"n": 16384', b"\\ud83d", b'"logit_bias": {', b"[" * 900):
        assert hostile in content, hostile
    assert any(each.streams for each in cases)
    assert any(each.leaves_s is not None for each in cases)


def test_most_bodies_are_json() -> None:
    def is_json(content: bytes) -> bool:
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            return False
        return True

    assert sum(is_json(case(1, number).content) for number in range(300)) > 250
