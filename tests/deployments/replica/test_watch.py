"""Ingresses that are gone, whose sessions end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

import pytest

from deployments.engine.protocol import EngineError
from deployments.messages import Finished
from deployments.output_stream import OutputReceiver
from tests.deployments.replica.doubles import LEASE_S, WAIT_S, Fixture, receive


async def test_an_ingress_that_dies_ends_its_runs_and_no_others(up: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = OutputReceiver("127.0.0.1")
    mine, other = await up.begin("a", reply_to=dying.address), await up.begin("b")
    up.engine.put(("a", 1, False), ("b", 1, False))
    await receive(dying)
    dying.close()
    with pytest.raises(EngineError, match="the ingress is gone"):
        await asyncio.wait_for(mine, WAIT_S)
    assert up.engine.aborted == ["a"]
    told = await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    assert told.finished == (Finished("s-a", 1, 1, orphaned=True),)
    assert list(up.replica._sender._sockets) == [up.ingress.address]
    up.engine.put(("b", 1, True))
    assert (await asyncio.wait_for(other, WAIT_S)).outcome == "finished"


@pytest.mark.slow
async def test_an_ingress_that_does_not_answer_is_gone_after_its_lease(up: Fixture) -> None:
    """Its process is stopped, say: connections stay, and nobody moves."""
    mute = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
    code = (
        f"import time, zmq; s = zmq.Context().socket(zmq.PULL); s.bind({address!r}); print(flush=True); time.sleep(999)"
    )
    mute.close()
    ingress = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        assert ingress.stdout is not None
        await asyncio.wait_for(ingress.stdout.readline(), WAIT_S)
        run = await up.begin("a", reply_to=address)
        await asyncio.sleep(2 * LEASE_S)
        assert not run.done()
        ingress.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match="the ingress is gone"):
            await asyncio.wait_for(run, WAIT_S)
    finally:
        ingress.kill()
        await ingress.wait()
