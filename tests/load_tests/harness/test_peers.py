"""Peers: their command lines and files, and that their processes end in every case."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.host.processes import descendants, stat
from deployments.host.shared_memory import SHARED_MEMORY
from load_tests.harness.peers import commands, doubles, peers
from load_tests.harness.peers.doubles import Double
from load_tests.harness.peers.free_worker import TOKEN_ID, FreeWorker
from load_tests.harness.peers.group import Group, PeerError
from load_tests.harness.peers.settings import Settings, settings
from load_tests.traffic.client import Client, closed_loop
from load_tests.traffic.workloads import Shape, asks

MADE = Settings({}, "model", "folder", {"max_model_len": 2048, "enforce_eager": True}, {"OMP_NUM_THREADS": "1"})
DOUBLE = Double(0.005, MADE)


def test_arguments_become_options() -> None:
    arguments = {"max_model_len": 8, "enforce_eager": True, "async_scheduling": False, "hf_overrides": {"a": 1}}
    expected = ["--max-model-len=8", "--enforce-eager", "--no-async-scheduling", '--hf-overrides={"a": 1}']
    assert commands.options(arguments) == expected


def test_peers_get_the_arguments_of_batons_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("load_tests.harness.peers.settings.checkpoint", lambda _: "folder")
    made = settings()
    assert made.path == "folder"
    assert dict(made.arguments) == {
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": 128,
        "enforce_eager": True,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 805306368,
    }
    assert made.environment["OMP_NUM_THREADS"] == "1"
    assert "placement" not in made.serve["applications"][0]["args"], "Baton is measured with its default placement"


def test_a_configuration_of_doubles_has_no_peers() -> None:
    with pytest.raises(ValueError, match="must be vllm"):
        settings(Path(__file__).parents[3] / "configs" / "mock.yaml")


def test_vllm_is_started_twice_with_one_process_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(Group, "run", lambda _, command: ran.append(command))
    group = Group("vllm", tmp_path, {})
    try:
        urls = peers.PEERS["vllm"](group, MADE, tmp_path)
        smaller = peers.PEERS["vllm_chunk256"](group, MADE, tmp_path)
    finally:
        group.stop()
    assert len({*urls, *smaller}) == 4
    for command, url in zip(ran, urls + smaller, strict=True):
        assert {"--max-model-len=2048", "--enforce-eager", f"--port={url.rpartition(':')[2]}"} <= set(command)
        assert f"--distributed-executor-backend={peers.ONE_PROCESS}" in command
    assert ["--max-num-batched-tokens=256" in command for command in ran] == [False, False, True, True]


async def test_a_server_is_started_measured_and_ended(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    with doubles.started("starlette", DOUBLE, tmp_path) as peer:
        assert peer.ready_s > 0
        assert len(peer.group.pids()) == 1
        assert peer.group.engines() == []
        async with Client(peer.urls, peer.model) as client:
            answers = await closed_loop(client, asks(Shape("x", 4, 3), 1).__next__, 2, 0.2)
    assert answers
    assert not any(answer.error for answer in answers)
    assert descendants(os.getpid()) <= before


def test_an_engine_that_gives_way_to_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = Group("nice", tmp_path, {})
    monkeypatch.setattr(group, "engines", lambda: [group.pids()])
    try:
        group.run(["sleep", "60"])
        group.check_niceness()
        group.run(["nice", "-n", "5", "sleep", "60"])
        with pytest.raises(PeerError, match=r"nice: .*sleep.* runs at niceness"):
            until_refused(group)
    finally:
        group.stop()


def until_refused(group: Group) -> None:
    """It takes a moment until `nice` has made itself nice."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        group.check_niceness()
        time.sleep(0.01)


def test_what_a_peer_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    """A process whose parent has ended, in a session of its own, which ignores Ctrl-C."""
    script = (
        "import subprocess, sys, time\n"
        "child = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); '\n"
        "child += 'time.sleep(99)'\n"
        "made = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE, start_new_session=True)\n"
        "made.stdout.readline()\n"
        "print('up', flush=True)\n"
        "time.sleep(99)\n"
    )
    before = descendants(os.getpid())
    group = Group("made", tmp_path, {})
    group.run([sys.executable, "-c", script])
    try:
        while "up" not in (tmp_path / "made-0.log").read_text():
            group._check()
        assert len(group.pids()) == 2
    finally:
        group.stop()
    assert descendants(os.getpid()) <= before


