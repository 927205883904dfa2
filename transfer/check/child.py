"""A side of the check in a process of its own. Its methods are called by name, and every answer has a deadline.

`python -m transfer.check.child FD` is the process. The pipe tells it which side to make. It ends when the pipe ends.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from transfer.check.shape import CheckFailed
from transfer.vllm.lifeline import die_with_parent

END_S = 10.0


class Child:
    """The process. The constructor does not wait for its start.

    `timeout_s`: the longest time for every answer. The first answer includes the start.
    """

    def __init__(self, name: str, make: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> None:
        self._name, self.timeout_s, self._asked = name, timeout_s, ""
        self._pipe, theirs = Pipe()
        with theirs:
            # The output of NIXL and UCX must not mix with the figures, so the child's stdout is our stderr.
            command = [sys.executable, "-m", "transfer.check.child", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
        self._pipe.send((make, arguments))

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closing the pipe asks the process to end. It is killed if it does not end, or if something failed."""
        self._pipe.close()
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._process.kill()
        self._process.wait()

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call of a method."""
        self._asked = method
        with contextlib.suppress(OSError):  # the process is gone: its last message is read as the answer
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """The result of the call that `ask` began. Raises CheckFailed."""
        try:
            if not self._pipe.poll(self.timeout_s):
                raise CheckFailed(f"the {self._name} process did not answer {self._asked} in {self.timeout_s:g} s")
            failure, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise CheckFailed(f"the {self._name} process ended before it answered {self._asked}") from error
        if failure is not None:
            raise CheckFailed(f"the {self._name} process failed in {self._asked}: {failure}")
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and wait for its result. Raises CheckFailed."""
        self.ask(method, *arguments)
        return self.answer()


def _serve(pipe: Connection) -> None:
    """Answer calls until the pipe ends. The first failure is the last answer."""
    try:
        make, arguments = pipe.recv()
        side = make(*arguments)
        while True:
            try:
                method, values = pipe.recv()
            except EOFError:
                break
            pipe.send((None, getattr(side, method)(*values)))
        side.close()
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((f"{type(error).__name__}: {error}", None))
        raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the parent ends it
    die_with_parent()
    _serve(Connection(int(sys.argv[1])))
