"""A batch of 10,000 lines over mock engines, of which everything is killed twice in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.batches.ingress_process import CONCURRENCY
from tests.app.batches.killing import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_line_is_there_once_and_none_is_computed_twice_but_those_in_flight(tmp_path: Path) -> None:
    check(tmp_path, 10_000, (1500, 5000), CONCURRENCY, tokens=2, bad=100)
