"""Lines: how they are read, what they ask for, in which order, and what they become."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest

from app.batches import results
from app.batches.line_reader import PIECE, Line, LineReader
from app.batches.line_request import USUAL_TOKENS, BadLine, LineRequest, request_of
from app.batches.progress import Progress
from app.batches.records import Scan, Usage
from tests.app.batches.toys import CHAT, MODEL, line


def read(content: bytes, scan: Scan = Scan(), longest: int = 50, most: int = 3) -> list[Line]:  # noqa: B008 - it is frozen
    file = io.BytesIO(content)
    file.seek(scan.offset)
    reader, found = LineReader(file, scan, longest), list[Line]()
    while window := reader.window(most, 10**9):
        assert len(window) <= most
        found += window
    assert reader.scan.offset == len(content)
    return found


def test_lines_are_numbered_from_one_and_blank_ones_are_passed_over() -> None:
    found = read(b"\xef\xbb\xbf one\r\n\n  \ntwo\nthree")
    assert [(each.number, each.text) for each in found] == [(1, b"one"), (4, b"two"), (5, b"three")]
    assert read(b"") == read(b"\n\n") == []


def test_a_line_that_is_too_long_is_known_without_its_text() -> None:
    long = b"x" * (3 * PIECE)
    found = read(b"a\n" + long + b"\nb\n" + long)
    assert [(each.number, each.text) for each in found] == [(1, b"a"), (2, None), (3, b"b"), (4, None)]


def test_a_reader_goes_on_from_any_place_where_another_was() -> None:
    draw = random.Random(5)
    content = b"".join(b"%d" % i * draw.randrange(0, 40) + b"\n" for i in range(500))
    whole = read(content, longest=70)
    reader = LineReader(io.BytesIO(content), Scan(), 70)
    begun = list[Line]()
    while window := reader.window(7, 10**9):
        begun += window
        assert begun + read(content, reader.scan, longest=70) == whole


def test_a_window_ends_with_the_line_that_fills_it() -> None:
    reader = LineReader(io.BytesIO(b"12345\n12345\n12345\n"), Scan(), 50)
    assert [len(reader.window(10, most)) for most in (6, 6, 6)] == [2, 1, 0]


def request(content: Any, endpoint: str = CHAT) -> LineRequest:
    return request_of(Line(7, content if isinstance(content, bytes) else json.dumps(content).encode()), endpoint)


def test_a_line_is_a_request() -> None:
    found = request(line(1))
    assert (found.line, found.custom_id) == (7, "id-1")
    assert json.loads(found.body) == line(1)["body"]


@pytest.mark.parametrize(
    ("content", "code", "custom_id"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (line(1, custom_id=3), "missing_custom_id", None),
        (line(1, custom_id=""), "missing_custom_id", None),
        (line(1, method="GET"), "invalid_method", "id-1"),
        (line(1, url="/v1/completions"), "mismatched_endpoint", "id-1"),
        (line(1, url=["/v1/completions"]), "mismatched_endpoint", "id-1"),
        (line(1, body="text"), "invalid_request", "id-1"),
        ({"custom_id": "x", "method": "POST", "url": CHAT}, "invalid_request", "x"),
        (line(1, body={"stream": True}), "invalid_request", "id-1"),
        (line(1, body={"background": True}), "invalid_request", "id-1"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(content: Any, code: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine) as refused:
        request(content)
    assert (refused.value.code, refused.value.custom_id) == (code, custom_id)


def test_a_response_goes_into_the_store_of_responses_only_where_its_line_says_so() -> None:
    for given, stored in (({}, False), ({"store": True}, True)):
        asked = line(1, url="/v1/responses", body={"model": MODEL, "input": "x", **given})
        assert json.loads(request(asked, "/v1/responses").body)["store"] is stored


def test_what_a_line_asks_for_is_about_known() -> None:
    for more, tokens in (
        ({}, USUAL_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9, "n": 3}, 27),
        ({"max_tokens": None, "max_output_tokens": 5}, 5),
        ({"max_tokens": -1, "n": "many"}, USUAL_TOKENS),
        ({"max_tokens": 10**30}, USUAL_TOKENS),
    ):
        asked = request(line(1, body={"model": MODEL, "messages": [{"role": "user", "content": "x" * 9000}], **more}))
        assert asked.answer_tokens == tokens, more
        assert asked.prompt_bytes > 9000 > len(asked.prefix)


def test_an_answer_becomes_one_line_in_openais_shape() -> None:
    body = json.dumps({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}, indent=1).encode()
    made = results.answered(3, "é", "req", 200, body)
    assert b"\n" not in made.text
    found = json.loads(made.text)
    assert found["id"].startswith("batch_req_")
    assert found["response"] == {"status_code": 200, "request_id": "req", "body": json.loads(body)}
    assert (found["custom_id"], found["error"]) == ("é", None)
    assert (made.line, made.is_ok, made.usage) == (3, True, Usage(5, 0, 2, 0))


def test_tokens_are_counted_by_the_names_of_either_api() -> None:
    chat = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    response = {
        "input_tokens": 5,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    for usage in (chat, response):
        made = results.answered(1, "x", "r", 200, json.dumps({"usage": usage}).encode())
        assert made.usage == Usage(5, 4, 2, 1)
    assert results.answered(1, "x", "r", 200, b'{"usage": null}').usage == Usage()
    refused = results.answered(1, "x", "r", 400, json.dumps({"usage": chat}).encode())
    assert (refused.is_ok, refused.usage) == (False, Usage())


def test_a_place_in_the_file_is_reached_when_all_before_it_is_answered() -> None:
    progress = Progress(Scan(1, 0))
    first, second = progress.begin(Scan(3, 30), 2), progress.begin(Scan(5, 50), 1)
    progress.answered(second)
    assert progress.scan == Scan(1, 0)
    progress.answered(first)
    assert progress.scan == Scan(1, 0)
    progress.answered(first)
    assert progress.scan == Scan(5, 50)
    progress.begin(Scan(9, 90), 0)
    assert progress.scan == Scan(9, 90)
