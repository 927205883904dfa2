"""A side of a check in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from transfer.check.child import Child
from transfer.check.shape import CheckFailed

WAIT_S = 100.0  # a bound, not an expectation


class Sleeper:
    """A side that answers, fails or does neither."""

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("nothing to see")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(3)

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fail", (), "failed in fail: ValueError: nothing to see"),
        ("die", (), "ended before it answered die"),
        ("sleep", (600.0,), "did not answer sleep in 0.2 s"),
    ],
)
def test_a_process_that_gives_no_answer_is_reported_and_ended(
    method: str, arguments: tuple[float, ...], message: str
) -> None:
    pids: list[int] = []

    def use() -> None:
        with Child("test", Sleeper, (), WAIT_S) as child:
            pids.append(child.call("pid"))
            child.timeout_s = 0.2 if method == "sleep" else WAIT_S
            child.call(method, *arguments)

    with pytest.raises(CheckFailed, match=message):
        use()
    assert not Path(f"/proc/{pids[0]}").exists()
