"""Two hosts on one machine: network namespaces joined by a cable (a veth pair), and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoHosts(Exception):
    """No network namespaces can be made here; the message says why."""


@dataclass(frozen=True)
class Host:
    """A network namespace with an address of its own."""

    namespace: str
    address: str
    interface: str

    def command(self, command: list[str]) -> list[str]:
        """The command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in a thread on this host: the connections that it opens begin here."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                with (Path("/run/netns") / self.namespace).open() as namespace:
                    if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        threading.Thread(target=run, name=f"on-{self.namespace}", daemon=True).start()
        return result

    def programs(self) -> set[str]:
        """The names of the programs that run on this host."""
        found = set()
        for pid in self._pids():
            with contextlib.suppress(OSError):  # it has ended
                found.add(Path(f"/proc/{pid}/comm").read_text().strip())
        return found

    def kill_all(self) -> None:
        """Kill every program that runs on this host."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        listing = ["ip", "netns", "pids", self.namespace]
        listed = subprocess.run(listing, check=True, capture_output=True, text=True, timeout=30).stdout
        return [int(pid) for pid in listed.split()]

    def plug(self, is_in: bool) -> None:
        """Plug the cable in at this host, or pull it out. What is sent meanwhile is lost."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up" if is_in else "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else. Raises NoHosts where they cannot be made."""
    names = [f"baton-{os.getpid()}-{number}" for number in (1, 2)]
    hosts = [Host(name, f"10.77.0.{number}", f"cable{number}") for number, name in enumerate(names, 1)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(subprocess.run, ["ip", "netns", "del", host.namespace], check=False, timeout=30)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = hosts
        ends = (first.interface, "netns", first.namespace, "type", "veth", "peer", "name", second.interface)
        _ip("link", "add", *ends, "netns", second.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            host.plug(True)
        yield first, second


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise NoHosts("there is no `ip` here, which is in the package iproute2") from error
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"`ip {' '.join(arguments)}` failed: {error.stderr.strip()}") from error
