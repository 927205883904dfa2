"""An engine that only waits for handoffs sleeps until there is news or input."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from transfer.vllm.idle_sleep import IdleSleep, engine_inputs

FAR_S = 600.0  # a sleep that ends by itself would be found by the deadline of `Sleeper.ends`
DEADLINE_S = 30.0


class Engine:
    """What vLLM's engine core looks like from further down its constructor."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.idle_sleep = self.make_scheduler()

    def make_scheduler(self) -> IdleSleep:
        return IdleSleep()


class Sleeper:
    """A thread that sleeps. `asked`: how often it has looked for news; `ended_with`: the news when it woke."""

    def __init__(self, sleep: IdleSleep, news: list[int]) -> None:
        self.news, self.asked = news, threading.Semaphore(0)
        self.ended_with: list[int] | None = None
        self._thread = threading.Thread(target=self._run, args=(sleep,), daemon=True)
        self._thread.start()

    def _run(self, sleep: IdleSleep) -> None:
        sleep.wait(self._has_news, FAR_S)
        self.ended_with = list(self.news)

    def _has_news(self) -> bool:
        self.asked.release()
        return bool(self.news)

    def looks(self) -> bool:
        """It has looked once more. It holds the queue's lock from then until it sleeps, so no event is missed."""
        return self.asked.acquire(timeout=DEADLINE_S)

    def ends(self) -> bool:
        self._thread.join(DEADLINE_S)
        return not self._thread.is_alive()


def test_input_of_the_engine_ends_it_and_stays_in_the_queue() -> None:
    engine = Engine()
    sleeper = Sleeper(engine.idle_sleep, [])
    assert sleeper.looks()
    engine.input_queue.put("request")
    assert sleeper.ends()
    assert engine.input_queue.get_nowait() == "request"


def test_news_ends_it_and_a_wake_without_news_does_not() -> None:
    engine = Engine()
    news: list[int] = []
    sleeper = Sleeper(engine.idle_sleep, news)
    assert sleeper.looks()
    engine.idle_sleep.wake()
    assert sleeper.looks()
    news.append(1)
    engine.idle_sleep.wake()
    assert sleeper.ends()
    assert sleeper.ended_with == [1]


def test_news_that_is_there_already_is_not_waited_for() -> None:
    assert Sleeper(Engine().idle_sleep, [1]).ends()


def test_input_that_is_there_already_is_not_waited_for() -> None:
    engine = Engine()
    engine.input_queue.put("request")
    assert Sleeper(engine.idle_sleep, []).ends()


def test_without_an_engine_it_sleeps_as_long_as_it_may() -> None:
    assert engine_inputs().empty()
    begun = time.monotonic()
    IdleSleep().wait(lambda: False, 0.05)
    assert time.monotonic() - begun >= 0.05
