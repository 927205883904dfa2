"""What `baton doctor` finds: each check takes what was measured and gives one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MIN_FREE_BYTES, MIN_SHM_BYTES = 4 * GIB, 64 << 20
MIN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Line:
    """One result. `hint`: what to do, "" where nothing is to be done."""

    check: str
    level: Literal["ok", "warn", "fail"]
    found: str
    hint: str = ""


def python(version: tuple[int, int]) -> Line:
    """Baton runs on one minor version."""
    text = f"{version[0]}.{version[1]}"
    return Line("python", "ok", text) if text == "3.11" else Line("python", "fail", text, "use Python 3.11")


def package(name: str, found: str | None, wanted: str | None) -> Line:
    """A package against its pin. `found`: None where it is not installed. `wanted`: None for any version."""
    if found is None:
        return Line(name, "fail", "not installed", "make env installs what is needed")
    if wanted is not None and found.partition("+")[0] != wanted:
        return Line(name, "warn", f"{found}, tested with {wanted}", "make env installs the tested version")
    return Line(name, "ok", found)


def gpus(names: Sequence[str]) -> Line:
    """GPUs that the driver shows."""
    return Line("gpus", "ok", ", ".join(names) or "none: engines run on the CPU")


def cores(number: int) -> Line:
    """Cores that this process may use."""
    few = "an engine on the CPU wants a core of its own" if number < 2 else ""
    return Line("cores", "warn" if few else "ok", str(number), few)


def memory(free_bytes: int) -> Line:
    """Main memory that is available now."""
    found = f"{free_bytes / GIB:.1f} GiB available"
    if free_bytes < MIN_FREE_BYTES:
        return Line("memory", "warn", found, "an engine of a small model on the CPU takes about 2 GB")
    return Line("memory", "ok", found)


def shared_memory(free_bytes: int | None) -> Line:
    """What is free in /dev/shm, where Ray and the engines' processes share data."""
    if free_bytes is None:
        return Line("/dev/shm", "fail", "not there", "mount a tmpfs there")
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < MIN_SHM_BYTES:
        return Line("/dev/shm", "warn", found, "in a container: --shm-size, or an emptyDir in memory")
    return Line("/dev/shm", "ok", found)


def files(limit: int) -> Line:
    """The soft limit of open files; -1: none."""
    if 0 <= limit < MIN_FILES:
        return Line("open files", "warn", f"{limit} at most", f"ulimit -n {MIN_FILES} or more: each client takes some")
    return Line("open files", "ok", "no limit" if limit < 0 else f"{limit} at most")


def locked_memory(limit: int, rdma: bool) -> Line:
    """The soft limit of locked memory in bytes; -1: none. RDMA locks what it registers."""
    found = "no limit" if limit < 0 else f"{limit >> 10} KiB at most"
    if rdma and limit >= 0:
        return Line("locked memory", "warn", found, "ulimit -l unlimited: RDMA locks the KV cache")
    return Line("locked memory", "ok", found)


def huge_pages(pages: int) -> Line:
    """Huge pages that are set aside. None are needed."""
    return Line("huge pages", "ok", str(pages) if pages else "none set aside; none are needed")


def nics(names: Sequence[str], rdma: Sequence[str]) -> Line:
    """Network interfaces other than loopback, and RDMA devices."""
    return Line("network", "ok", f"{len(names)} interfaces; RDMA: {', '.join(rdma) or 'none, KV goes over TCP'}")


def ports(free: Mapping[int, bool]) -> list[Line]:
    """The default ports of `baton serve` on loopback."""
    return [
        Line(f"port {port}", "ok", "free")
        if is_free
        else Line(f"port {port}", "warn", "taken", "a Baton or a Ray runs, or choose another: baton serve --help")
        for port, is_free in free.items()
    ]


def nixl_plugins(names: Sequence[str]) -> Line:
    """The plugins that NIXL's package brings. Baton's default is UCX."""
    if "UCX" not in names:
        return Line("nixl plugins", "fail", ", ".join(names) or "none", "reinstall nixl: the plugin UCX is missing")
    return Line("nixl plugins", "ok", ", ".join(names))


def clock(source: str) -> Line:
    """The kernel's clock source, which every time stamp reads."""
    if source in ("hpet", "acpi_pm"):
        return Line("clock", "warn", source, "reading this clock is slow: tsc or kvm-clock is better")
    return Line("clock", "ok", source or "unknown")
