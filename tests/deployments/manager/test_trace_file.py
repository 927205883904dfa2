"""The file of the trace: read back by the simulator, bounded, without secrets, and never in a request's way."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import BatonConfig, MockEngineConfig, PoolConfig, TraceConfig
from deployments.manager.calls import Close, Open, PrefillDone, Report
from deployments.manager.manager import SessionManager
from deployments.manager.trace_file import TraceFile, older
from deployments.manager.traffic import Line, Traffic
from deployments.messages import Admit, Phase, Reject, ReplicaInfo, ReplicaSnapshot, Role, SessionRequest
from load_tests.simulator.cluster import Options
from load_tests.simulator.experiment import make_allocator
from load_tests.simulator.metrics import Objectives
from load_tests.simulator.profiles import heterogeneous
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import TraceRequest, load

BLOCK = 16
LINE = Line(5.0, 40, 20, 50, (2**63 + 7, 8), "standard", "stop")


def opened(path: Path, **options: Any) -> TraceFile:
    return TraceFile(TraceConfig(path=path, **options), BLOCK, since_s=-1000.0)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_times_lengths_and_ids_but_no_hash_of_a_prompt(tmp_path: Path) -> None:
    trace = opened(tmp_path / "t.jsonl")
    trace.put(LINE)
    trace.put(replace(LINE, at_s=6.0, hashes=(2**63 + 7, 9)))
    trace.close()
    one, two = rows(trace.path)
    first, second = one.pop("hash_ids")
    assert one == {
        "timestamp": 1005000,
        "input_length": 40,
        "output_length": 20,
        "block_tokens": BLOCK,
        "max_tokens": 50,
        "class": "standard",
        "outcome": "stop",
    }
    assert two["hash_ids"][0] == first
    assert len({first, second, two["hash_ids"][1], 8, 9}) == 5
    assert all(0 <= each < 2**40 for each in (first, second))
    assert trace.path.stat().st_mode & 0o077 == 0


def test_each_process_has_ids_of_its_own_and_continues_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        trace = opened(tmp_path / "t.jsonl")
        trace.put(LINE)
        trace.close()
    before, after = rows(trace.path)
    assert not set(before["hash_ids"]) & set(after["hash_ids"])


def test_a_piece_of_a_line_that_a_crash_left_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = json.dumps({"timestamp": 1}) + "\n"
    path.write_text(whole + '{"timestamp": 2, "hash_ids": [' + "1," * 5000)
    trace = opened(path)
    trace.put(LINE)
    trace.close()
    assert [row["timestamp"] for row in rows(path)] == [1, 1005000]


def test_a_full_file_takes_the_place_of_the_one_before_and_the_bound_holds(tmp_path: Path) -> None:
    trace = opened(tmp_path / "t.jsonl", max_bytes=2000)
    for number in range(1000):
        trace.put(replace(LINE, at_s=float(number)))
    trace.close()
    batch = 256 * len(trace.encoded(LINE))
    sizes = [file.stat().st_size for file in (trace.path, older(trace.path))]
    assert sum(sizes) <= 2000 + 2 * batch
    assert rows(trace.path)[-1]["timestamp"] == 1_999_000
    assert sorted(tmp_path.iterdir()) == [trace.path, older(trace.path)]


def test_a_full_disk_ends_the_trace_with_one_message_and_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    write = os.write
    parts: list[int] = []

    def little_room(file: int, data: bytes) -> int:
        if parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        parts.append(write(file, data[:10]))
        return 10

    path.write_text('{"timestamp": 1}\n')
    monkeypatch.setattr(os, "write", little_room)
    with caplog.at_level(logging.ERROR, "baton.trace"):
        trace = opened(path)
        trace.put(LINE)
        trace.close()
        for _ in range(3):
            trace.put(LINE)
    assert trace.is_stopped
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert rows(path) == [{"timestamp": 1}]


def test_a_folder_that_is_not_there_ends_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "baton.trace"):
        trace = opened(tmp_path / "missing" / "t.jsonl")
        trace.close()
    assert trace.is_stopped
    assert "missing" in caplog.text


def test_the_simulator_takes_the_answer_before_for_one_that_is_not_known(tmp_path: Path) -> None:
    trace = opened(tmp_path / "t.jsonl")
    trace.put(LINE)
    trace.put(replace(LINE, at_s=6.0, output_tokens=0, outcome="refused:queue_full", hashes=()))
    trace.close()
    read = load(trace.path)
    assert read.block_tokens == BLOCK
    known, refused = read.requests
    assert (known.at_s, known.prompt_tokens, known.output_tokens, known.max_tokens) == (1005.0, 40, 20, 50)
    assert refused == TraceRequest(1006.0, 40, 20, (), asked_tokens=50)


# ---- with the session manager


def config(path: Path) -> BatonConfig:
    pool = PoolConfig(engine=MockEngineConfig(block_size=BLOCK))
    return BatonConfig(prefill=pool, decode={"main": pool}, trace=TraceConfig(path=path))


class Traced:
    """A session manager with a trace, and two replicas."""

    def __init__(self, path: Path) -> None:
        self.now_s, self._version = 0.0, 0
        made = config(path)
        assert made.trace is not None
        self.file = TraceFile(made.trace, made.block_size, since_s=0.0)
        self.traffic = Traffic(self.file.put, made.placement.default_class)
        self.manager = SessionManager(made, lambda: self.now_s, traffic=self.traffic)

    async def up(self) -> None:
        self._version += 1
        for replica_id, pool, role in (("p0", "prefill", Role.PREFILL), ("d0", "decode-main", Role.DECODE)):
            info = ReplicaInfo(replica_id, pool, role, "node", "engine", BLOCK, 1000, 8, 2048)
            await self.manager.ask(Report(ReplicaSnapshot(replica_id, self._version, Phase.READY, info)))

    async def serve(self, session_id: str, hashes: tuple[int, ...], output_tokens: int) -> None:
        request = SessionRequest(session_id, BLOCK * len(hashes) + 3, 64, hashes=hashes, client="somebody")
        answer = await self.manager.ask(Open(request))
        assert isinstance(answer, Admit)
        epoch = answer.placement.epoch
        await self.manager.ask(PrefillDone(session_id, epoch))
        await self.manager.ask(Close(session_id, epoch, "stop", output_tokens, ended=True))

    def end(self) -> None:
        self.manager.retire()
        self.traffic.end()
        self.file.close()


async def test_what_the_manager_wrote_is_read_back_and_replayed_also_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    talk = tuple(range(2**60, 2**60 + 30))
    for life in range(2):
        traced = Traced(path)
        traced.now_s = 100.0 * life
        for turn in range(10):
            traced.now_s += 1.0
            await traced.up()
            await traced.serve(f"{life}-{turn}", talk[: turn + 1], 10 + turn)
        refused = await traced.manager.ask(Open(SessionRequest(f"{life}-refused", 40, 64, priority="unknown")))
        assert isinstance(refused, Reject)
        traced.end()
    assert "somebody" not in path.read_text()
    trace = load(path)
    assert [each.output_tokens for each in trace.requests] == [*range(10, 20), 19] * 2
    assert [each.at_s for each in trace.requests[:10]] == [float(second) for second in range(1, 11)]
    replayed = trace.scaled(1.0, 22)
    options, classes = Options(seed=1), (Objectives("any", 60.0, 10.0),)
    result = Simulation(heterogeneous(3), replayed, classes, options, make_allocator).run()
    assert not any(record.refused for record in result.records)
    assert sum(record.cached_blocks for record in result.records) > 10, "turns repeat what was said"


async def test_requests_are_served_where_the_disk_takes_nothing(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "missing" / "traffic.jsonl")
    await traced.up()
    for number in range(3):
        await traced.serve(str(number), (1, 2), 5)
    traced.end()
    assert traced.file.is_stopped
