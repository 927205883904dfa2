"""Bodies are weighed before they are parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.body_values import check_values, values_at_most
from app.errors import TooManyValues
from deployments.errors import GrammarTooLong
from load_tests.hostile import bodies
from tests.app.toys import OK, Toy, client

MOST, GRAMMAR = 2048, 256
SMALL = 4096  # bytes of a body that is small enough whatever it holds
SAYS = {"role": "user", "content": "hi"}  # five values: the object, two keys, two texts


def check(most: int = MOST, **fields: Any) -> None:
    check_values({}, json.dumps(fields).encode(), most, GRAMMAR)


@pytest.mark.parametrize(
    ("fits", "too_many"),
    [
        ({"messages": [SAYS] * 380}, {"messages": [SAYS] * 412}),
        ({"input": [SAYS] * 190}, {"input": [SAYS] * 208}),
        ({"tools": [SAYS] * 1560}, {"tools": [SAYS] * 1660}),
        ({"prompt": [1] * 130_000}, {"prompt": [1] * 132_000}),
        ({"prompt": ["a"] * 7600}, {"prompt": ["a"] * 8400}),
        ({"prompt": "[" * 200_000 + '"' * 200_000}, {"prompt": [[]] * 8400}),
        ({"messages": [{"content": 'say "' * 10000}]}, {"messages": [[SAYS] * 206] * 2}),
        ({"messages": [SAYS] * 200, "input": [SAYS] * 90}, {"messages": [SAYS] * 220, "input": [SAYS] * 100}),
    ],
)
def test_values_weigh_by_where_they_are(fits: dict[str, Any], too_many: dict[str, Any]) -> None:
    check(**fits)
    with pytest.raises(TooManyValues, match=r"may weigh 2048 \(ingress.max_values\)"):
        check(**too_many)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("more", [{}, {"odd": float("nan")}])
def test_no_way_of_writing_a_body_hides_its_values(encoding: str, more: dict[str, Any]) -> None:
    body = json.dumps({"messages": [SAYS] * 1000, **more}).encode(encoding)
    with pytest.raises(TooManyValues):
        check_values({}, body, MOST, GRAMMAR)


def test_a_grammar_has_a_length() -> None:
    long = "a" * 13 * GRAMMAR + "b" * 5000
    for name in ("structured_outputs", "response_format"):
        with pytest.raises(GrammarTooLong, match=f"longer than {GRAMMAR} characters"):
            check_values({}, json.dumps({name: {"schema": long}}).encode(), MOST, GRAMMAR)
    check(prompt=long)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


def _strings_and_more(value: Any) -> int:
    """Strings, objects and lists in a value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_strings_and_more, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_strings_and_more, value))
    return int(isinstance(value, str))


@given(_JSON, st.booleans())
def test_there_are_never_more_values_than_it_says(value: Any, ascii_only: bool) -> None:
    body = json.dumps({"messages": value}, ensure_ascii=ascii_only).encode()
    assert values_at_most({}, body) >= _strings_and_more({"messages": value})


@given(_JSON, st.integers(1, 30))
def test_what_weighs_too_much_by_the_definition_is_refused(value: Any, most: int) -> None:
    weight = _strings_and_more(value)
    if weight > most:
        with pytest.raises(TooManyValues):
            check(most=most, messages=value, prompt="x" * SMALL)


def test_what_was_counted_is_kept() -> None:
    scope: dict[str, Any] = {}
    body = json.dumps({"messages": [SAYS]}).encode()
    check_values(scope, body, MOST, GRAMMAR)
    assert values_at_most(scope, body) == values_at_most({}, body) > 5
    assert values_at_most(scope, body + b" ") == values_at_most({}, body), "of another body it is counted again"


@pytest.mark.parametrize("kind", ["messages", "tools", "stops", "nested"])
async def test_a_body_of_many_values_does_not_reach_vllm(kind: str) -> None:
    sent = next(each for each in bodies.requests("m") if each.kind == kind)
    toy = Toy(*OK)
    async with client(toy, limit=bodies.MOST_BYTES) as http:
        refused = await http.post(sent.path, content=sent.body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_values")
        assert toy.calls == 0
        assert (await http.post(sent.path, content=b"{}")).status_code == 200
