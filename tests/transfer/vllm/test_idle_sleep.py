"""An engine that only waits for handoffs sleeps until there is news or input."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from transfer.vllm.idle_sleep import Rest, engine_inputs

LONG_S = 30.0


class Engine:
    """What vLLM's engine core looks like from further down its constructor."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.rest = self.make_scheduler()

    def make_scheduler(self) -> Rest:
        return Rest()


def ends(engine: Engine, event: Any, has_news: Any = lambda: False) -> bool:
    waiting = threading.Thread(target=engine.rest.wait, args=(has_news, LONG_S))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    event()
    waiting.join(LONG_S / 3)
    return not waiting.is_alive()


def test_input_of_the_engine_ends_it_and_stays_in_the_queue() -> None:
    engine = Engine()
    assert ends(engine, lambda: engine.input_queue.put("request"))
    assert engine.input_queue.get_nowait() == "request"


def test_news_ends_it() -> None:
    engine, news = Engine(), list[int]()

    def event() -> None:
        news.append(1)
        engine.rest.wake()

    assert ends(engine, event, lambda: bool(news))


def test_waking_without_news_does_not() -> None:
    engine, news = Engine(), list[int]()
    waiting = threading.Thread(target=engine.rest.wait, args=(lambda: bool(news), LONG_S))
    waiting.start()
    engine.rest.wake()
    waiting.join(0.1)
    assert waiting.is_alive()
    news.append(1)
    engine.rest.wake()
    waiting.join(LONG_S / 3)
    assert not waiting.is_alive()


def test_what_is_there_already_is_not_waited_for() -> None:
    engine = Engine()
    engine.rest.wait(lambda: True, LONG_S)
    engine.input_queue.put("request")
    engine.rest.wait(lambda: False, LONG_S)


def test_without_an_engine_it_only_waits() -> None:
    assert engine_inputs().empty()
    Rest().wait(lambda: False, 0.001)
