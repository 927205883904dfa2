"""Halves of surrogate pairs in a JSON body, however they are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.body_text import check_text
from app.errors import NotText


def is_text(body: bytes) -> bool:
    try:
        check_text(body)
    except NotText:
        return False
    return True


@given(st.text(st.sampled_from('a"\\\ud83d\ude00\udfff\u00e9\u2603\U0001f600'), max_size=12), st.booleans())
def test_a_body_is_text_when_its_strings_can_be_encoded(text: str, ascii_only: bool) -> None:
    """Python joins two halves that stand side by side when it reads them as escapes."""
    body = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        json.loads(body).encode()
        expected = True
    except UnicodeEncodeError:
        expected = False
    assert is_text(body) == expected


@pytest.mark.parametrize("body", [rb'"\\ud800"', rb'"\\\\ud83d \ud83d\ude00"', b'"\\u00e9"', b"", b'"\xed\x9f\xbf"'])
def test_what_only_looks_like_a_half_is_text(body: bytes) -> None:
    assert is_text(body)


@pytest.mark.parametrize("body", [rb'"\\\ud800"', rb'"\\ud83d\ude00"', rb'"\uD83D\u0041"', rb'"\udE00'])
def test_a_half_is_found_behind_other_escapes(body: bytes) -> None:
    assert not is_text(body)


def test_another_encoding_passes() -> None:
    assert is_text('{"a": "\ua0ed\ua0ed"}'.encode("utf-16-le"))
    assert is_text('{"a": "\ua0ed\ua0ed"}'.encode("utf-16"))
