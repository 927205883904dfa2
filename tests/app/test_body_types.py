"""Fields of a body that vLLM's own checks take for objects."""

from __future__ import annotations

import pytest

from app.body_types import check_types
from app.errors import NotAnObject


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"not json",
        b'{"structured_outputs": null}',
        b'{"structured_outputs": {}}',
        b'{ "structured_outputs" : {"regex": "a"} }',
        b'{"metadata": {"structured_outputs": 1}}',
        b'["structured_outputs"]',
        b'{"structured_outputs": NaN}',
        b'{"structured_outputs": ' + b"[" * 5000,
    ],
)
def test_what_passes(body: bytes) -> None:
    check_types(body)


@pytest.mark.parametrize("value", [b"0", b"-1", b"1.5", b'"a"', b"[]", b"[{}]", b"true", b"false", b'""'])
def test_what_is_refused(value: bytes) -> None:
    with pytest.raises(NotAnObject):
        check_types(b'{"model": "m", "structured_outputs": ' + value + b"}")
