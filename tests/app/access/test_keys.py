"""API keys of a file: what is found, what is refused, and that no key shows."""

from __future__ import annotations

import hashlib
import hmac
from traceback import format_exception_only
from typing import Any

import pytest

from app.access.keys import parse
from app.access.new_key import made

CLASSES = ("default", "batch")


def entry(name: str, key: str, **more: Any) -> str:
    fields = "".join(f"    {field}: {value}\n" for field, value in more.items())
    return f"  - name: {name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}\n{fields}"


def test_a_key_is_found_by_its_hash() -> None:
    keys = parse("keys:\n" + entry("a", "k1") + entry("b", "k2", admin="true", classes="[batch]"), CLASSES)
    found = keys.find(b"k2")
    assert found is not None
    assert (found.name, found.admin, found.classes) == ("b", True, ("batch",))
    assert keys.find(b"k3") is None
    assert keys.find(found.sha256.encode()) is None, "the hash opens nothing"


@pytest.mark.parametrize("key", [b"k0", b"k9", b"other", b"", b"\xff"])
def test_every_entry_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    keys = parse("keys:\n" + "".join(entry(f"n{i}", f"k{i}") for i in range(10)), CLASSES)
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys.find(key)
    assert [known.hex() for known, _ in compared] == [each.sha256 for each in keys.entries]
    assert {given for _, given in compared} == {hashlib.sha256(key).digest()}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "with a list of at least one key"),
        ("keys: []", "with a list of at least one key"),
        ("keys: [", "no YAML, in line"),
        ("keys:\n" + entry("a", "k") + entry("a", "l"), "two keys have the same name"),
        ("keys:\n" + entry("a", "k") + entry("b", "k"), "two keys have the same sha256"),
        ("keys:\n" + entry("a", "k", classes="[gold]"), "a: classes .'gold'. are not in"),
        ("keys:\n" + entry("a", "k", tokens_per_minute=0), "keys.0..tokens_per_minute: .* greater than 0"),
        ("keys:\n" + entry("a b", "k"), "keys.0..name"),
        ("keys:\n  - sha256: x", "keys.0..name: Field required; keys.0..sha256"),
    ],
)
def test_a_wrong_file_says_where(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(text, CLASSES)


@pytest.mark.parametrize(
    "text",
    [
        "keys:\n  - name: a\n    sha256: baton-secret",
        "keys:\n  - name: a\n    baton-secret: 1",
        "keys:\n  - baton-secret",
        "keys: [baton-secret, {",
        "baton-secret: 1",
        "keys: {name: baton-secret}",
    ],
)
def test_what_may_be_a_key_is_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse(text, CLASSES)
    assert "secret" not in "".join(format_exception_only(raised.value))
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_a_new_key_and_its_entry_go_together() -> None:
    key, text = made("team-a")
    keys = parse(f"keys:\n{text}", CLASSES)
    found = keys.find(key.encode())
    assert found is not None
    assert found.name == "team-a"
    assert key not in text
    assert made("team-a")[0] != key
