"""The store's whole interface: one frozen message per call. A call names the type of its answer.

Ingresses encode and decode responses. The store knows no more of a response than its id, its owner and its status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

RUNNING = ("queued", "in_progress")
"""The statuses of a response that is not over."""


class Call(Generic[A_co]):
    """Base of all calls; the parameter is the type of the answer."""


@dataclass(frozen=True)
class Stored:
    """A response as the store has it.

    `response`: JSON. Its status and error are overruled by `status` and by `reason`, which says why it failed. `items`:
    a JSON list, all input items that led to it. `owner`: only requests of the same owner find it.
    """

    owner: str
    status: str
    response: bytes
    items: bytes
    background: bool = False
    reason: str = ""


@dataclass(frozen=True)
class News:
    """What a background response has come to. `events`: from number `first` on, each as it is streamed."""

    status: str
    first: int = 0
    events: tuple[bytes, ...] = ()


class Verdict(Enum):
    """What the store says of a response that an ingress reports.

    `RUNS`: go on. `OVER`: it was cancelled or deleted, or counts as failed: end it. `UNKNOWN`: the store has lost it:
    begin it again.
    """

    RUNS = "runs"
    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Begin(Call[bool]):
    """A background response begins, with a lease that `Report` renews. False where there is no room for it.

    `keeps_events`: its events can be asked for.
    """

    response_id: str
    stored: Stored
    keeps_events: bool


@dataclass(frozen=True)
class Report(Call[dict[str, Verdict]]):
    """Renew the leases of background responses, and say what they have come to; by id. Repeated events are dropped."""

    news: Mapping[str, News]


@dataclass(frozen=True)
class Put(Call[bool]):
    """A response is over. False where the store does not take it: it is over already or deleted, or there is no room.

    `last`: the last events of a background response that keeps them. One that the store has lost is taken as well.
    """

    response_id: str
    stored: Stored
    last: News | None = None


@dataclass(frozen=True)
class Get(Call[Stored | None]):
    """The response with this id; None where this owner has none."""

    response_id: str
    owner: str


@dataclass(frozen=True)
class Cancel(Call[Stored | None]):
    """Cancel a response that runs, and get it; one that is over stays as it is. None where this owner has none."""

    response_id: str
    owner: str


@dataclass(frozen=True)
class Delete(Call[bool]):
    """Forget a response, and end it where it runs. False where this owner has none."""

    response_id: str
    owner: str


@dataclass(frozen=True)
class EventsSoFar:
    """The events of a background response from the asked number on; None where none are kept. `stored`: how it is."""

    events: tuple[bytes, ...] | None
    stored: Stored


@dataclass(frozen=True)
class Events(Call[EventsSoFar | None]):
    """The events of a background response from number `first` on. None where this owner has no such response."""

    response_id: str
    owner: str
    first: int


AnyCall = Begin | Report | Put | Get | Cancel | Delete | Events
Answer = bool | Stored | EventsSoFar | dict[str, Verdict] | None


class Store(Protocol):
    """Answers calls: the store itself, or a way to it."""

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call. Raises StoreAway when the store cannot be reached in time."""