def test_shared_memory_of_a_peer_that_is_killed_goes_with_it(tmp_path: Path) -> None:
    script = (
        "import signal, time\n"
        "from multiprocessing import get_context, resource_tracker, shared_memory\n"
        "made = shared_memory.SharedMemory(create=True, size=100)\n"
        "resource_tracker.unregister(made._name, 'shared_memory')\n"
        "lock = get_context('spawn').Lock()\n"
        "resource_tracker.unregister(lock._semlock.name, 'semaphore')\n"
        "signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGKILL))\n"
        "print('made', made.name, 'sem.' + lock._semlock.name.removeprefix('/'), flush=True)\n"
        "time.sleep(99)\n"
    )
    group = Group("made", tmp_path, {})
    group.run([sys.executable, "-c", script])
    try:
        while not (log := (tmp_path / "made-0.log").read_text()).endswith("\n"):
            group._check()
        files = [SHARED_MEMORY / name for name in log.split()[1:]]
        assert len(files) == 2
        assert all(file.exists() for file in files)
    finally:
        group.stop()
    assert not any(file.exists() for file in files)


def test_a_command_that_ends_is_an_error_with_its_log(tmp_path: Path) -> None:
    group = Group("made", tmp_path, {})
    try:
        group.run([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
        with pytest.raises(PeerError, match=r"status 3[^$]*no such model"):
            group.wait(["http://127.0.0.1:9"], "m")
    finally:
        group.stop()


class Step:
    """What the worker reads of vLLM's SchedulerOutput."""

    def __init__(self, scheduled: dict[str, int], new: dict[str, int], finished: set[str]) -> None:
        from types import SimpleNamespace

        self.num_scheduled_tokens, self.finished_req_ids = scheduled, finished
        self.scheduled_new_reqs = [
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * tokens, num_computed_tokens=0)
            for name, tokens in new.items()
        ]


def test_the_free_worker_answers_whose_prompt_is_through() -> None:
    worker = object.__new__(FreeWorker)
    worker._step_s, worker._missing = 0.0, {}
    steps = [
        Step({"a": 4, "b": 3}, {"a": 4, "b": 5}, set()),
        Step({"a": 1, "b": 2}, {}, set()),
        Step({"b": 1}, {}, {"a"}),
    ]
    outputs = [worker.execute_model(step) for step in steps]
    assert [output.sampled_token_ids for output in outputs] == [
        [[TOKEN_ID], []],
        [[TOKEN_ID], [TOKEN_ID]],
        [[TOKEN_ID]],
    ]
    assert outputs[1].req_id_to_index == {"a": 0, "b": 1}
    assert worker._missing == {"b": 0}


def test_vllm_still_has_what_the_free_worker_leans_on() -> None:
    from dataclasses import fields

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    assert {"num_scheduled_tokens", "finished_req_ids", "scheduled_new_reqs"} <= {
        f.name for f in fields(SchedulerOutput)
    }
    assert {"req_id", "prompt_token_ids", "num_computed_tokens"} <= {f.name for f in fields(NewRequestData)}
    assert "additional_config" in {f.name for f in fields(VllmConfig)}


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def states(pids: set[int]) -> set[str]:
    """The states of those that still run: "T" is stopped."""
    return {fields[0] for pid in pids if (fields := stat(pid))} - {"Z"}


def test_two_peers_at_a_time_are_paused_and_ended_apart(tmp_path: Path) -> None:
    waits = "import subprocess, sys, time; time.sleep(300)"
    groups = []
    for name in ("first", "second"):
        group = Group(name, tmp_path, {})
        group.run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"])
        until(lambda group=group: len(group.pids()) == 2)  # type: ignore[misc]  # mypy infers no default of a lambda
        group.complete()
        groups.append(group)
    first, second = groups
    left, gone = first.pids(), second.pids()
    assert not left & gone
    first.pause()
    until(lambda: states(left) == {"T"})
    assert "T" not in states(gone)
    second.stop()
    assert not states(gone)
    assert first.pids() == left
    first.stop()  # a paused process ends too
    assert not states(left)
