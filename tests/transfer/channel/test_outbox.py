"""Reports to the engine's thread: each is given once, and each is news."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest

from transfer.channel import outbox as outbox_module
from transfer.channel.outbox import Outbox, Results, remember


def test_results_are_given_once() -> None:
    outbox = Outbox()
    outbox.received("a", 7)
    outbox.received("b", None)
    outbox.broken("c", "aborted")
    outbox.released("d")
    assert outbox.take() == Results({"a": 7, "b": None}, {"c": "aborted"}, {"d"})
    assert outbox.take() == Results()
    assert (outbox.counts["handoffs_received"], outbox.counts["handoffs_broken"]) == (2, 1)


def test_each_report_is_news_until_it_is_taken() -> None:
    outbox, calls = Outbox(), []
    outbox.on_news = lambda: calls.append(outbox.has_news)
    assert not outbox.has_news
    reports: list[Callable[[], None]] = [
        lambda: outbox.received("a", 7),
        lambda: outbox.broken("b", "aborted"),
        lambda: outbox.released("c"),
        outbox.alarm,
    ]
    for report in reports:
        report()
        assert outbox.has_news
        outbox.take()
        assert not outbox.has_news
    assert calls == [True] * 4, "the engine is told when the news is there"


def test_only_the_newest_entries_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "TOMBSTONES", 2)
    book: OrderedDict[str, int] = OrderedDict()
    for number, key in enumerate("abc"):
        remember(book, key, number)
    assert book == {"b": 1, "c": 2}
