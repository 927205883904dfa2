"""A whole Baton of a benchmark: its launcher ends with the benchmark, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from load_tests.harness.application import ROOT
from load_tests.harness.processes import began

WAIT_S = 120.0
BENCHMARK = """
import sys, time
from pathlib import Path
import yaml
from load_tests.harness.application import Application
serve = yaml.safe_load(Path("configs/mock.yaml").read_text())
print(Application(serve, Path(sys.argv[1]))._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_ends_when_its_benchmark_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        launcher = int(benchmark.stdout.readline())
        when = began(launcher)
        assert when is not None
        benchmark.send_signal(number)
        benchmark.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while began(launcher) == when:
        assert time.monotonic() < deadline, "the launcher outlives its benchmark"
        time.sleep(0.05)
