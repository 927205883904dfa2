"""What a worker remembers of its newest handoffs."""

from __future__ import annotations

import itertools
from typing import Any

from transfer.channel.handoff_log import KEPT, LONGEST, HandoffLog


def log(passed: list[Any] | None = None) -> HandoffLog:
    """A log by whose clock every event is a second after the one before."""
    seconds = itertools.count(1)
    trace = None if passed is None else lambda event, **fields: passed.append((event, fields))
    return HandoffLog(trace, lambda: float(next(seconds)))


def test_each_chunk_has_its_writes() -> None:
    noted = log()
    for computed in (16, 24):
        noted.note("forward_begin", "s", computed=computed)
        noted.note("layer_write", "s", layer=0, blocks=1)
        noted.note("forward_end", "s", computed=computed)
    noted.note("layer_written", "s", layer=0, ok=True, bytes=100)
    noted.note("layer_written", "s", layer=0, ok=False, bytes=50)
    noted.note("landed", "s", rank=0)
    assert noted.spans("s") == [
        {"what": "chunk", "from_s": 1.0, "to_s": 3.0, "note": "up to token 16"},
        {"what": "writes", "from_s": 2.0, "to_s": 7.0, "note": "1 writes, 100 bytes"},
        {"what": "chunk", "from_s": 4.0, "to_s": 6.0, "note": "up to token 24"},
        {"what": "writes", "from_s": 5.0, "to_s": 8.0, "note": "1 writes, 50 bytes, 1 failed"},
        {"what": "landed", "from_s": 9.0, "to_s": 9.0, "note": "all KV is written"},
    ]


def test_decodes_side_is_an_offer_and_what_became_of_it() -> None:
    noted = log()
    noted.note("offered", "s", blocks=3)
    noted.note("received", "s", ok=True)
    noted.note("received", "t", ok=False)
    assert [(each["what"], each["note"]) for each in noted.spans("s")] == [
        ("offer", "3 blocks"),
        ("received", "KV and first token are here"),
    ]
    assert [each["note"] for each in noted.spans("t")] == ["the handoff came to nothing"]


def test_it_holds_so_many_sessions_and_so_many_chunks_of_each() -> None:
    noted = log()
    for number in range(KEPT + 5):
        noted.note("offered", f"s{number}", blocks=1)
    assert noted.spans("s4") == []
    assert len(noted.spans("s5")) == 1
    for chunk in range(LONGEST + 10):
        noted.note("forward_begin", "long", computed=chunk + 1)
        noted.note("forward_end", "long", computed=chunk + 1)
    chunks = noted.spans("long")
    assert len(chunks) == LONGEST
    assert chunks[-1]["note"] == f"up to token {LONGEST + 10}"
    assert chunks[-1]["to_s"] > chunks[-2]["to_s"] + 10


def test_every_event_goes_on_to_the_trace() -> None:
    passed: list[Any] = []
    noted = log(passed)
    noted.note("offered", "s", blocks=3)
    noted.note("something new", "s", of="later")
    assert passed == [("offered", {"session": "s", "blocks": 3}), ("something new", {"session": "s", "of": "later"})]
