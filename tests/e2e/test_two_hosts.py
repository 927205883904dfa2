"""Prefill on one host and decode on the other, NIXL over TCP between them; the cable is cut under them.

The hosts are network namespaces of this machine. They are started as docs/guides/several-nodes.md says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from load_tests.harness.application import ROOT
from tests.e2e.client import body
from tests.e2e.cluster import MARKER, RAY_IS_SLOW, RAY_STARTS, processes
from tests.e2e.conftest import prompt
from tests.e2e.hosts import Host, NoHosts, two_hosts

URL, RAY_PORT, DASHBOARD_PORT = "http://127.0.0.1:8000", 6379, 8265
START_WITHIN_S, ANSWER_WITHIN_S, END_WITHIN_S = 480.0, 120.0, 60.0
ANSWER_TOKENS, CUT_ANSWER_TOKENS, CUT_AFTER, HANDOFF_TOKENS = 48, 240, 12, 1800
LONG_CUT_S = 75.0
SEEDS = itertools.count(70_100)
ENGINE = {"kind": "vllm", "kv_cache_memory_bytes": 268435456, "max_num_seqs": 8, "max_num_batched_tokens": 256}
"""Memory for two of the longest requests: a cut handoff holds its blocks until its writes have ended, for a minute, and
meanwhile its request is computed again beside it."""
pytestmark = [pytest.mark.engine, pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Pair:
    """A running application: its ingress, manager and prefill on `first`, its decode replica on `second`."""

    first: Host
    second: Host
    start_second: Callable[[], None]

    def begin(
        self, asked: list[int], seen: Callable[[int], None] = lambda count: None, most: int = ANSWER_TOKENS
    ) -> Future[tuple[list[int], str]]:
        """A streamed answer: its tokens, and the modes that its response's header says. `seen`: see `_stream`."""
        return self.first.call(lambda: _stream(asked, seen, most))

    def splits(self) -> bool:
        """Whether a new request is split; it is answered whole in any case."""
        tokens, mode = self.begin(prompt(next(SEEDS), 300)).result(ANSWER_WITHIN_S)
        assert len(tokens) == ANSWER_TOKENS
        return mode == "disaggregated"

    def splits_again(self) -> bool:
        """As `splits`. Where Ray gave the second host up while the cable was out, that host is started again."""
        if "raylet" not in self.second.programs():
            self.start_second()
        return self.splits()

    def prefills(self) -> bool:
        """Whether the prefill replica has computed a part of a prompt, and so has written it, and is not done yet."""
        replicas = self.status()["replicas"].values()
        return any(replica["pool"] == "prefill" and replica["used_blocks"] > 0 for replica in replicas)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The cable is out inside of the block."""
        self.second.plug(False)
        try:
            yield
        finally:
            self.second.plug(True)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.first.call(lambda: httpx.get(f"{URL}/baton/status", timeout=60.0).json()).result(
            ANSWER_WITHIN_S
        )
        return answer


def configuration(first: Host, second: Host) -> dict[str, Any]:
    """configs/cpu-1p1d.yaml with each pool on a host of its own, and KV over TCP.

    Both hosts share this machine's memory, which UCX would use if it had the choice.
    """
    serve: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "cpu-1p1d.yaml").read_text())
    arguments = serve["applications"][0]["args"]
    arguments["prefill"] |= {"engine": ENGINE, "resources": {"num_cpus": 0, "custom": {"first": 1}}}
    arguments["decode"]["main"] |= {"engine": ENGINE, "resources": {"num_cpus": 0, "custom": {"second": 1}}}
    arguments["channel"] = {"transports": "tcp"}
    arguments["prefill"]["env"] = {"UCX_NET_DEVICES": first.interface}
    arguments["decode"]["main"]["env"] = {"UCX_NET_DEVICES": second.interface}
    return serve


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The application, started on both hosts as the guide says, and stopped to its last process."""
    directory, marker = tmp_path_factory.mktemp("two-hosts"), uuid.uuid4().hex
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with contextlib.ExitStack() as stack:
        try:
            first, second = stack.enter_context(two_hosts())
        except NoHosts as error:
            pytest.skip(str(error))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True))
        ours |= {MARKER: marker, "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        stack.callback(end, marker)
        head = ["--head", f"--port={RAY_PORT}", f"--dashboard-host={first.address}", "--num-cpus=2"]
        start(first, [*head, '--resources={"first": 1}'], ours, directory)
        other = [f"--address={first.address}:{RAY_PORT}", "--num-cpus=0", '--resources={"second": 1}']
        start_second = partial(start, second, other, ours, directory)
        start_second()
        file = directory / "serve.yaml"
        file.write_text(yaml.safe_dump(configuration(first, second)))
        launch = [sys.executable, "-m", "app.launch", "--config", str(file)]
        launch += ["--ray-address", f"{first.address}:{RAY_PORT}", "--dashboard-port", str(DASHBOARD_PORT)]
        log = directory / "launch.log"
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                first.command(launch), cwd=ROOT, env=ours, stdout=output, stderr=subprocess.STDOUT
            )
        stack.callback(launcher.wait, END_WITHIN_S)
        stack.callback(launcher.send_signal, signal.SIGINT)
        deadline = time.monotonic() + START_WITHIN_S
        while "Ready in" not in log.read_text():
            assert launcher.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield Pair(first, second, start_second)


