"""A timeline in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path

from transfer.channel.trace import tracer


def test_without_a_directory_there_is_no_trace() -> None:
    assert tracer(None, "worker") is None


def test_each_event_is_a_line_at_once_behind_those_of_an_earlier_run(tmp_path: Path) -> None:
    directory, before = tmp_path / "new" / "folder", time.monotonic()
    for layer in (1, 2):
        trace = tracer(str(directory), "worker")
        assert trace is not None
        trace("layer_write", layer=layer)
        lines = [json.loads(line) for line in (directory / "worker.jsonl").read_text().splitlines()]
        assert [(line["event"], line["layer"]) for line in lines] == [("layer_write", n) for n in range(1, layer + 1)]
        assert before <= lines[-1]["t"] <= time.monotonic()
        del trace
