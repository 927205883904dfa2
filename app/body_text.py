"""Whether the text in a JSON body is text at all: no half of a surrogate pair, escaped or encoded."""

from __future__ import annotations

import re

from app.errors import NotText

# JSON may write a character as the two halves of a surrogate pair. One half alone is no character: no tokenizer takes
# it, and no answer could quote it. Python's JSON reader lets it pass, also encoded as bytes that are no UTF-8.
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODED = re.compile(rb"\xed[\xa0-\xbf]")
# Everything up to the first half that stands alone. Possessive, so it takes one pass and no stack.
_WHOLE = re.compile(
    rb"(?:[^\\]++"
    rb"|\\[^u]"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]"
    rb"|\\u(?![dD][89a-fA-F]))*+",
    re.DOTALL,
)


def check_text(body: bytes) -> None:
    """Raises NotText for a body in UTF-8 that holds half of a surrogate pair. A body in UTF-16 or UTF-32 passes."""
    if b"\0" in body[:4]:
        return
    if _MAY_BE_HALF.search(body):
        whole = _WHOLE.match(body)
        if whole is not None and _MAY_BE_HALF.match(body, whole.end()):
            raise NotText(f"the body holds half of a surrogate pair at byte {whole.end()}, which is no text")
    if encoded := _ENCODED.search(body):
        raise NotText(f"the body holds half of a surrogate pair at byte {encoded.start()}, which is no text")
