"""How many values a JSON body has. Parsing and checking a body takes time by its values rather than by its bytes.

vLLM's server parses and checks a body in one go, and the ingress serves nothing else meanwhile. So a body is weighed
first, by counts that take some milliseconds for megabytes.
"""

from __future__ import annotations

import math

import msgspec

from app.errors import TooManyValues
from app.held_response import Scope
from deployments.errors import GrammarTooLong

_NUMBERS_PER_VALUE = 16  # a number in a list, such as a token id, takes this much less time than a string or an object
_OTHERS_PER_VALUE = (
    4  # and so does what is in no conversation, such as a tool: it has fewer kinds to be checked against
)
_WEIGHT_OF_INPUT = 2  # while an item of `input` may be of some thirty kinds
_BYTES_PER_CHARACTER = 12  # at most, as JSON may write it: two halves of a surrogate pair
_SMALL_BYTES = 4096
_COUNTED = "baton.values"
_RAW = msgspec.Raw(b"")


class _Parts(msgspec.Struct):
    messages: msgspec.Raw = _RAW
    input: msgspec.Raw = _RAW
    structured_outputs: msgspec.Raw = _RAW
    response_format: msgspec.Raw = _RAW


_PARTS = msgspec.json.Decoder(_Parts)


def check_values(scope: Scope, body: bytes, most: int, most_grammar_characters: int) -> None:
    """Raises TooManyValues for a body that weighs more than `most`, and GrammarTooLong.

    A string (keys are strings, too), an object or a list weighs 1 in `messages`, 2 in `input`, and elsewhere a quarter.
    Sixteen members of a list or an object, whatever they are, weigh one more. The scope keeps the number of values.
    """
    parts = _Parts() if len(body) <= _SMALL_BYTES else _parts(body)
    if max(len(parts.structured_outputs), len(parts.response_format)) > _BYTES_PER_CHARACTER * most_grammar_characters:
        raise GrammarTooLong(f"the grammar or schema of the answer is longer than {most_grammar_characters} characters")
    scope[_COUNTED] = (len(body), count := _at_most(body))
    if _WEIGHT_OF_INPUT * count <= most:
        return
    if (weight := _weight(body, parts, most)) > most:
        raise TooManyValues(
            f"the body has too many strings, objects and lists: they weigh {weight} or more, and may weigh {most} "
            "(ingress.max_values)"
        )


def values_at_most(scope: Scope, body: bytes) -> int:
    """No less than the number of values of this body, which may be another than the one that came."""
    counted: tuple[int, int] = scope.get(_COUNTED, (-1, 0))
    return counted[1] if counted[0] == len(body) else _at_most(body)


def _weight(body: bytes, parts: _Parts, most: int) -> int:
    """The weight of a body where it is at most `most`; otherwise some number above that."""
    in_all = _values(body, _OTHERS_PER_VALUE * most)
    if in_all > _OTHERS_PER_VALUE * most:
        return math.ceil(in_all / _OTHERS_PER_VALUE)
    said, items = _values(bytes(parts.messages), most), _values(bytes(parts.input), most)
    return said + _WEIGHT_OF_INPUT * items + max(0, in_all - said - items) // _OTHERS_PER_VALUE


def _parts(body: bytes) -> _Parts:
    """The parts of a body; all of it is `messages` where it is no strict JSON."""
    try:
        return _PARTS.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Parts(messages=msgspec.Raw(body))


def _at_most(text: bytes) -> int:
    """It also counts what is inside strings."""
    return text.count(b'"') // 2 + _outside(text)


def _outside(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b",") // _NUMBERS_PER_VALUE


def _values(text: bytes, most: int) -> int:
    """The number of values where it is at most `most`; otherwise some number above that."""
    if b"\0" in text[:4]:  # UTF-16 or UTF-32
        return _at_most(text)
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text.count(b'"') // 2
    return strings if strings > most else strings + _outside(b"".join(text.split(b'"')[::2]))
