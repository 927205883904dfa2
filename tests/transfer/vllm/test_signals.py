"""A signal that does not interrupt the main thread's sleep is heard all the same."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest

from transfer.vllm.idle_sleep import IdleSleep
from transfer.vllm.signals import wake_on_signals

HEARD, UNHEARD = 7, 8
WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """Python's own process that looks after spawned ones stays: no test leaves it behind."""
    resource_tracker.ensure_running()


class Engine:
    """What vLLM's engine core looks like from further down its constructor."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.idle_sleep = IdleSleep()


def idle_engine(wakes: bool, tells: Connection) -> None:
    """A process that waits for input. A thread takes the signal, so the main thread's sleep is not interrupted."""
    engine = Engine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(HEARD))
    assert not wakes or wake_on_signals(engine.idle_sleep.wake)

    def take() -> None:
        while not engine.input_queue.not_empty._waiters:  # type: ignore[attr-defined]
            time.sleep(0.01)  # the main thread does not sleep yet
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        tells.send("taken")

    threading.Thread(target=take, daemon=True).start()
    engine.input_queue.get()
    sys.exit(UNHEARD)


def ended(wakes: bool) -> int | None:
    """The exit code of an idle engine that is sent SIGTERM. None: it sleeps on."""
    context = multiprocessing.get_context("spawn")
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=idle_engine, args=(wakes, tells))
    process.start()
    try:
        if not wakes:
            assert hears.poll(WAIT_S)
        process.join(WAIT_S if wakes else 0.5)
        return process.exitcode
    finally:
        process.kill()
        process.join(WAIT_S)
        process.close()
        hears.close()
        tells.close()


def test_a_signal_that_another_thread_takes_is_heard() -> None:
    assert ended(wakes=True) == HEARD


def test_without_it_the_signal_is_pending_and_the_main_thread_sleeps() -> None:
    """If this fails, CPython or its queue has changed, and `transfer/vllm/signals.py` may not be needed any more.

    The signal may come before the main thread sleeps, and is heard then.
    """
    assert any(ended(wakes=False) is None for _ in range(5))


def test_a_process_that_is_no_engines_keeps_its_own() -> None:
    assert not wake_on_signals(lambda: None)
