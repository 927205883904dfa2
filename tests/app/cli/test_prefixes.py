"""`baton prefixes`: what it asks for, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import client, main
from app.cli.client import CliError

ONE = {"id": "f00", "tokens": 4113, "blocks": 257, "replicas": ["a", "b"], "missing": ["c"]}
ALL = {**ONE, "missing": []}


def test_what_is_sent() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"some": "thing"})

    transport = httpx.MockTransport(answer)
    client.pin_prefix("http://baton", {"prompt": "a"}, "", transport)
    client.pin_prefix("http://baton", {"prompt": "a"}, "team a", transport)
    client.fetch_prefixes("http://baton", transport)
    client.unpin_prefix("http://baton", "f/0", transport)
    assert [(each.method, each.url.raw_path.decode()) for each in seen] == [
        ("POST", "/baton/prefixes"),
        ("POST", "/baton/prefixes?key=team%20a"),
        ("GET", "/baton/prefixes"),
        ("DELETE", "/baton/prefixes/f%2F0"),
    ]
    assert json.loads(seen[0].content) == {"prompt": "a"}


def test_a_refusal_says_why() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(409, json={"error": {"message": "26 blocks of 25"}}))
    with pytest.raises(CliError, match="26 blocks of 25"):
        client.pin_prefix("http://baton", {"prompt": "a"}, "", transport)


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def pin(url: str, body: Any, key: str) -> dict[str, Any]:
        asked.append((url, body, key))
        return ONE

    monkeypatch.setattr(client, "pin_prefix", pin)
    monkeypatch.setattr(client, "fetch_prefixes", lambda url: {"prefixes": [ALL]})
    monkeypatch.setattr(client, "unpin_prefix", lambda url, prefix: {"id": prefix, "unpinned": True})
    file = tmp_path / "system.json"
    file.write_text('{"messages": []}')

    def run(*arguments: str) -> str:
        shown = CliRunner().invoke(main.app, ["prefixes", *arguments, "--url", "http://baton"])
        assert shown.exit_code == 0, shown.output
        return shown.stdout

    assert run("add", str(file), "--model", "m", "--key", "k").splitlines()[1].split(maxsplit=3) == [
        *("f00", "4113", "257"),
        "2, and 1 to come",
    ]
    assert asked == [("http://baton", {"messages": [], "model": "m"}, "k")]
    assert run("list").splitlines()[1].split() == ["f00", "4113", "257", "2"]
    assert json.loads(run("list", "--json")) == {"prefixes": [ALL]}
    assert run("remove", "f00") == "f00 is not pinned any more\n"
    monkeypatch.setattr(client, "fetch_prefixes", lambda url: {"prefixes": []})
    assert run("list") == "no prefix is pinned\n"
