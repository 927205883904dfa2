"""A process that ends with its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A parent that a test kills. Its child holds the parent's output open, which ends when both have ended.
_CHILD = """
import time
from transfer.vllm.lifeline import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(600)
"""
_PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {_CHILD!r}], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        assert parent.poll() is None, "the child lives as long as its parent does"
        parent.kill()
        assert parent.stdout.read() == "", "the pipe ends with the last process that has it"


# Its child is told only when it is an orphan, as an engine is whose replica is killed while it starts.
_PARENT_OF_AN_ORPHAN = """
import multiprocessing, os, time
from transfer.vllm.lifeline import die_with_parent

def run(parent):
    print("up", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent()
    print("lives on", flush=True)

multiprocessing.get_context("fork").Process(target=run, args=(os.getpid(),)).start()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_whose_parent_was_killed_while_it_started_ends_as_soon_as_it_would_watch_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT_OF_AN_ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == ""
