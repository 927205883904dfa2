"""The NIXL plane between two processes: bytes, coalescing, and a peer that is killed."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0  # a bound, not an expectation: starting UCX on a busy machine takes seconds
START_S = 300.0  # the same until a process first answers: its imports have taken over a minute beside starting engines
LAYERS, BLOCK_BYTES_PER_LAYER = 3, 2 * 4096


class Remote:
    """A `nixl_worker.py` process; its methods are called by name."""

    def __init__(self, name: str, timeout_s: float = WAIT_S) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "nixl_worker.py"), name, str(timeout_s)]
        environment = {**os.environ, "NIXL_LOG_LEVEL": "WARN", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answers: queue.Queue[str] = queue.Queue()
        self.patience_s = START_S
        self.reader = threading.Thread(target=self._read, name="baton-test-reader")
        self.reader.start()
        self.seen: dict[str, dict[str, Any]] = {"received": {}, "broken": {}, "released": {}}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")  # no JSON: a call that still waits for an answer fails at once

    def call(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.answers.get(timeout=self.patience_s))
        self.patience_s = WAIT_S
        return answer

    def wait(self, kind: str, session: str) -> Any:
        """Wait for a result of a session, and fail at once when the channel dies, or what should arrive is broken."""
        deadline = time.monotonic() + WAIT_S
        while session not in self.seen[kind]:
            assert time.monotonic() < deadline, f"{session} was never {kind}: {self.call('counters')}"
            results = self.call("results")
            assert "dead" not in results, results
            self.seen["received"] |= results["received"]
            self.seen["broken"] |= results["broken"]
            self.seen["released"] |= dict.fromkeys(results["released"], True)
            assert kind != "received" or session not in self.seen["broken"], self.seen["broken"][session]
            time.sleep(0.005)
        return self.seen[kind][session]

    def wait_counter(self, name: str, value: float) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.call("counters")[name] != value:
            assert time.monotonic() < deadline, self.call("counters")
            time.sleep(0.005)

    def finish(self) -> None:
        """Close in good order, or after a kill just collect what is left."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            assert json.loads(self.answers.get(timeout=WAIT_S)) == "closed"
            assert self.process.wait(WAIT_S) == 0

    def collect(self) -> None:
        """Kill it, and leave no process, pipe or thread behind."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            return


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Remote]]:
    """Three processes, started side by side; what the tests leave of them must close in good order."""
    started = {name: Remote(name) for name in ("prefill", "decode", "victim")}
    yield started
    try:
        for remote in started.values():
            remote.finish()
    finally:
        for remote in started.values():
            remote.collect()


@pytest.fixture
def prefill(workers: dict[str, Remote]) -> Remote:
    return workers["prefill"]


@pytest.fixture
def decode(workers: dict[str, Remote]) -> Remote:
    return workers["decode"]


@pytest.fixture(autouse=True)
def _no_leaks(workers: dict[str, Remote], no_leaks: None) -> None:
    """The workers outlive the tests: look at leaks once they are there."""


@pytest.mark.slow
def test_bytes_arrive_coalesced_and_nowhere_else(prefill: Remote, decode: Remote) -> None:
    peer = prefill.call("address")
    handoffs = {
        "ascending": (list(range(10, 18)), list(range(40, 48))),
        "descending": (list(range(27, 19, -1)), list(range(77, 69, -1))),
        "scattered": ([1, 5, 3, 100, 101], [0, 255, 254, 90, 91]),
        "one": ([150], [120]),
    }
    for seed, (session, (source, target)) in enumerate(handoffs.items()):
        decode.call("offer", session, peer, target)
        prefill.call("fill", source, seed)
        prompt = 4 * len(source) - 1
        for computed in sorted({max(1, prompt // 2), prompt}):
            prefill.call("save", session, computed, prompt, source)
        prefill.call("ended", session, True)
    for session, (source, target) in handoffs.items():
        assert decode.wait("received", session) is None
        assert prefill.wait("released", session)
        assert decode.call("digest", target) == prefill.call("digest", source), session
    targets = sorted(block for _, target in handoffs.values() for block in target)
    assert decode.call("touched") == targets
    counters = prefill.call("counters")
    assert counters["bytes_written"] == len(targets) * LAYERS * BLOCK_BYTES_PER_LAYER
    assert counters["handoffs_landed"] == len(handoffs)
    for remote in (prefill, decode):
        counters = remote.call("counters")
        assert counters["open_receiving"] == counters["open_writing"] == 0


@pytest.mark.slow
def test_a_cancel_in_the_middle_frees_both_sides(prefill: Remote, decode: Remote) -> None:
    decode.call("offer", "cancelled", prefill.call("address"), [1, 2, 3])
    prefill.call("save", "cancelled", 8, 12, [4, 5, 6])
    decode.call("cancel", "cancelled")
    assert decode.wait("broken", "cancelled") == "aborted"
    prefill.call("save", "cancelled", 12, 12, [4, 5, 6])
    prefill.call("ended", "cancelled", True)
    assert prefill.wait("released", "cancelled")
    prefill.wait_counter("open_writing", 0)


@pytest.mark.slow
def test_a_killed_process_fails_its_own_handoffs_only(
    prefill: Remote, decode: Remote, workers: dict[str, Remote]
) -> None:
    victim, peer, blocks = workers["victim"], prefill.call("address"), list(range(20, 220))
    before = prefill.call("counters")
    for session, target in (("not begun", range(200, 256)), ("begun", range(200))):  # its handoffs as a decode worker
        victim.call("offer", session, peer, list(target))
    prefill.wait_counter("open_writing", 2)
    prefill.call("save", "begun", 8, 800, blocks)
    prefill.wait_counter("writes", before["writes"] + LAYERS)
    for session, targets in (("a", [1, 2]), ("b", [3, 4])):  # and as a prefill worker
        decode.call("offer", session, victim.call("address"), targets)
    victim.call("save", "a", 4, 8, [5, 6])
    victim.wait_counter("writes", LAYERS)

    victim.collect()

    for session in ("a", "b"):
        assert decode.wait("broken", session) == "the prefill replica was lost"
    for session in ("begun", "not begun"):
        prefill.call("save", session, 800, 800, blocks)
        prefill.call("ended", session, True)
        assert prefill.wait("released", session)
    assert prefill.call("counters")["handoffs_failed"] == before["handoffs_failed"] + 2
    prefill.call("fill", [7, 8], 3)
    decode.call("offer", "other", peer, [1, 2])
    prefill.call("save", "other", 8, 8, [7, 8])
    prefill.call("ended", "other", True)
    assert decode.wait("received", "other") is None
    assert decode.call("digest", [1, 2]) == prefill.call("digest", [7, 8])
