"""A form with a file (`multipart/form-data`), piece by piece as it comes: fields are kept, the file is passed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.errors import BadBatchRequest

MOST_FIELD_BYTES = 16 * 1024
"""Of all fields together, and of the headers of one part."""
FILE = "file"


@dataclass
class _Part:
    """The part that is read now."""

    name: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    header: bytes = b""
    value: bytes = b""


class Form:
    """`content_type`: of the request. `feed` it the body; `fields`: the text of each field so far.

    `filename`: of the file; None until it has begun. Raises BadBatchRequest from all that is no such form.
    """

    def __init__(self, content_type: bytes) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadBatchRequest("the body must be a form: multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_over = False
        self._part, self._data, self._kept = _Part(), list[bytes](), 0
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        callbacks: Any = {f"on_{name}": getattr(self, f"_{name}") for name in (*names, "headers_finished", "end")}
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> bytes:
        """Take more of the body. Returns what of it is the file's."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadBatchRequest(f"the body is no form: {error}") from error
        found = b"".join(self._data)
        self._data.clear()
        return found

    # ---- what the parser calls

    def _part_begin(self) -> None:
        self._part = _Part()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += self._bounded(data, start, end)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += self._bounded(data, start, end)

    def _header_end(self) -> None:
        self._part.headers[self._part.header.lower()] = self._part.value
        self._part.header = self._part.value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        if self._part.name == FILE:
            if self.filename is not None:
                raise BadBatchRequest("the form has more than one file")
            self.filename = options.get(b"filename", b"").decode(errors="replace") or FILE

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == FILE:
            self._data.append(data[start:end])
        else:
            self._part.value += self._bounded(data, start, end)

    def _part_end(self) -> None:
        if self._part.name != FILE:
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self.is_over = True

    def _bounded(self, data: bytes, start: int, end: int) -> bytes:
        self._kept += end - start
        if self._kept > MOST_FIELD_BYTES:
            raise BadBatchRequest(f"the fields of the form are over {MOST_FIELD_BYTES} bytes")
        return data[start:end]
