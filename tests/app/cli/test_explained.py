"""`baton explain`: what it asks for, and what it prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import client, explained, main
from app.cli.client import CliError

FORECAST = {"queue_s": 0.0, "prefill_s": 0.84, "transfer_s": 0.01, "ttft_s": 0.84, "tpot_s": 0.041, "trusted": True}
FOUND: dict[str, Any] = {
    "policy": "joint",
    "request": {
        "prompt_tokens": 812,
        "max_tokens": 64,
        "expected_tokens": 40.0,
        "ttft_s": 1.5,
        "tpot_s": None,
        "rule": "",
        "class": "fast",
    },
    "decision": {
        "outcome": "placed",
        "mode": "disaggregated",
        "reason": "split",
        "prefill": "p1",
        "decode": "d1",
        "cached_tokens": 160,
        "forecast": FORECAST,
    },
    "ways": 3,
    "near_s": 0.02,
    "candidates": [
        {"prefill": "p1", "decode": "d1", "cost_s": 1.5, "parts": {"memory": 0.1, "first_token": 1.4}},
        {"prefill": None, "decode": "d1", "cost_s": 2.5, "parts": {"first_token": 1.7, "answers_beside": 0.8}},
    ],
    "passed_over": [{"replica": "d2", "why": "it runs its 8 sessions"}],
}


def test_an_explanation_names_the_choice_and_the_parts_of_every_price() -> None:
    text = explained.explained_text(FOUND)
    lines = text.splitlines()
    assert lines[0] == "placed, disaggregated: p1 computes the prompt, d1 writes the answer (split)"
    assert "812 tokens, 160 of them cached; answer: at most 64, expected 40; class fast (TTFT 1.5 s)" in lines[1]
    assert "first token after 0.840 s" in lines[2]
    assert "one every 41 ms" in lines[2]
    assert "2 of 3 ways" in text
    table = [line.split() for line in lines]
    assert ["PREFILL", "DECODE", "COST", "FIRST", "TOKEN", "ANSWERS", "BESIDE", "MEMORY"] in table
    assert ["p1", "d1", "1.500", "1.400", "-", "0.100"] in table
    assert ["-", "d1", "2.500", "1.700", "0.800", "-"] in table
    assert lines[-1] == "  d2: it runs its 8 sessions"


def test_one_replica_and_a_rule_are_said_in_words() -> None:
    alone = {"prefill": None, "reason": "prompt_logprobs", "mode": "decode_local"}
    text = explained.explained_text(
        {"request": FOUND["request"] | {"rule": "prompt_logprobs"}, "decision": FOUND["decision"] | alone}
    )
    assert text.startswith("placed, decode_local: d1 does all (prompt_logprobs)")
    assert "; not split: prompt_logprobs" in text


def test_a_refusal_is_explained_without_a_table() -> None:
    decision: dict[str, Any] = {
        "outcome": "refused",
        "reason": "no such class",
        "code": "unknown_class",
        "retry_after_s": None,
    }
    assert explained.explained_text({"decision": decision}) == "refused (unknown_class): no such class"
    decision |= {"retry_after_s": 2.0, "code": ""}
    assert explained.explained_text({"decision": decision}) == "refused: no such class; ask again in 2.0 s"


def test_what_to_explain_is_a_prompt_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = {"messages": [{"role": "user", "content": "why?"}]}
    assert explained.body_of("why?", "m", 9, False) == {**chat, "model": "m", "max_tokens": 9}
    assert explained.body_of("why?", None, None, True) == {"prompt": "why?"}
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"prompt": "a", "max_tokens": 1}))
    assert explained.body_of(str(file), None, 2, False) == {"prompt": "a", "max_tokens": 2}
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "b"}'))
    assert explained.body_of("-", None, None, False) == {"prompt": "b"}
    for wrong in ("[]", "{"):
        file.write_text(wrong)
        with pytest.raises(CliError, match="holds no JSON"):
            explained.body_of(str(file), None, None, False)
    assert "messages" in explained.body_of("a" * 5000, None, None, False), "no name of a file"


def test_it_asks_with_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(url: str, body: Any, priority: str) -> Any:
        asked.append((url, body, priority))
        return FOUND

    monkeypatch.setattr(client, "fetch_explanation", fetch)
    options = ["hello", "--class", "fast", "--max-tokens", "3", "--json", "--url", "http://baton"]
    shown = CliRunner().invoke(main.app, ["explain", *options])
    assert json.loads(shown.stdout) == FOUND
    assert asked == [("http://baton", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, "fast")]


def test_what_is_sent() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"some": "thing"})

    client.fetch_explanation("http://baton/x", {"prompt": "a"}, "fast", httpx.MockTransport(answer))
    assert (seen[0].method, seen[0].url.path) == ("POST", "/x/baton/explain")
    assert (json.loads(seen[0].content), seen[0].headers["x-baton-class"]) == ({"prompt": "a"}, "fast")
