"""A batch over mock engines, of which everything is killed twice in the middle.

It has 3,000 lines, and 10,000 with `--lines 200000` or more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.batches.ingress_process import CONCURRENCY
from tests.app.batches.killing import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_line_is_there_once_and_none_is_computed_twice_but_those_in_flight(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    lines = min(10_000, int(pytestconfig.getoption("lines")) // 20)
    check(tmp_path, lines, (lines // 6, lines // 2), CONCURRENCY, tokens=2, bad=100)