def start(host: Host, options: list[str], environment: dict[str, str], directory: Path) -> None:
    """`ray start` on a host. Its processes stay until `end`.

    Ray gives a node 30 s to register, which is not enough on a busy machine; then this starts it again.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", *options]
    path = directory / f"{host.namespace}.log"
    for _ in range(RAY_STARTS):
        with path.open("wb") as log:
            done = subprocess.run(
                host.command([*command, "--disable-usage-stats"]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=START_WITHIN_S,
                check=False,
            )
        if done.returncode == 0:
            return
        assert RAY_IS_SLOW in path.read_text(), path.read_text()[-4000:]
        host.kill_all()
        wait(lambda: not host.programs(), "what Ray has left is ended")
    pytest.fail(f"Ray did not start in {RAY_STARTS} tries: {path.read_text()[-4000:]}")


def end(marker: str) -> None:
    """Kill what is left of both Rays."""
    deadline = time.monotonic() + END_WITHIN_S
    while (left := processes(marker)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    assert not left, f"processes outlived their hosts: {left}"


def wait(happens: Callable[[], bool], what: str, within_s: float = ANSWER_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not happens():
        assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}"
        time.sleep(0.05)


def _stream(asked: list[int], seen: Callable[[int], None], most: int) -> tuple[list[int], str]:
    """`seen` is called with the number of tokens after each event of the stream."""
    tokens: list[int] = []
    request = body(asked, most, stream=True)
    with httpx.stream("POST", f"{URL}/v1/completions", json=request, timeout=ANSWER_WITHIN_S) as response:
        assert response.status_code == httpx.codes.OK, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
                seen(len(tokens))
    return tokens, response.headers["x-baton-mode"]


def test_a_request_is_prefilled_on_one_host_and_decoded_on_the_other(pair: Pair) -> None:
    tokens, mode = pair.begin(prompt(70_001, 600)).result(ANSWER_WITHIN_S)
    assert mode == "disaggregated"
    assert len(tokens) == ANSWER_TOKENS


def test_a_cable_that_is_cut_in_the_middle_of_a_handoff_changes_nothing_in_the_answer(pair: Pair) -> None:
    asked = prompt(70_002, HANDOFF_TOKENS)
    tokens_before: list[int] = []
    answer = pair.begin(asked, tokens_before.append)
    wait(lambda: pair.prefills() or answer.done(), "the prompt is being computed")
    assert not tokens_before
    with pair.cut():
        assert not answer.done()
        tokens, _ = answer.result(ANSWER_WITHIN_S)
    wait(pair.splits_again, "requests are split again", START_WITHIN_S)
    assert tokens == pair.begin(asked).result(ANSWER_WITHIN_S)[0]


def test_a_cable_that_is_cut_for_long_in_the_middle_of_an_answer_changes_nothing_in_it(pair: Pair) -> None:
    asked = prompt(70_003, 300)
    expected, _ = pair.begin(asked, most=CUT_ANSWER_TOKENS).result(ANSWER_WITHIN_S)
    has_begun = threading.Event()
    answer = pair.begin(asked, lambda count: has_begun.set() if count >= CUT_AFTER else None, CUT_ANSWER_TOKENS)
    assert has_begun.wait(ANSWER_WITHIN_S)
    with pair.cut():
        cut_s = time.monotonic()
        assert not answer.done(), "the answer was over before the cut"
        assert answer.result(ANSWER_WITHIN_S)[0] == expected
        assert pair.begin(prompt(70_004, 300)).result(ANSWER_WITHIN_S)[1] == "prefill_local"
        wait(lambda: time.monotonic() > cut_s + LONG_CUT_S, "the cable is out for long")
    wait(lambda: "raylet" not in pair.second.programs(), "the second host has heard that Ray has given it up")
    pair.start_second()
    wait(pair.splits, "requests are split again", START_WITHIN_S)
