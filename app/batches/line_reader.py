"""The lines of an input file, from any place on, a window at a time. It holds a piece of the file and one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from app.batches.records import Scan

PIECE = 256 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `number`: from 1, blank ones counted. `text`: without its end; None: it is over the longest."""

    number: int
    text: bytes | None


class LineReader:
    """`file`: at the offset of `scan`. `longest`: bytes of a line. Blank lines are passed over."""

    def __init__(self, file: BinaryIO, scan: Scan, longest: int) -> None:
        self._file, self._longest = file, longest
        self._line, self._offset = scan.line, scan.offset
        self._piece, self._at = b"", 0

    @property
    def scan(self) -> Scan:
        """The place after the last line that was given."""
        return Scan(self._line, self._offset)

    def window(self, most_lines: int, most_bytes: int) -> list[Line]:
        """The next lines; none at the end. One line may be over `most_bytes` alone."""
        found: list[Line] = []
        size = 0
        while len(found) < most_lines and size < most_bytes and (line := self._next()) is not None:
            if line.text is None or line.text:
                found.append(line)
                size += len(line.text or b"")
        return found

    def _next(self) -> Line | None:
        """The next line, blank or not; None at the end."""
        number, parts, length = self._line, list[bytes](), 0
        while (end := self._piece.find(b"\n", self._at)) < 0:
            parts, length = self._taken(parts, length, len(self._piece))
            self._piece, self._at = self._file.read(PIECE), 0
            if not self._piece:
                self._offset += length
                self._line += bool(length)
                return self._made(number, parts, length) if length else None
        parts, length = self._taken(parts, length, end)
        self._at = end + 1
        self._offset += length + 1
        self._line += 1
        return self._made(number, parts, length)

    def _taken(self, parts: list[bytes], length: int, end: int) -> tuple[list[bytes], int]:
        """A line with what is left of it in the piece, up to `end`. What is too long is not kept."""
        length += end - self._at
        if length > self._longest:
            return [], length
        return [*parts, self._piece[self._at : end]], length

    def _made(self, number: int, parts: list[bytes], length: int) -> Line:
        if length > self._longest:
            return Line(number, None)
        text = b"".join(parts).strip()
        return Line(number, text.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else text)
