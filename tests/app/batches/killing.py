"""A batch in processes of their own, of which everything is killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from deployments.host.processes import descendants
from deployments.host.shared_memory import PREFIXES, SEMAPHORES, remove, shared_memory_of
from load_tests.harness.application import ROOT

START_S, PATIENCE_S = 240.0, 900.0
MODEL = "smollm2-135m-instruct"


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
def ingress(folder: Path, most: int, *arguments: str) -> Iterator[Ingress]:
    """An ingress that answers so many lines. It is killed at the end of the block, with all that it has started."""
    (folder / "url").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.app.batches.ingress_process", str(folder), str(most), *arguments]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    made = None
    try:
        made = Ingress(folder, process)
        yield made
    finally:
        _kill(process)
        if made is not None:
            made.http.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """All at once, so that none ends by itself because another one has."""
    others = descendants(process.pid)
    named = shared_memory_of({process.pid, *others}, (*PREFIXES, SEMAPHORES))
    os.killpg(process.pid, signal.SIGKILL)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    remove(named)


def content(lines: int, tokens: int, bad: int) -> bytes:
    """Each line of a number that `bad` divides is no request, and vLLM's server refuses those that `bad + 1` divides.

    `tokens`: of each answer.
    """
    made = []
    for number in range(lines):
        body: dict[str, Any] = {"model": MODEL, "prompt": str(number), "max_tokens": tokens, "ignore_eos": True}
        if number % (bad + 1) == 0:
            body["temperature"] = -1
        asked = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        if number % bad == 0:
            asked["method"] = "GET"
        made.append(json.dumps(asked))
    return "\n".join(made).encode()


def check(
    folder: Path, lines: int, killed_at: Sequence[int], most_in_flight: int, *arguments: str, tokens: int, bad: int
) -> None:
    """Kill everything when so many lines are answered, and look at what there is of each line at the end.

    The lines of `killed_at` together are fewer than those that are right. `most_in_flight`: lines that run at once.
    """
    batch_id, counts = "", []
    for answered in killed_at:
        with ingress(folder, answered, *arguments) as made:
            batch_id = batch_id or made.begin(content(lines, tokens, bad))
            batch = made.until(batch_id, answered)
            assert batch["status"] == "in_progress"
            counts.append(batch["request_counts"]["completed"])
    with ingress(folder, lines, *arguments) as made:
        batch = made.until(batch_id, lines)
        assert batch["status"] == "completed", batch
        output, errors = (made.lines(batch[which]) for which in ("output_file_id", "error_file_id"))
    ids = [each["custom_id"] for each in (*output, *errors)]
    assert sorted(ids, key=int) == [str(number) for number in range(lines)]
    wrong = {str(number) for number in range(lines) if not (number % bad and number % (bad + 1))}
    assert {each["custom_id"] for each in errors} == wrong
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in output} == {tokens}
    assert batch["request_counts"] == {"total": lines, "completed": lines - len(wrong), "failed": len(wrong)}
    computed = Counter((folder / "computed").read_text().split())
    assert computed.keys() == {str(number) for number in range(lines)} - wrong
    again = computed.total() - len(computed)
    assert again <= len(killed_at) * most_in_flight, (again, counts)
