"""What a request would become, counted before any of it is placed, and what one client may have at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bounds import Bounds, parts_of
from app.errors import TooManyForClient
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext
from deployments.errors import TooManyParts
from tests.app.toys import OK, Toy, client


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, 1),
        ({"prompt": "hi"}, 1),
        ({"prompt": "hi", "n": 1500}, 1500),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "n": 4}, 8),
        ({"prompt": []}, 1),
        ({"prompt": None, "prompt_embeds": ["x", "y"]}, 2),
        ({"messages": [{"role": "user", "content": "[[1]]"}] * 5}, 1),
        ({"messages": [[{"role": "user", "content": "a"}]] * 5, "n": 2}, 10),
        ({"input": ["a", "b"]}, 1),
        ({"prompt": "hi", "n": "16384"}, 16384),
        ({"prompt": "hi", "n": 3.0}, 3),
        ({"prompt": "hi", "n": None}, 1),
        ({"prompt": "hi", "n": -5}, 1),
        ({"prompt": "hi", "n": [7]}, 1),
        ({"metadata": {"n": 9000, "prompt": ["a", "b"]}}, 1),
    ],
)
def test_a_request_is_counted_by_its_prompts_and_n(fields: dict[str, Any], parts: int) -> None:
    assert parts_of(body(**fields)) == parts


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"", 1),
        (b"not json", 1),
        (b"[1, 2]", 1),
        (b'{"n": 16384, "x": NaN}', 16384),
        (b'{"n": 16384, "x": "\\ud800"}', 16384),
        ('{"n": 16384}'.encode("utf-16"), 16384),
        (b'{"n": 1, "n": 16384}', 16384),
        (b'{"\\u006e": 16384}', 16384),
        (b'{"n": 1e400}', 1),
        (b'{"n": 2, "prompt": [ \n "a", "b"]}', 4),
        (b'{"x": ' + b"[" * 100_000, 1),
    ],
)
def test_no_way_of_writing_a_body_hides_its_parts(raw: bytes, parts: int) -> None:
    assert parts_of(raw) == parts


@given(
    st.one_of(st.none(), st.text(), st.lists(st.text()), st.lists(st.integers()), st.lists(st.lists(st.integers()))),
    st.integers(1, 100_000),
    st.booleans(),
)
def test_both_parsers_count_alike(prompt: Any, n: int, strict: bool) -> None:
    """A NaN sends the body to the other parser."""
    written = json.dumps({"prompt": prompt, "n": n} | ({} if strict else {"x": float("nan")})).encode()
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    assert parts_of(written) == n * prompts


def test_the_queue_bounds_a_request_too() -> None:
    assert Bounds(IngressConfig(max_parts=8), 0).most_parts == 8
    assert Bounds(IngressConfig(max_parts=8), 5).most_parts == 5
    with pytest.raises(TooManyParts, match="would become 6 answers, and one may have 5"):
        Bounds(IngressConfig(max_parts=8), 5).enter("a", body(n=6))


def test_one_client_has_a_share_and_gets_it_back() -> None:
    bounds = Bounds(IngressConfig(max_parts=8, max_client_parts=10), 0)
    assert [bounds.enter("a", body(n=5)) for _ in range(2)] == [5, 5]
    with pytest.raises(TooManyForClient, match="has 10 answers open, and may have 10"):
        bounds.enter("a", body())
    assert bounds.enter("b", body(n=8)) == 8
    bounds.leave("a", 5)
    assert bounds.enter("a", body(n=5)) == 5


async def test_a_request_with_too_many_parts_does_not_reach_vllm() -> None:
    toy = Toy(*OK)
    async with client(toy, limit=1000) as http:
        refused = await http.post("/v1/completions", content=body(prompt="hi", n=16384))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "too_many_parts"
        assert "16384" in refused.json()["error"]["message"]
        assert toy.calls == 0
        assert (await http.post("/v1/completions", content=body(prompt="hi"))).status_code == 200


async def test_a_client_over_its_share_is_told_when_to_come_again() -> None:
    told: list[Any] = []

    async def ask_again(context: RequestContext, receive: Any) -> None:
        if not told:
            told.append(None)
            told.append(await http.post("/v1/completions", content=body(n=3), headers={"authorization": "Bearer a"}))
            told.append(await http.post("/v1/completions", content=body(n=3), headers={"authorization": "Bearer b"}))

    async with client(Toy(*OK, act=ask_again), limit=1000, max_client_parts=4) as http:
        first = await http.post("/v1/completions", content=body(n=2), headers={"authorization": "Bearer a"})
        assert first.status_code == 200
        assert (told[1].status_code, told[1].json()["error"]["code"]) == (429, "too_many_for_client")
        assert told[1].headers["retry-after"] == "1"
        assert told[2].status_code == 200
        later = await http.post("/v1/completions", content=body(n=4), headers={"authorization": "Bearer a"})
        assert later.status_code == 200
