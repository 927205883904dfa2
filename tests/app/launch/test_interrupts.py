"""Ctrl-C once, twice and three times."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from app.launch.interrupts import Interrupts

# The launcher with a Ray that takes long to stop: each line that it prints says where it is.
_LAUNCHER = """
import time
from app.launch import launcher

class Ray:
    def stop(self):
        print("stopping", flush=True)
        time.sleep(600)
    def kill(self):
        print("killed", flush=True)

def run(self):
    self._ray = Ray()
    print("running", flush=True)
    time.sleep(600)

launcher.Launcher.run = run
raise SystemExit(launcher.main([]))
"""


@pytest.mark.slow
def test_the_second_interrupt_warns_and_the_third_kills_without_a_traceback() -> None:
    command = [sys.executable, "-c", _LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        seen: list[str] = []
        for awaited in ("running", "stopping", "ending; once more to kill", "killed"):
            while awaited != (line := launcher.stdout.readline().strip()):
                assert line or launcher.poll() is None, seen
                seen.append(line)
            if awaited != "killed":
                launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
        assert launcher.stderr.read() == ""


def test_an_interrupt_outside_of_the_end_only_warns(capfd: pytest.CaptureFixture[str]) -> None:
    """The end may begin without an interrupt, and the two after the first may come before the end is under way."""
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGINT, None)
    for _ in range(3):
        interrupts(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt), interrupts.ending():
        interrupts(signal.SIGINT, None)
    interrupts(signal.SIGINT, None)
    assert capfd.readouterr().out == 4 * "ending; once more to kill\n"


def test_an_end_that_no_interrupt_began_is_warned_of_too(capfd: pytest.CaptureFixture[str]) -> None:
    interrupts = Interrupts()
    with interrupts.ending():
        interrupts(signal.SIGTERM, None)
        assert capfd.readouterr().out == "ending; once more to kill\n"
        with pytest.raises(KeyboardInterrupt):
            interrupts(signal.SIGTERM, None)
