"""What the cluster core tells the session manager, and what it does when the manager does not take it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments.cluster.notices import Notices
from deployments.cluster.timings import Timings
from deployments.errors import ReplicaCrashed, ReplicaGone, Unavailable
from deployments.host.tasks import OwnTasks
from deployments.manager.calls import Call, Close, Lost, PrefillDone, Silent, Withdraw
from deployments.messages import Mode, Placement, ReplicaInfo, Role

DECODE = ReplicaInfo("d", "decode", Role.DECODE, "node", "same", 4, 9, 9, 99)
PLACED = Placement("s", 3, Mode.DECODE_LOCAL, "", DECODE, None, 3, 60.0, 60.0)


class Manager:
    """Notes what it is told. `trouble`: "away", "hangs", or none."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.told: list[Call[Any]] = []

    async def ask(self, call: Call[Any]) -> Any:
        self.told.append(call)
        if self.trouble == "away":
            raise Unavailable("it is being restarted")
        if self.trouble == "hangs":
            await asyncio.Event().wait()
        return ("d",) if isinstance(call, Silent) else None


async def _prefill_done(notices: Notices) -> None:
    notices.prefill_done(PLACED)
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "baton-prefill-done"])


@pytest.mark.parametrize("trouble", ["", "away", "hangs"])
@pytest.mark.parametrize(
    ("notify", "call"),
    [
        (_prefill_done, PrefillDone("s", 3)),
        (lambda notices: notices.replica_lost("d"), Lost("d", gone=False)),
        (lambda notices: notices.replica_lost("d", ReplicaGone("left")), Lost("d", gone=True)),
        (lambda notices: notices.replica_lost("d", ReplicaCrashed("bad")), Lost("d", crashed=True)),
        (lambda notices: notices.close(PLACED, "length", 7, True), Close("s", 3, "length", 7, True)),
        (lambda notices: notices.withdraw("s", "cancelled"), Withdraw("s", "cancelled")),
        (lambda notices: notices.silent(["d", "p"]), Silent(("d", "p"))),
    ],
)
async def test_a_notice_says_its_message_once_and_never_raises(
    notify: Callable[[Notices], Awaitable[Any]], call: Call[Any], trouble: str
) -> None:
    manager = Manager(trouble)
    notices = Notices(manager, OwnTasks(), Timings(notice_timeout_s=0.01 if trouble == "hangs" else 60.0))
    answer = await asyncio.wait_for(notify(notices), 60.0)
    assert manager.told == [call]
    if isinstance(call, Silent):
        assert answer == (() if trouble else ("d",))
