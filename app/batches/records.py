"""Files and batches, and how OpenAI's API shows them. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
FAILED, COMPLETED, EXPIRED, CANCELLED = "failed", "completed", "expired", "cancelled"
ACTIVE = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
"""The statuses of a batch that an ingress has yet to work on."""
UPLOAD, OUTPUT = "batch", "batch_output"
"""The purposes of files: what a client has uploaded, and what a batch has made."""
_MOMENTS = (
    *("in_progress", "finalizing", "completed", "failed"),
    *("expired", "cancelling", "cancelled"),
)


@dataclass(frozen=True)
class File:
    """One file. Times are seconds since 1970."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_s: int
    expires_s: int | None

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True)
class Asked:
    """What the client wants of a batch. `output_ttl_s`: None: as long as other files."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_ttl_s: int | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of all answers so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def shown(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def astuple(usage: Usage) -> tuple[int, int, int, int]:
    """Its numbers, in order."""
    return usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens


@dataclass(frozen=True)
class Counts:
    """Lines: all, those in the output file, those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Scan:
    """A place in the input file: all lines before `line`, which begins at byte `offset`, are answered."""

    line: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Made:
    """The files that a batch has made, by their ids; None: it has made none."""

    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True)
class Batch:
    """One batch. `outcome`: the status in which it ends; "": not certain yet. `times`: when it came into a status, in
    seconds since 1970. `epoch`: how often an ingress has taken it."""

    number: int
    id: str
    owner: str
    asked: Asked
    status: str
    created_s: int
    expires_s: int
    outcome: str = ""
    times: Mapping[str, int] = field(default_factory=dict)
    counts: Counts = Counts()
    usage: Usage = Usage()
    errors: Sequence[Mapping[str, Any]] = ()
    made: Made = Made()
    scan: Scan = Scan()
    epoch: int = 0

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.asked.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.asked.input_file_id,
            "completion_window": self.asked.completion_window,
            "status": self.status,
            **asdict(self.made),
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{moment}_at": self.times.get(moment) for moment in _MOMENTS},
            "request_counts": asdict(self.counts),
            "usage": self.usage.shown(),
            "metadata": self.asked.metadata,
        }


def page(found: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"object": "list", "data": list(found), "first_id": first, "last_id": last, "has_more": has_more}


def new_id(prefix: str) -> str:
    """An id that cannot be guessed, such as `file-` and 32 digits."""
    return f"{prefix}{uuid.uuid4().hex}"
