"""Processes as `/proc` shows them: those below one, and those that carry a mark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deployments.host.processes import descendants, marked

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "30"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_descendants_are_found_through_generations() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert {parent.pid, grandchild} <= descendants(os.getpid())
        assert descendants(parent.pid) == {grandchild}
        parent.communicate()
    assert not {parent.pid, grandchild} & descendants(os.getpid())


def test_the_whole_mark_is_looked_for() -> None:
    mark = f"BATON_TEST=of {os.getpid()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        command, env={**os.environ, name: value}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert marked(mark) == {child.pid}
        assert marked(mark[:-1]) == set()
        child.communicate()
    assert marked(mark) == set()


def test_this_process_is_not_among_the_marked() -> None:
    entry = next(line for line in Path("/proc/self/environ").read_text().split("\0") if line)
    assert os.getpid() not in marked(entry)
