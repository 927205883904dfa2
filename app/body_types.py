"""Fields of a body that vLLM's own checks take for objects. Where they are not, vLLM's server would answer 500."""

from __future__ import annotations

import msgspec

from app.errors import NotAnObject

_RAW = msgspec.Raw(b"")
_NAME = b'"structured_outputs"'


class _Objects(msgspec.Struct):
    structured_outputs: msgspec.Raw = _RAW


_OBJECTS = msgspec.json.Decoder(_Objects)


def check_types(body: bytes) -> None:
    """Raises NotAnObject. A body that is no strict JSON passes: vLLM's server says what is wrong with it."""
    if _NAME not in body:
        return
    try:
        value = bytes(memoryview(_OBJECTS.decode(body).structured_outputs)[:1])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if value not in (b"", b"{", b"n"):
        raise NotAnObject("`structured_outputs` must be an object")
