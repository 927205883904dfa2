"""A batch of 10,000 lines over mock engines, of which everything is killed twice in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.harness.application import ROOT
from tests.app.batches.ingress_process import CONCURRENCY

LINES = 10_000
KILLED_AT = (1500, 5000)
START_S, PATIENCE_S = 240.0, 900.0
MODEL = "smollm2-135m-instruct"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Ingress:
    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process
        self.http = httpx.Client(base_url=self._url(), timeout=60.0)

    def _url(self) -> str:
        deadline_s = time.monotonic() + START_S
        while not (self.folder / "url").exists():
            assert self.process.poll() is None, "it ended at its start"
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        return (self.folder / "url").read_text()

    def begin(self, content: bytes) -> str:
        sent = self.http.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
        asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self.http.post("/v1/batches", json=asked).json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/batches/{batch_id}").json()
        return found

    def until(self, batch_id: str, answered: int) -> dict[str, Any]:
        """The batch when so many lines are answered, or it is over."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            batch = self.batch(batch_id)
            if batch["request_counts"]["completed"] >= answered or batch["status"] not in (
                *("validating", "in_progress"),
                "finalizing",
            ):
                return batch
            assert time.monotonic() < deadline_s, batch
            time.sleep(0.05)

    def lines(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.http.get(f"/v1/files/{file_id}/content").text.splitlines()]


@contextmanager
def ingress(folder: Path) -> Iterator[Ingress]:
    """An ingress that is killed at the end of the block, with all that it has started."""
    (folder / "url").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.app.batches.ingress_process", str(folder)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    made = None
    try:
        made = Ingress(folder, process)
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if made is not None:
            made.http.close()


def content() -> bytes:
    """Every hundredth line is no request, and every hundred and first is one that vLLM's server refuses."""
    lines = []
    for number in range(LINES):
        body: dict[str, Any] = {"model": MODEL, "prompt": str(number), "max_tokens": 2, "ignore_eos": True}
        if number % 101 == 0:
            body["temperature"] = -1
        asked = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        if number % 100 == 0:
            asked["method"] = "GET"
        lines.append(json.dumps(asked))
    return "\n".join(lines).encode()


def test_every_line_is_there_once_and_none_is_computed_twice_but_those_in_flight(tmp_path: Path) -> None:
    batch_id, counts = "", []
    for killed_at in KILLED_AT:
        with ingress(tmp_path) as made:
            batch_id = batch_id or made.begin(content())
            batch = made.until(batch_id, killed_at)
            assert batch["status"] == "in_progress"
            counts.append(batch["request_counts"]["completed"])
    with ingress(tmp_path) as made:
        batch = made.until(batch_id, LINES)
        assert batch["status"] == "completed", batch
        output, errors = (made.lines(batch[which]) for which in ("output_file_id", "error_file_id"))
    ids = [each["custom_id"] for each in (*output, *errors)]
    assert sorted(ids, key=int) == [str(number) for number in range(LINES)]
    wrong = {str(number) for number in range(LINES) if not (number % 100 and number % 101)}
    assert {each["custom_id"] for each in errors} == wrong
    assert batch["request_counts"] == {"total": LINES, "completed": LINES - len(wrong), "failed": len(wrong)}
    computed = Counter((tmp_path / "computed").read_text().split())
    assert computed.keys() == {str(number) for number in range(LINES)} - wrong
    again = computed.total() - len(computed)
    assert again <= len(KILLED_AT) * CONCURRENCY, (again, counts)
